"""Queues: their names, the limits they are made with, and which routes only claims with admission see."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import Statement, array_text, statements_beside
from flowfabric.engine.core.admission import LIMITED, is_reserved
from flowfabric.model.ids import QuotaPolicyId, quota_partition
from flowfabric.model.quota import DEFAULT_KEY

SQL = statements_beside(__file__)
WRONG_QUEUES = SQL.list_wrong_queues
"""Lists queues with wrong limits. A process of a version without limits inserts queues without those of their scopes;
the next creation through a later one corrects them."""


class QuotaKey(NamedTuple):
    """A quota policy, and the key by which it counts an execution."""

    quota_policy_id: UUID
    key: str = DEFAULT_KEY


class AdmissionKey(NamedTuple):
    """The limits that executions are created with, and the key by which their lane is fair."""

    quota: QuotaKey | None = None
    attached: tuple[QuotaKey, ...] = ()
    """The keys by the quotas of their lane, namespace and kind that take a key from the execution."""
    budget_ids: tuple[UUID, ...] = ()
    fair_key: str = ""

    def digest(self) -> bytes:
        """What identifies it in the store."""
        return hashlib.sha256(msgspec.json.encode(self)).digest()


UNLIMITED = AdmissionKey()


class QueueNames(NamedTuple):
    """The names that identify a queue."""

    lane_id: str
    execution_kind: str
    namespace: str
    required: tuple[str, ...]
    admission: AdmissionKey = UNLIMITED


class QueueNumbers(NamedTuple):
    """The numbers of a queue, its route, its lane and its namespace."""

    queue_no: int
    route_no: int
    lane_no: int
    namespace_no: int


class NewQueue(NamedTuple):
    """A queue to be found or inserted: its names, and the numbers of those that have one."""

    names: QueueNames
    lane_no: int
    kind_no: int
    namespace_no: int
    capability_set_no: int


def queue_columns(queues: Sequence[NewQueue]) -> dict[str, object]:
    """The parameters by which statements find queues."""
    return {
        "lane_nos": [queue.lane_no for queue in queues],
        "kind_nos": [queue.kind_no for queue in queues],
        "namespace_nos": [queue.namespace_no for queue in queues],
        "capability_set_nos": [queue.capability_set_no for queue in queues],
        "digests": [None if queue.names.admission == UNLIMITED else queue.names.admission.digest() for queue in queues],
    }


def found_queues(queues: Sequence[NewQueue], rows: Iterable[Record]) -> dict[QueueNames, QueueNumbers]:
    """The numbers of the queues that `find_queues` has found with the limits that they should have."""
    found = {}
    for row in rows:
        if row["is_current"]:
            queue = queues[row["nth"] - 1]
            found[queue.names] = QueueNumbers(row["queue_no"], row["route_no"], queue.lane_no, queue.namespace_no)
    return found


async def lock_limits(transaction: Transaction) -> None:
    """Let no other transaction insert queues or change what limits are attached to, until this one ends.

    Otherwise a new queue could miss a limit that is being attached. Call it before locking any row.
    """
    await transaction.fetch(SQL.lock_limits)


async def insert_queues(
    transaction: Transaction, queues: Sequence[NewQueue], quota_partitions: int
) -> dict[QueueNames, QueueNumbers]:
    """Find or insert queues with all their limits, each on a route that fits them."""
    await lock_limits(transaction)
    keys = {queue.names.admission for queue in queues} - {UNLIMITED}
    if keys:
        await _insert_admission_keys(transaction, keys, quota_partitions)
    columns = queue_columns(queues)
    rows = await transaction.fetch(SQL.find_queues, **columns)
    if outdated := [row["queue_no"] for row in rows if not row["is_current"]]:
        # Inserted by a process that knows no limits.
        await set_queue_limits(transaction, outdated)
    missing = [queue for nth, queue in enumerate(queues, 1) if nth not in {row["nth"] for row in rows}]
    if missing:
        limits = await transaction.fetch(SQL.read_queue_limits, **queue_columns(missing))
        routes = await _routes(transaction, missing, [row["is_governed"] for row in limits])
        await transaction.fetch(
            SQL.insert_queues,
            route_nos=routes,
            lane_nos=[queue.lane_no for queue in missing],
            kind_nos=[queue.kind_no for queue in missing],
            namespace_nos=[queue.namespace_no for queue in missing],
            admission_key_nos=[row["admission_key_no"] for row in limits],
            quota_key_nos=[array_text(row["quota_key_nos"]) for row in limits],
            budget_ids=[array_text(row["budget_ids"]) for row in limits],
            fair_keys=[queue.names.admission.fair_key for queue in missing],
        )
    if outdated or missing:
        rows = await transaction.fetch(SQL.find_queues, **columns)
    return found_queues(queues, rows)


async def insert_quota_keys(
    transaction: Transaction, keys: Iterable[QuotaKey], quota_partitions: int
) -> dict[QuotaKey, int]:
    """The numbers of keys of quotas; those that are new are inserted."""
    found: dict[QuotaKey, int] = {}
    # In one order, so that two transactions cannot wait for each other.
    wanted = sorted(keys)
    while missing := [key for key in wanted if key not in found]:
        policies = [QuotaPolicyId(key.quota_policy_id) for key in missing]
        rows = await transaction.fetch(
            SQL.insert_quota_keys,
            partition_keys=[quota_partition(policy, quota_partitions) for policy in policies],
            quota_policy_ids=policies,
            keys=[key.key for key in missing],
        )
        found |= {missing[row["nth"] - 1]: row["quota_key_no"] for row in rows}
    return found


async def _insert_admission_keys(transaction: Transaction, keys: Iterable[AdmissionKey], quota_partitions: int) -> None:
    wanted = list(keys)
    own = [() if key.quota is None else (key.quota,) for key in wanted]
    quota_keys = {each for key, quotas in zip(wanted, own, strict=True) for each in (*quotas, *key.attached)}
    numbers = await insert_quota_keys(transaction, quota_keys, quota_partitions) if quota_keys else {}
    await transaction.fetch(
        SQL.insert_admission_keys,
        digests=[key.digest() for key in wanted],
        quota_key_nos=[array_text(numbers[each] for each in quotas) for quotas in own],
        attached_key_nos=[array_text(numbers[each] for each in key.attached) for key in wanted],
        budget_ids=[array_text(key.budget_ids) for key in wanted],
        fair_keys=[key.fair_key for key in wanted],
    )


async def _routes(transaction: Transaction, queues: Sequence[NewQueue], are_governed: Sequence[bool]) -> list[int]:
    """A route for each queue: one that only claims with admission see for those that need it, else a plain one."""
    wanted = [
        (queue.lane_no, queue.names.required, is_governed)
        for queue, is_governed in zip(queues, are_governed, strict=True)
    ]
    lane_nos = list({lane_no for lane_no, _, _ in wanted})
    known: dict[tuple[int, tuple[str, ...], bool], int] = {}
    for row in await transaction.fetch(SQL.list_routes, lane_nos=lane_nos):
        plain = plain_capabilities(row["required"])
        known.setdefault((row["lane_no"], plain, len(plain) < len(row["required"])), row["route_no"])
    for each in wanted:
        if each in known:
            continue
        lane_no, required, is_governed = each
        rows = await _until_found(
            transaction,
            SQL.insert_route,
            lane_no=lane_no,
            capability_set_no=await _capability_set_no(transaction, (*required, LIMITED) if is_governed else required),
        )
        known[each] = rows[0]["route_no"]
    return [known[each] for each in wanted]


async def set_queue_limits(transaction: Transaction, queue_nos: Sequence[int]) -> list[int]:
    """Give queues the limits that they should have now, and govern their routes; return the lanes that changed.

    The transaction has called `lock_limits`.
    """
    rows = await transaction.fetch(SQL.set_queue_limits, queue_nos=queue_nos)
    await govern_routes(transaction, {row["route_no"] for row in rows})
    return list({row["lane_no"] for row in rows})


async def govern_routes(transaction: Transaction, route_nos: Iterable[int]) -> None:
    """Hide routes from claims without admission if one of their queues has limits or their lane is fair, else show.

    The transaction has called `lock_limits`. Only the capability set of a route changes: processes keep its number.
    """
    for row in await transaction.fetch(SQL.list_governed, route_nos=sorted(route_nos)):
        plain = plain_capabilities(row["required"])
        is_hidden = len(plain) < len(row["required"])
        if row["is_governed"] == is_hidden:
            continue
        taken = {
            tuple(each["required"]) for each in await transaction.fetch(SQL.list_routes, lane_nos=[row["lane_no"]])
        }
        if row["is_governed"]:
            wanted = sorted_set((*plain, LIMITED))
            if wanted in taken:
                wanted = sorted_set((*plain, f"{LIMITED} {row['route_no']}"))
        elif (wanted := plain) in taken:
            continue
        await transaction.fetch(
            SQL.set_route_capabilities,
            route_no=row["route_no"],
            capability_set_no=await _capability_set_no(transaction, wanted),
        )


def plain_capabilities(required: Iterable[str]) -> tuple[str, ...]:
    """The capabilities of a set that workers can offer."""
    return tuple(each for each in required if not is_reserved(each))


def sorted_set(capabilities: Iterable[str]) -> tuple[str, ...]:
    """Capabilities in the order in which sets are stored."""
    return tuple(sorted(capabilities))


def capability_values(required: Sequence[str]) -> dict[str, object]:
    """The parameters of a statement that finds or inserts a capability set."""
    return {"required": list(required), "digest": hashlib.sha256(",".join(required).encode()).digest()}


async def _capability_set_no(transaction: Transaction, required: Iterable[str]) -> int:
    rows = await _until_found(transaction, SQL.insert_capability_set, **capability_values(sorted_set(required)))
    number: int = rows[0]["capability_set_no"]
    return number


async def _until_found(transaction: Transaction, statement: Statement, **values: object) -> list[Record]:
    while not (rows := await transaction.fetch(statement, **values)):
        pass
    return rows

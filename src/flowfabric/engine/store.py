"""What all operations share: the database, the translation of its faults into errors, and the ids of names."""

import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from flowfabric.db.database import ATTEMPTS, Database, Record, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.notify import Hints
from flowfabric.db.statements import Statement, statements_beside
from flowfabric.engine.core.queues import SQL as QUEUE_SQL
from flowfabric.engine.core.queues import (
    NewQueue,
    QueueNames,
    QueueNumbers,
    capability_values,
    found_queues,
    insert_queues,
    queue_columns,
)
from flowfabric.engine.core.wakeups import Wakeups
from flowfabric.engine.core.watermark import TimerWatermark
from flowfabric.model.errors import EngineError, TransportError, error
from flowfabric.model.ids import ExecutionId, Partitions

SQL = statements_beside(__file__)
Answer = TypeVar("Answer")

MAX_KIND_SETS = 1024
SLOT_SHARDS = 8
MAX_QUEUES = 100_000
"""How many queues a process caches."""
WORKER_SECONDS = 3600.0
"""How long the number of a worker process is cached; reading it again marks the process as in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The settings of a deployment that apply to all of its executions."""

    partitions: Partitions
    retention_ms: int
    instance_tag: str
    renewal_events: bool
    feed_retention_ms: int


class Store:
    """The database as the operations see it."""

    def __init__(self, database: Database, hints: Hints, rules: Rules, first: "Store | None" = None) -> None:
        self.database = database
        self.rules = rules
        self.wakeups: Wakeups = Wakeups(hints, None if first is None else first.wakeups)
        self.due_watermark = TimerWatermark(full_scan_seconds=10, margin_ms=1_000)
        self.retained_watermark = TimerWatermark(full_scan_seconds=600, margin_ms=100)
        self.projection_watermark = TimerWatermark(full_scan_seconds=60, margin_ms=1_000)
        self.slot_shard = random.randrange(SLOT_SHARDS)
        """Where this process counts the slots of quotas that it returns."""
        self._numbers: dict[tuple[str, ...], int] = {}
        self._lanes: dict[int, str] = {}
        self._workers: dict[tuple[str, str], tuple[int, float]] = {}
        self._queues: dict[QueueNames, QueueNumbers] = {}
        self._kinds: dict[tuple[str, ...], list[int]] = {}

    async def fetch(self, statement: Statement, **values: object) -> list[Record]:
        """Run one statement in its own transaction and return its rows."""
        try:
            return await self.database.fetch(statement, values)
        except StoreFault as fault:
            raise error_of(fault) from fault

    async def transact(
        self, work: Callable[[Transaction], Awaitable[Answer]], *, execution_id: ExecutionId | None = None
    ) -> Answer:
        """Run `work` in one transaction, rolled back on any fault.

        The error for a locked row names `execution_id`.
        """
        try:
            return await self.database.transact(work)
        except StoreFault as fault:
            raise error_of(fault, None if execution_id is None else f"execution {execution_id}") from fault

    async def answer(self, pending: Awaitable[Answer]) -> Answer:
        """Await the answer of a shared statement, translating a fault of the store into an error."""
        try:
            return await pending
        except StoreFault as fault:
            raise error_of(fault) from fault

    async def answers(self, pending: Awaitable[Sequence[Answer | Exception]]) -> list[Answer | EngineError]:
        """The verdicts on one caller's items; raise if all of them failed by a fault of the connection."""
        found = await pending
        if not any(isinstance(verdict, Exception) for verdict in found):
            return cast("list[Answer | EngineError]", found)
        faults = [verdict for verdict in found if isinstance(verdict, StoreFault) and verdict.is_store_failure]
        if faults and len(faults) == len(found):
            fault = faults[0]
            fault.outcome_unknown = any(each.outcome_unknown for each in faults)
            raise error_of(fault) from fault
        verdicts: list[Answer | EngineError] = []
        for verdict in found:
            if isinstance(verdict, StoreFault):
                verdicts.append(error_of(verdict))
            elif isinstance(verdict, Exception) and not isinstance(verdict, EngineError):
                raise verdict
            else:
                verdicts.append(verdict)
        return verdicts

    async def namespace_no(self, namespace: str) -> int:
        """The number of a namespace."""
        return await self._number(("namespace", namespace), SQL.insert_namespace, namespace=namespace)

    async def lane_no(self, lane_id: str, *, registered_by: str) -> int:
        """The number of a lane; its first use registers it."""
        return await self._number(("lane", lane_id), SQL.insert_lane, lane_id=lane_id, registered_by=registered_by)

    async def worker_no(self, worker_id: str, worker_instance_id: str) -> int:
        """The number of a worker process."""
        values = {"worker_id": worker_id, "worker_instance_id": worker_instance_id}
        if (known := self._known_worker(worker_id, worker_instance_id)) is not None:
            return known
        while not (rows := await self.fetch(SQL.insert_worker_identity, **values)):
            pass
        return self._remember_worker(worker_id, worker_instance_id, rows[0])

    async def worker_no_within(self, transaction: Transaction, worker_id: str, worker_instance_id: str) -> int:
        """The number of a worker process; a new one is inserted by the transaction and rolled back with it.

        Call it after locking all other rows: a transaction that inserts the same name waits until this one ends.
        """
        values = {"worker_id": worker_id, "worker_instance_id": worker_instance_id}
        if (known := self._known_worker(worker_id, worker_instance_id)) is not None:
            return known
        while not (rows := await transaction.fetch(SQL.insert_worker_identity, **values)):
            pass
        number: int = rows[0]["worker_no"]
        return number if rows[0]["is_new"] else self._remember_worker(worker_id, worker_instance_id, rows[0])

    def _known_worker(self, worker_id: str, worker_instance_id: str) -> int | None:
        known = self._workers.get((worker_id, worker_instance_id))
        return known[0] if known is not None and time.monotonic() < known[1] else None

    def _remember_worker(self, worker_id: str, worker_instance_id: str, row: Record) -> int:
        number: int = row["worker_no"]
        self._workers[worker_id, worker_instance_id] = number, time.monotonic() + WORKER_SECONDS
        return number

    def known_queue(self, names: QueueNames) -> QueueNumbers | None:
        """The numbers of a queue if this process has used it before."""
        return self._queues.get(names)

    def lane_id(self, lane_no: int) -> str:
        """The id of a lane that this process has submitted to."""
        return self._lanes[lane_no]

    async def kind_no(self, execution_kind: str) -> int:
        """The number of an execution kind."""
        return await self._number(
            ("kind", execution_kind),
            SQL.insert_kind,
            execution_kind=execution_kind,
            digest=hashlib.sha256(execution_kind.encode()).digest(),
        )

    async def kind_nos(self, kinds: tuple[str, ...]) -> list[int]:
        """The numbers of the execution kinds that a worker runs."""
        if (known := self._kinds.get(kinds)) is not None:
            return known
        numbers = [await self.kind_no(kind) for kind in kinds]
        if len(self._kinds) >= MAX_KIND_SETS:
            self._kinds.clear()
        self._kinds[kinds] = numbers
        return numbers

    async def add_queue(self, names: QueueNames, *, registered_by: str) -> QueueNumbers:
        """The numbers of a queue; its first use creates it."""
        if (known := self._queues.get(names)) is not None:
            return known
        return (await self.add_queues({names: registered_by}))[names]

    async def add_queues(self, names: Mapping[QueueNames, str]) -> Mapping[QueueNames, QueueNumbers]:
        """The numbers of queues, each given with who uses it; their first use creates them."""
        found = {each: known for each in names if (known := self._queues.get(each)) is not None}
        new = [await self._new_queue(each, registered_by) for each, registered_by in names.items() if each not in found]
        if not new:
            return found
        added = found_queues(new, await self.fetch(QUEUE_SQL.find_queues, **queue_columns(new)))
        while missing := [queue for queue in new if queue.names not in added]:

            async def insert(
                transaction: Transaction, missing: Sequence[NewQueue] = missing
            ) -> dict[QueueNames, QueueNumbers]:
                return await insert_queues(transaction, missing, self.rules.partitions.quota)

            added |= await self.transact(insert)
        if len(self._queues) + len(added) > MAX_QUEUES:
            self._queues.clear()
        self._queues |= added
        return found | added

    async def _new_queue(self, names: QueueNames, registered_by: str) -> NewQueue:
        namespace_no = await self.namespace_no(names.namespace)
        lane_no = await self.lane_no(names.lane_id, registered_by=registered_by)
        self._lanes[lane_no] = names.lane_id
        capability_set_no = await self._number(
            ("capability_set", *names.required), QUEUE_SQL.insert_capability_set, **capability_values(names.required)
        )
        return NewQueue(names, lane_no, await self.kind_no(names.execution_kind), namespace_no, capability_set_no)

    async def _number(self, key: tuple[str, ...], statement: Statement, **values: object) -> int:
        if (known := self._numbers.get(key)) is not None:
            return known
        while not (rows := await self.fetch(statement, **values)):
            pass
        number: int = rows[0][0]
        self._numbers[key] = number
        return number


def error_of(fault: StoreFault, locked: str | None = None) -> EngineError:
    """The engine's error for a fault of the store; `locked` names what the call could not lock."""
    if fault.kind == "contention":
        return error(
            "retry_exhausted",
            f"{locked or 'a row that the call needs'} is locked by another session: {ATTEMPTS} tries failed ({fault}); "
            "nothing was written, repeat the call",
        )
    return TransportError(fault.kind, str(fault), outcome_unknown=fault.outcome_unknown)

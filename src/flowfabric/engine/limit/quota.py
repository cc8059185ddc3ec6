"""Quotas: their policies, admissions by the caller's own limits, and the recount of slots."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import Statement, statements_beside
from flowfabric.engine.core.quarantine import is_connection_fault
from flowfabric.engine.core.row import lock_execution_if_exists
from flowfabric.engine.core.stored import corruption
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.execution.limits import LimitRules
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import ExecutionId, QuotaPolicyId, parse_execution_id, parse_uuid, quota_partition, row_key
from flowfabric.model.limit import check_source
from flowfabric.model.quota import (
    DEFAULT_WINDOW_SECONDS,
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    KeyState,
    QuotaAlreadySatisfied,
    QuotaChanged,
    QuotaCreated,
    QuotaLimits,
    QuotaReconcile,
    RateExceeded,
    Released,
    check_key,
    check_limits,
)

SQL = statements_beside(__file__)

PAGE_LIMIT = 10_000
"""How many keys one page of the recount looks at: each page reads what is leased."""
RECOUNT_LIMIT = 100
"""How many keys are locked together to be recounted."""
GUARD_LIMIT = 1000

logger = logging.getLogger(__name__)

AdmissionResult = Admitted | AlreadyAdmitted | RateExceeded | ConcurrencyExceeded


class Quotas:
    """The operations on quotas."""

    def __init__(self, store: Store, rules: LimitRules, return_expired: Callable[[], Awaitable[object]]) -> None:
        self._store = store
        self._rules = rules
        self._return_expired = return_expired
        """Returns the slots of expired grants."""
        self._reached = 0
        """The last key of the previous page of the sweep."""

    async def create_quota_policy(
        self,
        quota_policy_id: UUID | str,
        window_seconds: int,
        max_requests_per_window: int,
        max_concurrent: int,
        jitter_ms: int = 0,
        *,
        key_from: str | None = None,
        weight_from: str | None = None,
    ) -> QuotaCreated | QuotaAlreadySatisfied:
        """Create a quota policy; a limit of 0 is no limit, and a window of 0 seconds means 60.

        It counts each key of its own: `key_from` and `weight_from`, `'tag:<key>'` or `'payload:<JSON pointer>'`, say
        where an execution has its key, and how many tokens of the rate it takes.
        """
        policy, values = self._policy(
            quota_policy_id, window_seconds, max_requests_per_window, max_concurrent, jitter_ms, key_from, weight_from
        )
        is_new = bool(await self._store.fetch(SQL.insert_quota_policy, **values))
        self._rules.forget()
        return (QuotaCreated if is_new else QuotaAlreadySatisfied)(quota_policy_id=policy)

    async def change_quota_policy(
        self,
        quota_policy_id: UUID | str,
        window_seconds: int,
        max_requests_per_window: int,
        max_concurrent: int,
        jitter_ms: int = 0,
        *,
        key_from: str | None = None,
        weight_from: str | None = None,
    ) -> QuotaChanged:
        """Give a quota policy other limits, which hold for the next claims.

        Executions that exist keep the key and the weight with which they were created.
        """
        policy, values = self._policy(
            quota_policy_id, window_seconds, max_requests_per_window, max_concurrent, jitter_ms, key_from, weight_from
        )
        if not await self._store.fetch(SQL.set_quota_policy, **values):
            raise error("quota_policy_not_found", str(policy))
        self._rules.forget()
        await _wake(self._store, SQL.list_lanes_of_quotas)
        return QuotaChanged(quota_policy_id=policy)

    async def read_quota_policy_limits(self, quota_policy_id: UUID | str) -> QuotaLimits | None:
        """The limits of a quota policy, or None if there is no such policy."""
        policy = QuotaPolicyId(parse_uuid(quota_policy_id, "quota_policy_id"))
        rows = await self._store.fetch(SQL.read_quota_policy, **self._key(policy))
        if not rows:
            return None
        if (field := corrupt_field(rows[0])) is not None:
            raise corruption(f"quota policy {policy}", field, f"is negative: {rows[0][field]}")
        return limits_of(rows[0])

    async def check_admission(
        self,
        quota_policy_id: UUID | str,
        dimension: str = "",
        *,
        execution_id: ExecutionId | str,
        window_seconds: int,
        rate_limit: int,
        concurrency_cap: int,
        jitter_ms: int = 0,
    ) -> Admitted | AlreadyAdmitted | RateExceeded | ConcurrencyExceeded:
        """Admit an execution to one key of a quota by the limits of the caller, if they allow it.

        An admission holds for the length of the window, with a slot if there is a cap, unless it is released before.
        """
        policy = QuotaPolicyId(parse_uuid(quota_policy_id, "quota_policy_id"))
        key = check_key(dimension)
        partition, uuid = row_key(parse_execution_id(execution_id))
        limits = check_limits(
            window_seconds=window_seconds,
            max_requests_per_window=rate_limit,
            max_concurrent=concurrency_cap,
            jitter_ms=jitter_ms,
        )

        async def admit(transaction: Transaction) -> AdmissionResult:
            named = {**self._key(policy), "key": key}
            while not (locked := await transaction.fetch(SQL.lock_quota_key, **named)):
                await transaction.fetch(SQL.insert_quota_key, **named)
            subject = {
                "quota_key_no": locked[0]["quota_key_no"],
                "partition_key": partition,
                "execution_id": uuid,
            }
            (row,) = await transaction.fetch(SQL.read_standing, **subject)
            return await _admit(transaction, subject, row, limits)

        return await self._store.transact(admit)

    async def release_admission(self, quota_policy_id: UUID | str, execution_id: ExecutionId | str) -> Released:
        """Release what an execution holds of a quota: its guard and its slot, under every key; its token stays used."""
        policy = QuotaPolicyId(parse_uuid(quota_policy_id, "quota_policy_id"))
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)

        async def release(transaction: Transaction) -> list[Record]:
            await lock_execution_if_exists(transaction, parsed)
            keys = await transaction.fetch(
                SQL.list_admitting_keys, **self._key(policy), execution_partition=partition, execution_id=uuid
            )
            if not keys:
                return []
            nos = [row["quota_key_no"] for row in keys]
            await transaction.fetch(SQL.lock_quota_keys, quota_key_nos=nos)
            return await transaction.fetch(
                SQL.release_guards, quota_key_nos=nos, partition_key=partition, execution_id=uuid
            )

        freed = await self._store.transact(release, execution_id=parsed)
        await wake_lanes_of_keys(self._store, [row["quota_key_no"] for row in freed])
        return Released()

    async def reconcile_quota_counters(self) -> QuotaReconcile:
        """Correct every key of every quota whose slots in use are not those of their holders.

        Tokens older than the window and the slots of expired admissions and grants are dropped. A key that a claim has
        locked is left for the next pass.
        """
        await self._return_expired()
        seen, errors, reached = 0, 0, 0
        while True:
            row, failed = await self._reconcile_page(reached)
            seen, errors = seen + row["seen"], errors + failed
            if row["seen"] < PAGE_LIMIT:
                return QuotaReconcile(processed=seen - errors, errors=errors)
            reached = row["reached"]

    async def reconcile_batch(self) -> SweepResult:
        """Correct the next page of keys; the pages follow each other and begin again after the last."""
        row, _ = await self._reconcile_page(self._reached)
        is_full: bool = row["seen"] >= PAGE_LIMIT
        self._reached = row["reached"] if is_full else 0
        return SweepResult(len(row["miscounted"]), is_full)

    async def purge_guards(self) -> int:
        """Delete expired guards; return how many. The recount deletes those that hold slots."""
        (row,) = await self._store.fetch(SQL.take_expired_guards, limit=GUARD_LIMIT)
        purged: int = row["purged"]
        return purged

    async def _reconcile_page(self, after: int) -> tuple[Record, int]:
        """Correct a page of keys; return the page, and how many keys could not be corrected."""
        (row,) = await self._store.fetch(
            SQL.list_miscounted_keys, after=after, limit=PAGE_LIMIT, default_window_seconds=DEFAULT_WINDOW_SECONDS
        )
        found: list[int] = row["miscounted"]
        errors = 0
        for start in range(0, len(found), RECOUNT_LIMIT):
            errors += await self._recount(found[start : start + RECOUNT_LIMIT])
        return row, errors

    async def _recount(self, nos: Sequence[int]) -> int:
        """Recount keys, after a failure in halves; return how many could not be counted."""

        async def recount(transaction: Transaction) -> list[Record]:
            locked = await transaction.fetch(SQL.lock_free_quota_keys, quota_key_nos=nos)
            return await transaction.fetch(
                SQL.recount_keys,
                quota_key_nos=[row["quota_key_no"] for row in locked],
                default_window_seconds=DEFAULT_WINDOW_SECONDS,
            )

        try:
            rows = await self._store.transact(recount)
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
            if len(nos) == 1:
                logger.warning("key %d of a quota could not be recounted: %s", nos[0], fault)
                return 1
            middle = len(nos) // 2
            return await self._recount(nos[:middle]) + await self._recount(nos[middle:])
        for row in rows:
            if row["was_used"] != row["used"]:
                logger.info("slots of quota key %(quota_key_no)d: %(was_used)d counted, %(used)d held", dict(row))
        freed = [row["quota_key_no"] for row in rows if row["used"] < row["was_used"]]
        await wake_lanes_of_keys(self._store, freed)
        return 0

    def _policy(
        self,
        quota_policy_id: UUID | str,
        window_seconds: int,
        max_requests_per_window: int,
        max_concurrent: int,
        jitter_ms: int,
        key_from: str | None,
        weight_from: str | None,
    ) -> tuple[QuotaPolicyId, dict[str, object]]:
        """The id and the row of a policy of a caller."""
        policy = QuotaPolicyId(parse_uuid(quota_policy_id, "quota_policy_id"))
        limits = check_limits(
            window_seconds=window_seconds,
            max_requests_per_window=max_requests_per_window,
            max_concurrent=max_concurrent,
            jitter_ms=jitter_ms,
        )
        return policy, {
            **self._key(policy),
            "window_seconds": limits.requests_per_window_seconds,
            "max_requests_per_window": limits.max_requests_per_window,
            "max_concurrent": limits.active_concurrency_cap,
            "jitter_ms": limits.jitter_ms,
            "key_from": _check_source(key_from, "key_from"),
            "weight_from": _check_source(weight_from, "weight_from"),
        }

    def _key(self, policy: QuotaPolicyId) -> dict[str, object]:
        return {
            "partition_key": quota_partition(policy, self._store.rules.partitions.quota),
            "quota_policy_id": policy,
        }


async def _admit(
    transaction: Transaction, subject: dict[str, object], row: Record, limits: QuotaLimits
) -> AdmissionResult:
    """Admit an execution to a key that the transaction has locked, or return why it is not admitted."""
    now: int = row["now"]
    if row["is_guarded"] and (row["has_slot"] or not limits.active_concurrency_cap):
        return AlreadyAdmitted()
    taken = row["taken"] - row["expired_slots"]
    stored = list(zip(row["window_ats"], row["window_tokens"], strict=True))
    state = KeyState(limits=limits, used=max(0, taken - row["returned"]), entries=list(stored))
    state.sweep(now)
    needs = {"needs_token": not row["is_guarded"], "needs_slot": not row["has_slot"]}
    denial = state.denial(now, **needs)
    if denial is not None:
        if state.entries != stored:
            await transaction.fetch(SQL.set_window, quota_key_no=subject["quota_key_no"], **_window(state))
        return denial
    token_at: int | None = row["token_at"]
    tokens: int = row["tokens"] or 1
    takes_token = needs["needs_token"] and limits.max_requests_per_window > 0
    if takes_token and token_at is not None and token_at > now - limits.window_ms:
        state.take_back(token_at, tokens)
    entered_at = state.admit(now, **needs)
    if takes_token:
        token_at, tokens = entered_at, 1
    takes_slot = needs["needs_slot"] and limits.active_concurrency_cap > 0
    await transaction.fetch(
        SQL.write_admission,
        **subject,
        **_window(state),
        now=now,
        taken=taken + takes_slot,
        guard_until=now + limits.window_ms,
        has_slot=takes_slot,
        token_at=token_at,
        tokens=tokens,
    )
    return Admitted()


def _window(state: KeyState) -> dict[str, object]:
    return {
        "window_ats": [at for at, _ in state.entries],
        "window_tokens": [tokens for _, tokens in state.entries],
    }


def limits_of(row: Record) -> QuotaLimits:
    """The limits in a row of a quota policy; none if it is not defined."""
    return QuotaLimits(
        max_requests_per_window=row["max_requests_per_window"] or 0,
        requests_per_window_seconds=row["window_seconds"] or 0,
        active_concurrency_cap=row["max_concurrent"] or 0,
        jitter_ms=row["jitter_ms"] or 0,
    )


def corrupt_field(row: Record) -> str | None:
    """The first stored limit that is negative, if there is one."""
    fields = ("window_seconds", "max_requests_per_window", "max_concurrent", "jitter_ms")
    return next((field for field in fields if (row[field] or 0) < 0), None)


async def read_key_states(store: Store, quota_key_nos: Sequence[int]) -> tuple[int, dict[int, KeyState | None]]:
    """The time, and what these keys have admitted; without a lock, so it may change at any time.

    A key whose policy is not defined has no limits. None for a key whose limits are corrupt.
    """
    rows = await store.fetch(SQL.read_keys, quota_key_nos=quota_key_nos) if quota_key_nos else []
    states: dict[int, KeyState | None] = {}
    for row in rows:
        if corrupt_field(row) is not None:
            states[row["quota_key_no"]] = None
            continue
        entries = list(zip(row["window_ats"], row["window_tokens"], strict=True))
        state = KeyState(limits=limits_of(row), used=max(0, row["used"]), entries=entries)
        state.sweep(row["now"])
        states[row["quota_key_no"]] = state
    return (rows[0]["now"] if rows else 0), states


async def wake_lanes_of_keys(store: Store, quota_key_nos: Sequence[int]) -> None:
    """Wake the claims that may wait for slots or tokens of these keys."""
    if quota_key_nos:
        await _wake(store, SQL.list_lanes_of_keys, quota_key_nos=quota_key_nos)


async def _wake(store: Store, lanes: Statement, **values: object) -> None:
    # What frees the slots is committed: claims that are not woken find them when they next look.
    with contextlib.suppress(EngineError):
        for row in await store.fetch(lanes, **values):
            store.wakeups.lane(row["lane_id"])


def _check_source(source: str | None, field: str) -> str | None:
    return None if source is None else check_source(source, field, "invalid_quota_spec")

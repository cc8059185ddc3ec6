"""Expiry of leases, of attempts past their timeout, and of executions past their deadline."""

import logging
from collections.abc import Sequence
from enum import StrEnum
from uuid import UUID

from flowfabric.db.batch import Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds, retry_pause
from flowfabric.engine.core.quarantine import Quarantine, is_connection_fault
from flowfabric.engine.core.row import LockedExecution, Verdict, lock_execution, lock_execution_if_exists
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.core.transition import Move, after_timeout
from flowfabric.engine.core.wakeups import Work
from flowfabric.engine.store import Store
from flowfabric.model.attempt import FailureClass
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import (
    ExecutionId,
    check_storable,
    format_execution_id,
    parse_execution_id,
    row_key,
)
from flowfabric.model.lease import (
    AlreadySatisfied,
    AlreadyTerminal,
    Expired,
    ExpiredLease,
    ExpiredLeaseCursor,
    ExpiredLeases,
    Marked,
    NotYetDue,
    RetryScheduled,
)
from flowfabric.model.policy import read_stored_policy
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.model.text import check_limit, check_range, check_text, listed, shown, word_of

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

SWEEP_LIMIT = 1000
CLAIM_LIMIT = 50
"""The claims that one statement of the lease sweep reads."""
MARK_LIMIT = 10_000
"""The most leases that one sweep marks as expired, in statements of SWEEP_LIMIT each."""
MAX_BLOCKED_BATCHES = 100
"""The most batches of locked claims that one sweep skips."""
DEFAULT_LISTED = 1000
MAX_LISTED = 10_000
_EXPIRIES = frozenset({Move.DEADLINE_EXPIRED, Move.TIMEOUT_EXPIRED})
MAX_LOGGED = 20
"""How many executions the log line of a sweep names at most."""
LATEST_TIME = 2**62 - 1


class LeaseExpiry:
    """Marks expired leases, so that the next claim reclaims them, and lists them."""

    def __init__(self, store: Store, lease_ends: LeaseEnds, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._lease_ends = lease_ends

    async def mark_expired(self, execution_ids: Sequence[ExecutionId]) -> int:
        """Mark those leases of these executions that have expired; return how many."""
        return len(await self._lease_ends.expire(execution_ids))

    async def sweep(self) -> int:
        """Mark expired leases, the oldest claims first, and delete spent claims; return how many leases were marked."""
        return (await self.sweep_batch()).done

    async def sweep_batch(self) -> SweepResult:
        """Do one batch of `sweep`; it is full if it read as many claims as allowed."""
        return await self.mark_since(self._store.due_watermark.since)

    async def mark_since(self, since: int) -> SweepResult:
        """Do one batch of `sweep` for leases that expired after `since`."""
        for _ in range(MAX_BLOCKED_BATCHES):
            batch, *members = await self._take_spent(since)
            expired = [format_execution_id(row["partition_key"], row["execution_id"]) for row in members[:MARK_LIMIT]]
            work: list[Work] = []
            for first in range(0, len(expired), SWEEP_LIMIT):
                work += await self._mark(expired[first : first + SWEEP_LIMIT])
            spent: int = batch["spent"]
            if work:
                spent += (await self._take_spent(since))[0]["spent"]
            is_full = batch["claims"] >= CLAIM_LIMIT or len(members) > MARK_LIMIT
            if spent or work or not is_full:
                return SweepResult(len(work), is_full, work)
            # Other transactions hold every lease of this batch; later ones must not wait for them.
            since = batch["reached"]
        return SweepResult(0, is_full=False)

    async def _take_spent(self, since: int) -> list[Record]:
        return await self._store.fetch(
            SQL.take_spent_claims, since=since, skipped=self.quarantine.skipped(), limit=CLAIM_LIMIT
        )

    async def _mark(self, expired: Sequence[ExecutionId]) -> list[Work]:
        try:
            return await self._lease_ends.expire(expired)
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
        # One bad row must not block the others.
        work: list[Work] = []
        for execution_id in expired:
            try:
                work += await self._lease_ends.expire([execution_id])
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                self.quarantine.failed(execution_id, fault)
        return work

    async def mark_lease_expired_if_due(self, execution_id: ExecutionId | str) -> Marked | AlreadySatisfied:
        """Mark the lease of an execution as expired if it is due, so that the next claim reclaims it."""
        parsed = parse_execution_id(execution_id)
        check_storable(parsed)
        end = LeaseEnd(parsed, Move.LEASE_EXPIRED)

        async def mark(transaction: Transaction) -> tuple[list[Verdict | Locked], str]:
            locked = await lock_execution_if_exists(transaction, parsed)
            if locked is None:
                return [], "execution_not_found"
            return await self._lease_ends.within(transaction, [end]), _why_unmarked(locked)

        verdicts, reason = await self._store.transact(mark, execution_id=parsed)
        await self._lease_ends.after_commit([end] * len(verdicts), verdicts)
        is_marked = any(isinstance(verdict, Verdict) and verdict.is_done for verdict in verdicts)
        return Marked() if is_marked else AlreadySatisfied(reason=reason)

    async def list_expired_leases(
        self,
        *,
        as_of: int | None = None,
        after: ExpiredLeaseCursor | tuple[int, str] | None = None,
        limit: int = DEFAULT_LISTED,
        namespace: str | None = None,
    ) -> ExpiredLeases:
        """List leases that expire by a time, marked or not, in order of expiry; the cursor continues the list."""
        if as_of is not None:
            check_range(as_of, "as_of", 0, LATEST_TIME)
        limit = check_limit(limit, MAX_LISTED)
        if namespace is not None:
            check_text(namespace, "namespace")
        expires_at, id_text = _after(after)
        rows = await self._store.fetch(
            SQL.list_expired_leases,
            as_of=as_of,
            after_expires_at=expires_at,
            after_id=id_text,
            limit=limit,
            namespace=namespace,
        )
        entries = tuple(
            ExpiredLease(
                execution_id=ExecutionId(row["id"]),
                lease_id=row["lease_id"],
                lease_epoch=row["lease_epoch"],
                worker_instance_id=row["worker_instance_id"],
                expires_at_ms=row["lease_expires_at"],
                attempt_index=row["attempt_index"],
            )
            for row in rows
        )
        cursor = None
        if entries and len(entries) == limit:
            cursor = ExpiredLeaseCursor(entries[-1].expires_at_ms, entries[-1].execution_id)
        return ExpiredLeases(entries=entries, cursor=cursor)


class ExpiryPhase(StrEnum):
    """Which time limit has passed; stored as the failure reason of the execution."""

    ATTEMPT_TIMEOUT = "attempt_timeout"
    EXECUTION_DEADLINE = "execution_deadline"


class Timeouts:
    """Ends or retries runs past their attempt timeout, and ends executions past their deadline."""

    def __init__(self, store: Store, lease_ends: LeaseEnds, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._lease_ends = lease_ends

    async def expire_due(self) -> int:
        """Expire executions past their attempt timeout or deadline, the oldest first; return how many."""
        return await self.quarantine.sweep(self._expire_together, self._expire_alone, limit=SWEEP_LIMIT)

    async def _expire_together(self, skipped: Sequence[UUID], found: list[ExecutionId]) -> int:
        since = self._store.due_watermark.since

        async def expire(transaction: Transaction) -> tuple[list[LeaseEnd], list[Verdict | Locked]]:
            rows = await transaction.fetch(SQL.lock_expired, since=since, skipped=skipped, limit=SWEEP_LIMIT)
            found[:] = [format_execution_id(row["partition_key"], row["execution_id"]) for row in rows]
            lease_ends = [
                _expiry(row, ExpiryPhase.EXECUTION_DEADLINE if row["past_deadline"] else ExpiryPhase.ATTEMPT_TIMEOUT)
                for row in rows
            ]
            return lease_ends, await self._lease_ends.within(transaction, lease_ends) if lease_ends else []

        lease_ends, verdicts = await self._store.transact(expire)
        await self._lease_ends.after_commit(lease_ends, verdicts)
        _log_expired([end.execution_id for end in lease_ends if end.move in _EXPIRIES])
        return len(lease_ends)

    async def _expire_alone(self, execution_id: ExecutionId) -> bool:
        for phase in (ExpiryPhase.EXECUTION_DEADLINE, ExpiryPhase.ATTEMPT_TIMEOUT):
            answer = await self.expire_execution(execution_id, phase)
            if isinstance(answer, Expired):
                _log_expired([execution_id])
            if isinstance(answer, Expired | RetryScheduled):
                return True
        return False

    async def expire_execution(
        self, execution_id: ExecutionId | str, phase: ExpiryPhase | str
    ) -> Expired | RetryScheduled | AlreadyTerminal | NotYetDue:
        """Expire an execution whose attempt timeout or deadline has passed."""
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        which = word_of(ExpiryPhase, phase)
        if which is None:
            raise error("invalid_input", f"phase: expected one of {', '.join(ExpiryPhase)}, got {phase!r}")

        async def expire(
            transaction: Transaction,
        ) -> tuple[LeaseEnd, list[Verdict | Locked]] | AlreadyTerminal | NotYetDue:
            locked = await lock_execution(transaction, parsed)
            if locked.lifecycle_phase == LifecyclePhase.TERMINAL:
                return AlreadyTerminal()
            (row,) = await transaction.fetch(SQL.read_expiry, partition_key=partition, execution_id=uuid)
            if not row["past_deadline" if which is ExpiryPhase.EXECUTION_DEADLINE else "past_timeout"]:
                return NotYetDue()
            lease_end = _expiry(row, which)
            return lease_end, await self._lease_ends.within(transaction, [lease_end])

        found = await self._store.transact(expire, execution_id=parsed)
        if not isinstance(found, tuple):
            return found
        lease_end, verdicts = found
        await self._lease_ends.after_commit([lease_end], verdicts)
        (verdict,) = verdicts
        if isinstance(verdict, Verdict) and verdict.delay_until is not None:
            return RetryScheduled(delay_until=verdict.delay_until)
        return Expired(execution_id=parsed)


def _expiry(row: Record, phase: ExpiryPhase) -> LeaseEnd:
    execution_id = format_execution_id(row["partition_key"], row["execution_id"])
    category = FailureClass.TIMEOUT.value
    lost_epoch = row["lease_epoch"] if row["lifecycle_phase"] == LifecyclePhase.ACTIVE else None
    if phase is ExpiryPhase.EXECUTION_DEADLINE:
        return LeaseEnd(
            execution_id, Move.DEADLINE_EXPIRED, reason=phase.value, category=category, lost_epoch=lost_epoch
        )
    delay_ms = retry_pause(read_stored_policy(row["policy"]), row["retry_count"], category)
    return LeaseEnd(
        execution_id,
        after_timeout(delay_ms),
        reason=phase.value,
        category=category,
        delay_ms=delay_ms,
        lost_epoch=lost_epoch,
    )


def _log_expired(expired: Sequence[ExecutionId]) -> None:
    """Log which executions a sweep has expired: no worker logs those that were waiting for one."""
    if expired:
        logger.info("expired past their timeout or deadline: %s", listed(expired, most=MAX_LOGGED))


_UNMARKED = {
    OwnershipState.LEASE_EXPIRED_RECLAIMABLE: "already_expired",
    OwnershipState.LEASE_REVOKED: "already_revoked",
    OwnershipState.UNOWNED: "unowned",
    OwnershipState.LEASED: "not_yet_expired",
}


def _why_unmarked(locked: LockedExecution) -> str:
    if locked.lifecycle_phase != LifecyclePhase.ACTIVE:
        return "not_active"
    return _UNMARKED[OwnershipState(locked.ownership_state)]


def _after(cursor: object) -> tuple[int | None, str | None]:
    if cursor is None:
        return None, None
    if not isinstance(cursor, tuple) or len(cursor) != 2:
        raise error("invalid_input", f"after: expected the cursor of an earlier page, got {shown(cursor)}")
    check_range(cursor[0], "after.expires_at_ms", 0, 2**63 - 1)
    return cursor[0], parse_execution_id(cursor[1])

"""Suspension timeouts, and the expiry of pending waitpoints that no suspend used."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from uuid import UUID

from flowfabric.db.batch import Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.core.row import Verdict, execution_keys, lock_execution_if_exists
from flowfabric.engine.core.transition import ESCALATED, SUSPENSION_TIMEOUTS
from flowfabric.engine.store import Store
from flowfabric.engine.wait.resume import TIMED_OUT, Resume, Resumes
from flowfabric.model.attempt import FailureClass
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import (
    ExecutionId,
    SignalId,
    check_storable,
    format_execution_id,
    parse_execution_id,
    split_execution_id,
    uuid7,
)
from flowfabric.model.lease import AlreadySatisfied
from flowfabric.model.signal import SignalDisposition, TimeoutSignal
from flowfabric.model.states import CancelSource, LifecyclePhase, TimeoutBehavior
from flowfabric.model.suspension import SuspensionExpired, SuspensionReason, read_stored_timeout_behavior
from flowfabric.model.waitpoint import CloseReason

SQL = statements_beside(__file__)

TIMEOUT_LIMIT = 100
WAITPOINT_LIMIT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class _TimedOut:
    """A suspension past its timeout, and its execution."""

    execution_id: ExecutionId
    suspension: Record
    behavior: TimeoutBehavior


@dataclass(kw_only=True, slots=True)
class _Applied:
    """The results of applied timeouts, for the work after the commit."""

    behaviors: list[TimeoutBehavior] = field(default_factory=list)
    lease_ends: list[LeaseEnd] = field(default_factory=list)
    verdicts: list[Verdict | Locked] = field(default_factory=list)
    resumed: list[Record] = field(default_factory=list)


class SuspensionTimeouts:
    """Applies the timeouts of suspensions and pending waitpoints."""

    def __init__(
        self,
        store: Store,
        lease_ends: LeaseEnds,
        resumes: Resumes,
        quarantine: Quarantine,
        waitpoint_quarantine: Quarantine,
    ) -> None:
        self.quarantine = quarantine
        self.waitpoint_quarantine = waitpoint_quarantine
        self._store = store
        self._lease_ends = lease_ends
        self._resumes = resumes

    async def expire_suspension(self, execution_id: ExecutionId | str) -> SuspensionExpired | AlreadySatisfied:
        """Apply the timeout behavior of a suspension if it is due."""
        parsed = parse_execution_id(execution_id)
        check_storable(parsed)

        async def expire(transaction: Transaction) -> _Applied | AlreadySatisfied:
            locked = await lock_execution_if_exists(transaction, parsed)
            if locked is None:
                return AlreadySatisfied(reason="not_found_cleaned")
            if locked.lifecycle_phase != LifecyclePhase.SUSPENDED:
                return AlreadySatisfied(reason="not_suspended_cleaned")
            rows = await self._suspensions(transaction, [parsed])
            if not rows:
                return AlreadySatisfied(reason="no_active_suspension_cleaned")
            if not _is_due(rows[0]):
                return AlreadySatisfied(reason="not_yet_due")
            return await self._apply(transaction, [_timed_out(parsed, rows[0])])

        applied = await self._store.transact(expire, execution_id=parsed)
        if isinstance(applied, AlreadySatisfied):
            return applied
        await self._after_commit(applied)
        return SuspensionExpired(behavior_applied=applied.behaviors[0])

    async def expire_due(self) -> int:
        """Apply the timeouts of due suspensions, the oldest first; return how many."""

        async def expire_one(execution_id: ExecutionId) -> bool:
            return isinstance(await self.expire_suspension(execution_id), SuspensionExpired)

        return await self.quarantine.sweep(self._expire_batch, expire_one, limit=TIMEOUT_LIMIT)

    async def _expire_batch(self, skipped: Sequence[UUID], found: list[ExecutionId]) -> int:
        since = self._store.due_watermark.since
        unusable: dict[ExecutionId, object] = {}

        async def expire(transaction: Transaction) -> _Applied:
            rows = await transaction.fetch(SQL.lock_timed_out, since=since, skipped=skipped, limit=TIMEOUT_LIMIT)
            found[:] = [format_execution_id(row["partition_key"], row["execution_id"]) for row in rows]
            unusable.clear()
            unusable.update(dict.fromkeys(found, "it has no due suspension"))
            due: list[_TimedOut] = []
            for row in await self._suspensions(transaction, found) if found else ():
                execution_id = found[row["nth"] - 1]
                if _is_due(row):
                    try:
                        due.append(_timed_out(execution_id, row))
                        del unusable[execution_id]
                    except EngineError as unreadable:
                        unusable[execution_id] = unreadable
            return await self._apply(transaction, due)

        applied = await self._store.transact(expire)
        for execution_id, problem in unusable.items():
            self.quarantine.failed(execution_id, problem)
        await self._after_commit(applied)
        return len(applied.behaviors)

    async def close_pending(self) -> int:
        """Close pending waitpoints that expired before a suspend used them, the oldest first; return how many."""

        async def close(*, only: Sequence[str] | None, skipped: Sequence[UUID]) -> int:
            (row,) = await self._store.fetch(
                SQL.expire_pending_waitpoints,
                only=only,
                skipped=skipped,
                limit=WAITPOINT_LIMIT,
                close_reason=CloseReason.NEVER_COMMITTED,
            )
            closed: int = row["closed"]
            return closed

        async def close_batch(skipped: Sequence[UUID]) -> int:
            return await close(only=None, skipped=skipped)

        async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
            rows = await self._store.fetch(SQL.list_pending_waitpoints, skipped=skipped, limit=WAITPOINT_LIMIT)
            return list(dict.fromkeys(format_execution_id(row["partition_key"], row["execution_id"]) for row in rows))

        async def close_items(execution_ids: Sequence[ExecutionId]) -> int:
            return await close(only=[split_execution_id(each)[1] for each in execution_ids], skipped=())

        return await self.waitpoint_quarantine.sweep_by_halves(
            close_batch, list_due, close_items, limit=WAITPOINT_LIMIT
        )

    @staticmethod
    async def _suspensions(transaction: Transaction, execution_ids: Sequence[ExecutionId]) -> list[Record]:
        return await transaction.fetch(SQL.list_open_suspensions, **execution_keys(execution_ids))

    async def _apply(self, transaction: Transaction, due: Sequence[_TimedOut]) -> _Applied:
        """Apply the timeouts of suspensions whose executions the transaction has locked."""
        applied = _Applied(behaviors=[each.behavior for each in due])
        applied.lease_ends = [
            suspension_end(each.execution_id, each.behavior) for each in due if each.behavior in SUSPENSION_TIMEOUTS
        ]
        if applied.lease_ends:
            applied.verdicts = await self._lease_ends.within(transaction, applied.lease_ends)
        resumed = [each for each in due if each.behavior is TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL]
        if resumed:
            applied.resumed = await self._resume(transaction, resumed)
        escalated = [each.execution_id for each in due if each.behavior is TimeoutBehavior.ESCALATE]
        if escalated:
            reason = SuspensionReason.WAITING_FOR_OPERATOR_REVIEW
            await transaction.fetch(SQL.escalate_locked, **execution_keys(escalated), reason_code=reason, **ESCALATED)
        return applied

    async def _resume(self, transaction: Transaction, due: Sequence[_TimedOut]) -> list[Record]:
        signal_ids = [SignalId(uuid7()) for _ in due]
        await transaction.fetch(
            SQL.insert_timeout_signals,
            **execution_keys(each.execution_id for each in due),
            signal_ids=signal_ids,
            suspension_ids=[each.suspension["suspension_id"] for each in due],
            now=due[0].suspension["now"],
            disposition=SignalDisposition.RESUME_CONDITION_SATISFIED,
            **asdict(TimeoutSignal()),
        )
        resumes = [
            Resume(execution_id=each.execution_id, satisfiers=[*each.suspension["satisfier_ids"], signal_id])
            for each, signal_id in zip(due, signal_ids, strict=True)
        ]
        return await self._resumes.within(transaction, resumes, TIMED_OUT)

    async def _after_commit(self, applied: _Applied) -> None:
        await self._lease_ends.after_commit(applied.lease_ends, applied.verdicts)
        self._resumes.after_commit(applied.resumed, TIMED_OUT)


def suspension_end(execution_id: ExecutionId, behavior: TimeoutBehavior) -> LeaseEnd:
    """The lease end of a timeout behavior that ends the execution: one of SUSPENSION_TIMEOUTS."""
    return LeaseEnd(
        execution_id,
        SUSPENSION_TIMEOUTS[behavior],
        reason=f"suspension_timeout:{behavior}",
        category=FailureClass.TIMEOUT.value,
        source=CancelSource.SYSTEM_TIMEOUT,
    )


def _is_due(suspension: Record) -> bool:
    return suspension["timeout_at"] is not None and suspension["timeout_at"] <= suspension["now"]


def _timed_out(execution_id: ExecutionId, suspension: Record) -> _TimedOut:
    behavior = read_stored_timeout_behavior(suspension["timeout_behavior"])
    return _TimedOut(execution_id=execution_id, suspension=suspension, behavior=behavior)

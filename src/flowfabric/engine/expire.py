"""Running out of time: attempts past their timeout and executions past their deadline."""

from collections.abc import Sequence
from enum import StrEnum
from uuid import UUID

from flowfabric.db.batch import Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.fence import Verdict, lock_execution
from flowfabric.engine.lease import SWEEP_LIMIT
from flowfabric.engine.release import Parting, Releases, retry_pause
from flowfabric.engine.setbacks import Setbacks
from flowfabric.engine.store import Store
from flowfabric.engine.transition import SUSPENSION_TIMEOUTS, Release, after_timeout
from flowfabric.model.errors import error
from flowfabric.model.ids import ExecutionId, format_execution_id, parse_execution_id, row_key
from flowfabric.model.outcomes import AlreadyTerminal, Expired, FailureClass, NotYetDue, RetryScheduled
from flowfabric.model.policy import read_stored_policy
from flowfabric.model.states import CancelSource, LifecyclePhase, TimeoutBehavior
from flowfabric.model.text import word_of

SQL = statements_beside(__file__)


class ExpiryPhase(StrEnum):
    """Which time is up; the word is the reason an expired execution bears."""

    ATTEMPT_TIMEOUT = "attempt_timeout"
    EXECUTION_DEADLINE = "execution_deadline"


class Expire:
    """What ends, or is tried again, because its time is up."""

    def __init__(self, store: Store, releases: Releases, setbacks: Setbacks) -> None:
        self.setbacks = setbacks
        self._store = store
        self._releases = releases

    async def expire_due(self) -> int:
        """Expire what is past its attempt timeout or deadline, the oldest first; answers how many."""
        return await self.setbacks.sweep(self._expire_together, self._expire_alone, limit=SWEEP_LIMIT)

    async def _expire_together(self, left_out: Sequence[UUID], found: list[ExecutionId]) -> int:
        since = self._store.due.since

        async def expire(transaction: Transaction) -> tuple[list[Parting], list[Verdict | Locked]]:
            rows = await transaction.fetch(SQL.lock_expired, since=since, left_out=left_out, limit=SWEEP_LIMIT)
            found[:] = [format_execution_id(row["partition_key"], row["execution_id"]) for row in rows]
            endings = [
                _expiry(row, ExpiryPhase.EXECUTION_DEADLINE if row["past_deadline"] else ExpiryPhase.ATTEMPT_TIMEOUT)
                for row in rows
            ]
            return endings, await self._releases.within(transaction, endings) if endings else []

        endings, verdicts = await self._store.transact(expire)
        await self._releases.settle(endings, verdicts)
        return len(endings)

    async def _expire_alone(self, execution_id: ExecutionId) -> bool:
        for phase in (ExpiryPhase.EXECUTION_DEADLINE, ExpiryPhase.ATTEMPT_TIMEOUT):
            if isinstance(await self.expire_execution(execution_id, phase), Expired | RetryScheduled):
                return True
        return False

    async def expire_execution(
        self, execution_id: str, phase: ExpiryPhase | str
    ) -> Expired | RetryScheduled | AlreadyTerminal | NotYetDue:
        """Expire one execution whose attempt timeout or deadline has passed, as it is once its row is held."""
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        which = word_of(ExpiryPhase, phase)
        if which is None:
            raise error("invalid_input", f"phase: one of {', '.join(ExpiryPhase)}, got {phase!r}")

        async def expire(
            transaction: Transaction,
        ) -> tuple[Parting, list[Verdict | Locked]] | AlreadyTerminal | NotYetDue:
            held = await lock_execution(transaction, parsed)
            if held["lifecycle_phase"] == LifecyclePhase.TERMINAL:
                return AlreadyTerminal()
            (row,) = await transaction.fetch(SQL.read_expiry, partition_key=partition, execution_id=uuid)
            if not row["past_deadline" if which is ExpiryPhase.EXECUTION_DEADLINE else "past_timeout"]:
                return NotYetDue()
            ending = _expiry(row, which)
            return ending, await self._releases.within(transaction, [ending])

        found = await self._store.transact(expire, execution_id=parsed)
        if not isinstance(found, tuple):
            return found
        ending, verdicts = found
        await self._releases.settle([ending], verdicts)
        (verdict,) = verdicts
        if isinstance(verdict, Verdict) and verdict.delay_until is not None:
            return RetryScheduled(delay_until=verdict.delay_until)
        return Expired(execution_id=parsed)


def suspension_ending(execution_id: ExecutionId, behavior: TimeoutBehavior) -> Parting:
    """How the timeout of its suspension ends an execution; not every behaviour does."""
    return Parting(
        execution_id,
        SUSPENSION_TIMEOUTS[behavior],
        reason=f"suspension_timeout:{behavior}",
        category=FailureClass.TIMEOUT.value,
        source=CancelSource.SYSTEM_TIMEOUT,
    )


def _expiry(row: Record, phase: ExpiryPhase) -> Parting:
    execution_id = format_execution_id(row["partition_key"], row["execution_id"])
    category = FailureClass.TIMEOUT.value
    lost_epoch = row["lease_epoch"] if row["lifecycle_phase"] == LifecyclePhase.ACTIVE else None
    if phase is ExpiryPhase.EXECUTION_DEADLINE:
        return Parting(
            execution_id, Release.DEADLINE_EXPIRED, reason=phase.value, category=category, lost_epoch=lost_epoch
        )
    delay_ms = retry_pause(read_stored_policy(row["policy"]), row["retry_count"], category)
    return Parting(
        execution_id,
        after_timeout(delay_ms),
        reason=phase.value,
        category=category,
        delay_ms=delay_ms,
        lost_epoch=lost_epoch,
    )

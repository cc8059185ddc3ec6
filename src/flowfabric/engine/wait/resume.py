"""Resumption of suspended executions: they become runnable and their suspensions are closed."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import array_text, short_columns, statements_beside
from flowfabric.engine.core.row import lock_execution
from flowfabric.engine.core.transition import RESUME_DELAYED, RESUMED, RESUMED_PARAMETERS
from flowfabric.engine.store import Store
from flowfabric.model.condition import check_enum
from flowfabric.model.errors import error
from flowfabric.model.event import CompletionOutcome, EventFamily, EventKind
from flowfabric.model.ids import ExecutionId, SignalId, WaitpointId, parse_execution_id, row_key, split_execution_id
from flowfabric.model.policy_checks import MAX_MS
from flowfabric.model.resume import Resumed, ResumeTrigger
from flowfabric.model.states import LifecyclePhase, PublicState
from flowfabric.model.text import check_range
from flowfabric.model.waitpoint import CloseReason

SQL = statements_beside(__file__)

_COLUMNS = (
    "partition_keys",
    "execution_ids",
    "delays_ms",
    "blocking_details",
    "to_eligibilities",
    "to_blockings",
    "satisfiers",
    "closing_signals",
    "closing_waitpoints",
    "accepted",
    "matched",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """One execution to resume, with the resume delay and the signals that satisfied its condition.

    If a signal satisfied the condition, `satisfiers` and `closing_signal_id` are appended to the stored satisfiers, and
    `accepted` and `matched` are added to the signal counts of `closing_waitpoint_id`.
    """

    execution_id: ExecutionId
    delay_ms: int = 0
    delay_detail: str = ""
    satisfiers: Sequence[SignalId] = ()
    closing_signal_id: SignalId | None = None
    closing_waitpoint_id: WaitpointId | None = None
    accepted: int = 0
    matched: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeCause:
    """Why executions are resumed: the close reason of their suspensions, and the event to write, if any."""

    close_reason: CloseReason
    is_satisfied: bool = False
    kind: EventKind | None = None
    family: EventFamily | None = None
    outcome: CompletionOutcome | None = None
    event_details: object = None


SATISFIED = ResumeCause(
    close_reason=CloseReason.RESUMED,
    is_satisfied=True,
    kind=EventKind.ENDED,
    family=EventFamily.COMPLETION,
    outcome=CompletionOutcome.RESUMABLE,
)
"""A signal satisfied the condition."""
TIMED_OUT = ResumeCause(close_reason=CloseReason.TIMED_OUT_AUTO_RESUME)
"""The suspension timed out."""


def _row(resume: Resume) -> tuple[object, ...]:
    target = RESUME_DELAYED if resume.delay_ms else RESUMED
    return (
        *split_execution_id(resume.execution_id),
        resume.delay_ms or None,
        resume.delay_detail if resume.delay_ms else None,
        target.eligibility,
        target.blocking,
        array_text(resume.satisfiers),
        resume.closing_signal_id,
        resume.closing_waitpoint_id,
        resume.accepted,
        resume.matched,
    )


class Resumes:
    """Resumes executions, on request of an operator or within the transaction that ends their wait."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def resume_execution(
        self,
        execution_id: ExecutionId | str,
        *,
        trigger_type: ResumeTrigger | str = ResumeTrigger.SIGNAL,
        resume_delay_ms: int = 0,
    ) -> Resumed:
        """Resume a suspended execution even if its condition is not satisfied."""
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        trigger = check_enum(ResumeTrigger, trigger_type, "trigger_type")
        check_range(resume_delay_ms, "resume_delay_ms", 0, MAX_MS)
        resume = Resume(execution_id=parsed, delay_ms=resume_delay_ms, delay_detail=f"resume delay {resume_delay_ms}ms")
        cause = ResumeCause(
            close_reason=CloseReason.RESUMED,
            kind=EventKind.OPERATOR_RESUMED,
            family=EventFamily.OPERATOR,
            event_details={"trigger_type": trigger, "resume_delay_ms": resume_delay_ms},
        )

        async def apply(transaction: Transaction) -> list[Record]:
            locked = await lock_execution(transaction, parsed)
            if locked.lifecycle_phase != LifecyclePhase.SUSPENDED:
                raise error("execution_not_suspended", f"execution {parsed} is {locked.lifecycle_phase}")
            rows = await transaction.fetch(SQL.read_is_waiting, partition_key=partition, execution_id=uuid)
            if not any(row["is_open"] for row in rows):
                raise error("execution_not_suspended", f"execution {parsed} is suspended, but its suspension is closed")
            return await self.within(transaction, [resume], cause)

        self.after_commit(await self._store.transact(apply, execution_id=parsed), cause)
        return Resumed(public_state=PublicState.DELAYED if resume_delay_ms else PublicState.RESUMABLE)

    async def within(self, transaction: Transaction, resumes: Sequence[Resume], cause: ResumeCause) -> list[Record]:
        """Resume suspended executions that the transaction has locked; call `after_commit` after the commit."""
        rows = await transaction.fetch(
            SQL.resume_locked,
            **short_columns(_COLUMNS, [_row(resume) for resume in resumes]),
            close_reason=cause.close_reason,
            is_satisfied=cause.is_satisfied,
            kind=cause.kind,
            outcome=cause.outcome,
            event_details=None if cause.event_details is None else msgspec.json.encode(cause.event_details).decode(),
            **RESUMED_PARAMETERS,
        )
        resumed = sum(row["resumed"] for row in rows)
        if resumed != len(resumes):
            raise error("internal", f"expected to resume {len(resumes)} executions, but only {resumed} were suspended")
        return rows

    def after_commit(self, rows: Sequence[Record], cause: ResumeCause) -> None:
        """Wake workers, timers and feeds after the commit."""
        wakeups = self._store.wakeups
        if rows and cause.family is not None:
            wakeups.events(cause.family)
        for row in rows:
            if row["delay_ms"] is not None:
                wakeups.timer(row["delay_ms"])
        wakeups.work_of(row for row in rows if row["delay_ms"] is None)

"""The table of moves: the state vector that each operation leads to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from flowfabric.model.event import CompletionOutcome, ReleaseReason
from flowfabric.model.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
    TimeoutBehavior,
)
from flowfabric.model.waitpoint import CloseReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The six stored state dimensions after a move; Postgres derives the seventh, public_state."""

    phase: LifecyclePhase
    ownership: OwnershipState = OwnershipState.UNOWNED
    eligibility: EligibilityState = EligibilityState.NOT_APPLICABLE
    blocking: BlockingReason = BlockingReason.NONE
    outcome: TerminalOutcome = TerminalOutcome.NONE
    attempt: AttemptState


CLAIMED = Target(phase=LifecyclePhase.ACTIVE, ownership=OwnershipState.LEASED, attempt=AttemptState.RUNNING_ATTEMPT)
LEASE_EXPIRED = Target(
    phase=LifecyclePhase.ACTIVE,
    ownership=OwnershipState.LEASE_EXPIRED_RECLAIMABLE,
    blocking=BlockingReason.WAITING_FOR_WORKER,
    attempt=AttemptState.ATTEMPT_INTERRUPTED,
)


RESUMED = Target(
    phase=LifecyclePhase.RUNNABLE,
    eligibility=EligibilityState.ELIGIBLE_NOW,
    blocking=BlockingReason.WAITING_FOR_WORKER,
    attempt=AttemptState.ATTEMPT_INTERRUPTED,
)
BLOCKED_BY_DEPENDENCIES: Mapping[str, str] = {
    "to_eligibility": EligibilityState.BLOCKED_BY_DEPENDENCIES,
    "to_blocking": BlockingReason.WAITING_FOR_CHILDREN,
}
"""The dimensions that change when a runnable execution begins to wait for its dependencies."""
RESUME_DELAYED = replace(
    RESUMED,
    eligibility=EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    blocking=BlockingReason.WAITING_FOR_RESUME_DELAY,
)


class Move(StrEnum):
    """The moves that end a lease, or an execution that has no lease."""

    COMPLETED = "completed"
    FAILED = "failed"
    RETRY = "retry"
    RETRY_NOW = "retry_now"
    CANCELLED = "cancelled"
    TIMEOUT_RETRY = "timeout_retry"
    TIMEOUT_RETRY_NOW = "timeout_retry_now"
    TIMEOUT_EXPIRED = "timeout_expired"
    DEADLINE_EXPIRED = "deadline_expired"
    RECLAIM_LIMIT = "reclaim_limit"
    DELAYED = "delayed"
    WAITING_CHILDREN = "waiting_children"
    CHILDREN_DONE = "children_done"
    HANDED_BACK = "handed_back"
    NOT_STARTED = "not_started"
    SUSPENDED = "suspended"
    SUSPENSION_FAILED = "suspension_failed"
    SUSPENSION_CANCELLED = "suspension_cancelled"
    SUSPENSION_EXPIRED = "suspension_expired"
    SKIPPED = "skipped"
    SKIPPED_UNATTEMPTED = "skipped_unattempted"
    LEASE_EXPIRED = "lease_expired"
    LEASE_REVOKED = "lease_revoked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """What a move writes: the new state of the execution and of its attempt, and the reason stored with the events.

    An attempt left as `started` can still be reclaimed. An attempt left as `suspended` is parked: it keeps its id and
    index, and the next claim continues it. If the move ends a suspended execution, its reason closes the suspension
    and its waitpoints.
    """

    target: Target
    attempt: AttemptLifecycle
    reason: ReleaseReason | CloseReason | None


def _ended(outcome: TerminalOutcome, attempt: AttemptLifecycle, reason: ReleaseReason | CloseReason) -> Transition:
    target = Target(phase=LifecyclePhase.TERMINAL, outcome=outcome, attempt=AttemptState.ATTEMPT_TERMINAL)
    return Transition(target=target, attempt=attempt, reason=reason)


_BACKOFF = Target(
    phase=LifecyclePhase.RUNNABLE,
    eligibility=EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    blocking=BlockingReason.WAITING_FOR_RETRY_BACKOFF,
    attempt=AttemptState.PENDING_RETRY_ATTEMPT,
)
_RETRYABLE = replace(_BACKOFF, eligibility=EligibilityState.ELIGIBLE_NOW, blocking=BlockingReason.WAITING_FOR_WORKER)
_FAILURE = AttemptLifecycle.ENDED_FAILURE


def _parked(eligibility: EligibilityState, blocking: BlockingReason, reason: ReleaseReason) -> Transition:
    target = Target(
        phase=LifecyclePhase.RUNNABLE,
        eligibility=eligibility,
        blocking=blocking,
        attempt=AttemptState.ATTEMPT_INTERRUPTED,
    )
    return Transition(target=target, attempt=AttemptLifecycle.SUSPENDED, reason=reason)


_SKIPPED = _ended(TerminalOutcome.SKIPPED, AttemptLifecycle.ENDED_CANCELLED, ReleaseReason.DEPENDENCY_IMPOSSIBLE)

MOVES: Mapping[Move, Transition] = {
    Move.COMPLETED: _ended(TerminalOutcome.SUCCESS, AttemptLifecycle.ENDED_SUCCESS, ReleaseReason.COMPLETED),
    Move.FAILED: _ended(TerminalOutcome.FAILED, _FAILURE, ReleaseReason.FAILED_TERMINAL),
    Move.RETRY: Transition(target=_BACKOFF, attempt=_FAILURE, reason=ReleaseReason.FAILED_RETRY_SCHEDULED),
    Move.RETRY_NOW: Transition(target=_RETRYABLE, attempt=_FAILURE, reason=ReleaseReason.FAILED_RETRY_SCHEDULED),
    Move.CANCELLED: _ended(TerminalOutcome.CANCELLED, AttemptLifecycle.ENDED_CANCELLED, ReleaseReason.CANCELLED),
    Move.TIMEOUT_RETRY: Transition(target=_BACKOFF, attempt=_FAILURE, reason=ReleaseReason.EXPIRED_ATTEMPT_TIMEOUT),
    Move.TIMEOUT_RETRY_NOW: Transition(
        target=_RETRYABLE, attempt=_FAILURE, reason=ReleaseReason.EXPIRED_ATTEMPT_TIMEOUT
    ),
    Move.TIMEOUT_EXPIRED: _ended(TerminalOutcome.EXPIRED, _FAILURE, ReleaseReason.EXPIRED_ATTEMPT_TIMEOUT),
    Move.DEADLINE_EXPIRED: _ended(TerminalOutcome.EXPIRED, _FAILURE, ReleaseReason.EXPIRED_EXECUTION_DEADLINE),
    Move.RECLAIM_LIMIT: _ended(
        TerminalOutcome.FAILED, AttemptLifecycle.INTERRUPTED_RECLAIMED, ReleaseReason.MAX_RECLAIMS_EXCEEDED
    ),
    Move.DELAYED: _parked(
        EligibilityState.NOT_ELIGIBLE_UNTIL_TIME, BlockingReason.WAITING_FOR_DELAY, ReleaseReason.WORKER_DELAY
    ),
    Move.WAITING_CHILDREN: _parked(
        EligibilityState.BLOCKED_BY_DEPENDENCIES, BlockingReason.WAITING_FOR_CHILDREN, ReleaseReason.WAITING_CHILDREN
    ),
    Move.CHILDREN_DONE: _parked(
        EligibilityState.ELIGIBLE_NOW, BlockingReason.WAITING_FOR_WORKER, ReleaseReason.WAITING_CHILDREN
    ),
    Move.HANDED_BACK: _parked(
        EligibilityState.ELIGIBLE_NOW, BlockingReason.WAITING_FOR_WORKER, ReleaseReason.HANDED_BACK
    ),
    Move.NOT_STARTED: _parked(
        EligibilityState.ELIGIBLE_NOW, BlockingReason.WAITING_FOR_WORKER, ReleaseReason.HANDED_BACK
    ),
    # The arguments of a suspension override the blocking reason.
    Move.SUSPENDED: Transition(
        target=Target(
            phase=LifecyclePhase.SUSPENDED,
            blocking=BlockingReason.WAITING_FOR_SIGNAL,
            attempt=AttemptState.ATTEMPT_INTERRUPTED,
        ),
        attempt=AttemptLifecycle.SUSPENDED,
        reason=ReleaseReason.SUSPEND,
    ),
    Move.SUSPENSION_FAILED: _ended(TerminalOutcome.FAILED, _FAILURE, CloseReason.TIMED_OUT_FAIL),
    Move.SUSPENSION_CANCELLED: _ended(
        TerminalOutcome.CANCELLED, AttemptLifecycle.ENDED_CANCELLED, CloseReason.TIMED_OUT_CANCEL
    ),
    Move.SUSPENSION_EXPIRED: _ended(TerminalOutcome.EXPIRED, _FAILURE, CloseReason.TIMED_OUT_EXPIRE),
    Move.SKIPPED: _SKIPPED,
    # For an execution without an attempt in progress.
    Move.SKIPPED_UNATTEMPTED: replace(_SKIPPED, target=replace(_SKIPPED.target, attempt=AttemptState.NONE)),
    Move.LEASE_EXPIRED: Transition(target=LEASE_EXPIRED, attempt=AttemptLifecycle.STARTED, reason=None),
    Move.LEASE_REVOKED: Transition(
        target=replace(LEASE_EXPIRED, ownership=OwnershipState.LEASE_REVOKED),
        attempt=AttemptLifecycle.STARTED,
        reason=None,
    ),
}


def after_failure(delay_ms: int | None) -> Move:
    """The move of a failed attempt that is retried after `delay_ms`, or not at all if that is None."""
    if delay_ms is None:
        return Move.FAILED
    return Move.RETRY if delay_ms else Move.RETRY_NOW


def after_timeout(delay_ms: int | None) -> Move:
    """The move of a timed out attempt that is retried after `delay_ms`, or not at all if that is None."""
    if delay_ms is None:
        return Move.TIMEOUT_EXPIRED
    return Move.TIMEOUT_RETRY if delay_ms else Move.TIMEOUT_RETRY_NOW


SUSPENSION_TIMEOUTS: Mapping[TimeoutBehavior, Move] = {
    TimeoutBehavior.FAIL: Move.SUSPENSION_FAILED,
    TimeoutBehavior.CANCEL: Move.SUSPENSION_CANCELLED,
    TimeoutBehavior.EXPIRE: Move.SUSPENSION_EXPIRED,
}
"""The moves for the timeout behaviours that end a suspended execution."""

PROMOTED: Mapping[str, str] = {
    "to_eligibility": EligibilityState.ELIGIBLE_NOW,
    "to_blocking": BlockingReason.WAITING_FOR_WORKER,
}
"""The dimensions that a promotion changes."""

UNBLOCKED: Mapping[str, str] = {
    **PROMOTED,
    "delayed_eligibility": EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    "delayed_blocking": BlockingReason.WAITING_FOR_DELAY,
    "backoff_blocking": BlockingReason.WAITING_FOR_RETRY_BACKOFF,
    "dependent_eligibility": EligibilityState.BLOCKED_BY_DEPENDENCIES,
    "dependent_blocking": BlockingReason.WAITING_FOR_CHILDREN,
}
"""The dimensions that an unblocked execution gets: claimable, or still delayed, or still waiting for dependencies."""
BLOCKS: Mapping[BlockingReason, EligibilityState] = {
    BlockingReason.WAITING_FOR_BUDGET: EligibilityState.BLOCKED_BY_BUDGET,
    BlockingReason.WAITING_FOR_QUOTA: EligibilityState.BLOCKED_BY_QUOTA,
    BlockingReason.WAITING_FOR_CAPABLE_WORKER: EligibilityState.BLOCKED_BY_ROUTE,
    BlockingReason.PAUSED_BY_OPERATOR: EligibilityState.BLOCKED_BY_OPERATOR,
    BlockingReason.PAUSED_BY_POLICY: EligibilityState.BLOCKED_BY_LANE_STATE,
}
"""The reasons for which a runnable execution can be blocked, and the dimension that says so."""
LIMITED_STATES = frozenset({EligibilityState.BLOCKED_BY_BUDGET, EligibilityState.BLOCKED_BY_QUOTA})
"""Blocked by a limit: the entry of ready stays, so that a claim that admits can lease the execution directly."""


def block_parameters(reason: BlockingReason) -> Mapping[str, str]:
    """The dimensions that change when an execution is blocked for a reason."""
    return {"to_eligibility": BLOCKS[reason], "to_blocking": reason}


REPLAYED = Target(
    phase=LifecyclePhase.RUNNABLE,
    eligibility=EligibilityState.ELIGIBLE_NOW,
    blocking=BlockingReason.WAITING_FOR_WORKER,
    attempt=AttemptState.PENDING_REPLAY_ATTEMPT,
)
REPLAYED_BLOCKED = replace(
    REPLAYED, eligibility=EligibilityState.BLOCKED_BY_DEPENDENCIES, blocking=BlockingReason.WAITING_FOR_CHILDREN
)
"""An ended execution that runs again, at once or once its dependencies are satisfied."""

HELD_FOR_CANCEL: Mapping[str, str] = {
    "to_eligibility": EligibilityState.BLOCKED_BY_OPERATOR,
    "to_blocking": BlockingReason.PAUSED_BY_FLOW_CANCEL,
}
"""The dimensions that change when a cancelled flow holds a member back from claims."""

ESCALATED: Mapping[str, str] = {"to_blocking": BlockingReason.PAUSED_BY_OPERATOR}
"""The dimension that the escalation of a suspension changes."""

RESUMED_PARAMETERS: Mapping[str, str] = {
    "to_phase": RESUMED.phase,
    "to_ownership": RESUMED.ownership,
    "to_outcome": RESUMED.outcome,
    "to_attempt": RESUMED.attempt,
}
"""The dimensions that every resume sets; the other two depend on whether it is delayed."""


def target_parameters(target: Target) -> Mapping[str, str]:
    """The dimensions of a target, as the parameters of a statement that writes all of them."""
    return {
        "to_phase": target.phase,
        "to_ownership": target.ownership,
        "to_eligibility": target.eligibility,
        "to_blocking": target.blocking,
        "to_outcome": target.outcome,
        "to_attempt": target.attempt,
    }


CLAIM_PARAMETERS = target_parameters(CLAIMED)


@lru_cache
def release_parameters(moves: frozenset[Move]) -> Mapping[str, list[str] | list[str | None] | list[int | None]]:
    """The rows of the table for these moves, as the array parameters of end_leases."""
    transitions = {move: MOVES[move] for move in sorted(moves)}
    return {
        "move_names": [move.value for move in transitions],
        "to_phases": [transition.target.phase.value for transition in transitions.values()],
        "to_ownerships": [transition.target.ownership.value for transition in transitions.values()],
        "to_eligibilities": [transition.target.eligibility.value for transition in transitions.values()],
        "to_blockings": [transition.target.blocking.value for transition in transitions.values()],
        "to_outcomes": [transition.target.outcome.value for transition in transitions.values()],
        "to_attempts": [transition.target.attempt.value for transition in transitions.values()],
        "attempt_lifecycles": [transition.attempt.value for transition in transitions.values()],
        "release_reasons": [
            None if transition.reason is None else transition.reason.value for transition in transitions.values()
        ],
        "completions": [
            None
            if transition.target.outcome is TerminalOutcome.NONE
            else CompletionOutcome.of(transition.target.outcome).value
            for transition in transitions.values()
        ],
    }


def completion_parameters() -> Mapping[str, object]:
    """The row of the table for a completion, as the parameters of complete_leases."""
    transition = MOVES[Move.COMPLETED]
    target = transition.target
    return {
        "to_phase": target.phase.value,
        "to_ownership": target.ownership.value,
        "to_eligibility": target.eligibility.value,
        "to_blocking": target.blocking.value,
        "to_outcome": target.outcome.value,
        "to_attempt": target.attempt.value,
        "release_reason": transition.reason,
        "completion": CompletionOutcome.of(target.outcome).value,
    }

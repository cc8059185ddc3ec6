"""The seven dimensions of an execution's state, and the invariants between them."""

from dataclasses import dataclass
from enum import StrEnum


class LifecyclePhase(StrEnum):
    """The lifecycle phase of an execution; `submitted` is never stored."""

    SUBMITTED = "submitted"
    RUNNABLE = "runnable"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    TERMINAL = "terminal"


class OwnershipState(StrEnum):
    """Whether a worker holds the lease of an execution, or how the lease was lost."""

    UNOWNED = "unowned"
    LEASED = "leased"
    LEASE_EXPIRED_RECLAIMABLE = "lease_expired_reclaimable"
    LEASE_REVOKED = "lease_revoked"


class EligibilityState(StrEnum):
    """Whether a runnable execution is claimable, or what blocks it."""

    ELIGIBLE_NOW = "eligible_now"
    NOT_ELIGIBLE_UNTIL_TIME = "not_eligible_until_time"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"
    BLOCKED_BY_BUDGET = "blocked_by_budget"
    BLOCKED_BY_QUOTA = "blocked_by_quota"
    BLOCKED_BY_ROUTE = "blocked_by_route"
    BLOCKED_BY_LANE_STATE = "blocked_by_lane_state"
    BLOCKED_BY_OPERATOR = "blocked_by_operator"
    NOT_APPLICABLE = "not_applicable"


class BlockingReason(StrEnum):
    """What an execution waits for."""

    NONE = "none"
    WAITING_FOR_WORKER = "waiting_for_worker"
    WAITING_FOR_RETRY_BACKOFF = "waiting_for_retry_backoff"
    WAITING_FOR_RESUME_DELAY = "waiting_for_resume_delay"
    WAITING_FOR_DELAY = "waiting_for_delay"
    WAITING_FOR_SIGNAL = "waiting_for_signal"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    WAITING_FOR_TOOL_RESULT = "waiting_for_tool_result"
    WAITING_FOR_CHILDREN = "waiting_for_children"
    WAITING_FOR_BUDGET = "waiting_for_budget"
    WAITING_FOR_QUOTA = "waiting_for_quota"
    WAITING_FOR_CAPABLE_WORKER = "waiting_for_capable_worker"
    WAITING_FOR_LOCALITY_MATCH = "waiting_for_locality_match"
    PAUSED_BY_OPERATOR = "paused_by_operator"
    PAUSED_BY_POLICY = "paused_by_policy"
    PAUSED_BY_FLOW_CANCEL = "paused_by_flow_cancel"


class TerminalOutcome(StrEnum):
    """How an execution ended."""

    NONE = "none"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


class AttemptState(StrEnum):
    """The state of the current attempt, or the type of attempt that the next claim creates."""

    NONE = "none"
    PENDING_FIRST_ATTEMPT = "pending_first_attempt"
    RUNNING_ATTEMPT = "running_attempt"
    ATTEMPT_INTERRUPTED = "attempt_interrupted"
    PENDING_RETRY_ATTEMPT = "pending_retry_attempt"
    PENDING_REPLAY_ATTEMPT = "pending_replay_attempt"
    ATTEMPT_TERMINAL = "attempt_terminal"


class PublicState(StrEnum):
    """The state of an execution in one word, derived from the other dimensions."""

    WAITING = "waiting"
    DELAYED = "delayed"
    RATE_LIMITED = "rate_limited"
    WAITING_CHILDREN = "waiting_children"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    RESUMABLE = "resumable"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


ENDED_STATES = frozenset(
    {
        PublicState.COMPLETED,
        PublicState.FAILED,
        PublicState.CANCELLED,
        PublicState.EXPIRED,
        PublicState.SKIPPED,
    }
)
"""The states of an execution that has ended."""


class AttemptLifecycle(StrEnum):
    """The lifecycle of one attempt."""

    CREATED = "created"
    STARTED = "started"
    SUSPENDED = "suspended"
    ENDED_SUCCESS = "ended_success"
    ENDED_FAILURE = "ended_failure"
    ENDED_CANCELLED = "ended_cancelled"
    INTERRUPTED_RECLAIMED = "interrupted_reclaimed"

    @property
    def has_ended(self) -> bool:
        """Whether the attempt has ended for good."""
        return self in _ENDED_ATTEMPTS


_ENDED_ATTEMPTS = frozenset(
    {
        AttemptLifecycle.ENDED_SUCCESS,
        AttemptLifecycle.ENDED_FAILURE,
        AttemptLifecycle.ENDED_CANCELLED,
        AttemptLifecycle.INTERRUPTED_RECLAIMED,
    }
)


class AttemptType(StrEnum):
    """Why an attempt was created."""

    INITIAL = "initial"
    RETRY = "retry"
    RECLAIM = "reclaim"
    REPLAY = "replay"
    FALLBACK = "fallback"


class LaneState(StrEnum):
    """What a lane accepts: `paused` stops claims, `draining` stops submissions, `disabled` stops both."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"
    DISABLED = "disabled"


class CancelSource(StrEnum):
    """Who requests a cancellation; any other text is a custom source."""

    OPERATOR_OVERRIDE = "operator_override"
    LEASE_HOLDER = "lease_holder"
    FLOW_CASCADE = "flow_cascade"
    SYSTEM_TIMEOUT = "system_timeout"


class TimeoutBehavior(StrEnum):
    """What happens to a suspended execution whose wait times out."""

    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    AUTO_RESUME_WITH_TIMEOUT_SIGNAL = "auto_resume_with_timeout_signal"
    ESCALATE = "escalate"


class WaitpointState(StrEnum):
    """Whether a waitpoint accepts signals: `pending` buffers them, `active` evaluates them, the others reject them."""

    PENDING = "pending"
    ACTIVE = "active"
    CLOSED = "closed"
    EXPIRED = "expired"


class HandleKind(StrEnum):
    """How a handle was obtained."""

    FRESH = "Fresh"
    RESUMED = "Resumed"
    SUSPENDED = "Suspended"
    RECLAIMED = "Reclaimed"


_ENDED_AS = {
    TerminalOutcome.SUCCESS: PublicState.COMPLETED,
    TerminalOutcome.FAILED: PublicState.FAILED,
    TerminalOutcome.CANCELLED: PublicState.CANCELLED,
    TerminalOutcome.EXPIRED: PublicState.EXPIRED,
    TerminalOutcome.SKIPPED: PublicState.SKIPPED,
    TerminalOutcome.NONE: PublicState.FAILED,
}

_WAITING_AS = {
    EligibilityState.NOT_ELIGIBLE_UNTIL_TIME: PublicState.DELAYED,
    EligibilityState.BLOCKED_BY_DEPENDENCIES: PublicState.WAITING_CHILDREN,
    EligibilityState.BLOCKED_BY_BUDGET: PublicState.RATE_LIMITED,
    EligibilityState.BLOCKED_BY_QUOTA: PublicState.RATE_LIMITED,
}


def derive_public_state(
    phase: LifecyclePhase, eligibility: EligibilityState, outcome: TerminalOutcome, attempt: AttemptState
) -> PublicState:
    """Return the public state; every combination has one."""
    match phase:
        case LifecyclePhase.TERMINAL:
            return _ENDED_AS[outcome]
        case LifecyclePhase.SUSPENDED:
            return PublicState.SUSPENDED
        case LifecyclePhase.ACTIVE:
            return PublicState.ACTIVE
        case LifecyclePhase.SUBMITTED:
            return PublicState.WAITING
        case LifecyclePhase.RUNNABLE:
            if eligibility is EligibilityState.ELIGIBLE_NOW and attempt is AttemptState.ATTEMPT_INTERRUPTED:
                return PublicState.RESUMABLE
            return _WAITING_AS.get(eligibility, PublicState.WAITING)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateVector:
    """The whole state of an execution."""

    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: EligibilityState
    blocking_reason: BlockingReason
    terminal_outcome: TerminalOutcome
    attempt_state: AttemptState
    public_state: PublicState


def illegal(vector: StateVector) -> str | None:
    """Return the invariant that a state violates, or None."""
    phase = vector.lifecycle_phase
    if vector.ownership_state is not OwnershipState.UNOWNED and phase is not LifecyclePhase.ACTIVE:
        return f"{vector.ownership_state} implies active"
    if (vector.terminal_outcome is TerminalOutcome.NONE) is (phase is LifecyclePhase.TERMINAL):
        return "terminal_outcome is set if and only if the phase is terminal"
    if (vector.eligibility_state is EligibilityState.NOT_APPLICABLE) is (phase is LifecyclePhase.RUNNABLE):
        return "eligibility_state applies if and only if the phase is runnable"
    derived = derive_public_state(phase, vector.eligibility_state, vector.terminal_outcome, vector.attempt_state)
    if vector.public_state is not derived:
        return f"public_state is {vector.public_state} but must be {derived}"
    return None

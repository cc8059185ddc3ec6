"""Why an execution is where it is: everything that holds it, and one sentence for a person."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from flowfabric.model.condition import OPERATOR_ONLY_NAME, TIMEOUT_ONLY_NAME
from flowfabric.model.ids import (
    EdgeId,
    ExecutionId,
    LaneId,
    Namespace,
    SuspensionId,
    WaitpointId,
    WorkerId,
    WorkerInstanceId,
)
from flowfabric.model.states import BlockingReason, LaneState, PublicState, StateVector, TerminalOutcome
from flowfabric.model.text import shorten

MOST_AHEAD = 1000
"""How far what is ahead of an execution is counted."""

_MOST_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedReason:
    """It waits for its turn on its lane; of a lane that takes no claims it waits for that to change, too."""

    lane_id: LaneId
    lane_state: LaneState
    ahead: int
    workers: int = 0
    """Live workers that would take it: on its lane, with what it requires, for its kind and namespace."""
    kind: Literal["queued"] = "queued"


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantedReason:
    """It is reserved for one worker, and no other gets it before that time."""

    worker_id: WorkerId | None
    worker_instance_id: WorkerInstanceId | None
    until: int
    kind: Literal["granted"] = "granted"


@dataclass(frozen=True, kw_only=True, slots=True)
class NoWorkerReason:
    """No live worker serves its lane, or of those that do none its namespace, or of those none its kind.

    `unserved` is the first of the three that none serves; `workers_seen` counts those that serve what comes before it.
    """

    unserved: Literal["lane", "namespace", "kind"]
    lane_id: LaneId
    namespace: Namespace
    execution_kind: str
    workers_seen: int
    kind: Literal["no_worker"] = "no_worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCapableWorkerReason:
    """No single live worker that serves its lane, namespace and kind offers all that it requires.

    `missing` is what none of them offers; where each token is offered by some, all of them: none offers them together.
    """

    missing: tuple[str, ...]
    workers_seen: int
    kind: Literal["no_capable_worker"] = "no_capable_worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastFailure:
    """The latest attempt that failed."""

    attempt_index: int
    reason: str | None
    category: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedReason:
    """It waits for its time."""

    until: int | None
    cause: Literal["delay", "retry_backoff", "resume_delay"]
    last_failure: LastFailure | None
    kind: Literal["delayed"] = "delayed"


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetReason:
    """A budget that is spent holds it; the detail says which."""

    detail: str | None
    kind: Literal["budget"] = "budget"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaReason:
    """A quota that is reached holds it; the detail says which."""

    detail: str | None
    kind: Literal["quota"] = "quota"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmetEdge:
    """What an execution depends on and has not got yet."""

    edge_id: EdgeId
    upstream_execution_id: ExecutionId
    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class DependenciesReason:
    """Other executions have to end first."""

    detail: str | None
    policy: str | None = None
    edges: tuple[UnmetEdge, ...] = ()
    kind: Literal["dependencies"] = "dependencies"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenWaitpoint:
    """A waitpoint that takes signals, and the names it asks for; none means every name."""

    waitpoint_id: WaitpointId
    waitpoint_key: str
    required_signal_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalsReason:
    """It is suspended; the waitpoints come in the order of their bindings."""

    suspension_id: SuspensionId
    reason_code: str
    waitpoints: tuple[OpenWaitpoint, ...]
    timeout_at: int | None
    kind: Literal["signals"] = "signals"


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfLease:
    worker_id: WorkerId | None
    worker_instance_id: WorkerInstanceId | None
    lease_expires_at: int | None
    attempt_index: int
    reclaim_count: int
    reclaim_cap: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningReason(_OfLease):
    """A worker runs it under its lease."""

    kind: Literal["running"] = "running"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseLostReason(_OfLease):
    """The worker that ran it has lost its lease; the next claim takes it over, or ends it at the cap."""

    kind: Literal["lease_lost"] = "lease_lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldReason:
    """It is kept back until somebody lets it go on: an operator, a policy, the cancelling of its flow."""

    blocking_reason: BlockingReason
    detail: str | None
    kind: Literal["held"] = "held"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedReason:
    """It has ended: nothing more happens to it."""

    outcome: TerminalOutcome
    reason: str | None
    completed_at: int | None
    kind: Literal["ended"] = "ended"


Reason: TypeAlias = (
    QueuedReason
    | GrantedReason
    | NoWorkerReason
    | NoCapableWorkerReason
    | DelayedReason
    | BudgetReason
    | QuotaReason
    | DependenciesReason
    | SignalsReason
    | RunningReason
    | LeaseLostReason
    | HeldReason
    | EndedReason
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Where an execution stands, since when, and everything that holds it there."""

    execution_id: ExecutionId
    public_state: PublicState
    state_vector: StateVector
    since: int
    summary: str
    reasons: tuple[Reason, ...]


def summarise(public_state: PublicState, reasons: Sequence[Reason]) -> str:
    """Return the sentence for a person: the state, and what holds it."""
    state = public_state.value.replace("_", " ")
    if not reasons:
        return state
    link = " " if reasons[0].kind in _INLINE else ": "
    return f"{state}{link}{'; '.join(map(_phrase, reasons))}"


# What reads on from the word of the state.
_INLINE = frozenset({"delayed", "signals", "running", "ended"})
_TAKES_NO_CLAIMS = frozenset({LaneState.PAUSED, LaneState.DISABLED})


def _phrase(reason: Reason) -> str:
    match reason:
        case QueuedReason():
            before = f"{reason.ahead} before it" if reason.ahead < MOST_AHEAD else f"{MOST_AHEAD} or more before it"
            stopped = f", which is {reason.lane_state}" if reason.lane_state in _TAKES_NO_CLAIMS else ""
            return f"{before} on lane {_quoted(reason.lane_id)}{stopped}"
        case GrantedReason():
            who = "a worker" if reason.worker_instance_id is None else f"worker {_quoted(reason.worker_instance_id)}"
            return f"reserved for {who} until {_moment(reason.until)}"
        case NoWorkerReason(unserved="lane"):
            return f"no live worker serves lane {_quoted(reason.lane_id)}"
        case NoWorkerReason(unserved="namespace"):
            return f"no live worker of its lane serves namespace {_quoted(reason.namespace)}"
        case NoWorkerReason():
            return f"no live worker of its lane and namespace runs kind {_quoted(reason.execution_kind)}"
        case NoCapableWorkerReason(missing=()):
            return "not yet let go on, though a live worker offers all it requires"
        case NoCapableWorkerReason():
            return f"no live worker of its lane, namespace and kind offers {_listed(reason.missing, ' and ')}"
        case DelayedReason():
            return f"until {_moment(reason.until)}{_DELAYS[reason.cause]}{_failure(reason.last_failure)}"
        case BudgetReason() | QuotaReason():
            return f"{reason.kind}{_detail(reason.detail)}"
        case DependenciesReason():
            return f"dependencies{_detail(reason.detail)}"
        case SignalsReason():
            times_out = "" if reason.timeout_at is None else f"; times out at {_moment(reason.timeout_at)}"
            return f"until {_awaited(reason.waitpoints)}{times_out}"
        case RunningReason():
            return f"on {_worker(reason)}, leased until {_moment(reason.lease_expires_at)}"
        case LeaseLostReason():
            taken = f"taken over {reason.reclaim_count} of at most {reason.reclaim_cap} times"
            return f"lease lost by {_worker(reason)}, {taken}"
        case HeldReason():
            return f"{reason.blocking_reason.value.replace('_', ' ')}{_detail(reason.detail)}"
        case EndedReason():
            why = "" if reason.reason is None else f", {shorten(reason.reason)}"
            return f"at {_moment(reason.completed_at)}{why}"


_DELAYS = {"delay": "", "retry_backoff": " for its next attempt", "resume_delay": " before it goes on"}


def _failure(failure: LastFailure | None) -> str:
    if failure is None:
        return ""
    category = "" if failure.category is None else f" ({shorten(failure.category)})"
    return f", after attempt {failure.attempt_index} failed: {shorten(failure.reason or 'no reason')}{category}"


def _awaited(waitpoints: Sequence[OpenWaitpoint]) -> str:
    names = {name for each in waitpoints for name in each.required_signal_names}
    if not waitpoints or names == {OPERATOR_ONLY_NAME}:
        return "an operator resumes it"
    if names == {TIMEOUT_ONLY_NAME}:
        return "its time is over"
    return _listed([_reach(each) for each in waitpoints], ", ")


def _reach(waitpoint: OpenWaitpoint) -> str:
    names = [_quoted(name) for name in waitpoint.required_signal_names]
    signal = f"a signal {_listed(names, ' or ')}" if names else "a signal"
    return f"{signal} reaches waitpoint {_quoted(waitpoint.waitpoint_key)}"


def _worker(reason: RunningReason | LeaseLostReason) -> str:
    worker = "a worker" if reason.worker_instance_id is None else f"worker {_quoted(reason.worker_instance_id)}"
    return f"{worker} in attempt {reason.attempt_index}"


def _listed(texts: Sequence[str], joint: str) -> str:
    shown = [shorten(text) for text in texts[:_MOST_SHOWN]]
    more = len(texts) - len(shown)
    return joint.join([*shown, f"{more} more"] if more else shown)


def _quoted(text: str) -> str:
    return f"'{shorten(text)}'"


def _detail(detail: str | None) -> str:
    return "" if not detail else f", {shorten(detail)}"


def _moment(ms: int | None) -> str:
    if ms is None:
        return "a time that is not known"
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"

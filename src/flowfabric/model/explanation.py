"""Explanations: why an execution is in its state, as reasons and as one sentence for a person."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flowfabric.model.condition import OPERATOR_ONLY_NAME, TIMEOUT_ONLY_NAME
from flowfabric.model.edge import AllOfEdges, AnyOfEdges, EdgePolicy
from flowfabric.model.ids import (
    BudgetId,
    EdgeId,
    ExecutionId,
    LaneId,
    Namespace,
    QuotaPolicyId,
    SuspensionId,
    WaitpointId,
    WorkerId,
    WorkerInstanceId,
)
from flowfabric.model.states import BlockingReason, LaneState, PublicState, StateVector, TerminalOutcome
from flowfabric.model.text import listed, shorten, shown_time

MAX_AHEAD = 1000
"""The number up to which the executions ahead of one are counted."""

MAX_EDGES = 100
"""How many unresolved dependencies are listed."""

MAX_FAILED_EDGES = 10
"""How many of the dependencies are listed because of which an execution was skipped."""

_MAX_LISTED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedReason:
    """It waits for its turn on its lane, and if the lane allows no claims, for the lane to be activated."""

    lane_id: LaneId
    lane_state: LaneState
    ahead: int
    workers: int = 0
    """How many live workers could run it: on its lane, with its capabilities, for its kind and namespace."""
    is_in_turns: bool = False
    """Whether `ahead` counts only its own queue, as the lane is fair and serves its queues in turns."""
    kind: Literal["queued"] = "queued"


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantedReason:
    """It is reserved for one worker until that time."""

    worker_id: WorkerId | None
    worker_instance_id: WorkerInstanceId | None
    until: int
    kind: Literal["granted"] = "granted"


@dataclass(frozen=True, kw_only=True, slots=True)
class NoWorkerReason:
    """No live worker serves its lane, namespace and kind.

    `unserved` is the first of the three that no worker serves; `workers_seen` counts the workers that serve those
    before it.
    """

    unserved: Literal["lane", "namespace", "kind"]
    lane_id: LaneId
    namespace: Namespace
    execution_kind: str
    workers_seen: int
    kind: Literal["no_worker"] = "no_worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCapableWorkerReason:
    """No live worker of its lane, namespace and kind offers all required capabilities.

    `missing` lists the capabilities that none of them offers, or all required ones if each is offered by some worker
    but none offers them together.
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
    """It waits until a time."""

    until: int | None
    cause: Literal["delay", "retry_backoff", "resume_delay"]
    last_failure: LastFailure | None
    kind: Literal["delayed"] = "delayed"


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetReason:
    """A hard limit of a budget is used up.

    Without a budget, all budgets have something left again: it is about to be released. `detail` is the stored one.
    """

    budget_id: BudgetId | None = None
    dimension: str | None = None
    used: int | None = None
    limit: int | None = None
    next_reset_at: int | None = None
    """None if nothing resets the budget by itself."""
    detail: str | None = None
    kind: Literal["budget"] = "budget"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaReason:
    """All slots of a key of a quota are taken, or its rate is used up.

    Without a quota, all quotas have room again: it is about to be released. `detail` is the stored one.
    """

    quota_policy_id: QuotaPolicyId | None = None
    key: str | None = None
    key_from: str | None = None
    """Where the quota takes the key from; None if it has one key for all."""
    limit_kind: Literal["rate", "concurrency"] | None = None
    used: int | None = None
    limit: int | None = None
    window_ms: int | None = None
    """The window of a rate."""
    retry_after_ms: int | None = None
    """When the rate lets it through, or about when a slot is free, by the latest runs of its queue; None if unknown."""
    detail: str | None = None
    kind: Literal["quota"] = "quota"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmetEdge:
    """A dependency of an execution that is not satisfied; kind and state of its upstream execution are None if deleted.

    An edge that is only staged is not resolved before it is applied, even if its upstream execution has ended.
    """

    edge_id: EdgeId
    upstream_execution_id: ExecutionId
    execution_kind: str | None
    public_state: PublicState | None
    is_applied: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class DependenciesReason:
    """It waits for other executions of its flow to end.

    `unmet_count` counts the dependencies that are not resolved yet, and `edges` has up to 100 of them.
    """

    detail: str | None
    policy: EdgePolicy | None = None
    edges: tuple[UnmetEdge, ...] = ()
    unmet_count: int = 0
    kind: Literal["dependencies"] = "dependencies"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenWaitpoint:
    """A waitpoint that accepts signals, and the signal names it waits for; empty means any name."""

    waitpoint_id: WaitpointId
    waitpoint_key: str
    required_signal_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalsReason:
    """It is suspended; the waitpoints are in the order of their bindings."""

    suspension_id: SuspensionId
    reason_code: str
    waitpoints: tuple[OpenWaitpoint, ...]
    timeout_at: int | None
    detail: str | None = None
    """What it asks for, if somebody has to decide about a budget."""
    kind: Literal["signals"] = "signals"


@dataclass(frozen=True, kw_only=True, slots=True)
class _LeaseFields:
    worker_id: WorkerId | None
    worker_instance_id: WorkerInstanceId | None
    lease_expires_at: int | None
    attempt_index: int
    reclaim_count: int
    reclaim_cap: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningReason(_LeaseFields):
    """A worker is running it."""

    kind: Literal["running"] = "running"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseLostReason(_LeaseFields):
    """The worker that ran it lost its lease; the next claim reclaims it, or ends it if the cap is reached."""

    kind: Literal["lease_lost"] = "lease_lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldReason:
    """It is held back by an operator, a policy or the cancellation of its flow."""

    blocking_reason: BlockingReason
    detail: str | None
    kind: Literal["held"] = "held"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedReason:
    """It has ended."""

    outcome: TerminalOutcome
    reason: str | None
    completed_at: int | None
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImpossibleReason:
    """It was skipped because too few of its upstream executions could still succeed.

    Of its `total_count` dependencies `failed_count` ended without success; `edges` has up to ten of them.
    """

    policy: EdgePolicy
    total_count: int
    failed_count: int
    edges: tuple[UnmetEdge, ...]
    kind: Literal["impossible"] = "impossible"

    @property
    def needed_count(self) -> int:
        """How many dependencies must succeed."""
        match self.policy:
            case AllOfEdges():
                return self.total_count
            case AnyOfEdges():
                return 1
            case quorum:
                return quorum.k


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
    | ImpossibleReason
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The state of an execution, since when, and everything that keeps it there."""

    execution_id: ExecutionId
    public_state: PublicState
    state_vector: StateVector
    since: int
    summary: str
    reasons: tuple[Reason, ...]


def summarise(public_state: PublicState, reasons: Sequence[Reason]) -> str:
    """Return one sentence for a person: the state and the reasons."""
    state = public_state.value.replace("_", " ")
    if not reasons:
        return state
    first = reasons[0]
    has_policy = isinstance(first, DependenciesReason) and first.policy is not None
    if has_policy:
        state = "waiting"
    link = " " if first.kind in _INLINE or has_policy else ": "
    return f"{state}{link}{'; '.join(map(_phrase, reasons))}"


# Reasons that follow the state without a colon: "delayed until ...".
_INLINE = frozenset({"delayed", "signals", "running", "ended"})
_ALLOWS_NO_CLAIMS = frozenset({LaneState.PAUSED, LaneState.DISABLED})


def _phrase(reason: Reason) -> str:
    match reason:
        case QueuedReason():
            ahead = f"{reason.ahead} ahead of it" if reason.ahead < MAX_AHEAD else f"{MAX_AHEAD} or more ahead of it"
            stopped = f", which is {reason.lane_state}" if reason.lane_state in _ALLOWS_NO_CLAIMS else ""
            queue = "in its queue, one of those in turns on lane" if reason.is_in_turns else "on lane"
            return f"{ahead} {queue} {_quoted(reason.lane_id)}{stopped}"
        case GrantedReason():
            who = "a worker" if reason.worker_instance_id is None else f"worker {_quoted(reason.worker_instance_id)}"
            return f"reserved for {who} until {_time(reason.until)}"
        case NoWorkerReason(unserved="lane"):
            return f"no live worker serves lane {_quoted(reason.lane_id)}"
        case NoWorkerReason(unserved="namespace"):
            return f"no live worker of its lane serves namespace {_quoted(reason.namespace)}"
        case NoWorkerReason():
            return f"no live worker of its lane and namespace runs kind {_quoted(reason.execution_kind)}"
        case NoCapableWorkerReason(missing=()):
            return "about to be released: a live worker offers all it requires"
        case NoCapableWorkerReason():
            missing = listed(reason.missing, joint=" and ", most=_MAX_LISTED)
            return f"no live worker of its lane, namespace and kind offers {missing}"
        case DelayedReason():
            return f"until {_time(reason.until)}{_DELAYS[reason.cause]}{_failure(reason.last_failure)}"
        case BudgetReason(budget_id=None) | QuotaReason(quota_policy_id=None):
            return f"about to be released: its {reason.kind}s have room"
        case BudgetReason():
            resets = "" if reason.next_reset_at is None else f", resets at {_time(reason.next_reset_at)}"
            return (
                f"budget {reason.budget_id}: {shorten(reason.dimension or '')} {reason.used} of {reason.limit}{resets}"
            )
        case QuotaReason():
            return f"quota {reason.quota_policy_id}: {_quota(reason)}"
        case DependenciesReason(policy=None):
            return f"dependencies{_detail(reason.detail)}"
        case DependenciesReason():
            return _dependencies(reason)
        case SignalsReason():
            times_out = "" if reason.timeout_at is None else f"; times out at {_time(reason.timeout_at)}"
            return f"until {_awaited(reason.waitpoints)}{_detail(reason.detail)}{times_out}"
        case RunningReason():
            return f"on {_worker(reason)}, leased until {_time(reason.lease_expires_at)}"
        case LeaseLostReason():
            reclaimed = f"reclaimed {reason.reclaim_count} of at most {reason.reclaim_cap} times"
            return f"lease lost by {_worker(reason)}, {reclaimed}"
        case HeldReason():
            return f"{reason.blocking_reason.value.replace('_', ' ')}{_detail(reason.detail)}"
        case EndedReason():
            why = "" if reason.reason is None else f", {shorten(reason.reason)}"
            return f"at {_time(reason.completed_at)}{why}"
        case ImpossibleReason():
            counts = f"{reason.failed_count} of {reason.total_count} dependencies ended without success"
            return f"{counts}, {reason.needed_count} must succeed{_upstreams(reason.edges, reason.failed_count)}"


def _quota(reason: QuotaReason) -> str:
    subject = ""
    if reason.key_from is not None:
        # The last word of 'tag:app.tenant' or 'payload:/user/id'.
        name = re.split(r"[:/.]", reason.key_from)[-1] or "key"
        subject = f"{shorten(name)} {_quoted(reason.key or '')} "
    seconds = None if reason.retry_after_ms is None else -(-reason.retry_after_ms // 1000)
    if reason.limit_kind == "rate":
        window = "" if reason.window_ms is None else f" per {reason.window_ms // 1000} s"
        following = "" if seconds is None else f", next in {seconds} s"
        return f"{subject}has used {reason.used} of {reason.limit} starts{window}{following}"
    following = "" if seconds is None else f", next in about {max(seconds, 1)} s"
    return f"{subject}uses {reason.used} of {reason.limit} slots{following}"


_DELAYS = {"delay": "", "retry_backoff": " for its next attempt", "resume_delay": " before it resumes"}


def _failure(failure: LastFailure | None) -> str:
    if failure is None:
        return ""
    category = "" if failure.category is None else f" ({shorten(failure.category)})"
    return f", after attempt {failure.attempt_index + 1} failed: {shorten(failure.reason or 'no reason')}{category}"


def _dependencies(reason: DependenciesReason) -> str:
    match reason.policy:
        case None | AllOfEdges():
            needed = "all of its dependencies have succeeded"
        case AnyOfEdges():
            needed = "one of its dependencies has succeeded"
        case quorum:
            needed = f"{quorum.k} of its dependencies have succeeded"
    return f"until {needed}; {reason.unmet_count} unresolved{_upstreams(reason.edges, reason.unmet_count)}"


def _upstreams(edges: Sequence[UnmetEdge], count: int) -> str:
    found = [_upstream(edge) for edge in edges[:_MAX_LISTED]]
    more = count - len(found)
    return f": {', '.join(found)}{f' and {more} more' if more > 0 else ''}" if found else ""


def _upstream(edge: UnmetEdge) -> str:
    kind = "" if edge.execution_kind is None else f"{shorten(edge.execution_kind)} "
    state = "deleted" if edge.public_state is None else edge.public_state.value.replace("_", " ")
    return f"{kind}{edge.upstream_execution_id} ({state}{'' if edge.is_applied else ', not applied'})"


def _awaited(waitpoints: Sequence[OpenWaitpoint]) -> str:
    names = {name for each in waitpoints for name in each.required_signal_names}
    if not waitpoints or names == {OPERATOR_ONLY_NAME}:
        return "an operator resumes it"
    if names == {TIMEOUT_ONLY_NAME}:
        return "its timeout"
    return listed([_signal_phrase(each) for each in waitpoints], most=_MAX_LISTED)


def _signal_phrase(waitpoint: OpenWaitpoint) -> str:
    names = [_quoted(name) for name in waitpoint.required_signal_names]
    signal = f"a signal {listed(names, joint=' or ', most=_MAX_LISTED)}" if names else "a signal"
    return f"{signal} reaches waitpoint {_quoted(waitpoint.waitpoint_key)}"


def _worker(reason: RunningReason | LeaseLostReason) -> str:
    worker = "a worker" if reason.worker_instance_id is None else f"worker {_quoted(reason.worker_instance_id)}"
    return f"{worker} in attempt {reason.attempt_index + 1}"


def _quoted(text: str) -> str:
    return f"'{shorten(text)}'"


def _detail(detail: str | None) -> str:
    return "" if not detail else f", {shorten(detail)}"


def _time(ms: int | None) -> str:
    return "an unknown time" if ms is None else shown_time(ms)

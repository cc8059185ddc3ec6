"""Flows: graphs of executions, and the answers of their operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import msgspec

from flowfabric.model.edge import SUCCESS_ONLY, EdgeGroupSnapshot
from flowfabric.model.errors import error
from flowfabric.model.ids import EdgeId, ExecutionId, FlowId, Namespace
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.text import shown, word_of

MAX_NODES, MAX_EDGES = 50_000, 250_000
"""How many nodes and edges `submit_flow` takes in one call."""


class FlowState(StrEnum):
    """The state of a flow: OPEN or CANCELLED for mutations; the others are derived from the states of its members."""

    OPEN = "open"
    RUNNING = "running"
    BLOCKED = "blocked"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED_FLOW_STATES = frozenset({FlowState.COMPLETED, FlowState.FAILED})
"""Derived states in which every member has ended."""
CLOSED_FLOW_STATES = frozenset({FlowState.CANCELLED, *ENDED_FLOW_STATES})
"""Authoritative states in which the graph of a flow cannot change any more."""


class FlowStatus(StrEnum):
    """How lists show a flow."""

    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """Its stored state is one that this version does not know."""


class CancellationPolicy(StrEnum):
    """Which members the cancellation of a flow cancels."""

    FLOW_ONLY = "flow_only"
    """None: only the graph is closed."""
    CANCEL_ALL = "cancel_all"
    """All that have not ended."""
    CANCEL_PENDING = "cancel_pending"
    """Those that no worker has begun or that wait to continue; active and suspended members run on."""


MAX_CANCEL_GRACE_MS = 2**53 - 1


def parse_cancellation_policy(value: object, field: str = "cancellation_policy") -> CancellationPolicy:
    """Return a caller's cancellation policy."""
    policy = CancellationPolicy.FLOW_ONLY if value == "cancel_flow_only" else word_of(CancellationPolicy, value)
    if policy is None:
        raise error("invalid_input", f"{field}: expected one of {', '.join(CancellationPolicy)}, got {shown(value)}")
    return policy


def covers(policy: CancellationPolicy, lifecycle_phase: str) -> bool:
    """Whether a cancellation by this policy cancels a member in this phase."""
    match policy:
        case CancellationPolicy.FLOW_ONLY:
            return False
        case CancellationPolicy.CANCEL_ALL:
            return lifecycle_phase != LifecyclePhase.TERMINAL
        case CancellationPolicy.CANCEL_PENDING:
            return lifecycle_phase in (LifecyclePhase.SUBMITTED, LifecyclePhase.RUNNABLE)


def check_cancel_grace(value: object) -> int:
    """Return the milliseconds after which a sweep cancels the members that were not cancelled yet."""
    if type(value) is not int or not 0 <= value <= MAX_CANCEL_GRACE_MS:
        raise error(
            "invalid_grace_ms", f"grace_ms: must be a whole number from 0 to {MAX_CANCEL_GRACE_MS}, got {shown(value)}"
        )
    return value


@dataclass(frozen=True, slots=True)
class NoWait:
    """Return once the flow is cancelled; its members are cancelled in the background."""


@dataclass(frozen=True, slots=True)
class WaitUpTo:
    """Return when the members that the policy covers have ended, or raise `timeout` after this time."""

    ms: int


@dataclass(frozen=True, slots=True)
class WaitIndefinite:
    """Return when the members that the policy covers have ended, or raise `timeout` after 300 seconds."""


NO_WAIT = NoWait()
CancelWait: TypeAlias = NoWait | WaitUpTo | WaitIndefinite
"""Whether `cancel_flow` waits for the members that it cancels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowCreated:
    """The flow was created."""

    flow_id: FlowId


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowAlreadySatisfied:
    """A flow with this id exists; nothing was compared or changed."""

    flow_id: FlowId


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """The execution is now a member of the flow."""

    execution_id: ExecutionId
    new_node_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyMember:
    """The execution was a member before."""

    execution_id: ExecutionId
    node_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowHeaderCancelled:
    """The flow is cancelled; its members that the policy covers are still to be cancelled."""

    cancellation_policy: CancellationPolicy
    member_execution_ids: Sequence[ExecutionId]
    """All members of the flow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowAlreadyTerminal:
    """The flow was cancelled before; nothing was changed."""

    stored_cancellation_policy: CancellationPolicy | None
    stored_cancel_reason: str | None
    member_execution_ids: Sequence[ExecutionId]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowCancelled:
    """The flow and the members that the policy covers are cancelled."""

    cancellation_policy: CancellationPolicy
    member_execution_ids: Sequence[ExecutionId]


@dataclass(frozen=True, kw_only=True, slots=True)
class CancellationScheduled:
    """The flow is cancelled, and its members that the policy covers are being cancelled in the background."""

    cancellation_policy: CancellationPolicy
    member_count: int
    """How many members the policy covers; `member_execution_ids` has all members."""
    member_execution_ids: Sequence[ExecutionId]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartiallyCancelled:
    """The flow is cancelled, but some members could not be cancelled yet; a sweep tries them again."""

    cancellation_policy: CancellationPolicy
    member_execution_ids: Sequence[ExecutionId]
    failed_member_execution_ids: Sequence[ExecutionId]


FlowCancellation: TypeAlias = FlowCancelled | CancellationScheduled | PartiallyCancelled


class FlowNode(msgspec.Struct, kw_only=True):
    """A node of `submit_flow`: an execution to create, under a name that is unique in the call."""

    name: str
    lane_id: str
    execution_kind: str
    input_payload: bytes
    creator_identity: str
    execution_id: ExecutionId | str | None = None
    """The id of the execution, of the partition of the flow; by default a new one."""
    priority: int = 0
    payload_encoding: str | None = None
    tags: Mapping[str, str] | None = None
    policy: ExecutionPolicy | Mapping[str, object] | str | bytes | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    execution_deadline_at: int | None = None


class FlowEdge(msgspec.Struct, kw_only=True):
    """An edge of `submit_flow` between two nodes, by their names."""

    upstream: str
    downstream: str
    dependency_kind: str = SUCCESS_ONLY
    data_passing_ref: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSubmitted:
    """The whole flow was created."""

    flow_id: FlowId
    execution_ids: Mapping[str, ExecutionId]
    edge_ids: Sequence[EdgeId]
    graph_revision: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSnapshot:
    """A flow as stored."""

    flow_id: FlowId
    flow_kind: str
    namespace: Namespace
    public_flow_state: FlowState
    derived_state: FlowState
    graph_revision: int
    node_count: int
    edge_count: int
    created_at: int
    last_mutation_at: int
    cancelled_at: int | None
    cancel_reason: str | None
    cancellation_policy: CancellationPolicy | None
    tags: Mapping[str, str] = field(default_factory=dict)
    edge_groups: Sequence[EdgeGroupSnapshot] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSummary:
    """How many members of a flow are in which state, as last projected."""

    flow_id: FlowId
    total_members: int
    sampled_members: int
    members_completed: int
    members_failed: int
    members_cancelled: int
    members_expired: int
    members_skipped: int
    members_active: int
    members_suspended: int
    members_waiting: int
    members_delayed: int
    members_rate_limited: int
    members_waiting_children: int
    public_flow_state: FlowState
    last_summary_update_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowEntry:
    """A flow in a list."""

    flow_id: FlowId
    flow_kind: str
    namespace: Namespace
    created_at: int
    status: FlowStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowPage:
    """A page of flows, newest first."""

    flows: Sequence[FlowEntry]
    next_cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowEnded:
    """Every member of the flow has ended."""

    flow_id: FlowId
    status: FlowStatus


def status_of_flow(public_flow_state: str, derived_state: str) -> FlowStatus:
    """Return how lists show a flow with these stored states."""
    if FlowState.CANCELLED in (public_flow_state, derived_state):
        return FlowStatus.CANCELLED
    match derived_state:
        case FlowState.OPEN | FlowState.RUNNING | FlowState.BLOCKED:
            return FlowStatus.ACTIVE
        case FlowState.COMPLETED:
            return FlowStatus.COMPLETED
        case FlowState.FAILED:
            return FlowStatus.FAILED
        case _:
            return FlowStatus.UNKNOWN

"""What reads answer: an execution at one moment, its attempts, pages of many, and what this engine can do."""

from collections.abc import Mapping
from dataclasses import dataclass

from flowfabric.model.ids import (
    AttemptId,
    ExecutionId,
    FlowId,
    LaneId,
    LeaseId,
    Namespace,
    SuspensionId,
    WaitpointId,
    WorkerId,
    WorkerInstanceId,
)
from flowfabric.model.states import AttemptLifecycle, AttemptType, BlockingReason, LaneState, PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentAttempt:
    """The latest attempt of an execution."""

    attempt_id: AttemptId
    attempt_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentLease:
    """The lease an execution is under, held or lost."""

    lease_id: LeaseId
    lease_epoch: int
    attempt_index: int
    worker_instance_id: WorkerInstanceId
    expires_at: int
    last_heartbeat_at: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSnapshot:
    """An execution as it stood at one moment."""

    execution_id: ExecutionId
    flow_id: FlowId | None
    lane_id: LaneId
    namespace: Namespace
    public_state: PublicState
    blocking_reason: BlockingReason | None
    blocking_detail: str | None
    current_attempt: CurrentAttempt | None
    current_lease: CurrentLease | None
    current_waitpoint: WaitpointId | None
    created_at: int
    last_mutation_at: int
    total_attempt_count: int
    tags: Mapping[str, str]
    continuation_metadata_pointer: str | None = None
    """What the latest suspend of this attempt has left for whoever goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionContext:
    """What a worker needs of an execution it has claimed."""

    input_payload: bytes
    execution_kind: str
    tags: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt of an execution, running or past."""

    attempt_id: AttemptId
    execution_id: ExecutionId
    attempt_index: int
    attempt_type: AttemptType
    attempt_state: AttemptLifecycle
    created_at: int
    started_at: int
    resumed_at: int | None
    suspended_at: int | None
    suspension_id: SuspensionId | None
    suspension_marker: str | None
    ended_at: int | None
    lease_id: LeaseId | None
    lease_epoch: int
    worker_id: WorkerId | None
    worker_instance_id: WorkerInstanceId | None
    failure_reason: str | None
    failure_category: str | None
    retry_reason: str | None
    replay_reason: str | None
    replay_requested_by: str | None
    reclaim_reason: str | None
    previous_attempt_index: int | None
    replayed_from_attempt_index: int | None
    usage: Mapping[str, int]
    policy: str | None
    """The policy the attempt was claimed with, as JSON, where it has one of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSummary:
    """An execution as a line of a list."""

    execution_id: ExecutionId
    namespace: Namespace
    lane_id: LaneId
    execution_kind: str
    public_state: PublicState
    priority: int
    created_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPage:
    """A part of a list of executions; `next_cursor` leads on where there is more."""

    executions: list[ExecutionSummary]
    next_cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TagsSet:
    """The tags are stored; how many were given."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A lane of the registry."""

    lane_id: LaneId
    state: LaneState
    registered_at: int
    registered_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePage:
    """A part of the list of lanes; `next_cursor` leads on where there is more."""

    lanes: list[Lane]
    next_cursor: LaneId | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEntry:
    """A live worker of the registry."""

    namespace: Namespace
    worker_instance_id: WorkerInstanceId
    worker_id: WorkerId
    lanes: tuple[LaneId, ...]
    capabilities: tuple[str, ...]
    kinds: tuple[str, ...] | None
    """What it runs; None is any."""
    serves_all_namespaces: bool
    """Whether it takes the work of every namespace, or only that of its own."""
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    registered_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCursor:
    """A place in the list of workers: what follows it comes next."""

    namespace: str
    worker_instance_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPage:
    """A part of the list of live workers; `cursor` leads on where there is more."""

    entries: list[WorkerEntry]
    cursor: WorkerCursor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inconsistency:
    """Something about an execution that no operation can have brought about."""

    execution_id: ExecutionId
    problem: str

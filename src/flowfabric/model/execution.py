"""Executions: what a caller submits, the answers of operations, and how reads show them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec

from flowfabric.model.attempt import CurrentAttempt, Failure
from flowfabric.model.ids import ExecutionId, FlowId, LaneId, Namespace, WaitpointId
from flowfabric.model.lease import CurrentLease
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.states import BlockingReason, PublicState, StateVector, TerminalOutcome


class NewExecution(msgspec.Struct, kw_only=True):
    """An item of create_many; the fields are the arguments of create_execution."""

    namespace: str
    lane_id: str
    execution_kind: str
    input_payload: bytes
    priority: int
    creator_identity: str
    execution_id: str | None = None
    payload_encoding: str | None = None
    idempotency_key: str | None = None
    tags: Mapping[str, str] | None = None
    policy: ExecutionPolicy | Mapping[str, object] | str | bytes | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    execution_deadline_at: int | None = None
    parent_execution_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Created:
    """The execution was created."""

    execution_id: ExecutionId
    public_state: PublicState

    @classmethod
    def each(cls, execution_ids: Sequence[ExecutionId], public_state: PublicState) -> "list[Created]":
        """Return one for each id; bypasses the constructor, which is slow for a thousand frozen instances."""
        instances = [object.__new__(cls) for _ in execution_ids]
        deque(map(cls.__dict__["execution_id"].__set__, instances, execution_ids), maxlen=0)
        deque(map(cls.__dict__["public_state"].__set__, instances, repeat(public_state)), maxlen=0)
        return instances


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """The execution or its idempotency key existed already; nothing was written."""

    execution_id: ExecutionId


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    """The execution is cancelled, by this call or an earlier one."""

    execution_id: ExecutionId
    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The execution runs again: it is claimable now, or waits for its dependencies."""

    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """The execution is blocked for this reason."""

    execution_id: ExecutionId
    reason: BlockingReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Unblocked:
    """The execution is no longer blocked; it may still be delayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """The execution has the new priority."""

    execution_id: ExecutionId


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkResult:
    """What an operation on all matching executions did."""

    matched: int
    """How many executions matched, at most the limit of the call."""
    changed: int
    """How many of them were not refused; 0 in a dry run."""
    refused: Mapping[str, int]
    """How many were refused, by the code of the refusal."""
    is_dry_run: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How an execution ended: its outcome, with the result if it succeeded and the reason if it did not."""

    execution_id: ExecutionId
    outcome: TerminalOutcome
    result: bytes | None
    reason: str | None
    result_encoding: str | None = None
    error_type: str | None = None
    """The class of the exception the last attempt failed with, if the execution failed."""
    traceback: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionInfo:
    """An execution as an operator reads it; times are milliseconds since the epoch."""

    execution_id: ExecutionId
    namespace: Namespace
    lane_id: LaneId
    priority: int
    execution_kind: str
    state_vector: StateVector
    public_state: PublicState
    created_at: int
    started_at: int | None
    completed_at: int | None
    current_attempt_index: int
    flow_id: FlowId | None
    blocking_detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionStatus:
    """An execution as its submitter follows it; times are milliseconds since the epoch."""

    execution_id: ExecutionId
    execution_kind: str
    lane_id: LaneId
    namespace: Namespace
    public_state: PublicState
    attempt_index: int
    """The index of the latest attempt; 0 before the first claim."""
    attempt_count: int
    progress_percent: int | None
    """The progress that the latest attempt reported."""
    progress_message: str | None
    result: bytes | None
    result_encoding: str | None
    failure: Failure | None
    """Why the execution, or else its last failed attempt, failed; None if the execution succeeded."""
    cancellation_reason: str | None
    retry_at: int | None
    """When the next attempt may start, while the execution waits for a retry."""
    delay_until: int | None
    """When the execution becomes claimable, while it is delayed for any reason."""
    created_at: int
    started_at: int | None
    ended_at: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSnapshot:
    """An execution at one point in time."""

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
    """The pointer that the latest suspend of this attempt stored for the resumed run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionContext:
    """The input, kind and tags of an execution, for the worker that claimed it."""

    input_payload: bytes
    execution_kind: str
    tags: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSummary:
    """An execution as lists show it."""

    execution_id: ExecutionId
    namespace: Namespace
    lane_id: LaneId
    execution_kind: str
    public_state: PublicState
    priority: int
    created_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPage:
    """A page of executions; `next_cursor` is None on the last page."""

    executions: list[ExecutionSummary]
    next_cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionCount:
    """How many executions share these values; None for a field they were not grouped by."""

    lane_id: LaneId | None
    public_state: PublicState | None
    namespace: Namespace | None
    execution_kind: str | None
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inconsistency:
    """A stored state of an execution, a flow or a limit that no operation produces."""

    execution_id: ExecutionId | None
    """None if the problem is one of a whole flow or of a limit."""
    problem: str
    flow_id: FlowId | None = None
    """The flow that the problem has to do with."""

"""Executions: what a caller submits, what operations on one answer, and how reads show it."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec

from flowfabric.model.attempt import CurrentAttempt
from flowfabric.model.ids import ExecutionId, FlowId, LaneId, Namespace, WaitpointId
from flowfabric.model.lease import CurrentLease
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.states import BlockingReason, PublicState, StateVector, TerminalOutcome


class NewExecution(msgspec.Struct, kw_only=True):
    """An execution to be created, as one of many; the fields are the arguments of create_execution."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Created:
    """A new execution exists."""

    execution_id: ExecutionId
    public_state: PublicState

    @classmethod
    def each(cls, execution_ids: Sequence[ExecutionId], public_state: PublicState) -> "list[Created]":
        """One for each id, written past the constructor: that of a frozen class is slow where there are a thousand."""
        made = [object.__new__(cls) for _ in execution_ids]
        deque(map(cls.__dict__["execution_id"].__set__, made, execution_ids), maxlen=0)
        deque(map(cls.__dict__["public_state"].__set__, made, repeat(public_state)), maxlen=0)
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """The execution, or its idempotency key, existed already; nothing was written."""

    execution_id: ExecutionId


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    """The execution is cancelled, by this call or an earlier one."""

    execution_id: ExecutionId
    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How an execution ended: its outcome, its result where it succeeded, the reason where it did not."""

    execution_id: ExecutionId
    outcome: TerminalOutcome
    result: bytes | None
    reason: str | None
    result_encoding: str | None = None


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
class ExecutionCount:
    """How many executions have these values in common; None is what they were not counted by."""

    lane_id: LaneId | None
    public_state: PublicState | None
    namespace: Namespace | None
    execution_kind: str | None
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inconsistency:
    """Something about an execution that no operation can have brought about."""

    execution_id: ExecutionId
    problem: str

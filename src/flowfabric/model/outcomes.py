"""What operations answer, named as callers match on them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from flowfabric.model.handle import Handle
from flowfabric.model.ids import AttemptId, ExecutionId, FlowId, LaneId, LeaseId, Namespace, WorkerInstanceId
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.states import AttemptType, PublicState, StateVector, TerminalOutcome
from flowfabric.model.waits import SuspendDetails


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


@dataclass(frozen=True, kw_only=True)
class ClaimedExecution:
    """A lease on an execution, with all a worker needs to run it."""

    execution_id: ExecutionId
    lease_id: LeaseId
    lease_epoch: int
    attempt_index: int
    attempt_id: AttemptId
    attempt_type: AttemptType
    lease_expires_at: int
    handle: Handle
    lane_id: LaneId
    execution_kind: str
    input_payload: bytes
    payload_encoding: str | None
    tags: Mapping[str, str]
    policy: ExecutionPolicy | None
    retry_count: int
    priority: int
    attempt_timeout_ms: int | None
    """How long the attempt may still take, from this claim on; None where nothing limits it."""
    execution_deadline_at: int | None
    """When the execution expires in any case, by the store's clock; None where it has no deadline."""

    if not TYPE_CHECKING:
        # The generated initialiser of a frozen dataclass sets field by field, at several times the cost, and a
        # busy process builds tens of thousands of claims a second. Type checkers hold callers to the fields.
        def __init__(self, **fields: object) -> None:
            self.__dict__.update(fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """The lease now ends later."""

    expires_at_ms: int
    lease_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """The execution ended in success."""

    execution_id: ExecutionId
    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryScheduled:
    """The attempt failed; another follows at `delay_until`."""

    delay_until: int
    next_attempt_index: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminalFailed:
    """The attempt failed and no retry is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    """The execution is cancelled, by this call or an earlier one."""

    execution_id: ExecutionId
    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """The worker is new, or had expired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """The worker was live and stays so."""

    next_expiry_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRegistered:
    """No live worker of that name; it must register again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promoted:
    """A delayed execution is due and may be claimed."""

    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadySatisfied:
    """Nothing to do, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyMet(AlreadySatisfied):
    """A suspend need not wait, for signals that came before meet its condition; what it would have waited on."""

    details: SuspendDetails


@dataclass(frozen=True, kw_only=True, slots=True)
class Marked:
    """The mark is set: a lease as expired, a worker as dead."""


class ExpiredLeaseCursor(NamedTuple):
    """Where a page of expired leases ended; the next one begins behind it."""

    expires_at_ms: int
    execution_id: ExecutionId


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiredLease:
    """A lease of active work whose time is up."""

    execution_id: ExecutionId
    lease_id: LeaseId
    lease_epoch: int
    worker_instance_id: WorkerInstanceId
    expires_at_ms: int
    attempt_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiredLeases:
    """A page of expired leases; the cursor is there when the page was full."""

    entries: tuple[ExpiredLease, ...]
    cursor: ExpiredLeaseCursor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Expired:
    """The execution ran out of time and ended."""

    execution_id: ExecutionId


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyTerminal:
    """The execution had ended before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotYetDue:
    """The time has not come."""


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


class FailureClass(StrEnum):
    """What kind of failure a worker reports; the value is its category."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    INFRA_CRASH = "infra_crash"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FailureReason:
    """Why an attempt failed; a non-empty detail names a category of the caller's own."""

    message: str
    _: KW_ONLY
    detail: str | bytes | None = None


def failure_category(reason: FailureReason, failure_class: FailureClass) -> str:
    """Give the category the retry policy judges a failure by."""
    detail = reason.detail
    if isinstance(detail, bytes):
        try:
            detail = detail.decode()
        except UnicodeDecodeError:
            detail = None
    return detail or failure_class.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How an execution ended: its outcome, its result where it succeeded, the reason where it did not."""

    execution_id: ExecutionId
    outcome: TerminalOutcome
    result: bytes | None
    reason: str | None
    result_encoding: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOp:
    """There was nothing to prepare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What was prepared."""

    description: str

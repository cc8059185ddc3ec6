"""Leases: what claims, renewals and every end of a lease answer, and how reads show leases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from flowfabric.model.handle import Handle
from flowfabric.model.ids import AttemptId, ExecutionId, LaneId, LeaseId, WorkerInstanceId
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.states import AttemptType, PublicState


class ClaimedExecution(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    has_waited: bool
    """Whether the attempt was suspended before, and that wait is over."""
    retry_count: int
    priority: int
    attempt_timeout_ms: int | None
    """How long the attempt may still take, from this claim on; None where nothing limits it."""
    execution_deadline_at: int | None
    """When the execution expires in any case, by the store's clock; None where it has no deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentLease:
    """The lease an execution is under, held or lost."""

    lease_id: LeaseId
    lease_epoch: int
    attempt_index: int
    worker_instance_id: WorkerInstanceId | None
    expires_at: int
    last_heartbeat_at: int | None


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
class Promoted:
    """A delayed execution is due and may be claimed."""

    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadySatisfied:
    """Nothing to do, and why."""

    reason: str


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
    worker_instance_id: WorkerInstanceId | None
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

"""Leases: the answers of claims, renewals and everything that ends a lease, and how reads show leases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from flowfabric.model.handle import Handle
from flowfabric.model.ids import AttemptId, ExecutionId, LaneId, LeaseId, WorkerInstanceId
from flowfabric.model.policy import ExecutionPolicy
from flowfabric.model.states import AttemptType, PublicState


class ClaimedExecution(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A lease on an execution, with everything a worker needs to run it."""

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
    """Whether the attempt was suspended before and has been resumed."""
    retry_count: int
    priority: int
    attempt_timeout_ms: int | None
    """How long the attempt may still run, from this claim on; None for no limit."""
    execution_deadline_at: int | None
    """When the execution expires, by the database clock; None if it has no deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentLease:
    """The latest lease of an execution, held or lost."""

    lease_id: LeaseId
    lease_epoch: int
    attempt_index: int
    worker_instance_id: WorkerInstanceId | None
    expires_at: int
    last_heartbeat_at: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """The lease was extended."""

    expires_at_ms: int
    lease_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """The execution succeeded."""

    execution_id: ExecutionId
    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryScheduled:
    """The attempt failed; the next one may start at `delay_until`."""

    delay_until: int
    next_attempt_index: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminalFailed:
    """The attempt failed and is not retried: the execution failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promoted:
    """A delayed execution was due and is now claimable."""

    public_state: PublicState


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadySatisfied:
    """There was nothing to do; `reason` says why."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoked:
    """The lease was taken from its holder; the next claim takes the execution over."""

    lease_id: LeaseId
    lease_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Marked:
    """The lease is marked as expired, or the worker as dead."""


class ExpiredLeaseCursor(NamedTuple):
    """The last lease of a page; the next page starts after it."""

    expires_at_ms: int
    execution_id: ExecutionId


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiredLease:
    """An expired lease of an active execution."""

    execution_id: ExecutionId
    lease_id: LeaseId
    lease_epoch: int
    worker_instance_id: WorkerInstanceId | None
    expires_at_ms: int
    attempt_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiredLeases:
    """A page of expired leases; `cursor` is set if the page was full."""

    entries: tuple[ExpiredLease, ...]
    cursor: ExpiredLeaseCursor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Expired:
    """The execution expired."""

    execution_id: ExecutionId


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyTerminal:
    """The execution had already ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotYetDue:
    """The timer is not due yet."""

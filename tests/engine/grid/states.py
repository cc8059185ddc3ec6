"""The states of the grid, each reached through real operations."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import asyncpg

from fixtures import Clock
from flowfabric.engine.engine import Engine
from flowfabric.model.handle import Handle
from flowfabric.model.ids import AttemptId, ExecutionId, LaneId, LeaseId, WorkerInstanceId
from flowfabric.model.states import HandleKind

from ..flows import flow_of  # noqa: TID252
from ..state import (  # noqa: TID252
    ACTIVE,
    BACKING_OFF,
    CANCELLED,
    COMPLETED,
    DELAYED,
    EXPIRED_LEASE,
    FAILED,
    PARKED,
    REPLAYED,
    RESUMABLE,
    RETRYABLE,
    REVOKED,
    WAITING,
    revoke,
)

WAITING_CHILDREN = (
    "runnable/unowned/blocked_by_dependencies/waiting_for_children/none/pending_first_attempt/waiting_children"
)
LIMITED = "runnable/unowned/blocked_by_quota/waiting_for_quota/none/pending_first_attempt/rate_limited"
PAUSED = "runnable/unowned/blocked_by_operator/paused_by_operator/none/pending_first_attempt/waiting"
PARKED_FOR_CHILDREN = WAITING_CHILDREN.replace("pending_first_attempt", "attempt_interrupted")
EXPIRED = "terminal/unowned/not_applicable/none/expired/attempt_terminal/expired"

MINUTE = 60_000
HOUR = 60 * MINUTE
LEASE_MS = 30_000
GRANT_MS = 5_000
NO_RETRIES: dict[str, Any] = {"timeout_policy": {"attempt_timeout_ms": HOUR}}
POLICY: dict[str, Any] = {
    "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": MINUTE}},
    **NO_RETRIES,
}
WORKER: dict[str, Any] = {"worker_id": "worker", "worker_instance_id": "worker-1"}
OTHER: dict[str, Any] = {"worker_id": "other", "worker_instance_id": "other-1"}


class Subject:
    """One execution on its own lane, with its last lease and its last grant."""

    def __init__(self, engine: Engine, clock: Clock, connection: asyncpg.Connection) -> None:
        self.engine = engine
        self.clock = clock
        self.connection = connection
        self.lane_id = LaneId(f"lane {uuid4()}")
        self.execution_id = ExecutionId(f"{{fp:1}}:{uuid4()}")
        self.handle = Handle(
            kind=HandleKind.FRESH,
            execution_id=self.execution_id,
            attempt_index=0,
            attempt_id=AttemptId(uuid4()),
            lease_id=LeaseId(uuid4()),
            lease_epoch=0,
            lease_ttl_ms=LEASE_MS,
            lane_id=self.lane_id,
            worker_instance_id=WorkerInstanceId("worker-1"),
        )
        """The last lease; before the first, an invented one with the epoch of a new execution."""
        self.grant: Any = None

    @property
    def named(self) -> dict[str, Any]:
        """The execution and its lane, as arguments."""
        return {"execution_id": self.execution_id, "lane_id": self.lane_id}

    @property
    def fence(self) -> dict[str, Any]:
        """The last lease, as the arguments of a service form."""
        handle = self.handle
        return {
            "execution_id": handle.execution_id,
            "lease_id": handle.lease_id,
            "lease_epoch": handle.lease_epoch,
            "attempt_id": handle.attempt_id,
            "attempt_index": handle.attempt_index,
        }

    async def create(
        self, *, delay_ms: int = 0, deadline_ms: int = 100 * HOUR, policy: dict[str, Any] | None = None
    ) -> Any:
        now = await self.clock.now()
        return await self.engine.create_execution(
            **self.named,
            namespace="tests",
            execution_kind="job",
            input_payload=b"{}",
            priority=0,
            creator_identity="test",
            policy=policy or POLICY,
            delay_until=now + delay_ms if delay_ms else None,
            execution_deadline_at=now + deadline_ms,
        )

    async def depend(self) -> None:
        """Make the execution depend on another one, on a lane of its own."""
        created = await self.engine.create_execution(
            execution_id=ExecutionId(f"{{fp:1}}:{uuid4()}"),
            namespace="tests",
            lane_id=f"upstream {uuid4()}",
            execution_kind="job",
            input_payload=b"{}",
            priority=0,
            creator_identity="test",
        )
        upstream = created.execution_id
        await flow_of(self.engine, [upstream, self.execution_id], [(upstream, self.execution_id)])

    async def claim(self, *, lease_ttl_ms: int = LEASE_MS) -> None:
        claimed = await self.engine.claim(lane_id=self.lane_id, **WORKER, lease_ttl_ms=lease_ttl_ms)
        assert claimed is not None
        self.handle = claimed


Reach = Callable[[Subject], Awaitable[object]]


async def _absent(subject: Subject) -> None:
    """Create nothing."""


async def _waiting(subject: Subject) -> None:
    await subject.create()


async def _delayed(subject: Subject) -> None:
    await subject.create(delay_ms=MINUTE)


async def _limited(subject: Subject) -> None:
    await _waiting(subject)
    await subject.engine.block_execution_for_admission(subject.execution_id, "waiting_for_quota")


async def _paused(subject: Subject) -> None:
    await _waiting(subject)
    await subject.engine.block_execution_for_admission(subject.execution_id, "paused_by_operator")


async def _due(subject: Subject) -> None:
    await _delayed(subject)
    await subject.clock.advance(ms=MINUTE)


async def _past_deadline(subject: Subject) -> None:
    await subject.create(deadline_ms=MINUTE)
    await subject.clock.advance(ms=MINUTE)


async def _granted(subject: Subject) -> None:
    await _waiting(subject)
    subject.grant = await subject.engine.issue_claim_grant(**subject.named, **WORKER, grant_ttl_ms=GRANT_MS)


async def _grant_expired(subject: Subject) -> None:
    await _granted(subject)
    await subject.clock.advance(ms=GRANT_MS)


async def _active(subject: Subject) -> None:
    await _waiting(subject)
    await subject.claim()


async def _past_timeout(subject: Subject) -> None:
    await _waiting(subject)
    await subject.claim(lease_ttl_ms=2 * HOUR)
    await subject.clock.advance(ms=HOUR)


async def _past_last_timeout(subject: Subject) -> None:
    await subject.create(policy=NO_RETRIES)
    await subject.claim(lease_ttl_ms=2 * HOUR)
    await subject.clock.advance(ms=HOUR)


async def _past_expiry(subject: Subject) -> None:
    await _active(subject)
    await subject.clock.advance(ms=LEASE_MS)


async def _lease_expired(subject: Subject) -> None:
    await _past_expiry(subject)
    await subject.engine.mark_lease_expired_if_due(subject.execution_id)


async def _lost_past_timeout(subject: Subject) -> None:
    await _lease_expired(subject)
    await subject.clock.advance(ms=HOUR)


async def _lease_revoked(subject: Subject) -> None:
    await _active(subject)
    await revoke(subject.engine, subject.execution_id)


async def _reclaim_granted(subject: Subject) -> None:
    await _lease_expired(subject)
    subject.grant = await subject.engine.issue_reclaim_grant(**subject.named, **WORKER, grant_ttl_ms=GRANT_MS)


async def _backing_off(subject: Subject) -> None:
    await _active(subject)
    await subject.engine.fail(subject.handle, reason="no luck")


async def _retryable(subject: Subject) -> None:
    await _backing_off(subject)
    await subject.clock.advance(ms=MINUTE)
    await subject.engine.promote_delayed(subject.execution_id)


async def _replayed(subject: Subject) -> None:
    await _completed(subject)
    await subject.engine.replay_execution(execution_id=subject.execution_id)


async def _parked(subject: Subject) -> None:
    await _active(subject)
    await subject.engine.delay(subject.handle, await subject.clock.now() + MINUTE)


async def _waiting_children(subject: Subject) -> None:
    await _waiting(subject)
    await subject.depend()


async def _parked_for_children(subject: Subject) -> None:
    await _active(subject)
    await subject.depend()
    await subject.engine.wait_children(subject.handle)


async def _parked_due(subject: Subject) -> None:
    await _parked(subject)
    await subject.clock.advance(ms=MINUTE)


async def _resumable(subject: Subject) -> None:
    await _parked_due(subject)
    await subject.engine.promote_delayed(subject.execution_id)


async def _resume_granted(subject: Subject) -> None:
    await _resumable(subject)
    subject.grant = await subject.engine.issue_claim_grant(**subject.named, **WORKER, grant_ttl_ms=GRANT_MS)


async def _completed(subject: Subject) -> None:
    await _active(subject)
    await subject.engine.complete(subject.handle, b"done")


async def _failed(subject: Subject) -> None:
    await _active(subject)
    await subject.engine.fail(subject.handle, reason="no luck", classification="permanent")


async def _cancelled(subject: Subject) -> None:
    await _active(subject)
    await subject.engine.cancel_execution(execution_id=subject.execution_id, reason="not wanted")


async def _expired(subject: Subject) -> None:
    await subject.create(deadline_ms=MINUTE)
    await subject.claim()
    await subject.clock.advance(ms=MINUTE)
    await subject.engine.expire_execution(subject.execution_id, "execution_deadline")


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A state of the grid: its meaning, its vector, the attempts so far, and how to reach it."""

    means: str
    vector: str | None
    attempts: tuple[str, ...] = ()
    reach: Reach


STATES = {
    "absent": State(means="no such execution", vector=None, reach=_absent),
    "waiting": State(means="new, claimable", vector=WAITING, reach=_waiting),
    "delayed": State(means="new, not claimable yet", vector=DELAYED, reach=_delayed),
    "limited": State(means="new, blocked by a limit", vector=LIMITED, reach=_limited),
    "paused": State(means="new, blocked by an operator", vector=PAUSED, reach=_paused),
    "waiting_children": State(
        means="new, waits for its dependencies", vector=WAITING_CHILDREN, reach=_waiting_children
    ),
    "due": State(means="delayed, due, not promoted yet", vector=DELAYED, reach=_due),
    "past_deadline": State(means="waiting, past its deadline, not expired yet", vector=WAITING, reach=_past_deadline),
    "granted": State(means="waiting, with a live grant for the worker", vector=WAITING, reach=_granted),
    "grant_expired": State(means="waiting, with an expired grant", vector=WAITING, reach=_grant_expired),
    "active": State(means="a worker holds its lease", vector=ACTIVE, attempts=("started",), reach=_active),
    "past_timeout": State(
        means="active, past its attempt timeout, not expired yet",
        vector=ACTIVE,
        attempts=("started",),
        reach=_past_timeout,
    ),
    "past_last_timeout": State(
        means="past_timeout, with no retry left", vector=ACTIVE, attempts=("started",), reach=_past_last_timeout
    ),
    "past_expiry": State(
        means="active, its lease has expired and is not marked yet",
        vector=ACTIVE,
        attempts=("started",),
        reach=_past_expiry,
    ),
    "lease_expired": State(
        means="active, its lease has expired and is marked",
        vector=EXPIRED_LEASE,
        attempts=("started",),
        reach=_lease_expired,
    ),
    "lost_past_timeout": State(
        means="lease_expired, past its attempt timeout",
        vector=EXPIRED_LEASE,
        attempts=("started",),
        reach=_lost_past_timeout,
    ),
    "lease_revoked": State(
        means="active, an operator revoked the lease", vector=REVOKED, attempts=("started",), reach=_lease_revoked
    ),
    "reclaim_granted": State(
        means="lease_expired, with a live reclaim grant for the worker",
        vector=EXPIRED_LEASE,
        attempts=("started",),
        reach=_reclaim_granted,
    ),
    "backing_off": State(
        means="an attempt failed, the retry waits for its backoff",
        vector=BACKING_OFF,
        attempts=("ended_failure",),
        reach=_backing_off,
    ),
    "retryable": State(
        means="an attempt failed, the retry is claimable",
        vector=RETRYABLE,
        attempts=("ended_failure",),
        reach=_retryable,
    ),
    "replayed": State(
        means="ended, and replayed: a new attempt is claimable",
        vector=REPLAYED,
        attempts=("ended_success",),
        reach=_replayed,
    ),
    "parked": State(
        means="its worker delayed it; the attempt continues later",
        vector=PARKED,
        attempts=("suspended",),
        reach=_parked,
    ),
    "parked_for_children": State(
        means="its worker waits for its dependencies; the attempt continues later",
        vector=PARKED_FOR_CHILDREN,
        attempts=("suspended",),
        reach=_parked_for_children,
    ),
    "parked_due": State(
        means="parked, due, not promoted yet",
        vector=PARKED,
        attempts=("suspended",),
        reach=_parked_due,
    ),
    "resumable": State(
        means="its interrupted attempt is claimable", vector=RESUMABLE, attempts=("suspended",), reach=_resumable
    ),
    "resume_granted": State(
        means="resumable, with a live grant for the worker",
        vector=RESUMABLE,
        attempts=("suspended",),
        reach=_resume_granted,
    ),
    "completed": State(means="ended in success", vector=COMPLETED, attempts=("ended_success",), reach=_completed),
    "failed": State(means="ended in failure", vector=FAILED, attempts=("ended_failure",), reach=_failed),
    "cancelled": State(
        means="cancelled by an operator while it ran", vector=CANCELLED, attempts=("ended_cancelled",), reach=_cancelled
    ),
    "expired": State(
        means="expired at its deadline while it ran", vector=EXPIRED, attempts=("ended_failure",), reach=_expired
    ),
}

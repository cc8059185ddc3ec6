"""An engine that records the ends of leases and executions, and every way to bring one about."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from engine.flow.graphs import BuiltFlow
from engine.state import claim, refused
from engine.waits import suspend_args, triple
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.db.database import Transaction
from flowfabric.engine.core.consequence import Attachment, EndedLease
from flowfabric.engine.core.transition import Move
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, split_execution_id
from flowfabric.model.lease import AlreadySatisfied, Completed, Revoked

BIT = Attachment(64)
"""A kind of attachment that only this test has."""
TTL_MS = 30_000

Seen = list[tuple[ExecutionId, Move, bool]]


@dataclass
class Scene:
    """An engine with one more consequence, which records what it is called with."""

    given: Given
    clock: Clock
    connection: asyncpg.Connection
    calls: list[int] = field(default_factory=list)
    """How many executions each call of the consequence was about."""
    fault: Exception | None = None
    """Raised by the consequence, after it has written."""
    lane: str = "default"
    """The lane of the executions that are made from now on."""

    @property
    def engine(self) -> Engine:
        """The engine under test."""
        return self.given.engine

    async def see(self, transaction: Transaction, ended: Sequence[EndedLease]) -> None:
        """Record what has ended, in the transaction that ended it."""
        self.calls.append(len(ended))
        await transaction.connection.executemany(
            "insert into test_ended (execution_id, move, is_terminal) values ($1, $2, $3)",
            [(each.execution_id, each.move, each.is_terminal) for each in ended],
        )
        if self.fault is not None:
            raise self.fault

    async def attach(self, *execution_ids: ExecutionId) -> None:
        """Attach something to executions."""
        await self.connection.executemany(
            "update execution set attached = attached | $3 where partition_key = $1 and execution_id = $2",
            [(*split_execution_id(execution_id), BIT.value) for execution_id in execution_ids],
        )

    async def seen(self) -> Seen:
        """What the consequence was called with, if that is committed."""
        rows = await self.connection.fetch("select execution_id, move, is_terminal from test_ended order by nth")
        return [(ExecutionId(row[0]), Move(row[1]), row[2]) for row in rows]

    async def attached(self, execution_id: ExecutionId) -> int:
        """The attachment bits of an execution."""
        bits: int = await self.connection.fetchval(
            "select attached from execution where execution_id = $1", uuid_of(execution_id)
        )
        return bits

    async def claimed(self, **overrides: Any) -> Handle:
        """The handle of a new run."""
        return await self.given.claimed(lane_id=self.lane, **overrides)

    async def created(self, **overrides: Any) -> ExecutionId:
        """A new execution."""
        return await self.given.created(lane_id=self.lane, **overrides)

    async def expired(self, **overrides: Any) -> Handle:
        """The handle of a run whose lease has expired and is not marked yet."""
        return await self.given.expired_lease(lease_ttl_ms=TTL_MS, lane_id=self.lane, **overrides)

    async def clear(self, execution_id: ExecutionId) -> None:
        """End an execution if it has not ended, and forget what the consequence has seen."""
        self.fault = None
        with contextlib.suppress(EngineError):
            await self.engine.cancel_execution(execution_id=execution_id, reason="the next case follows")
        await self.connection.execute("delete from test_ended")
        self.calls.clear()

    async def retried(self, *, delay_ms: int = 60_000, timeout_ms: int = 0) -> Handle:
        """The handle of a run whose policy retries it."""
        policy: dict[str, Any] = {
            "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": delay_ms}}
        }
        if timeout_ms:
            policy["timeout_policy"] = {"attempt_timeout_ms": timeout_ms}
        return await self.claimed(policy=policy, lease_ttl_ms=TTL_MS)

    async def timed_out(self, **retries: int) -> Handle:
        """The handle of a run past its attempt timeout, within its lease."""
        if retries:
            handle = await self.retried(timeout_ms=1000, **retries)
        else:
            handle = await self.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 1000}})
        await self.clock.advance(ms=1001)
        return handle

    async def dependent(self) -> tuple[Handle, Handle]:
        """The handles of two runs of a flow, the second of which depends on the first."""
        flow = await BuiltFlow.create(self.given, Rows(self.connection))
        child = await self.claimed(execution_id=flow.mint())
        upstream = await self.given.claimed(execution_id=flow.mint(), lane_id="upstream run")
        for handle in (child, upstream):
            await flow.add(handle.execution_id)
        await flow.connect(upstream.execution_id, child.execution_id)
        return upstream, child

    async def waiting(self, behavior: str) -> ExecutionId:
        """A suspended execution past the timeout of its wait."""
        handle = await self.claimed()
        timeout_at = await self.clock.now() + 1000
        await self.engine.suspend(handle, suspend_args(timeout_at=timeout_at, timeout_behavior=behavior))
        await self.clock.advance(ms=1001)
        return handle.execution_id

    async def lost(self, **overrides: Any) -> ExecutionId:
        """An execution whose lease has expired and is not marked yet."""
        return (await self.expired(**overrides)).execution_id

    async def at_reclaim_limit(self) -> ExecutionId:
        """An execution whose lease was lost as often as its policy allows."""
        execution_id = await self.lost(policy={"max_reclaim_count": 1})
        await claim(self.engine, self.lane)
        await self.clock.advance(ms=TTL_MS + 1)
        assert await parts_of(self.engine).lease_expiry.mark_expired([execution_id]) == 1
        return execution_id


Way = Callable[[Scene], AsyncIterator[ExecutionId]]
WAYS: dict[str, tuple[Move, Way]] = {}
"""Ways to end a lease or an execution, by name: each yields the execution, and ends it on the next step."""


def way(move: Move) -> Callable[[Way], Way]:
    """Register a way under the name of its function."""

    def add(make: Way) -> Way:
        WAYS[make.__name__] = (move, make)
        return make

    return add


@way(Move.COMPLETED)
async def complete(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.complete(handle, b"done")


@way(Move.COMPLETED)
async def complete_many(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    (answer,) = await scene.engine.complete_many([(handle, b"done")])
    assert isinstance(answer, Completed)


@way(Move.COMPLETED)
async def complete_execution(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.complete_execution(**triple(handle), payload=b"done")


@way(Move.FAILED)
async def fail(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.fail(handle, reason="no luck")


@way(Move.FAILED)
async def fail_execution(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.fail_execution(**triple(handle), failure_reason="no luck")


@way(Move.RETRY)
async def fail_and_retry(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.retried()
    yield handle.execution_id
    await scene.engine.fail(handle, reason="no luck")


@way(Move.RETRY_NOW)
async def fail_and_retry_at_once(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.retried(delay_ms=0)
    yield handle.execution_id
    await scene.engine.fail(handle, reason="no luck")


@way(Move.CANCELLED)
async def cancel(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.cancel(handle, "not wanted")


@way(Move.CANCELLED)
async def cancel_what_waits(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.created()
    yield execution_id
    await scene.engine.cancel_execution(execution_id=execution_id, reason="not wanted")


@way(Move.CANCELLED)
async def cancel_what_is_suspended(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    await scene.engine.suspend(handle, suspend_args())
    yield handle.execution_id
    await scene.engine.cancel_execution(execution_id=handle.execution_id, reason="not wanted")


@way(Move.TIMEOUT_RETRY)
async def time_out_and_retry(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.timed_out(delay_ms=60_000)
    yield handle.execution_id
    await scene.engine.expire_execution(handle.execution_id, "attempt_timeout")


@way(Move.TIMEOUT_RETRY_NOW)
async def time_out_and_retry_at_once(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.timed_out(delay_ms=0)
    yield handle.execution_id
    await scene.engine.expire_execution(handle.execution_id, "attempt_timeout")


@way(Move.TIMEOUT_EXPIRED)
async def time_out(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.timed_out()
    yield handle.execution_id
    await scene.engine.expire_execution(handle.execution_id, "attempt_timeout")


@way(Move.TIMEOUT_EXPIRED)
async def sweep_timeouts(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.timed_out()
    yield handle.execution_id
    assert await parts_of(scene.engine).timeouts.expire_due() == 1


@way(Move.DEADLINE_EXPIRED)
async def pass_the_deadline(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.created(execution_deadline_at=await scene.clock.now() + 1000)
    await scene.clock.advance(ms=1001)
    yield execution_id
    assert await parts_of(scene.engine).timeouts.expire_due() == 1


@way(Move.RECLAIM_LIMIT)
async def claim_at_the_reclaim_limit(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.at_reclaim_limit()
    yield execution_id
    assert await claim(scene.engine, scene.lane) == []


@way(Move.RECLAIM_LIMIT)
async def grant_at_the_reclaim_limit(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.at_reclaim_limit()
    yield execution_id
    await scene.engine.issue_reclaim_grant(
        execution_id=execution_id, worker_id="other", worker_instance_id="other-1", lane_id=scene.lane
    )


@way(Move.DELAYED)
async def delay(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.delay(handle, await scene.clock.now() + 60_000)


@way(Move.CHILDREN_DONE)
async def wait_for_no_children(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.wait_children(handle)


@way(Move.WAITING_CHILDREN)
async def wait_for_children(scene: Scene) -> AsyncIterator[ExecutionId]:
    flow = await BuiltFlow.create(scene.given, Rows(scene.connection))
    handle = await scene.claimed(execution_id=flow.mint())
    await flow.add(handle.execution_id)
    await flow.connect(await flow.member(lane_id="upstream"), handle.execution_id)
    yield handle.execution_id
    await scene.engine.wait_children(handle)


@way(Move.SKIPPED)
async def skip_what_runs(scene: Scene) -> AsyncIterator[ExecutionId]:
    upstream, child = await scene.dependent()
    yield child.execution_id
    await scene.engine.fail(upstream, reason="no luck", classification="permanent")
    await parts_of(scene.engine).cascade.drain()


@way(Move.SKIPPED)
async def skip_what_waits_within_an_attempt(scene: Scene) -> AsyncIterator[ExecutionId]:
    upstream, child = await scene.dependent()
    await scene.engine.suspend(child, suspend_args())
    yield child.execution_id
    await scene.engine.fail(upstream, reason="no luck", classification="permanent")
    await parts_of(scene.engine).cascade.drain()


@way(Move.SKIPPED_UNATTEMPTED)
async def skip_what_never_ran(scene: Scene) -> AsyncIterator[ExecutionId]:
    flow = await BuiltFlow.create(scene.given, Rows(scene.connection))
    child = await flow.member(lane_id=scene.lane)
    upstream = await flow.member(lane_id="upstream")
    await flow.connect(upstream, child)
    yield child
    await scene.engine.cancel_execution(execution_id=upstream, reason="not wanted")
    await parts_of(scene.engine).cascade.drain()


@way(Move.HANDED_BACK)
async def hand_back(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.hand_back(handle)


@way(Move.NOT_STARTED)
async def hand_back_unstarted(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.hand_back(handle, was_started=False)


@way(Move.SUSPENDED)
async def suspend(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.suspend(handle, suspend_args())


@way(Move.SUSPENDED)
async def suspend_by_triple(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    await scene.engine.suspend_by_triple(**triple(handle), args=suspend_args())


@way(Move.SUSPENSION_FAILED)
async def fail_by_the_timeout_of_a_wait(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.waiting("fail")
    yield execution_id
    await scene.engine.expire_suspension(execution_id)


@way(Move.SUSPENSION_CANCELLED)
async def cancel_by_the_timeout_of_a_wait(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.waiting("cancel")
    yield execution_id
    await scene.engine.expire_suspension(execution_id)


@way(Move.SUSPENSION_EXPIRED)
async def sweep_the_timeouts_of_waits(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.waiting("expire")
    yield execution_id
    assert await parts_of(scene.engine).suspension_timeouts.expire_due() == 1


@way(Move.LEASE_EXPIRED)
async def mark_a_lost_lease(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    await scene.engine.mark_lease_expired_if_due(execution_id)


@way(Move.LEASE_EXPIRED)
async def sweep_lost_leases(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    assert await parts_of(scene.engine).lease_expiry.sweep() == 1


@way(Move.LEASE_EXPIRED)
async def claim_a_lost_lease(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    assert [run.execution_id for run in await claim(scene.engine, scene.lane)] == [execution_id]


@way(Move.LEASE_EXPIRED)
async def complete_after_the_lease_expired(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.expired()
    yield handle.execution_id
    await refused(scene.engine.complete(handle, b"late"), "lease_expired")


@way(Move.LEASE_EXPIRED)
async def revoke_a_lost_lease(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    assert await scene.engine.revoke_lease(execution_id) == AlreadySatisfied(reason="already_expired")


@way(Move.LEASE_REVOKED)
async def revoke_lease(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.claimed()
    yield handle.execution_id
    assert isinstance(await scene.engine.revoke_lease(handle.execution_id), Revoked)


@way(Move.LEASE_EXPIRED)
async def grant_a_lost_lease(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    await scene.engine.issue_reclaim_grant(
        execution_id=execution_id, worker_id="other", worker_instance_id="other-1", lane_id=scene.lane
    )

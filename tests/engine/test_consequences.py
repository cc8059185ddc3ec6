"""What hangs on an execution is seen to by one owner: every way a lease or an execution ends passes it exactly once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest

from creates import new
from engine.state import claim, refused
from engine.waits import args, triple
from fixtures import Engines, Given
from flowfabric.db.database import Transaction
from flowfabric.engine import engine as engines_module
from flowfabric.engine.core.consequence import Attachment, Ended
from flowfabric.engine.core.transition import Release
from flowfabric.engine.engine import Engine
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, split_execution_id
from flowfabric.model.lease import Completed

BIT = Attachment(64)
"""A kind of attachment that only this test has."""
TTL_MS = 30_000

Seen = list[tuple[ExecutionId, Release, bool]]


@dataclass
class Scene:
    """An engine with one more consequence, which writes down what it sees."""

    given: Given
    clock: Any
    connection: asyncpg.Connection
    calls: list[int] = field(default_factory=list)
    """How many executions each call of the consequence was about."""
    fault: Exception | None = None
    """Raised by the consequence, after it has written."""

    @property
    def engine(self) -> Engine:
        """The engine under test."""
        return self.given.engine

    async def see(self, transaction: Transaction, ended: Sequence[Ended]) -> None:
        """Write down what has ended, in the transaction that ended it."""
        self.calls.append(len(ended))
        await transaction.connection.executemany(
            "insert into test_ended (execution_id, move, is_terminal) values ($1, $2, $3)",
            [(each.execution_id, each.move, each.is_terminal) for each in ended],
        )
        if self.fault is not None:
            raise self.fault

    async def attach(self, *execution_ids: ExecutionId) -> None:
        """Hang something on executions."""
        await self.connection.executemany(
            "update execution set attached = attached | $3 where partition_key = $1 and execution_id = $2",
            [(*split_execution_id(execution_id), BIT.value) for execution_id in execution_ids],
        )

    async def seen(self) -> Seen:
        """What the consequence has seen, as far as it is committed."""
        rows = await self.connection.fetch("select execution_id, move, is_terminal from test_ended order by nth")
        return [(ExecutionId(row[0]), Release(row[1]), row[2]) for row in rows]

    async def attached(self, execution_id: ExecutionId) -> int:
        """The bits of an execution."""
        bits: int = await self.connection.fetchval(
            "select attached from execution where execution_id = $1", execution_id[-36:]
        )
        return bits

    async def retried(self, *, delay_ms: int = 60_000, timeout_ms: int = 0) -> Handle:
        """The handle of a run whose policy tries it again."""
        policy: dict[str, Any] = {
            "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": delay_ms}}
        }
        if timeout_ms:
            policy["timeout_policy"] = {"attempt_timeout_ms": timeout_ms}
        return await self.given.claimed(policy=policy, lease_ttl_ms=TTL_MS)

    async def timed_out(self, **retries: int) -> Handle:
        """The handle of a run past its attempt timeout, within its lease."""
        if retries:
            handle = await self.retried(timeout_ms=1000, **retries)
        else:
            handle = await self.given.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 1000}})
        await self.clock.advance(ms=1001)
        return handle

    async def waiting(self, behavior: str) -> ExecutionId:
        """A suspended execution whose wait is over its time."""
        handle = await self.given.claimed()
        timeout_at = await self.clock.now() + 1000
        await self.engine.suspend(handle, args(timeout_at=timeout_at, timeout_behavior=behavior))
        await self.clock.advance(ms=1001)
        return handle.execution_id

    async def lost(self, **overrides: Any) -> ExecutionId:
        """An execution whose lease has expired and is not marked yet."""
        return (await self.given.expired_lease(lease_ttl_ms=TTL_MS, **overrides)).execution_id

    async def at_reclaim_limit(self) -> ExecutionId:
        """An execution whose lease is lost as often as its policy allows."""
        execution_id = await self.lost(policy={"max_reclaim_count": 1})
        await claim(self.engine)
        await self.clock.advance(ms=TTL_MS + 1)
        assert await self.engine.lease_expiry.mark_expired([execution_id]) == 1
        return execution_id


@pytest.fixture
def alteration() -> str:
    """A table for what the consequence sees."""
    return """create table test_ended (nth int generated always as identity, execution_id text, move text,
                                       is_terminal boolean, xid xid8 default pg_current_xact_id())"""


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch, engines: Engines, clock: Any, connection: asyncpg.Connection) -> Scene:
    """An engine whose consequences are those it has and one of this test's own."""

    async def see(transaction: Transaction, ended: Sequence[Ended]) -> None:
        await found.see(transaction, ended)

    monkeypatch.setattr(engines_module, "CONSEQUENCES", {**engines_module.CONSEQUENCES, BIT: see})
    found = Scene(Given(await engines(), clock), clock, connection)
    return found


Way = Callable[[Scene], AsyncIterator[ExecutionId]]
WAYS: dict[str, tuple[Release, Way]] = {}
"""Ways to end a lease or an execution, by name: each gives the execution, and ends it when it is asked for more."""


def way(move: Release) -> Callable[[Way], Way]:
    """Name a way by its function."""

    def add(make: Way) -> Way:
        WAYS[make.__name__] = (move, make)
        return make

    return add


@way(Release.COMPLETED)
async def complete(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.complete(handle, b"done")


@way(Release.COMPLETED)
async def complete_many(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    (answer,) = await scene.engine.complete_many([(handle, b"done")])
    assert isinstance(answer, Completed)


@way(Release.COMPLETED)
async def complete_execution(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.complete_execution(**triple(handle), payload=b"done")


@way(Release.FAILED)
async def fail(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.fail(handle, reason="no luck")


@way(Release.FAILED)
async def fail_execution(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.fail_execution(**triple(handle), failure_reason="no luck")


@way(Release.RETRY)
async def fail_and_retry(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.retried()
    yield handle.execution_id
    await scene.engine.fail(handle, reason="no luck")


@way(Release.RETRY_NOW)
async def fail_and_retry_at_once(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.retried(delay_ms=0)
    yield handle.execution_id
    await scene.engine.fail(handle, reason="no luck")


@way(Release.CANCELLED)
async def cancel(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.cancel(handle, "not wanted")


@way(Release.CANCELLED)
async def cancel_what_waits(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.given.created()
    yield execution_id
    await scene.engine.cancel_execution(execution_id=execution_id, reason="not wanted")


@way(Release.CANCELLED)
async def cancel_what_is_suspended(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    await scene.engine.suspend(handle, args())
    yield handle.execution_id
    await scene.engine.cancel_execution(execution_id=handle.execution_id, reason="not wanted")


@way(Release.TIMEOUT_RETRY)
async def time_out_and_retry(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.timed_out(delay_ms=60_000)
    yield handle.execution_id
    await scene.engine.expire_execution(handle.execution_id, "attempt_timeout")


@way(Release.TIMEOUT_RETRY_NOW)
async def time_out_and_retry_at_once(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.timed_out(delay_ms=0)
    yield handle.execution_id
    await scene.engine.expire_execution(handle.execution_id, "attempt_timeout")


@way(Release.TIMEOUT_EXPIRED)
async def time_out(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.timed_out()
    yield handle.execution_id
    await scene.engine.expire_execution(handle.execution_id, "attempt_timeout")


@way(Release.TIMEOUT_EXPIRED)
async def sweep_timeouts(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.timed_out()
    yield handle.execution_id
    assert await scene.engine.timeouts.expire_due() == 1


@way(Release.DEADLINE_EXPIRED)
async def pass_the_deadline(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.given.created(execution_deadline_at=await scene.clock.now() + 1000)
    await scene.clock.advance(ms=1001)
    yield execution_id
    assert await scene.engine.timeouts.expire_due() == 1


@way(Release.RECLAIM_LIMIT)
async def claim_at_the_reclaim_limit(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.at_reclaim_limit()
    yield execution_id
    assert await claim(scene.engine) == []


@way(Release.RECLAIM_LIMIT)
async def grant_at_the_reclaim_limit(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.at_reclaim_limit()
    yield execution_id
    await scene.engine.issue_reclaim_grant(
        execution_id=execution_id, worker_id="other", worker_instance_id="other-1", lane_id="default"
    )


@way(Release.DELAYED)
async def delay(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.delay(handle, await scene.clock.now() + 60_000)


@way(Release.CHILDREN_DONE)
async def wait_children(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.wait_children(handle)


@way(Release.HANDED_BACK)
async def hand_back(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.hand_back(handle)


@way(Release.NOT_STARTED)
async def hand_back_unstarted(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.hand_back(handle, was_started=False)


@way(Release.SUSPENDED)
async def suspend(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.suspend(handle, args())


@way(Release.SUSPENDED)
async def suspend_by_triple(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.claimed()
    yield handle.execution_id
    await scene.engine.suspend_by_triple(**triple(handle), args=args())


@way(Release.SUSPENSION_FAILED)
async def fail_by_the_timeout_of_a_wait(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.waiting("fail")
    yield execution_id
    await scene.engine.expire_suspension(execution_id)


@way(Release.SUSPENSION_CANCELLED)
async def cancel_by_the_timeout_of_a_wait(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.waiting("cancel")
    yield execution_id
    await scene.engine.expire_suspension(execution_id)


@way(Release.SUSPENSION_EXPIRED)
async def sweep_the_timeouts_of_waits(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.waiting("expire")
    yield execution_id
    assert await scene.engine.suspension_timeouts.expire_due() == 1


@way(Release.LEASE_EXPIRED)
async def mark_a_lost_lease(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    await scene.engine.mark_lease_expired_if_due(execution_id)


@way(Release.LEASE_EXPIRED)
async def sweep_lost_leases(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    assert await scene.engine.lease_expiry.sweep() == 1


@way(Release.LEASE_EXPIRED)
async def claim_a_lost_lease(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    assert [run.execution_id for run in await claim(scene.engine)] == [execution_id]


@way(Release.LEASE_EXPIRED)
async def complete_after_the_lease_expired(scene: Scene) -> AsyncIterator[ExecutionId]:
    handle = await scene.given.expired_lease(lease_ttl_ms=TTL_MS)
    yield handle.execution_id
    await refused(scene.engine.complete(handle, b"late"), "lease_expired")


@way(Release.LEASE_EXPIRED)
async def grant_a_lost_lease(scene: Scene) -> AsyncIterator[ExecutionId]:
    execution_id = await scene.lost()
    yield execution_id
    await scene.engine.issue_reclaim_grant(
        execution_id=execution_id, worker_id="other", worker_instance_id="other-1", lane_id="default"
    )


def test_there_is_a_way_for_every_move() -> None:
    assert {move for move, _ in WAYS.values()} == set(Release)


async def ended(scene: Scene, name: str) -> ExecutionId:
    """An execution, attached to and then ended in a way."""
    _, make = WAYS[name]
    steps = make(scene)
    execution_id = await anext(steps)
    await scene.attach(execution_id)
    assert await anext(steps, None) is None
    return execution_id


@pytest.mark.parametrize("name", WAYS)
async def test_every_end_is_seen_once_in_the_transaction_of_the_end(scene: Scene, name: str) -> None:
    move = WAYS[name][0]
    execution_id = await ended(scene, name)
    info = await scene.engine.read_execution_info(execution_id)
    is_terminal = info is not None and info.state_vector.terminal_outcome != "none"
    assert await scene.seen() == [(execution_id, move, is_terminal)]
    assert scene.calls == [1]
    # What hangs on an execution ends with it, and outlives a lease.
    assert (await scene.attached(execution_id)) & BIT == (0 if is_terminal else BIT)
    assert await scene.connection.fetchval(
        """select count(*) from event_each e join test_ended s on s.xid = e.xid
            where e.execution_id = $1 and e.kind in ('released', 'ended', 'expired')""",
        execution_id[-36:],
    ), "no event of the end is of the transaction that the consequence saw"


@pytest.mark.parametrize("name", WAYS)
async def test_what_has_nothing_attached_is_not_seen(scene: Scene, name: str) -> None:
    _, make = WAYS[name]
    steps = make(scene)
    execution_id = await anext(steps)
    assert await anext(steps, None) is None
    assert (await scene.seen(), scene.calls) == ([], [])
    assert not (await scene.attached(execution_id)) & BIT


@pytest.mark.parametrize("name", ["complete", "fail", "hand_back", "suspend", "cancel", "time_out"])
async def test_an_end_whose_consequence_fails_is_undone(scene: Scene, name: str, rows: Any) -> None:
    steps = WAYS[name][1](scene)
    execution_id = await anext(steps)
    await scene.attach(execution_id)
    scene.fault = ValueError("not now")
    async with rows.unchanged():
        with pytest.raises(ValueError, match="not now"):
            await anext(steps, None)
    assert scene.calls
    assert await scene.seen() == []


async def test_a_lease_that_ends_is_seen_each_time(scene: Scene) -> None:
    first = await scene.given.claimed()
    await scene.attach(first.execution_id)
    await scene.engine.hand_back(first)
    (second,) = await claim(scene.engine)
    await scene.engine.suspend(second.handle, args())
    await scene.engine.resume_execution(execution_id=first.execution_id)
    (third,) = await claim(scene.engine)
    await scene.engine.complete(third.handle, b"done")
    await scene.engine.complete(third.handle, b"done")
    assert [(move, is_terminal) for _, move, is_terminal in await scene.seen()] == [
        (Release.HANDED_BACK, False),
        (Release.SUSPENDED, False),
        (Release.COMPLETED, True),
    ]


async def test_a_batch_with_one_that_has_something_attached_ends_as_a_whole(scene: Scene, rows: Any) -> None:
    await scene.engine.create_many([new() for _ in range(100)])
    runs = await claim(scene.engine, limit=100)
    await scene.attach(runs[41].execution_id)
    answers = await scene.engine.complete_many([(run.handle, b"%d" % at) for at, run in enumerate(runs)])
    assert [answer.execution_id for answer in answers if isinstance(answer, Completed)] == [
        run.execution_id for run in runs
    ]
    assert await scene.seen() == [(runs[41].execution_id, Release.COMPLETED, True)]
    found = {row["execution_id"]: row["result_payload"] for row in await rows.of("execution")}
    assert sorted(found.values()) == sorted(b"%d" % at for at in range(100))


async def test_all_of_a_batch_that_have_something_attached_are_seen_by_one_call(scene: Scene) -> None:
    await scene.engine.create_many([new() for _ in range(100)])
    runs = await claim(scene.engine, limit=100)
    marked = [run.execution_id for run in runs[::10]]
    await scene.attach(*marked)
    await scene.engine.complete_many([(run.handle, None) for run in runs])
    assert scene.calls == [10]
    assert sorted(await scene.seen()) == sorted((each, Release.COMPLETED, True) for each in marked)


async def test_ends_of_many_kinds_at_the_same_time_are_seen_each_for_what_it_is(scene: Scene) -> None:
    await scene.engine.create_many([new() for _ in range(100)])
    runs = await claim(scene.engine, limit=100)
    await scene.attach(*(run.execution_id for run in runs[:50]))
    until = await scene.clock.now() + 60_000
    kinds: list[tuple[Release, Callable[[Handle], Any]]] = [
        (Release.COMPLETED, lambda handle: scene.engine.complete(handle, b"done")),
        (Release.FAILED, lambda handle: scene.engine.fail(handle, reason="no luck")),
        (Release.CANCELLED, lambda handle: scene.engine.cancel(handle, "not wanted")),
        (Release.HANDED_BACK, lambda handle: scene.engine.hand_back(handle)),
        (Release.DELAYED, lambda handle: scene.engine.delay(handle, until)),
    ]
    await asyncio.gather(*(kinds[at % 5][1](run.handle) for at, run in enumerate(runs)))
    assert sorted((each, move) for each, move, _ in await scene.seen()) == sorted(
        (run.execution_id, kinds[at % 5][0]) for at, run in enumerate(runs[:50])
    )


async def test_an_end_that_is_refused_is_not_seen(scene: Scene) -> None:
    stale = await scene.given.claimed(lease_ttl_ms=TTL_MS)
    await scene.clock.advance(ms=TTL_MS + 1)
    (current,) = await claim(scene.engine)
    assert current.execution_id == stale.execution_id
    await scene.attach(stale.execution_id)
    await refused(scene.engine.complete(stale, b"late"), "lease_conflict")
    await refused(scene.engine.fail(stale, reason="late"), "lease_conflict")
    await refused(scene.engine.hand_back(stale), "lease_conflict")
    await refused(scene.engine.complete_execution(**triple(stale)), "stale_lease")
    (answer,) = await scene.engine.complete_many([(stale, b"late")])
    assert not isinstance(answer, Completed)
    assert (await scene.seen(), scene.calls) == ([], [])
    await scene.engine.complete(current.handle, b"done")
    assert await scene.seen() == [(stale.execution_id, Release.COMPLETED, True)]

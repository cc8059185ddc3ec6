"""Every end of an attempt closes its stream with the reason of the end; a parked attempt keeps its stream open."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from creates import new
from engine.ends import TTL_MS, WAYS, Scene
from engine.grants import issue_reclaim_grant, reclaim
from engine.state import all_cases, claim, refused, revoke
from engine.stream.writing import append, live, parked, payloads, read, refused_unwritten, stored
from engine.waits import rewriting, suspend_args
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.db import session as sessions
from flowfabric.engine.core.transition import Move
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream.close import CLOSED_BY
from flowfabric.model.errors import EngineError
from flowfabric.model.grant import ReclaimCapExceeded
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import ClaimedExecution, Completed
from flowfabric.model.stream import ClosedReason, StreamFrames

pytestmark = pytest.mark.usefixtures("consistent_rows")

REASONS = {
    Move.COMPLETED: "attempt_success",
    Move.FAILED: "attempt_failure",
    Move.RETRY: "attempt_failure",
    Move.RETRY_NOW: "attempt_failure",
    Move.CANCELLED: "attempt_cancelled",
    Move.TIMEOUT_RETRY: "expired",
    Move.TIMEOUT_RETRY_NOW: "expired",
    Move.TIMEOUT_EXPIRED: "expired",
    Move.DEADLINE_EXPIRED: "expired",
    Move.SUSPENSION_FAILED: "suspension_timeout",
    Move.SUSPENSION_CANCELLED: "suspension_timeout",
    Move.SUSPENSION_EXPIRED: "suspension_timeout",
    Move.RECLAIM_LIMIT: "reclaimed",
    Move.SKIPPED: "dependency_impossible",
    Move.LEASE_EXPIRED: "lease_expired",
    Move.LEASE_REVOKED: "attempt_interrupted",
}
OTHER_REASONS = {"claim_a_lost_lease": "reclaimed"}
"""Ways that continue after the move."""
UNCLAIMED = {"cancel_what_waits", "pass_the_deadline", "skip_what_never_ran"}
"""Ways that end an execution without an attempt."""


class StreamingScene(Scene):
    """A scene in which every attempt has a stream."""

    handle: Handle

    async def claimed(self, **overrides: Any) -> Handle:
        self.handle = await super().claimed(**overrides)
        await append(self.engine, self.handle, b"frame")
        return self.handle

    async def expired(self, **overrides: Any) -> Handle:
        handle = await self.claimed(lease_ttl_ms=TTL_MS, **overrides)
        await self.clock.advance(ms=TTL_MS + 1)
        return handle

    async def at_reclaim_limit(self) -> ExecutionId:
        execution_id = await self.lost(policy={"max_reclaim_count": 1})
        (run,) = await claim(self.engine, self.lane)
        self.handle = run.handle
        await append(self.engine, run.handle, b"frame")
        await self.clock.advance(ms=TTL_MS + 1)
        assert await parts_of(self.engine).lease_expiry.mark_expired([execution_id]) == 1
        return execution_id


@pytest.fixture
def scene(given: Given, clock: Clock, connection: asyncpg.Connection) -> StreamingScene:
    """An engine whose attempts have streams."""
    return StreamingScene(given, clock, connection)


def test_every_move_closes_streams_or_keeps_them() -> None:
    assert CLOSED_BY.keys() | {
        Move.DELAYED,
        Move.WAITING_CHILDREN,
        Move.CHILDREN_DONE,
        Move.HANDED_BACK,
        Move.NOT_STARTED,
        Move.SUSPENDED,
        Move.SKIPPED_UNATTEMPTED,
    } == set(Move)


async def reason(rows: Rows, handle: Handle) -> str | None:
    """Why the stream was closed, as stored: readers derive a reason if there is none."""
    closed_reason: str | None = (await stored(rows, handle))["closed_reason"]
    return closed_reason


async def bits(rows: Rows, handle: Handle) -> int:
    """The bit of the execution that stands for a stream."""
    attached: int = (await rows.execution(handle.execution_id))["attached"]
    return attached & 4


async def test_every_way_to_end_a_lease_closes_the_stream_or_keeps_it_open(scene: StreamingScene, rows: Rows) -> None:
    with all_cases() as case:
        for name, (move, way) in WAYS.items():
            if name in UNCLAIMED:
                continue
            with case(name):
                scene.lane = name
                steps = way(scene)
                execution_id = await anext(steps)
                handle = scene.handle
                before = await read(scene.engine, handle)
                is_lost = move is Move.RECLAIM_LIMIT
                assert [frame.payload for frame in before.frames] == [b"frame"]
                assert (before.closed_reason is not None) == is_lost
                now = await scene.clock.now()
                assert await anext(steps, None) is None
                found, row = await read(scene.engine, handle), await stored(rows, handle)
                expected = OTHER_REASONS.get(name, REASONS.get(move))
                assert found.closed_reason == row["closed_reason"] == expected
                assert row["closed_at"] == found.closed_at
                assert row["closed_at"] == (None if expected is None else before.closed_at if is_lost else now)
                info = await scene.engine.read_execution_info(execution_id)
                assert info is not None
                is_parked = expected is None or (expected in ("lease_expired", "attempt_interrupted") and not is_lost)
                assert await bits(rows, handle) == (4 if is_parked else 0)
                await refused(append(scene.engine, handle), await late_code(rows, handle))
                assert await payloads(scene.engine, handle) == [b"frame"]
                # The next way must not find this execution.
                with contextlib.suppress(EngineError):
                    await scene.engine.cancel_execution(execution_id=execution_id, reason="the next case follows")


async def late_code(rows: Rows, handle: Handle) -> str:
    """The code of an append under an ended lease."""
    row = await rows.execution(handle.execution_id)
    return "stale_owner_cannot_append" if row["lifecycle_phase"] == "active" else "stream_closed"


async def test_an_execution_that_ends_between_two_attempts_leaves_its_streams(
    scene: StreamingScene, rows: Rows
) -> None:
    handle = await scene.retried()
    await scene.engine.fail(handle, reason="no luck")
    before = await stored(rows, handle)
    await scene.engine.cancel_execution(execution_id=handle.execution_id, reason="not wanted")
    assert await stored(rows, handle) == before
    assert before["closed_reason"] == "attempt_failure"


@pytest.mark.parametrize("parked", ["delay", "suspend", "wait_children", "hand_back"])
async def test_a_parked_attempt_continues_its_stream(
    engine: Engine, given: Given, clock: Clock, rows: Rows, parked: str
) -> None:
    handle = await given.claimed()
    await append(engine, handle, b"before")
    match parked:
        case "delay":
            await engine.delay(handle, await clock.now() + 1_000)
            await clock.advance(ms=1_000)
        case "suspend":
            await engine.suspend(handle, suspend_args())
            await engine.resume_execution(execution_id=handle.execution_id)
        case "wait_children":
            await engine.wait_children(handle)
        case _:
            await engine.hand_back(handle)
    assert (await read(engine, handle)).closed_at is None
    (resumed,) = await claim(engine)
    assert (await append(engine, resumed.handle, b"after")).frame_count == 2
    assert await payloads(engine, handle) == [b"before", b"after"]
    await engine.complete(resumed.handle, b"")
    assert await reason(rows, handle) == "attempt_success"
    assert await bits(rows, handle) == 0


async def test_an_end_of_a_parked_attempt_closes_its_stream(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    cancelled = await given.claimed(lane_id="cancelled")
    await append(engine, cancelled)
    await engine.suspend(cancelled, suspend_args())
    await engine.cancel_execution(execution_id=cancelled.execution_id, reason="not wanted")
    assert await reason(rows, cancelled) == "attempt_cancelled"
    deadline = await clock.now() + 1_000
    for lane in ("running", "suspended", "delayed"):
        late = await given.claimed(lane_id=lane, execution_deadline_at=deadline)
        await append(engine, late)
        if lane == "suspended":
            await engine.suspend(late, suspend_args())
        elif lane == "delayed":
            await engine.delay(late, deadline + 5_000)
    await clock.advance(ms=1_000)
    assert await parts_of(engine).timeouts.expire_due() == 3
    assert [row["closed_reason"] for row in await rows.of("stream")].count("expired") == 3


async def test_only_a_reclaim_overwrites_the_reason_of_a_lost_lease(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    deadline = await clock.now() + 2_000
    cancelled = await given.claimed(lane_id="cancelled", lease_ttl_ms=1_000)
    late = await given.claimed(lane_id="late", lease_ttl_ms=1_000, execution_deadline_at=deadline)
    reclaimed = await given.claimed(lane_id="reclaimed", lease_ttl_ms=1_000)
    for handle in (cancelled, late, reclaimed):
        await append(engine, handle)
    now = await clock.advance(ms=1_000)
    assert await parts_of(engine).lease_expiry.sweep() == 3
    await clock.advance(ms=1_000)
    await engine.cancel_execution(execution_id=cancelled.execution_id, reason="not wanted")
    assert await parts_of(engine).timeouts.expire_due() == 1
    (run,) = await claim(engine, "reclaimed")
    found = [await stored(rows, handle) for handle in (cancelled, late, reclaimed)]
    assert [row["closed_reason"] for row in found] == ["lease_expired", "lease_expired", "reclaimed"]
    # Appends ended when the lease was lost.
    assert [row["closed_at"] for row in found] == [now] * 3
    assert await bits(rows, reclaimed) == 0
    await append(engine, run.handle, b"second attempt")
    assert await bits(rows, reclaimed) == 4


async def test_a_supervised_reclaim_closes_the_stream(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=1_000, policy={"max_reclaim_count": 1})
    await append(engine, handle)
    await clock.advance(ms=1_000)
    await issue_reclaim_grant(engine, handle.execution_id)
    assert await reason(rows, handle) == "lease_expired"
    run = await reclaim(engine, handle.execution_id, lease_ttl_ms=1_000)
    assert isinstance(run, ClaimedExecution)
    assert await reason(rows, handle) == "reclaimed"
    await append(engine, run.handle)
    await clock.advance(ms=1_000)
    assert isinstance(await issue_reclaim_grant(engine, handle.execution_id), ReclaimCapExceeded)
    assert await reason(rows, run.handle) == "reclaimed"


@pytest.mark.usefixtures("scans_are_free")
async def test_the_reclaim_of_a_revoked_lease_closes_the_stream(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    policy = {"max_reclaim_count": 1, "stream_policy": {"retention_ttl_ms": 5_000}}
    first = await given.claimed(policy=policy, lease_ttl_ms=1_000)
    await append(engine, first)
    await revoke(engine, first.execution_id)
    (second,) = await claim(engine)
    row = await stored(rows, first)
    now = await clock.now()
    assert (row["closed_reason"], row["closed_at"], row["expires_at"]) == ("reclaimed", now, now + 5_000)
    assert row["released_epoch"] == first.lease_epoch
    await append(engine, second.handle)
    await revoke(engine, first.execution_id)
    assert await claim(engine) == []
    assert await reason(rows, second.handle) == "reclaimed"


async def test_a_claim_does_not_wait_for_a_locked_stream(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    lost = [await given.reclaimable(lane_id=f"lane{nth}") for nth in range(2)]
    held = await given.claimed(lane_id="lane2", lease_ttl_ms=1_000)
    await append(engine, held)
    await given.clock.advance(ms=1_000)
    assert await parts_of(engine).lease_expiry.mark_expired([held.execution_id]) == 1
    async with rewriting(connection, "stream", held.execution_id):
        async with asyncio.timeout(5):
            runs = await claim(engine, "lane0", "lane1", "lane2")
    assert {run.execution_id for run in runs} == {each.execution_id for each in (*lost, held)}
    # Readers get the reason from the attempt.
    assert await reason(rows, held) == "lease_expired"
    assert (await read(engine, held)).closed_reason is ClosedReason.RECLAIMED


@pytest.mark.usefixtures("scans_are_free")
@pytest.mark.parametrize("ended", ["reclaimed", "at its limit"])
async def test_a_stream_that_a_reclaim_left_open_reads_as_reclaimed(
    engine: Engine, given: Given, connection: asyncpg.Connection, clock: Clock, ended: str
) -> None:
    policy = {"max_reclaim_count": 1 if ended == "reclaimed" else 0}
    handle = await given.claimed(policy=policy, lease_ttl_ms=1_000)
    await append(engine, handle)
    lost_at = await clock.advance(ms=1_000)
    assert await parts_of(engine).lease_expiry.mark_expired([handle.execution_id]) == 1
    now = await clock.advance(ms=1_000)
    assert len(await claim(engine)) == (ended == "reclaimed")
    for closed_reason, closed_at in (("lease_expired", lost_at), (None, now)):
        # As the previous version leaves it, or a claim while an append holds the lock.
        await connection.execute(
            "update stream set closed_reason = $1, closed_at = $2", closed_reason, closed_reason and closed_at
        )
        found = await read(engine, handle)
        assert (found.closed_reason, found.closed_at) == (ClosedReason.RECLAIMED, closed_at)


# Times.


async def test_a_closed_stream_expires_after_the_time_of_its_policy(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    policy = {"stream_policy": {"retention_ttl_ms": 5_000}}
    durable, best_effort = [await given.claimed(policy=policy, lease_ttl_ms=600_000) for _ in range(2)]
    await append(engine, durable)
    await append(engine, best_effort, mode=live(ttl_ms=2_000))
    assert (await stored(rows, durable))["expires_at"] is None
    now = await clock.advance(ms=500)
    for handle in (durable, best_effort):
        await engine.complete(handle, b"")
    assert (await stored(rows, durable))["expires_at"] == now + 5_000
    # A best-effort stream expires no later than without an end.
    assert (await stored(rows, best_effort))["expires_at"] == now - 500 + 4_000
    await clock.advance(ms=4_999)
    assert await payloads(engine, durable) == [b"x"]
    await clock.advance(ms=1)
    found = await read(engine, durable)
    assert (list(found.frames), found.closed_reason) == ([], ClosedReason.ATTEMPT_SUCCESS)


async def test_a_stream_is_closed_no_earlier_than_its_last_frame_although_the_clock_steps_back(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handle = await given.claimed(policy={"stream_policy": {"retention_ttl_ms": 60_000}})
    await append(engine, handle)
    written = await clock.now()
    await clock.advance(seconds=-10)
    await engine.complete(handle, b"")
    assert (await read(engine, handle)).closed_at == written
    # Its frames are kept for the time of the policy from then on.
    await clock.advance(seconds=69)
    assert await payloads(engine, handle) == [b"x"]
    await clock.advance(seconds=1)
    assert await payloads(engine, handle) == []


# Waking, and other streams.


@pytest.mark.parametrize("end", ["complete", "lease_expired", "grant"])
async def test_closing_wakes_the_tails_of_other_engines(
    engines: Engines, given: Given, clock: Clock, eventually: Eventually, end: str
) -> None:
    handle = await given.claimed(lease_ttl_ms=30_000)
    outcome = await append(given.engine, handle)
    other = await engines()

    def tail(engine: Engine) -> "asyncio.Task[StreamFrames]":
        return asyncio.create_task(engine.tail_stream(handle.execution_id, 0, after=outcome.stream_id, block_ms=30_000))

    waiting = [tail(given.engine), tail(other)]
    await eventually(lambda: parts_of(other).wakeups.hints.is_listening)
    if end == "complete":
        await given.engine.complete(handle, b"")
    else:
        await clock.advance(ms=30_000)
        if end == "grant":
            await issue_reclaim_grant(given.engine, handle.execution_id)
        else:
            await given.engine.mark_lease_expired_if_due(handle.execution_id)
    async with asyncio.timeout(4):
        found = await asyncio.gather(*waiting)
    assert {each.closed_reason for each in found} == {
        ClosedReason.ATTEMPT_SUCCESS if end == "complete" else ClosedReason.LEASE_EXPIRED
    }


@pytest.mark.usefixtures("hints_only")
async def test_a_revoke_wakes_the_tails_of_other_engines(
    engines: Engines, given: Given, eventually: Eventually
) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    outcome = await append(given.engine, handle)
    engine, other = given.engine, await engines()
    waiting = [
        asyncio.create_task(each.tail_stream(handle.execution_id, 0, after=outcome.stream_id, block_ms=30_000))
        for each in (engine, other)
    ]
    for each in (engine, other):
        await parked(each, 1, eventually)
    await revoke(engine, handle.execution_id)
    async with asyncio.timeout(10):
        found = await asyncio.gather(*waiting)
    assert [each.closed_reason for each in found] == [ClosedReason.ATTEMPT_INTERRUPTED] * 2


async def test_a_locked_stream_delays_only_the_end_of_its_own_execution(
    engines: Engines, connection: asyncpg.Connection, rows: Rows
) -> None:
    engine = await engines()
    await engine.create_many([new() for _ in range(60)])
    runs = await claim(engine, limit=60)
    for run in runs[::3]:
        await append(engine, run.handle)
    held = runs[30]
    calls: list[Callable[[Any], Coroutine[Any, Any, object]]] = [
        lambda run: engine.complete(run.handle, b"done"),
        lambda run: engine.hand_back(run.handle),
        lambda run: engine.fail(run.handle, reason="no luck"),
    ]
    async with rewriting(connection, "stream", held.execution_id):
        tasks = [asyncio.create_task(calls[at // 3 % 3](run)) for at, run in enumerate(runs)]
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*(task for at, task in enumerate(tasks) if at != 30))
        assert not tasks[30].done()
    await tasks[30]
    # None was repeated: a second hand_back would have been refused.
    assert len(answers) == 59
    assert len(await rows.of("execution", lifecycle_phase="active")) == 0
    assert {row["closed_reason"] for row in await rows.of("stream")} == {"attempt_success", "attempt_failure", None}


async def test_a_locked_stream_does_not_stop_complete_many_or_the_expiry_of_leases(
    engines: Engines, given: Given, connection: asyncpg.Connection, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "60ms")
    engine = await engines()
    handles = [await given.claimed(lease_ttl_ms=60_000) for _ in range(6)]
    for handle in handles:
        await append(engine, handle)
    async with rewriting(connection, "stream", handles[1].execution_id):
        answers = await engine.complete_many([(handle, None) for handle in handles[:3]])
        assert [isinstance(answer, Completed) for answer in answers] == [True, False, True]
        assert isinstance(answers[1], EngineError)
        assert answers[1].code == "retry_exhausted"
        await given.clock.advance(ms=60_000)
        assert await parts_of(engine).lease_expiry.sweep() == 3
    rest = await stored(rows, handles[1])
    assert rest["closed_at"] is None
    await refused_unwritten(rows, append(engine, handles[1]), "stale_owner_cannot_append")


async def test_an_execution_without_a_stream_ends_in_one_statement(
    engine: Engine, given: Given, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, streaming = [await given.claimed() for _ in range(2)]
    await append(engine, streaming)
    seen: list[str] = []
    database = parts_of(engine).store.database
    fetch, transact = database.fetch, database.transact

    async def record_fetch(statement: Any, *args: Any, **options: Any) -> Any:
        seen.append(statement.name)
        return await fetch(statement, *args, **options)

    async def record_transact(work: Any) -> Any:
        seen.append("transaction")
        return await transact(work)

    monkeypatch.setattr(database, "fetch", record_fetch)
    monkeypatch.setattr(database, "transact", record_transact)
    await engine.complete(plain, b"")
    assert seen == ["complete_leases"]
    seen.clear()
    await engine.complete(streaming, b"")
    assert seen == ["complete_leases", "end_leases", "transaction"]

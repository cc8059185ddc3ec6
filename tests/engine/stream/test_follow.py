"""follow: the frames of an execution over all of its attempts, until it ends."""

import asyncio
from typing import Any

import pytest

from engine.state import refused
from engine.waits import suspend_args
from fixtures import Clock, Engines, Eventually, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.results import Results
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream.tail import FollowedFrames
from flowfabric.model.event import EventFamily
from flowfabric.model.ids import ExecutionId
from flowfabric.model.stream import FIRST, FrameId

from .writing import append_each, live, parked

BACKOFF = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 600_000}}}
RETRY = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 0}}}
ABSENT = ExecutionId("{fp:0}:11111111-1111-1111-1111-111111111111")


async def follow(engine: Engine, execution_id: ExecutionId, **arguments: Any) -> FollowedFrames:
    """The frames after a position, by default from the beginning and without waiting."""
    found: FollowedFrames = await parts_of(engine).tails.follow(
        execution_id, **{"attempt_index": 0, "after": FIRST, "block_ms": 0, **arguments}
    )
    return found


def texts(found: FollowedFrames) -> list[tuple[int, str]]:
    """The index of the attempt and the payload of each frame."""
    return [(attempt_index, frame.text) for attempt_index, frame in found.frames]


async def three_attempts(engine: Engine, given: Given, clock: Clock) -> ExecutionId:
    """An execution whose first attempt failed, whose second lost its lease, and whose third has just begun."""
    first = await given.claimed(policy=RETRY)
    await append_each(engine, first, "a", "b")
    await engine.fail(first, reason="x")
    second = (await given.claim()).handle
    await append_each(engine, second, "c")
    await clock.advance(ms=30_001)
    third = (await given.claim()).handle
    assert third.attempt_index == 2
    await append_each(engine, third, "d", "e")
    return first.execution_id


async def test_frames_of_all_attempts_follow_one_another(engine: Engine, given: Given, clock: Clock) -> None:
    execution_id = await three_attempts(engine, given, clock)
    whole = await follow(engine, execution_id)
    assert texts(whole) == [(0, "a"), (0, "b"), (1, "c"), (2, "d"), (2, "e")]
    assert not whole.is_ended
    position, pages = {"attempt_index": 0, "after": FIRST}, []
    while (page := await follow(engine, execution_id, count_limit=2, **position)).frames:
        pages.append(texts(page))
        attempt_index, frame = page.frames[-1]
        position = {"attempt_index": attempt_index, "after": frame.position}
    assert pages == [[(0, "a"), (0, "b")], [(1, "c"), (2, "d")], [(2, "e")]]


async def test_an_execution_has_ended_only_with_its_last_frames(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, "a", "b", "c")
    await engine.complete(handle, b"")
    found = await follow(engine, handle.execution_id, count_limit=2)
    assert (len(found.frames), found.is_ended) == (2, False)
    rest = await follow(engine, handle.execution_id, after=found.frames[-1][1].position, count_limit=2)
    assert (texts(rest), rest.is_ended) == ([(0, "c")], True)
    # A page that is full may be the last one.
    full = await follow(engine, handle.execution_id, count_limit=3)
    assert (len(full.frames), full.is_ended) == (3, False)
    after = await follow(engine, handle.execution_id, after=full.frames[-1][1].position, count_limit=3)
    assert (texts(after), after.is_ended) == ([], True)


async def test_hidden_frames_are_not_followed(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(policy={**RETRY, "stream_policy": {"retention_maxlen": 2}})
    await append_each(engine, handle, *"abc")
    await engine.fail(handle, reason="x")
    second = (await given.claim(lease_ttl_ms=600_000)).handle
    await append_each(engine, second, "live", mode=live())
    assert texts(await follow(engine, handle.execution_id)) == [(0, "b"), (0, "c"), (1, "live")]
    await clock.advance(seconds=20)
    assert texts(await follow(engine, handle.execution_id)) == [(0, "b"), (0, "c")]


async def test_an_execution_that_does_not_exist_cannot_be_followed(engine: Engine) -> None:
    assert (await refused(follow(engine, ABSENT), "execution_not_found")).detail == ABSENT
    await refused(follow(engine, ABSENT, block_ms=30_000), "execution_not_found")


@pytest.mark.usefixtures("hints_only")
@pytest.mark.parametrize("writers", ["same process", "other process"])
async def test_a_follower_waits_for_the_next_attempt(
    engines: Engines, engine: Engine, given: Given, eventually: Eventually, writers: str
) -> None:
    writer = engine if writers == "same process" else await engines()
    handle = await given.claimed(policy=RETRY)
    (last,) = await append_each(engine, handle, "a")
    ms, seq = map(int, last.split("-"))
    following = asyncio.create_task(follow(engine, handle.execution_id, after=FrameId(ms, seq), block_ms=30_000))
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    await writer.fail(handle, reason="x")
    second = (await given.claim()).handle
    await append_each(writer, second, "b")
    async with asyncio.timeout(10):
        found = await following
    assert (texts(found), found.is_ended) == ([(1, "b")], False)


@pytest.mark.usefixtures("hints_only")
@pytest.mark.parametrize("writers", ["same process", "other process"])
async def test_a_follower_returns_when_an_execution_without_frames_ends(
    engines: Engines, engine: Engine, given: Given, eventually: Eventually, writers: str
) -> None:
    writer = engine if writers == "same process" else await engines()
    handle = await given.claimed()
    parts = parts_of(engine)
    following = asyncio.create_task(follow(engine, handle.execution_id, block_ms=30_000))
    await eventually(lambda: parts.wakeups.hints.is_listening and parts.services[Results]._waiting)
    await writer.complete(handle, b"")
    async with asyncio.timeout(10):
        found = await following
    assert (texts(found), found.is_ended) == ([], True)


@pytest.mark.usefixtures("hints_only")
@pytest.mark.parametrize("writers", ["same process", "other process"])
@pytest.mark.parametrize("end", ["failure", "lost lease", "completion"])
async def test_a_follower_of_one_attempt_returns_when_it_is_over_although_it_wrote_no_frame(
    engines: Engines, engine: Engine, given: Given, clock: Clock, eventually: Eventually, writers: str, end: str
) -> None:
    writer = engine if writers == "same process" else await engines()
    handle = await given.claimed(policy=BACKOFF, lease_ttl_ms=30_000)
    execution_id = handle.execution_id
    assert not (await follow(engine, execution_id, last_attempt_index=0)).is_ended
    following = asyncio.create_task(follow(engine, execution_id, block_ms=30_000, last_attempt_index=0))
    wakeups = parts_of(engine).wakeups
    await eventually(lambda: EventFamily.LEASE in wakeups.feeds._events)
    await parked(engine, 1, eventually)
    match end:
        case "failure":
            await writer.fail(handle, reason="x")
        case "lost lease":
            await clock.advance(ms=30_000)
            await writer.mark_lease_expired_if_due(execution_id)
        case _:
            await writer.complete(handle, b"")
    async with asyncio.timeout(10):
        found = await following
    assert (texts(found), found.is_ended) == ([], True)
    # The others do not end with this attempt.
    assert (await follow(engine, execution_id)).is_ended == (end == "completion")
    assert (await follow(engine, execution_id, last_attempt_index=1)).is_ended == (end == "completion")


async def test_a_follower_of_a_parked_attempt_waits_for_its_next_lease(engine: Engine, given: Given) -> None:
    created = await given.created()
    assert not (await follow(engine, created, last_attempt_index=0)).is_ended
    handle = (await given.claim()).handle
    await engine.suspend(handle, suspend_args())
    assert not (await follow(engine, created, last_attempt_index=0)).is_ended
    await engine.resume_execution(execution_id=created)
    assert not (await follow(engine, created, last_attempt_index=0)).is_ended
    await engine.hand_back((await given.claim()).handle)
    assert not (await follow(engine, created, last_attempt_index=0)).is_ended


async def test_a_follower_whose_wait_is_over_returns_nothing(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    found = await follow(engine, handle.execution_id, block_ms=250)
    assert (texts(found), found.is_ended) == ([], False)


@pytest.mark.usefixtures("hints_only")
async def test_followers_end_when_the_engine_prepares_to_stop(
    engine: Engine, given: Given, eventually: Eventually
) -> None:
    handle = await given.claimed()
    following = asyncio.create_task(follow(engine, handle.execution_id, block_ms=30_000))
    await eventually(lambda: parts_of(engine).tails._operations == 1)
    async with asyncio.timeout(10):
        await engine.shutdown_prepare(10_000)
        assert (await refused(following, "unavailable")).detail == {"op": "stream_ops"}

"""Readers of streams touch few rows, however many streams and frames there are and whatever the planner knows."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from databases import Databases
from fixtures import Eventually
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import NewExecution
from flowfabric.model.handle import Handle
from flowfabric.model.ids import format_execution_id
from flowfabric.model.stream import FIRST, BestEffortLive, BestEffortLiveConfig, DurableSummary, Frame, FrameId
from house.filled import STATISTICS, copied, filled
from house.touched import Touched, touched

__all__ = ["touched"]

STREAMS = 200
FRAMES = 1_000
LIMIT = 10
LONG = format_execution_id(1, "11111111-1111-1111-1111-111111111111")
"""The execution with two attempts of FRAMES frames each."""
RETRY = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 0}}}
WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}


async def append(engine: Engine, handle: Handle, count: int) -> None:
    """Append frames, the last one to the summary."""
    await asyncio.gather(*(engine.append_frame(handle, Frame(bytes=b"x" * 20)) for _ in range(count - 1)))
    await engine.append_frame(handle, Frame(bytes=b'{"a": 1}', mode=DurableSummary()))


async def fill(engine: Engine) -> None:
    """Write many short streams and a few long ones."""
    new = NewExecution(
        namespace="tests",
        lane_id="default",
        execution_kind="job",
        input_payload=b"1",
        priority=0,
        creator_identity="test",
    )
    await engine.create_many([new] * STREAMS)
    runs = await engine.claim_many(lanes=("default",), limit=STREAMS, **WORKER)
    await asyncio.gather(*(append(engine, run.handle, 3) for run in runs))
    await engine.create_execution(
        namespace="tests",
        lane_id="long",
        execution_kind="job",
        input_payload=b"1",
        priority=0,
        creator_identity="test",
        execution_id=LONG,
        policy=RETRY,
    )
    for _ in range(2):
        handle = await engine.claim(lane_id="long", **WORKER)
        assert handle is not None
        # The summary frame first: after it, only 64 frames are kept.
        await append(engine, handle, 1)
        await asyncio.gather(*(engine.append_frame(handle, Frame(bytes=b"x" * 20)) for _ in range(FRAMES)))
        await engine.fail(handle, reason="x")


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many streams."""
    async with filled(databases, fill, "vacuum") as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many streams, with and without statistics."""
    async with copied(databases, store, *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


@pytest.fixture
async def url(original: str, databases: Databases) -> AsyncIterator[str]:
    """The address of a copy of that database."""
    async with copied(databases, original) as url:
        yield url


async def test_a_page_touches_as_many_frames_as_it_returns(engine: Engine, touched: Touched) -> None:
    whole = await engine.read_stream(LONG, 1, count_limit=10_000)
    assert len(whole.frames) == FRAMES + 1
    middle = whole.frames[FRAMES // 2].position
    touched.clear()
    for from_ in ("start", middle):
        assert len((await engine.read_stream(LONG, 1, from_=from_, count_limit=LIMIT)).frames) == LIMIT
        assert len((await engine.tail_stream(LONG, 1, after=middle, count_limit=LIMIT)).frames) == LIMIT
    # Each frame is read as an index entry and as a row.
    assert touched.of("list_frames", "stream_frame") <= 2 * LIMIT + 2
    assert touched["list_frames"] <= 2 * LIMIT + 12
    touched.clear()
    last = whole.frames[-1].id
    assert (await engine.tail_stream(LONG, 1, after=last)).frames == []
    assert (await engine.read_stream(LONG, 1, from_=middle, to=whole.frames[FRAMES // 2 + 1].id)).frames != []
    assert touched.of("list_frames", "stream_frame") <= 6


async def test_a_tail_does_not_read_frames_again_that_it_leaves_out(
    engine: Engine, touched: Touched, eventually: Eventually
) -> None:
    await engine.create_execution(
        namespace="tests",
        lane_id="live",
        execution_kind="job",
        input_payload=b"1",
        priority=0,
        creator_identity="test",
    )
    handle = await engine.claim(lane_id="live", **WORKER)
    assert handle is not None
    live = Frame(bytes=b"x", mode=BestEffortLive(config=BestEffortLiveConfig(ttl_ms=60_000, maxlen_floor=FRAMES)))
    await asyncio.gather(*(engine.append_frame(handle, live) for _ in range(FRAMES)))
    waiting = asyncio.create_task(
        engine.tail_stream(handle.execution_id, 0, block_ms=30_000, visibility="exclude_best_effort")
    )
    await eventually(lambda: "list_changed" in touched)
    assert touched.of("list_frames", "stream_frame") >= FRAMES
    touched.clear()
    await engine.append_frame(handle, live)
    await eventually(lambda: "list_frames" in touched)
    await engine.append_frame(handle, Frame(bytes=b"kept"))
    assert [frame.text for frame in (await waiting).frames] == ["kept"]
    assert 0 < touched.of("list_frames", "stream_frame") <= 2 * 2


async def test_a_follower_touches_as_many_frames_as_it_returns(engine: Engine, touched: Touched) -> None:
    tails = parts_of(engine).tails
    whole = await tails.follow(LONG, attempt_index=0, after=FIRST, block_ms=0, count_limit=10_000)
    assert len(whole.frames) == 2 * FRAMES + 2
    touched.clear()
    positions = [(0, FIRST), (0, whole.frames[FRAMES // 2][1].position), (0, whole.frames[FRAMES - 4][1].position)]
    for attempt_index, after in positions:
        page = await tails.follow(LONG, attempt_index=attempt_index, after=after, block_ms=0, count_limit=LIMIT)
        assert len(page.frames) == LIMIT
    assert touched.of("list_followed_frames", "stream_frame") <= 2 * LIMIT + 2
    assert touched["list_followed_frames"] <= 4 * LIMIT + 12
    touched.clear()
    end = FrameId(2**62, 0)
    assert not (await tails.follow(LONG, attempt_index=1, after=end, block_ms=0, count_limit=LIMIT)).frames
    assert touched["list_followed_frames"] <= 4


async def test_looking_for_all_waiting_tails_touches_a_few_rows_for_each(
    engine: Engine, touched: Touched, eventually: Eventually
) -> None:
    parked = parts_of(engine).tails._parked
    end = "9" * 15 + "-0"
    ids = [found.execution_id for found in (await engine.list_executions(lane_id="default", limit=STREAMS)).executions]
    waiting: list[asyncio.Task[Any]] = [
        asyncio.create_task(engine.tail_stream(each, 0, after=end, block_ms=30_000)) for each in ids
    ]
    ids.append(LONG)
    follow = parts_of(engine).tails.follow
    waiting.append(asyncio.create_task(follow(LONG, attempt_index=1, after=FrameId(2**62, 0), block_ms=30_000)))
    await eventually(lambda: len(parked._tails) == len(ids) and "list_changed" in touched)
    touched.clear()
    assert not await parked._query()
    # An execution and its newest stream, each as an index entry and as a row.
    assert touched.of("list_changed", "stream_frame") == 0
    assert len(ids) < touched["list_changed"] <= 4 * len(ids)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_summary_is_read_by_its_key(engine: Engine, touched: Touched) -> None:
    assert await engine.read_summary(LONG, 1) is not None
    assert touched["read_summary"] <= 2

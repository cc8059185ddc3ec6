"""Writers of streams touch few rows, however many streams and frames there are and whatever the planner knows."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from creates import new
from databases import Databases
from engine.state import claim
from fixtures import Clock
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import retention
from flowfabric.engine.parts import parts_of
from flowfabric.model.handle import Handle
from flowfabric.model.open_stream import TRIM_STEP
from flowfabric.model.stream import FIRST, BestEffortLive, BestEffortLiveConfig, DurableSummary, Frame
from house.filled import STATISTICS, copied, filled
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

STREAMS = 200
MAXLEN = 600
PLAIN = Frame(bytes=b"x")
PATCH = Frame(bytes=b'{"a": 1}', mode=DurableSummary())
LIVE = Frame(bytes=b"x", mode=BestEffortLive(config=BestEffortLiveConfig(ttl_ms=1_000)))
POLICY = {"stream_policy": {"retention_maxlen": MAXLEN, "retention_ttl_ms": 60_000}}
HOUR = 3_600_000


async def append(engine: Engine, handle: Handle, *frames: Frame) -> None:
    """Append frames together."""
    await asyncio.gather(*(engine.append_frame(handle, frame) for frame in frames))


async def fill(engine: Engine) -> None:
    """Write many short streams and a long one, and complete half of them."""
    await engine.create_many([new(policy=POLICY) for _ in range(STREAMS)])
    runs = await claim(engine, limit=STREAMS, lease_ttl_ms=HOUR)
    await asyncio.gather(*(append(engine, run.handle, PLAIN, PATCH, PLAIN) for run in runs))
    await append(engine, runs[-1].handle, *[PLAIN] * MAXLEN)
    await engine.complete_many([(run.handle, None) for run in runs[: STREAMS // 2]])


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many streams."""
    async with filled(databases, fill, VACUUM) as url:
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


async def test_an_append_touches_the_rows_of_its_stream(engine: Engine, touched: Touched) -> None:
    await engine.create_many([new(lane_id="new", policy=POLICY) for _ in range(3)])
    runs = await claim(engine, "new")
    for _ in range(2):
        await append(engine, runs[0].handle, *[PLAIN] * 50)
    # The execution and the stream, each as an index entry and as a row.
    assert touched["lock_streams"] <= 6
    assert touched["open_streams"] <= 6
    assert touched.of("insert_frames", "stream_frame") == 0
    assert touched["insert_frames"] <= 4
    await append(engine, runs[0].handle, *[PATCH] * 50)
    assert touched["read_summaries"] <= 4
    touched.clear()
    await asyncio.gather(*(append(engine, run.handle, PLAIN) for run in runs))
    assert touched["lock_streams"] <= 3 * 6
    assert touched["insert_frames"] <= 3 * 6


async def test_hidden_frames_are_deleted_without_reading_visible_ones(engine: Engine, touched: Touched) -> None:
    await engine.create_many([new(lane_id="new", policy=POLICY)])
    (run,) = await claim(engine, "new")
    for _ in range(MAXLEN // 50):
        await append(engine, run.handle, *[PLAIN] * 50)
    touched.clear()
    for _ in range(2 * TRIM_STEP // 50):
        await append(engine, run.handle, *[PLAIN] * 50)
    # At most the frames of two steps and of one batch.
    assert 0 < touched.of("insert_frames", "stream_frame") <= 2 * (2 * TRIM_STEP + 50)


async def test_index_entries_of_deleted_frames_are_not_read_while_a_snapshot_keeps_them(
    engine: Engine, touched: Touched, connection: asyncpg.Connection
) -> None:
    await engine.create_many([new(lane_id="new", policy=POLICY)])
    (run,) = await claim(engine, "new", lease_ttl_ms=HOUR)
    execution_id = run.execution_id
    async with connection.transaction(isolation="repeatable_read"):
        await connection.fetch("select from execution")
        for _ in range((MAXLEN + 8 * TRIM_STEP) // 50):
            await append(engine, run.handle, *[PLAIN] * 50)
        assert 0 < touched.of("insert_frames", "stream_frame") <= 2 * (2 * TRIM_STEP + 50)
        touched.clear()
        assert len((await engine.read_stream(execution_id, 0, count_limit=10)).frames) == 10
        assert len((await engine.tail_stream(execution_id, 0, count_limit=10)).frames) == 10
        tails = parts_of(engine).tails
        assert (
            len((await tails.follow(execution_id, attempt_index=0, after=FIRST, block_ms=0, count_limit=10)).frames)
            == 10
        )
    # Those that the next trim deletes are stored, but hidden.
    assert touched.of("list_frames", "stream_frame") <= 2 * (TRIM_STEP + 10) + 2
    assert touched.of("list_followed_frames", "stream_frame") <= 2 * (TRIM_STEP + 10) + 2


async def test_an_end_touches_the_rows_of_its_stream(engine: Engine, touched: Touched, clock: Clock) -> None:
    await engine.create_many([new(lane_id="new", policy=POLICY) for _ in range(3)])
    runs = await claim(engine, "new", lease_ttl_ms=1_000)
    await asyncio.gather(*(append(engine, run.handle, PLAIN) for run in runs))
    await engine.complete(runs[0].handle, None)
    await engine.hand_back(runs[1].handle)
    assert touched["end_streams"] <= 4
    await clock.advance(ms=1_000)
    assert await parts_of(engine).lease_expiry.sweep() == 1
    assert len(await claim(engine, "new")) == 2
    assert touched.of("claim_by_route", "stream") <= 4


async def test_retention_touches_the_streams_that_it_deletes(
    engine: Engine, touched: Touched, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FRAME_LIMIT", 100)
    await engine.create_many([new(lane_id="new", policy={"stream_policy": {"retention_ttl_ms": 1_000}})] * 4)
    runs = await claim(engine, "new", lease_ttl_ms=HOUR)
    for run, frames in zip(runs, (40, 40, 40, 500), strict=True):
        await append(engine, run.handle, *[PLAIN] * frames)
    await engine.complete_many([(run.handle, None) for run in runs])
    await clock.advance(ms=1_000)
    assert [(await parts_of(engine).retention.trim_batch()).done for _ in range(3)] == [2, 1, 0]
    # The oldest frame of each stream, and the frames of two that are deleted.
    assert touched.of("take_retained", "stream_frame") <= 2 * (4 + 80)
    # Each stream, two that are deleted and one whose frames are hidden, and whether there are streams.
    assert touched.of("take_retained", "stream") <= 2 * (4 + 2 + 1) + 6


async def test_executions_without_streams_are_claimed_and_ended_without_reading_streams(
    engine: Engine, touched: Touched, clock: Clock
) -> None:
    policy = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}}
    await engine.create_many([new(lane_id="plain", policy=policy) for _ in range(20)])
    runs = await claim(engine, "plain", limit=20, lease_ttl_ms=1_000)
    await engine.complete_many([(run.handle, None) for run in runs[:5]])
    await asyncio.gather(*(engine.fail(run.handle, reason="no luck") for run in runs[5:10]))
    await asyncio.gather(*(engine.hand_back(run.handle) for run in runs[10:15]))
    await clock.advance(ms=1_000)
    assert await parts_of(engine).lease_expiry.sweep() == 5
    assert len(await claim(engine, "plain", limit=20)) == 15
    assert touched.readers_of("stream") | touched.readers_of("stream_frame") == set()


async def test_the_sweep_of_expired_streams_touches_only_those(engine: Engine, touched: Touched, clock: Clock) -> None:
    await engine.create_many([new(lane_id="new") for _ in range(2)])
    runs = await claim(engine, "new", lease_ttl_ms=HOUR)
    await asyncio.gather(*(append(engine, run.handle, *[LIVE] * 10) for run in runs))
    await clock.advance(ms=2_000)
    assert (await parts_of(engine).stream_expiry.sweep_batch()).done == 2
    # Each frame as an index entry and as a row.
    assert touched.of("take_hidden_frames", "stream_frame") <= 2 * 20
    assert touched.of("take_hidden_frames", "stream") <= 2 * 4

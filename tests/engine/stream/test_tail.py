"""tail_stream: waits for frames and for the end of a stream, without holding connections."""

import asyncio
import time
from typing import Any

import asyncpg
import pytest

from engine.state import refused
from fixtures import Clock, Engines, Eventually, Given
from flowfabric.db.database import Database
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream.parked import ParkedTails
from flowfabric.model.errors import ResourceExhaustedError, UnavailableError
from flowfabric.model.handle import Handle
from flowfabric.model.stream import ClosedReason, Durable, FrameMode, StreamFrames, TailVisibility
from flowfabric.settings import Settings

from .writing import SUMMARY, append_each, append_in_modes, ids, live, parked, texts

BLOCK = 30_000
_ARE_IDLE = """
select bool_and(state = 'idle') from pg_stat_activity
 where datname = current_database() and application_name = 'flowfabric'
"""
DURABLE = TailVisibility.EXCLUDE_BEST_EFFORT


def tail(engine: Engine, handle: Handle, **arguments: Any) -> "asyncio.Task[StreamFrames]":
    """Start a tail of the attempt of a handle."""
    return asyncio.create_task(
        engine.tail_stream(handle.execution_id, handle.attempt_index, **{"block_ms": BLOCK, **arguments})
    )


async def test_a_tail_starts_after_a_position(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    named = await append_each(engine, handle, "a", "b", "c")
    now = await clock.now()
    for after, expected in {
        "0-0": "abc",
        "0": "abc",
        named[0]: "bc",
        # A millisecond alone is its first frame.
        f"{now}": "bc",
        f"{now}-1": "c",
        f"{now}-2": "",
        f"{now}-18446744073709551615": "",
        f"{now - 1}-18446744073709551615": "abc",
    }.items():
        found = await engine.tail_stream(handle.execution_id, 0, after=after)
        assert "".join(texts(found)) == expected, after
    page = await engine.tail_stream(handle.execution_id, 0, count_limit=2)
    assert texts(page) == ["a", "b"]
    assert texts(await engine.tail_stream(handle.execution_id, 0, after=page.frames[-1].position)) == ["c"]


async def test_hidden_frames_do_not_fill_a_page(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    frames = [(f"durable {at}", Durable()) for at in range(6)]
    for at, frame in enumerate(frames):
        await append_in_modes(engine, handle, [(f"live {at}.{nth}", live()) for nth in range(5)])
        await append_in_modes(engine, handle, [frame])
    await append_each(engine, handle, "{}", mode=SUMMARY)
    found = await engine.tail_stream(handle.execution_id, 0, count_limit=4, visibility=DURABLE)
    assert texts(found) == [f"durable {at}" for at in range(4)]
    rest = await engine.tail_stream(
        handle.execution_id, 0, after=found.frames[-1].id, count_limit=4, visibility="exclude_best_effort"
    )
    assert texts(rest) == ["durable 4", "durable 5", "{}"]
    assert rest.frames[-1].mode is FrameMode.SUMMARY
    everything = await engine.tail_stream(handle.execution_id, 0, visibility="")
    assert len(everything.frames) == 37


@pytest.mark.usefixtures("hints_only")
async def test_hidden_frames_do_not_end_a_wait(engine: Engine, given: Given, eventually: Eventually) -> None:
    handle = await given.claimed()
    waiting = tail(engine, handle, visibility=DURABLE)
    await parked(engine, 1, eventually)
    for at in range(20):
        await append_each(engine, handle, f"live {at}", mode=live())
    await parked(engine, 1, eventually)
    assert not waiting.done()
    await append_each(engine, handle, "kept")
    async with asyncio.timeout(10):
        assert texts(await waiting) == ["kept"]


async def test_without_a_wait_a_tail_returns_at_once(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await append_each(engine, handle, "a")
    assert await engine.tail_stream(handle.execution_id, 0, after="9999999999999-0") == StreamFrames(frames=[])
    # Only a tail that waits listens for hints.
    assert not parts_of(engine).wakeups.hints.is_listening


@pytest.mark.usefixtures("hints_only")
@pytest.mark.parametrize("writers", ["same process", "other process"])
async def test_an_append_at_any_time_wakes_a_tail(engines: Engines, engine: Engine, given: Given, writers: str) -> None:
    handle = await given.claimed()
    writer = engine if writers == "same process" else await engines()
    after = "0-0"
    for at in range(0, 60, 4):
        waiting = tail(engine, handle, after=after)
        # The append comes before the first query, during it, or well into the wait.
        for _ in range(at * at):
            await asyncio.sleep(0)
        (after,) = await append_each(writer, handle, f"{at}")
        async with asyncio.timeout(10):
            found = await waiting
        assert (ids(found), texts(found)) == ([after], [f"{at}"])


@pytest.mark.usefixtures("hints_only")
async def test_a_frame_that_is_appended_between_the_query_and_the_wait_is_returned(
    engine: Engine, given: Given, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await given.claimed()
    hints = parts_of(engine).wakeups.hints
    hints.start_listening()
    # Its beginning wakes every tail.
    await eventually(lambda: hints.is_listening)
    fetch, appended = Database.fetch, list[str]()

    async def append_after_the_query(database: Database, statement: Statement, *arguments: Any, **options: Any) -> Any:
        found = await fetch(database, statement, *arguments, **options)
        if statement.name == "list_frames" and not appended:
            appended.extend(await append_each(engine, handle, "late"))
        return found

    monkeypatch.setattr(Database, "fetch", append_after_the_query)
    async with asyncio.timeout(10):
        assert ids(await tail(engine, handle)) == appended


@pytest.mark.usefixtures("hints_only")
@pytest.mark.parametrize("writers", ["same process", "other process"])
async def test_closing_wakes_a_tail(
    engines: Engines, engine: Engine, given: Given, clock: Clock, eventually: Eventually, writers: str
) -> None:
    handle = await given.claimed()
    (last,) = await append_each(engine, handle, "a")
    writer = engine if writers == "same process" else await engines()
    waiting = tail(engine, handle, after=last)
    await parked(engine, 1, eventually)
    await writer.complete(handle, b"")
    async with asyncio.timeout(10):
        found = await waiting
    assert found == StreamFrames(frames=[], closed_at=await clock.now(), closed_reason=ClosedReason.ATTEMPT_SUCCESS)
    # A closed stream ends a wait at once.
    async with asyncio.timeout(10):
        assert await engine.tail_stream(handle.execution_id, 0, after=last, block_ms=BLOCK) == found
        drained = await engine.tail_stream(handle.execution_id, 0, block_ms=BLOCK)
    assert (texts(drained), drained.closed_reason) == (["a"], ClosedReason.ATTEMPT_SUCCESS)


@pytest.mark.usefixtures("hints_only")
async def test_a_tail_that_times_out_returns_no_frames(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    (last,) = await append_each(engine, handle, "a")
    began = time.monotonic()
    assert await engine.tail_stream(handle.execution_id, 0, after=last, block_ms=150) == StreamFrames(frames=[])
    assert time.monotonic() - began >= 0.15


@pytest.mark.parametrize("count", [20, 200])
async def test_many_tails_park_on_a_small_pool(
    engines: Engines, given: Given, eventually: Eventually, connection: asyncpg.Connection, count: int
) -> None:
    small = await engines(database_pool_size=4)
    handle = await given.claimed()
    (last,) = await append_each(small, handle, "a")
    waiting = [tail(small, handle, after=last) for _ in range(count)]
    await parked(small, count, eventually)
    await eventually(lambda: connection.fetchval(_ARE_IDLE))

    began = time.monotonic()
    (named,) = await append_each(small, handle, "b")
    assert time.monotonic() - began < 2
    found = await asyncio.gather(*waiting)
    assert time.monotonic() - began < 2
    assert all((ids(each), texts(each)) == ([named], ["b"]) for each in found)

    waiting = [tail(small, handle, after=named) for _ in range(count)]
    await parked(small, count, eventually)
    began = time.monotonic()
    await small.complete(handle, b"")
    found = await asyncio.gather(*waiting)
    assert time.monotonic() - began < 2
    assert {(len(each.frames), each.closed_reason) for each in found} == {(0, ClosedReason.ATTEMPT_SUCCESS)}


async def test_tails_that_are_woken_together_leave_connections_for_others(
    engines: Engines, given: Given, eventually: Eventually
) -> None:
    small = await engines(database_pool_size=4)
    database = parts_of(small).store.database
    handle = await given.claimed()
    (last,) = await append_each(small, handle, "a")
    waiting = [tail(small, handle, after=last) for _ in range(50)]
    await parked(small, 50, eventually)
    parts_of(small).tails._parked.wake_all()
    most = 0
    for _ in range(200):
        await asyncio.sleep(0)
        most = max(most, len(database._used))
    assert most == 2
    await append_each(small, handle, "b")
    assert [texts(each) for each in await asyncio.gather(*waiting)] == [["b"]] * 50


async def test_one_connection_is_enough(engines: Engines, given: Given, eventually: Eventually) -> None:
    single = await engines(database_pool_size=1)
    handle = await given.claimed()
    waiting = [tail(single, handle) for _ in range(5)]
    await parked(single, 5, eventually)
    await append_each(single, handle, "a")
    async with asyncio.timeout(10):
        assert [texts(each) for each in await asyncio.gather(*waiting)] == [["a"]] * 5


async def test_an_engine_that_does_not_listen_polls(
    engines: Engines, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 600.0)
    deaf, writer = await engines(listen=False), await engines(listen=False)
    handle = await given.claimed()
    waiting = tail(deaf, handle)
    await append_each(writer, handle, "a")
    async with asyncio.timeout(10):
        assert texts(await waiting) == ["a"]


async def test_a_tail_finds_a_frame_whose_hint_was_lost(
    engines: Engines, engine: Engine, given: Given, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 0.05)
    silent = await engines()
    parts_of(silent).wakeups.hints._closed = True
    handle = await given.claimed()
    waiting = tail(engine, handle)
    await parked(engine, 1, eventually)
    await append_each(silent, handle, "a")
    async with asyncio.timeout(10):
        assert texts(await waiting) == ["a"]


async def test_a_frame_whose_hint_was_lost_is_returned_at_the_end_of_the_wait(
    engines: Engines, engine: Engine, given: Given, eventually: Eventually, hints_only: None
) -> None:
    silent = await engines()
    parts_of(silent).wakeups.hints._closed = True
    handle = await given.claimed()
    waiting = tail(engine, handle, block_ms=1_500)
    await parked(engine, 1, eventually)
    await append_each(silent, handle, "a")
    assert texts(await waiting) == ["a"]


async def test_hints_that_bring_no_frame_lead_to_few_queries(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await given.claimed()
    queries = 0
    fetch = Database.fetch

    async def counted(database: Database, statement: Statement, *arguments: Any, **options: Any) -> Any:
        nonlocal queries
        queries += statement.name == "list_frames"
        return await fetch(database, statement, *arguments, **options)

    monkeypatch.setattr(Database, "fetch", counted)
    waiting = tail(engine, handle, block_ms=500)
    while not waiting.done():
        parts_of(engine).wakeups.stream([handle.execution_id])
        await asyncio.sleep(0)
    assert (await waiting).frames == []
    # With pauses of up to 50 ms.
    assert 5 < queries < 30


async def test_more_calls_at_once_than_the_limit_are_refused(
    engines: Engines, given: Given, eventually: Eventually
) -> None:
    limited = await engines(max_concurrent_stream_ops=2)
    handle = await given.claimed()
    waiting = [tail(limited, handle) for _ in range(2)]
    await parked(limited, 2, eventually)
    calls = (
        limited.tail_stream(handle.execution_id, 0),
        limited.read_stream(handle.execution_id, 0),
        limited.read_summary(handle.execution_id, 0),
    )
    for call in calls:
        refusal = await refused(call, "resource_exhausted")
        assert isinstance(refusal, ResourceExhaustedError)
        assert refusal.detail == {"pool": "stream_ops", "max": 2, "retry_after_ms": 25}
        assert refusal.retryable
    # A malformed call is refused as such.
    await refused(limited.read_stream(handle.execution_id, 0, count_limit=0), "invalid_input")
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert (await limited.read_stream(handle.execution_id, 0)).frames == []
    await append_each(limited, handle, "a")
    async with asyncio.timeout(10):
        assert texts(await waiting[1]) == ["a"]


@pytest.mark.usefixtures("hints_only")
async def test_tails_end_when_the_engine_prepares_to_stop(engine: Engine, given: Given, eventually: Eventually) -> None:
    handle = await given.claimed()
    waiting = [tail(engine, handle) for _ in range(3)]
    await parked(engine, 3, eventually)
    async with asyncio.timeout(10):
        await engine.shutdown_prepare(30_000)
    for each in waiting:
        assert each.done()
        refusal = await refused(each, "unavailable")
        assert isinstance(refusal, UnavailableError)
        assert refusal.detail == {"op": "stream_ops"}
    for call in (
        engine.tail_stream(handle.execution_id, 0),
        engine.read_stream(handle.execution_id, 0),
        engine.read_summary(handle.execution_id, 0),
    ):
        assert (await refused(call, "unavailable")).detail == {"op": "stream_ops"}


@pytest.mark.usefixtures("hints_only")
async def test_tails_end_when_the_engine_closes(url: str, given: Given, eventually: Eventually) -> None:
    handle = await given.claimed()
    async with Engine.connect(settings=Settings(database_url=url)) as closing:
        waiting = tail(closing, handle)
        await parked(closing, 1, eventually)
    async with asyncio.timeout(10):
        assert (await refused(waiting, "unavailable")).detail == {"op": "stream_ops"}


async def test_a_cancelled_tail_leaves_nothing_behind(engine: Engine, given: Given, eventually: Eventually) -> None:
    handle = await given.claimed()
    waiting = [tail(engine, handle) for _ in range(5)]
    await parked(engine, 5, eventually)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    parts = parts_of(engine)
    assert (parts.tails._operations, parts.wakeups.streams._events) == (0, {})
    await append_each(engine, handle, "a")
    assert texts(await engine.tail_stream(handle.execution_id, 0, block_ms=BLOCK)) == ["a"]


async def test_readers_in_parallel_see_every_frame_once_and_in_order(
    engines: Engines, given: Given, eventually: Eventually
) -> None:
    writer, small = await engines(), await engines(database_pool_size=4)
    handle = await given.claimed()
    count, readers = 300, 8

    async def read() -> list[str]:
        found: list[str] = []
        after = "0-0"
        while True:
            page = await small.tail_stream(handle.execution_id, 0, after=after, block_ms=BLOCK, count_limit=50)
            found += texts(page)
            if page.frames:
                after = page.frames[-1].id
            elif page.closed_at is not None:
                return found

    reading = [asyncio.create_task(read()) for _ in range(readers)]
    for first in range(0, count, 10):
        await asyncio.gather(*(append_each(writer, handle, f"{first + nth}") for nth in range(10)))
    await writer.complete(handle, b"")
    async with asyncio.timeout(60):
        assert await asyncio.gather(*reading) == [[f"{at}" for at in range(count)]] * readers

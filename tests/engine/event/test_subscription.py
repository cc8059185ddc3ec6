"""A subscription belongs to one task, and ends when it is closed, dropped, or its engine shuts down."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from engine.state import refused
from fixtures import Clock, Engines, Eventually, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.event.reader import Buffer
from flowfabric.engine.parts import parts_of
from flowfabric.errors import StreamDisconnectedError
from flowfabric.feeds import (
    OLDEST,
    Subscription,
)
from sessions import session

from .following import complete_together, ids, take


async def test_a_subscription_is_refused_in_another_event_loop(engine: Engine) -> None:
    def elsewhere(call: Callable[[], Coroutine[Any, Any, object]]) -> object:
        return asyncio.run(call())

    started, unstarted = await engine.subscribe_completion(), engine.subscribe_completion()
    for events in (started, unstarted):

        async def wait(events: Subscription[Any] = events) -> object:
            return await events

        for call in (events.__anext__, events.__aenter__, wait, events.aclose):
            with pytest.raises(RuntimeError, match=r"^subscribe_completion: .* connected in another event loop; "):
                await asyncio.to_thread(elsewhere, call)
    await started.aclose()


async def test_a_subscription_is_read_by_one_task_at_a_time(engine: Engine, given: Given) -> None:
    async with engine.subscribe_completion() as events:
        waiter = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="subscribe_completion: another task waits for the next event"):
            await anext(events)
        one = await given.completed()
        assert (await waiter).execution_id == one
        two = await given.completed()
        assert ids(await take(events, 1)) == [two]


async def test_a_closed_subscription_cannot_be_started_again(engine: Engine) -> None:
    events = await engine.subscribe_completion()
    never_started = engine.subscribe_completion()
    for closed in (events, never_started):
        await closed.aclose()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^subscribe_completion: this subscription is closed; "):
                await closed
            with pytest.raises(RuntimeError, match="this subscription is closed"):
                async with closed:
                    pass
        with pytest.raises(StopAsyncIteration):
            await anext(closed)
        await closed.aclose()


@pytest.fixture
async def holder(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session that locks what subscriptions read."""
    connection = await session(url, "test holder")
    yield connection
    await connection.close()


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_shutdown_waits_until_readers_have_stopped(
    engines: Engines, holder: asyncpg.Connection, eventually: Eventually
) -> None:
    engine = await engines()
    events = await engine.subscribe_completion(OLDEST)
    await holder.execute("begin; lock table feed_trim in access exclusive mode")
    parts_of(engine).wakeups.feeds.wake_all()
    await eventually(lambda: waits_for_lock(holder))
    assert readers() == 1
    await engine.shutdown_prepare(5000)
    assert readers() == 0
    await events.aclose()


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_subscription_that_starts_during_a_shutdown_is_refused(
    engines: Engines, holder: asyncpg.Connection, eventually: Eventually
) -> None:
    engine = await engines()
    await holder.execute("begin; lock table feed_trim in access exclusive mode")
    starting = asyncio.create_task(anext(engine.subscribe_completion(OLDEST)))
    await eventually(lambda: waits_for_lock(holder))
    await engine.shutdown_prepare(1000)
    await holder.execute("rollback")
    await refused(starting, "unavailable", "the engine is closing")
    assert readers() == 0


async def waits_for_lock(connection: asyncpg.Connection) -> bool:
    """Whether a session waits for a table that is locked."""
    return bool(
        await connection.fetchval("select exists (select from pg_locks where locktype = 'relation' and not granted)")
    )


async def test_a_full_queue_stops_the_reader_until_events_are_taken(
    engine: Engine, eventually: Eventually, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [one for _ in range(4) for one in await complete_together(engine, 1000)]
    async with engine.subscribe_completion(OLDEST) as events:
        buffer = events._buffer
        await eventually(lambda: len(buffer.events) == Buffer.LIMIT)
        found = []
        for _ in range(len(made)):
            found += await take(events, 1)
            await asyncio.sleep(0)
            assert len(buffer.events) <= 1024
        assert ids(found) == made


def readers() -> int:
    """How many readers run."""
    return sum("Reader.run" in repr(task) for task in asyncio.all_tasks())


async def test_a_subscription_that_is_closed_or_dropped_stops_reading(
    engines: Engines, clock: Clock, eventually: Eventually, connection: asyncpg.Connection
) -> None:
    engine = await engines(database_pool_size=1)
    given = Given(engine, clock)
    parts_of(engine).wakeups.hints.start_listening()
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    await given.completed()
    closed, dropped = await engine.subscribe_completion(), await engine.subscribe_completion()
    assert readers() == 2
    one = await given.completed()
    assert ids(await take(closed, 1)) == ids(await take(dropped, 1)) == [one]
    await closed.aclose()
    assert readers() == 1
    with pytest.raises(StopAsyncIteration):
        await anext(closed)
    del dropped
    gc.collect()
    await eventually(lambda: readers() == 0)
    # One for calls, one that listens for hints and one that sends them.
    count = "select count(*) from pg_stat_activity where application_name = 'flowfabric'"
    assert await connection.fetchval(count) <= 3
    await given.completed()


async def test_closing_ends_a_task_that_waits_for_an_event(engine: Engine) -> None:
    events = await engine.subscribe_completion()
    waiter = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)
    await events.aclose()
    assert await waiter is None
    never_started = engine.subscribe_completion()
    await never_started.aclose()
    assert [event async for event in never_started] == []


async def test_closing_a_subscription_while_it_starts_leaves_no_reader(engine: Engine) -> None:
    events = engine.subscribe_completion()
    starting = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)
    await events.aclose()
    assert await starting is None
    assert readers() == 0


async def test_a_cancelled_wait_loses_no_event(engine: Engine, given: Given) -> None:
    async with engine.subscribe_completion() as events:
        for _ in range(20):
            waiter = asyncio.create_task(anext(events))
            await asyncio.sleep(0)
            waiter.cancel()
        made = []
        for _ in range(10):
            waiter = asyncio.create_task(anext(events))
            made.append(await given.completed())
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
            if not waiter.cancelled():
                made.remove(waiter.result().execution_id)
        assert ids(await take(events, len(made))) == made


async def test_a_shutdown_ends_a_subscription_with_the_cursor_to_continue(
    engine: Engine, engines: Engines, given: Given
) -> None:
    made = await complete_together(engine, 3)
    events = await engine.subscribe_completion(OLDEST)
    idle = await engine.subscribe_lease_history()
    assert ids(await take(events, 1)) == made[:1]
    waiter = asyncio.create_task(anext(idle))
    await asyncio.sleep(0)
    await engine.shutdown_prepare(1000)
    for waiting_or_not in (waiter, anext(events)):
        with pytest.raises(StreamDisconnectedError) as ended:
            await waiting_or_not
        assert ended.value.code == "stream_disconnected"
        assert isinstance(ended.value.detail, dict)
        assert ended.value.detail["reason"] == "the engine is closing"
        assert ended.value.cursor == ended.value.detail["cursor"] != b""
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    await refused(engine.subscribe_completion(), "unavailable", "the engine is closing")
    other = await engines()
    async with other.subscribe_completion(ended.value.cursor) as resumed:
        assert ids(await take(resumed, 2)) == made[1:]


async def test_closing_an_engine_ends_its_subscriptions(url: str, given: Given) -> None:
    async with Engine.connect(url) as other:
        events = await other.subscribe_completion()
    with pytest.raises(StreamDisconnectedError):
        await anext(events)


async def test_subscriptions_do_not_disturb_each_other(engine: Engine, given: Given) -> None:
    readers = [await engine.subscribe_completion() for _ in range(50)]
    made = [await given.completed() for _ in range(3)]
    for found in await asyncio.gather(*(take(reader, 3) for reader in readers)):
        assert ids(found) == made
    for reader in readers:
        await reader.aclose()

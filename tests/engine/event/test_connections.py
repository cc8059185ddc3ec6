"""Subscriptions survive lost connections, and end with the cursor to continue if the store stays unreachable."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from faults.proxy import Proxy
from fixtures import Clock, Engines, Eventually, Given
from flowfabric.db.session import _SESSION as SESSION
from flowfabric.engine.engine import Engine
from flowfabric.engine.event.reader import Buffer, Reader
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream.parked import ParkedTails
from flowfabric.errors import StreamDisconnectedError, TransportError
from flowfabric.feeds import OLDEST
from flowfabric.settings import Settings

from .following import complete_together, ids, is_quiet, take

SESSIONS = """select pg_terminate_backend(pid) from pg_stat_activity
               where datname = current_database() and pid <> pg_backend_pid() and application_name = 'flowfabric'"""
LISTENERS = f"{SESSIONS} and query like '/* listener */%'"


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the database."""
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def remote(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """An engine that reaches the store through the proxy, and whose readers retry soon."""
    monkeypatch.setattr(Reader, "RETRY_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(Reader, "HINTED_SECONDS", 0.05)
    settings = Settings(database_url=proxy.url, migrate_on_start=False)
    async with Engine.connect(settings=settings) as engine:
        yield engine
        proxy.refuses = False
        proxy.heal()


@pytest.fixture
def hints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers wait for hints, without polling."""
    monkeypatch.setattr(Reader, "HINTED_SECONDS", 600.0)
    monkeypatch.setattr(Reader, "UNHINTED_SECONDS", (600.0, 600.0))


@pytest.mark.usefixtures("hints_only")
async def test_events_of_another_process_arrive_by_hints(
    engines: Engines, engine: Engine, given: Given, eventually: Eventually
) -> None:
    other = await engines()
    async with (
        other.subscribe_completion() as completions,
        other.subscribe_lease_history() as leases,
        other.subscribe_instance_tags() as tags,
    ):
        await eventually(lambda: parts_of(other).wakeups.hints.is_listening)
        # The first hint of a listener says that something may have happened.
        await is_quiet(leases, seconds=0.05)
        for _ in range(3):
            one = await given.completed(tags={"ff.instance_id": "a"})
            assert ids(await take(tags, 1)) == [one]
            assert ids(await take(leases, 2)) == [one, one]
            assert ids(await take(completions, 1)) == [one]


@pytest.mark.usefixtures("hints_only")
async def test_a_lost_listener_loses_no_event(
    engines: Engines, engine: Engine, given: Given, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    other = await engines()
    hints = parts_of(other).wakeups.hints
    async with other.subscribe_completion() as events:
        for _ in range(3):
            await eventually(lambda: hints.is_listening)
            await connection.execute(LISTENERS)
            one = await given.completed()
            assert ids(await take(events, 1)) == [one]


@pytest.mark.usefixtures("fast_polls")
async def test_without_a_listener_events_are_found_by_polling(engines: Engines, engine: Engine, given: Given) -> None:
    polling = await engines(listen=False)
    async with polling.subscribe_completion() as events:
        for _ in range(3):
            one = await given.completed()
            assert ids(await take(events, 1)) == [one]
    assert not parts_of(polling).wakeups.hints.is_listening


async def test_lost_sessions_lose_no_event(
    engine: Engine, clock: Clock, remote: Engine, given: Given, proxy: Proxy, eventually: Eventually
) -> None:
    async with remote.subscribe_completion() as events:
        found, expected = [], []
        for nth in range(20):
            expected += await complete_together(engine, 30)
            if nth % 2:
                proxy.cut()
            found += await take(events, 15)
        found += await take(events, len(expected) - len(found))
        assert ids(found) == expected


async def test_a_store_that_is_away_for_a_while_is_not_noticed(
    engine: Engine, remote: Engine, given: Given, proxy: Proxy, eventually: Eventually
) -> None:
    async with remote.subscribe_completion() as events:
        one = await given.completed()
        assert ids(await take(events, 1)) == [one]
        proxy.refuses = True
        proxy.cut()
        two = await given.completed()
        assert await is_quiet(events)
        proxy.refuses = False
        assert ids(await take(events, 1)) == [two]


async def test_a_subscription_ends_if_the_store_stays_unreachable(
    engine: Engine, remote: Engine, given: Given, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "UNREACHABLE_SECONDS", 0.3)
    events, idle = await remote.subscribe_completion(), await remote.subscribe_lease_history()
    made = [await given.completed() for _ in range(3)]
    assert ids(await take(events, 3)) == made
    await take(idle, 6)
    proxy.refuses = True
    proxy.cut()
    missed = await given.completed()
    cursors = []
    for subscription in (events, idle):
        with pytest.raises(StreamDisconnectedError) as ended:
            await anext(subscription)
        assert isinstance(ended.value.detail, dict)
        assert "the store cannot be read" in str(ended.value.detail["reason"])
        cursors.append(ended.value.cursor)
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)
    proxy.refuses = False
    async with remote.subscribe_completion(cursors[0]) as resumed, remote.subscribe_lease_history(cursors[1]) as leases:
        assert ids(await take(resumed, 1)) == [missed]
        assert ids(await take(leases, 2)) == [missed, missed]


async def test_events_that_were_read_are_delivered_before_the_disconnection(
    engine: Engine, remote: Engine, proxy: Proxy, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "UNREACHABLE_SECONDS", 0.1)
    monkeypatch.setattr(Reader, "PAGE", 1)
    made = [one for _ in range(3) for one in await complete_together(engine, 600)]
    events = await remote.subscribe_completion(OLDEST)
    await eventually(lambda: len(events._buffer.events) == 1024)
    proxy.refuses = True
    proxy.cut()
    assert ids(await take(events, 1200)) == made[:1200]
    with pytest.raises(StreamDisconnectedError) as ended:
        await anext(events)
    proxy.refuses = False
    async with engine.subscribe_completion(ended.value.cursor) as resumed:
        assert ids(await take(resumed, 600)) == made[1200:]


async def test_a_store_that_is_unreachable_at_the_start_is_a_transport_error(
    engine: Engine, remote: Engine, given: Given, proxy: Proxy
) -> None:
    proxy.refuses = True
    proxy.cut()
    events = remote.subscribe_completion(OLDEST)
    for _ in range(2):
        with pytest.raises(TransportError):
            await events

    proxy.refuses = False
    one = await given.completed()
    # The same subscription can be started later.
    assert ids(await take(await events, 1)) == [one]
    await events.aclose()


async def test_a_silent_connection_delays_events_by_its_timeout(
    engine: Engine, given: Given, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.db.session.ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(Reader, "HINTED_SECONDS", 0.05)
    settings = Settings(database_url=proxy.url, migrate_on_start=False, statement_timeout_ms=300)
    async with Engine.connect(settings=settings) as impatient, impatient.subscribe_completion() as events:
        one = await given.completed()
        assert ids(await take(events, 1)) == [one]
        proxy.silence()
        two = await given.completed()
        assert ids(await take(events, 1)) == [two]
        proxy.heal()


@pytest.mark.usefixtures("hints_only")
async def test_many_subscriptions_on_a_small_pool_leave_connections_for_others(
    engines: Engines, clock: Clock, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParkedTails, "UNHINTED_SECONDS", (600.0, 600.0))
    engine = await engines(database_pool_size=4)
    wakeups, database = parts_of(engine).wakeups, parts_of(engine).store.database
    wakeups.hints.start_listening()
    await eventually(lambda: wakeups.hints.is_listening)
    readers = [await engine.subscribe_completion() for _ in range(30)]
    handle = await Given(engine, clock).claimed()
    tails = [asyncio.create_task(engine.tail_stream(handle.execution_id, 0, block_ms=30_000)) for _ in range(30)]
    await eventually(lambda: parts_of(engine).tails._operations == 30 and database._slots._value == 4)
    await is_quiet(readers[0], seconds=0.05)
    wakeups.feeds.wake_all()
    wakeups.streams.wake_all()
    most = 0
    for _ in range(200):
        await asyncio.sleep(0)
        most = max(most, len(database._used))
    # Half of the pool, for subscriptions and waiting readers of streams together.
    assert most == 2
    made = await complete_together(engine, 20, lane_id="other")
    for found in await asyncio.gather(*(take(reader, 20) for reader in readers)):
        assert ids(found) == made
    for tail in tails:
        tail.cancel()
    await asyncio.gather(*tails, return_exceptions=True)
    for reader in readers:
        await reader.aclose()


async def test_a_read_that_meets_a_lock_is_repeated(
    engines: Engines,
    engine: Engine,
    given: Given,
    connection: asyncpg.Connection,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SESSION, "lock_timeout", "20ms")
    monkeypatch.setattr(Reader, "RETRY_SECONDS", (0.01, 0.02))
    caplog.set_level("DEBUG", "flowfabric.engine.event.reader")
    hasty = await engines()
    async with hasty.subscribe_completion() as events:
        async with connection.transaction():
            await connection.execute("lock table feed_trim in access exclusive mode")
            one = await given.completed()
            parts_of(hasty).wakeups.feeds.wake_all()
            await eventually(lambda: "a read failed: retry_exhausted" in caplog.text)
        assert ids(await take(events, 1)) == [one]


def test_waits_and_limits_are_those_of_the_specification() -> None:
    assert (Reader.HINTED_SECONDS, Reader.UNREACHABLE_SECONDS, Reader.RETRY_SECONDS[0]) == (5, 30, 0.2)
    assert (Reader.PAGE, Buffer.LIMIT) == (256, 1024)

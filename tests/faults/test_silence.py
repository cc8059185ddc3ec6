"""Silent connections, which stay open but deliver nothing: of the pool, and of the listener for notifications."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from fixtures import Eventually
from flowfabric.db.database import Database
from flowfabric.db.faults import StoreFault
from flowfabric.db.notify import EVERYTHING, Hints
from flowfabric.db.session import NO_LIMITS, Limits
from flowfabric.db.statements import Statement

from .proxy import Proxy

ONE = Statement("one", "select 1 as one")
NOTIFICATION = b"A"
"""The type of NotificationResponse in the Postgres protocol."""
SLEEP = Statement("sleep", "select pg_sleep(:seconds)")


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def database(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    """A database behind the proxy with short timeouts."""
    monkeypatch.setattr("flowfabric.db.session.ANSWER_SECONDS", 0.1)
    database = await Database.open(proxy.url, schema="flowfabric", pool_size=3, limits=Limits(statement_ms=400))
    yield database
    proxy.heal()
    await database.close()


async def test_a_timeout_on_a_silent_connection_closes_the_idle_connections_too(
    database: Database, proxy: Proxy
) -> None:
    await asyncio.gather(*(database.fetch(SLEEP, {"seconds": 0.05}) for _ in range(3)))
    assert len(proxy.links) == 3
    proxy.silence()
    with pytest.raises(StoreFault) as raised:
        await database.fetch(ONE, {})
    assert (raised.value.kind, raised.value.outcome_unknown) == ("timeout", True)
    for _ in range(3):
        assert (await database.fetch(ONE, {}))[0]["one"] == 1


async def test_waiting_for_a_free_connection_times_out_like_waiting_for_an_answer(
    database: Database, proxy: Proxy
) -> None:
    async with database.acquire(), database.acquire(), database.acquire():
        with pytest.raises(StoreFault, match="FF_DATABASE_POOL_SIZE") as raised:
            await database.fetch(ONE, {})
        assert (raised.value.kind, raised.value.outcome_unknown, raised.value.is_canceled) == ("timeout", False, False)
    assert (await database.fetch(ONE, {}))[0]["one"] == 1


async def test_a_cancelled_call_occupies_the_pool_until_its_connection_is_closed(
    url: str, proxy: Proxy, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise many cancelled calls at once would open more connections than the size of the pool."""
    monkeypatch.setattr("flowfabric.db.database.CLOSE_SECONDS", 60)
    database = await Database.open(proxy.url, schema="flowfabric", pool_size=3, limits=Limits(statement_ms=60_000))
    observer = await asyncpg.connect(url)
    running = "select count(*) = 3 from pg_stat_activity where query like '/* sleep */%' and state = 'active'"
    try:
        calls = [asyncio.create_task(database.fetch(SLEEP, {"seconds": 50})) for _ in range(3)]
        await eventually(lambda: observer.fetchval(running))
        proxy.silence()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        fourth = asyncio.create_task(database.fetch(ONE, {}))
        await asyncio.wait((fourth,), timeout=0.2)
        assert not fourth.done()
        proxy.heal()
        assert (await fourth)[0]["one"] == 1
    finally:
        await observer.close()
        await database.close()


async def test_a_call_cancelled_on_a_silent_connection_occupies_the_pool_until_the_close_times_out(
    url: str, proxy: Proxy, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.db.database.CLOSE_SECONDS", 0.2)
    database = await Database.open(proxy.url, schema="flowfabric", pool_size=1, limits=Limits(statement_ms=60_000))
    observer = await asyncpg.connect(url)
    running = "select count(*) = 1 from pg_stat_activity where query like '/* sleep */%' and state = 'active'"
    try:
        call = asyncio.create_task(database.fetch(SLEEP, {"seconds": 50}))
        await eventually(lambda: observer.fetchval(running))
        proxy.silence()
        call.cancel()
        await asyncio.wait((call,))
        async with asyncio.timeout(30):
            assert (await database.fetch(ONE, {}))[0]["one"] == 1
    finally:
        proxy.heal()
        await observer.close()
        await database.close()


async def test_a_silent_listener_is_replaced(
    database: Database, proxy: Proxy, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets stay open, so the operating system reports no error."""
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 0.1)
    hints, sender = Hints(database), Hints(database)
    received: list[list[str]] = []
    hints.subscribe("work", received.append)
    try:
        await hints.listen()
        assert hints.is_listening
        proxy.silence()
        await eventually(lambda: not hints.is_listening)
        await eventually(lambda: hints.is_listening)
        received.clear()
        sender.send("work", "after")
        await eventually(lambda: ["after"] in received)
    finally:
        await hints.close()
        await sender.close()


async def test_a_connection_that_receives_no_notifications_does_not_count_as_listening(
    database: Database,
    proxy: Proxy,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Behind a pooler in transaction mode statements are answered, but notifications go to other sessions."""
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(Hints, "PROBE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(Hints, "LISTEN_SECONDS", 0.1)
    proxy.swallows = frozenset({NOTIFICATION})
    hints = Hints(database)
    hints.subscribe("work", lambda _: None)
    try:
        await hints.listen()
        await eventually(lambda: "FF_LISTEN=false" in caplog.text)
        assert not hints.is_listening
        proxy.swallows = frozenset()
        await eventually(lambda: hints.is_listening)
    finally:
        await hints.close()


async def test_a_listener_that_stops_receiving_notifications_is_noticed_by_the_next_probe(
    database: Database,
    proxy: Proxy,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its subscription is gone, but its connection still answers: for example after UNLISTEN by a pooler."""
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 0.1)
    hints = Hints(database)
    received: list[list[str]] = []
    hints.subscribe("work", received.append)
    try:
        await hints.listen()
        assert hints.is_listening
        monkeypatch.setattr(Hints, "PROBE_TIMEOUT_SECONDS", 0.2)
        for _ in range(2):
            received.clear()
            proxy.swallows = frozenset({NOTIFICATION})
            await eventually(lambda: not hints.is_listening)
            proxy.swallows = frozenset()
            await eventually(lambda: hints.is_listening)
            assert received == [[EVERYTHING]], "the hints of the gap are missing"
        assert caplog.text.count("LISTEN receives nothing over this connection") == 1
    finally:
        await hints.close()


async def test_a_probe_that_arrives_only_with_an_answer_proves_nothing(
    database: Database,
    proxy: Proxy,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pooler in transaction mode may run the statements of the listener where it is subscribed."""
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(Hints, "PROBE_TIMEOUT_SECONDS", 0.2)
    proxy.pools_transactions = True
    hints = Hints(database)
    received: list[list[str]] = []
    hints.subscribe("work", received.append)
    try:
        assert hints.start_listening()
        # Every probe that fails leads to another connection.
        await eventually(lambda: proxy.connections >= 8)
        assert (hints.is_listening, received) == (False, [])
        assert caplog.text.count("LISTEN receives nothing over this connection") == 1
    finally:
        await hints.close()


@pytest.mark.parametrize("silent", ["listening", "sending"])
async def test_a_listener_with_a_silent_connection_reconnects_and_does_not_count_as_deaf(
    silent: str,
    proxy: Proxy,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(Hints, "PROBE_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(Hints, "SEND_SECONDS", 0.5)
    database = await Database.open(proxy.url, schema="flowfabric", pool_size=1, limits=NO_LIMITS)
    hints = Hints(database)
    received: list[list[str]] = []
    hints.subscribe("work", received.append)
    links = {"pool": set(proxy.links)}
    try:
        hints.send("work", "first")
        await eventually(lambda: hints._sender is None or hints._sender.done())
        links["sending"] = proxy.links - links["pool"]
        await hints.listen()
        links["listening"] = proxy.links - links["pool"] - links["sending"]
        assert {name: len(each) for name, each in links.items()} == {"pool": 1, "sending": 1, "listening": 1}
        proxy.silence(links[silent])
        await eventually(lambda: received == [[EVERYTHING], [EVERYTHING]])
        assert "LISTEN receives nothing over this connection" not in caplog.text
    finally:
        await hints.close()
        proxy.heal()
        await database.close()


async def test_a_listener_that_is_lost_during_a_probe_reconnects_soon(
    database: Database,
    proxy: Proxy,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Hints, "PROBE_TIMEOUT_SECONDS", 600.0)
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 600.0)
    proxy.swallows = frozenset({NOTIFICATION})
    hints = Hints(database)
    hints.subscribe("work", lambda _: None)
    try:
        assert hints.start_listening()
        # The pool, the listener and the sender of the probe.
        await eventually(lambda: len(proxy.links) == 3 and not hints._sending_lock.locked())
        proxy.swallows = frozenset()
        proxy.cut()
        await eventually(lambda: hints.is_listening)
        assert "LISTEN receives nothing over this connection" not in caplog.text
    finally:
        await hints.close()


async def test_close_does_not_wait_for_a_hint_that_is_being_sent_on_a_silent_connection(
    proxy: Proxy, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hints, "CLOSE_SECONDS", 0.2)
    database = await Database.open(proxy.url, schema="flowfabric", pool_size=1, limits=Limits(statement_ms=60_000))
    hints = Hints(database)
    try:
        hints.send("work", "one")
        # Wait until the first hint has been sent, over the second connection.
        await eventually(lambda: len(proxy.links) == 2 and (hints._sender is None or hints._sender.done()))
        proxy.silence()
        hints.send("work", "two")
        async with asyncio.timeout(5):
            await hints.close()
    finally:
        proxy.heal()
        await database.close()

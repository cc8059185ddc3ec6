"""Work is found in time even if the answers to earlier claims arrived late."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.db import session
from flowfabric.engine.core.watermark import ScanWatermarks, TimerWatermark
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import TransportError
from flowfabric.model.grant import Granted, NoWork
from flowfabric.model.lease import ClaimedExecution, RetryScheduled
from flowfabric.reconcile.due import read_due
from flowfabric.reconcile.loop import Reconciler
from flowfabric.settings import Settings

from .proxy import Action, Fault, Proxy, Side

FREE_SECONDS = 0.3
"""A full scan that takes at most this long may be repeated at once: longer than a scan takes on a busy machine."""
LATE_SECONDS = FREE_SECONDS + 0.1
"""How late an answer arrives: a scan that took this long on the server would not be repeated at once."""
LANE = "default"
Claim = Callable[[Engine], Awaitable[object]]


@pytest.fixture(autouse=True)
def _scans_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScanWatermarks, "FREE_SECONDS", FREE_SECONDS)


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def polling(proxy: Proxy) -> AsyncIterator[Engine]:
    """An engine behind the proxy that receives no hints."""
    settings = Settings(database_url=proxy.url, listen=False)
    async with Engine.connect(settings=settings) as engine:
        yield engine


@pytest.fixture
async def listening(proxy: Proxy) -> AsyncIterator[Engine]:
    """An engine behind the proxy that receives hints."""
    async with Engine.connect(settings=Settings(database_url=proxy.url)) as engine:
        yield engine


RETRY_AT_ONCE = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}}


async def claim(engine: Engine) -> list[ClaimedExecution]:
    return await engine.claim_many(lanes=(LANE,), worker_id="w", worker_instance_id="w-1", limit=1)


async def grant(engine: Engine) -> Granted | NoWork:
    return await engine.claim_for_worker(
        lane_id=LANE, worker_id="w", worker_instance_id="w-1", worker_capabilities=(), grant_ttl_ms=5_000
    )


def watermarks(engine: Engine) -> ScanWatermarks:
    """The watermarks of an engine that has made one kind of claim."""
    (found,) = parts_of(engine).wakeups.watermarks._by_route.values()
    return found


def delay_the_next_answer(proxy: Proxy) -> None:
    proxy.arm(Fault(action=Action.DELAY, side=Side.SERVER, seconds=LATE_SECONDS))


async def test_a_late_answer_to_a_claim_does_not_delay_the_next_claim(
    polling: Engine, engine: Engine, given: Given, proxy: Proxy
) -> None:
    assert await claim(polling) == []
    execution_id = await given.created(policy=RETRY_AT_ONCE)
    delay_the_next_answer(proxy)
    (claimed,) = await claim(polling)
    assert proxy.triggered
    assert isinstance(await engine.fail(claimed.handle, reason="no luck"), RetryScheduled)
    (again,) = await claim(polling)
    assert again.execution_id == execution_id


async def test_a_late_answer_to_a_grant_does_not_delay_the_next_grant(
    polling: Engine, given: Given, proxy: Proxy, clock: Clock
) -> None:
    assert await grant(polling) == NoWork()
    execution_id = await given.created()
    delay_the_next_answer(proxy)
    assert isinstance(await grant(polling), Granted)
    assert proxy.triggered
    await clock.advance(seconds=6)
    again = await grant(polling)
    assert isinstance(again, Granted)
    assert again.execution_id == execution_id


@pytest.mark.parametrize("take", [claim, grant])
async def test_a_full_scan_that_was_slow_on_the_server_is_not_repeated_at_once(
    engines: Engines,
    engine: Engine,
    given: Given,
    clock: Clock,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    take: Claim,
) -> None:
    monkeypatch.setattr(ScanWatermarks, "FREE_SECONDS", 0.05)
    # A scan reads the clock if it finds a grant.
    await given.created()
    await grant(engine)
    await clock.advance(seconds=6)
    # Only the scan is slow: the engine has connected before, and the function that it calls is replaced.
    await connection.execute("alter function ff_now() rename to ff_time")
    await connection.execute(_slow_clock(seconds=0))
    other = await engines()
    await connection.execute(_slow_clock(seconds=0.1))
    await take(other)
    assert not watermarks(other).may_scan_all


def _slow_clock(*, seconds: float) -> str:
    return f"""create or replace function ff_now() returns bigint language sql
               as $$ select ff_time() from pg_sleep({seconds}) $$"""


async def test_after_a_gap_in_the_hints_the_queues_are_scanned_in_full(
    listening: Engine,
    engine: Engine,
    given: Given,
    proxy: Proxy,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The watermarks do not expire during the test.
    monkeypatch.setattr(ScanWatermarks, "LONGEST_SECONDS", 600.0)
    execution_id = await given.created(policy=RETRY_AT_ONCE)
    await parts_of(listening).wakeups.hints.listen()
    (claimed,) = await claim(listening)
    found = watermarks(listening)
    # As after a scan over the dead rows of a long transaction.
    found.record_full_scan(60)
    proxy.refuses = True
    proxy.cut()
    await eventually(lambda: not parts_of(listening).wakeups.hints.is_listening)
    assert isinstance(await engine.fail(claimed.handle, reason="no luck"), RetryScheduled)
    proxy.refuses = False
    await eventually(lambda: parts_of(listening).wakeups.hints.is_listening)
    assert not found.may_scan_all
    (again,) = await claim(listening)
    assert again.execution_id == execution_id


async def test_a_late_answer_about_timers_does_not_delay_the_next_full_scan_of_them(
    polling: Engine, engine: Engine, given: Given, rows: Rows, proxy: Proxy, clock: Clock
) -> None:
    """The timer of a lease that commits late is below the watermark, and only a full scan finds it."""
    seconds = 1000.0
    parts_of(polling).lifecycle.store.due_watermark._clock = lambda: seconds
    await given.created()
    await read_due(parts_of(polling).store, [])
    delay_the_next_answer(proxy)
    await read_due(parts_of(polling).store, [])
    assert proxy.triggered
    await clock.advance(seconds=-60)
    (claimed,) = await claim(engine)
    await clock.advance(seconds=60)
    assert await parts_of(polling).lease_expiry.sweep() == 0
    seconds += 10
    await Reconciler(polling).catch_up()
    assert (await rows.execution(claimed.execution_id))["ownership_state"] == "lease_expired_reclaimable"


async def test_a_full_scan_of_timers_that_timed_out_is_not_repeated_at_once(
    url: str, connection: asyncpg.Connection
) -> None:
    settings = Settings(database_url=url, statement_timeout_ms=200)
    async with Engine.connect(settings=settings) as engine:
        due = parts_of(engine).lifecycle.store.due_watermark
        seconds = 1000.0
        due._clock = lambda: seconds
        await read_due(parts_of(engine).store, [])
        seconds += TimerWatermark.LONGEST_SECONDS
        assert due.scan_start() == 0
        await connection.execute("alter function ff_now() rename to ff_time")
        await connection.execute(_slow_clock(seconds=60))
        with pytest.raises(TransportError, match="statement timeout"):
            await read_due(parts_of(engine).store, [])
        assert due.scan_start() == due.since > 0
        seconds += TimerWatermark.LONGEST_SECONDS
        assert due.scan_start() == 0


async def test_the_locks_of_a_client_that_fell_silent_within_a_statement_are_released(
    url: str, given: Given, proxy: Proxy, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has run the statement and waits for the rest of the messages; the proxy keeps its socket open."""
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.2)
    limits: dict[str, Any] = {"statement_timeout_ms": 300, "listen": False}
    async with (
        Engine.connect(settings=Settings(database_url=proxy.url, **limits)) as silent,
        Engine.connect(settings=Settings(database_url=url, **limits)) as other,
    ):
        await given.created()
        await claim(silent)
        execution_id = await given.created()
        # The client sends Bind, Execute and Sync; the server receives no Sync.
        proxy.arm(Fault(action=Action.SILENCE, side=Side.CLIENT, nth=3))
        with pytest.raises(TransportError, match="no answer in time"):
            await claim(silent)
        assert await claim(other) == []
        await eventually(Reconciler(other).catch_up)
        (claimed,) = await eventually(lambda: claim(other))
        assert claimed.execution_id == execution_id
        proxy.heal()
        proxy.cut()

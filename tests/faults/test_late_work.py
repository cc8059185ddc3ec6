"""Work is taken up in time, however long the answers of earlier claims took to arrive."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.engine.core.watermark import ScanWatermarks, TimerWatermark
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import TransportError
from flowfabric.model.grant import Granted, NoWork
from flowfabric.model.lease import ClaimedExecution, RetryScheduled
from flowfabric.reconcile.due import read_due
from flowfabric.reconcile.loop import Reconciler
from flowfabric.settings import Settings

from .proxy import Action, Proxy, Side, Strike

FREE = 0.3
"""How long a walk of these tests may take and be repeated at once: longer than one takes on a busy machine."""
SLOW = FREE + 0.1
"""How long an answer takes to arrive: a walk that took so long would be too expensive to repeat at once."""
LANE = "default"
Take = Callable[[Engine], Awaitable[object]]


@pytest.fixture(autouse=True)
def _scans_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScanWatermarks, "FREE_SECONDS", FREE)


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


AGAIN_AT_ONCE = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}}


async def claim(engine: Engine) -> list[ClaimedExecution]:
    return await engine.claim_many(lanes=(LANE,), worker_id="w", worker_instance_id="w-1", limit=1)


async def grant(engine: Engine) -> Granted | NoWork:
    return await engine.claim_for_worker(
        lane_id=LANE, worker_id="w", worker_instance_id="w-1", worker_capabilities=(), grant_ttl_ms=5_000
    )


def watermarks(engine: Engine) -> ScanWatermarks:
    """The watermarks of the one kind of claim that an engine has made."""
    (of_claims,) = parts_of(engine).wakeups.watermarks._by_route.values()
    return of_claims


def delay_the_next_answer(proxy: Proxy) -> None:
    proxy.arm(Strike(action=Action.DELAY, side=Side.SERVER, seconds=SLOW))


async def test_a_claim_whose_answer_arrived_late_does_not_make_the_next_one_late(
    polling: Engine, engine: Engine, given: Given, proxy: Proxy
) -> None:
    assert await claim(polling) == []
    execution_id = await given.created(policy=AGAIN_AT_ONCE)
    delay_the_next_answer(proxy)
    (claimed,) = await claim(polling)
    assert proxy.struck
    assert isinstance(await engine.fail(claimed.handle, reason="no luck"), RetryScheduled)
    (again,) = await claim(polling)
    assert again.execution_id == execution_id


async def test_a_grant_whose_answer_arrived_late_does_not_make_the_next_one_late(
    polling: Engine, given: Given, proxy: Proxy, clock: Clock
) -> None:
    assert await grant(polling) == NoWork()
    execution_id = await given.created()
    delay_the_next_answer(proxy)
    assert isinstance(await grant(polling), Granted)
    assert proxy.struck
    await clock.advance(seconds=6)
    again = await grant(polling)
    assert isinstance(again, Granted)
    assert again.execution_id == execution_id


@pytest.mark.parametrize("take", [claim, grant])
async def test_a_walk_that_was_slow_on_the_server_is_not_repeated_at_once(
    engines: Engines, engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, take: Take
) -> None:
    # The walk reads the clock where it meets a grant.
    await given.created()
    await grant(engine)
    await clock.advance(seconds=6)
    await connection.execute(
        f"""alter function ff_now() rename to ff_time;
            create function ff_now() returns bigint language sql as $$ select ff_time() from pg_sleep({SLOW}) $$"""
    )
    other = await engines()
    await take(other)
    assert not watermarks(other).may_scan_all


async def test_after_a_gap_in_the_hints_the_queues_are_walked_whole(
    listening: Engine,
    engine: Engine,
    given: Given,
    proxy: Proxy,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Long enough that the marks do not end by themselves meanwhile.
    monkeypatch.setattr(ScanWatermarks, "LONGEST_SECONDS", 600.0)
    execution_id = await given.created(policy=AGAIN_AT_ONCE)
    await parts_of(listening).wakeups.hints.listen()
    (claimed,) = await claim(listening)
    marks = watermarks(listening)
    # As behind a long transaction, where the marks last longest.
    marks.record_full_scan(60)
    proxy.refuses = True
    proxy.cut()
    await eventually(lambda: not parts_of(listening).wakeups.hints.is_listening)
    assert isinstance(await engine.fail(claimed.handle, reason="no luck"), RetryScheduled)
    proxy.refuses = False
    await eventually(lambda: parts_of(listening).wakeups.hints.is_listening)
    assert not marks.may_scan_all
    (again,) = await claim(listening)
    assert again.execution_id == execution_id


async def test_a_look_whose_answer_arrived_late_does_not_put_off_the_next_whole_one(
    polling: Engine, engine: Engine, given: Given, rows: Rows, proxy: Proxy, clock: Clock
) -> None:
    """A lease that is committed late ends before the time up to which timers were seen."""
    seconds = 1000.0
    parts_of(polling).lifecycle.store.due_watermark._clock = lambda: seconds
    await given.created()
    await read_due(parts_of(polling).store, [])
    delay_the_next_answer(proxy)
    await read_due(parts_of(polling).store, [])
    assert proxy.struck
    await clock.advance(seconds=-60)
    (claimed,) = await claim(engine)
    await clock.advance(seconds=60)
    assert await parts_of(polling).lease_expiry.sweep() == 0
    seconds += 10
    await Reconciler(polling).catch_up()
    assert (await rows.execution(claimed.execution_id))["ownership_state"] == "lease_expired_reclaimable"


async def test_a_whole_look_that_the_server_gave_up_is_not_repeated_at_once(
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
        await connection.execute(
            """alter function ff_now() rename to ff_time;
               create function ff_now() returns bigint language sql as $$ select ff_time() from pg_sleep(60) $$"""
        )
        with pytest.raises(TransportError, match="statement timeout"):
            await read_due(parts_of(engine).store, [])
        assert due.scan_start() == due.since > 0
        seconds += TimerWatermark.LONGEST_SECONDS
        assert due.scan_start() == 0


async def test_what_a_client_has_locked_that_fell_silent_in_a_statement_is_freed(
    url: str, given: Given, proxy: Proxy, eventually: Eventually
) -> None:
    """The statement was executed and its end never arrives, over a proxy that keeps the server's side open."""
    limits: dict[str, Any] = {"statement_timeout_ms": 300, "listen": False}
    async with (
        Engine.connect(settings=Settings(database_url=proxy.url, **limits)) as silent,
        Engine.connect(settings=Settings(database_url=url, **limits)) as other,
    ):
        await given.created()
        await claim(silent)
        execution_id = await given.created()
        # Bind, Execute and Sync: the last one is lost, and all that follows.
        proxy.arm(Strike(action=Action.SILENCE, side=Side.CLIENT, nth=3))
        with pytest.raises(TransportError, match="no answer in time"):
            await claim(silent)
        assert await claim(other) == []
        await eventually(Reconciler(other).catch_up)
        (claimed,) = await eventually(lambda: claim(other))
        assert claimed.execution_id == execution_id
        proxy.heal()
        proxy.cut()

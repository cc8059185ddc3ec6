"""The reconciler loop: it is on time, shared by processes, and survives failures."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import Parts, parts_of
from flowfabric.model.errors import TransportError
from flowfabric.model.states import PublicState
from flowfabric.reconcile import loop
from flowfabric.reconcile.due import read_due
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS, Sweep

OFTEN = {"lease_expiry_interval_ms": 50, "delayed_promoter_interval_ms": 50}


def counting(run: Callable[[int], int], *, every_ms: int = 20, is_woken_by_timers: bool = True) -> Sweep:
    """A sweep that is always due and calls run with the number of the batch."""
    calls = 0

    async def batch(_: Parts) -> int:
        nonlocal calls
        calls += 1
        return run(calls)

    return Sweep(
        "counting",
        batch,
        every=lambda _: timedelta(milliseconds=every_ms),
        batch=10,
        is_due=lambda _: True,
        is_woken_by_timers=is_woken_by_timers,
    )


@pytest.mark.usefixtures("scans_are_free")
async def test_due_work_is_processed_in_the_background(
    engines: Engines, given: Given, clock: Clock, eventually: Eventually
) -> None:
    engine = await engines(**OFTEN)
    lost = await given.claimed(lease_ttl_ms=30_000)
    delayed = await given.delayed(seconds=40)
    late = await given.created(execution_deadline_at=await clock.now() + 50_000)
    async with Reconciler(engine) as reconciler:
        await clock.advance(seconds=60)
        await eventually(lambda: reconciler.stats["lease_expiry"].processed == 1)
        await eventually(lambda: reconciler.stats["delayed_promoter"].processed == 1)
        await eventually(lambda: reconciler.stats["expiry"].processed == 1)
    assert await engine.read_execution_state(delayed) is PublicState.WAITING
    assert await engine.read_execution_state(late) is PublicState.EXPIRED
    assert {(await given.claim()).execution_id for _ in range(2)} == {lost.execution_id, delayed}


@pytest.fixture
async def patient(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose reconciler looks once a minute: earlier work was known to it."""
    monkeypatch.setattr(Reconciler, "IDLE_SECONDS", 60.0)
    minute = {
        "lease_expiry_interval_ms": 60_000,
        "delayed_promoter_interval_ms": 60_000,
        "attempt_timeout_interval_s": 60,
        "execution_deadline_interval_s": 60,
        "suspension_timeout_interval_s": 60,
    }
    patient: Engine = await engines(**minute)
    return patient


async def test_a_timer_set_by_this_process_is_processed_on_time(patient: Engine, given: Given, clock: Clock) -> None:
    given.engine = patient
    await clock.stop()
    async with Reconciler(patient):
        # The loop has looked already, so it knows this timer only from the engine.
        run = await given.created(delay_until=await clock.now() + 150)
        assert await patient.read_execution_state(run) is PublicState.DELAYED
        await clock.advance(ms=150)
        assert await patient.claim(lane_id="default", worker_id="w", worker_instance_id="w-1", max_wait_ms=30_000)


async def test_a_timer_set_earlier_by_another_process_is_processed_on_time(
    patient: Engine, given: Given, clock: Clock
) -> None:
    await clock.stop()
    run = await given.created(delay_until=await clock.now() + 150)
    async with Reconciler(patient):
        assert await patient.read_execution_state(run) is PublicState.DELAYED
        await clock.advance(ms=150)
        assert await patient.claim(lane_id="default", worker_id="w", worker_instance_id="w-1", max_wait_ms=30_000)


async def test_a_timer_set_by_another_process_is_processed_by_the_next_look(
    patient: Engine, given: Given, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reconciler, "IDLE_SECONDS", 0.05)
    async with Reconciler(patient):
        await given.created(delay_until=await clock.now() + 50)
        assert await patient.claim(lane_id="default", worker_id="w", worker_instance_id="w-1", max_wait_ms=30_000)


async def test_claims_skip_their_catch_up_while_the_loop_runs(engine: Engine) -> None:
    assert not parts_of(engine).catch_up.is_left_to_sweeps
    async with Reconciler(engine):
        assert parts_of(engine).catch_up.is_left_to_sweeps
    assert not parts_of(engine).catch_up.is_left_to_sweeps


async def test_two_loops_process_everything_once(
    engines: Engines, given: Given, clock: Clock, rows: Rows, eventually: Eventually
) -> None:
    engine, other = await engines(**OFTEN), await engines(**OFTEN)
    lost = [await given.claimed() for _ in range(8)]
    delayed = [await given.delayed(seconds=20) for _ in range(8)]
    timed_out = [await given.created(execution_deadline_at=await clock.now() + 20_000) for _ in range(8)]
    await given.registered(liveness_ttl_ms=1000)
    async with Reconciler(engine) as one, Reconciler(other) as two:

        def processed(name: str) -> int:
            return one.stats[name].processed + two.stats[name].processed

        await clock.advance(seconds=60)
        await eventually(lambda: processed("lease_expiry") >= len(lost))
        await eventually(lambda: processed("delayed_promoter") >= len(delayed))
        await eventually(lambda: processed("expiry") >= len(timed_out))
    await Reconciler(engine).catch_up()
    counted = {name: processed(name) for name in ("lease_expiry", "delayed_promoter", "expiry")}
    assert counted == {"lease_expiry": 8, "delayed_promoter": 8, "expiry": 8}
    assert len(await rows.of("event_each", kind="expired")) == len(lost)
    assert len([event for event in await rows.of("event_each") if event["outcome"] is not None]) == len(timed_out)
    assert len(await rows.of("worker_event", kind="ttl_swept")) == 1
    assert len(await rows.of("execution", public_state="waiting")) == len(delayed)


async def test_a_full_batch_is_followed_by_the_next_without_a_pause(engine: Engine, eventually: Eventually) -> None:
    sweep = counting(lambda call: 10 if call <= 5 else 0, every_ms=60_000, is_woken_by_timers=False)
    async with Reconciler(engine, sweeps=[sweep]) as reconciler:
        await eventually(lambda: reconciler.stats["counting"].cycles == 6)
        assert reconciler.stats["counting"].processed == 50


async def test_a_failing_sweep_is_counted_and_does_not_stop_the_others(
    engines: Engines, given: Given, clock: Clock, eventually: Eventually
) -> None:
    def fail(_: int) -> int:
        raise ValueError("cannot")

    engine = await engines(**OFTEN)
    await given.delayed(seconds=30)
    async with Reconciler(engine, sweeps=[counting(fail), *SWEEPS]) as reconciler:
        await clock.advance(seconds=31)
        await eventually(lambda: reconciler.stats["delayed_promoter"].processed == 1)
        stats = reconciler.stats["counting"]
        await eventually(lambda: stats.errors >= 3)
        assert (stats.last_error, stats.cycles) == ("cannot", 0)
        assert stats.lag_seconds > 0
        assert not parts_of(engine).catch_up.is_left_to_sweeps


async def test_a_sweep_recovers_after_failures(
    engine: Engine, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reconciler, "IDLE_SECONDS", 0.05)

    def fail_twice(call: int) -> int:
        if call <= 2:
            raise ValueError("not yet")
        return 0

    async with Reconciler(engine, sweeps=[counting(fail_twice)]) as reconciler:
        await eventually(lambda: reconciler.stats["counting"].cycles >= 1)
        assert reconciler.stats["counting"].errors == 2
        await eventually(lambda: parts_of(engine).catch_up.is_left_to_sweeps)
        assert reconciler.stats["counting"].lag_seconds == 0


async def test_an_unreachable_store_is_retried(
    engine: Engine, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reconciler, "FAULT_SECONDS", (0.02, 0.05))

    def lose(call: int) -> int:
        if call <= 2:
            raise TransportError("transport", "gone")
        return 0

    async with Reconciler(engine, sweeps=[counting(lose)]) as reconciler:
        await eventually(lambda: reconciler.stats["counting"].cycles >= 1)
        assert reconciler.stats["counting"].errors == 2


async def test_the_loop_survives_the_loss_of_its_connections(
    engines: Engines, given: Given, clock: Clock, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    engine = await engines(**OFTEN)
    await given.delayed(seconds=30)
    async with Reconciler(engine) as reconciler:
        await connection.fetch(
            """select pg_terminate_backend(pid) from pg_stat_activity
                where datname = current_database() and application_name = 'flowfabric'"""
        )
        await clock.advance(seconds=31)
        await eventually(lambda: reconciler.stats["delayed_promoter"].processed == 1)


async def test_a_loop_that_fails_restarts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Reconciler, "RESTART_SECONDS", 0.05)
    calls = 0

    async def break_at_first(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("broken")
        return await read_due(*arguments, **named)

    monkeypatch.setattr(loop, "read_due", break_at_first)
    async with Reconciler(engine) as reconciler:
        await eventually(lambda: reconciler.stats["event_partitions"].cycles == 1)
    assert "the reconciler failed and restarts" in caplog.text


async def test_stopping_waits_for_the_running_sweep(engine: Engine) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def wait(_: Parts) -> int:
        began.set()
        await may_end.wait()
        return 1

    sweep = Sweep("waiting", wait, every=lambda _: timedelta(seconds=1), batch=10, is_due=lambda _: True)
    reconciler = Reconciler(engine, sweeps=[sweep])
    starting = asyncio.create_task(reconciler.__aenter__())
    await began.wait()
    stopping = asyncio.create_task(reconciler.__aexit__(None, None, None))
    done, _ = await asyncio.wait({stopping}, timeout=0.05)
    assert not done
    may_end.set()
    await stopping
    await starting
    assert reconciler.stats["waiting"].processed == 1


async def test_stopping_waits_no_longer_than_its_limit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reconciler, "SHUTDOWN_SECONDS", 0.05)
    began = asyncio.Event()

    async def hang(_: Parts) -> int:
        began.set()
        await asyncio.Event().wait()
        return 0

    sweep = Sweep("hanging", hang, every=lambda _: timedelta(seconds=1), batch=10, is_due=lambda _: True)
    reconciler = Reconciler(engine, sweeps=[sweep])
    starting = asyncio.create_task(reconciler.__aenter__())
    await began.wait()
    await reconciler.__aexit__(None, None, None)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


async def test_a_cancelled_start_leaves_nothing_running(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reconciler, "SHUTDOWN_SECONDS", 0.05)
    began = asyncio.Event()

    async def hang(_: Parts) -> int:
        began.set()
        await asyncio.Event().wait()
        return 0

    sweep = Sweep("hanging", hang, every=lambda _: timedelta(seconds=1), batch=10, is_due=lambda _: True)
    starting = asyncio.create_task(Reconciler(engine, sweeps=[sweep]).__aenter__())
    await began.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

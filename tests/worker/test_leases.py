"""How a worker keeps its leases, and what it does when it loses one."""

import asyncio
import threading
import time
from typing import Any

import pytest

from flowfabric.engine.engine import Engine, engine_beside
from flowfabric.engine.parts import parts_of
from flowfabric.model.event import EventKind
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.worker import heartbeat
from flowfabric.worker.context import Context
from flowfabric.worker.heartbeat import Heartbeat

TTL_MS = 600
LONG_TTL_MS = 3000
"""A lease whose renewals get through on a busy machine too."""


async def burn(ctx: Context) -> bool:
    """Keep the event loop from turning, as a handler should not do, until the lease is renewed meanwhile."""
    until, before = time.monotonic() + 60, ctx._running.renewed_at
    while ctx._running.renewed_at == before and time.monotonic() < until:
        pass
    return ctx._running.renewed_at > before


async def renewals(rows: Any, run: ExecutionId) -> int:
    """How often the lease of a run was renewed."""
    return sum(event["kind"] == EventKind.RENEWED for event in await rows.events(run))


async def test_a_handler_that_blocks_the_loop_keeps_its_lease(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any, rows: Any, clock: Any
) -> None:
    await clock.stop()
    await start_worker({"job": burn}, lease_ttl=TTL_MS / 1000)
    run = await submit()
    ended = await engine.wait_for_ending(run, timeout=120)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"true")
    assert await renewals(rows, run) >= 1
    assert len(await attempts(run)) == 1


async def test_a_plain_function_that_takes_long_keeps_its_lease(
    engine: Engine, start_worker: Any, submit: Any, rows: Any, clock: Any, eventually: Any
) -> None:
    await clock.stop()
    gate = threading.Event()

    def wait() -> bool:
        return gate.wait(timeout=60)

    run = await submit()
    await start_worker({"job": wait}, lease_ttl=TTL_MS / 1000)

    async def is_kept() -> bool:
        return await renewals(rows, run) >= 4

    await eventually(is_kept)
    gate.set()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"true")


async def test_a_heartbeat_that_fails_begins_again(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await clock.stop()
    faults = iter([OSError("no route"), ValueError("whatever else")])

    def fails_at_first(engine: Engine, **options: Any) -> Any:
        if fault := next(faults, None):
            raise fault
        return engine_beside(engine, **options)

    monkeypatch.setattr(heartbeat, "engine_beside", fails_at_first)
    await start_worker({"job": burn}, lease_ttl=TTL_MS / 1000)
    run = await submit()
    ended = await engine.wait_for_ending(run, timeout=120)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"true")
    assert len(await attempts(run)) == 1
    assert next(faults, None) is None


async def test_a_short_run_is_not_renewed(
    engine: Engine, start_worker: Any, submit: Any, rows: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat, looks = Heartbeat._beat, 0

    async def look_often(heartbeat: Heartbeat, engine: Engine) -> None:
        nonlocal looks
        heartbeat._tick = 0.01
        await beat(heartbeat, engine)
        looks += 1

    monkeypatch.setattr(Heartbeat, "_beat", look_often)

    async def outlast_looks() -> None:
        enough = looks + 5
        await eventually(lambda: looks >= enough)

    # Short beside a third of the lease.
    await start_worker({"job": outlast_looks}, lease_ttl=600)
    # A listener that has just begun may have missed hints, and then every lease is checked by a renewal.
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    await outlast_looks()
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert await renewals(rows, run) == 0


async def test_a_handler_whose_lease_is_lost_is_cancelled(
    engine: Engine, start_worker: Any, submit: Any, rows: Any, clock: Any, eventually: Any
) -> None:
    await clock.stop()
    contexts: list[Context] = []
    cancelled = asyncio.Event()

    async def wait(ctx: Context) -> str:
        contexts.append(ctx)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
        return "swallowed"

    run = await submit()
    worker = await start_worker({"job": wait}, lease_ttl=TTL_MS / 1000)
    await eventually(lambda: contexts)
    (ctx,) = contexts
    assert ctx.is_lease_healthy()
    lost = ctx.lease_lost
    await engine.cancel_execution(execution_id=run, reason="not wanted")
    await asyncio.wait_for(cancelled.wait(), 60)
    await asyncio.wait_for(lost, 60)
    await asyncio.wait_for(ctx.lease_lost, 60)
    assert not ctx.is_lease_healthy()
    await eventually(lambda: worker.running == 0)
    assert (await rows.execution(run))["terminal_outcome"] == "cancelled"


async def test_a_plain_function_learns_that_its_lease_is_lost(
    engine: Engine, start_worker: Any, submit: Any, clock: Any, eventually: Any
) -> None:
    await clock.stop()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    has_seen_the_loss: list[bool] = []

    def watch(ctx: Context) -> None:
        loop.call_soon_threadsafe(started.set)
        until = time.monotonic() + 60
        while ctx.is_lease_healthy() and time.monotonic() < until:
            pass
        has_seen_the_loss.append(not ctx.is_lease_healthy())

    run = await submit()
    worker = await start_worker({"job": watch}, lease_ttl=LONG_TTL_MS / 1000)
    await asyncio.wait_for(started.wait(), 60)
    await engine.cancel_execution(execution_id=run, reason="not wanted")
    await eventually(lambda: has_seen_the_loss, timeout=120)
    assert has_seen_the_loss == [True]
    await eventually(lambda: worker.running == 0)


async def test_a_lapsed_lease_is_not_written_under(
    engine: Engine, start_worker: Any, submit: Any, clock: Any, eventually: Any
) -> None:
    gate = asyncio.Event()
    contexts: list[Context] = []

    async def wait(ctx: Context) -> int:
        contexts.append(ctx)
        if ctx.attempt_index == 0:
            await gate.wait()
        return ctx.attempt_index

    run = await submit()
    # No renewal comes before the end of this test: only the store knows that the lease has lapsed.
    await start_worker({"job": wait}, lease_ttl=60)
    await eventually(lambda: contexts)
    await clock.advance(seconds=61)
    await eventually(lambda: len(contexts) == 2)
    gate.set()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"1")
    assert [ctx.attempt_type for ctx in contexts] == ["initial", "reclaim"]
    assert contexts[0].lease_epoch < contexts[1].lease_epoch


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_renewal_that_hangs_is_given_up_and_tried_again(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, clock: Any, eventually: Any
) -> None:
    await clock.stop()
    gate = asyncio.Event()
    contexts: list[Context] = []

    async def wait(ctx: Context) -> int:
        contexts.append(ctx)
        await gate.wait()
        return ctx.attempt_index

    run = await submit()
    await start_worker({"job": wait}, lease_ttl=LONG_TTL_MS / 1000)
    await eventually(lambda: contexts)
    async with connection.transaction():
        await connection.execute("select from claim for update")
        await eventually(lambda: contexts[0].consecutive_renewal_failures == 1)
        assert contexts[0].is_lease_healthy()
    await eventually(lambda: contexts[0].consecutive_renewal_failures == 0)
    gate.set()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"0")


async def test_a_store_that_breaks_off_is_asked_again(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, eventually: Any
) -> None:
    gate = asyncio.Event()

    async def wait(luck: str) -> None:
        await gate.wait()
        if luck == "bad":
            raise ValueError("no luck")

    runs = [await submit(luck=luck) for luck in ("good", "bad")]
    worker = await start_worker({"job": wait}, lease_ttl=TTL_MS / 1000)
    await eventually(lambda: worker.running == 2)
    for _ in range(3):
        await connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name = 'flowfabric'"
        )
    gate.set()
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    assert [one.outcome for one in ended] == [TerminalOutcome.SUCCESS, TerminalOutcome.FAILED]
    after = await submit(luck="good")
    assert (await engine.wait_for_ending(after, timeout=60)).outcome is TerminalOutcome.SUCCESS


@pytest.mark.parametrize("reconcile", [True, False])
async def test_delayed_work_is_found_when_it_is_due(
    engine: Engine, start_worker: Any, given: Any, attempts: Any, clock: Any, reconcile: Any
) -> None:
    async def job() -> None: ...

    await clock.stop()
    await start_worker({"job": job}, reconcile=reconcile, poll_interval=0.05)
    due = await clock.now() + 300
    run = await given.created(delay_until=due)
    # The worker looks meanwhile, for this one has no delay.
    await engine.wait_for_ending(await given.created(), timeout=60)
    assert await engine.read_execution_state(run) is PublicState.DELAYED
    await clock.advance(ms=300)
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    (attempt,) = await attempts(run)
    assert attempt["started_at"] >= due

"""How a worker keeps its leases."""

import asyncio
import threading
import time
from typing import Any

import asyncpg
import pytest

from fixtures import Attempts, Clock, Eventually, Given, Rows, StartWorker, Submit
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.event import EventKind
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.worker import heartbeat
from flowfabric.worker.context import Context
from flowfabric.worker.heartbeat import Heartbeat
from flowfabric.worker.options import WorkerOptions
from flowfabric.worker.worker import Worker

TTL_MS = 600
LONG_TTL_MS = 2000
"""A lease that is renewed in time even on a busy machine."""


async def burn(ctx: Context) -> bool:
    """Block the event loop, as no handler should, until the lease is renewed."""
    until, before = time.monotonic() + 60, ctx._running.renewed_at
    while ctx._running.renewed_at == before and time.monotonic() < until:
        pass
    return ctx._running.renewed_at > before


async def renewals(rows: Rows, run: ExecutionId) -> int:
    """How many times the lease of a run was renewed."""
    return sum(event["kind"] == EventKind.RENEWED for event in await rows.events(run))


async def test_a_handler_that_blocks_the_event_loop_keeps_its_lease_even_after_failed_heartbeats(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    attempts: Attempts,
    rows: Rows,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await clock.stop()
    faults = iter([OSError("no route"), ValueError("whatever else")])

    def fails_at_first(engine: Engine, **options: Any) -> Any:
        if fault := next(faults, None):
            raise fault
        return second_engine(engine, **options)

    monkeypatch.setattr(heartbeat, "second_engine", fails_at_first)
    await start_worker({"job": burn}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    run = await submit()
    ended = await engine.wait_for_ending(run, timeout=120)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"true")
    assert await renewals(rows, run) >= 1
    assert len(await attempts(run)) == 1
    assert next(faults, None) is None


async def test_a_plain_function_that_takes_long_keeps_its_lease(
    engine: Engine, start_worker: StartWorker, submit: Submit, rows: Rows, clock: Clock, eventually: Eventually
) -> None:
    await clock.stop()
    gate = threading.Event()

    def wait() -> bool:
        return gate.wait(timeout=60)

    run = await submit()
    await start_worker({"job": wait}, lease_ttl=TTL_MS / 1000, reconcile=False)

    async def is_kept() -> bool:
        return await renewals(rows, run) >= 3

    await eventually(is_kept)
    gate.set()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"true")


async def test_a_short_run_is_not_renewed(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    rows: Rows,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
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

    # Short compared with a third of the lease.
    await start_worker({"job": outlast_looks}, lease_ttl=600)
    # A new listener may have missed notifications, so that every lease is checked by a renewal.
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    await outlast_looks()
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert await renewals(rows, run) == 0


async def test_a_result_under_an_expired_lease_is_not_stored(
    engine: Engine, start_worker: StartWorker, submit: Submit, clock: Clock, eventually: Eventually
) -> None:
    gate = asyncio.Event()
    contexts: list[Context] = []

    async def wait(ctx: Context) -> int:
        contexts.append(ctx)
        if ctx.attempt_index == 0:
            await gate.wait()
        return ctx.attempt_index

    run = await submit()
    # No renewal is due before the end of this test: only the store knows that the lease has expired.
    await start_worker({"job": wait}, lease_ttl=60)
    await eventually(lambda: contexts)
    await clock.advance(seconds=61)
    parts_of(engine).wakeups.wake_all()
    await eventually(lambda: len(contexts) == 2)
    gate.set()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"1")
    assert [ctx.attempt_type for ctx in contexts] == ["initial", "reclaim"]
    assert contexts[0].lease_epoch < contexts[1].lease_epoch


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_renewal_that_hangs_is_abandoned_and_retried(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    connection: asyncpg.Connection,
    clock: Clock,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await clock.stop()
    gate = asyncio.Event()
    contexts: list[Context] = []

    async def wait(ctx: Context) -> int:
        contexts.append(ctx)
        await gate.wait()
        return ctx.attempt_index

    monkeypatch.setattr(Heartbeat, "CHECK_SECONDS", 0.0)
    run = await submit()
    worker = await start_worker({"job": wait}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    await eventually(lambda: contexts)
    async with connection.transaction():
        await connection.execute("select from claim for update")
        assert worker._heartbeat is not None
        worker._heartbeat.check_all()
        await eventually(lambda: contexts[0].consecutive_renewal_failures == 1)
        assert contexts[0].is_lease_healthy()
    await eventually(lambda: contexts[0].consecutive_renewal_failures == 0)
    gate.set()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"0")


async def test_results_are_stored_after_the_store_has_closed_every_connection(
    engine: Engine, start_worker: StartWorker, submit: Submit, connection: asyncpg.Connection, eventually: Eventually
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


async def test_delayed_work_is_claimed_when_it_is_due_with_and_without_a_reconciler(
    engine: Engine, given: Given, attempts: Attempts, clock: Clock
) -> None:
    async def job() -> None: ...

    await clock.stop()
    for reconcile in (True, False):
        options: WorkerOptions = {"lanes": ["default"], "reconcile": reconcile, "poll_interval": 0.05}
        async with Worker(engine, handlers={"job": job}, **options):
            due = await clock.now() + 300
            run = await given.created(delay_until=due)
            # The worker claims meanwhile, because this one has no delay.
            await engine.wait_for_ending(await given.created(), timeout=60)
            assert await engine.read_execution_state(run) is PublicState.DELAYED
            await clock.advance(ms=300)
            assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
            (attempt,) = await attempts(run)
            assert attempt["started_at"] >= due

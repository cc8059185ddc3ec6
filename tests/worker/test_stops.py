"""How a handler is stopped when its lease ends."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import asyncpg
import pytest

from faults.proxy import Proxy
from fixtures import Clock, Engines, Eventually, Given, Rows, StartWorker, Submit
from flowfabric.engine.core.wakeups import LostLease, LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import ExecutionId
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.worker import Worker

from .waiting import LONG_TTL_MS, Waiting


async def cancel(engine: Engine, run: ExecutionId, clock: Clock) -> None:
    await engine.cancel_execution(execution_id=run, reason="not wanted")


async def pass_the_deadline(engine: Engine, run: ExecutionId, clock: Clock) -> None:
    await clock.advance(seconds=300)
    assert await parts_of(engine).timeouts.expire_due() == 1


async def pass_the_attempt_timeout(engine: Engine, run: ExecutionId, clock: Clock) -> None:
    await clock.advance(seconds=200)
    assert await parts_of(engine).timeouts.expire_due() == 1


async def expire_the_lease(engine: Engine, run: ExecutionId, clock: Clock) -> None:
    await clock.advance(ms=LONG_TTL_MS + 1)
    assert await parts_of(engine).lease_expiry.mark_expired([run]) == 1


async def reclaim(engine: Engine, run: ExecutionId, clock: Clock) -> None:
    await clock.advance(ms=LONG_TTL_MS + 1)
    await engine.issue_reclaim_grant(
        execution_id=run, worker_id="other", worker_instance_id="other-1", lane_id="default"
    )


async def revoke(engine: Engine, run: ExecutionId, clock: Clock) -> None:
    await engine.revoke_lease(run, reason="the host is drained")


async def override(engine: Engine, run: ExecutionId, clock: Clock) -> None:
    await engine.complete_execution(execution_id=run, payload=b"1", source="operator_override")


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cancel": (cancel, {}),
    "deadline": (pass_the_deadline, {"execution_deadline_ms": 250_000}),
    "attempt timeout": (pass_the_attempt_timeout, {"policy": {"timeout_policy": {"attempt_timeout_ms": 150_000}}}),
    "lease expiry": (expire_the_lease, {}),
    "reclaim": (reclaim, {}),
    "revoke": (revoke, {}),
    "operator": (override, {}),
}


async def test_a_handler_is_cancelled_at_once_when_its_lease_ends(
    engine: Engine, engines: Engines, start_worker: StartWorker, given: Given, clock: Clock, eventually: Eventually
) -> None:
    await clock.stop()
    other = await engines()
    cases = {f"{way} by {place}": (way, place) for way in WAYS for place in ("this engine", "another engine")}
    handlers = {case: Waiting() for case in cases}
    await start_worker(handlers, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    for case, (way, place) in cases.items():
        end, options = WAYS[way]
        if deadline := options.get("execution_deadline_ms"):
            options = {"execution_deadline_at": await clock.now() + deadline}
        run = await given.created(execution_kind=case, **options)
        waiting = handlers[case]
        await eventually(lambda waiting=waiting: waiting.contexts)
        await end(engine if place == "this engine" else other, run, clock)
        try:
            await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
            await asyncio.wait_for(waiting.contexts[0].lease_lost, 60)
        except TimeoutError:
            pytest.fail(f"{case}: the handler was not cancelled")


async def test_a_notification_about_another_lease_stops_nothing(
    engine: Engine, start_worker: StartWorker, submit: Submit, eventually: Eventually
) -> None:
    gate = asyncio.Event()
    contexts: list[Context] = []

    async def wait(ctx: Context) -> str:
        contexts.append(ctx)
        await gate.wait()
        return "done"

    run = await submit()
    await start_worker({"job": wait}, lease_ttl=LONG_TTL_MS / 1000)
    await eventually(lambda: contexts)
    for epoch in (contexts[0].lease_epoch - 1, contexts[0].lease_epoch + 1):
        parts_of(engine).wakeups.lost([LostLease(run, epoch, LostReason.CANCELLED)])
    assert contexts[0].is_lease_healthy()
    gate.set()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"done"'


async def test_a_notification_with_an_unknown_reason_stops_the_run(
    engine: Engine, start_worker: StartWorker, submit: Submit, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    waiting = Waiting()
    run = await submit()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, drain=0)
    await eventually(lambda: waiting.contexts)
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    hint = f"{run},{waiting.contexts[0].lease_epoch},unheard_of"
    await connection.execute("select pg_notify($1, $2)", f"{engine.settings.schema_name}_lost", hint)
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)


async def test_a_worker_checks_its_leases_after_a_gap_in_the_notifications(
    engine: Engine, url: str, submit: Submit, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url)) as cut:
        for is_beating in (True, False):
            waiting = Waiting()
            run = await submit()
            parts_of(cut).wakeups.hints.start_listening()
            await eventually(lambda: parts_of(cut).wakeups.hints.is_listening)
            caplog.clear()
            proxy.refuses = not is_beating
            async with Worker(
                cut, lanes=["default"], handlers={"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False
            ):
                await eventually(lambda waiting=waiting: waiting.contexts)
                # The second time, the heartbeat is not connected when the gap begins.
                await eventually(lambda beats=is_beating: beats or "the heartbeat reconnects" in caplog.text)
                proxy.refuses = True
                proxy.cut()
                await eventually(lambda: not parts_of(cut).wakeups.hints.is_listening)
                await engine.cancel_execution(execution_id=run, reason="not wanted")
                assert not waiting.is_cancelled.is_set()
                proxy.refuses = False
                await asyncio.wait_for(waiting.is_cancelled.wait(), 60)


async def test_the_result_of_a_cancelled_run_is_discarded_without_a_warning(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    eventually: Eventually,
    rows: Rows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    contexts: dict[str, Context] = {}
    has_seen_the_loss: list[bool] = []

    async def swallow(ctx: Context) -> str:
        contexts["swallow"] = ctx
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "swallowed"

    def watch(ctx: Context) -> str:
        contexts["watch"] = ctx
        until = time.monotonic() + 60
        while ctx.is_lease_healthy() and time.monotonic() < until:
            time.sleep(0.001)
        has_seen_the_loss.append(not ctx.is_lease_healthy())
        return "late"

    runs = [await submit(kind=kind) for kind in ("swallow", "watch")]
    worker = await start_worker({"swallow": swallow, "watch": watch}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    await eventually(lambda: len(contexts) == 2)
    assert all(ctx.is_lease_healthy() for ctx in contexts.values())
    lost = contexts["swallow"].lease_lost
    with caplog.at_level(logging.INFO, "flowfabric"):
        for run in runs:
            await engine.cancel_execution(execution_id=run, reason="not wanted")
        await eventually(lambda: worker.running == 0)
    await asyncio.wait_for(lost, 60)
    await asyncio.wait_for(contexts["swallow"].lease_lost, 60)
    assert has_seen_the_loss == [True]
    assert not contexts["swallow"].is_lease_healthy()
    assert [(await rows.execution(run))["terminal_outcome"] for run in runs] == ["cancelled", "cancelled"]
    about_them = [(record.levelname, record.getMessage()) for record in caplog.records if "{fp:" in record.getMessage()]
    swallowing, watching = runs
    left = "its thread cannot be stopped, and its result will be discarded"
    assert sorted(about_them) == sorted(
        [
            ("INFO", f"{swallowing} (swallow) is stopped: it was cancelled"),
            ("INFO", f"{watching} (watch) is abandoned: it was cancelled; {left}"),
        ]
    )

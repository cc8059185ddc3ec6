"""How a run is stopped in its process when its lease ends without it."""

import asyncio
import logging
import threading
from typing import Any

import pytest

from faults.proxy import Proxy
from flowfabric.engine.core.wakeups import LostLease, LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import ExecutionId
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.worker import Worker

from .waiting import LONG_TTL_MS, Waiting


async def cancel(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await engine.cancel_execution(execution_id=run, reason="not wanted")


async def pass_the_deadline(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await clock.advance(seconds=300)
    assert await parts_of(engine).timeouts.expire_due() == 1


async def pass_the_attempt_timeout(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await clock.advance(seconds=200)
    assert await parts_of(engine).timeouts.expire_due() == 1


async def expire_the_lease(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await clock.advance(ms=LONG_TTL_MS + 1)
    assert await parts_of(engine).lease_expiry.mark_expired([run]) == 1


async def reclaim(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await clock.advance(ms=LONG_TTL_MS + 1)
    await engine.issue_reclaim_grant(
        execution_id=run, worker_id="other", worker_instance_id="other-1", lane_id="default"
    )


async def override(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await engine.complete_execution(execution_id=run, payload=b"1", source="operator_override")


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cancel": (cancel, {}),
    "deadline": (pass_the_deadline, {"execution_deadline_ms": 250_000}),
    "attempt timeout": (pass_the_attempt_timeout, {"policy": {"timeout_policy": {"attempt_timeout_ms": 150_000}}}),
    "lease expiry": (expire_the_lease, {}),
    "reclaim": (reclaim, {}),
    "operator": (override, {}),
}


@pytest.mark.parametrize("place", ["this engine", "another"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_handler_is_stopped_at_once_when_its_lease_ends(
    engine: Engine, engines: Any, start_worker: Any, given: Any, clock: Any, eventually: Any, way: str, place: str
) -> None:
    await clock.stop()
    end, options = WAYS[way]
    if deadline := options.get("execution_deadline_ms"):
        options = {"execution_deadline_at": await clock.now() + deadline}
    waiting = Waiting()
    run = await given.created(**options)
    worker = await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, concurrency=1)
    await eventually(lambda: waiting.contexts)
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    await end(engine if place == "this engine" else await engines(), run, clock)
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
    await asyncio.wait_for(waiting.contexts[0].lease_lost, 60)
    await eventually(lambda: worker.running == 0 or len(waiting.contexts) == 2)


async def test_a_hint_about_an_earlier_lease_stops_nothing(
    engine: Engine, start_worker: Any, submit: Any, eventually: Any
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


async def test_a_hint_with_a_reason_of_another_version_stops_the_run(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, eventually: Any
) -> None:
    waiting = Waiting()
    run = await submit()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, drain=0)
    await eventually(lambda: waiting.contexts)
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    hint = f"{run},{waiting.contexts[0].lease_epoch},unheard_of"
    await connection.execute("select pg_notify($1, $2)", f"{engine.settings.schema_name}_lost", hint)
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)


@pytest.mark.parametrize("is_beating", [True, False], ids=["with a heartbeat", "while the heartbeat is not connected"])
async def test_a_worker_checks_its_leases_after_a_gap_in_the_hints(
    engine: Engine, url: str, submit: Any, eventually: Any, caplog: pytest.LogCaptureFixture, *, is_beating: bool
) -> None:
    waiting = Waiting()
    run = await submit()
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url)) as cut:
        parts_of(cut).wakeups.hints.start_listening()
        await eventually(lambda: parts_of(cut).wakeups.hints.is_listening)
        proxy.refuses = not is_beating
        async with Worker(
            cut, lanes=["default"], handlers={"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False
        ):
            await eventually(lambda: waiting.contexts)
            await eventually(lambda: is_beating or "the heartbeat reconnects" in caplog.text)
            proxy.refuses = True
            proxy.cut()
            await eventually(lambda: not parts_of(cut).wakeups.hints.is_listening)
            await engine.cancel_execution(execution_id=run, reason="not wanted")
            assert not waiting.is_cancelled.is_set()
            proxy.refuses = False
            await asyncio.wait_for(waiting.is_cancelled.wait(), 60)


async def test_a_cancel_by_a_user_is_no_warning(
    engine: Engine, start_worker: Any, submit: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting()
    run = await submit()
    worker = await start_worker({"job": waiting})
    await eventually(lambda: waiting.contexts)
    with caplog.at_level(logging.INFO, "flowfabric"):
        await engine.cancel_execution(execution_id=run, reason="not wanted")
        await eventually(lambda: worker.running == 0)
    about_it = [record for record in caplog.records if run in record.getMessage()]
    assert [(record.levelname, record.getMessage()) for record in about_it] == [
        ("INFO", f"{run} (job) is stopped: it was cancelled")
    ]


async def test_what_a_thread_returns_after_a_cancel_is_void(
    engine: Engine, start_worker: Any, submit: Any, eventually: Any, rows: Any
) -> None:
    gate, started = threading.Event(), threading.Event()
    contexts: list[Context] = []

    def wait(ctx: Context) -> str:
        contexts.append(ctx)
        started.set()
        gate.wait(timeout=60)
        return "late"

    run = await submit()
    worker = await start_worker({"job": wait}, lease_ttl=LONG_TTL_MS / 1000)
    await eventually(started.is_set)
    await engine.cancel_execution(execution_id=run, reason="not wanted")
    assert not contexts[0].is_lease_healthy()
    assert worker.running == 1
    gate.set()
    await eventually(lambda: worker.running == 0)
    assert (await rows.execution(run))["terminal_outcome"] == "cancelled"

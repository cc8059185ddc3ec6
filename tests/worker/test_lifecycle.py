"""How a worker registers, drains and deregisters."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from faults.proxy import Proxy, Side
from fixtures import Attempts, Clock, Eventually, Given, Rows, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.worker import Worker


async def test_a_worker_is_registered_while_it_works_and_can_restart_at_once_under_the_same_name(
    engine: Engine, rows: Rows
) -> None:
    for _ in range(2):
        worker = Worker(
            engine,
            lanes=["b", "a"],
            handlers={},
            worker_id="pool",
            worker_instance_id="pool-1",
            capabilities=["gpu"],
            namespace="tests",
            lease_ttl=5,
        )
        async with worker:
            (entry,) = await rows.of("worker")
            assert (entry["worker_id"], entry["worker_instance_id"], entry["namespace"]) == ("pool", "pool-1", "tests")
            assert (entry["lanes"], entry["capabilities"], entry["liveness_ttl_ms"]) == (["a", "b"], ["gpu"], 10_000)
        assert await rows.of("worker") == []
    assert [event["reason"] for event in await rows.of("worker_event", kind="marked_dead")] == ["stopped"] * 2


async def test_a_worker_whose_registration_expired_registers_again(
    engine: Engine, start_worker: StartWorker, rows: Rows, clock: Clock, eventually: Eventually
) -> None:
    await clock.stop()
    await start_worker({}, worker_instance_id="pool-1", lease_ttl=0.3)
    await clock.advance(seconds=3600)

    async def is_registered_again() -> bool:
        return bool(len(await rows.of("worker_event", kind="registered")) == 2 and await rows.of("worker"))

    await parts_of(engine).workers.sweep_expired()
    await eventually(is_registered_again)


async def test_an_instance_id_of_another_worker_is_refused(engine: Engine, given: Given) -> None:
    await given.registered(worker_instance_id="pool-1")
    with pytest.raises(InvalidInputError, match="reassigned"):
        async with Worker(
            engine, lanes=["default"], handlers={}, worker_id="other", worker_instance_id="pool-1", namespace="tests"
        ):
            pass


async def test_stopping_waits_for_running_handlers(engine: Engine, submit: Submit, eventually: Eventually) -> None:
    gate = asyncio.Event()

    async def wait() -> str:
        await gate.wait()
        return "done"

    run = await submit()
    worker = Worker(engine, lanes=["default"], handlers={"job": wait})
    working = asyncio.create_task(worker.run())
    try:
        await eventually(lambda: worker.running == 1)
        worker.stop()
        # A claim that was under way may still claim what is submitted before its answer.
        await eventually(lambda: worker._claiming is not None and worker._claiming.done())
        late = await submit()
    finally:
        worker.stop()
        gate.set()
        await working
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"done"'
    assert await engine.read_execution_state(late) == "waiting"


async def test_a_handler_that_does_not_end_in_time_is_handed_back_at_once(
    engine: Engine,
    submit: Submit,
    start_worker: StartWorker,
    rows: Rows,
    attempts: Attempts,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "flowfabric")
    cleaned_up = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.set()

    async def finish(ctx: Context) -> list[object]:
        return [ctx.attempt_index, ctx.retry_count, ctx.is_resumed]

    run = await submit()
    worker = Worker(engine, lanes=["default"], handlers={"job": wait}, drain=0.05, lease_ttl=600)
    async with worker:
        await eventually(lambda: worker.running == 1)
    assert cleaned_up.is_set()
    assert await engine.read_execution_state(run) == "resumable"
    assert f"{run} (job) is handed back: any worker can claim it now" in caplog.messages
    await start_worker({"job": finish})
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"[0,0,false]")
    row = await rows.execution(run)
    assert (row["retry_count"], row["reclaim_count"], len(await attempts(run))) == (0, 0, 1)


async def test_work_that_waits_for_a_thread_is_handed_back(
    engine: Engine, submit: Submit, eventually: Eventually, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.worker.worker.CANCEL_SECONDS", 0.2)
    monkeypatch.setattr("flowfabric.worker.worker.HAND_BACK_SECONDS", 0.2)
    gate = threading.Event()
    called = []

    def wait(n: int) -> None:
        called.append(n)
        gate.wait(timeout=60)

    runs = [await submit(n=n) for n in range(3)]
    worker = Worker(engine, lanes=["default"], handlers={"job": wait}, drain=0.05, threads=1)
    async with worker:
        await eventually(lambda: worker.running == 3 and called)
    assert called == [0]
    states = [await engine.read_execution_state(run) for run in runs]
    # The first handler may still run: its lease is left to expire.
    assert states == ["active", "resumable", "resumable"]
    gate.set()
    await eventually(lambda: worker.running == 0)


async def test_executions_claimed_while_the_worker_stops_are_handed_back(
    engine: Engine, url: str, submit: Submit, rows: Rows, eventually: Eventually
) -> None:
    called = 0

    async def job() -> None:
        nonlocal called
        called += 1

    async with (
        Proxy(url) as proxy,
        Engine.connect(settings=Settings(database_url=proxy.url, database_pool_size=1)) as slow,
    ):
        worker = Worker(slow, lanes=["default"], handlers={"job": job}, reconcile=False)
        async with worker:
            # After this the next claim is a single message: its statement is prepared.
            await engine.wait_for_ending(await submit(), timeout=60)
            await eventually(lambda: parts_of(slow).wakeups._waiting.get("default"))
            proxy.silence(sides=[Side.SERVER])
            run = await submit()
            parts_of(slow).wakeups.wake_all()

            async def is_claimed() -> bool:
                return bool((await rows.execution(run))["lifecycle_phase"] == "active")

            await eventually(is_claimed)
            worker.stop()
            proxy.heal()
    assert (await engine.read_execution_state(run), called) == ("resumable", 1)


async def test_handlers_that_do_not_stop_are_left_behind_with_a_warning_and_their_leases(
    engine: Engine,
    submit: Submit,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "flowfabric")
    monkeypatch.setattr("flowfabric.worker.worker.CANCEL_SECONDS", 0.05)
    monkeypatch.setattr("flowfabric.worker.worker.HAND_BACK_SECONDS", 0.05)
    thread_gate, gate = threading.Event(), asyncio.Event()

    def block() -> None:
        thread_gate.wait(timeout=60)

    async def ignore() -> str:
        while not gate.is_set():
            with suppress(asyncio.CancelledError):
                await gate.wait()
        return "late"

    runs = {kind: await submit(kind=kind) for kind in ("block", "ignore")}
    worker = Worker(engine, lanes=["default"], handlers={"block": block, "ignore": ignore}, drain=0.05)
    async with asyncio.timeout(60), worker:
        await eventually(lambda: worker.running == 2)
    assert worker.running == 2
    for kind, run in runs.items():
        text = f"{run} ({kind}) does not stop: another worker can claim it when its lease expires, within 30 s"
        (record,) = [record for record in caplog.records if run in record.getMessage()]
        assert (record.levelname, record.getMessage()) == ("WARNING", text)
        fields = [vars(record)[name] for name in ("ff_execution_id", "ff_attempt", "ff_task")]
        assert fields == [run, 1, kind]
    assert caplog.messages[-1].endswith(
        ": 0 finished while it stopped, 0 handed back, 2 left until their leases expire"
    )
    gate.set()
    thread_gate.set()
    await eventually(lambda: worker.running == 0)
    # Their results are not stored, and nothing is handed back.
    assert [await engine.read_execution_state(run) for run in runs.values()] == ["active", "active"]
    assert "is handed back" not in caplog.text


async def test_a_worker_stops_while_its_handlers_block_every_thread_of_the_event_loop(
    engine: Engine, submit: Submit, eventually: Eventually, one_thread: ThreadPoolExecutor
) -> None:
    gate = threading.Event()

    async def block() -> None:
        await asyncio.to_thread(gate.wait, 60)

    await submit()
    worker = Worker(engine, lanes=["default"], handlers={"job": block}, drain=0.05)
    try:
        async with asyncio.timeout(30), worker:
            await eventually(lambda: worker.running == 1)
    finally:
        gate.set()


async def test_results_of_handlers_that_return_during_a_stop_are_stored(
    engine: Engine, submit: Submit, rows: Rows
) -> None:
    async def job() -> None: ...

    runs = [await submit() for _ in range(60)]
    worker = Worker(engine, lanes=["default"], handlers={"job": job}, concurrency=20)
    async with worker:
        await engine.wait_for_ending(runs[0], timeout=60)
    left = await rows.of("execution", ownership_state="leased")
    assert (left, worker.running) == ([], 0)


async def test_an_idle_worker_stops_at_once(
    engine: Engine, eventually: Eventually, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.worker.claiming.LISTENING_POLL_SECONDS", 600.0)
    async with asyncio.timeout(60), Worker(engine, lanes=["default"], handlers={"job": print}):
        await eventually(lambda: parts_of(engine).wakeups._waiting.get("default"))
    # A wait for work that did not end would be cancelled after CLAIM_SECONDS, with this warning.
    assert "a claim was not answered" not in caplog.text

"""Runs of one execution never overlap in a process: the next one starts when the earlier has returned."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from databases import Databases
from fixtures import Attempts, Clock, Engines, Eventually, Given, Rows, StartWorker, Submit
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.heartbeat import Heartbeat
from flowfabric.worker.worker import Worker

from .waiting import LONG_TTL_MS, RETRIED, Waiting

LONG_POSTPONE_MS = 60_000
"""A delay that lasts until the earlier run has returned, even on a slow machine."""
ATTEMPT_MS = 300_000
LIMITED = {"timeout_policy": {"attempt_timeout_ms": ATTEMPT_MS}, **RETRIED}


class Overlap:
    """Counts the runs of a handler that are inside it at the same time."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.started = 0

    def __enter__(self) -> None:
        self.now += 1
        self.started += 1
        self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        self.now -= 1


def waiting_in_a_thread() -> tuple[threading.Event, Overlap, Callable[[Context], int]]:
    """A gate, a count of runs, and a handler that waits in a thread until the gate opens."""
    gate, overlap = threading.Event(), Overlap()

    def wait(ctx: Context) -> int:
        with overlap:
            gate.wait(timeout=60)
            return ctx.attempt_index

    return gate, overlap, wait


async def test_the_next_run_of_an_execution_waits_until_the_earlier_has_returned(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    clock: Clock,
    eventually: Eventually,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await clock.stop()
    monkeypatch.setattr(Heartbeat, "CHECK_SECONDS", 0.0)
    thread_gate, gate = threading.Event(), asyncio.Event()
    in_thread, in_coroutine = Overlap(), Overlap()

    def thread(ctx: Context) -> int:
        with in_thread:
            if ctx.attempt_index == 0:
                thread_gate.wait(timeout=60)
            return ctx.attempt_index

    async def coroutine(ctx: Context) -> int:
        with in_coroutine:
            if ctx.attempt_index == 0:
                try:
                    await asyncio.Event().wait()
                finally:
                    await gate.wait()
            return ctx.attempt_index

    async def are_renewed() -> bool:
        found = [await rows.execution(run) for run in runs]
        return all(row["lease_epoch"] == 2 and row["lease_renewed_at"] is not None for row in found)

    # The run in the thread is claimed again by the same worker, the other one by another worker of the process.
    runs = [await submit(kind="thread"), await submit(kind="coroutine")]
    options: dict[str, Any] = {"lease_ttl": LONG_TTL_MS / 1000, "reconcile": False}
    first = await start_worker({"thread": thread}, concurrency=2, **options)
    second = await start_worker({"coroutine": coroutine}, concurrency=1, **options)
    await eventually(lambda: (in_thread.started, in_coroutine.started) == (1, 1))
    third = await start_worker({"coroutine": coroutine}, **options)
    await clock.advance(ms=LONG_TTL_MS + 1)
    await parts_of(engine).lease_expiry.mark_expired(runs)
    await eventually(lambda: (first.running, second.running, third.running) == (2, 1, 1))
    for worker in (first, third):
        assert worker._heartbeat is not None
        worker._heartbeat.check_all()
    await eventually(are_renewed)
    assert [(one.started, one.now) for one in (in_thread, in_coroutine)] == [(1, 1), (1, 1)]
    thread_gate.set()
    gate.set()
    for run in runs:
        ended = await engine.wait_for_ending(run, timeout=60)
        assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"1")
    assert [(one.started, one.most) for one in (in_thread, in_coroutine)] == [(2, 1), (2, 1)]


async def test_a_third_run_waits_for_the_first_even_if_the_second_was_stopped(
    engine: Engine, start_worker: StartWorker, submit: Submit, clock: Clock, eventually: Eventually
) -> None:
    await clock.stop()
    gate = threading.Event()
    overlap = Overlap()

    def wait(ctx: Context) -> int:
        with overlap:
            if ctx.attempt_index == 0:
                gate.wait(timeout=60)
            return ctx.attempt_index

    run = await submit()
    worker = await start_worker({"job": wait}, concurrency=3, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    await eventually(lambda: overlap.started == 1)
    for attempt in (1, 2):
        await clock.advance(ms=LONG_TTL_MS + 1)
        await parts_of(engine).lease_expiry.mark_expired([run])

        async def is_taken(attempt: int = attempt) -> bool:
            return await engine.read_current_attempt_index(execution_id=run) == attempt

        await eventually(is_taken)
    await eventually(lambda: worker.running == 2)
    assert overlap.started == 1
    gate.set()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"2"
    assert (overlap.started, overlap.most) == (2, 1)


async def test_a_run_that_waits_for_an_earlier_one_is_handed_back_when_its_worker_stops(
    engine: Engine, start_worker: StartWorker, submit: Submit, clock: Clock, eventually: Eventually
) -> None:
    await clock.stop()
    gate, overlap, wait = waiting_in_a_thread()
    run = await submit()
    await start_worker({"job": wait}, concurrency=1, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    await eventually(lambda: overlap.started == 1)
    second = Worker(engine, lanes=["default"], handlers={"job": wait}, reconcile=False)
    async with second:
        await clock.advance(ms=LONG_TTL_MS + 1)
        await parts_of(engine).lease_expiry.mark_expired([run])
        await eventually(lambda: second.running == 1)
    assert await engine.read_execution_state(run) == "resumable"
    assert overlap.started == 1
    gate.set()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"1"


@pytest.fixture
def soon_postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run waits a tenth of a second for an earlier one, and is then postponed for long."""
    monkeypatch.setattr("flowfabric.worker.runs.EARLIER_SECONDS", 0.1)
    monkeypatch.setattr("flowfabric.worker.runs.POSTPONE_MS", LONG_POSTPONE_MS)


async def pass_the_attempt_timeout(engine: Engine, clock: Clock) -> None:
    await clock.advance(ms=ATTEMPT_MS + 1)
    assert await parts_of(engine).timeouts.expire_due() == 1


@pytest.mark.usefixtures("soon_postponed")
async def test_retries_are_not_used_up_while_an_earlier_run_does_not_return(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    clock: Clock,
    eventually: Eventually,
    attempts: Attempts,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, overlap, wait = waiting_in_a_thread()
    run = await submit(policy=LIMITED)
    worker = await start_worker({"job": wait}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, poll_interval=0.05)
    await eventually(lambda: overlap.started == 1)

    def postponed() -> list[str]:
        text = f"{run} (job) is delayed by 60 s: an earlier run of it in this process does not return"
        return [record.levelname for record in caplog.records if record.getMessage() == text]

    async def is_delayed() -> bool:
        return await engine.read_execution_state(run) == "delayed" and worker.running == 1

    with caplog.at_level(logging.INFO, "flowfabric"):
        await pass_the_attempt_timeout(engine, clock)
        await eventually(lambda: postponed() == ["WARNING"])
        await eventually(is_delayed)
        # Any worker may claim it then; if this one does, it does not wait again.
        await clock.advance(ms=LONG_POSTPONE_MS)
        await eventually(lambda: postponed() == ["WARNING", "INFO"])
        await eventually(is_delayed)
    # It starts when the earlier run has returned, however long it was postponed.
    await clock.stop()
    gate.set()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"1")
    assert [one["attempt_state"] for one in await attempts(run)] == ["ended_failure", "ended_success"]
    assert (overlap.started, overlap.most) == (2, 1)


@pytest.mark.usefixtures("soon_postponed")
async def test_a_postponed_run_can_be_claimed_by_another_worker_when_the_earlier_has_returned(
    engine: Engine,
    engines: Engines,
    start_worker: StartWorker,
    submit: Submit,
    clock: Clock,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, overlap, wait = waiting_in_a_thread()
    run = await submit(policy=LIMITED)
    first = await start_worker({"job": wait}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, poll_interval=0.05)
    await eventually(lambda: overlap.started == 1)
    await pass_the_attempt_timeout(engine, clock)

    async def is_delayed() -> bool:
        return await engine.read_execution_state(run) == "delayed" and first.running == 1

    await eventually(lambda: "an earlier run of it in this process does not return" in caplog.text)
    await eventually(is_delayed)
    await clock.stop()
    first.stop()
    async with Worker(await engines(), lanes=["default"], handlers={"job": wait}, reconcile=False) as other:
        await eventually(lambda: parts_of(other._engine).wakeups._waiting.get("default"))
        assert overlap.started == 1
        gate.set()
        assert (await engine.wait_for_ending(run, timeout=60)).result == b"1"
    assert (overlap.started, overlap.most) == (2, 1)


async def test_the_end_of_a_postponement_does_not_touch_a_later_claim(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    handle = await given.claimed()
    await engine.delay(handle, await clock.now() + 5000)
    await clock.advance(ms=5001)
    (again,) = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-2", limit=1)
    assert again.execution_id == handle.execution_id
    await engine.delay(again.handle, await clock.now() + 5000)
    async with rows.unchanged():
        await parts_of(engine).delays.bring_forward(handle)
    await parts_of(engine).delays.bring_forward(again.handle)
    assert await engine.read_execution_state(handle.execution_id) == "resumable"


async def test_executions_of_two_stores_may_have_the_same_id(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    given: Given,
    databases: Databases,
    eventually: Eventually,
) -> None:
    waiting = Waiting()
    run = await submit()
    await start_worker({"job": waiting}, drain=0)
    await eventually(lambda: waiting.contexts)

    async def job() -> str:
        return "elsewhere"

    async with (
        second_engine(engine) as beside,
        databases.one() as url,
        Engine.connect(settings=Settings(database_url=url)) as other,
    ):
        assert (
            parts_of(beside).store_key == parts_of(engine).store_key,
            parts_of(other).store_key == parts_of(engine).store_key,
        ) == (True, False)
        await type(given)(other, given.clock).created(execution_id=run, input_payload=b"{}")
        async with Worker(other, lanes=["default"], handlers={"job": job}):
            assert (await other.wait_for_ending(run, timeout=60)).result == b'"elsewhere"'
    assert not waiting.is_cancelled.is_set()
    assert waiting.contexts[0].is_lease_healthy()

"""How a worker stops a run at its attempt timeout or its execution deadline, with timers of its own."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from faults.proxy import Proxy
from fixtures import Attempts, Clock, Eventually, Given, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.worker import Worker

from .waiting import LONG_TTL_MS, RETRIED, Waiting


def in_thread_until(gate: threading.Event) -> Callable[[], str]:
    def wait() -> str:
        gate.wait(timeout=60)
        return "late"

    return wait


async def test_a_run_past_its_timeout_or_deadline_is_stopped_by_its_own_worker(
    engine: Engine,
    start_worker: StartWorker,
    given: Given,
    submit: Submit,
    attempts: Attempts,
    clock: Clock,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    finished: list[Context] = []

    async def in_time(ctx: Context) -> None:
        finished.append(ctx)

    kinds = ("retried", "last", "deadline", "policy", "both", "late")
    handlers = {kind: Waiting() for kind in kinds}
    late = await given.created(execution_kind="late", execution_deadline_at=await clock.now() - 1)
    worker = await start_worker(
        {**handlers, "thread": in_thread_until(gate), "in time": in_time},
        lease_ttl=LONG_TTL_MS / 1000,
        reconcile=False,
        poll_interval=0.05,
    )
    timeout = {"attempt_timeout_ms": 300}
    policies: dict[str, Any] = {
        "retried": {"timeout_policy": timeout, **RETRIED},
        "last": {"timeout_policy": timeout},
        "policy": {"timeout_policy": {"execution_deadline_ms": 500, "attempt_timeout_ms": 600_000}},
        "both": {"timeout_policy": {"execution_deadline_ms": 600_000, **timeout}, **RETRIED},
        "thread": {"timeout_policy": timeout},
        "in time": {"timeout_policy": {"attempt_timeout_ms": 60_000}},
    }
    runs = {kind: await submit(kind=kind, policy=policy) for kind, policy in policies.items()}
    runs["deadline"] = await given.created(
        execution_kind="deadline", execution_deadline_at=await clock.now() + 500, policy=RETRIED
    )
    runs["late"] = late
    ended = {kind: await engine.wait_for_ending(run, timeout=60) for kind, run in runs.items()}
    assert {kind: (one.outcome, one.reason or one.result) for kind, one in ended.items()} == {
        "retried": ("success", b'"again"'),
        "last": ("expired", "attempt_timeout"),
        "deadline": ("expired", "execution_deadline"),
        "policy": ("expired", "execution_deadline"),
        "both": ("success", b'"again"'),
        "thread": ("expired", "attempt_timeout"),
        "in time": ("success", None),
        "late": ("expired", "execution_deadline"),
    }
    assert [kind for kind in kinds if not handlers[kind].is_cancelled.is_set()] == ["late"]
    assert handlers["late"].contexts == []
    stored = [(one["attempt_state"], one["failure_category"]) for one in await attempts(runs["retried"])]
    assert stored == [("ended_failure", "timeout"), ("ended_success", None)]
    assert f"{runs['deadline']} (deadline) is stopped: its execution deadline has passed" in caplog.text
    # A thread cannot be stopped: its slot is occupied until it returns.
    await eventually(lambda: worker.running == 1)
    gate.set()
    await eventually(lambda: worker.running == 0)
    timer = finished[0]._running.timer
    assert timer is not None
    assert timer.cancelled()


async def test_a_resumed_attempt_has_the_time_it_had_left(
    engine: Engine, start_worker: StartWorker, given: Given, clock: Clock
) -> None:
    handle = await given.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 60_000}}, lease_ttl_ms=LONG_TTL_MS)
    await clock.advance(ms=59_800)
    await engine.hand_back(handle)
    waiting = Waiting()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    assert (await engine.wait_for_ending(handle.execution_id, timeout=30)).outcome is TerminalOutcome.EXPIRED


async def test_a_timeout_is_retried_until_the_store_answers_and_it_is_due_by_the_clock_of_the_store(
    engine: Engine, url: str, submit: Submit, clock: Clock, eventually: Eventually
) -> None:
    await clock.stop()
    waiting = Waiting()
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 500}})
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url)) as cut:
        worker = Worker(
            cut, lanes=["default"], handlers={"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False
        )
        async with worker:
            await eventually(lambda: waiting.contexts)
            proxy.refuses = True
            proxy.cut()
            await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
            await eventually(lambda: worker._health.unanswered_for(0.1))
            proxy.refuses = False
            await eventually(lambda: not worker._health.unanswered_for(0))
            # The clock of the store is stopped: by it, the time is not up.
            assert await engine.read_execution_state(run) == "active"
            await clock.advance(ms=501)
            assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.EXPIRED


async def test_a_timeout_is_not_retried_after_the_lease_has_expired(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    clock: Clock,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The clock of the store is stopped: by it, the time is never up.
    await clock.stop()
    waiting = Waiting()
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 100}})
    worker = await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
    waiting.contexts[0]._running.renewed_at -= LONG_TTL_MS / 1000
    await eventually(lambda: worker.running == 0)
    assert f"{run} (job): the timeout was not stored before the lease expired: it is not due yet" in caplog.text


async def test_a_deadline_is_retried_until_it_is_due_by_the_clock_of_the_store(
    engine: Engine, start_worker: StartWorker, given: Given, clock: Clock, eventually: Eventually
) -> None:
    await clock.stop()
    waiting = Waiting()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    run = await given.created(execution_deadline_at=await clock.now() + 100)
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
    # The clock of the store is stopped: by it, the time is not up.
    assert await engine.read_execution_state(run) == "active"
    await clock.advance(ms=101)
    assert (await engine.wait_for_ending(run, timeout=60)).reason == "execution_deadline"

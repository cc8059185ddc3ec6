"""How a worker stops a run whose attempt or execution has taken its time, by a timer of its own."""

import asyncio
import threading
from typing import Any

from faults.proxy import Proxy
from flowfabric.engine.engine import Engine
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.worker import Worker

from .waiting import LONG_TTL_MS, RETRIED, Waiting

# The attempt timeout, by the worker's own timer.


async def test_an_attempt_past_its_time_is_stopped_and_retried_by_its_own_worker(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any
) -> None:
    waiting = Waiting()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, poll_interval=0.05)
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 300}, **RETRIED})
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b'"again"')
    assert waiting.is_cancelled.is_set()
    told = [(one["attempt_state"], one["failure_category"]) for one in await attempts(run)]
    assert told == [("ended_failure", "timeout"), ("ended_success", None)]


async def test_the_last_attempt_past_its_time_expires(engine: Engine, start_worker: Any, submit: Any) -> None:
    waiting = Waiting()
    worker = await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 300}})
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.reason) == (TerminalOutcome.EXPIRED, "attempt_timeout")
    assert waiting.is_cancelled.is_set()
    assert worker.running == 0


async def test_a_thread_past_its_time_is_timed_out_before_it_returns(
    engine: Engine, start_worker: Any, submit: Any, eventually: Any
) -> None:
    gate = threading.Event()

    def wait() -> str:
        gate.wait(timeout=60)
        return "late"

    worker = await start_worker({"job": wait}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 300}})
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.EXPIRED
    assert worker.running == 1
    gate.set()
    await eventually(lambda: worker.running == 0)


async def test_a_resumed_attempt_has_the_time_it_had_left(
    engine: Engine, start_worker: Any, given: Any, clock: Any
) -> None:
    handle = await given.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 60_000}}, lease_ttl_ms=LONG_TTL_MS)
    await clock.advance(ms=59_500)
    await engine.hand_back(handle)
    waiting = Waiting()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    assert (await engine.wait_for_ending(handle.execution_id, timeout=30)).outcome is TerminalOutcome.EXPIRED


async def test_a_timeout_is_asked_for_until_the_store_answers_and_it_is_due(
    engine: Engine, url: str, submit: Any, clock: Any, eventually: Any
) -> None:
    await clock.stop()
    waiting = Waiting()
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 1000}})
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url)) as cut:
        worker = Worker(
            cut, lanes=["default"], handlers={"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False
        )
        async with worker:
            await eventually(lambda: waiting.contexts)
            proxy.refuses = True
            proxy.cut()
            await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
            await eventually(lambda: worker._health.unanswered_for(1))
            proxy.refuses = False
            await eventually(lambda: not worker._health.unanswered_for(0))
            # The clock of the store stands still: by it, the time is not up.
            assert await engine.read_execution_state(run) == "active"
            await clock.advance(ms=1001)
            assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.EXPIRED


async def test_a_timeout_is_not_asked_for_beyond_the_lease(
    engine: Engine, start_worker: Any, submit: Any, clock: Any, eventually: Any, caplog: Any
) -> None:
    # The clock of the store stands still: by it, the time is never up.
    await clock.stop()
    waiting = Waiting()
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 300}})
    worker = await start_worker({"job": waiting}, lease_ttl=1, reconcile=False)
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
    await eventually(lambda: worker.running == 0)
    assert f"{run} (job): the timeout was not stored before the lease expired: it is not due yet" in caplog.text


async def test_a_run_that_ends_in_time_has_no_timer_left(engine: Engine, start_worker: Any, submit: Any) -> None:
    contexts: list[Context] = []

    async def job(ctx: Context) -> None:
        contexts.append(ctx)

    await start_worker({"job": job})
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 60_000}})
    await engine.wait_for_ending(run, timeout=60)
    timer = contexts[0]._running.timer
    assert timer is not None
    assert timer.cancelled()


# The deadline of the execution, by the worker's own timer.


async def test_a_run_past_its_deadline_is_stopped_and_expired_by_its_own_worker(
    engine: Engine, start_worker: Any, given: Any, clock: Any, caplog: Any
) -> None:
    waiting = Waiting()
    worker = await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    run = await given.created(execution_deadline_at=await clock.now() + 700, policy=RETRIED)
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.reason) == (TerminalOutcome.EXPIRED, "execution_deadline")
    assert waiting.is_cancelled.is_set()
    assert worker.running == 0
    assert f"{run} (job) is stopped: its execution deadline has passed" in caplog.text


async def test_the_deadline_of_a_policy_stops_a_run_in_its_process(
    engine: Engine, start_worker: Any, submit: Any
) -> None:
    waiting = Waiting()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    limits = {"execution_deadline_ms": 700, "attempt_timeout_ms": 600_000}
    run = await submit(policy={"timeout_policy": limits})
    assert (await engine.wait_for_ending(run, timeout=60)).reason == "execution_deadline"
    assert waiting.is_cancelled.is_set()


async def test_an_attempt_timeout_before_the_deadline_is_an_attempt_timeout(
    engine: Engine, start_worker: Any, submit: Any
) -> None:
    waiting = Waiting()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False, poll_interval=0.05)
    limits = {"execution_deadline_ms": 600_000, "attempt_timeout_ms": 300}
    run = await submit(policy={"timeout_policy": limits, **RETRIED})
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"again"'


async def test_a_deadline_is_asked_for_until_it_is_due_by_the_clock_of_the_store(
    engine: Engine, start_worker: Any, given: Any, clock: Any, eventually: Any
) -> None:
    await clock.stop()
    waiting = Waiting()
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    run = await given.created(execution_deadline_at=await clock.now() + 300)
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
    # The clock of the store stands still: by it, the time is not up.
    assert await engine.read_execution_state(run) == "active"
    await clock.advance(ms=301)
    assert (await engine.wait_for_ending(run, timeout=60)).reason == "execution_deadline"


async def test_a_handler_is_not_called_after_the_deadline(
    engine: Engine, start_worker: Any, given: Any, clock: Any
) -> None:
    waiting = Waiting()
    run = await given.created(execution_deadline_at=await clock.now() - 1)
    await start_worker({"job": waiting}, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    assert (await engine.wait_for_ending(run, timeout=60)).reason == "execution_deadline"
    assert waiting.contexts == []

"""How a run is stopped in its process when its lease ends without it, and how the next run of it waits."""

import asyncio
import logging
import threading
from typing import Any

import pytest

from faults.proxy import Proxy
from flowfabric.engine.engine import Engine
from flowfabric.engine.wakeups import LostLease, LostReason
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.worker import PUT_OFF_MS, Worker

LONG_TTL_MS = 600_000
"""A lease that is not renewed while a test runs: nothing but a hint can tell of its end."""
RETRIED = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}


class Waiting:
    """A handler that waits until it is stopped; it remembers its contexts and whether it was cancelled."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.is_cancelled = asyncio.Event()

    async def __call__(self, ctx: Context) -> str:
        self.contexts.append(ctx)
        if ctx.attempt_index > 0:
            return "again"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        return "unreachable"


async def cancel(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await engine.cancel_execution(execution_id=run, reason="not wanted")


async def pass_the_deadline(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await clock.advance(seconds=300)
    assert await engine.expiry.expire_due() == 1


async def pass_the_attempt_timeout(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await clock.advance(seconds=200)
    assert await engine.expiry.expire_due() == 1


async def expire_the_lease(engine: Engine, run: ExecutionId, clock: Any) -> None:
    await clock.advance(ms=LONG_TTL_MS + 1)
    assert await engine.leases.mark_lapsed([run]) == 1


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
    worker = await start_worker({"job": waiting}, lease_ttl_ms=LONG_TTL_MS, reconcile=False, concurrency=1)
    await eventually(lambda: waiting.contexts)
    await eventually(lambda: engine.wakeups.hints.is_listening)
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
    await start_worker({"job": wait}, lease_ttl_ms=LONG_TTL_MS)
    await eventually(lambda: contexts)
    for epoch in (contexts[0].lease_epoch - 1, contexts[0].lease_epoch + 1):
        engine.wakeups.lost([LostLease(run, epoch, LostReason.CANCELLED)])
    assert contexts[0].is_lease_healthy()
    gate.set()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"done"'


async def test_a_hint_with_a_reason_of_another_version_stops_the_run(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, eventually: Any
) -> None:
    waiting = Waiting()
    run = await submit()
    await start_worker({"job": waiting}, lease_ttl_ms=LONG_TTL_MS, reconcile=False, drain_seconds=0)
    await eventually(lambda: waiting.contexts)
    await eventually(lambda: engine.wakeups.hints.is_listening)
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
        cut.wakeups.hints.begin_to_listen()
        await eventually(lambda: cut.wakeups.hints.is_listening)
        proxy.refuses = not is_beating
        async with Worker(cut, lanes=["default"], handlers={"job": waiting}, lease_ttl_ms=LONG_TTL_MS, reconcile=False):
            await eventually(lambda: waiting.contexts)
            await eventually(lambda: is_beating or "the heartbeat reconnects" in caplog.text)
            proxy.refuses = True
            proxy.cut()
            await eventually(lambda: not cut.wakeups.hints.is_listening)
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
        ("INFO", f"{run} is stopped: cancelled")
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
    worker = await start_worker({"job": wait}, lease_ttl_ms=LONG_TTL_MS)
    await eventually(started.is_set)
    await engine.cancel_execution(execution_id=run, reason="not wanted")
    assert not contexts[0].is_lease_healthy()
    assert worker.running == 1
    gate.set()
    await eventually(lambda: worker.running == 0)
    assert (await rows.execution(run))["terminal_outcome"] == "cancelled"


# The attempt timeout, by the worker's own timer.


async def test_an_attempt_past_its_time_is_stopped_and_retried_by_its_own_worker(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any
) -> None:
    waiting = Waiting()
    await start_worker({"job": waiting}, lease_ttl_ms=LONG_TTL_MS, reconcile=False, claim_poll_interval_ms=50)
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 300}, **RETRIED})
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b'"again"')
    assert waiting.is_cancelled.is_set()
    told = [(one["attempt_state"], one["failure_category"]) for one in await attempts(run)]
    assert told == [("ended_failure", "timeout"), ("ended_success", None)]


async def test_the_last_attempt_past_its_time_expires(engine: Engine, start_worker: Any, submit: Any) -> None:
    waiting = Waiting()
    worker = await start_worker({"job": waiting}, lease_ttl_ms=LONG_TTL_MS, reconcile=False)
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

    worker = await start_worker({"job": wait}, lease_ttl_ms=LONG_TTL_MS, reconcile=False)
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
    await start_worker({"job": waiting}, lease_ttl_ms=LONG_TTL_MS, reconcile=False)
    assert (await engine.wait_for_ending(handle.execution_id, timeout=30)).outcome is TerminalOutcome.EXPIRED


async def test_a_timeout_is_asked_for_until_the_store_answers_and_it_is_due(
    engine: Engine, url: str, submit: Any, clock: Any, eventually: Any
) -> None:
    await clock.stop()
    waiting = Waiting()
    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 1000}})
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url)) as cut:
        worker = Worker(cut, lanes=["default"], handlers={"job": waiting}, lease_ttl_ms=LONG_TTL_MS, reconcile=False)
        async with worker:
            await eventually(lambda: waiting.contexts)
            proxy.refuses = True
            proxy.cut()
            await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
            await eventually(lambda: worker._contact.unanswered_for(1))
            proxy.refuses = False
            await eventually(lambda: not worker._contact.unanswered_for(0))
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
    worker = await start_worker({"job": waiting}, lease_ttl_ms=1000, reconcile=False)
    await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
    await eventually(lambda: worker.running == 0)
    assert f"{run}: the timeout was not stored before the lease expired: it is not due yet" in caplog.text


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


# Attempts of one execution never overlap in a process.


class Overlap:
    """Counts the runs of a handler that are in their code at the same time."""

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


@pytest.mark.parametrize("handler", ["thread", "async"])
@pytest.mark.parametrize("workers", [1, 2])
async def test_the_next_run_of_an_execution_waits_until_the_earlier_has_left(
    engine: Engine,
    start_worker: Any,
    submit: Any,
    clock: Any,
    eventually: Any,
    rows: Any,
    handler: str,
    workers: int,
) -> None:
    await clock.stop()
    thread_gate, gate = threading.Event(), asyncio.Event()
    overlap = Overlap()

    def in_thread(ctx: Context) -> int:
        with overlap:
            if ctx.attempt_index == 0:
                thread_gate.wait(timeout=60)
            return ctx.attempt_index

    async def slow_to_clean_up(ctx: Context) -> int:
        with overlap:
            if ctx.attempt_index == 0:
                try:
                    await asyncio.Event().wait()
                finally:
                    await gate.wait()
            return ctx.attempt_index

    run = await submit()
    handlers = {"job": in_thread if handler == "thread" else slow_to_clean_up}
    first = await start_worker(handlers, concurrency=2 if workers == 1 else 1, lease_ttl_ms=3000)
    await eventually(lambda: overlap.started == 1)
    second = first if workers == 1 else await start_worker(handlers, lease_ttl_ms=3000)
    await clock.advance(ms=3001)
    await engine.leases.mark_lapsed([run])
    await eventually(lambda: (first.running, second.running) == ((2, 2) if workers == 1 else (1, 1)))

    async def is_renewed() -> bool:
        row = await rows.execution(run)
        return bool(row["lease_epoch"] == 2 and row["lease_renewed_at"] is not None)

    await eventually(is_renewed)
    assert (overlap.started, overlap.now) == (1, 1)
    thread_gate.set()
    gate.set()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"1")
    assert (overlap.started, overlap.most) == (2, 1)


async def test_a_run_that_is_stopped_while_it_waits_for_an_earlier_one_lets_no_third_overtake(
    engine: Engine, start_worker: Any, submit: Any, clock: Any, eventually: Any
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
    worker = await start_worker({"job": wait}, concurrency=3, lease_ttl_ms=LONG_TTL_MS, reconcile=False)
    await eventually(lambda: overlap.started == 1)
    for attempt in (1, 2):
        await clock.advance(ms=LONG_TTL_MS + 1)
        await engine.leases.mark_lapsed([run])

        async def is_taken(attempt: int = attempt) -> bool:
            return await engine.read_current_attempt_index(execution_id=run) == attempt

        await eventually(is_taken)
    await eventually(lambda: worker.running == 2)
    assert overlap.started == 1
    gate.set()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"2"
    assert (overlap.started, overlap.most) == (2, 1)


async def test_a_run_that_waits_for_an_earlier_one_is_handed_back_by_a_worker_that_stops(
    engine: Engine, start_worker: Any, submit: Any, clock: Any, eventually: Any
) -> None:
    await clock.stop()
    gate = threading.Event()
    overlap = Overlap()

    def wait(ctx: Context) -> int:
        with overlap:
            gate.wait(timeout=60)
            return ctx.attempt_index

    run = await submit()
    await start_worker({"job": wait}, concurrency=1, lease_ttl_ms=LONG_TTL_MS, reconcile=False)
    await eventually(lambda: overlap.started == 1)
    second = Worker(engine, lanes=["default"], handlers={"job": wait}, reconcile=False)
    async with second:
        await clock.advance(ms=LONG_TTL_MS + 1)
        await engine.leases.mark_lapsed([run])
        await eventually(lambda: second.running == 1)
    assert await engine.read_execution_state(run) == "resumable"
    assert overlap.started == 1
    gate.set()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"1"


async def test_retries_are_not_used_up_while_an_earlier_run_does_not_return(
    engine: Engine, start_worker: Any, submit: Any, clock: Any, eventually: Any, attempts: Any, caplog: Any
) -> None:
    gate = threading.Event()
    overlap = Overlap()

    def wait(ctx: Context) -> int:
        with overlap:
            gate.wait(timeout=60)
            return ctx.attempt_index

    run = await submit(policy={"timeout_policy": {"attempt_timeout_ms": 2000}, **RETRIED})
    worker = await start_worker({"job": wait}, lease_ttl_ms=LONG_TTL_MS, reconcile=False, claim_poll_interval_ms=50)

    def put_off() -> list[str]:
        told = f"{run} waits for an earlier run that does not return; handed back"
        return [record.levelname for record in caplog.records if record.getMessage() == told]

    async def is_delayed() -> bool:
        return await engine.read_execution_state(run) == "delayed" and worker.running == 1

    with caplog.at_level(logging.INFO, "flowfabric"):
        await eventually(lambda: put_off() == ["WARNING"])
        await eventually(is_delayed)
        # Any worker may claim it then; where this one does, it does not wait again.
        await clock.advance(ms=PUT_OFF_MS)
        await eventually(lambda: put_off() == ["WARNING", "INFO"])
        await eventually(is_delayed)
    gate.set()
    await eventually(lambda: worker.running == 0)
    await clock.advance(ms=PUT_OFF_MS)
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"1")
    assert [one["attempt_state"] for one in await attempts(run)] == ["ended_failure", "ended_success"]
    assert (overlap.started, overlap.most) == (2, 1)


async def test_executions_of_two_stores_may_have_the_same_id(
    engine: Engine, start_worker: Any, submit: Any, given: Any, databases: Any, eventually: Any
) -> None:
    waiting = Waiting()
    run = await submit()
    await start_worker({"job": waiting}, drain_seconds=0)
    await eventually(lambda: waiting.contexts)

    async def job() -> str:
        return "elsewhere"

    async with (
        engine.beside() as beside,
        databases.one() as url,
        Engine.connect(settings=Settings(database_url=url)) as other,
    ):
        assert (beside.store_key == engine.store_key, other.store_key == engine.store_key) == (True, False)
        await type(given)(other, given.clock).created(execution_id=run, input_payload=b"{}")
        async with Worker(other, lanes=["default"], handlers={"job": job}):
            assert (await other.wait_for_ending(run, timeout=60)).result == b'"elsewhere"'
    assert not waiting.is_cancelled.is_set()
    assert waiting.contexts[0].is_lease_healthy()

"""What a worker logs of runs that have expired."""

import threading
import time

import pytest

from fixtures import Clock, Eventually, Given, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.expire import ExpiryPhase
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import FailureReason
from flowfabric.worker.outcome import Failure
from flowfabric.worker.reports import Reports
from flowfabric.worker.running import Running

from .test_logs import logged
from .waiting import LONG_TTL_MS, Waiting


async def test_a_run_that_a_sweep_expires_first_is_logged_as_expired_too(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    clock: Clock,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await clock.stop()
    gate = threading.Event()
    started: list[str] = []

    def in_thread() -> str:
        started.append("thread")
        gate.wait(timeout=60)
        return "late"

    waiting = Waiting()
    timeout = {"timeout_policy": {"attempt_timeout_ms": 60_000}}
    in_loop, threaded = await submit(policy=timeout), await submit(kind="thread", policy=timeout)
    handlers = {"job": waiting, "thread": in_thread}
    worker = await start_worker(handlers, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    await eventually(lambda: waiting.contexts and started)
    await clock.advance(ms=60_001)
    assert await parts_of(engine).timeouts.expire_due() == 2
    gate.set()
    await eventually(lambda: worker.running == 0)
    lines = {run: [line for line in logged(caplog) if run in line[1]] for run in (in_loop, threaded)}
    assert lines[in_loop] == [
        ("WARNING", f"{in_loop} (job) is stopped: its attempt timeout has passed"),
        ("ERROR", f"{in_loop} (job) has expired for good"),
    ]
    why = "its attempt timeout has passed; its thread cannot be stopped, and its result will be discarded"
    assert lines[threaded] == [
        ("WARNING", f"{threaded} (thread) is abandoned: {why}"),
        ("ERROR", f"{threaded} (thread) has expired for good"),
    ]


async def test_a_run_that_has_expired_is_logged_when_its_worker_reports_its_end(
    engine: Engine, given: Given, clock: Clock, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 1000}}
    runs = [await given.run(policy=policy, lease_ttl_ms=LONG_TTL_MS) for _ in range(4)]
    stopped, completed, failed, cancelled = runs
    await clock.advance(ms=1001)
    for run in (stopped, completed, failed):
        await engine.expire_execution(run.execution_id, ExpiryPhase.ATTEMPT_TIMEOUT)
    await engine.cancel_execution(execution_id=cancelled.execution_id, reason="not wanted")
    released: list[Running] = []
    reports = Reports(engine, released.append)
    now = time.monotonic()
    await reports.expire(Running(stopped, now), ExpiryPhase.ATTEMPT_TIMEOUT)
    await reports.expire(Running(cancelled, now), ExpiryPhase.ATTEMPT_TIMEOUT)
    await reports.fail(Running(failed, now), Failure(FailureReason("no luck")))
    reports.complete(Running(completed, now), b"1")
    await eventually(lambda: len(released) == 2)
    errors = [text for level, text in logged(caplog) if level == "ERROR"]
    assert errors == [f"{run.execution_id} (job) has expired for good" for run in (stopped, failed, completed)]

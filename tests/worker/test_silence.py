"""What a worker does when the store does not answer: outages, stuck calls, and connections that fall silent."""

import asyncio
import logging
import time
from typing import Any

import asyncpg
import pytest

from faults.proxy import Proxy
from fixtures import Attempts, Clock, Engines, Eventually, Rows, Submit
from flowfabric.db import database, notify
from flowfabric.db import session as sessions
from flowfabric.db.session import Limits
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.claim import Claim
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import TransportError, error
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import TerminalOutcome
from flowfabric.reconcile.loop import Reconciler
from flowfabric.settings import Settings
from flowfabric.worker import claiming, heartbeat, reports
from flowfabric.worker import worker as workers
from flowfabric.worker.context import Context
from flowfabric.worker.faults import RETRY_SECONDS, StoreHealth
from flowfabric.worker.heartbeat import Heartbeat
from flowfabric.worker.options import WorkerOptions
from flowfabric.worker.running import Running
from flowfabric.worker.worker import Worker

from .waiting import LONG_TTL_MS, Gate, Waiting

STOP_SECONDS = 15.0
"""The most that a stop takes beyond the drain and the clean-up of handlers, with default limits."""
BACK_SECONDS = 15.0
"""How soon a worker claims again after its connections fell silent, with default settings."""
SOON = 10.0
"""Much more than either takes with the short limits of a test, and much less than a statement may take."""


def test_silence_is_measured_from_the_first_unanswered_call() -> None:
    health = StoreHealth()
    now = time.monotonic()
    assert not health.unanswered_for(0)
    health.failed(TransportError("timeout"), now - 10)
    health.failed(TransportError("transport"), now - 1)
    assert health.unanswered_for(9)
    assert not health.unanswered_for(11)
    health.failed(TransportError("busy_loading"), now)
    assert not health.unanswered_for(0)
    health.failed(TransportError("timeout"), now - 10)
    health.answered()
    assert not health.unanswered_for(0)


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    health = StoreHealth()
    now = time.monotonic()
    health.answered()
    for kind in ("transport", "timeout", "busy_loading"):
        health.failed(TransportError(kind, "gone"), now - 10)
        health.reconciled(TransportError(kind, "gone"), now)
    health.forget_silence()
    # The reconciler may only read, which does not show that the store accepts writes again.
    health.reconciled(None, now)
    assert [record.getMessage() for record in caplog.records] == [
        f"the store is unavailable, calls are retried: {TransportError('transport', 'gone')}"
    ]
    caplog.clear()
    health.answered()
    health.answered()
    health.failed(error("lease_conflict"), now)
    (logged,) = [record.getMessage() for record in caplog.records]
    assert logged.startswith("the store is available again after 10.")
    health.reconciled(TransportError(), now)
    health.reconciled(None, now)
    assert len(caplog.records) == 3


async def test_a_lease_expires_when_its_time_has_passed_since_the_last_renewal() -> None:
    class Claimed:
        class handle:
            lease_ttl_ms = 1000

    claimed: Any = Claimed
    assert Running(claimed, time.monotonic() - 1.1).is_lease_expired
    assert not Running(claimed, time.monotonic() - 0.5).is_lease_expired


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call to the store is soon followed by the next or by a retry."""
    monkeypatch.setattr(claiming, "LISTENING_POLL_SECONDS", 0.1)
    monkeypatch.setattr(claiming, "RETRY_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(reports, "RETRY_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(Reconciler, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(Reconciler, "FAULT_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(Heartbeat, "CHECK_SECONDS", 0.05)


@pytest.mark.usefixtures("short_pauses")
async def test_an_outage_is_one_warning_for_all_calls_of_a_worker(
    engine: Engine, url: str, submit: Submit, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric")
    gate = Gate()
    runs = [await submit() for _ in range(5)]

    def logged(level: int) -> list[str]:
        by_worker = ("flowfabric.worker.", "flowfabric.reconcile.")
        return [
            f"{record.name} {record.getMessage()}"
            for record in caplog.records
            if record.levelno >= level and record.name.startswith(by_worker)
        ]

    def retries(of: str) -> int:
        return sum(of in line for line in logged(logging.DEBUG))

    async with (
        Proxy(url) as proxy,
        Engine.connect(settings=Settings(database_url=proxy.url)) as cut,
        Worker(cut, lanes=["default"], handlers={"job": gate}),
    ):
        await eventually(lambda: gate.started == 5)
        proxy.refuses = True
        proxy.cut()
        gate.opened.set()
        for each in ("storing the result failed", "a claim failed", "the reconciler tries again"):
            await eventually(lambda each=each: retries(each) >= 2)
        proxy.refuses = False
        for run in runs:
            assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
        await eventually(lambda: retries("available again"))
    warnings = [line for line in logged(logging.WARNING) if "heartbeat" not in line]
    assert [line.split(":")[0].split(" after ")[0] for line in warnings] == [
        "flowfabric.worker.faults the store is unavailable, calls are retried",
        "flowfabric.worker.faults the store is available again",
    ]
    assert len([line for line in logged(logging.WARNING) if "heartbeat" in line]) <= 1


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic times at which heartbeats have ended."""
    ended: list[float] = []
    beat = Heartbeat._beat

    async def recorded(self: Heartbeat, engine: Engine) -> None:
        await beat(self, engine)
        ended.append(time.monotonic())

    monkeypatch.setattr(Heartbeat, "_beat", recorded)
    return ended


def heartbeat_of(worker: Worker) -> Heartbeat:
    assert worker._heartbeat is not None
    return worker._heartbeat


def let_silence_last(worker: Worker, seconds: float) -> None:
    """Move the beginning of the silence of the store back, if it is silent."""
    if worker._health._silent_since is not None:
        worker._health._silent_since -= seconds


@pytest.mark.usefixtures("short_pauses")
async def test_a_worker_whose_claims_are_stuck_lets_its_leases_expire(
    engines: Engines,
    submit: Submit,
    connection: asyncpg.Connection,
    eventually: Eventually,
    rows: Rows,
    clock: Clock,
    beats: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The claims of this engine are given up before their wait for a lock is.
    stuck = await engines(statement_timeout_ms=200)
    waiting = Waiting()
    run = await submit()
    ttl = LONG_TTL_MS / 1000
    options: WorkerOptions = {"lanes": ["default"], "lease_ttl": ttl, "reconcile": False, "drain": 0}
    async with Worker(stuck, handlers={"job": waiting}, **options) as worker:

        async def renew_all() -> None:
            before = len(beats)
            heartbeat_of(worker).check_all()
            await eventually(lambda: len(beats) > before)

        await eventually(lambda: waiting.contexts)
        async with connection.transaction():
            # Claims need this table, renewals do not.
            await connection.execute("lock table queue in access exclusive mode")
            await eventually(lambda: worker._health.is_silent)
            let_silence_last(worker, ttl)
            waiting.contexts[0]._running.renewed_at -= ttl
            leased = await rows.of("claim")
            for _ in range(2):
                await renew_all()
            assert "leases are not renewed" in caplog.text
            await asyncio.wait_for(waiting.is_cancelled.wait(), 60)
            assert await rows.of("claim") == leased != []
        await eventually(lambda: not worker._health.is_silent)
        await clock.advance(seconds=ttl)

        async def is_claimed_again() -> bool:
            return bool((await rows.execution(run))["lease_epoch"] > 1)

        await eventually(is_claimed_again)


@pytest.mark.usefixtures("short_pauses")
async def test_a_claim_that_failed_before_a_stop_does_not_end_the_leases_of_draining_runs(
    engine: Engine,
    url: str,
    submit: Submit,
    eventually: Eventually,
    attempts: Attempts,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric")
    ttl, stopped_at = LONG_TTL_MS / 1000, float("inf")

    async def job(ctx: Context) -> str:
        await eventually(lambda: ctx._running.renewed_at > stopped_at)
        return "drained"

    run = await submit()
    async with (
        Proxy(url) as proxy,
        Engine.connect(settings=Settings(database_url=proxy.url)) as cut,
    ):
        worker = Worker(cut, lanes=["default"], handlers={"job": job}, lease_ttl=ttl, reconcile=False)
        async with worker:
            await eventually(lambda: worker.running == 1)
            proxy.refuses = True
            proxy.cut()
            await eventually(lambda: "a claim failed and is retried" in caplog.text)
            worker.stop()
            claims = worker._claiming
            assert claims is not None
            await eventually(claims.done)
            let_silence_last(worker, ttl)
            stopped_at = time.monotonic()
            proxy.refuses = False
            heartbeat_of(worker).check_all()
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b'"drained"')
    assert len(await attempts(run)) == 1


# Silence: packets vanish, and no connection is reset.


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit of a stop is a fraction of a second."""
    for owner, name in (
        (workers, "CANCEL_SECONDS"),
        (workers, "CLAIM_SECONDS"),
        (workers, "HAND_BACK_SECONDS"),
        (heartbeat, "LEAVE_SECONDS"),
        (heartbeat.Heartbeat, "STOP_SECONDS"),
        (database, "DRAIN_SECONDS"),
        (database, "CLOSE_SECONDS"),
        (notify.Hints, "CLOSE_SECONDS"),
    ):
        monkeypatch.setattr(owner, name, 0.1)


def test_the_default_limits_of_a_stop_add_up_to_a_bound() -> None:
    limits = [workers.CLAIM_SECONDS, workers.HAND_BACK_SECONDS, heartbeat.LEAVE_SECONDS]
    limits += [heartbeat.Heartbeat.STOP_SECONDS, database.DRAIN_SECONDS, database.CLOSE_SECONDS]
    assert sum(limits) + notify.Hints.CLOSE_SECONDS < STOP_SECONDS


@pytest.mark.usefixtures("short_limits")
async def test_a_worker_stops_in_bounded_time_when_the_store_falls_silent(
    url: str, submit: Submit, eventually: Eventually, rows: Rows
) -> None:
    async def stop_in_silence(gate: Gate, *, is_busy: bool) -> float:
        async with Proxy(url) as proxy:
            # Statements have a limit far beyond the bound: a stop does not rely on it.
            settings = Settings(database_url=proxy.url, statement_timeout_ms=100_000)
            async with (
                Engine.connect(settings=settings) as engine,
                Worker(engine, lanes=["default"], handlers={"job": gate}, drain=0.1),
            ):
                await eventually(lambda: gate.started == int(is_busy))
                await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
                proxy.silences_new = True
                proxy.silence()
                gate.opened.set()
                parts_of(engine).wakeups.wake_all()
                # The claim is sent before the worker is stopped, and is not answered.
                await eventually(lambda: engine._services[Claim]._under_way == 1)
                began = time.monotonic()
            return time.monotonic() - began

    idle = await stop_in_silence(Gate(), is_busy=False)
    run: ExecutionId = await submit()
    busy = await stop_in_silence(Gate(), is_busy=True)
    assert max(idle, busy) < SOON
    # Its result could not be stored: another worker claims it when the lease has expired.
    assert (await rows.execution(run))["public_state"] == "active"


@pytest.mark.usefixtures("short_limits")
async def test_a_worker_is_back_at_work_soon_after_its_connections_fell_silent(
    url: str,
    submit: Submit,
    engine: Engine,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The longest pause before the next claim, its missing answer, and the pause before it is retried.
    answer_seconds = Limits(statement_ms=Settings(database_url=url).statement_timeout_ms).answer_seconds
    assert answer_seconds is not None
    assert claiming.LISTENING_POLL_SECONDS + answer_seconds + RETRY_SECONDS[0] <= BACK_SECONDS - 1

    async def job() -> str:
        return "done"

    monkeypatch.setattr(claiming, "LISTENING_POLL_SECONDS", 0.2)
    monkeypatch.setattr(sessions, "ANSWER_SECONDS", 0.2)
    async with (
        Proxy(url) as proxy,
        Engine.connect(settings=Settings(database_url=proxy.url, statement_timeout_ms=300)) as silenced,
        Worker(silenced, lanes=["default"], handlers={"job": job}),
    ):
        await engine.wait_for_ending(await submit(), timeout=60)
        await eventually(lambda: parts_of(silenced).wakeups.hints.is_listening)
        proxy.silence()
        began = time.monotonic()
        # A claim in flight takes nothing: its answer would be lost, and its lease would have to expire.
        await eventually(lambda: "the store is unavailable" in caplog.text)
        ended = await engine.wait_for_ending(await submit(), timeout=60)
        assert ended.outcome is TerminalOutcome.SUCCESS
        assert time.monotonic() - began < SOON

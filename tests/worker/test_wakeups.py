"""What wakes a worker that waits for work."""

import asyncio
from collections.abc import Sequence

import asyncpg
import pytest

from fixtures import Engines, Eventually, StartWorker, Submit
from flowfabric.engine.core.wakeups import Work
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.states import TerminalOutcome
from flowfabric.worker import claiming
from flowfabric.worker.claiming import ClaimLoop
from flowfabric.worker.worker import Worker

LANES = ("default",)


async def test_work_that_arrives_during_a_claim_is_not_missed(engine: Engine) -> None:
    wakeups = parts_of(engine).wakeups
    await wakeups.hints.listen()
    wakes = wakeups.wakes(LANES)
    wakeups.work([Work("default", 1, 1, 0)])
    assert await asyncio.wait_for(wakeups.wait_for_work(LANES, 60, since=wakes), 30)


async def test_work_of_another_lane_does_not_wake_a_worker(engine: Engine, eventually: Eventually) -> None:
    wakeups = parts_of(engine).wakeups
    await wakeups.hints.listen()
    await eventually(lambda: wakeups.hints.is_listening)
    wakes = wakeups.wakes(LANES)
    wakeups.work([Work("other", 1, 1, 0)])
    assert not await wakeups.wait_for_work(LANES, 0.1, since=wakes)


async def test_an_idle_worker_is_notified_of_work_from_another_process(
    engine: Engine, engines: Engines, start_worker: StartWorker, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.worker.claiming.LISTENING_POLL_SECONDS", 600.0)

    async def job() -> None: ...

    await start_worker({"job": job}, poll_interval=60)
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    other = await engines()
    for _ in range(3):
        made = await other.create_execution(
            namespace="tests",
            lane_id="default",
            execution_kind="job",
            input_payload=b"",
            priority=0,
            creator_identity="test",
        )
        # Much less than the pause between two claims without a notification.
        ended = await other.wait_for_ending(made.execution_id, timeout=30)
        assert ended.outcome is TerminalOutcome.SUCCESS


async def test_an_idle_worker_claims_again_what_was_locked_for_a_moment(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    eventually: Eventually,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claiming, "LISTENING_POLL_SECONDS", 600.0)
    monkeypatch.setattr(claiming, "RECHECK_SECONDS", (0.05,) * 200)
    has_claimed = asyncio.Event()
    claim = ClaimLoop._claim

    async def signalling(loop: ClaimLoop, wanted: int, free: int) -> Sequence[ClaimedExecution]:
        claimed = await claim(loop, wanted, free)
        has_claimed.set()
        return claimed

    monkeypatch.setattr(ClaimLoop, "_claim", signalling)

    async def job() -> None: ...

    run = await submit()
    hints = parts_of(engine).wakeups.hints
    await hints.listen()
    await eventually(lambda: hints.is_listening)
    async with connection.transaction():
        await connection.execute("select from execution for update")
        await start_worker({"job": job}, poll_interval=60)
        await has_claimed.wait()
    assert (await engine.wait_for_ending(run, timeout=30)).outcome is TerminalOutcome.SUCCESS


async def test_a_worker_its_heartbeat_and_a_waiter_share_one_connection_for_notifications(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    eventually: Eventually,
    connection: asyncpg.Connection,
) -> None:
    is_running, may_end = asyncio.Event(), asyncio.Event()

    async def job() -> None:
        is_running.set()
        await may_end.wait()

    worker = await start_worker({"job": job})
    waiting = asyncio.create_task(engine.wait_for_ending(await submit(), timeout=60))
    await is_running.wait()
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    assert worker._heartbeat is not None
    worker._heartbeat.check_all()
    may_end.set()
    assert (await waiting).outcome is TerminalOutcome.SUCCESS
    listeners = "select count(*) from pg_stat_activity where datname = current_database() and query like $1"
    assert await connection.fetchval(listeners, "/* listener */%") == 1


async def test_a_worker_that_cannot_listen_polls(engines: Engines, submit: Submit) -> None:
    async def job() -> None: ...

    deaf = await engines(listen=False)
    async with Worker(deaf, lanes=["default"], handlers={"job": job}, poll_interval=0.05):
        for _ in range(2):
            run = await submit()
            assert (await deaf.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS

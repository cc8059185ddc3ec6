"""What a worker does when calls to the store fail, or when the store refuses one result among many."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from faults.proxy import Action, Fault, Proxy, Side
from fixtures import Attempts, Eventually, Rows, StartWorker, Submit
from flowfabric.db import session as sessions
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, TransportError, error
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.faults import is_bad_input, is_store_fault, retry_log_level
from flowfabric.worker.worker import Worker

from .waiting import Gate

OURS = "datname = current_database() and application_name = 'flowfabric'"


async def cut_off(connection: asyncpg.Connection) -> None:
    """End every session of the engines on the test's database."""
    await connection.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {OURS}")


@asynccontextmanager
async def read_only(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """Make the server refuse writes for a while, as during a failover."""
    name = await connection.fetchval("select current_database()")
    await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    await cut_off(connection)
    try:
        yield
    finally:
        await connection.execute("set default_transaction_read_only = off")
        await connection.execute(f"alter database {name} reset default_transaction_read_only")
        await cut_off(connection)


def test_only_a_fault_of_the_store_is_worth_a_retry() -> None:
    faults: list[EngineError] = [
        TransportError(kind) for kind in ("transport", "timeout", "auth", "busy_loading", "protocol")
    ]
    faults += [error("retry_exhausted"), error("resource_exhausted"), error("internal", "broken")]
    refusals: list[EngineError] = [
        TransportError("other"),
        error("invalid_input", "payload"),
        error("waitpoint_not_found"),
    ]
    refusals += [error("lease_conflict")]
    assert [fault for fault in faults if not is_store_fault(fault) or is_bad_input(fault)] == []
    assert [refusal for refusal in refusals if is_store_fault(refusal)] == []


def test_an_answer_that_refuses_a_call_is_no_outage_and_is_logged_each_time() -> None:
    assert retry_log_level(TransportError("busy_loading")) == logging.DEBUG
    assert retry_log_level(TransportError("protocol")) == logging.WARNING


@pytest.fixture
def impatient_with_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are opened from now on give up soon on a row that is locked elsewhere."""
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "60ms")


@pytest.mark.usefixtures("fresh_database")
async def test_a_store_that_is_read_only_for_a_while_fails_no_run(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    connection: asyncpg.Connection,
    eventually: Eventually,
    attempts: Attempts,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric")
    gate = Gate()
    runs = [await submit(luck=luck) for luck in ("good", "bad")]
    await start_worker({"job": gate})
    await eventually(lambda: gate.started == 2)
    async with read_only(connection):
        gate.opened.set()
        await eventually(lambda: "storing the result failed and is retried: busy_loading" in caplog.text)
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    assert [one.outcome for one in ended] == [TerminalOutcome.SUCCESS, TerminalOutcome.FAILED]
    assert ended[1].reason == "ValueError: no luck"
    assert [len(await attempts(run)) for run in runs] == [1, 1]


@pytest.mark.usefixtures("impatient_with_locks")
async def test_a_result_is_stored_after_a_lock_on_its_row_is_released_and_given_up_when_its_lease_expires(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    connection: asyncpg.Connection,
    eventually: Eventually,
    rows: Rows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    patient, brief = Gate(), Gate()
    run, lost = await submit(), await submit(kind="brief")
    await start_worker({"job": patient}, reconcile=False)
    worker = await start_worker({"brief": brief}, reconcile=False)
    await eventually(lambda: (patient.started, brief.started) == (1, 1))
    async with connection.transaction():
        await connection.execute("select from execution for update")
        patient.opened.set()
        brief.opened.set()
        for retried in (f"{run} (job)", f"{lost} (brief)"):
            logged = f"{retried}: storing the result failed and is retried: retry_exhausted"
            await eventually(lambda logged=logged: logged in caplog.text)
        (running,) = worker._runs.slots.held
        running.renewed_at -= 3600
        given_up = f"{lost} (brief): the result was not stored before the lease expired: retry_exhausted"
        await eventually(lambda: given_up in caplog.text)
        await eventually(lambda: worker.running == 0)
        row = await rows.execution(lost)
        assert (row["lifecycle_phase"], row["lease_epoch"]) == ("active", 1)
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS


async def test_one_refused_result_of_a_batch_fails_only_its_own_run(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    connection: asyncpg.Connection,
    eventually: Eventually,
    attempts: Attempts,
) -> None:
    # No operation adds such a constraint; it stands for anything that the store may refuse about one result.
    await connection.execute("alter table execution add constraint no_12 check (result_payload <> '12')")
    started, gate = 0, asyncio.Event()

    async def job(n: int) -> int:
        nonlocal started
        started += 1
        await gate.wait()
        return n

    runs = [await submit(n=n) for n in range(20)]
    await start_worker({"job": job}, concurrency=20)
    await eventually(lambda: started == 20)
    gate.set()
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    failed = [n for n, one in enumerate(ended) if one.outcome is not TerminalOutcome.SUCCESS]
    assert (failed, ended[12].outcome) == ([12], TerminalOutcome.FAILED)
    (attempt,) = await attempts(runs[12])
    assert attempt["failure_category"] == "result_refused"


async def test_calls_of_a_handler_are_retried_after_a_lost_connection(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    connection: asyncpg.Connection,
    eventually: Eventually,
    rows: Rows,
) -> None:
    points: list[Any] = []

    async def job(ctx: Context) -> str:
        if ctx.is_resumed:
            return "resumed"
        await cut_off(connection)
        await ctx.progress(50, "half")
        await cut_off(connection)
        points.append(await ctx.create_waitpoint("approval", 60_000))
        await cut_off(connection)
        assert await ctx.observe_signals() == []
        await cut_off(connection)
        await ctx.suspend(keys=["approval"], waitpoints=points, timeout=60)
        return "unreachable"

    run = await submit()
    await start_worker({"job": job})

    async def is_suspended() -> bool:
        return bool((await rows.execution(run))["lifecycle_phase"] == "suspended")

    await eventually(is_suspended)
    assert (await rows.execution(run))["progress_pct"] == 50
    assert len(await rows.of("waitpoint")) == 1


async def test_a_waitpoint_whose_answer_is_lost_is_created_once(
    engine: Engine, url: str, submit: Submit, rows: Rows
) -> None:
    async with Proxy(url) as proxy:

        async def job(ctx: Context) -> list[str]:
            points = [await ctx.create_waitpoint("its answer arrives", 60_000)]
            proxy.arm(Fault(action=Action.DROP_ANSWER, side=Side.CLIENT, text=b"COMMIT"))
            points.append(await ctx.create_waitpoint("approval", 60_000))
            assert (proxy.triggered, proxy.dropped) == (1, 1)
            for point in points:
                token = await engine.read_waitpoint_token(
                    execution_id=ctx.execution_id, waitpoint_id=point.waitpoint_id
                )
                assert token is not None
                assert token.reveal() == point.hmac_token.reveal()
            return sorted(str(point.waitpoint_id) for point in points)

        run = await submit()
        async with (
            Engine.connect(settings=Settings(database_url=proxy.url, database_pool_size=1, listen=False)) as cut,
            Worker(
                cut,
                lanes=["default"],
                handlers={"job": job},
                concurrency=1,
                lease_ttl=600,
                reconcile=False,
            ),
        ):
            ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.reason) == (TerminalOutcome.SUCCESS, None)
    made = sorted(str(row["waitpoint_id"]) for row in await rows.of("waitpoint"))
    assert ended.result == json.dumps(made, separators=(",", ":")).encode()


@pytest.mark.usefixtures("fresh_database")
async def test_a_worker_retries_its_registration_until_the_store_accepts_writes(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    async def job() -> None: ...

    caplog.set_level(logging.DEBUG, "flowfabric")
    run = await submit()
    async with read_only(connection):
        starting = asyncio.ensure_future(start_worker({"job": job}))
        await eventually(lambda: re.search(r"registering failed and is retried in 0\.\d+ s: busy_loading", caplog.text))
    await starting
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS

"""What a worker does while the store is at fault, silent, or refuses one result among many."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from faults.proxy import Action, Proxy, Side, Strike
from flowfabric.db.session import Limits
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.claim import Claim
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import TransportError, error
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.claiming import LISTENING_POLL_SECONDS
from flowfabric.worker.context import Context
from flowfabric.worker.faults import RETRY_SECONDS, StoreHealth, is_bad_input, is_store_fault
from flowfabric.worker.options import WorkerOptions
from flowfabric.worker.running import Running
from flowfabric.worker.worker import CANCEL_SECONDS, Worker

STOP_SECONDS = 15.0
"""What stopping may take beyond the drain and the clean-up, whatever the network does."""
BACK_SECONDS = 15.0
"""How soon a worker claims again after its connections fell silent, with default settings."""
OURS = "datname = current_database() and application_name = 'flowfabric'"


async def cut_off(connection: Any) -> None:
    """End every session of the engines on the test's database."""
    await connection.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {OURS}")


@asynccontextmanager
async def read_only(connection: Any) -> AsyncIterator[None]:
    """Have the server refuse writes for a while, as during a failover."""
    name = await connection.fetchval("select current_database()")
    await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    await cut_off(connection)
    try:
        yield
    finally:
        await connection.execute("set default_transaction_read_only = off")
        await connection.execute(f"alter database {name} reset default_transaction_read_only")
        await cut_off(connection)


class Gate:
    """A handler that waits for its gate."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.started = 0

    async def __call__(self, luck: str = "good") -> str:
        self.started += 1
        await self.opened.wait()
        if luck == "bad":
            raise ValueError("no luck")
        return "done"


@pytest.mark.parametrize(
    ("fault", "passes"),
    [
        *((TransportError(kind), True) for kind in ("transport", "timeout", "auth", "busy_loading", "protocol")),
        (error("retry_exhausted"), True),
        (error("resource_exhausted"), True),
        (error("internal", "broken"), True),
        (TransportError("other"), False),
        (error("invalid_input", "payload"), False),
        (error("waitpoint_not_found"), False),
        (error("lease_conflict"), False),
    ],
    ids=str,
)
def test_only_faults_of_the_store_pass(fault: Exception, passes: bool) -> None:  # noqa: FBT001
    assert is_store_fault(fault) == passes
    assert not (passes and is_bad_input(fault))


async def test_a_store_that_is_read_only_for_a_while_fails_no_run(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, eventually: Any, attempts: Any, caplog: Any
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


async def test_a_row_held_for_long_fails_no_run(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, eventually: Any, caplog: Any
) -> None:
    gate = Gate()
    run = await submit()
    await start_worker({"job": gate})
    await eventually(lambda: gate.started == 1)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", run[-36:])
        gate.opened.set()
        await eventually(lambda: "storing the result failed and is retried: retry_exhausted" in caplog.text)
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS


async def test_one_result_that_the_store_refuses_fails_its_run_alone(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, eventually: Any, attempts: Any
) -> None:
    # No operation leaves a constraint like this; it stands for whatever the store may refuse of one result.
    await connection.execute("alter table execution add constraint no_42 check (result_payload <> '42')")
    started, gate = 0, asyncio.Event()

    async def job(n: int) -> int:
        nonlocal started
        started += 1
        await gate.wait()
        return n

    runs = [await submit(n=n) for n in range(100)]
    await start_worker({"job": job}, concurrency=100)
    await eventually(lambda: started == 100)
    gate.set()
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    failed = [n for n, one in enumerate(ended) if one.outcome is not TerminalOutcome.SUCCESS]
    assert (failed, ended[42].outcome) == ([42], TerminalOutcome.FAILED)
    (attempt,) = await attempts(runs[42])
    assert attempt["failure_category"] == "result_refused"


async def test_an_ending_that_is_never_written_is_given_up_with_its_lease(
    start_worker: Any, submit: Any, connection: Any, eventually: Any, rows: Any, caplog: Any
) -> None:
    gate = Gate()
    run = await submit()
    worker = await start_worker({"job": gate}, lease_ttl=3, reconcile=False)
    await eventually(lambda: gate.started == 1)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", run[-36:])
        gate.opened.set()
        told = f"{run} (job): the result was not stored before the lease expired: retry_exhausted"
        await eventually(lambda: told in caplog.text)
        await eventually(lambda: worker.running == 0)
        row = await rows.execution(run)
        assert (row["lifecycle_phase"], row["lease_epoch"]) == ("active", 1)


async def test_calls_of_a_handler_survive_a_lost_connection(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, eventually: Any, rows: Any
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


async def test_a_waitpoint_is_made_once_though_its_answer_is_lost(
    engine: Engine, url: str, submit: Any, rows: Any
) -> None:
    async with Proxy(url) as proxy:

        async def job(ctx: Context) -> list[str]:
            points = [await ctx.create_waitpoint("prepares the statements", 60_000)]
            proxy.arm(None)
            points.append(await ctx.create_waitpoint("counts the messages", 60_000))
            # The last message commits: it is carried out, and its answer lost.
            last = proxy.counted(Side.CLIENT)
            proxy.arm(Strike(action=Action.DROP_ANSWER, side=Side.CLIENT, nth=last))
            points.append(await ctx.create_waitpoint("approval", 60_000))
            assert (proxy.struck, proxy.counted(Side.CLIENT) > last) == (1, True)
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


async def test_a_worker_starts_when_the_store_can_take_its_registration(
    engine: Engine, start_worker: Any, submit: Any, connection: Any, caplog: Any, eventually: Any
) -> None:
    async def job() -> None: ...

    caplog.set_level(logging.DEBUG, "flowfabric")
    run = await submit()
    async with read_only(connection):
        starting = asyncio.create_task(start_worker({"job": job}))
        await eventually(lambda: re.search(r"registering failed and is retried in 0\.\d+ s: busy_loading", caplog.text))
    await starting
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS


# A worker that is stuck.


def test_contact_is_lost_when_calls_fail_and_none_is_answered() -> None:
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
    # What the reconciler reads does not show that the store takes writes again.
    health.reconciled(None, now)
    assert [record.getMessage() for record in caplog.records] == [
        f"the store is unavailable, calls are retried: {TransportError('transport', 'gone')}"
    ]
    caplog.clear()
    health.answered()
    health.answered()
    health.failed(error("lease_conflict"), now)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the store is available again after 10.")
    health.reconciled(TransportError(), now)
    health.reconciled(None, now)
    assert len(caplog.records) == 3


async def test_a_store_that_is_away_is_one_warning_for_all_calls_of_a_worker(
    engine: Engine, url: str, submit: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric")
    gate = Gate()
    runs = [await submit() for _ in range(5)]

    def told(level: int) -> list[str]:
        by_worker = ("flowfabric.worker.", "flowfabric.reconcile.")
        return [
            f"{record.name} {record.getMessage()}"
            for record in caplog.records
            if record.levelno >= level and record.name.startswith(by_worker)
        ]

    def retries(of: str) -> int:
        return sum(of in line for line in told(logging.DEBUG))

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
            await eventually(lambda each=each: retries(each) >= 3)
        proxy.refuses = False
        for run in runs:
            assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
        await eventually(lambda: retries("available again"))
    warnings = [line for line in told(logging.WARNING) if "heartbeat" not in line]
    assert [line.split(":")[0].split(" after ")[0] for line in warnings] == [
        "flowfabric.worker.faults the store is unavailable, calls are retried",
        "flowfabric.worker.faults the store is available again",
    ]
    assert len([line for line in told(logging.WARNING) if "heartbeat" in line]) <= 1


async def test_a_worker_whose_claims_are_stuck_lets_its_leases_expire(
    engines: Any, submit: Any, connection: Any, eventually: Any, rows: Any, caplog: Any
) -> None:
    # The claims of this engine are given up before their wait for a lock is.
    stuck = await engines(statement_timeout_ms=300)
    stopped = asyncio.Event()

    async def wait() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "unreachable"

    run = await submit()
    options: WorkerOptions = {"lanes": ["default"], "lease_ttl": 3, "reconcile": False, "drain": 0}
    worker = Worker(stuck, handlers={"job": wait}, **options)
    async with worker:
        await eventually(lambda: worker.running == 1)
        async with connection.transaction():
            # Claims need this table, renewals do not.
            await connection.execute("lock table queue in access exclusive mode")
            await eventually(lambda: "leases are not renewed" in caplog.text)
            await asyncio.wait_for(stopped.wait(), 60)
            leased = await rows.of("claim")
            # Long enough for two more renewals.
            await eventually(lambda: worker._health.unanswered_for(6))
            assert await rows.of("claim") == leased != []
        await eventually(lambda: not worker._health.unanswered_for(3))

        async def is_renewed_again() -> bool:
            row = await rows.execution(run)
            return bool(row["lease_epoch"] > 1 and row["lease_renewed_at"])

        await eventually(is_renewed_again)


async def test_a_claim_that_failed_before_a_stop_does_not_end_the_leases_of_what_drains(
    engine: Engine, url: str, submit: Any, eventually: Any, attempts: Any, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric")
    ttl_ms, stopped_at = 2000, float("inf")

    async def job(ctx: Context) -> str:
        await eventually(lambda: ctx._running.renewed_at > stopped_at + 2 * ttl_ms / 1000)
        return "drained"

    run = await submit()
    async with (
        Proxy(url) as proxy,
        Engine.connect(settings=Settings(database_url=proxy.url)) as cut,
    ):
        worker = Worker(cut, lanes=["default"], handlers={"job": job}, lease_ttl=ttl_ms / 1000, reconcile=False)
        async with worker:
            await eventually(lambda: worker.running == 1)
            proxy.refuses = True
            proxy.cut()
            await eventually(lambda: "a claim failed and is retried" in caplog.text)
            stopped_at = time.monotonic()
            worker.stop()
            proxy.refuses = False
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b'"drained"')
    assert len(await attempts(run)) == 1


# Silence: packets vanish, and nothing is reset.


@pytest.mark.parametrize("load", ["busy", "idle"])
async def test_a_worker_stops_in_bounded_time_when_the_store_falls_silent(
    url: str, submit: Any, eventually: Any, rows: Any, load: str
) -> None:
    is_busy = load == "busy"
    gate = Gate()
    run: ExecutionId | None = await submit() if is_busy else None
    async with Proxy(url) as proxy:
        began = 0.0
        # Statements have a limit far beyond the bound: stopping does not rely on it.
        async with Engine.connect(settings=Settings(database_url=proxy.url, statement_timeout_ms=100_000)) as engine:
            worker = Worker(engine, lanes=["default"], handlers={"job": gate}, drain=0.5)
            async with worker:
                await eventually(lambda: gate.started == int(is_busy))
                await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
                proxy.silences_new = True
                proxy.silence()
                gate.opened.set()
                parts_of(engine).wakeups.wake_all()
                # The claim is sent before the worker is stopped, and is not answered.
                await eventually(lambda: engine._rooms[Claim]._under_way == 1)
                began = time.monotonic()
        took = time.monotonic() - began
    assert took < 0.5 + CANCEL_SECONDS + STOP_SECONDS
    # Its result could not be stored: another worker claims it when the lease has expired.
    assert run is None or (await rows.execution(run))["public_state"] == "active"


async def test_a_worker_is_back_at_work_soon_after_its_connections_fell_silent(
    url: str, submit: Any, eventually: Any, engine: Engine
) -> None:
    async def job() -> str:
        return "done"

    # The longest pause before the next claim, its answer that does not come, and the pause before it is repeated.
    answer_seconds = Limits(statement_ms=Settings(database_url=url).statement_timeout_ms).answer_seconds
    assert answer_seconds is not None
    assert LISTENING_POLL_SECONDS + answer_seconds + RETRY_SECONDS[0] <= BACK_SECONDS - 1
    async with (
        Proxy(url) as proxy,
        Engine.connect(settings=Settings(database_url=proxy.url)) as silenced,
        Worker(silenced, lanes=["default"], handlers={"job": job}),
    ):
        await engine.wait_for_ending(await submit(), timeout=60)
        await eventually(lambda: parts_of(silenced).wakeups.hints.is_listening)
        proxy.silence()
        began = time.monotonic()
        ended = await engine.wait_for_ending(await submit(), timeout=60)
        assert ended.outcome is TerminalOutcome.SUCCESS
        assert time.monotonic() - began < BACK_SECONDS


async def test_a_lease_is_over_when_its_time_has_passed_since_the_last_renewal() -> None:
    class Claimed:
        class handle:
            lease_ttl_ms = 1000

    claimed: Any = Claimed
    assert Running(claimed, time.monotonic() - 1.1).is_lease_expired
    assert not Running(claimed, time.monotonic() - 0.5).is_lease_expired

"""`ff migrate --check` and engines through a real PgBouncer."""

import asyncio
from typing import Any

import pytest

from creates import new
from fixtures import Eventually
from flowfabric import Fabric
from flowfabric.db.database import Database
from flowfabric.db.notify import EVERYTHING, Hints
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Created
from flowfabric.settings import Settings
from flowfabric.worker import claiming

from .command import migrate
from .pgbouncer import keeps_statements, load, pgbouncer

KEPT = {"max_prepared_statements": 400} if keeps_statements() else {}
NOT_KEPT = {"max_prepared_statements": 0} if keeps_statements() else {}


WORKING: dict[str, dict[str, Any]] = {"session": {"pool_mode": "session", "default_pool_size": 20}}
if keeps_statements():
    WORKING["transaction"] = {"pool_mode": "transaction", **KEPT}
    WORKING["transaction, one connection"] = {**WORKING["transaction"], "default_pool_size": 1}


@pytest.mark.parametrize("mode", WORKING)
async def test_a_pooler_that_keeps_prepared_statements_passes_the_check_and_works(url: str, mode: str) -> None:
    async with pgbouncer(url, **WORKING[mode]) as address:
        code, out, err = await migrate(address, "--check", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
        assert (code, err) == (0, "")
        assert out.endswith("up to date\n")
        async with Engine.connect(settings=Settings(database_url=address, listen=False)) as engine:
            made = await asyncio.gather(
                *(engine.create_many([new(idempotency_key=f"{at}-{nth}") for nth in range(5)]) for at in range(20))
            )
        assert {type(each) for answers in made for each in answers} == {Created}


async def test_a_pooler_that_loses_prepared_statements_fails_the_check(url: str) -> None:
    async with pgbouncer(url, pool_mode="transaction", **NOT_KEPT) as address:
        code, out, err = await migrate(address, "--check", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
    assert (code, out) == (1, "")
    assert (
        ": prepared statements are lost between transactions: a pooler in transaction mode does not keep them;" in err
    )
    assert (err.startswith("ff: 127.0.0.1:"), err.count("\n")) == (True, 1)


@pytest.mark.parametrize("connections", [1, 2])
async def test_a_pooler_in_session_mode_with_too_few_connections_fails_the_check(url: str, connections: int) -> None:
    async with pgbouncer(url, pool_mode="session", default_pool_size=connections) as address:
        code, out, err = await migrate(address, "--check", FF_WAITPOINT_HMAC_SECRET="ab" * 32)
    assert (code, out) == (1, "")
    assert ": a second session gets no answer within 2 s: a pooler has too few connections to the server;" in err


class Side:
    """A fabric with two tasks, which stands for one of two processes."""

    def __init__(self, url: str, *, listen: bool) -> None:
        self.fabric = Fabric(settings=Settings(database_url=url, listen=listen))
        self.is_started = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.double = self.fabric.task(name="double")(self._double)
        self.wait = self.fabric.task(name="wait")(self._wait)

    async def _double(self, number: int) -> int:
        return 2 * number

    async def _wait(self) -> None:
        self.is_started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise


@pytest.mark.parametrize("listen", [False, True])
@pytest.mark.parametrize("mode", WORKING)
async def test_a_worker_runs_and_cancels_the_runs_of_another_process(
    url: str, mode: str, *, listen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transaction mode a worker polls, also if it tries to listen."""
    if mode != "session":
        monkeypatch.setattr(claiming, "LISTENING_POLL_SECONDS", 600)
    async with pgbouncer(url, **WORKING[mode]) as address:
        here, there = Side(address, listen=listen), Side(address, listen=listen)
        async with here.fabric, there.fabric, here.fabric.worker(lease_ttl=6):
            runs = [await there.double.submit(number) for number in range(20)]
            assert [await run.result(timeout=60) for run in runs] == [2 * number for number in range(20)]
            waiting = await there.wait.submit()
            await asyncio.wait_for(here.is_started.wait(), 60)
            await waiting.cancel()
            await asyncio.wait_for(here.is_cancelled.wait(), 60)


@pytest.mark.parametrize("mode", WORKING)
async def test_a_worker_with_a_direct_connection_receives_hints_of_submissions_through_a_pooler(
    url: str, mode: str, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(claiming, "LISTENING_POLL_SECONDS", 600)
    async with pgbouncer(url, **WORKING[mode]) as address:
        here, there = Side(url, listen=True), Side(address, listen=False)
        async with here.fabric, there.fabric, here.fabric.worker():

            async def is_listening() -> bool:
                return parts_of(here.fabric.engine).wakeups.hints.is_listening

            await eventually(is_listening)
            for number in range(3):
                assert await (await there.double.submit(number)).result(timeout=60) == 2 * number


async def test_a_listener_behind_a_pooler_in_session_mode_receives_hints(
    url: str, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(Hints, "LISTEN_SECONDS", 60.0)
    monkeypatch.setattr(Hints, "PROBE_SECONDS", 0.05)
    async with pgbouncer(url, pool_mode="session", default_pool_size=20) as address, load(address, sessions=4):
        database = Database(address, "flowfabric", 1)
        hints, sender = Hints(database), Hints(database)
        heard: list[str] = []
        hints.subscribe("ended", heard.extend)
        try:
            await hints.listen()
            for nth in range(20):
                assert hints.is_listening
                sender.send("ended", f"n{nth}")
                await eventually(lambda nth=nth: heard[-1] == f"n{nth}")
            assert heard.count(EVERYTHING) == 1, "a probe has failed"
        finally:
            await hints.close()
            await sender.close()
            await database.close()

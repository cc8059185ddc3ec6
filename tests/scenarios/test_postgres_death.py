"""Postgres is killed under load: what was acknowledged is there, and the engine goes on once its store is back."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from databases import at_database, execute
from fixtures import Eventually
from flowfabric.db.embedded import Embedded
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.execution import Created
from flowfabric.model.lease import Completed
from flowfabric.settings import Settings


class Server:
    """A server of these tests' own that can be killed and started again."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._holds = [Embedded.start(home)]
        self._database = ""

    async def make_database(self) -> None:
        """Have a new database for a test."""
        self._database = f"ff_test_{uuid4().hex}"
        await execute(self._holds[-1].url, f"create database {self._database}")

    @property
    def url(self) -> str:
        """The address of the test's database on the running server."""
        return at_database(self._holds[-1].url, self._database)

    def kill(self) -> None:
        """End the server and every session with no chance to clean up."""
        postmaster = self._holds[-1].pid
        family = [postmaster, *_children(postmaster)]
        for pid in family:
            # A child that sees its parent die may end first.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def start_again(self) -> None:
        """Bring the server back on what it had on disk."""
        url = self.url
        self._holds.append(await asyncio.to_thread(Embedded.start, self._home))
        assert self.url == url

    def discard(self) -> None:
        """End the server for good."""
        for hold in self._holds:
            hold.release(discard=True)


def _children(parent: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            children.append(int(stat.parent.name))
    return children


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that every test leaves running."""
    server = Server(tmp_path_factory.mktemp("server") / "home")
    yield server
    server.discard()


@pytest.fixture
async def server(mortal: Server) -> Server:
    """A server with a database of the test's own."""
    await mortal.make_database()
    return mortal


class Load:
    """Submits and completions without end, with a record of what was acknowledged and what went wrong."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.created: set[str] = set()
        self.completed: set[str] = set()
        self.errors: list[EngineError] = []
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        work = [self._submit] * 6 + [self._finish_one_by_one] * 2 + [self._finish_together] * 2
        self._tasks = [asyncio.create_task(self._go_on(step, at)) for at, step in enumerate(work)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        async with asyncio.timeout(30):
            await asyncio.gather(*self._tasks)

    async def _go_on(self, step: Any, at: int) -> None:
        while not self._is_over:
            try:
                await step(at)
            except EngineError as refused:
                self.errors.append(refused)
                await asyncio.sleep(0.01)

    async def _submit(self, at: int) -> None:
        made = await self._engine.create_execution(
            namespace="tests",
            lane_id="default",
            execution_kind="job",
            input_payload=b"{}",
            priority=0,
            creator_identity="test",
            idempotency_key=f"{at} {len(self.created)}" if at % 2 else None,
        )
        if isinstance(made, Created):
            self.created.add(made.execution_id)

    async def _claim(self, at: int) -> list[Any]:
        name = f"worker-{at}"
        return list(
            await self._engine.claim_many(
                lanes=("default",), worker_id=name, worker_instance_id=name, limit=20, max_wait_ms=100
            )
        )

    async def _finish_one_by_one(self, at: int) -> None:
        claimed = await self._claim(at)
        answers = await asyncio.gather(
            *(self._engine.complete(one.handle, one.execution_id.encode()) for one in claimed), return_exceptions=True
        )
        for one, answer in zip(claimed, answers, strict=True):
            if answer is None:
                self.completed.add(one.execution_id)
            elif isinstance(answer, EngineError):
                self.errors.append(answer)
            else:
                raise answer

    async def _finish_together(self, at: int) -> None:
        claimed = await self._claim(at)
        if claimed:
            items = [(one.handle, one.execution_id.encode()) for one in claimed]
            for one, answer in zip(claimed, await self._engine.complete_many(items), strict=True):
                if isinstance(answer, Completed):
                    self.completed.add(one.execution_id)
                else:
                    self.errors.append(answer)

    def has_done(self, count: int) -> Any:
        """Whether so many more of both have been acknowledged, from now on."""
        created, completed = len(self.created) + count, len(self.completed) + count
        return lambda: len(self.created) >= created and len(self.completed) >= completed


async def kept(url: str) -> tuple[dict[str, str], dict[str, bytes], Counter[str]]:
    """The states, the results and the number of endings told, of every execution in the store."""
    connection = await asyncpg.connect(url, server_settings={"search_path": "flowfabric"})
    try:
        states = "select '{fp:' || partition_key || '}:' || execution_id as id, public_state as state from execution"
        results = (
            "select '{fp:' || partition_key || '}:' || execution_id as id, result_payload as result from execution"
        )
        endings = (
            "select '{fp:' || partition_key || '}:' || execution_id as id from event_each where outcome is not null"
        )
        return (
            {row["id"]: row["state"] for row in await connection.fetch(states)},
            {row["id"]: row["result"] for row in await connection.fetch(results)},
            Counter(row["id"] for row in await connection.fetch(endings)),
        )
    finally:
        await connection.close()


async def check(url: str, load: Load) -> None:
    """What was acknowledged is there, and nothing went wrong but the connection."""
    states, results, endings = await kept(url)
    assert load.created - states.keys() == set()
    assert {execution_id for execution_id in load.completed if states[execution_id] != "completed"} == set()
    assert all(results[execution_id] == execution_id.encode() for execution_id in load.completed)
    # A completion whose answer was lost is there too; each is told once.
    assert endings == {execution_id: 1 for execution_id, state in states.items() if state == "completed"}
    wrong = [error for error in load.errors if not isinstance(error, TransportError) or not error.retryable]
    assert wrong == []
    codes = {error.code for error in load.errors}
    assert "transport" in codes
    # The server refuses connections while it starts.
    assert codes <= {"transport", "busy_loading"}


async def test_a_killed_server_loses_nothing_that_was_acknowledged(server: Server, eventually: Eventually) -> None:
    settings = Settings(database_url=server.url, migrate_on_start=True)
    async with Engine.connect(settings=settings) as engine:
        async with Load(engine) as load:
            for _ in range(3):
                await eventually(load.has_done(150))
                failed = len(load.errors)
                server.kill()
                await eventually(lambda failed=failed: len(load.errors) > failed)
                await server.start_again()
            await eventually(load.has_done(150))
        await check(server.url, load)
        await engine.ping()


async def test_a_killed_session_takes_the_others_down_and_nothing_with_it(
    server: Server, eventually: Eventually
) -> None:
    settings = Settings(database_url=server.url, migrate_on_start=True)
    async with Engine.connect(settings=settings) as engine:
        async with Load(engine) as load:
            for _ in range(3):
                await eventually(load.has_done(150))
                failed = len(load.errors)
                # The server ends every session when one dies, recovers, and comes back by itself.
                connection = await asyncpg.connect(server.url)
                query = "select pid from pg_stat_activity where application_name = 'flowfabric' limit 1"
                os.kill(await connection.fetchval(query), signal.SIGKILL)
                connection.terminate()
                await eventually(lambda failed=failed: len(load.errors) > failed)
            await eventually(load.has_done(150))
        await check(server.url, load)
        await engine.ping()


async def test_a_store_that_is_gone_is_a_retryable_error_of_every_call(server: Server) -> None:
    settings = Settings(database_url=server.url, migrate_on_start=True, submit_patience_ms=100)
    new: dict[str, Any] = {"namespace": "tests", "lane_id": "default", "execution_kind": "job", "priority": 0}
    new |= {"input_payload": b"", "creator_identity": "test"}
    claim: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    async with Engine.connect(settings=settings) as engine:
        for _ in range(3):
            made = await engine.create_execution(**new)
        handle = await engine.claim(**claim, lease_ttl_ms=600_000)
        assert handle is not None
        server.kill()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: engine.create_execution(**new),
            lambda: engine.create_execution(**new, idempotency_key="k", execution_id=made.execution_id),
            lambda: engine.claim(**claim),
            lambda: engine.claim(**claim, max_wait_ms=1000),
            lambda: engine.renew(handle),
            lambda: engine.renew_many([handle]),
            lambda: engine.progress(handle, percent=1),
            lambda: engine.complete(handle),
            lambda: engine.complete_many([(handle, None)]),
            lambda: engine.fail(handle, reason="x"),
            lambda: engine.cancel(handle, "x"),
            lambda: engine.cancel_execution(execution_id=made.execution_id, reason="x"),
            lambda: engine.read_execution_state(made.execution_id),
            lambda: engine.heartbeat_worker(worker_instance_id="w-1", namespace="tests"),
            lambda: engine.ping(),
        ]
        for call in calls * 2:
            with pytest.raises(TransportError) as caught:
                await call()
            assert (caught.value.code, caught.value.retryable) == ("transport", True)
        await server.start_again()
        await engine.complete(handle, b"after all")
        assert await engine.get_execution_result(handle.execution_id) == b"after all"
        assert await engine.claim(**claim) is not None


JOB: dict[str, Any] = {
    "namespace": "default",
    "lane_id": "default",
    "execution_kind": "work",
    "input_payload": b"{}",
    "priority": 0,
    "creator_identity": "test",
}


async def repeat_completion(engine: Engine) -> Callable[[], Awaitable[object]]:
    await engine.create_execution(**JOB)
    handle = await engine.claim(lane_id="default", worker_id="w", worker_instance_id="w1")
    assert handle is not None
    await engine.complete(handle, b"done")
    return lambda: engine.complete(handle, b"done")


async def repeat_cancel(engine: Engine) -> Callable[[], Awaitable[object]]:
    made = await engine.create_execution(**JOB)
    cancel: dict[str, Any] = {"execution_id": made.execution_id, "reason": "enough"}
    await engine.cancel_execution(**cancel)
    return lambda: engine.cancel_execution(**cancel)


async def repeat_key(engine: Engine) -> Callable[[], Awaitable[object]]:
    await engine.create_execution(**JOB, idempotency_key="once")
    return lambda: engine.create_execution(**JOB, idempotency_key="once")


async def repeat_id(engine: Engine) -> Callable[[], Awaitable[object]]:
    own = f"{{fp:7}}:{uuid4()}"
    await engine.create_execution(**JOB, execution_id=own)
    return lambda: engine.create_execution(**JOB, execution_id=own)


@pytest.mark.parametrize("prepare", [repeat_completion, repeat_cancel, repeat_key, repeat_id])
async def test_a_repeat_is_answered_when_the_synchronous_standby_has_what_it_repeats(
    server: Server, eventually: Eventually, prepare: Callable[[Engine], Awaitable[Callable[[], Awaitable[object]]]]
) -> None:
    """A primary that restarts shows commits that its standby never confirmed; a failover would lose them."""
    connection = await asyncpg.connect(server.url)

    async def require(standbys: str) -> None:
        await connection.execute(f"alter system set synchronous_standby_names = '{standbys}'")
        await connection.execute("select pg_reload_conf()")

        async def is_read() -> bool:
            return bool(await connection.fetchval("show synchronous_standby_names") == standbys)

        await eventually(is_read)

    waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep' and datname = current_database()"
    async with Engine.connect(settings=Settings(database_url=server.url, migrate_on_start=True)) as engine:
        repeat = await prepare(engine)
        await require("nobody")
        try:
            again = asyncio.ensure_future(repeat())
            await eventually(lambda: connection.fetchval(waiting))
            assert not again.done()
        finally:
            await require("")
        await again
    await connection.close()

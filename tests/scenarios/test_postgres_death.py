"""When Postgres is killed under load, everything acknowledged is kept, and the engine works again once it is back."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.state import all_cases, new, rounds
from fixtures import Eventually
from flowfabric import Context, Fabric
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.execution import Created
from flowfabric.model.lease import ClaimedExecution, Completed
from flowfabric.settings import Settings

from .killable import KillableServer, stored


@pytest.fixture
async def store(killable: KillableServer) -> str:
    """The address of a migrated database of the test's own on the server that can be killed."""
    return await killable.new_database()


class Load:
    """Concurrent submits and completions, with a record of what was acknowledged and which calls failed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.created: set[str] = set()
        self.completed: set[str] = set()
        self.errors: list[EngineError] = []
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        work = [self._submit] * 6 + [self._complete_one_by_one] * 2 + [self._complete_together] * 2
        self._tasks = [asyncio.create_task(self._repeat(step, at)) for at, step in enumerate(work)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        async with asyncio.timeout(30):
            await asyncio.gather(*self._tasks)

    async def _repeat(self, step: Callable[[int], Awaitable[None]], at: int) -> None:
        while not self._is_over:
            try:
                await step(at)
            except EngineError as failed:
                self.errors.append(failed)
                await asyncio.sleep(0.01)

    async def _submit(self, at: int) -> None:
        made = await self._engine.create_execution(
            **new(idempotency_key=f"{at} {len(self.created)}" if at % 2 else None)
        )
        if isinstance(made, Created):
            self.created.add(made.execution_id)

    async def _claim(self, at: int) -> list[ClaimedExecution]:
        name = f"worker-{at}"
        return list(
            await self._engine.claim_many(
                lanes=("default",), worker_id=name, worker_instance_id=name, limit=20, max_wait_ms=100
            )
        )

    async def _complete_one_by_one(self, at: int) -> None:
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

    async def _complete_together(self, at: int) -> None:
        claimed = await self._claim(at)
        if claimed:
            items = [(one.handle, one.execution_id.encode()) for one in claimed]
            for one, answer in zip(claimed, await self._engine.complete_many(items), strict=True):
                if isinstance(answer, Completed):
                    self.completed.add(one.execution_id)
                else:
                    self.errors.append(answer)

    def has_done(self, count: int) -> Callable[[], bool]:
        """Whether this many more submits, and as many completions, have been acknowledged from now on."""
        created, completed = len(self.created) + count, len(self.completed) + count
        return lambda: len(self.created) >= created and len(self.completed) >= completed


async def check_load(url: str, load: Load) -> None:
    """Check that everything acknowledged is stored and that calls failed only with errors of the connection."""
    states, results, ends = await stored(url)
    assert load.created - states.keys() == set()
    assert {execution_id for execution_id in load.completed if states[execution_id] != "completed"} == set()
    assert all(results[execution_id] == execution_id.encode() for execution_id in load.completed)
    # A completion whose answer was lost is stored too; each has one end event.
    assert ends == {execution_id: 1 for execution_id, state in states.items() if state == "completed"}
    wrong = [error for error in load.errors if not isinstance(error, TransportError) or not error.retryable]
    assert wrong == []
    codes = {error.code for error in load.errors}
    assert "transport" in codes
    # The server refuses connections while it starts.
    assert codes <= {"transport", "busy_loading"}


async def test_everything_acknowledged_survives_a_killed_server_and_a_killed_session(
    killable: KillableServer, store: str, eventually: Eventually
) -> None:
    async with Engine.connect(settings=Settings(database_url=store)) as engine:
        async with Load(engine) as load:
            for _ in rounds(2, whole=6):
                await eventually(load.has_done(100))
                failed = len(load.errors)
                killable.kill()
                await eventually(lambda failed=failed: len(load.errors) > failed)
                await killable.start_again()
                await eventually(load.has_done(100))
                failed = len(load.errors)
                # When one session dies, the server ends all others, recovers, and accepts connections again.
                await kill_session(store)
                await eventually(lambda failed=failed: len(load.errors) > failed)
            await eventually(load.has_done(100))
        await check_load(store, load)
        await engine.ping()


async def test_a_stream_and_its_reader_survive_a_killed_server(killable: KillableServer, store: str) -> None:
    fabric, is_enough = Fabric(store), asyncio.Event()

    @fabric.task
    async def write(ctx: Context) -> int:
        count = 0
        while not is_enough.is_set():
            await ctx.stream.write(str(count))
            count += 1
            await asyncio.sleep(0.001)
        return count

    async with fabric, fabric.worker(lease_ttl=60):
        run = await write.submit()
        found: list[str] = []
        async for frame in run.stream():
            found.append(frame.text)
            if len(found) in (100, 300):
                killable.kill()
                await killable.start_again()
            elif len(found) == 500:
                is_enough.set()
        count = await run.result(timeout=60)
    assert found == [str(number) for number in range(count)]


async def test_a_cursor_continues_when_a_killed_server_assigns_its_transaction_ids_again(
    killable: KillableServer, store: str
) -> None:
    """Ids of transactions that wrote nothing are not on disk."""
    # The server writes the next id to disk every 15 seconds; if it has done so just before, it assigns no id again.
    for _ in range(5):
        if await assigned_again(killable, store):
            return
    pytest.fail("the server has assigned no transaction id again")


async def assigned_again(killable: KillableServer, store: str) -> bool:
    """Check that cursors continue after a crash; return whether the server has assigned transaction ids again."""
    async with Engine.connect(settings=Settings(database_url=store)) as engine:
        await ended(engine)
        async with engine.subscribe_completion() as events:
            before = events.cursor
            first = await ended(engine)
            assert (await anext(events)).execution_id == first
            connection = await asyncpg.connect(store)
            for _ in range(500):
                highest = int(await connection.fetchval("select pg_current_xact_id()::text"))
            connection.terminate()
            async with engine.subscribe_completion() as late:
                saved = late.cursor
            killable.kill()
            await killable.start_again()
            made = [await ended_again(engine) for _ in range(5)]
            async with asyncio.timeout(60):
                assert [(await anext(events)).execution_id for _ in made] == made
        connection = await asyncpg.connect(store)
        next_id = int(await connection.fetchval("select pg_current_xact_id()::text"))
        await connection.close()
        for cursor, expected in ((before, [first, *made]), (saved, made)):
            async with engine.subscribe_completion(cursor) as resumed, asyncio.timeout(60):
                assert [(await anext(resumed)).execution_id for _ in expected] == expected
        return next_id < highest


async def ended(engine: Engine) -> str:
    """An execution that was cancelled before its first claim."""
    made = await engine.create_execution(**new())
    await engine.cancel_execution(execution_id=made.execution_id, reason="not wanted")
    return made.execution_id


async def ended_again(engine: Engine) -> str:
    """The same, as soon as the server answers."""
    while True:
        with contextlib.suppress(TransportError):
            return await ended(engine)
        await asyncio.sleep(0.01)


async def kill_session(url: str) -> None:
    """Kill the server process of one session of an engine."""
    connection = await asyncpg.connect(url)
    query = """select pid from pg_stat_activity
                where application_name = 'flowfabric' and datname = current_database() limit 1"""
    os.kill(await connection.fetchval(query), signal.SIGKILL)
    connection.terminate()


async def test_every_call_fails_with_a_retryable_error_while_the_server_is_dead(
    killable: KillableServer, store: str
) -> None:
    claim: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    async with Engine.connect(settings=Settings(database_url=store, submit_patience_ms=50)) as engine:
        for _ in range(3):
            made = await engine.create_execution(**new())
        handle = await engine.claim(**claim, lease_ttl_ms=600_000)
        assert handle is not None
        killable.kill()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "create": lambda: engine.create_execution(**new()),
            "create with ids": lambda: engine.create_execution(
                **new(idempotency_key="k", execution_id=made.execution_id)
            ),
            "claim": lambda: engine.claim(**claim),
            "waiting claim": lambda: engine.claim(**claim, max_wait_ms=1000),
            "renew": lambda: engine.renew(handle),
            "renew_many": lambda: engine.renew_many([handle]),
            "progress": lambda: engine.progress(handle, percent=1),
            "complete": lambda: engine.complete(handle),
            "complete_many": lambda: engine.complete_many([(handle, None)]),
            "fail": lambda: engine.fail(handle, reason="x"),
            "cancel": lambda: engine.cancel(handle, "x"),
            "cancel_execution": lambda: engine.cancel_execution(execution_id=made.execution_id, reason="x"),
            "read_execution_state": lambda: engine.read_execution_state(made.execution_id),
            "heartbeat_worker": lambda: engine.heartbeat_worker(worker_instance_id="w-1", namespace="tests"),
            "ping": engine.ping,
        }
        with all_cases() as case:
            # The first calls find dead connections in the pool, the later ones cannot connect.
            for time in ("first", "second"):
                for name, call in calls.items():
                    with case(f"{time} {name}"):
                        with pytest.raises(TransportError) as caught:
                            await call()
                        assert (caught.value.code, caught.value.retryable) == ("transport", True)
            await killable.start_again()
        await engine.complete(handle, b"after all")
        assert await engine.get_execution_result(handle.execution_id) == b"after all"
        assert await engine.claim(**claim) is not None


Repeat = Callable[[], Awaitable[object]]


async def repeated_completion(engine: Engine) -> Repeat:
    await engine.create_execution(**new())
    handle = await engine.claim(lane_id="default", worker_id="w", worker_instance_id="w1")
    assert handle is not None
    await engine.complete(handle, b"done")
    return lambda: engine.complete(handle, b"done")


async def repeated_cancellation(engine: Engine) -> Repeat:
    made = await engine.create_execution(**new())
    cancel: dict[str, Any] = {"execution_id": made.execution_id, "reason": "enough"}
    await engine.cancel_execution(**cancel)
    return lambda: engine.cancel_execution(**cancel)


async def repeated_key(engine: Engine) -> Repeat:
    await engine.create_execution(**new(idempotency_key="once"))
    return lambda: engine.create_execution(**new(idempotency_key="once"))


async def repeated_id(engine: Engine) -> Repeat:
    execution_id = f"{{fp:7}}:{uuid4()}"
    await engine.create_execution(**new(execution_id=execution_id))
    return lambda: engine.create_execution(**new(execution_id=execution_id))


class Replication:
    """Makes commits wait for a synchronous standby that does not exist."""

    def __init__(self, connection: asyncpg.Connection, probe: asyncpg.Connection, eventually: Eventually) -> None:
        self._connection = connection
        self._probe = probe
        self._eventually = eventually

    async def waiting(self) -> int:
        """How many sessions on this database wait for the standby."""
        query = "select count(*) from pg_stat_activity where wait_event = 'SyncRep' and datname = current_database()"
        count: int = await self._connection.fetchval(query)
        return count

    @asynccontextmanager
    async def without_standby(self) -> AsyncIterator[None]:
        """Let every commit wait during the block; one of a session of its own waits when the block starts."""
        await self._require("nobody")
        try:
            probing = await self._waiting_commit()
            yield
        finally:
            await self._require("")
        await probing

    async def _require(self, standbys: str) -> None:
        await self._connection.execute(f"alter system set synchronous_standby_names = '{standbys}'")
        await self._connection.execute("select pg_reload_conf()")

    async def _waiting_commit(self) -> asyncio.Future[object]:
        # Commits wait only after the checkpointer has read the setting, which sessions may see before.
        while True:
            commit: asyncio.Future[object] = asyncio.ensure_future(
                self._probe.execute("select pg_logical_emit_message(true, 'probe', '')")
            )

            async def has_waited(commit: asyncio.Future[object] = commit) -> bool:
                return commit.done() or await self.waiting() == 1

            await self._eventually(has_waited)
            if not commit.done():
                return commit


async def test_a_repeated_call_returns_only_when_the_synchronous_standby_has_the_first_one(
    store: str, eventually: Eventually
) -> None:
    """A restarted primary shows commits that its standby never confirmed; a failover would lose them."""
    connection, probe = await asyncpg.connect(store), await asyncpg.connect(store)
    replication = Replication(connection, probe, eventually)

    async def both_wait() -> bool:
        return await replication.waiting() == 2

    async with Engine.connect(settings=Settings(database_url=store)) as engine:
        with all_cases() as case:
            for prepare in (repeated_completion, repeated_cancellation, repeated_key, repeated_id):
                with case(prepare.__name__):
                    repeat = await prepare(engine)
                    async with replication.without_standby():
                        again = asyncio.ensure_future(repeat())
                        await eventually(both_wait, timeout=20)
                        assert not again.done()
                    await again
    await connection.close()
    await probe.close()

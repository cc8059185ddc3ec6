"""Real Postgres for every test: a server, a migrated database of the test's own, and a clock that can be moved.

`FF_TEST_POSTGRES` chooses the server: 18 (embedded, the default), 16 (embedded) or 15 (as Debian installs it).
`FF_TEST_DATABASE_URL` names a server that runs already; databases are created on it and dropped again.
`FF_TEST_SWEEP=whole` runs every case of the sweeps in `tests/faults` and every round of the races; `FF_TEST_SEED`
chooses the samples otherwise.
`FF_TEST_PGBOUNCER` names a PgBouncer other than the installed one.
"""

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import asyncpg
import pytest

from databases import Databases
from flowfabric.db import session as sessions
from flowfabric.engine.core.watermark import WalkWatermarks
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Created
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import ClaimedExecution
from flowfabric.settings import Settings
from servers import served
from sessions import SCHEMA, SESSIONS, session

Answer = TypeVar("Answer")

# A store that is not embedded starts with the first signing key only where it is told one; processes inherit it.
os.environ["FF_WAITPOINT_HMAC_SECRET"] = "ab" * 32


# The server.


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of the server of this process."""
    if given := os.environ.get("FF_TEST_DATABASE_URL"):
        yield given
        return
    with served(int(os.environ.get("FF_TEST_POSTGRES", "18"))) as url:
        yield url


# What every test leaves behind: nothing.


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> None:
    function = getattr(request, "function", None)
    if function is not None and inspect.iscoroutinefunction(function):
        request.getfixturevalue("_leaves_no_task")


@pytest.fixture
async def _leaves_no_task() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    # A task that was told to end may need a turn of the loop to do so.
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert not left, f"the test left tasks running: {left}"


@pytest.fixture
async def one_thread() -> AsyncIterator[ThreadPoolExecutor]:
    """The only thread that the event loop has for calls that block, until the test ends."""
    loop: Any = asyncio.get_running_loop()
    usual = loop._default_executor
    with ThreadPoolExecutor(1) as threads:
        loop.set_default_executor(threads)
        yield threads
    loop._default_executor = usual


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Keep for the next test what this one closes."""
    SESSIONS.parks = True
    try:
        yield
    finally:
        SESSIONS.parks = False


@pytest.fixture(scope="session")
async def databases(server: str) -> AsyncIterator[Databases]:
    """The databases of this process."""
    async with Databases.on(server) as databases:
        yield databases


@pytest.fixture
def alteration() -> str:
    """What the database of the test is altered by; a module whose tests all need the same overrides it."""
    return ""


@pytest.fixture
def fresh_database() -> None:
    """No test before has used the database of this one: its tables have held no rows, and no session has a plan yet."""


@pytest.fixture
async def url(
    request: pytest.FixtureRequest, _leaves_no_task: None, databases: Databases, alteration: str
) -> AsyncIterator[str]:
    """The address of a migrated database of the test's own; no session may be left on it."""
    async with databases.one(alteration=alteration, fresh="fresh_database" in request.fixturenames) as url:
        yield url


@pytest.fixture
async def empty_url(_leaves_no_task: None, databases: Databases) -> AsyncIterator[str]:
    """The address of an empty database of the test's own; no session may be left on it."""
    async with databases.new(migrated=False) as url:
        yield url


# What a test works with.


@pytest.fixture
async def connection(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session of the test's own on its database."""
    connection = await session(url, "test")
    yield connection
    await connection.close()


Engines = Callable[..., Awaitable[Engine]]


@pytest.fixture
async def engines(url: str) -> AsyncIterator[Engines]:
    """Open any number of engines on the test's database: `await engines(retention_ms=1000)`; they close with it."""
    async with AsyncExitStack() as stack:

        async def open_engine(**settings: Any) -> Engine:
            return await stack.enter_async_context(Engine.connect(settings=Settings(database_url=url, **settings)))

        yield open_engine


@pytest.fixture
async def engine(engines: Engines) -> Engine:
    """An engine on the test's database."""
    return await engines()


@pytest.fixture
def patient_with_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened from now on waits for a row held elsewhere as long as a test holds it."""
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "100s")
    monkeypatch.setenv("FF_STATEMENT_TIMEOUT_MS", "100000")


@pytest.fixture
def lasting_watermarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks of queues last as long as a test; where they end, a claim walks the entries of claimed rows again."""
    monkeypatch.setattr(WalkWatermarks, "LIFE_SECONDS", 3600)


@pytest.fixture
async def keyless(engines: Engines, connection: asyncpg.Connection) -> Engine:
    """An engine whose store has no signing key; no operation leaves it so."""
    engine = await engines()
    await connection.execute("delete from signing_key")
    return engine


class Clock:
    """The clock of the test's database: it goes on by itself, and further where a test says so."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def advance(self, *, seconds: float = 0, ms: int = 0) -> int:
        """Move the clock on and give the new time in milliseconds."""
        moved = round(seconds * 1000) + ms
        await self._connection.execute("update test_clock set offset_ms = offset_ms + $1", moved)
        return await self.now()

    async def stop(self) -> None:
        """Let the clock stand still from now on: nothing lapses but by a test's word, however slow the machine is."""
        await self._connection.execute("update test_clock set offset_ms = ff_now(), stands = true")

    async def now(self) -> int:
        """The time in milliseconds."""
        now: int = await self._connection.fetchval("select ff_now()")
        return now


@pytest.fixture
async def clock(url: str) -> AsyncIterator[Clock]:
    """Move time instead of sleeping: `await clock.advance(seconds=31)`."""
    connection = await session(url, "test clock")
    yield Clock(connection)
    await connection.close()


class Rows:
    """What the tables of the test's database hold."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def of(self, table: str, **where: object) -> list[dict[str, Any]]:
        """The rows of a table whose columns have these values, in no particular order."""
        condition = " and ".join(f"{column} is not distinct from ${nth}" for nth, column in enumerate(where, 1))
        query = f'select * from "{table}"' + (f" where {condition}" if where else "")
        return [dict(row) for row in await self._connection.fetch(query, *where.values())]

    async def execution(self, execution_id: ExecutionId) -> dict[str, Any]:
        """An execution, with what its row leaves to be derived."""
        (row,) = await self.of("execution_detail", execution_id=execution_id[-36:])
        return row

    async def timers(self, execution_id: ExecutionId) -> dict[str, int]:
        """The timers of an execution that run, and when each is due."""
        found = await self.of("timer", execution_id=execution_id[-36:])
        return {row["kind"]: row["due_at"] for row in found}

    async def events(self, execution_id: ExecutionId) -> list[dict[str, Any]]:
        """The events of an execution in their order."""
        found = await self.of("event_each", execution_id=execution_id[-36:])
        return sorted(found, key=lambda row: int(row["event_id"]))

    async def snapshot(self, *, without: Iterable[str] = ()) -> dict[str, list[str]]:
        """Every row of every table as text, sorted."""
        every = await self._connection.fetchval(
            """select string_agg(format('select %1$L, array(select t::text from %1$I t order by 1)', relname),
                                 ' union all ')
                 from pg_class where relnamespace = $1::text::regnamespace and relkind in ('r', 'p')
                  and not relispartition and relname <> all($2::text[])""",
            SCHEMA,
            ["test_clock", "test_change", *without],
        )
        return dict(await self._connection.fetch(every))

    @asynccontextmanager
    async def unchanged(self, *, without: Iterable[str] = ()) -> AsyncIterator[None]:
        """Fail when any row of any table has changed at the end of the block."""
        before = await self.snapshot(without=without)
        yield
        assert await self.snapshot(without=without) == before


@pytest.fixture
async def rows(url: str) -> AsyncIterator[Rows]:
    """Look into the tables: `async with rows.unchanged(): ...`, `await rows.of("event_each", kind=3)`."""
    connection = await session(url, "test rows")
    yield Rows(connection)
    await connection.close()


class Given:
    """Reaches the starting point of a test through real operations; what is not said has a default."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock

    async def created(self, **overrides: Any) -> ExecutionId:
        """A new execution on the lane `default`; the overrides are arguments of create_execution."""
        made = await self.engine.create_execution(
            **{
                "namespace": "tests",
                "lane_id": "default",
                "execution_kind": "job",
                "input_payload": b'{"a": 1}',
                "priority": 0,
                "creator_identity": "test",
                **overrides,
            }
        )
        assert isinstance(made, Created), made
        return made.execution_id

    async def run(
        self, *, worker: str = "worker", lease_ttl_ms: int = 30_000, capabilities: Iterable[str] = (), **overrides: Any
    ) -> ClaimedExecution:
        """A new execution that a worker has claimed."""
        execution_id = await self.created(**overrides)
        claimed = await self.claim(
            worker=worker,
            lease_ttl_ms=lease_ttl_ms,
            capabilities=capabilities,
            lane_id=overrides.get("lane_id", "default"),
        )
        assert claimed.execution_id == execution_id, "the lane held work that is claimed before the new execution"
        return claimed

    async def claim(
        self,
        *,
        worker: str = "worker",
        lease_ttl_ms: int = 30_000,
        capabilities: Iterable[str] = (),
        lane_id: str = "default",
    ) -> ClaimedExecution:
        """The next execution of a lane, claimed by a worker."""
        (claimed,) = await self.engine.claim_many(
            lanes=(lane_id,),
            worker_id=worker,
            worker_instance_id=f"{worker}-1",
            capabilities=tuple(capabilities),
            lease_ttl_ms=lease_ttl_ms,
            limit=1,
        )
        return claimed

    async def claimed(self, **overrides: Any) -> Handle:
        """The handle of a new execution that a worker has claimed."""
        return (await self.run(**overrides)).handle

    async def completed(self, *, result: bytes | None = b"done", **overrides: Any) -> ExecutionId:
        """An execution that ended in success."""
        handle = await self.claimed(**overrides)
        await self.engine.complete(handle, result)
        return handle.execution_id

    async def failed(self, *, reason: str = "no luck", **overrides: Any) -> ExecutionId:
        """An execution whose only attempt failed."""
        handle = await self.claimed(**overrides)
        await self.engine.fail(handle, reason=reason, classification="permanent")
        return handle.execution_id

    async def cancelled(self, **overrides: Any) -> ExecutionId:
        """An execution that was cancelled before anybody claimed it."""
        execution_id = await self.created(**overrides)
        await self.engine.cancel_execution(execution_id=execution_id, reason="not wanted")
        return execution_id

    async def delayed(self, *, seconds: float = 60, **overrides: Any) -> ExecutionId:
        """An execution that becomes claimable so much later."""
        return await self.created(delay_until=await self.clock.now() + round(seconds * 1000), **overrides)

    async def backing_off(self, *, delay_ms: int = 60_000, max_retries: int = 3, **overrides: Any) -> Handle:
        """The handle of a failed attempt whose execution waits for its retry."""
        retry = {"max_retries": max_retries, "backoff": {"type": "fixed", "delay_ms": delay_ms}}
        policy = {**overrides.pop("policy", {}), "retry_policy": retry}
        handle = await self.claimed(policy=policy, **overrides)
        await self.engine.fail(handle, reason="no luck")
        return handle

    async def expired_lease(self, *, lease_ttl_ms: int = 30_000, **overrides: Any) -> Handle:
        """A handle whose lease has run out and is not marked yet."""
        handle = await self.claimed(lease_ttl_ms=lease_ttl_ms, **overrides)
        await self.clock.advance(ms=lease_ttl_ms + 1)
        return handle

    async def reclaimable(self, **overrides: Any) -> Handle:
        """A handle whose lease has run out and is marked: the next claim takes its execution."""
        handle = await self.expired_lease(**overrides)
        assert await self.engine.lease_expiry.mark_expired([handle.execution_id]) == 1
        return handle

    async def registered(
        self, *, worker_instance_id: str = "worker-1", liveness_ttl_ms: int = 60_000, **overrides: Any
    ) -> str:
        """A live worker of the registry."""
        await self.engine.register_worker(
            **{
                "worker_id": "worker",
                "worker_instance_id": worker_instance_id,
                "lanes": ("default",),
                "liveness_ttl_ms": liveness_ttl_ms,
                "namespace": "tests",
                **overrides,
            }
        )
        return worker_instance_id


@pytest.fixture
async def given(engine: Engine, clock: Clock) -> Given:
    """Starting points: `handle = await given.claimed(lease_ttl_ms=1000)`."""
    return Given(engine, clock)


Eventually = Callable[..., Awaitable[Any]]


@pytest.fixture
def eventually() -> Eventually:
    """Wait for what happens by itself: `await eventually(lambda: stats.processed == 1)`."""

    async def eventually(holds: Callable[[], Any], *, timeout: float = 60) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            answer = holds()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            assert time.monotonic() < deadline, f"did not happen within {timeout} s"
            await asyncio.sleep(0.01)

    return eventually

"""Real Postgres for every test: one server, one migrated template, a copy of it for each test, and a movable clock.

`FF_TEST_POSTGRES` chooses the server: 18 (embedded, the default), 16 (embedded) or 15 (as Debian installs it).
`FF_TEST_DATABASE_URL` names a server that runs already; databases are created on it and dropped again.
"""

import asyncio
import inspect
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from flowfabric.db.embedded import Embedded
from flowfabric.db.migrate import migrate
from flowfabric.engine.engine import Engine
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import ClaimedExecution, Created
from flowfabric.settings import Settings

Answer = TypeVar("Answer")

SCHEMA = "flowfabric"
DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")

# Nothing of a test outlives it, so nothing is worth a flush; a crash test has a server of its own.
_CARELESS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "autovacuum": "off"}

_MOVABLE_CLOCK = f"""
set search_path to {SCHEMA};
create table test_clock (offset_ms bigint not null);
insert into test_clock values (0);
create or replace function ff_now() returns bigint language sql volatile parallel safe
  return (extract(epoch from clock_timestamp()) * 1000)::bigint + (select offset_ms from test_clock);
"""


# The server and the template.


def _run(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Run async work from a sync fixture; in a thread, so that the loop of the tests is left alone."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _execute(url: str, *commands: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for command in commands:
            await connection.execute(command)
    finally:
        await connection.close()


def _at_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


@contextmanager
def _debian_15() -> Iterator[str]:
    """A server on the binaries of Debian's package, as a user who is not root."""
    if not DEBIAN_15.exists():
        pytest.exit(f"FF_TEST_POSTGRES=15 needs {DEBIAN_15}: install the package postgresql-15", 2)
    user = "postgres" if os.geteuid() == 0 else None
    place = Path(tempfile.mkdtemp(prefix="ff-15-", dir="/tmp"))
    if user:
        shutil.chown(place, user)
    data = place / "data"

    def tool(name: str, *arguments: str) -> None:
        # The server inherits what it writes to, and a pipe would not end before it does.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [str(DEBIAN_15 / name), *arguments],
                cwd=place,
                stdout=output,
                stderr=output,
                user=user,
                extra_groups=[] if user else None,
                check=False,
            )
            output.seek(0)
            assert done.returncode == 0, output.read().decode(errors="replace")

    try:
        options = ("--username", "postgres", "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync")
        tool("initdb", *options, "--pgdata", str(data))
        start = ("start", "-w", "-D", str(data), "-l", str(place / "log"), "-o", f"-h '' -k '{place}' -N 200")
        tool("pg_ctl", *start)
        try:
            yield f"postgresql://postgres@/postgres?host={place}"
        finally:
            tool("pg_ctl", "stop", "-m", "immediate", "-w", "-D", str(data))
    finally:
        shutil.rmtree(place)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the server of this run, which the processes of a run share."""
    if given := os.environ.get("FF_TEST_DATABASE_URL"):
        yield given
        return
    careless = [f"alter system set {name} = {value}" for name, value in _CARELESS.items()]
    version = int(os.environ.get("FF_TEST_POSTGRES", "18"))
    if version == 15:
        with _debian_15() as url:
            _run(_execute(url, *careless, "select pg_reload_conf()"))
            yield url
        return
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    embedded = Embedded.start(root / "server", version=version)
    try:
        _run(_execute(embedded.url, *careless, "select pg_reload_conf()"))
        yield embedded.url
    finally:
        embedded.release(discard=True)


@pytest.fixture(scope="session")
def template(server: str) -> Iterator[str]:
    """The name of a migrated database whose clock can be moved."""
    name = f"ff_template_{uuid4().hex}"

    async def make() -> None:
        await _execute(server, f"create database {name}")
        connection = await asyncpg.connect(_at_database(server, name))
        try:
            await migrate(connection, schema=SCHEMA)
            await connection.execute(_MOVABLE_CLOCK)
        finally:
            await connection.close()

    _run(make())
    yield name
    _run(_execute(server, f"drop database {name} with (force)"))


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
    assert not left, f"the test left tasks running: {left}"


async def _others(connection: asyncpg.Connection, database: str) -> list[str]:
    query = """select coalesce(application_name, '') || ' ' || state || ': ' || query from pg_stat_activity
                where datname = $1 and pid <> pg_backend_pid() and backend_type = 'client backend'
               union all select 'prepared transaction ' || gid from pg_prepared_xacts where database = $1"""
    return [row[0] for row in await connection.fetch(query, database)]


@asynccontextmanager
async def _database(server: str, options: str) -> AsyncIterator[str]:
    name = f"ff_test_{uuid4().hex}"
    connection = await asyncpg.connect(server)
    try:
        await connection.execute(f"create database {name} {options}")
        yield _at_database(server, name)
        # A closed session takes a moment to leave the server's list.
        for _ in range(200):
            left = await _others(connection, name)
            if not left:
                break
            await asyncio.sleep(0.01)
        await connection.execute(f"drop database {name} with (force)")
        assert not left, f"the test left sessions open: {left}"
    finally:
        await connection.close()


@pytest.fixture
async def url(_leaves_no_task: None, server: str, template: str) -> AsyncIterator[str]:
    """The address of a migrated database of the test's own; no session may be left on it."""
    async with _database(server, f"template {template} strategy file_copy") as url:
        yield url


@pytest.fixture
async def empty_url(_leaves_no_task: None, server: str) -> AsyncIterator[str]:
    """The address of an empty database of the test's own; no session may be left on it."""
    async with _database(server, "strategy file_copy") as url:
        yield url


# What a test works with.


async def _session(url: str, name: str) -> asyncpg.Connection:
    return await asyncpg.connect(url, server_settings={"search_path": SCHEMA, "application_name": name})


@pytest.fixture
async def connection(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session of the test's own on its database."""
    connection = await _session(url, "test")
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


class Clock:
    """The clock of the test's database: it goes on by itself, and further where a test says so."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def advance(self, *, seconds: float = 0, ms: int = 0) -> int:
        """Move the clock on and give the new time in milliseconds."""
        moved = round(seconds * 1000) + ms
        await self._connection.execute("update test_clock set offset_ms = offset_ms + $1", moved)
        return await self.now()

    async def now(self) -> int:
        """The time in milliseconds."""
        now: int = await self._connection.fetchval("select ff_now()")
        return now


@pytest.fixture
async def clock(url: str) -> AsyncIterator[Clock]:
    """Move time instead of sleeping: `await clock.advance(seconds=31)`."""
    connection = await _session(url, "test clock")
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
        """The one row of an execution."""
        (row,) = await self.of("execution", execution_id=execution_id[-36:])
        return row

    async def events(self, execution_id: ExecutionId) -> list[dict[str, Any]]:
        """The events of an execution in their order."""
        found = await self.of("event", execution_id=execution_id[-36:])
        return sorted(found, key=lambda row: int(row["event_id"]))

    async def snapshot(self, *, without: Iterable[str] = ()) -> dict[str, list[str]]:
        """Every row of every table as text, sorted."""
        async with self._connection.transaction(isolation="repeatable_read", readonly=True):
            tables = await self._connection.fetch(
                """select relname from pg_class where relnamespace = $1::text::regnamespace and relkind in ('r', 'p')
                    and not relispartition and relname <> all($2::text[]) order by 1""",
                SCHEMA,
                ["test_clock", *without],
            )
            return {
                name: sorted(row[0] for row in await self._connection.fetch(f'select t::text from "{name}" t'))
                for (name,) in tables
            }

    @asynccontextmanager
    async def unchanged(self, *, without: Iterable[str] = ()) -> AsyncIterator[None]:
        """Fail when any row of any table has changed at the end of the block."""
        before = await self.snapshot(without=without)
        yield
        assert await self.snapshot(without=without) == before


@pytest.fixture
async def rows(url: str) -> AsyncIterator[Rows]:
    """Look into the tables: `async with rows.unchanged(): ...`, `await rows.of("event", kind=3)`."""
    connection = await _session(url, "test rows")
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
        assert await self.engine.leases.mark_lapsed([handle.execution_id]) == 1
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
    """Wait for what happens by itself: `await eventually(lambda: stats.processed == 1, timeout=5)`."""

    async def eventually(holds: Callable[[], Any], *, timeout: float = 10) -> Any:
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

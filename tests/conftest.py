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
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from databases import Databases
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.db import session as sessions
from flowfabric.engine.core.watermark import ScanWatermarks
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings
from servers import served
from sessions import SESSIONS, session

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
    monkeypatch.setattr(ScanWatermarks, "LIFE_SECONDS", 3600)


@pytest.fixture
async def keyless(engines: Engines, connection: asyncpg.Connection) -> Engine:
    """An engine whose store has no signing key; no operation leaves it so."""
    engine = await engines()
    await connection.execute("delete from signing_key")
    return engine


@pytest.fixture
async def clock(url: str) -> AsyncIterator[Clock]:
    """Move time instead of sleeping: `await clock.advance(seconds=31)`."""
    connection = await session(url, "test clock")
    yield Clock(connection)
    await connection.close()


@pytest.fixture
async def rows(url: str) -> AsyncIterator[Rows]:
    """Look into the tables: `async with rows.unchanged(): ...`, `await rows.of("event_each", kind=3)`."""
    connection = await session(url, "test rows")
    yield Rows(connection)
    await connection.close()


@pytest.fixture
async def given(engine: Engine, clock: Clock) -> Given:
    """Starting points: `handle = await given.claimed(lease_ttl_ms=1000)`."""
    return Given(engine, clock)


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

"""Real Postgres for every test: a server, a migrated database for the test alone, and a clock that can be moved.

`FF_TEST_POSTGRES` chooses the server: 18 (embedded, the default), 16 (embedded) or 15 (as Debian installs it).
`FF_TEST_DATABASE_URL` is the URL of a running server; databases are created on it and dropped again.
`FF_TEST_SWEEP=whole` runs every case of the sweeps in `tests/faults` and every round of the races; `FF_TEST_SEED`
chooses the samples otherwise. `FF_TEST_EXAMPLES=1000` runs so many new examples of the tests that compare the engine
with a model.
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

# A store that is not embedded needs a configured signing key; processes that tests start inherit it.
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


# No test may leave tasks or sessions behind.


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> None:
    function = getattr(request, "function", None)
    if function is not None and inspect.iscoroutinefunction(function):
        request.getfixturevalue("_leaves_no_task")


@pytest.fixture
async def _leaves_no_task() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    # A cancelled task may need one more turn of the event loop to end.
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert not left, f"the test left tasks running: {left}"


@pytest.fixture
async def one_thread() -> AsyncIterator[ThreadPoolExecutor]:
    """The only thread of the event loop's executor until the test ends."""
    loop: Any = asyncio.get_running_loop()
    previous = loop._default_executor
    with ThreadPoolExecutor(1) as threads:
        loop.set_default_executor(threads)
        yield threads
    loop._default_executor = previous


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Keep the sessions that the fixtures of this test close, for the next test."""
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
    """SQL that alters the database of the test; a module overrides it if all of its tests need the same alteration."""
    return ""


@pytest.fixture
def fresh_database() -> None:
    """Mark a test whose database no test has used before: its tables never held rows, and no session has plans."""


@pytest.fixture
async def url(
    request: pytest.FixtureRequest, _leaves_no_task: None, databases: Databases, alteration: str
) -> AsyncIterator[str]:
    """The address of a migrated database for this test alone; the test may leave no session open on it."""
    async with databases.one(alteration=alteration, fresh="fresh_database" in request.fixturenames) as url:
        yield url


@pytest.fixture
async def empty_url(_leaves_no_task: None, databases: Databases) -> AsyncIterator[str]:
    """The address of an empty database for this test alone; the test may leave no session open on it."""
    async with databases.new(migrated=False) as url:
        yield url


# The fixtures of tests.


@pytest.fixture
async def connection(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session on the test's database."""
    connection = await session(url, "test")
    yield connection
    await connection.close()


@pytest.fixture
async def engines(url: str) -> AsyncIterator[Engines]:
    """Open engines on the test's database: `await engines(retention_ms=1000)`; they are closed after the test."""
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
    """Let sessions opened from now on wait for a locked row as long as a test locks it."""
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "100s")
    monkeypatch.setenv("FF_STATEMENT_TIMEOUT_MS", "100000")


@pytest.fixture
def lasting_watermarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watermarks of queues last as long as a test; otherwise claims would scan dead entries again."""
    monkeypatch.setattr(ScanWatermarks, "LIFE_SECONDS", 3600)


@pytest.fixture
def scans_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a claim that finds nothing do a full scan again, however slow the machine is."""
    monkeypatch.setattr(ScanWatermarks, "FREE_SECONDS", 600.0)


@pytest.fixture
async def keyless(engines: Engines, connection: asyncpg.Connection) -> Engine:
    """An engine whose store has no signing key, which no operation can bring about."""
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
    """Read the tables: `async with rows.unchanged(): ...`, `await rows.of("event_each", kind=3)`."""
    connection = await session(url, "test rows")
    yield Rows(connection)
    await connection.close()


@pytest.fixture
async def given(engine: Engine, clock: Clock) -> Given:
    """Starting points: `handle = await given.claimed(lease_ttl_ms=1000)`."""
    return Given(engine, clock)


@pytest.fixture
def eventually() -> Eventually:
    """Wait until a condition holds: `await eventually(lambda: stats.processed == 1)`."""

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

"""What a pooler between a process and its server must do: serve several sessions, and keep prepared statements."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg

from flowfabric.db.database import Connection
from flowfabric.db.session import close

TRIES = 3
WAIT_SECONDS = 2.0
"""How long a session may wait for one of the server's connections."""
CLOSE_SECONDS = 2

_LOST = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
_LOSES = (
    "prepared statements are lost between transactions: a pooler in transaction mode does not keep them; use PgBouncer"
    " 1.21 or newer with max_prepared_statements = 200, or session mode, see docs/pgbouncer.md"
)
_STARVES = (
    f"a second session gets no answer within {WAIT_SECONDS:g} s: a pooler has too few connections to the server; raise"
    " default_pool_size, see docs/pgbouncer.md"
)

Connect = Callable[[], Awaitable[Connection]]


async def pooler_problem(connect: Connect) -> str | None:
    """What keeps a process from working through whatever answers these connections, and what to do."""
    async with _session(connect) as first, _session(connect) as second:
        try:
            statement = await first.prepare("select 1", timeout=WAIT_SECONDS)
            for _ in range(TRIES):
                await statement.fetchval(timeout=WAIT_SECONDS)
                # Takes the session of the server that a pooler in transaction mode had lent to the first.
                await second.execute("begin", timeout=WAIT_SECONDS)
                try:
                    await statement.fetchval(timeout=WAIT_SECONDS)
                except TimeoutError:
                    # One session has to wait until the other ends its transaction: slow, but nothing is lost.
                    return None
                await second.execute("commit", timeout=WAIT_SECONDS)
        except _LOST:
            return _LOSES
        except TimeoutError:
            return _STARVES
    return None


@asynccontextmanager
async def _session(connect: Connect) -> AsyncIterator[Connection]:
    connection = await connect()
    try:
        yield connection
    finally:
        await close(connection, seconds=CLOSE_SECONDS)

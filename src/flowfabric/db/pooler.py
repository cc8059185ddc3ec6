"""A check that a connection pooler serves several sessions and keeps prepared statements."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg

from flowfabric.db.database import Connection
from flowfabric.db.session import close

TRIES = 3
WAIT_SECONDS = 2.0
"""How long a session may wait until the pooler gives it a server connection."""
CLOSE_SECONDS = 2

_STATEMENT_LOST = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
_LOSES_STATEMENTS = (
    "prepared statements are lost between transactions: a pooler in transaction mode does not keep them; use PgBouncer"
    " 1.21 or newer with max_prepared_statements = 400, or session mode, see docs/pgbouncer.md"
)
_TOO_FEW_CONNECTIONS = (
    f"a second session gets no answer within {WAIT_SECONDS:g} s: a pooler has too few connections to the server; raise"
    " default_pool_size, see docs/pgbouncer.md"
)

Connect = Callable[[], Awaitable[Connection]]


async def pooler_problem(connect: Connect) -> str | None:
    """Return why a process cannot work through these connections and what to do, or None if it can."""
    async with _session(connect) as first, _session(connect) as second:
        try:
            statement = await first.prepare("select 1", timeout=WAIT_SECONDS)
            for _ in range(TRIES):
                await statement.fetchval(timeout=WAIT_SECONDS)
                # A pooler in transaction mode now gives the first session's server connection to the second one.
                await second.execute("begin", timeout=WAIT_SECONDS)
                try:
                    await statement.fetchval(timeout=WAIT_SECONDS)
                except TimeoutError:
                    # The pooler has one server connection, so sessions wait for each other: slow, but correct.
                    return None
                await second.execute("commit", timeout=WAIT_SECONDS)
        except _STATEMENT_LOST:
            return _LOSES_STATEMENTS
        except TimeoutError:
            return _TOO_FEW_CONNECTIONS
    return None


@asynccontextmanager
async def _session(connect: Connect) -> AsyncIterator[Connection]:
    connection = await connect()
    try:
        yield connection
    finally:
        await close(connection, seconds=CLOSE_SECONDS)

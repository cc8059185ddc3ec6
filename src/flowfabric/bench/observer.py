"""A connection beside the measured subject: it analyzes tables and reads statistics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from flowfabric.bench.api import Statement, statements_beside

SQL = statements_beside(__file__)


class Observer:
    """A connection of the benchmark to the database of a subject."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, sql: str) -> None:
        """Run SQL without parameters, such as the schema of a peer."""
        await self._connection.execute(sql)

    async def analyze(self) -> None:
        """Update the planner statistics, as autovacuum would."""
        await self._connection.execute(SQL.analyze.sql)

    async def vacuum(self) -> None:
        """Vacuum and analyze, as autovacuum would, so that index-only scans need not read the table."""
        await self._connection.execute(SQL.vacuum.sql)

    async def ask(self, statement: Statement, *arguments: object) -> bool:
        """The boolean result of a statement with these arguments, in the order of its parameters."""
        return bool(await self._connection.fetchval(statement.sql, *arguments))

    async def checkpoint(self) -> None:
        """Run a checkpoint, so that the next change of each page logs the full page."""
        await self._connection.execute(SQL.checkpoint.sql)

    async def until_alone(self) -> None:
        """Wait until every other session except a pinned one has ended, and so has reported its statistics."""
        while True:
            if await self.ask(SQL.is_alone):
                return
            await asyncio.sleep(0.01)

    async def read(self, statement: Statement, *arguments: object) -> tuple[int, ...]:
        """The single row that a statement with these arguments returns, in the order of its parameters."""
        return tuple(await self._connection.fetchrow(statement.sql, *arguments))


@asynccontextmanager
async def observing(url: str) -> AsyncIterator[Observer]:
    """Connect an observer for the duration of the block."""
    connection = await asyncpg.connect(url)
    try:
        yield Observer(connection)
    finally:
        await connection.close()


@asynccontextmanager
async def pinned(url: str) -> AsyncIterator[None]:
    """Keep a transaction open for the duration of the block, which prevents the removal of dead rows."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetchval(SQL.see_executions.sql)
            yield
    finally:
        await connection.close()

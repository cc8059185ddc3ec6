"""What the benchmark does beside a subject: takes statistics for the planner, and asks what the store holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from flowfabric.bench.api import Statement, statements_beside

SQL = statements_beside(__file__)


class Observer:
    """A connection of the benchmark to the database a subject works in."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, sql: str) -> None:
        """Run a script, such as the schema of a peer."""
        await self._connection.execute(sql)

    async def analyze(self) -> None:
        """Let the planner know the backlog, as it would after a while."""
        await self._connection.execute(SQL.analyze.sql)

    async def vacuum(self) -> None:
        """Let index scans do without the rows of what is old, as they would after a while."""
        await self._connection.execute(SQL.vacuum.sql)

    async def ask(self, question: Statement) -> bool:
        """The answer to a question of yes or no."""
        return bool(await self._connection.fetchval(question.sql))

    async def checkpoint(self) -> None:
        """Write every changed page, so that the next change of each logs it whole."""
        await self._connection.execute(SQL.checkpoint.sql)

    async def until_alone(self) -> None:
        """Wait until no other session is left but a pinned one: what they counted is in the statistics then."""
        while True:
            if await self.ask(SQL.is_alone):
                return
            await asyncio.sleep(0.01)

    async def read(self, question: Statement) -> tuple[int, ...]:
        """The numbers in the one row of an answer."""
        return tuple(await self._connection.fetchrow(question.sql))


@asynccontextmanager
async def observing(url: str) -> AsyncIterator[Observer]:
    """An observer for as long as the block runs."""
    connection = await asyncpg.connect(url)
    try:
        yield Observer(connection)
    finally:
        await connection.close()


@asynccontextmanager
async def pinned(url: str) -> AsyncIterator[None]:
    """A transaction that is open for as long as the block runs and holds back the removal of dead rows."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetchval(SQL.see_executions.sql)
            yield
    finally:
        await connection.close()

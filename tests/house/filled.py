"""Databases that are filled once for a module; each test gets a copy."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from databases import Databases
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings
from sessions import session

STATISTICS = ("no statistics", "statistics")
"""What the planner knows about the filled tables."""


@asynccontextmanager
async def filled(databases: Databases, fill: Callable[[Engine], Awaitable[None]], *commands: str) -> AsyncIterator[str]:
    """Create a database, fill it, run the commands on it and return its address."""
    async with databases.new() as url:
        async with Engine.connect(settings=Settings(database_url=url)) as engine:
            await fill(engine)
        await _run(url, commands)
        yield url


@asynccontextmanager
async def copied(databases: Databases, template: str, *commands: str) -> AsyncIterator[str]:
    """Copy a filled database, run the commands on the copy and return its address."""
    async with databases.new(template=template) as url:
        await _run(url, commands)
        yield url


async def _run(url: str, commands: tuple[str, ...]) -> None:
    connection = await session(url, "test filled")
    for command in commands:
        await connection.execute(command)
    await connection.close()

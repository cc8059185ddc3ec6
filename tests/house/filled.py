"""Databases that are filled once for the tests of a module, each of which gets a copy."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from databases import Databases
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings
from sessions import session


@asynccontextmanager
async def filled(databases: Databases, fill: Callable[[Engine], Awaitable[None]], *commands: str) -> AsyncIterator[str]:
    """The address of a database that this has filled, and that these commands have been run on then."""
    async with databases.new() as url:
        async with Engine.connect(settings=Settings(database_url=url)) as engine:
            await fill(engine)
        connection = await session(url, "test filled")
        for command in commands:
            await connection.execute(command)
        await connection.close()
        yield url

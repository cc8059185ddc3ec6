"""The Postgres server of a run, with an empty database for each subject."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from flowfabric.db.embedded import Embedded


class Server:
    """A Postgres server that creates and drops databases."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _address(self, database: str) -> str:
        return urlunsplit(urlsplit(self._url)._replace(path=f"/{database}"))

    @asynccontextmanager
    async def database(self, name: str) -> AsyncIterator[str]:
        """Create an empty database for the duration of the block, and run a checkpoint before it."""
        connection = await asyncpg.connect(self._address("postgres"))
        try:
            await connection.execute(f'drop database if exists "{name}" with (force)')
            await connection.execute(f'create database "{name}"')
            await connection.execute("checkpoint")
            try:
                yield self._address(name)
            finally:
                await connection.execute(f'drop database if exists "{name}" with (force)')
        finally:
            await connection.close()

    async def settings(self) -> dict[str, str]:
        """The server settings that affect the figures."""
        connection = await asyncpg.connect(self._address("postgres"))
        try:
            names = ("server_version", "fsync", "synchronous_commit", "shared_buffers", "max_wal_size")
            return {name: str(await connection.fetchval("select current_setting($1)", name)) for name in names}
        finally:
            await connection.close()


@asynccontextmanager
async def serve(url: str | None) -> AsyncIterator[Server]:
    """The server at this address, or without one a new embedded server, which is deleted afterwards."""
    if url is not None:
        yield Server(url)
        return
    with tempfile.TemporaryDirectory(prefix="flowfabric-bench-") as home:
        embedded = await asyncio.to_thread(Embedded.start, Path(home) / "home")
        try:
            yield Server(embedded.url)
        finally:
            await asyncio.to_thread(lambda: embedded.release(discard=True))

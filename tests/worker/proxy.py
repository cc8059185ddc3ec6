"""A TCP proxy in front of Postgres whose connections can fall silent without being closed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qsl, urlsplit, urlunsplit


class Proxy:
    """Passes bytes on until a connection is silenced: then they vanish, both ways, and nothing is reset."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._connections: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.silences_new = False

    @property
    def url(self) -> str:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        name = self._url.username or "postgres"
        secret = f":{self._url.password}" if self._url.password else ""
        return urlunsplit(self._url._replace(netloc=f"{name}{secret}@127.0.0.1:{port}", query=""))

    def silence(self, *, new: bool) -> None:
        """Silence every connection there is, and maybe every new one."""
        self.silences_new = new
        for is_silent in self._connections:
            is_silent.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_silent = asyncio.Event()
        if self.silences_new:
            is_silent.set()
        self._connections.append(is_silent)
        self._writers.append(writer)
        query = dict(parse_qsl(self._url.query))
        if "host" in query:
            above = await asyncio.open_unix_connection(f"{query['host']}/.s.PGSQL.{query.get('port', 5432)}")
        else:
            above = await asyncio.open_connection(self._url.hostname, self._url.port or 5432)
        self._writers.append(above[1])
        for source, target in ((reader, above[1]), (above[0], writer)):
            task = asyncio.create_task(self._pass_on(source, target, is_silent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, is_silent: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if not is_silent.is_set():
                    target.write(data)
                    await target.drain()
            if not is_silent.is_set():
                target.close()

    @classmethod
    @asynccontextmanager
    async def before(cls, url: str) -> AsyncIterator["Proxy"]:
        """A proxy before the server of an address."""
        proxy = cls(url)
        proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        try:
            yield proxy
        finally:
            proxy._server.close()
            for writer in proxy._writers:
                writer.transport.abort()
            for task in proxy._tasks:
                task.cancel()
            await asyncio.gather(*proxy._tasks, return_exceptions=True)

"""A proxy before Postgres that loses an answer, or refuses connections as a server or a pooler does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

_ENCRYPTION_WANTED = b"\x00\x00\x00\x08\x04\xd2\x16/"
_STARTUP = b"\x00\x03\x00\x00"
_READY_FOR_QUERY = b"Z\x00\x00\x00\x05I"


class LossyProxy:
    """Passes everything on; `lose_answer()` has the server carry out the next statement and keeps its answer back."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        self._socket = f"{options['host'][0]}/.s.PGSQL.{options['port'][0]}"
        self._login = f"{parts.username}@"
        self._database = parts.path
        self._server: asyncio.Server | None = None
        self._is_losing = False
        self._pairs: set[asyncio.Task[None]] = set()
        self.is_closed_after_loss = False
        self.is_closed = False
        self.refusal: tuple[str, str] | None = None
        """The SQLSTATE and the text that new connections are refused with."""
        self.ignored: tuple[bytes, ...] = ()
        """The session settings of new connections that the server is not told of."""
        self.lost = 0
        self.connections = 0

    @property
    def url(self) -> str:
        """The address that leads through this proxy."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return f"postgresql://{self._login}127.0.0.1:{port}{self._database}"

    def lose_answer(self, *, then_close: bool = False) -> None:
        """Lose the answer of the next statement of a pooled connection and cut it; refuse new ones afterwards."""
        self._is_losing = True
        self.is_closed_after_loss = then_close

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator["LossyProxy"]:
        """Listen on a port, one of its own unless it is given."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        try:
            yield self
        finally:
            self._server.close()
            for pair in self._pairs:
                pair.cancel()
            await asyncio.gather(*self._pairs, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        pair = asyncio.ensure_future(self._serve(reader, writer))
        self._pairs.add(pair)
        pair.add_done_callback(self._pairs.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.is_closed:
                return
            if self.refusal is not None:
                await self._refuse(reader, writer, *self.refusal)
                return
            above, below = await asyncio.open_unix_connection(self._socket)
            try:
                await self._pass_on(reader, writer, above, below)
            finally:
                below.close()
        except OSError:
            pass
        finally:
            writer.close()

    def _without_ignored(self, data: bytes) -> bytes:
        """A packet as a pooler passes it on that ignores some startup parameters."""
        if not self.ignored or data[4:8] != _STARTUP:
            return data
        words = data[8:-1].split(b"\0")
        pairs = [pair for pair in zip(words[::2], words[1::2], strict=False) if pair[0] not in self.ignored]
        kept = b"".join(name + b"\0" + value + b"\0" for name, value in pairs) + b"\0"
        return (len(kept) + 8).to_bytes(4) + _STARTUP + kept

    @staticmethod
    async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sqlstate: str, text: str) -> None:
        if await reader.read(65536) == _ENCRYPTION_WANTED:
            writer.write(b"N")
            await reader.read(65536)
        fields = f"SFATAL\0VFATAL\0C{sqlstate}\0M{text}\0\0".encode()
        writer.write(b"E" + (len(fields) + 4).to_bytes(4) + fields)
        await writer.drain()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        above: asyncio.StreamReader,
        below: asyncio.StreamWriter,
    ) -> None:
        is_pooled = True

        async def up() -> None:
            nonlocal is_pooled
            while data := await reader.read(65536):
                # The connections of hints ask for this at their start; what they say is not what is to be lost.
                is_pooled = is_pooled and b"synchronous_commit" not in data
                data = self._without_ignored(data)
                below.write(data)
                await below.drain()

        async def down() -> None:
            while data := await above.read(65536):
                if self._is_losing and is_pooled:
                    while data and not data.endswith(_READY_FOR_QUERY):
                        data = await above.read(65536)
                    self._is_losing = False
                    self.is_closed = self.is_closed_after_loss
                    self.lost += 1
                    return
                writer.write(data)
                await writer.drain()

        both = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in both:
                one.cancel()
            with contextlib.suppress(OSError):
                await asyncio.gather(*both, return_exceptions=True)

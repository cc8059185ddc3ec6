"""A proxy in front of Postgres that knows where messages begin: it cuts, silences, delays, drops and refuses them."""

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import parse_qs, quote, unquote, urlsplit

_SSL_REQUEST = 80877103
_GSS_REQUEST = 80877104
_STARTUP = b"\x00\x03\x00\x00"
_READ = 65536
_RESET = struct.pack("ii", 1, 0)
_COMMAND_COMPLETE, _READY = b"C", b"Z"


class Side(StrEnum):
    """Who sends a message."""

    CLIENT = "client"
    SERVER = "server"


class Action(StrEnum):
    """What happens at a message."""

    CUT_BEFORE = "cut before"
    CUT_AFTER = "cut after"
    SILENCE = "silence"
    """From this message on nothing is forwarded from this side; the sockets stay open."""
    DELAY = "delay"
    DROP_ANSWER = "drop the answer"
    """From the next finished command on the client is told nothing, and is cut off once the server has committed."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What happens at the n-th message of a side, counted over all connections from the moment it is armed."""

    action: Action
    side: Side
    nth: int = 1
    seconds: float = 0


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """Where a server listens: the path of its socket, or its host and port."""

    path: str = ""
    host: str = ""
    port: int = 5432

    @classmethod
    def of(cls, url: str) -> "Upstream":
        """The server of a postgresql:// address."""
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        host = unquote(query.get("host", [""])[0]) or parts.hostname or "localhost"
        port = int(query.get("port", [parts.port or 5432])[0])
        if host.startswith("/"):
            return cls(path=f"{host}/.s.PGSQL.{port}")
        return cls(host=host, port=port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the server."""
        if self.path:
            return await asyncio.open_unix_connection(self.path)
        return await asyncio.open_connection(self.host, self.port)


class Messages:
    """Splits what one side sends into messages of the Postgres protocol."""

    def __init__(self, side: Side) -> None:
        self._buffer = bytearray()
        self._is_starting = side is Side.CLIENT

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with this data; a startup packet is one, without a type byte."""
        self._buffer += data
        while True:
            at = 0 if self._is_starting else 1
            if len(self._buffer) < at + 4:
                return
            length = at + int.from_bytes(self._buffer[at : at + 4], "big")
            if len(self._buffer) < length:
                return
            message = bytes(self._buffer[:length])
            del self._buffer[:length]
            if self._is_starting:
                code = int.from_bytes(message[4:8], "big")
                # The client asks about encryption first, and then starts as if it had not.
                self._is_starting = code in (_SSL_REQUEST, _GSS_REQUEST)
            yield message


def is_encryption_request(message: bytes) -> bool:
    """Whether a startup packet asks for encryption, which a server answers with one byte."""
    return len(message) == 8 and int.from_bytes(message[4:8], "big") in (_SSL_REQUEST, _GSS_REQUEST)


def startup_parameters(message: bytes) -> dict[str, str]:
    """What a client asks for with its startup packet; nothing where the packet asks to cancel a statement."""
    if message[4:8] != _STARTUP:
        return {}
    words = message[8:-1].decode().split("\0")
    return dict(zip(words[::2], words[1::2], strict=False))


def startup_packet(parameters: Mapping[str, str]) -> bytes:
    """The startup packet that asks for these parameters."""
    body = _STARTUP + "".join(f"{name}\0{value}\0" for name, value in parameters.items()).encode() + b"\0"
    return (len(body) + 4).to_bytes(4, "big") + body


class Link:
    """One client's connection and the server's, with what happens between them."""

    def __init__(
        self,
        proxy: "Proxy",
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._streams = {Side.CLIENT: client, Side.SERVER: server}
        self._gates = {side: asyncio.Event() for side in Side}
        for gate in self._gates.values():
            gate.set()
        self.parameters: dict[str, str] | None = None
        """What the client has asked for when it started."""
        self._is_cut = False
        self._drops_answer = False
        self._tasks = [asyncio.create_task(self._pump(side)) for side in Side]
        self._leaving: asyncio.Task[None] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether a side of it is not heard by the other."""
        return not all(gate.is_set() for gate in self._gates.values())

    async def run(self) -> None:
        """Forward in both directions until either side ends."""
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self.end()

    async def end(self) -> None:
        """Close both sides, and wait until the server has closed its own: what it was told to do is done or undone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        await asyncio.shield(self._leaving)

    async def _leave(self) -> None:
        _, client = self._streams[Side.CLIENT]
        client.close()
        reader, server = self._streams[Side.SERVER]
        with contextlib.suppress(OSError):
            server.write_eof()
            while await reader.read(_READ):
                pass
        server.close()

    def cut(self, *, reset: bool = True) -> None:
        """End the connection; the client sees a reset, or the end of the stream after what was sent before."""
        self._is_cut = True
        _, client = self._streams[Side.CLIENT]
        if reset:
            sock: socket.socket = client.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.transport.abort()
        else:
            client.close()
        for task in self._tasks:
            task.cancel()

    def silence(self, sides: Iterable[Side] = tuple(Side)) -> None:
        """Hold back what these sides send from now on."""
        for side in sides:
            self._gates[side].clear()

    def speak(self) -> None:
        """Forward what was held back, and go on."""
        for gate in self._gates.values():
            gate.set()

    def drop_answer(self) -> None:
        """Cut the connection at the next answer of the server that ends a command, after it was carried out."""
        self._drops_answer = True

    async def _pump(self, side: Side) -> None:
        reader, _ = self._streams[side]
        other = Side.SERVER if side is Side.CLIENT else Side.CLIENT
        _, writer = self._streams[other]
        messages = Messages(side)
        is_dropping = False
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ):
                if side is Side.SERVER and self._proxy.answers_one_byte(self, data):
                    writer.write(data)
                    continue
                for message in messages.feed(data):
                    if side is Side.CLIENT and is_encryption_request(message):
                        self._proxy.expect_one_byte(self)
                    elif side is Side.CLIENT and self.parameters is None:
                        message = self._start(message)
                    if side is Side.SERVER and self._drops_answer:
                        is_dropping = is_dropping or message[:1] == _COMMAND_COMPLETE
                        if is_dropping:
                            if message[:1] == _READY:
                                self._proxy.dropped += 1
                                self.cut()
                                return
                            continue
                    await self._pass(side, message, writer)
                    if self._is_cut:
                        return
                await writer.drain()

    def _start(self, message: bytes) -> bytes:
        """The startup packet as the server gets it."""
        self.parameters = startup_parameters(message)
        if self._proxy.ignores.isdisjoint(self.parameters):
            return message
        return startup_packet(
            {name: value for name, value in self.parameters.items() if name not in self._proxy.ignores}
        )

    async def _pass(self, side: Side, message: bytes, writer: asyncio.StreamWriter) -> None:
        if side is Side.SERVER and message[:1] in self._proxy.swallows:
            return
        strike = self._proxy.count(side)
        match strike.action if strike is not None else None:
            case Action.CUT_BEFORE:
                self.cut()
                return
            case Action.CUT_AFTER:
                writer.write(message)
                await writer.drain()
                self.cut(reset=False)
                return
            case Action.SILENCE:
                self.silence((side,))
            case Action.DELAY if strike is not None:
                await writer.drain()
                await asyncio.sleep(strike.seconds)
            case Action.DROP_ANSWER:
                self.drop_answer()
        if not self._gates[side].is_set():
            await writer.drain()
            await self._gates[side].wait()
        writer.write(message)


class Proxy:
    """Listens on 127.0.0.1, on a free port unless told which, and forwards to a Postgres server until told to fail."""

    def __init__(self, url: str, *, port: int = 0) -> None:
        self.upstream = Upstream.of(url)
        """Where new connections lead; another address is a failover."""
        self.refuses = False
        """Whether new connections are turned away."""
        self.refusal: tuple[str, str] | None = None
        """The SQLSTATE and the text of the error that new connections are answered with."""
        self.silences_new = False
        """Whether new connections are silent from their start."""
        self.ignores: frozenset[str] = frozenset()
        """The startup parameters of new connections that the server is not told of."""
        self.swallows: frozenset[bytes] = frozenset()
        """The types of messages of the server that never arrive."""
        self.links: set[Link] = set()
        self.struck = 0
        """How often an armed strike has come to pass."""
        self.dropped = 0
        """How many answers were dropped."""
        self.connections = 0
        """How many clients have connected, those that were turned away among them."""
        self._url = url
        self._port = port
        self._server: asyncio.Server | None = None
        self._strike: Strike | None = None
        self._counted: Counter[Side] = Counter()
        self._one_byte: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._is_closed = True
        self._server.close()
        while self._tasks:
            for link in self.links:
                link.cut()
            await asyncio.wait(self._tasks, timeout=1)
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The address of the same database through this proxy."""
        return through(self._url, self.port)

    def arm(self, strike: Strike | None) -> None:
        """Let something happen at a message from now on, once; counting begins anew."""
        self._strike = strike
        self._counted.clear()
        self.struck = 0

    def counted(self, side: Side) -> int:
        """How many messages a side has sent since a strike was armed."""
        return self._counted[side]

    def count(self, side: Side) -> Strike | None:
        """Count a message, and give the strike whose turn it is."""
        self._counted[side] += 1
        strike = self._strike
        if strike is not None and strike.side is side and self._counted[side] == strike.nth:
            self._strike = None
            self.struck += 1
            return strike
        return None

    def cut(self, links: Iterable[Link] | None = None) -> int:
        """Cut connections, all of them unless told which."""
        chosen = list(self.links if links is None else links)
        for link in chosen:
            link.cut()
        return len(chosen)

    def silence(self, links: Iterable[Link] | None = None, sides: Iterable[Side] = tuple(Side)) -> int:
        """Let connections fall silent in these directions, all of them unless told which."""
        chosen = list(self.links if links is None else links)
        for link in chosen:
            link.silence(sides)
        return len(chosen)

    def heal(self) -> None:
        """Nothing happens any more; what was silent speaks again."""
        self.arm(None)
        self.refuses = self.silences_new = False
        for link in self.links:
            link.speak()

    async def settled(self) -> None:
        """Cut what is still silent, and wait until the server has ended every session that was cut."""
        for link in list(self.links):
            if link.is_silent:
                link.cut()
        await self._until(lambda: not any(link._is_cut for link in self.links))

    async def _until(self, holds: Callable[[], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.wait(self._tasks, timeout=0.005)

    def expect_one_byte(self, link: Link) -> None:
        """The server's next word on this connection is no message."""
        self._one_byte.add(link)

    def answers_one_byte(self, link: Link, data: bytes) -> bool:
        """Whether this is the answer to a question about encryption."""
        if link in self._one_byte and len(data) == 1:
            self._one_byte.discard(link)
            return True
        return False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            if self.refuses or self._is_closed:
                writer.transport.abort()
                return
            if self.refusal is not None:
                await self._refuse(reader, writer, *self.refusal)
                return
            try:
                server = await self.upstream.connect()
            except OSError:
                writer.transport.abort()
                return
            link = Link(self, (reader, writer), server)
            self.links.add(link)
            if self.silences_new:
                link.silence()
            try:
                if self._is_closed:
                    link.cut()
                await link.run()
            finally:
                self.links.discard(link)
                self._one_byte.discard(link)
        finally:
            self._tasks.discard(task)

    @staticmethod
    async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sqlstate: str, text: str) -> None:
        """Answer the startup packet with an error, as a server or a pooler does, and hang up."""
        messages = Messages(Side.CLIENT)
        is_refused = False
        with contextlib.suppress(OSError):
            while not is_refused and (data := await reader.read(_READ)):
                for message in messages.feed(data):
                    is_refused = not is_encryption_request(message)
                    fields = f"SFATAL\0VFATAL\0C{sqlstate}\0M{text}\0\0".encode()
                    writer.write(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields if is_refused else b"N")
                await writer.drain()
        writer.close()


def through(url: str, port: int) -> str:
    """The address of a database with a proxy on this machine in place of its server."""
    parts = urlsplit(url)
    user = quote(unquote(parts.username or "postgres"), safe="")
    password = f":{parts.password}" if parts.password else ""
    return f"postgresql://{user}{password}@127.0.0.1:{port}{parts.path}?sslmode=disable"

"""A proxy in front of Postgres that cuts, silences or delays connections at a chosen protocol message."""

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
_COMMAND_COMPLETE, _NOTIFICATION, _READY = b"C", b"A", b"Z"


class Side(StrEnum):
    """Who sends a message."""

    CLIENT = "client"
    SERVER = "server"


class Action(StrEnum):
    """The fault at a message."""

    CUT_BEFORE = "cut before"
    CUT_AFTER = "cut after"
    SILENCE = "silence"
    """Forward nothing from this side from this message on; the sockets stay open."""
    DELAY = "delay"
    DROP_ANSWER = "drop the answer"
    """Withhold the result of the next finished command, and cut the client off once the server is ready again."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault at the n-th message of a side with a text in it, counted over all connections since it was armed."""

    action: Action
    side: Side
    nth: int = 1
    text: bytes = b""
    seconds: float = 0


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """The address of a server: the path of its socket, or its host and port."""

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
    """Splits the bytes of one side into messages of the Postgres protocol."""

    def __init__(self, side: Side) -> None:
        self._buffer = bytearray()
        self._is_starting = side is Side.CLIENT

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that this data completes; a startup packet is a message without a type byte."""
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
                # An encryption request is followed by a startup packet.
                self._is_starting = code in (_SSL_REQUEST, _GSS_REQUEST)
            yield message


def is_encryption_request(message: bytes) -> bool:
    """Whether a startup packet is an encryption request, which the server answers with one byte."""
    return len(message) == 8 and int.from_bytes(message[4:8], "big") in (_SSL_REQUEST, _GSS_REQUEST)


def startup_parameters(message: bytes) -> dict[str, str]:
    """The parameters of a startup packet; empty if the packet is a cancel request."""
    if message[4:8] != _STARTUP:
        return {}
    words = message[8:-1].decode().split("\0")
    return dict(zip(words[::2], words[1::2], strict=False))


def startup_packet(parameters: Mapping[str, str]) -> bytes:
    """A startup packet with these parameters."""
    body = _STARTUP + "".join(f"{name}\0{value}\0" for name, value in parameters.items()).encode() + b"\0"
    return (len(body) + 4).to_bytes(4, "big") + body


class Link:
    """A connection of a client, the connection to the server behind it, and the faults between them."""

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
        """The parameters of the startup packet, once it has arrived."""
        self._is_cut = False
        self._drops_answer = False
        self._awaits_answer = True
        self._tasks = [asyncio.create_task(self._pump(side)) for side in Side]
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether at least one direction is silenced."""
        return not all(gate.is_set() for gate in self._gates.values())

    async def run(self) -> None:
        """Forward in both directions until either side closes."""
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self.end()

    async def end(self) -> None:
        """Close both sides and wait until the server has ended the session, and with it any open transaction."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        _, client = self._streams[Side.CLIENT]
        client.close()
        reader, server = self._streams[Side.SERVER]
        with contextlib.suppress(OSError):
            server.write_eof()
            while await reader.read(_READ):
                pass
        server.close()

    def cut(self, *, reset: bool = True) -> None:
        """Cut the connection; the client sees a reset, or without one the end of the stream."""
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
        """Hold back everything these sides send from now on."""
        for side in sides:
            self._gates[side].clear()

    def speak(self) -> None:
        """Forward everything that was held back, and continue."""
        for gate in self._gates.values():
            gate.set()

    def drop_answer(self) -> None:
        """Cut the connection after the server has run the next command, and drop its result."""
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
        """Return the startup packet to send to the server, without ignored parameters."""
        self.parameters = startup_parameters(message)
        if self._proxy.ignores.isdisjoint(self.parameters):
            return message
        return startup_packet(
            {name: value for name, value in self.parameters.items() if name not in self._proxy.ignores}
        )

    async def _pass(self, side: Side, message: bytes, writer: asyncio.StreamWriter) -> None:
        if side is Side.SERVER and self._proxy.is_swallowed(message[:1], awaits_answer=self._awaits_answer):
            return
        self._awaits_answer = side is Side.CLIENT or (self._awaits_answer and message[:1] != _READY)
        fault = self._proxy.count(side, message)
        match fault.action if fault is not None else None:
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
            case Action.DELAY if fault is not None:
                await writer.drain()
                await asyncio.sleep(fault.seconds)
            case Action.DROP_ANSWER:
                self.drop_answer()
        if not self._gates[side].is_set():
            await writer.drain()
            await self._gates[side].wait()
        writer.write(message)


class Proxy:
    """Listens on 127.0.0.1, on a free port by default, and forwards to a Postgres server."""

    def __init__(self, url: str, *, port: int = 0) -> None:
        self.upstream = Upstream.of(url)
        """The server of new connections; a test changes it to simulate a failover."""
        self.refuses = False
        """Whether new connections are reset at once."""
        self.refusal: tuple[str, str] | None = None
        """The SQLSTATE and message of the error sent to new connections, if any."""
        self.silences_new = False
        """Whether new connections are silent from the start."""
        self.ignores: frozenset[str] = frozenset()
        """The startup parameters that are not forwarded to the server."""
        self.swallows: frozenset[bytes] = frozenset()
        """The types of server messages that are not forwarded to the client."""
        self.pools_transactions = False
        """Whether notifications reach a client only while it awaits an answer, as from a pooler in transaction mode."""
        self.links: set[Link] = set()
        self.triggered = 0
        """How many armed faults have happened: 0 or 1 since `arm`."""
        self.dropped = 0
        """How many answers were dropped."""
        self.connections = 0
        """How many clients have connected, including refused ones."""
        self._url = url
        self._port = port
        self._server: asyncio.Server | None = None
        self._fault: Fault | None = None
        self._counted: Counter[Side] = Counter()
        self._matched = 0
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
        """The address of the database through this proxy."""
        return through(self._url, self.port)

    def arm(self, fault: Fault | None) -> None:
        """Schedule one fault, or none, and reset the message counts."""
        self._fault = fault
        self._counted.clear()
        self._matched = self.triggered = 0

    def counted(self, side: Side) -> int:
        """How many messages a side has sent since `arm`."""
        return self._counted[side]

    def count(self, side: Side, message: bytes) -> Fault | None:
        """Count a message, and return the fault if this message triggers it."""
        self._counted[side] += 1
        fault = self._fault
        if fault is None or fault.side is not side or fault.text not in message:
            return None
        self._matched += 1
        if self._matched < fault.nth:
            return None
        self._fault = None
        self.triggered += 1
        return fault

    def cut(self, links: Iterable[Link] | None = None) -> int:
        """Cut these connections, or all; return how many."""
        chosen = list(self.links if links is None else links)
        for link in chosen:
            link.cut()
        return len(chosen)

    def silence(self, links: Iterable[Link] | None = None, sides: Iterable[Side] = tuple(Side)) -> int:
        """Silence these sides of these connections, or of all; return how many."""
        chosen = list(self.links if links is None else links)
        for link in chosen:
            link.silence(sides)
        return len(chosen)

    def heal(self) -> None:
        """Cancel all faults; silent connections deliver again."""
        self.arm(None)
        self.refuses = self.silences_new = False
        for link in self.links:
            link.speak()

    async def settled(self) -> None:
        """Cut the connections that are still silent, and wait until the server has ended every cut session."""
        for link in list(self.links):
            if link.is_silent:
                link.cut()
        await self._until(lambda: not any(link._is_cut for link in self.links))

    async def _until(self, holds: Callable[[], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.wait(self._tasks, timeout=0.005)

    def is_swallowed(self, kind: bytes, *, awaits_answer: bool) -> bool:
        """Whether a server message of this type is not forwarded to a client that awaits an answer, or none."""
        return kind in self.swallows or (self.pools_transactions and kind == _NOTIFICATION and not awaits_answer)

    def expect_one_byte(self, link: Link) -> None:
        """Expect the one-byte answer to an encryption request on this connection."""
        self._one_byte.add(link)

    def answers_one_byte(self, link: Link, data: bytes) -> bool:
        """Whether this data is the answer to an encryption request."""
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
        """Answer the startup packet with an error, as a server or a pooler does, and close."""
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
    """The address of a database through a proxy on this port of the local machine."""
    parts = urlsplit(url)
    user = quote(unquote(parts.username or "postgres"), safe="")
    password = f":{parts.password}" if parts.password else ""
    return f"postgresql://{user}{password}@127.0.0.1:{port}{parts.path}?sslmode=disable"

"""A pool of connections to one Postgres schema, and the faults that can meet its callers."""

import asyncio
import contextlib
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qs, urlsplit

import asyncpg

from flowfabric.db.statements import Statement

Record: TypeAlias = asyncpg.Record
Connection: TypeAlias = Any
Answer = TypeVar("Answer")

ATTEMPTS = 3
"""How often a transaction is run when Postgres asks for it to be run again."""
BACKOFF_SECONDS = (0.005, 0.010)
CLOSE_SECONDS = 10
SLOW_SECONDS = 0.1
"""A statement that took longer may have a plan made while its tables were empty: its connection plans anew."""

_SESSION = {
    "application_name": "flowfabric",
    # A row held for longer than this is given up and the transaction is run again.
    "lock_timeout": "2s",
    # The statements are nested loops over indexes, whatever the tables hold: a plan made while a table was empty lives
    # on when it is full, and must not be one that reads it whole.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}

_RUN_AGAIN = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
)
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InterfaceError,
    # A session that was ended while it rested is met in a state the driver does not expect.
    asyncpg.InternalClientError,
    ConnectionError,
    ssl.SSLError,
    OSError,
)


_DETAILED = (asyncpg.PostgresError, asyncpg.InterfaceError)
"""Errors that may be printed with more than their first line, such as the values of a row."""


_HOST_AND_PORT = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>.*))?")


def check_url(url: str) -> str:
    """Give back an address that can be asked for, or raise ValueError; the text holds nothing of the address."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    try:
        parts = urlsplit(url)
        ports = parse_qs(parts.query).get("port", [])
    except ValueError:
        raise ValueError("cannot be read: write special characters of a password as %XX") from None
    for host in parts.netloc.rpartition("@")[2].split(","):
        found = _HOST_AND_PORT.fullmatch(host)
        if found is None:
            raise ValueError("names no host: write postgresql://user:password@host:port/database")
        ports.append(found["port"])
    for port in ports:
        if port and not all(each.isdecimal() and 1 <= int(each) <= 65535 for each in port.split(",")):
            raise ValueError("names no port from 1 to 65535; write special characters of a password as %XX")
    return url


class StoreFault(Exception):
    """A failed conversation with Postgres; kind says which: transport, timeout, auth, contention or other."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def is_of_connection(self) -> bool:
        """Whether the conversation itself failed, so that nothing that was said in it counts."""
        return self.kind in ("transport", "timeout", "auth")


def fault_of(error: BaseException) -> StoreFault | None:
    """The fault a driver's error stands for, or None when the error is not the driver's."""
    match error:
        case StoreFault():
            return error
        case asyncpg.InvalidAuthorizationSpecificationError():
            return StoreFault("auth", _text(error))
        case asyncpg.QueryCanceledError() | TimeoutError():
            return StoreFault("timeout", _text(error) or "no answer in time")
        case _ if isinstance(error, _RUN_AGAIN):
            return StoreFault("contention", _text(error))
        case _ if isinstance(error, _LOST) and not isinstance(error, asyncpg.DataError):
            return StoreFault("transport", _text(error) or type(error).__name__)
        case asyncpg.PostgresError():
            return StoreFault("other", f"{type(error).__name__}: {_text(error)}")
        case _:
            return None


def _text(error: BaseException) -> str:
    """What a driver's error says without the values it is about: they may be tokens, secrets or payloads."""
    if isinstance(error, asyncpg.DataError):
        # Its first line names the value.
        return f"a value is refused ({error.sqlstate})"
    return str(error.args[0]) if isinstance(error, _DETAILED) and error.args else str(error)


class Database:
    """One schema of one Postgres server, reached through a few connections that are kept."""

    def __init__(self, url: str, schema: str, pool_size: int) -> None:
        self.url = url
        self.schema = schema
        self._free: list[Connection] = []
        self._pool_size = pool_size
        self._places = asyncio.Semaphore(pool_size)
        self._used: set[Connection] = set()
        self._is_closed = False

    @classmethod
    async def open(cls, url: str, *, schema: str, pool_size: int = 10) -> "Database":
        """Connect once, so that a wrong address shows at once; more connections are made as they are needed."""
        database = cls(url, schema, pool_size)
        async with database.acquire():
            return database

    async def close(self) -> None:
        """Wait for what still runs, ten seconds at most, and give every connection back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                for _ in range(self._pool_size):
                    await self._places.acquire()
        # Whoever still waits for a connection is told so, instead of waiting for ever.
        self._is_closed = True
        for _ in range(self._pool_size):
            self._places.release()
        for connection in self._used:
            connection.terminate()
        free, self._free = self._free, []
        await asyncio.gather(*(connection.close(timeout=2) for connection in free), return_exceptions=True)

    async def connect(self, **settings: str) -> Connection:
        """A connection of the caller's own, outside the pool."""
        return await connect(self.url, schema=self.schema, **settings)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """A connection for a while, with driver errors told as faults."""
        connection: Connection = None
        await self._places.acquire()
        try:
            if self._is_closed:
                raise StoreFault("other", "the connections to the store are closed")
            connection = await self._take()
            yield connection
        except StoreFault:
            raise
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                raise
            # Its traceback is kept, its text is not: it may hold the values of a row.
            cause = None if isinstance(error, _DETAILED) else error
            raise fault.with_traceback(error.__traceback__) from cause
        finally:
            self._places.release()
            if connection is not None:
                self._give_back(connection)

    async def _take(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():
                break
        else:
            connection = await self.connect()
        self._used.add(connection)
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._used.discard(connection)
        if connection.is_closed():
            return
        if connection.is_in_transaction():
            connection.terminate()
        else:
            self._free.append(connection)

    async def fetch(
        self, statement: Statement, values: Mapping[str, object], *, attempts: int = ATTEMPTS
    ) -> list[Record]:
        """Run one statement as a transaction of its own, again where Postgres asks for it."""
        arguments = statement.arguments(values)

        async def once(connection: Connection) -> list[Record]:
            began = time.monotonic()
            rows: list[Record] = await connection.fetch(statement.sql, *arguments)
            if time.monotonic() - began > SLOW_SECONDS:
                await _plan_anew(connection)
            return rows

        return await self._again(once, attempts)

    async def transact(self, work: Callable[["Transaction"], Awaitable[Answer]]) -> Answer:
        """Run work in one READ COMMITTED transaction, again from its start where Postgres asks for it."""

        async def once(connection: Connection) -> Answer:
            transaction = Transaction(connection)
            async with connection.transaction():
                answer = await work(transaction)
            if transaction.has_been_slow:
                await _plan_anew(connection)
            return answer

        return await self._again(once)

    async def _again(self, once: Callable[[Connection], Awaitable[Answer]], attempts: int = ATTEMPTS) -> Answer:
        for attempt in range(attempts):
            try:
                async with self.acquire() as connection:
                    return await once(connection)
            except StoreFault as fault:
                if fault.kind != "contention" or attempt == attempts - 1:
                    raise
            await asyncio.sleep(BACKOFF_SECONDS[attempt])
        raise AssertionError("unreachable")


class Transaction:
    """An open transaction: statements run in it in order."""

    __slots__ = ("connection", "has_been_slow")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.has_been_slow = False

    async def fetch(self, statement: Statement, **values: object) -> list[Record]:
        """The rows of one statement."""
        began = time.monotonic()
        rows: list[Record] = await self.connection.fetch(statement.sql, *statement.arguments(values))
        self.has_been_slow |= time.monotonic() - began > SLOW_SECONDS
        return rows


async def _plan_anew(connection: Connection) -> None:
    """Drop the plans of a session; what came before this is committed, so a fault is only this session's end."""
    try:
        await connection.execute("discard plans")
    except Exception:
        connection.terminate()


def session_settings(schema: str) -> dict[str, str]:
    """What every session of ours asks of the server."""
    return {**_SESSION, "search_path": schema}


async def connect(url: str, *, schema: str, **settings: str) -> Connection:
    """One connection with the session settings of the pool, for a listener or a thread of its own."""
    return await asyncpg.connect(url, server_settings={**session_settings(schema), **settings}, timeout=30)

"""A pool of connections to one Postgres schema, every call of which is answered or given up in bounded time."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

import asyncpg

from flowfabric.db.faults import StoreFault, fault_of, is_answered, without_values
from flowfabric.db.session import Limits, close, connect
from flowfabric.db.statements import Statement
from flowfabric.db.unreachable import Unreachable

Record: TypeAlias = asyncpg.Record
Connection: TypeAlias = Any
Answer = TypeVar("Answer")
Revive: TypeAlias = Callable[[], Awaitable[str | None]]
"""Starts the server again if it is ours and has died; answers its address where another try is worth it."""

ATTEMPTS = 3
"""How often a transaction is run when Postgres asks for it to be run again."""
BACKOFF_SECONDS = (0.005, 0.010)
DRAIN_SECONDS = 2
"""How long `close` waits for calls under way."""
CLOSE_SECONDS = 2
"""How long a connection may take to close."""
SLOW_SECONDS = 0.1
"""A statement that took longer may have a plan made while its tables were empty: its connection plans anew."""


class Database:
    """One schema of one Postgres server, reached through a few connections that are kept.

    A connection is kept only after the server has answered all that was asked on it. After anything else (a cancelled
    caller, a lost or silent connection) it is closed: what it would answer next belongs to somebody else.
    """

    def __init__(
        self, url: str, schema: str, pool_size: int, *, limits: Limits | None = None, revive: Revive | None = None
    ) -> None:
        self.url = url
        self.schema = schema
        self.limits = limits or Limits()
        self._revive = revive
        self._free: list[Connection] = []
        self._pool_size = pool_size
        self._places = asyncio.Semaphore(pool_size)
        self._used: set[Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        schema: str,
        pool_size: int = 10,
        limits: Limits | None = None,
        revive: Revive | None = None,
    ) -> "Database":
        """Connect once, so that a wrong address shows at once; more connections are made as they are needed."""
        database = cls(url, schema, pool_size, limits=limits, revive=revive)
        async with database.acquire():
            return database

    async def close(self) -> None:
        """Wait a few seconds for what still runs, and close every connection."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    for _ in range(self._pool_size):
                        await self._places.acquire()
        finally:
            # Whoever still waits for a connection gets an error instead of waiting for ever.
            self._is_closed = True
            for _ in range(self._pool_size):
                self._places.release()
            for connection in self._used:
                connection.terminate()
        free, self._free = self._free, []
        await asyncio.gather(
            *(close(connection, seconds=CLOSE_SECONDS) for connection in free), *self._closing, return_exceptions=True
        )

    async def connect(self, **settings: str) -> Connection:
        """A connection of the caller's own, outside the pool."""
        try:
            return await connect(self.url, schema=self.schema, limits=self.limits, **settings)
        except Unreachable as refused:
            url = await self._revive() if self._revive is not None and refused.may_pass else None
            if url is None:
                raise
            self.url = url
        return await connect(self.url, schema=self.schema, limits=self.limits, **settings)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """A connection for a while, with driver errors raised as faults."""
        connection: Connection = None
        ended_by: BaseException | None = None
        await self._take_place()
        try:
            connection = await self._take()
            yield connection
        except BaseException as error:
            ended_by = error
            fault = fault_of(error)
            if fault is None or fault is error:
                raise
            # Nothing was sent without a connection.
            fault.outcome_unknown = fault.outcome_unknown and connection is not None
            # The traceback is kept, the text is not: it may hold the values of a row.
            raise fault.with_traceback(error.__traceback__) from without_values(error)
        finally:
            if connection is None:
                self._places.release()
            else:
                self._give_back(connection, ended_by)

    async def _take_place(self) -> None:
        """Wait for a place in the pool, no longer than for an answer."""
        if not self._places.locked():
            await self._places.acquire()
            return
        seconds = self.limits.answer_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._places.acquire()
        except TimeoutError:
            raise StoreFault(
                "timeout",
                f"none of {self._pool_size} connections was free within {seconds:g} s; raise FF_DATABASE_POOL_SIZE",
            ) from None

    async def _take(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():
                break
        else:
            self._check_open()
            connection = await self.connect()
        self._used.add(connection)
        try:
            # The pool may have been closed while the connection was made.
            self._check_open()
        except StoreFault:
            self._used.discard(connection)
            connection.terminate()
            raise
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreFault("transport", "the connections to the store are closed")

    def _give_back(self, connection: Connection, ended_by: BaseException | None) -> None:
        """Return the connection and its place back; the place of one that is still to be closed when it is."""
        self._used.discard(connection)
        if isinstance(ended_by, asyncio.CancelledError) and not connection.is_closed() and not self._is_closed:
            self._close_behind(connection)
            return
        self._places.release()
        if connection.is_closed():
            return
        if is_answered(ended_by) and not connection.is_in_transaction() and not self._is_closed:
            self._free.append(connection)
            return
        connection.terminate()
        if isinstance(ended_by, TimeoutError):
            # The server fell silent: idle connections have most likely fallen silent with it.
            for idle in self._free:
                idle.terminate()
            self._free.clear()

    def _close_behind(self, connection: Connection) -> None:
        """Close a connection whose caller was cancelled: the driver has the server cancel the statement first."""

        async def close_and_release() -> None:
            try:
                await close(connection, seconds=CLOSE_SECONDS)
            finally:
                self._places.release()

        closing = asyncio.create_task(close_and_release())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

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

        is_committing = False

        async def once(connection: Connection) -> Answer:
            nonlocal is_committing
            is_committing = False
            transaction = connection.transaction()
            await transaction.start()
            statements = Transaction(connection)
            try:
                answer = await work(statements)
            except BaseException as error:
                # A session that has not answered is closed, which undoes its transaction.
                if is_answered(error):
                    await transaction.rollback()
                raise
            is_committing = True
            await transaction.commit()
            if statements.has_been_slow:
                await _plan_anew(connection)
            return answer

        try:
            return await self._again(once)
        except StoreFault as fault:
            # What was not sent to be committed was not carried out.
            fault.outcome_unknown = fault.outcome_unknown and is_committing
            raise

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

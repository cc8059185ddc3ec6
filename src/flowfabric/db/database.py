"""A pool of connections to one Postgres schema; every call returns or fails within a bounded time."""

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
from flowfabric.loops import check_engine_loop, running_loop

Record: TypeAlias = asyncpg.Record
Connection: TypeAlias = Any
Answer = TypeVar("Answer")
Revive: TypeAlias = Callable[[], Awaitable[str | None]]
"""Restart an embedded server that has died; return its address if connecting again may help, else None."""

ATTEMPTS = 3
"""How often a transaction runs at most if Postgres asks for a retry."""
BACKOFF_SECONDS = (0.005, 0.010)
DRAIN_SECONDS = 2
"""How long `close` waits for running calls."""
CLOSE_SECONDS = 2
"""How long a connection may take to close."""
SLOW_SECONDS = 0.1
"""A slower statement may use a plan made while its tables were empty, so its connection discards its plans."""


class Database:
    """One schema of a Postgres server, accessed through a pool of connections.

    A connection returns to the pool only if the server has answered everything sent on it. Otherwise (a cancelled
    caller, a lost or silent connection) it is closed: its next answer would belong to an earlier caller.
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
        self._slots = asyncio.Semaphore(pool_size)
        self._used: set[Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._loop = running_loop()

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
        """Connect once, so that a wrong address fails at once; more connections are opened as needed."""
        database = cls(url, schema, pool_size, limits=limits, revive=revive)
        async with database.acquire():
            return database

    async def close(self) -> None:
        """Wait a few seconds for running calls, then close every connection."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    for _ in range(self._pool_size):
                        await self._slots.acquire()
        finally:
            # Callers that still wait for a connection get an error.
            self._is_closed = True
            for _ in range(self._pool_size):
                self._slots.release()
            for connection in self._used:
                connection.terminate()
        free, self._free = self._free, []
        await asyncio.gather(
            *(close(connection, seconds=CLOSE_SECONDS) for connection in free), *self._closing, return_exceptions=True
        )

    async def connect(self, **settings: str) -> Connection:
        """Open a connection outside the pool; the caller closes it."""
        try:
            return await connect(self.url, schema=self.schema, limits=self.limits, **settings)
        except Unreachable as refused:
            url = await self._revive() if self._revive is not None and refused.is_temporary else None
            if url is None:
                raise
            self.url = url
        return await connect(self.url, schema=self.schema, limits=self.limits, **settings)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """A connection of the pool; errors of the driver are raised as faults."""
        check_engine_loop(self._loop)
        connection: Connection = None
        ended_by: BaseException | None = None
        await self._take_slot()
        try:
            connection = await self._take()
            yield connection
        except BaseException as error:
            ended_by = error
            fault = fault_of(error)
            if fault is None or fault is error:
                raise
            # Without a connection, nothing was sent.
            fault.outcome_unknown = fault.outcome_unknown and connection is not None
            # Keep the traceback, but not the message: it may contain the values of a row.
            raise fault.with_traceback(error.__traceback__) from without_values(error)
        finally:
            if connection is None:
                self._slots.release()
            else:
                self._give_back(connection, ended_by)

    async def _take_slot(self) -> None:
        """Wait for a slot of the pool, at most as long as for an answer."""
        if not self._slots.locked():
            await self._slots.acquire()
            return
        seconds = self.limits.answer_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._slots.acquire()
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
            # The pool may have been closed while the connection was opened.
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
        """Return a connection to the pool or close it, and free its slot; after a cancellation once it is closed."""
        self._used.discard(connection)
        if isinstance(ended_by, asyncio.CancelledError) and not connection.is_closed() and not self._is_closed:
            self._close_in_background(connection)
            return
        self._slots.release()
        if connection.is_closed():
            return
        if is_answered(ended_by) and not connection.is_in_transaction() and not self._is_closed:
            self._free.append(connection)
            return
        connection.terminate()
        if isinstance(ended_by, TimeoutError):
            # The server does not answer: the idle connections are most likely dead too.
            for idle in self._free:
                idle.terminate()
            self._free.clear()

    def _close_in_background(self, connection: Connection) -> None:
        """Close the connection of a cancelled caller in the background: the driver first cancels its statement."""

        async def close_and_release() -> None:
            try:
                await close(connection, seconds=CLOSE_SECONDS)
            finally:
                self._slots.release()

        closing = asyncio.create_task(close_and_release())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def fetch(
        self, statement: Statement, values: Mapping[str, object], *, attempts: int = ATTEMPTS
    ) -> list[Record]:
        """Run one statement in its own transaction; retry if Postgres asks for it."""
        arguments = statement.arguments(values)

        async def run(connection: Connection) -> list[Record]:
            began = time.monotonic()
            rows: list[Record] = await connection.fetch(statement.sql, *arguments)
            if time.monotonic() - began > SLOW_SECONDS:
                await _discard_plans(connection)
            return rows

        return await self._retry(run, attempts)

    async def transact(self, work: Callable[["Transaction"], Awaitable[Answer]]) -> Answer:
        """Run work in one READ COMMITTED transaction; retry it from its start if Postgres asks for it."""

        is_committing = False

        async def run(connection: Connection) -> Answer:
            nonlocal is_committing
            is_committing = False
            transaction = connection.transaction()
            await transaction.start()
            statements = Transaction(connection)
            try:
                answer = await work(statements)
            except BaseException as error:
                # Otherwise the session is closed, which rolls the transaction back.
                if is_answered(error):
                    await transaction.rollback()
                raise
            is_committing = True
            await transaction.commit()
            for callback in statements.callbacks:
                callback()
            if statements.was_slow:
                await _discard_plans(connection)
            return answer

        try:
            return await self._retry(run)
        except StoreFault as fault:
            # Without a commit, nothing took effect.
            fault.outcome_unknown = fault.outcome_unknown and is_committing
            raise

    async def _retry(self, run: Callable[[Connection], Awaitable[Answer]], attempts: int = ATTEMPTS) -> Answer:
        for attempt in range(attempts):
            try:
                async with self.acquire() as connection:
                    return await run(connection)
            except StoreFault as fault:
                if fault.kind != "contention" or attempt == attempts - 1:
                    raise
            await asyncio.sleep(BACKOFF_SECONDS[attempt])
        raise AssertionError("unreachable")


class Transaction:
    """An open transaction."""

    __slots__ = ("callbacks", "connection", "was_slow")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.was_slow = False
        self.callbacks: list[Callable[[], None]] = []

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Call a function once the transaction has committed."""
        self.callbacks.append(callback)

    async def fetch(self, statement: Statement, **values: object) -> list[Record]:
        """The rows of one statement."""
        began = time.monotonic()
        rows: list[Record] = await self.connection.fetch(statement.sql, *statement.arguments(values))
        self.was_slow |= time.monotonic() - began > SLOW_SECONDS
        return rows


async def _discard_plans(connection: Connection) -> None:
    """Discard the plans of a session; on an error only the session ends, since its work is committed."""
    try:
        await connection.execute("discard plans")
    except Exception:
        connection.terminate()

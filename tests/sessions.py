"""Sessions that stay open between tests, with the statements they have prepared.

A new session has to parse and plan the statements of the engine again, which takes longer than most tests.
"""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

SCHEMA = "flowfabric"
COPY = "ff_copy_"
"""The prefix of the names of databases that tests use one after the other."""
PARKED = "parked between tests"
MAX_PARKED = 8
"""How many sessions with the same options are kept."""
_FIRST_OID = 16384
"""The lowest oid of objects that users create: below it, all databases have the same types."""
_PARK = f"select pg_advisory_unlock_all(); close all; unlisten *; reset all; set application_name = '{PARKED}'"


async def session(url: str, name: str) -> asyncpg.Connection:
    """A session of a test, on the schema of the store."""
    return await asyncpg.connect(url, server_settings={"search_path": SCHEMA, "application_name": name})


class Sessions:
    """The sessions on the databases that tests use one after the other.

    A session that is closed after a test is kept (parked) and reused by the next test that opens one with the same
    options. A parked session has another application name, so that a test finds only its own sessions. A session that
    is closed during a test is really closed.
    """

    def __init__(self) -> None:
        self.parks = False
        """Whether a session that is closed now is kept."""
        self._connect: Any = asyncpg.connect
        self._introspect: Any = asyncpg.Connection._introspect_types
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = urlsplit("")
        self._parked: dict[str, dict[str, list[Any]]] = {}
        self._kinds: dict[Any, Any] = {}
        self._newest_type = 0
        self._types: dict[frozenset[int], Any] = {}

    def begin(self, patch: pytest.MonkeyPatch, server: str, *, newest_type: int) -> None:
        """Keep the sessions that the running loop opens to exactly this address, except for the database name."""
        self._loop = asyncio.get_running_loop()
        self._server = urlsplit(server)
        self._newest_type = newest_type
        patch.setattr(asyncpg, "connect", self._open)
        patch.setattr(asyncpg.Connection, "_introspect_types", self._remembered_types())

    async def _open(self, dsn: str | None = None, **options: Any) -> Any:
        address = urlsplit(dsn or "")
        database = address.path[1:]
        is_direct = address._replace(path=self._server.path) == self._server
        if not is_direct or not database.startswith(COPY) or asyncio.get_running_loop() is not self._loop:
            return await self._connect(dsn, **options)
        key = repr(sorted(options.items(), key=lambda option: option[0]))
        parked = self._parked.get(database, {}).get(key, [])
        while parked:
            connection = parked.pop()
            if not connection.is_closed():
                await connection.execute("reset application_name")
                return connection
        kind = self._kind(options.pop("connection_class", asyncpg.Connection))
        connection = await self._connect(dsn, connection_class=kind, **options)
        connection.belongs_to = database, key
        return connection

    def _kind(self, given: Any) -> Any:
        """The class of connections that are parked instead of closed; `end` really closes one."""
        if given not in self._kinds:
            park = self._park

            async def close(connection: Any, *, timeout: float | None = None) -> None:
                if not await park(connection):
                    await given.close(connection, timeout=timeout)

            own = {"__slots__": ("belongs_to",), "close": close, "end": given.close}
            self._kinds[given] = type(given)(given.__name__, (given,), own)
        return self._kinds[given]

    async def _park(self, connection: Any) -> bool:
        """Park a session if it can be reset to its initial state; return whether it was parked."""
        if not self.parks or connection.is_closed() or connection.is_in_transaction():
            return False
        if connection._termination_listeners or connection._query_loggers or connection._cancellations:
            return False
        database, key = connection.belongs_to
        parked = self._parked.setdefault(database, {}).setdefault(key, [])
        if len(parked) >= MAX_PARKED:
            return False
        connection._listeners.clear()
        connection._log_listeners.clear()
        try:
            await connection.execute(_PARK)
        except BaseException:
            connection.terminate()
            raise
        parked.append(connection)
        return True

    async def leave(self, database: str) -> None:
        """Close the parked sessions on a database."""
        for parked in self._parked.pop(database, {}).values():
            for connection in parked:
                await connection.end()

    def forget_ended(self, database: str, pids: Iterable[int]) -> None:
        """Forget the parked sessions that the server has ended: all except these pids."""
        alive = set(pids)
        for parked in self._parked.get(database, {}).values():
            for connection in [each for each in parked if each.get_server_pid() not in alive]:
                parked.remove(connection)
                connection.terminate()

    def _remembered_types(self) -> Any:
        """The driver's query of types with cached answers: copies of the template have the same types."""

        async def introspect(connection: Any, oids: Any, timeout: Any) -> Any:
            wanted = frozenset(oids)
            newest = self._newest_type if connection._params.database.startswith(COPY) else _FIRST_OID - 1
            if max(wanted) > newest:
                return await self._introspect(connection, oids, timeout)
            if wanted not in self._types:
                self._types[wanted] = (await self._introspect(connection, oids, timeout))[0]
            return self._types[wanted], SimpleNamespace(name="remembered")

        return introspect


SESSIONS = Sessions()
"""The sessions of this process."""

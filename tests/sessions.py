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
"""The prefix of the names of databases that are copied from the template and used by one test after the other."""
PARKED = "parked between tests"
"""The application name of a parked session."""
MAX_PARKED = 8
"""The most sessions on a database that are parked with the same options."""
_FIRST_OID = 16384
"""The lowest oid of objects that users create; types with a lower oid are the same in all databases."""
_RESET = f"select pg_advisory_unlock_all(); close all; unlisten *; reset all; set application_name = '{PARKED}'"


async def session(url: str, name: str) -> asyncpg.Connection:
    """Open a session with this application name, on the schema of the store."""
    return await asyncpg.connect(url, server_settings={"search_path": SCHEMA, "application_name": name})


class Sessions:
    """The sessions on the databases that tests use one after the other.

    A session that is closed after a test is kept (parked) and reused by the next test that opens one with the same
    options. A parked session has another application name, so that a test finds only its own sessions. A session that
    is closed while the test itself runs is really closed.
    """

    def __init__(self) -> None:
        self.parks = False
        """Whether a session that is closed now is parked; set during the teardown of a test."""
        self._connect: Any = asyncpg.connect
        self._introspect: Any = asyncpg.Connection._introspect_types
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = urlsplit("")
        self._parked: dict[str, dict[str, list[Any]]] = {}
        self._parking_classes: dict[Any, Any] = {}
        self._last_type_oid = 0
        self._types: dict[frozenset[int], Any] = {}

    def begin(self, patch: pytest.MonkeyPatch, server: str, *, last_type_oid: int) -> None:
        """From now on, park sessions that the running loop opens on copies of the template on this server.

        `last_type_oid` is the highest oid of a type in the template.
        """
        self._loop = asyncio.get_running_loop()
        self._server = urlsplit(server)
        self._last_type_oid = last_type_oid
        patch.setattr(asyncpg, "connect", self._open)
        patch.setattr(asyncpg.Connection, "_introspect_types", self._cached_introspection())

    async def _open(self, dsn: str | None = None, **options: Any) -> Any:
        address = urlsplit(dsn or "")
        database = address.path[1:]
        # A test may also connect through a proxy or as another user; such sessions are not parked.
        is_direct = address._replace(path=self._server.path) == self._server
        if not is_direct or not database.startswith(COPY) or asyncio.get_running_loop() is not self._loop:
            return await self._connect(dsn, **options)
        key = repr(sorted(options.items(), key=lambda option: option[0]))
        parked = self._parked.get(database, {}).get(key, [])
        while parked:
            connection = parked.pop()
            if not connection.is_closed():
                try:
                    await connection.execute("reset application_name")
                except BaseException:
                    # A cancelled caller does not get the session.
                    connection.terminate()
                    raise
                return connection
        parking_class = self._parking_class(options.pop("connection_class", asyncpg.Connection))
        connection = await self._connect(dsn, connection_class=parking_class, **options)
        connection.parks_under = database, key
        return connection

    def _parking_class(self, given: Any) -> Any:
        """A subclass of this connection class whose `close` parks; its `really_close` closes."""
        if given not in self._parking_classes:
            park = self._park

            async def close(connection: Any, *, timeout: float | None = None) -> None:
                if not await park(connection):
                    await given.close(connection, timeout=timeout)

            members = {"__slots__": ("parks_under",), "close": close, "really_close": given.close}
            self._parking_classes[given] = type(given)(given.__name__, (given,), members)
        return self._parking_classes[given]

    async def _park(self, connection: Any) -> bool:
        """Park a session if it can be reset to its initial state; return whether it was parked."""
        if not self.parks or connection.is_closed() or connection.is_in_transaction():
            return False
        if connection._termination_listeners or connection._query_loggers or connection._cancellations:
            return False
        database, key = connection.parks_under
        parked = self._parked.setdefault(database, {}).setdefault(key, [])
        if len(parked) >= MAX_PARKED:
            return False
        connection._listeners.clear()
        connection._log_listeners.clear()
        try:
            await connection.execute(_RESET)
        except BaseException:
            connection.terminate()
            raise
        parked.append(connection)
        return True

    async def close_parked(self, database: str) -> None:
        """Close the parked sessions on a database."""
        for parked in self._parked.pop(database, {}).values():
            for connection in parked:
                await connection.really_close()

    def forget_ended(self, database: str, pids: Iterable[int]) -> None:
        """Forget the parked sessions that the server has ended: all except those with these pids."""
        alive = set(pids)
        for parked in self._parked.get(database, {}).values():
            for connection in [each for each in parked if each.get_server_pid() not in alive]:
                parked.remove(connection)
                connection.terminate()

    def _cached_introspection(self) -> Any:
        """The driver's query for types, with cached answers: all copies of the template have the same types."""

        async def introspect(connection: Any, oids: Any, timeout: Any) -> Any:
            wanted = frozenset(oids)
            last_known = self._last_type_oid if connection._params.database.startswith(COPY) else _FIRST_OID - 1
            if max(wanted) > last_known:
                return await self._introspect(connection, oids, timeout)
            if wanted not in self._types:
                self._types[wanted] = (await self._introspect(connection, oids, timeout))[0]
            return self._types[wanted], SimpleNamespace(name="cached")

        return introspect


SESSIONS = Sessions()
"""The sessions of this process."""

"""Sessions that stay open between tests, with the statements they have prepared.

A new session parses and plans the statements of the engine again, which costs more than most tests.
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
"""What the names of the databases begin with that go from test to test."""
PARKED = "parked between tests"
MOST_PARKED = 8
"""How many sessions that are alike are kept."""
_FIRST_OID = 16384
"""The least of what one database has and another need not have."""
_PARK = f"select pg_advisory_unlock_all(); close all; unlisten *; reset all; set application_name = '{PARKED}'"


async def session(url: str, name: str) -> asyncpg.Connection:
    """A session of a test, on the schema of the store."""
    return await asyncpg.connect(url, server_settings={"search_path": SCHEMA, "application_name": name})


class Sessions:
    """The sessions with the databases that go from test to test.

    Whatever is closed after a test is kept and given to the next one that asks for a session with the same options.
    Meanwhile it bears another name, so that a test finds its own sessions only. What is closed within a test is closed.
    """

    def __init__(self) -> None:
        self.parks = False
        """Whether a session that is closed now is kept."""
        self._connect: Any = asyncpg.connect
        self._ask_types: Any = asyncpg.Connection._introspect_types
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = urlsplit("")
        self._parked: dict[str, dict[str, list[Any]]] = {}
        self._kinds: dict[Any, Any] = {}
        self._newest_type = 0
        self._types: dict[frozenset[int], Any] = {}

    def begin(self, patch: pytest.MonkeyPatch, server: str, *, newest_type: int) -> None:
        """Keep the sessions that the running loop opens with a server, as that superuser and through nothing else."""
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
        """The kind of a connection that is kept where it is closed; `end` closes it for good."""
        if given not in self._kinds:
            park = self._park

            async def close(connection: Any, *, timeout: float | None = None) -> None:
                if not await park(connection):
                    await given.close(connection, timeout=timeout)

            own = {"__slots__": ("belongs_to",), "close": close, "end": given.close}
            self._kinds[given] = type(given)(given.__name__, (given,), own)
        return self._kinds[given]

    async def _park(self, connection: Any) -> bool:
        """Whether a session was kept: one that can be made as it was when it was opened."""
        if not self.parks or connection.is_closed() or connection.is_in_transaction():
            return False
        if connection._termination_listeners or connection._query_loggers or connection._cancellations:
            return False
        database, key = connection.belongs_to
        parked = self._parked.setdefault(database, {}).setdefault(key, [])
        if len(parked) >= MOST_PARKED:
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
        """Close the sessions with a database."""
        for parked in self._parked.pop(database, {}).values():
            for connection in parked:
                await connection.end()

    def forget_ended(self, database: str, pids: Iterable[int]) -> None:
        """Let go of the sessions that the server has ended: all but these."""
        alive = set(pids)
        for parked in self._parked.get(database, {}).values():
            for connection in [each for each in parked if each.get_server_pid() not in alive]:
                parked.remove(connection)
                connection.terminate()

    def _remembered_types(self) -> Any:
        """Answers what the driver asks every new session about types, which copies of the template have in common."""

        async def introspect(connection: Any, oids: Any, timeout: Any) -> Any:
            wanted = frozenset(oids)
            newest = self._newest_type if connection._params.database.startswith(COPY) else _FIRST_OID - 1
            if max(wanted) > newest:
                return await self._ask_types(connection, oids, timeout)
            if wanted not in self._types:
                self._types[wanted] = (await self._ask_types(connection, oids, timeout))[0]
            return self._types[wanted], SimpleNamespace(name="remembered")

        return introspect


SESSIONS = Sessions()
"""Those of this process."""

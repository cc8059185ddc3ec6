"""The servers of the tests and the databases on them."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest
from asyncpg.connection import Connection

Answer = TypeVar("Answer")

SCHEMA = "flowfabric"
DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")

# Nothing of a test outlives it, so nothing is worth a flush; a crash test has a server of its own.
CARELESS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "autovacuum": "off"}

# A clock that can be moved or stopped, and a note of every change to what a database consists of.
FOR_TESTS = f"""
set search_path to {SCHEMA};
create table test_clock (offset_ms bigint not null, stands boolean not null);
insert into test_clock values (0, false);
create or replace function ff_now() returns bigint language sql volatile parallel safe
  return (select offset_ms + case when stands then 0 else (extract(epoch from clock_timestamp()) * 1000)::bigint end
            from test_clock);
create table test_change (tag text);
create function test_note_change() returns event_trigger language plpgsql security definer
  as $$ begin insert into {SCHEMA}.test_change values (tg_tag); end $$;
create event trigger test_change on ddl_command_end execute function test_note_change();
"""

# Whether a database is as it was made but for its rows (what it consists of, its ledger, and what the planner knows),
# and the tables to truncate: those that hold rows, and empty ones that a vacuum has counted, which the planner takes
# for smaller than a table that nobody has looked at.
_LOOK = """
select not exists (select from test_change)
       and not exists (select from pg_statistic s join pg_class c on c.oid = s.starelid
                        where c.relnamespace = current_schema::regnamespace)
       and (select string_agg(m::text, ' ' order by m::text) from schema_migration m) = $1 as is_as_made,
       (select string_agg(quote_ident(relname), ', ') from pg_class
         where relnamespace = current_schema::regnamespace and relkind = 'r'
           and relname <> all(array['test_clock', 'test_change', 'schema_migration'])
           and (pg_relation_size(oid) > 0 or reltuples >= 0)) as used
"""
_LEDGER = "select string_agg(m::text, ' ' order by m::text) from schema_migration m"
_RESET = """
update test_clock set offset_ms = 0, stands = false;
select setval('execution_sequence', 1, false), pg_stat_reset(), pg_stat_force_next_flush();
"""
_COPY = "ff_copy_"
_FIRST_OID = 16384
"""The least of what one database has and another need not have."""


def run(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Run async work from a sync fixture; in a thread, so that the loop of the tests is left alone."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def execute(url: str, *commands: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for command in commands:
            await connection.execute(command)
    finally:
        await connection.close()


def at_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


@contextmanager
def debian_15() -> Iterator[str]:
    """A server on the binaries of Debian's package, as a user who is not root."""
    if not DEBIAN_15.exists():
        pytest.exit(f"FF_TEST_POSTGRES=15 needs {DEBIAN_15}: install the package postgresql-15", 2)
    user = "postgres" if os.geteuid() == 0 else None
    place = Path(tempfile.mkdtemp(prefix="ff-15-", dir="/tmp"))
    if user:
        shutil.chown(place, user)
    data = place / "data"

    def tool(name: str, *arguments: str) -> None:
        # The server inherits what it writes to, and a pipe would not end before it does.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [str(DEBIAN_15 / name), *arguments],
                cwd=place,
                stdout=output,
                stderr=output,
                user=user,
                extra_groups=[] if user else None,
                check=False,
            )
            output.seek(0)
            assert done.returncode == 0, output.read().decode(errors="replace")

    try:
        options = ("--username", "postgres", "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync")
        tool("initdb", *options, "--pgdata", str(data))
        start = ("start", "-w", "-D", str(data), "-l", str(place / "log"), "-o", f"-h '' -k '{place}' -N 200")
        tool("pg_ctl", *start)
        try:
            yield f"postgresql://postgres@/postgres?host={place}"
        finally:
            tool("pg_ctl", "stop", "-m", "immediate", "-w", "-D", str(data))
    finally:
        shutil.rmtree(place)


async def session(url: str, name: str) -> asyncpg.Connection:
    return await asyncpg.connect(url, server_settings={"search_path": SCHEMA, "application_name": name})


async def _others(connection: asyncpg.Connection, database: str) -> list[str]:
    query = """select coalesce(application_name, '') || ' ' || state || ': ' || query from pg_stat_activity
                where datname = $1 and pid <> pg_backend_pid() and backend_type = 'client backend'
               union all select 'prepared transaction ' || gid from pg_prepared_xacts where database = $1"""
    return [row[0] for row in await connection.fetch(query, database)]


async def left_on(connection: asyncpg.Connection, name: str) -> list[str]:
    """The sessions a test has left on its database."""
    deadline = time.monotonic() + 30
    while True:
        left = await _others(connection, name)
        # A closed session takes a moment to leave the server's list.
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.002)


class Beside:
    """A loop in a thread of its own: what is opened there outlives the loops of the tests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def do(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for work in the loop beside this one."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Databases:
    """Copies of the template: made when none is free, emptied after a test and given to the next one.

    Each has a session that stays, which knows its tables already when it empties them.
    """

    def __init__(self, server: str, template: str) -> None:
        self._server = server
        self._template = template
        self._beside = Beside()
        self._free: list[tuple[str, asyncpg.Connection]] = []
        self._ledger = ""
        self._newest_type = 0
        self._types: dict[frozenset[int], Any] = {}

    async def open(self) -> None:
        """Look at the template, which stays as it is."""
        connection = await session(at_database(self._server, self._template), "test")
        self._ledger = await connection.fetchval(_LEDGER)
        self._newest_type = await connection.fetchval("select max(oid)::bigint from pg_type")
        await connection.close()

    def remember_types(self, patch: pytest.MonkeyPatch) -> None:
        """Answer what the driver asks about types in every new session, which copies of the template have in common."""
        ask = Connection._introspect_types

        async def introspect(connection: Any, oids: Any, timeout: Any) -> Any:
            wanted = frozenset(oids)
            newest = self._newest_type if connection._params.database.startswith(_COPY) else _FIRST_OID - 1
            if max(wanted) > newest:
                return await ask(connection, oids, timeout)
            if wanted not in self._types:
                self._types[wanted] = (await ask(connection, oids, timeout))[0]
            return self._types[wanted], SimpleNamespace(name="remembered")

        patch.setattr(Connection, "_introspect_types", introspect)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[str]:
        """The address of a database whose tables are empty."""
        name, keeper = await self._beside.do(self._take())
        yield at_database(self._server, name)
        left = await self._beside.do(self._give_back(name, keeper))
        assert not left, f"the test left sessions open: {left}"

    async def _take(self) -> tuple[str, asyncpg.Connection]:
        while self._free:
            name, keeper = self._free.pop()
            if not keeper.is_closed():
                return name, keeper
        name = f"{_COPY}{uuid4().hex}"
        await execute(self._server, f"create database {name} template {self._template} strategy file_copy")
        return name, await session(at_database(self._server, name), "test databases")

    async def _give_back(self, name: str, keeper: asyncpg.Connection) -> list[str]:
        """The sessions a test has left on its database, which is kept when there are none and it is as it was made."""
        left: list[str] = []
        if not keeper.is_closed():
            left = await left_on(keeper, name)
            if not left and await self._emptied(keeper):
                self._free.append((name, keeper))
                return left
            await keeper.close()
        await execute(self._server, f"drop database if exists {name} with (force)")
        return left

    async def _emptied(self, keeper: asyncpg.Connection) -> bool:
        """Whether a database is as it was made, after its rows are gone; otherwise it is not worth keeping."""
        is_as_made, used = await keeper.fetchrow(_LOOK, self._ledger)
        if is_as_made:
            empty = f"truncate {used} restart identity cascade;" if used else ""
            await keeper.execute(empty + _RESET)
        return bool(is_as_made)

    async def close(self) -> None:
        """Drop what is free."""
        await self._beside.do(self._drop())
        self._beside.close()

    async def _drop(self) -> None:
        for name, keeper in self._free:
            await keeper.close()
            await execute(self._server, f"drop database if exists {name} with (force)")

"""The servers of the tests and the databases on them."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

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

# Whether a database is as it was made but for its rows: what it consists of, its ledger, and what the planner knows.
_IS_AS_MADE = """
select not exists (select from test_change)
   and not exists (select from pg_statistic s join pg_class c on c.oid = s.starelid
                    where c.relnamespace = current_schema::regnamespace)
   and (select string_agg(m::text, ' ' order by m::text) from schema_migration m) = $1
"""
_LEDGER = "select string_agg(m::text, ' ' order by m::text) from schema_migration m"
_KEPT = ["test_clock", "test_change", "schema_migration"]
_USED = """
select string_agg(quote_ident(relname), ', ') from pg_class
 where relnamespace = current_schema::regnamespace and relkind = 'r'
   and relname <> all($1::text[]) and pg_relation_size(oid) > 0
"""


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
    left: list[str] = []
    # A closed session takes a moment to leave the server's list.
    for _ in range(200):
        left = await _others(connection, name)
        if not left:
            break
        await asyncio.sleep(0.01)
    return left


class Databases:
    """Copies of the template: made when none is free, emptied after a test and given to the next one."""

    def __init__(self, server: str, template: str) -> None:
        self._server = server
        self._template = template
        self._free: list[str] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[str]:
        """The address of a database whose tables are empty."""
        connection = await asyncpg.connect(self._server)
        try:
            name = self._free.pop() if self._free else f"ff_test_{uuid4().hex}"
            if not await connection.fetchval("select exists (select from pg_database where datname = $1)", name):
                await connection.execute(f"create database {name} template {self._template} strategy file_copy")
            url = at_database(self._server, name)
            yield url
            left = await left_on(connection, name)
            if not left and await self._emptied(url):
                self._free.append(name)
            else:
                await connection.execute(f"drop database {name} with (force)")
            assert not left, f"the test left sessions open: {left}"
        finally:
            await connection.close()

    async def _emptied(self, url: str) -> bool:
        """Whether a database is as it was made, after its rows are gone; otherwise it is not worth keeping."""
        template = await session(at_database(self._server, self._template), "test")
        ledger = await template.fetchval(_LEDGER)
        await template.close()
        connection = await session(url, "test")
        try:
            if not await connection.fetchval(_IS_AS_MADE, ledger):
                return False
            if used := await connection.fetchval(_USED, _KEPT):
                await connection.execute(f"truncate {used} restart identity cascade")
            await connection.execute("update test_clock set offset_ms = 0, stands = false")
            await connection.execute("select setval('execution_sequence', 1, false), pg_stat_reset()")
            return True
        finally:
            await connection.close()

    async def drop(self) -> None:
        """Drop what is free."""
        await execute(self._server, *(f"drop database {name} with (force)" for name in self._free))

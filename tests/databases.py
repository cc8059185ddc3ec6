"""The databases of the tests: copies of one migrated template, emptied between tests or made for one test."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest
from asyncpg.connection import connect

from flowfabric.db.migrate import migrate
from sessions import COPY, PARKED, SCHEMA, SESSIONS

_TIMEOUT_SECONDS = 30
_OWN_TABLES = "array['test_clock', 'test_change', 'schema_migration']"
_LARGE = 64 * 1024
"""A table larger than this is truncated, so that a test does not scan the dead rows of earlier tests."""

# A clock that can be moved or stopped, and a record of every change to the schema.
_FOR_TESTS = """
create table test_clock (offset_ms bigint not null, is_stopped boolean not null);
insert into test_clock values (0, false);
create or replace function ff_now() returns bigint language sql volatile parallel safe
  return (select offset_ms + case when is_stopped then 0 else (extract(epoch from clock_timestamp()) * 1000)::bigint end
            from test_clock);
create table test_change (tag text);
create function test_record_change() returns event_trigger language plpgsql security definer
  as $$ begin insert into flowfabric.test_change values (tg_tag); end $$;
create event trigger test_change on ddl_command_end execute function test_record_change();
"""

# Creates the function that empties this database. It deletes row by row: after a truncate every session would plan its
# statements again.
_MAKE_EMPTY = f"""
do $make$
declare steps text;
begin
  select string_agg(
           case relkind when 'S' then format('if (select is_called from %1$I) then
                                                perform setval(%1$L, 1, false); end if;', relname)
                        else format('if exists (select from %1$I) then delete from %1$I; end if;', relname)
           end, ' ')
    into steps
    from pg_class
   where relnamespace = current_schema::regnamespace and relkind in ('r', 'S') and relname <> all({_OWN_TABLES});
  execute format('create or replace function test_empty() returns void language plpgsql
                    set session_replication_role = replica as %L',
                 'begin update test_clock set offset_ms = 0, is_stopped = false where offset_ms <> 0 or is_stopped; '
                 || steps || ' end');
  delete from test_change;
end $make$;
"""

# The tables that have or had rows, and empty ones that were vacuumed: the planner estimates those to be smaller than a
# table without statistics.
_USED = f"""
select string_agg(quote_ident(relname), ', ') from pg_class
 where relnamespace = current_schema::regnamespace and relkind = 'r' and relname <> all({_OWN_TABLES})
   and (pg_relation_size(oid) > 0 or reltuples >= 0)
"""

_LEDGER = "select string_agg(m::text, ' ' order by m::text) from schema_migration m"
_LEFT = """
select concat(application_name, ' ', state, ': ', query) from pg_stat_activity
 where datname = $1 and pid <> pg_backend_pid() and backend_type = 'client backend'
union all
select concat('prepared transaction ', gid) from pg_prepared_xacts where database = $1
"""

# The sessions left open on a database, the parked ones, whether everything except its rows is unchanged (the schema,
# the migration ledger and the statistics of the planner), and the tables that are too large to be emptied row by row.
_STATE = f"""
with others as materialized (
  select pid, application_name, state, query from pg_stat_activity
   where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend')
select array(select concat(application_name, ' ', state, ': ', query) from others where application_name <> '{PARKED}'
             union all
             select concat('prepared transaction ', gid) from pg_prepared_xacts where database = current_database()),
       array(select pid from others where application_name = '{PARKED}'),
       not exists (select from test_change)
       and not exists (select from pg_statistic s join pg_class c on c.oid = s.starelid
                        where c.relnamespace = current_schema::regnamespace)
       and ({_LEDGER}) = $1,
       ({_USED} and (pg_relation_size(oid) > {_LARGE} or reltuples >= 0))
"""


def at_database(url: str, name: str) -> str:
    """The address of another database on the same server."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


async def execute(url: str, *commands: str) -> None:
    """Run commands in a new session."""
    connection = await asyncpg.connect(url)
    try:
        for command in commands:
            await connection.execute(command)
    finally:
        await connection.close()


class Copy:
    """A database that tests use one after the other, with a session that stays open."""

    RENEWED_AFTER = 50
    """After this many tests the tables are truncated, because deleted rows leave entries in the indexes."""

    def __init__(self, name: str, keeper: asyncpg.Connection) -> None:
        self.name = name
        self.keeper = keeper
        self._uses = 0

    async def alter(self, alteration: str) -> None:
        """Change the schema for all tests of this database."""
        await self.keeper.execute(alteration)
        await self.keeper.execute(_MAKE_EMPTY)

    async def empty(self, ledger: str) -> tuple[list[str], bool]:
        """Delete all rows; return the sessions that the test left open, and whether the database can be used again."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            left, parked, is_unchanged, large = await self.keeper.fetchrow(_STATE, ledger)
            # The server lists a closed session for a short time.
            if not left or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.002)
        if left or not is_unchanged:
            return left, False
        SESSIONS.forget_ended(self.name, parked)
        self._uses += 1
        if self._uses >= self.RENEWED_AFTER:
            await self.renew()
        elif large is not None:
            await self.keeper.execute(f"truncate {large} restart identity cascade")
        await self.keeper.execute("select test_empty()")
        return left, True

    async def renew(self) -> None:
        """Truncate every table that was used, and reset the statistics of the server."""
        self._uses = 0
        used = await self.keeper.fetchval(_USED)
        if used is not None:
            await self.keeper.execute(f"truncate {used} restart identity cascade")
        await self.keeper.execute("select pg_stat_reset(), pg_stat_force_next_flush()")


class Databases:
    """The databases of one process on a server."""

    def __init__(self, server: str, connection: asyncpg.Connection) -> None:
        self._server = server
        self._connection = connection
        self._template = ""
        self._free: dict[str, list[Copy]] = {}
        self._ledger = ""

    @classmethod
    @asynccontextmanager
    async def on(cls, server: str) -> AsyncIterator["Databases"]:
        """The databases of this process on a server; sessions on them are kept until the block ends."""
        databases = cls(server, await asyncpg.connect(server))
        async with databases.new(migrated=False) as url:
            databases._template = urlsplit(url).path[1:]
            connection = await asyncpg.connect(url, server_settings={"search_path": SCHEMA})
            await migrate(connection, schema=SCHEMA)
            await connection.execute(_FOR_TESTS + _MAKE_EMPTY)
            databases._ledger = await connection.fetchval(_LEDGER)
            last_type_oid = await connection.fetchval("select max(oid)::bigint from pg_type")
            await connection.close()
            with pytest.MonkeyPatch.context() as patch:
                SESSIONS.begin(patch, server, last_type_oid=last_type_oid)
                yield databases
            for copy in [copy for free in databases._free.values() for copy in free]:
                await databases._drop(copy)
        await databases._connection.close()

    @asynccontextmanager
    async def one(self, *, alteration: str = "", fresh: bool = False) -> AsyncIterator[str]:
        """The address of a database with empty tables; with `fresh`, tables that no test has used before."""
        copy = await self._take(alteration)
        if fresh:
            await SESSIONS.close_parked(copy.name)
            await copy.renew()
        try:
            yield at_database(self._server, copy.name)
        except BaseException:
            await self._drop(copy)
            raise
        left = await self._give_back(copy, alteration)
        assert not left, f"the test left sessions open: {left}"

    @asynccontextmanager
    async def new(self, *, migrated: bool = True, template: str = "") -> AsyncIterator[str]:
        """The address of a database that is dropped after the block: empty, migrated, or a copy of another one."""
        name = f"{COPY if migrated else 'ff_empty_'}{uuid4().hex}"
        if template:
            # Postgres does not copy a database that has sessions.
            await self._left_on(urlsplit(template).path[1:])
            await self._create(name, urlsplit(template).path[1:])
        else:
            await self._create(name, self._template if migrated else "template1")
        try:
            yield at_database(self._server, name)
            await SESSIONS.close_parked(name)
            left = await self._left_on(name)
            assert not left, f"sessions were left open: {left}"
        finally:
            await SESSIONS.close_parked(name)
            await self._connection.execute(f"drop database {name} with (force)")

    async def _create(self, name: str, template: str) -> None:
        await self._connection.execute(f"create database {name} template {template} strategy file_copy")

    async def _left_on(self, name: str) -> list[str]:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            left = [row[0] for row in await self._connection.fetch(_LEFT, name)]
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.002)

    async def _take(self, alteration: str) -> Copy:
        free = self._free.get(alteration, [])
        while free:
            copy = free.pop()
            if not copy.keeper.is_closed():
                return copy
        name = f"{COPY}{uuid4().hex}"
        await self._create(name, self._template)
        settings = {"search_path": SCHEMA, "application_name": "test databases"}
        copy = Copy(name, await connect(at_database(self._server, name), server_settings=settings))
        if alteration:
            await copy.alter(alteration)
        return copy

    async def _give_back(self, copy: Copy, alteration: str) -> list[str]:
        """Keep the database for another test unless sessions are left open or it has changed; return those sessions."""
        left: list[str] = []
        if not copy.keeper.is_closed():
            left, is_reusable = await copy.empty(self._ledger)
            if is_reusable:
                self._free.setdefault(alteration, []).append(copy)
                return left
        await self._drop(copy)
        return left

    async def _drop(self, copy: Copy) -> None:
        await SESSIONS.close_parked(copy.name)
        await copy.keeper.close()
        await self._connection.execute(f"drop database if exists {copy.name} with (force)")

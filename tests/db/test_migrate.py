"""Migrations: applied once, recorded, checked, printed, and refused if code and schema do not match."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from databases import at_database, execute
from flowfabric.db.dump import SCHEMA_FILE, dump_migrations, dump_schema
from flowfabric.db.embedded import Embedded
from flowfabric.db.migrate import (
    Migration,
    MigrationError,
    Verdict,
    check,
    check_schema_name,
    load_migrations,
    migrate,
    render_sql,
)

FIRST = "-- compatible: no\n-- People.\ncreate table person (name text primary key);\n"
SECOND = "-- compatible: yes\n-- Their ages.\nalter table person add age int;\n"
THIRD = "-- compatible: no\n-- Their ages go.\nalter table person drop age;\n"

Write = Callable[..., tuple[Migration, ...]]


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run async work from a fixture that is not async, without touching the event loop of the tests."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


@pytest.fixture(scope="module")
def database_url(server: str) -> Iterator[str]:
    """The address of a database without migrations, shared by the tests of this module."""
    name = f"ff_migrate_{uuid4().hex}"
    run(execute(server, f"create database {name}"))
    yield at_database(server, name)
    run(execute(server, f"drop database {name} with (force)"))


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to a database without migrated schemas; those of the test are dropped."""
    connection = await asyncpg.connect(database_url)
    yield connection
    for (schema,) in await connection.fetch(
        "select nspname from pg_namespace where nspname !~ '^pg_' and nspname not in ('public', 'information_schema')"
    ):
        await connection.execute(f'drop schema "{schema}" cascade')
    await connection.close()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Make a folder of migrations from their texts."""

    def write(*texts: str) -> tuple[Migration, ...]:
        for number, text in enumerate(texts, start=1):
            (tmp_path / f"{number:04}_step.sql").write_text(text)
        return load_migrations(tmp_path)

    return write


async def ledger(connection: asyncpg.Connection, schema: str) -> list[int]:
    return [row["number"] for row in await connection.fetch(f"select number from {schema}.schema_migration order by 1")]


def files(migrations: Sequence[Migration]) -> list[str]:
    return [migration.file for migration in migrations]


async def test_a_schema_gets_every_migration_by_a_run_or_by_the_printed_script(connection: asyncpg.Connection) -> None:
    known = load_migrations()
    # A reserved word is a valid name.
    assert await migrate(connection, schema="select") == list(known)
    await connection.execute(render_sql(known, "printed"))
    for schema in ("select", "printed"):
        rows = await connection.fetch(f'select * from "{schema}".schema_migration order by number')
        assert [(row["number"], row["name"], row["checksum"], row["compatible"]) for row in rows] == [
            (one.number, one.name, one.checksum, one.compatible) for one in known
        ]
        assert all(row["applied_at"] is not None and row["applied_by"].startswith("flowfabric ") for row in rows)
        assert (await check(connection, schema=schema)).verdict is Verdict.CURRENT
    assert await dump_schema(connection, schema="select") == await dump_schema(connection, schema="printed")
    assert await connection.fetchval("select count(*) from pg_class where relnamespace = 'public'::regnamespace") == 0


async def test_a_run_applies_only_what_is_new(connection: asyncpg.Connection, write: Write) -> None:
    known = write(FIRST, SECOND)
    assert files(await migrate(connection, schema="here", migrations=known[:1])) == ["0001_step.sql"]
    assert files(await migrate(connection, schema="here", migrations=known)) == ["0002_step.sql"]
    assert await migrate(connection, schema="here", migrations=known) == []


async def test_an_older_embedded_postgres_gets_the_same_schema(fresh_home: Path) -> None:
    older = await asyncio.to_thread(Embedded.start, fresh_home, version=16)
    try:
        connection = await asyncpg.connect(older.url)
        assert await connection.fetchval("select current_setting('server_version_num')::int / 10000") == 16
        assert await connection.fetchval("select current_database()") == "flowfabric"
        await connection.close()
        assert await dump_migrations(older.url) == SCHEMA_FILE.read_text(encoding="utf-8")
    finally:
        await asyncio.to_thread(older.release)


async def test_concurrent_runs_apply_each_migration_once(
    database_url: str, connection: asyncpg.Connection, write: Write
) -> None:
    known = write(FIRST, SECOND, THIRD)
    connections = [await asyncpg.connect(database_url) for _ in range(4)]
    runs = await asyncio.gather(*(migrate(one, schema="here", migrations=known) for one in connections))
    assert sorted(migration.number for run in runs for migration in run) == [1, 2, 3]
    assert await ledger(connection, "here") == [1, 2, 3]
    for one in connections:
        await one.close()


async def test_a_run_waits_for_another_longer_than_the_lock_timeout_of_its_session(
    database_url: str, connection: asyncpg.Connection, write: Write
) -> None:
    known = write(FIRST)
    hasty = await asyncpg.connect(database_url, server_settings={"lock_timeout": "1ms"})
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(hashtextextended('flowfabric migrate here', 0))")
        run = asyncio.create_task(migrate(hasty, schema="here", migrations=known))
        waiting = "select exists (select from pg_locks where locktype = 'advisory' and not granted)"
        while not await connection.fetchval(waiting):
            assert not run.done()
        await connection.execute("select pg_sleep(0.05)")
    assert await run == list(known)
    await hasty.close()


TWO_TABLES = "-- compatible: no\n-- Two tables.\ncreate table first ();\ncreate table second ();\n"
THEIR_AGES = "-- compatible: yes\n-- Ages.\nalter table first add age int;\nalter table second add age int;\n"


async def migrate_into_a_deadlock(
    url: str, connection: asyncpg.Connection, known: tuple[Migration, ...]
) -> list[Migration]:
    """Apply the second migration beside a session that has locked `second` and then locks `first`."""
    await migrate(connection, schema="here", migrations=known[:1])
    # The session that looks for a deadlock first is the one that is rolled back.
    await connection.execute("set deadlock_timeout = '10ms'")
    rival = await asyncpg.connect(url, server_settings={"deadlock_timeout": "1h"})
    async with rival.transaction():
        await rival.execute("lock table here.second in access share mode")
        run = asyncio.create_task(migrate(connection, schema="here", migrations=known))
        waiting = "select exists (select from pg_locks where relation = 'here.second'::regclass and not granted)"
        while not await rival.fetchval(waiting):
            assert not run.done()
        await rival.execute("lock table here.first in access share mode")
    await rival.close()
    return await run


async def test_a_migration_that_deadlocks_with_running_work_is_applied_at_the_next_try(
    database_url: str, connection: asyncpg.Connection, write: Write
) -> None:
    known = write(TWO_TABLES, THEIR_AGES)
    assert await migrate_into_a_deadlock(database_url, connection, known) == [known[1]]
    assert await ledger(connection, "here") == [1, 2]


async def test_a_migration_that_only_deadlocks_is_given_up(
    database_url: str, connection: asyncpg.Connection, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.db.migrate.MAX_DEADLOCKS", 0)
    with pytest.raises(MigrationError, match="schema here was not migrated further: 1 tries deadlocked"):
        await migrate_into_a_deadlock(database_url, connection, write(TWO_TABLES, THEIR_AGES))
    assert await ledger(connection, "here") == [1]


async def test_a_migration_that_fails_changes_nothing_and_earlier_ones_stay(
    connection: asyncpg.Connection, write: Write
) -> None:
    known = write(FIRST, "-- compatible: yes\n-- Broken.\ncreate table half (id int);\nselect 1 / 0;\n")
    with pytest.raises(
        MigrationError, match=r"0002_step\.sql failed on schema here and changed nothing: division by zero"
    ):
        await migrate(connection, schema="here", migrations=known)
    assert await ledger(connection, "here") == [1]
    assert await connection.fetchval("select to_regclass('here.half')") is None


async def test_a_migration_that_changed_after_it_was_applied_is_refused_by_name(
    connection: asyncpg.Connection, write: Write
) -> None:
    await migrate(connection, schema="here", migrations=write(FIRST))
    changed = write(FIRST.replace("name text", "name varchar"), SECOND)
    with pytest.raises(MigrationError, match=r"0001_step\.sql differs from the file that was applied as 0001_step"):
        await migrate(connection, schema="here", migrations=changed)
    status = await check(connection, schema="here", migrations=changed)
    assert (status.verdict, status.runs) == (Verdict.DAMAGED, False)
    assert await ledger(connection, "here") == [1]


async def test_an_older_schema_needs_a_migration(connection: asyncpg.Connection, write: Write) -> None:
    known = write(FIRST, SECOND)
    status = await check(connection, schema="here", migrations=known)
    assert (status.verdict, status.runs, status.pending) == (Verdict.BEHIND, False, known)
    assert "schema here is empty" in status.text
    await migrate(connection, schema="here", migrations=known[:1])
    status = await check(connection, schema="here", migrations=known)
    assert (status.verdict, status.runs, files(status.pending)) == (Verdict.BEHIND, False, ["0002_step.sql"])
    assert "at migration 1" in status.text
    assert status.text.endswith("needs migration 2: run `ff migrate`")


async def test_code_runs_on_a_newer_schema_whose_newer_migrations_are_compatible(
    connection: asyncpg.Connection, write: Write
) -> None:
    known = write(FIRST, SECOND)
    await migrate(connection, schema="here", migrations=known)
    status = await check(connection, schema="here", migrations=known[:1])
    assert (status.verdict, status.runs) == (Verdict.AHEAD, True)
    assert [one.number for one in status.newer] == [2]
    assert await migrate(connection, schema="here", migrations=known[:1]) == []


async def test_code_refuses_a_newer_schema_with_a_breaking_migration(
    connection: asyncpg.Connection, write: Write
) -> None:
    known = write(FIRST, SECOND, THIRD)
    await migrate(connection, schema="here", migrations=known)
    status = await check(connection, schema="here", migrations=known[:1])
    assert (status.verdict, status.runs) == (Verdict.BREAKING, False)
    assert "0003_step broke compatibility, upgrade flowfabric" in status.text
    with pytest.raises(MigrationError, match="0003_step broke compatibility"):
        await migrate(connection, schema="here", migrations=known[:1])


async def test_a_gap_in_the_ledger_is_refused(connection: asyncpg.Connection, write: Write) -> None:
    known = write(FIRST, SECOND, THIRD)
    await migrate(connection, schema="here", migrations=known)
    await connection.execute("delete from here.schema_migration where number = 2")
    for seen in (known, known[:1]):
        assert (await check(connection, schema="here", migrations=seen)).verdict is Verdict.DAMAGED
        with pytest.raises(MigrationError, match="its table schema_migration has migration 3 but not 2"):
            await migrate(connection, schema="here", migrations=seen)


async def test_the_script_can_start_after_a_number_and_refuses_a_schema_at_another_number(
    connection: asyncpg.Connection, write: Write
) -> None:
    known = write(FIRST, SECOND, THIRD)
    await migrate(connection, schema="here", migrations=known[:1])
    script = render_sql(known, "here", from_number=1)
    await connection.execute(script)
    assert await ledger(connection, "here") == [1, 2, 3]
    with pytest.raises(asyncpg.RaiseError, match="expects a schema at migration 1, found 3"):
        await connection.execute(script)
    await connection.execute("rollback")
    assert (await check(connection, schema="here", migrations=known)).verdict is Verdict.CURRENT


async def test_a_role_that_may_only_read_a_current_schema_can_check_and_migrate_it(
    connection: asyncpg.Connection, write: Write
) -> None:
    known = write(FIRST)
    await migrate(connection, schema="here", migrations=known)
    await connection.execute("drop role if exists plain; create role plain")
    await connection.execute("grant usage on schema here to plain; grant select on here.schema_migration to plain")
    await connection.execute("set role plain")
    assert (await check(connection, schema="here", migrations=known)).runs
    assert await migrate(connection, schema="here", migrations=known) == []
    await connection.execute("reset role; drop owned by plain; drop role plain")


CHANGES = (
    "create type mood as enum ('good', 'bad')",
    "alter table person add nickname text",
    "alter table person alter name set default 'nobody'",
    "alter table person add length int generated always as (char_length(name)) stored",
    "alter table person add constraint short check (char_length(name) < 9)",
    "alter table person set (fillfactor = 50)",
    "alter table person alter name set storage external",
    "create index by_length on person (char_length(name))",
    "create view people as select name from person",
    "create function twice(n int) returns int language sql immutable return n * 2",
    "create sequence counter",
    "create domain word as text check (value <> '')",
    "create type pair as (a int, b int)",
    "create statistics seen on name, (char_length(name)) from person",
    "create table baby (age int) partition by range (age)",
)


async def test_a_dump_shows_every_change(connection: asyncpg.Connection, write: Write) -> None:
    known = write(FIRST)
    await migrate(connection, schema="plain", migrations=known)
    plain = await dump_schema(connection, schema="plain")
    wrong = []
    for number, change in enumerate(CHANGES):
        dumps = []
        for schema in (f"changed_{number}", f"changed_too_{number}"):
            await migrate(connection, schema=schema, migrations=known)
            await connection.execute(f"set search_path to {schema}; {change}; reset search_path")
            dumps.append(await dump_schema(connection, schema=schema))
        if not plain != dumps[0] == dumps[1]:
            wrong.append(change)
    assert wrong == []


def test_line_endings_do_not_change_the_checksum(tmp_path: Path) -> None:
    (tmp_path / "0001_step.sql").write_bytes(FIRST.encode())
    unix = load_migrations(tmp_path)
    (tmp_path / "0001_step.sql").write_bytes(FIRST.replace("\n", "\r\n").encode())
    assert load_migrations(tmp_path) == unix


def test_a_migration_whose_comments_changed_keeps_its_released_checksum(tmp_path: Path) -> None:
    header, description, *statements = FIRST.splitlines()
    released = "-- checksum: " + "ab" * 32
    (tmp_path / "0001_step.sql").write_text("\n".join([header, description, released, "-- New words.", *statements]))
    (migration,) = load_migrations(tmp_path)
    assert migration.checksum == "ab" * 32


STATEMENTS = {
    1: "7e599504845d5b83bdfe8b79b2e4ce5f863b549001ee947e45f602c73f5c65d7",
    2: "2b83365168c0d4bc8418f3a41240e848e08d3690f7f13d615fee784648e2d58f",
}
"""The SHA-256 of the statements, without comments, of released migrations with edited comments."""


def test_the_statements_of_released_migrations_never_change() -> None:
    found = {}
    for migration in load_migrations():
        if "\n-- checksum: " in migration.sql:
            lines = (re.sub(r"\s*--.*", "", line) for line in migration.sql.split("\n"))
            statements = "\n".join(line for line in lines if line.strip())
            found[migration.number] = hashlib.sha256(statements.encode()).hexdigest()
    assert found == STATEMENTS


def test_a_file_states_whether_it_is_compatible_and_what_it_does(write: Write) -> None:
    first, second = write(FIRST, SECOND)
    assert (first.compatible, first.description, second.compatible) == (False, "People.", True)
    assert second == replace(second, name="step", number=2)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("0002_late.sql", FIRST, "has 0002_late.sql in place of migration 0001"),
        ("first.sql", FIRST, "first.sql is not named like a migration; name it NNNN_name.sql"),
        ("0001_mute.sql", "create table person ();", "the first line must be '-- compatible: yes'"),
        ("0001_mute.sql", "-- compatible: no\nselect 1;", "the second line must be '-- '"),
        ("0001_twin.sql", FIRST, "has 0001_twin.sql in place of migration 0002"),
    ],
)
def test_a_file_that_breaks_the_rules_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    if name == "0001_twin.sql":
        (tmp_path / "0001_first.sql").write_text(FIRST)
    (tmp_path / name).write_text(text)
    with pytest.raises(MigrationError, match=reason):
        load_migrations(tmp_path)


@pytest.mark.parametrize("name", ["", "Upper", "9lives", "a-b", 'a"b', "a b", "ä", "pg_mine", "x" * 58, "a\n"])
def test_a_schema_name_is_a_plain_identifier(name: str) -> None:
    with pytest.raises(ValueError, match="is not a schema name"):
        check_schema_name(name)


async def test_a_schema_name_is_checked_before_it_is_used(connection: asyncpg.Connection) -> None:
    for work in (migrate, check, dump_schema):
        with pytest.raises(ValueError, match="is not a schema name"):
            await work(connection, schema='a"b')
    with pytest.raises(ValueError, match="is not a schema name"):
        render_sql((), 'a"b')

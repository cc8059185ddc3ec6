"""Migrations: applied once, recorded, checked, printed, and refused where code and schema do not fit."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from flowfabric.db.dump import dump_migrations, dump_schema
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


async def test_a_fresh_database_gets_every_migration_and_a_row_for_each(connection: asyncpg.Connection) -> None:
    known = load_migrations()
    assert await migrate(connection, schema="flowfabric") == list(known)
    rows = await connection.fetch("select * from flowfabric.schema_migration order by number")
    assert [(row["number"], row["name"], row["checksum"], row["compatible"]) for row in rows] == [
        (one.number, one.name, one.checksum, one.compatible) for one in known
    ]
    assert all(row["applied_at"] is not None and row["applied_by"].startswith("flowfabric ") for row in rows)
    assert (await check(connection, schema="flowfabric")).verdict is Verdict.CURRENT


async def test_migrating_twice_applies_nothing_the_second_time(connection: asyncpg.Connection, write: Write) -> None:
    known = write(FIRST, SECOND)
    assert await migrate(connection, schema="here", migrations=known) == list(known)
    assert await migrate(connection, schema="here", migrations=known) == []


async def test_a_later_release_applies_only_what_is_new(connection: asyncpg.Connection, write: Write) -> None:
    known = write(FIRST, SECOND)
    await migrate(connection, schema="here", migrations=known[:1])
    assert files(await migrate(connection, schema="here", migrations=known)) == ["0002_step.sql"]


async def test_runs_at_the_same_time_apply_each_migration_once(database_url: str, write: Write) -> None:
    known = write(FIRST, SECOND, THIRD)
    connections = [await asyncpg.connect(database_url) for _ in range(4)]
    runs = await asyncio.gather(*(migrate(one, schema="here", migrations=known) for one in connections))
    assert sorted(migration.number for run in runs for migration in run) == [1, 2, 3]
    assert await ledger(connections[0], "here") == [1, 2, 3]
    for connection in connections:
        await connection.close()


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


async def test_a_migration_that_fails_leaves_nothing_and_those_before_it_stay(
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
    with pytest.raises(MigrationError, match=r"0001_step\.sql is not the file that was applied as 0001_step"):
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
        with pytest.raises(MigrationError, match="migration 2 is missing in its table schema_migration, where 3 is"):
            await migrate(connection, schema="here", migrations=seen)


async def test_schemas_live_side_by_side_and_hold_the_same(connection: asyncpg.Connection) -> None:
    await migrate(connection, schema="one")
    await migrate(connection, schema="select")
    assert await dump_schema(connection, schema="one") == await dump_schema(connection, schema="select")
    assert await connection.fetchval("select count(*) from pg_class where relnamespace = 'public'::regnamespace") == 0


async def test_the_printed_script_leads_to_the_same_schema(connection: asyncpg.Connection) -> None:
    known = load_migrations()
    await migrate(connection, schema="applied")
    await connection.execute(render_sql(known, "printed"))
    assert await dump_schema(connection, schema="printed") == await dump_schema(connection, schema="applied")
    assert (await check(connection, schema="printed")).verdict is Verdict.CURRENT


async def test_the_script_can_begin_after_a_number_and_refuses_a_schema_that_is_not_there(
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


async def test_a_role_that_may_only_use_the_schema_can_check_it_and_has_nothing_to_migrate(
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


async def test_the_migrations_lead_to_the_same_schema_on_an_older_postgres(
    database_url: str, older_server_url: str
) -> None:
    assert await dump_migrations(older_server_url) == await dump_migrations(database_url)


@pytest.mark.parametrize(
    "change",
    [
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
    ],
)
async def test_a_dump_shows_every_change(connection: asyncpg.Connection, write: Write, change: str) -> None:
    known = write(FIRST)
    dumps = []
    for schema in ("plain", "changed", "changed_too"):
        await migrate(connection, schema=schema, migrations=known)
        if schema != "plain":
            await connection.execute(f"set search_path to {schema}; {change}; reset search_path")
        dumps.append(await dump_schema(connection, schema=schema))
    assert dumps[0] != dumps[1] == dumps[2]


def test_a_checkout_with_other_line_ends_has_the_same_checksum(tmp_path: Path) -> None:
    (tmp_path / "0001_step.sql").write_bytes(FIRST.encode())
    unix = load_migrations(tmp_path)
    (tmp_path / "0001_step.sql").write_bytes(FIRST.replace("\n", "\r\n").encode())
    assert load_migrations(tmp_path) == unix


def test_a_file_says_whether_it_is_compatible_and_what_it_brings(write: Write) -> None:
    first, second = write(FIRST, SECOND)
    assert (first.compatible, first.description, second.compatible) == (False, "People.", True)
    assert second == replace(second, name="step", number=2)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("0002_late.sql", FIRST, "has 0002_late.sql where migration 0001 should be"),
        ("first.sql", FIRST, "first.sql is not named like a migration: write NNNN_name.sql"),
        ("0001_mute.sql", "create table person ();", "the first line must be '-- compatible: yes'"),
        ("0001_mute.sql", "-- compatible: no\nselect 1;", "the second line must be '-- '"),
    ],
)
def test_a_file_that_breaks_the_rules_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(MigrationError, match=reason):
        load_migrations(tmp_path)


def test_two_files_of_one_number_are_refused(tmp_path: Path) -> None:
    for name in ("0001_a.sql", "0001_b.sql"):
        (tmp_path / name).write_text(FIRST)
    with pytest.raises(MigrationError, match=r"has 0001_b\.sql where migration 0002 should be"):
        load_migrations(tmp_path)


@pytest.mark.parametrize("name", ["", "Upper", "9lives", "a-b", 'a"b', "a b", "ä", "pg_mine", "x" * 58, "a\n"])
async def test_a_schema_name_is_a_plain_identifier(connection: asyncpg.Connection, name: str) -> None:
    with pytest.raises(ValueError, match="is not a schema name"):
        check_schema_name(name)
    with pytest.raises(ValueError, match="is not a schema name"):
        await migrate(connection, schema=name)
    with pytest.raises(ValueError, match="is not a schema name"):
        render_sql((), name)

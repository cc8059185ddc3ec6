"""Numbered SQL files, and the table schema_migration that records which of them a schema has."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import assert_never

import asyncpg

from flowfabric.db.rights import grants
from flowfabric.version import __version__

FOLDER = Path(__file__).parent / "migrations"
MAX_DEADLOCKS = 20
"""How often a run tries again after a deadlock with running work, which rolls the migration back whole."""

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_HEADER = re.compile(r"-- compatible: (yes|no)")
# The checksum that databases have of a migration whose comments were edited after its release.
_RELEASED = re.compile(r"^-- checksum: ([0-9a-f]{64})$", re.MULTILINE)
_CREATED = re.compile(r"^create (?:table|sequence) (?:if not exists )?(\w+)", re.MULTILINE)
# Postgres limits names to 63 bytes; the longest name derived from a schema's is the channel `<schema>_ended`.
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,56}")
_APPLIED_BY = f"flowfabric {__version__}"
_CREATE_LEDGER = """create table if not exists schema_migration (
  number int primary key,
  name text not null,
  checksum text not null,
  compatible boolean not null,
  applied_at timestamptz not null,
  applied_by text not null)"""
_LEDGER_RIGHTS = """
select quote_ident(current_user) as role, current_database() as database,
       has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select') as is_readable
  from pg_namespace n join pg_class c on c.relnamespace = n.oid and c.relname = 'schema_migration'
 where n.nspname = $1
"""


class MigrationError(RuntimeError):
    """A schema that cannot be migrated or used; the message says what was found, what is known and what to do."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """One step of the schema; `compatible` means that code which does not know it can still run."""

    number: int
    name: str
    description: str
    sql: str
    checksum: str
    compatible: bool

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"{self.number:04}_{self.name}.sql"


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One row of schema_migration."""

    number: int
    name: str
    checksum: str
    compatible: bool


class Verdict(StrEnum):
    """How a schema compares with the migrations this code knows."""

    CURRENT = "current"
    BEHIND = "behind"
    AHEAD = "ahead"
    BREAKING = "breaking"
    DAMAGED = "damaged"


@dataclass(frozen=True, kw_only=True)
class SchemaStatus:
    """Whether this code can run on a schema, and why."""

    verdict: Verdict
    text: str
    pending: tuple[Migration, ...]
    newer: tuple[Applied, ...]

    @property
    def runs(self) -> bool:
        """Whether this code can run on the schema as it is."""
        return self.verdict in (Verdict.CURRENT, Verdict.AHEAD)


def check_schema_name(schema: str) -> str:
    """Return the schema name if it needs no quoting, else raise ValueError."""
    if not _SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise ValueError(
            f"{schema!r} is not a schema name: use at most 57 lower-case letters, digits and underscores; do not start"
            " with a digit or with pg_"
        )
    return schema


def load_migrations(folder: Path = FOLDER) -> tuple[Migration, ...]:
    """The migrations of a folder in order; numbers start at 1 and leave no gap."""
    migrations = tuple(_load(path) for path in sorted(folder.glob("*.sql")))
    for expected, migration in enumerate(migrations, start=1):
        if migration.number != expected:
            raise MigrationError(
                f"{folder} has {migration.file} in place of migration {expected:04}; number migrations without a gap"
            )
    return migrations


def _load(path: Path) -> Migration:
    name = _FILE.fullmatch(path.name)
    if name is None:
        raise MigrationError(f"{path} is not named like a migration; name it NNNN_name.sql, for example 0003_tags.sql")
    # read_text normalizes line endings, so the checksum is the same in every checkout.
    sql = path.read_text(encoding="utf-8")
    header, _, description = sql.partition("\n")
    compatibility = _HEADER.fullmatch(header.rstrip())
    if compatibility is None:
        raise MigrationError(f"{path.name}: the first line must be '-- compatible: yes' or '-- compatible: no'")
    first = description.partition("\n")[0]
    if not first.startswith("-- "):
        raise MigrationError(f"{path.name}: the second line must be '-- ' and a description of the migration")
    released = _RELEASED.search(sql)
    return Migration(
        number=int(name[1]),
        name=name[2],
        description=first.removeprefix("-- ").strip(),
        sql=sql,
        checksum=hashlib.sha256(sql.encode()).hexdigest() if released is None else released[1],
        compatible=compatibility[1] == "yes",
    )


@cache
def known_migrations() -> tuple[Migration, ...]:
    """The migrations of this package, read once."""
    return load_migrations()


@cache
def created_names() -> tuple[str, ...]:
    """The names of schema_migration and of the tables and sequences that the migrations of this package create."""
    texts = (_CREATE_LEDGER, *(each.sql for each in known_migrations()))
    return tuple(sorted({name for text in texts for name in _CREATED.findall(text)}))


async def migrate(
    connection: asyncpg.Connection,
    *,
    schema: str,
    migrations: Sequence[Migration] | None = None,
    folder: Path | None = None,
) -> list[Migration]:
    """Apply all pending migrations to a schema and return them; `folder` is the folder of an embedded server.

    Each migration commits together with its row in schema_migration. Concurrent runs wait for each other, and each
    migration is applied once. A schema that this code could not use afterwards is refused before any change.
    """
    check_schema_name(schema)
    known = known_migrations() if migrations is None else migrations
    applied: list[Migration] = []
    deadlocks = 0
    while True:
        try:
            migration = await _apply_next(connection, schema, known, folder)
        except asyncpg.DeadlockDetectedError as deadlock:
            # Running work locks tables in an order of its own.
            deadlocks += 1
            if deadlocks > MAX_DEADLOCKS:
                raise MigrationError(
                    f"schema {schema} was not migrated further: {deadlocks} tries deadlocked with running work and"
                    f" changed nothing ({deadlock}); run `ff migrate` again, or stop the workers first"
                ) from deadlock
            continue
        if migration is None:
            return applied
        applied.append(migration)


async def _apply_next(
    connection: asyncpg.Connection, schema: str, known: Sequence[Migration], folder: Path | None
) -> Migration | None:
    """Apply the first pending migration in a transaction of its own; return None if there is none."""
    # READ COMMITTED: a snapshot taken before the lock would miss what a concurrent run applied.
    async with connection.transaction(isolation="read_committed"):
        await connection.execute("set local lock_timeout = 0; set local statement_timeout = 0")
        await connection.execute(_lock(schema))
        ledger = await _read_ledger(connection, schema)
        status = judge(schema, known, ledger or (), folder=folder)
        match status.verdict:
            case Verdict.BREAKING | Verdict.DAMAGED:
                raise MigrationError(status.text)
            case Verdict.CURRENT | Verdict.AHEAD:
                return None
            case Verdict.BEHIND:
                await _apply(connection, schema, status.pending[0], fresh=ledger is None)
                return status.pending[0]
            case never:
                assert_never(never)


async def _apply(connection: asyncpg.Connection, schema: str, migration: Migration, *, fresh: bool) -> None:
    user, database = await connection.fetchrow("select quote_ident(current_user), current_database()")
    # "create schema if not exists" needs the privilege to create schemas even if the schema exists.
    if not await connection.fetchval("select 1 from pg_namespace where nspname = $1", schema):
        try:
            await connection.execute(f'create schema "{schema}"')
        except asyncpg.InsufficientPrivilegeError as refused:
            raise MigrationError(
                f"user {user} may not create schema {schema} in database {database}: as its owner run"
                f" `create schema {schema} authorization {user}`, then try again"
            ) from refused
    await connection.execute(f'set local search_path to "{schema}"')
    try:
        if fresh:
            await connection.execute(_CREATE_LEDGER)
        await connection.execute(migration.sql)
        await connection.execute(_record(migration))
    except asyncpg.InsufficientPrivilegeError as refused:
        raise MigrationError(
            f"user {user} may not apply {migration.file} to schema {schema} of database {database} ({refused.args[0]}):"
            " run `ff migrate` as the owner of the schema and its tables, or, while it is empty, as its owner run"
            f" `alter schema {schema} owner to {user}`"
        ) from refused
    except asyncpg.DeadlockDetectedError:
        raise
    except asyncpg.PostgresError as error:
        raise MigrationError(f"{migration.file} failed on schema {schema} and changed nothing: {error}") from error


async def check(
    connection: asyncpg.Connection,
    *,
    schema: str,
    migrations: Sequence[Migration] | None = None,
    folder: Path | None = None,
) -> SchemaStatus:
    """Compare a schema with the migrations this code knows; change nothing."""
    check_schema_name(schema)
    known = known_migrations() if migrations is None else migrations
    return judge(schema, known, await _read_ledger(connection, schema) or (), folder=folder)


async def _read_ledger(connection: asyncpg.Connection, schema: str) -> tuple[Applied, ...] | None:
    """The rows of schema_migration in order, or None if there is no such table."""
    found = await connection.fetchrow(_LEDGER_RIGHTS, schema)
    if found is None:
        return None
    if not found["is_readable"]:
        raise MigrationError(
            f"user {found['role']} may not read schema {schema} of database {found['database']}: as its owner run"
            f" `{grants(schema, found['role'])}`"
        )
    rows = await connection.fetch(
        f'select number, name, checksum, compatible from "{schema}".schema_migration order by number'
    )
    return tuple(Applied(**row) for row in rows)


def judge(
    schema: str, known: Sequence[Migration], ledger: Sequence[Applied], *, folder: Path | None = None
) -> SchemaStatus:
    """Compare the rows of schema_migration with the known migrations; `folder` is the folder of an embedded server."""
    newest = len(known)
    pending = tuple(known[len(ledger) :])
    newer = tuple(applied for applied in ledger if applied.number > newest)
    breaking = [f"{applied.number:04}_{applied.name}" for applied in newer if not applied.compatible]
    position = f"schema {schema} is at migration {ledger[-1].number}" if ledger else f"schema {schema} is empty"
    program = f"flowfabric {__version__}"
    if damage := _find_damage(known, ledger):
        verdict, text = Verdict.DAMAGED, f"schema {schema} cannot be used: {damage}"
        if folder is not None:
            text += f", or stop its processes and delete {folder}, which deletes all stored data"
    elif pending:
        verdict, text = Verdict.BEHIND, f"{position}, {program} needs migration {newest}: run `ff migrate`"
    elif breaking:
        verdict = Verdict.BREAKING
        text = f"{position}, {program} knows {newest}: {', '.join(breaking)} broke compatibility, upgrade flowfabric"
    elif newer:
        verdict, text = Verdict.AHEAD, f"{position}, {program} knows {newest}: the newer migrations are compatible"
    else:
        verdict, text = Verdict.CURRENT, f"{position}: up to date"
    return SchemaStatus(verdict=verdict, text=text, pending=pending, newer=newer)


def _find_damage(known: Sequence[Migration], ledger: Sequence[Applied]) -> str | None:
    """What is wrong with the rows of schema_migration, or None if the known migrations can lead to them."""
    for expected, applied in enumerate(ledger, start=1):
        if applied.number != expected:
            return (
                f"its table schema_migration has migration {applied.number} but not {expected};"
                " insert the row if the migration was applied, otherwise restore the database from a backup"
            )
    for migration, applied in zip(known, ledger, strict=False):
        if migration.checksum != applied.checksum:
            return (
                f"{migration.file} differs from the file that was applied as {applied.number:04}_{applied.name};"
                " install the release of flowfabric that applied it"
            )
    return None


def render_sql(migrations: Sequence[Migration], schema: str, *, from_number: int = 0) -> str:
    """The migrations after a number as a psql script with the same effect as `migrate`."""
    check_schema_name(schema)
    script = [
        f"-- Migrations of flowfabric {__version__} for schema {schema}, after number {from_number}.",
        "-- Run with: psql --set ON_ERROR_STOP=1 --file THIS_FILE\n",
    ]
    for migration in migrations[from_number:]:
        script += [
            "begin;",
            f"{_lock(schema)};",
            f'create schema if not exists "{schema}";' if migration.number == 1 else "",
            f'set local search_path to "{schema}";',
            f"{_CREATE_LEDGER};" if migration.number == 1 else "",
            _expect(migration.number - 1),
            migration.sql,
            f"{_record(migration)};",
            "commit;\n",
        ]
    return "\n".join(line for line in script if line)


def _lock(schema: str) -> str:
    return f"select pg_advisory_xact_lock(hashtextextended('flowfabric migrate {schema}', 0))"


def _expect(number: int) -> str:
    return (
        "do $$ begin\n"
        f"  if (select coalesce(max(number), 0) from schema_migration) <> {number} then\n"
        f"    raise exception 'this script expects a schema at migration {number}, found %',"
        " (select coalesce(max(number), 0) from schema_migration);\n"
        "  end if;\n"
        "end $$;"
    )


def _record(migration: Migration) -> str:
    # No value needs quoting: this module only accepts letters, digits, dots and underscores.
    return (
        "insert into schema_migration (number, name, checksum, compatible, applied_at, applied_by) values"
        f" ({migration.number}, '{migration.name}', '{migration.checksum}', {str(migration.compatible).lower()},"
        f" clock_timestamp(), '{_APPLIED_BY}')"
    )

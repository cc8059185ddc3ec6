"""`ff migrate`: bring a schema up to date, print the migrations, or check the schema."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import asyncpg
import typer
from rich.console import Console
from rich.table import Table

from flowfabric.cli.errors import FAILED, FAILURES, MISUSED, fail, one_line_errors, text_of
from flowfabric.db import migrate as migrations
from flowfabric.db.address import check_url
from flowfabric.db.embedded import Embedded
from flowfabric.db.migrate import Applied, Migration, MigrationError, Verdict
from flowfabric.db.rights import read_only_reason
from flowfabric.db.session import NO_LIMITS, close, connect
from flowfabric.engine.lifecycle import CLOSE_SECONDS, Lifecycle
from flowfabric.settings import Settings

UNREACHABLE = "unreachable"
"""The verdict if the schema could not be read."""

_IGNORED = (
    "these session settings are not in effect: {}; a pooler ignores them, so set them on the role, see"
    " docs/pgbouncer.md"
)


def migrate(
    *,
    database_url: Annotated[
        str | None, typer.Option(help="The database; default: FF_DATABASE_URL, or the embedded one.")
    ] = None,
    schema: Annotated[str | None, typer.Option(help="The schema; default: FF_SCHEMA, or flowfabric.")] = None,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the migrations for psql without connecting to a database.")
    ] = False,
    after: Annotated[int | None, typer.Option(min=0, help="With --sql: skip migrations up to this number.")] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Change nothing; exit with 1 unless a process with these settings can start."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bring the schema of the database up to date."""
    if sql and (check or as_json):
        raise fail(
            "--sql cannot be combined with --check or --json: it prints a script and does not connect to a database",
            code=MISUSED,
        )
    if after is not None and not sql:
        raise fail(f"--after {after} has no effect without --sql: leave it out, or add --sql", code=MISUSED)
    _check_option("--schema", schema, migrations.check_schema_name)
    _check_option("--database-url", database_url, check_url)
    options: dict[str, Any] = {"database_url": database_url, "schema_name": schema}
    with one_line_errors():
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
        if sql:
            known = migrations.known_migrations()
            typer.echo(migrations.render_sql(known, settings.schema_name, from_number=after or 0), nl=False)
        elif check:
            asyncio.run(_check(settings, as_json=as_json))
        else:
            asyncio.run(_apply(settings, as_json=as_json))


def _check_option(option: str, value: str | None, check: Callable[[str], str]) -> None:
    try:
        _ = value and check(value)
    except ValueError as refused:
        raise fail(f"{option}: {refused}", code=MISUSED) from None


async def _check(settings: Settings, *, as_json: bool) -> None:
    problem: str | None
    if settings.database_url is None and not (data := Embedded.data_of(settings.home)).exists():
        # Connecting would create a server.
        status = migrations.judge(settings.schema_name, migrations.known_migrations(), ())
        problem = f"there is no embedded server at {data}: run `ff migrate` to create one, or set FF_DATABASE_URL"
    else:
        try:
            found = await Lifecycle.check(settings)
        except FAILURES as failed:
            if not as_json:
                raise
            _print_json(
                schema=settings.schema_name,
                runs=False,
                verdict=UNREACHABLE,
                text=text_of(failed),
                pending=[],
                newer=[],
            )
            raise typer.Exit(FAILED) from None
        status, problem = found.status, found.problem
        # If the schema is ready and only search_path is ignored, the problem already says so.
        if found.ignored and not (status.runs and "search_path" in found.ignored):
            typer.echo(f"ff: warning: {_IGNORED.format(', '.join(found.ignored))}", err=True)
    if as_json:
        _print_json(
            schema=settings.schema_name,
            runs=problem is None,
            verdict=status.verdict,
            text=problem or status.text,
            pending=_rows(status.pending),
            newer=_rows(status.newer),
        )
    if problem is not None:
        raise typer.Exit(FAILED) if as_json else fail(problem)
    if not as_json:
        typer.echo(status.text)


async def _apply(settings: Settings, *, as_json: bool) -> None:
    async with _connection(settings) as (connection, url, folder):
        status = await migrations.check(connection, schema=settings.schema_name, folder=folder)
        if status.verdict is Verdict.BEHIND and (reason := await read_only_reason(connection, url=url)) is not None:
            raise MigrationError(reason)
        applied = await migrations.migrate(connection, schema=settings.schema_name, folder=folder)
    if as_json:
        _print_json(schema=settings.schema_name, applied=_rows(applied))
    elif not applied:
        typer.echo(f"schema {settings.schema_name} is up to date")
    else:
        table = Table("number", "name", "compatible", "description", title=f"applied to {settings.schema_name}")
        for migration in applied:
            compatible = "yes" if migration.compatible else "no"
            table.add_row(f"{migration.number:04}", migration.name, compatible, migration.description)
        Console().print(table)


@asynccontextmanager
async def _connection(settings: Settings) -> AsyncIterator[tuple[asyncpg.Connection, str, Path | None]]:
    """A connection to the configured database, its address, and the folder of the embedded server if there is one."""
    server = None if settings.database_url else await asyncio.to_thread(Embedded.start, settings.home)
    try:
        url = server.url if server else str(settings.database_url)
        connection = await connect(url, schema=settings.schema_name, limits=NO_LIMITS)
        try:
            yield connection, url, server.data.parent if server else None
        finally:
            await close(connection, seconds=CLOSE_SECONDS)
    finally:
        if server:
            await asyncio.to_thread(server.release)


def _rows(found: Sequence[Migration | Applied]) -> list[dict[str, object]]:
    return [{"number": one.number, "name": one.name, "compatible": one.compatible} for one in found]


def _print_json(**fields: object) -> None:
    typer.echo(json.dumps(fields))

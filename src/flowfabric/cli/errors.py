"""Errors of commands: one line on stderr and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
import typer

from flowfabric.db.embedded import EmbeddedError
from flowfabric.db.faults import StoreFault, fault_of
from flowfabric.db.migrate import MigrationError
from flowfabric.model.errors import EngineError, reason_of
from flowfabric.settings import SettingsError

FAILED = 1
MISUSED = 2
FAILURES = (
    EngineError,
    MigrationError,
    EmbeddedError,
    StoreFault,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    OSError,
)
"""Errors caused by the database, the server or the file system, not by a defect of the command."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn expected errors into one line on stderr and an exit code; any other exception is a defect."""
    try:
        yield
    except SettingsError as error:
        raise fail(str(error), code=MISUSED) from None
    except FAILURES as error:
        raise fail(text_of(error)) from None


def text_of(error: Exception) -> str:
    """The message of one of the FAILURES."""
    match error:
        case EngineError():
            return reason_of(error)
        case MigrationError() | EmbeddedError() | StoreFault():
            return str(error)
        case _:
            return f"the database failed: {fault_of(error) or type(error).__name__}"


def fail(text: str, *, code: int = FAILED) -> typer.Exit:
    """Print a message to stderr and return the exit to raise."""
    typer.echo(f"ff: {' '.join(text.split())}", err=True)
    return typer.Exit(code)

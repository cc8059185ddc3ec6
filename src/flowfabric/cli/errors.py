"""How a command fails: one line that a person can act on, and an exit code."""

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
"""What a command can fail with for reasons outside it."""


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Turn the failures a command can meet into a line on stderr and an exit code; anything else is a defect."""
    try:
        yield
    except SettingsError as error:
        raise fail(str(error), code=MISUSED) from None
    except FAILURES as error:
        raise fail(text_of(error)) from None


def text_of(error: Exception) -> str:
    """What one of the failures says to a person."""
    match error:
        case EngineError():
            return reason_of(error)
        case MigrationError() | EmbeddedError() | StoreFault():
            return str(error)
        case _:
            return f"the database failed: {fault_of(error) or type(error).__name__}"


def fail(text: str, *, code: int = FAILED) -> typer.Exit:
    """Say why on stderr; raise what this returns."""
    typer.echo(f"ff: {' '.join(text.split())}", err=True)
    return typer.Exit(code)

"""The command `ff migrate`."""

import asyncio
import logging
import os
import subprocess
import sys

from typer.testing import CliRunner

from flowfabric.cli.main import app

from .processes import environment_for


async def migrate(url: str, *options: str, **environment: str) -> tuple[int, str, str]:
    """Run `ff migrate` on an address with no settings but these; its exit code, stdout and stderr."""
    return await asyncio.to_thread(_migrate, url, options, environment)


def _migrate(url: str, options: tuple[str, ...], environment: dict[str, str]) -> tuple[int, str, str]:
    without = {name: None for name in os.environ if name.startswith("FF_")}
    # A process that has set up no logging writes warnings to stderr; so does this call.
    warnings = logging.lastResort
    assert warnings is not None
    logging.getLogger().addHandler(warnings)
    try:
        done = CliRunner().invoke(app, ["migrate", "--database-url", url, *options], env={**without, **environment})
    finally:
        logging.getLogger().removeHandler(warnings)
    if not isinstance(done.exception, SystemExit | None):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


async def migrate_in_process(url: str, *options: str, **environment: str) -> tuple[int, str, str]:
    """Run `ff migrate` in an interpreter of its own; its exit code, stdout and stderr."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "flowfabric.cli.main", "migrate", "--database-url", url, *options],
        env=environment_for(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr

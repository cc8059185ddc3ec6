"""The command `ff migrate` in a process of its own."""

import asyncio
import os
import subprocess
import sys


async def migrate(url: str, *options: str, **environment: str) -> tuple[int, str, str]:
    """The exit code and the output of `ff migrate` on an address, with no settings of this process."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("FF_")}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "flowfabric.cli.main", "migrate", "--database-url", url, *options],
        env={**given, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr

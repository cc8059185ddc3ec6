"""A process that runs the previous version of this package, taken from the history of the repository."""

import asyncio
import os
import pickle
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from scenarios.processes import environment_for

PREVIOUS = "8b29d0074b2f0eb8ecc0c824ebe611326b5afed8"
"""The newest commit whose schema is older."""
ROOT = Path(__file__).parents[2]
_PROCESS = Path(__file__).with_name("previous_process.py")
_TIMEOUT_S = 60


def extract(folder: Path, *, root: Path = ROOT) -> Path:
    """Extract the previous version into a folder; return the path to import it from."""
    try:
        archive = subprocess.run(
            ["git", "-c", "safe.directory=*", "archive", "--format=zip", PREVIOUS, "src"],
            cwd=root,
            capture_output=True,
            check=False,
        )
        problem = archive.stderr.decode().strip() if archive.returncode else ""
    except FileNotFoundError as fault:
        problem = str(fault)
    if problem:
        pytest.fail(
            f"the previous version, commit {PREVIOUS}, could not be read: {problem}; run this test in a full clone of"
            " the repository (`git fetch --unshallow` completes a shallow one), with git installed",
            pytrace=False,
        )
    with ZipFile(BytesIO(archive.stdout)) as files:
        files.extractall(folder)
    return folder / "src"


class PreviousVersion:
    """An engine of the previous version in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def __call__(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Call an operation of that engine and return its answer; `catch_up` runs its sweeps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b64encode(pickle.dumps((operation, arguments, keywords))) + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), _TIMEOUT_S)
        assert line, f"{operation} failed in the previous version:\n{self._log.read_text()}"
        return pickle.loads(b64decode(line))


@asynccontextmanager
async def started(source: Path, url: str, log: Path) -> AsyncIterator[PreviousVersion]:
    """Start an engine of the previous version on a database; stop it after the block."""
    environment = environment_for(
        FF_DATABASE_URL=url, FF_WAITPOINT_HMAC_SECRET=os.environ["FF_WAITPOINT_HMAC_SECRET"], PYTHONPATH=str(source)
    )
    pipe = asyncio.subprocess.PIPE
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(_PROCESS),
            str(source),
            stdin=pipe,
            stdout=pipe,
            stderr=output,
            env=environment,
            limit=2**24,
        )
    try:
        yield PreviousVersion(process, log)
        assert process.stdin is not None
        process.stdin.close()
        code = await asyncio.wait_for(process.wait(), _TIMEOUT_S)
        assert code == 0, f"the previous version ended with {code}, see {log}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

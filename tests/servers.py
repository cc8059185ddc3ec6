"""The server of the tests: one for each process of a run, with its data in memory if possible."""

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

# The data need not survive a crash, so nothing is flushed; crash tests start their own server.
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
    """The address of a new server, which is stopped after the block."""
    # The socket is next to the data, and its path must be short.
    folder = MEMORY if os.access(MEMORY, os.W_OK) else Path("/tmp")
    _remove_orphans(folder)
    data_folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder))
    try:
        tools = _tools(data_folder, version)
        options = ("--username", "postgres", "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync")
        _run(tools, "initdb", *options, "--pgdata", str(tools.data))
        with (tools.data / "postgresql.conf").open("a") as file:
            for name, value in {**_SETTINGS, "unix_socket_directories": data_folder}.items():
                file.write(f"{name} = '{value}'\n")
        _run(tools, "pg_ctl", "start", "-w", "-D", str(tools.data), "-l", str(tools.log))
        try:
            yield f"postgresql://postgres@/postgres?host={data_folder}"
        finally:
            _run(tools, "pg_ctl", "stop", "-m", "immediate", "-w", "-D", str(tools.data))
    finally:
        shutil.rmtree(data_folder)


def _tools(data_folder: Path, version: int) -> Site:
    """The binaries of Postgres and the user that runs them: not root, and the owner of the folder."""
    if version == 15:
        if not DEBIAN_15.exists():
            pytest.exit(f"FF_TEST_POSTGRES=15 needs {DEBIAN_15}: install the package postgresql-15", 2)
        account = None
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres")
            account = Account(uid=entry.pw_uid, gid=entry.pw_gid)
        tools = Site(folder=data_folder, version=version, binaries=DEBIAN_15, account=account)
    else:
        prepared = site.prepare(data_folder / "home", version=version)
        if prepared.folder != data_folder / "home":
            shutil.rmtree(prepared.folder)
        tools = replace(prepared, folder=data_folder)
    tools.make_folder()
    return tools


def _run(tools: Site, tool: str, *arguments: str) -> None:
    code, output = tools.run(tool, *arguments)
    assert code == 0, f"{tool}: {output}"


def _remove_orphans(folder: Path) -> None:
    """Delete the folders of processes that were killed, and stop their servers."""
    for data_folder in folder.glob(f"{_PREFIX}*"):
        owner = data_folder.name.removeprefix(_PREFIX).partition("-")[0]
        if Path(f"/proc/{owner}").exists() or not Path("/proc/self").exists():
            continue
        for pid_file in data_folder.glob("postgres-*/postmaster.pid"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(pid_file.read_text().splitlines()[0])
                if os.fsencode(pid_file.parent) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGQUIT)
        shutil.rmtree(data_folder, ignore_errors=True)

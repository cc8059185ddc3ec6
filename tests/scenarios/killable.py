"""A Postgres server for tests that kill it, restart it, ask for a password, or turn it into a standby."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import asyncpg

from databases import at_database, execute
from flowfabric.db import cluster, site
from flowfabric.db.embedded import Embedded
from flowfabric.db.migrate import migrate
from servers import MEMORY

PASSWORD = "pa55word"
"""The password of the user `app`."""
_VERSION = 18
_TEMPLATE = "migrated"


@contextmanager
def embedded_home(parent: Path) -> Iterator[Path]:
    """A home for an embedded server, with its data in memory if the system offers that.

    A killed server loses nothing by it: only a crash of the machine would.
    """
    in_memory = os.access(MEMORY, os.W_OK)
    # The prefix lets the next run delete what a killed one left behind.
    folder = Path(tempfile.mkdtemp(prefix=f"ff-tests-{os.getpid()}-", dir=MEMORY if in_memory else parent))
    home, link = folder, None
    if os.geteuid() == 0:
        home = parent / "home"
        link = site.prepare(home, version=_VERSION).folder
        link.rmdir()
        link.symlink_to(folder)
    try:
        yield home
    finally:
        cluster.stop(site.prepare(home, version=_VERSION))
        if link is not None:
            link.unlink()
        shutil.rmtree(folder)


def as_app(url: str, password: str) -> str:
    """The URL of the same database for the user `app`."""
    return url.replace("postgres@", f"app:{password}@", 1)


class KillableServer:
    """A server that asks the user `app` for a password and can be killed and started again."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._references: list[Embedded] = []

    async def start(self) -> None:
        """Start the server for the first time, with a migrated database to copy."""
        await self._refer()
        rules = self._references[-1].data / "pg_hba.conf"
        rules.write_text(f"local all app scram-sha-256\n{rules.read_text()}")
        await execute(
            self.url,
            f"create role app login password '{PASSWORD}'",
            "select pg_reload_conf()",
            f"create database {_TEMPLATE}",
        )
        connection = await asyncpg.connect(at_database(self.url, _TEMPLATE))
        await migrate(connection, schema="flowfabric")
        await connection.close()

    @property
    def url(self) -> str:
        """The address of the database `flowfabric`, which has no schema of ours."""
        return self._references[-1].url

    async def new_database(self) -> str:
        """The address of a new migrated database."""
        name = f"ff_test_{uuid4().hex}"
        await execute(self.url, f"create database {name} template {_TEMPLATE}")
        return at_database(self.url, name)

    def kill(self) -> None:
        """Kill the server process and all of its sessions."""
        postmaster = self._references[-1].pid
        for pid in (postmaster, *_children(postmaster)):
            # A child may exit first when it sees its parent die.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def start_again(self) -> None:
        """Start the server on the data it left."""
        url = self.url
        await self._refer()
        assert self.url == url

    async def restart_as_standby(self) -> None:
        """Restart the server as a standby, one that has no primary to follow."""
        (self._site.data / "standby.signal").touch()
        await self._pg_ctl("restart", "-m", "fast", "-l", str(self._site.log))

    async def promote(self) -> None:
        """Make the standby a primary again."""
        await self._pg_ctl("promote")
        await self._refer()

    def stop(self) -> None:
        """Stop the server."""
        for reference in self._references:
            reference.release()

    @property
    def _site(self) -> site.Site:
        return site.prepare(self._home, version=_VERSION)

    async def _refer(self) -> None:
        self._references.append(await asyncio.to_thread(Embedded.start, self._home))

    async def _pg_ctl(self, command: str, *options: str) -> None:
        tools = self._site
        code, output = await asyncio.to_thread(tools.run, "pg_ctl", command, "-w", "-D", str(tools.data), *options)
        assert code == 0, output


def _children(parent: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            children.append(int(stat.parent.name))
    return children


async def stored(url: str) -> tuple[dict[str, str], dict[str, bytes], Counter[str]]:
    """The states, the results and the number of end events of every execution in a store, by execution id."""
    connection = await asyncpg.connect(url, server_settings={"search_path": "flowfabric"})
    own_id = "'{fp:' || partition_key || '}:' || execution_id as id"
    try:
        executions = await connection.fetch(f"select {own_id}, public_state, result_payload from execution")
        ends = await connection.fetch(f"select {own_id} from event_each where outcome is not null")
    finally:
        await connection.close()
    return (
        {row["id"]: row["public_state"] for row in executions},
        {row["id"]: row["result_payload"] for row in executions},
        Counter(row["id"] for row in ends),
    )

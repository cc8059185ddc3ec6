"""A Postgres server with an optional synchronous standby that can take over."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg

from flowfabric.db import site
from flowfabric.db.site import Site

DATABASE = "flowfabric"
_PATIENCE_SECONDS = 60
_DISK_MB = 384
_SETTINGS = {
    "listen_addresses": "",
    "shared_buffers": "64MB",
    "min_wal_size": "4MB",
    "max_wal_size": "48MB",
    "max_connections": "150",
    "wal_keep_size": "32MB",
    "max_wal_senders": "4",
    "log_min_messages": "warning",
    "timezone": "UTC",
    "jit": "off",
    "autovacuum_naptime": "10s",
    "restart_after_crash": "on",
}


class ClusterError(RuntimeError):
    """A Postgres tool failed; the message is its output."""


class Node:
    """One server: its data folder and its socket."""

    def __init__(self, tools: Site, name: str, port: int, *, on_small_disk: bool) -> None:
        self.name = name
        self.port = port
        self._tools = tools
        self._folder = tools.folder / name
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self.is_on_small_disk = on_small_disk and self._mount()
        if tools.account is not None:
            os.chown(self._folder, tools.account.uid, tools.account.gid)
        self._folder.chmod(0o700)

    @property
    def data(self) -> Path:
        """The data folder."""
        return self._folder / "data"

    @property
    def url(self) -> str:
        """The address of the database without a proxy."""
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self._tools.folder), safe='/')}&port={self.port}"

    @property
    def maintenance_url(self) -> str:
        """The address of the database `postgres`, which always exists."""
        return self.url.replace(f"/{DATABASE}?", "/postgres?")

    def create(self) -> None:
        """Create the data folder and start the server."""
        options = ["--username", "postgres", "--no-locale", "--encoding", "UTF8", "--auth", "trust"]
        options += ["--no-instructions", "--wal-segsize", "1", "--pgdata", str(self.data)]
        for name, value in {**_SETTINGS, "unix_socket_directories": str(self._tools.folder)}.items():
            options += ["--set", f"{name}={value}"]
        self._tool("initdb", *options)
        self.start()

    def copy_of(self, other: "Node") -> None:
        """Become a standby of another server, with a copy of its data."""
        shutil.rmtree(self.data, ignore_errors=True)
        source = f"host={self._tools.folder} port={other.port} user=postgres application_name={self.name}"
        self._tool("pg_basebackup", "-D", str(self.data), "-d", source, "-R", "-X", "stream", "-c", "fast", "--no-sync")
        self.start()

    def start(self) -> None:
        """Start the server, with crash recovery if needed."""
        self._tool(
            "pg_ctl", "start", "-w", "-t", str(_PATIENCE_SECONDS), "-D", str(self.data),
            "-l", str(self._folder / "log"), "-o", f"-p {self.port}",
        )  # fmt: skip

    def stop(self, mode: str = "fast") -> None:
        """Stop the server if it runs."""
        with contextlib.suppress(ClusterError):
            self._tool("pg_ctl", "stop", "-m", mode, "-w", "-t", str(_PATIENCE_SECONDS), "-D", str(self.data))

    def promote(self) -> None:
        """Promote this standby to primary."""
        self._tool("pg_ctl", "promote", "-w", "-t", str(_PATIENCE_SECONDS), "-D", str(self.data))

    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._tools.run("pg_ctl", "status", "-D", str(self.data))[0] == 0

    def fill_disk(self) -> int:
        """Fill the small disk; return how many bytes were written."""
        written = 0
        with contextlib.suppress(OSError), (self._folder / "filler").open("ab", buffering=0) as filler:
            while True:
                written += filler.write(b"\0" * 65536)
        return written

    def free_disk(self) -> None:
        """Delete the file that fills the disk."""
        (self._folder / "filler").unlink(missing_ok=True)

    def discard(self) -> None:
        """Stop the server and delete its data."""
        self.stop("immediate")
        if self.is_on_small_disk:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _mount(self) -> bool:
        if os.geteuid() != 0:
            return False
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m,mode=0700", "none", str(self._folder)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def _tool(self, name: str, *arguments: str) -> None:
        code, output = self._tools.run(name, *arguments)
        if code:
            raise ClusterError(f"{name} {' '.join(arguments)}: {output}")


class Cluster:
    """A primary and an optional standby that confirms every commit."""

    def __init__(self, *, standby: bool, small_disk: bool) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="ff-faults-"))
        self._tools = site.prepare(self._home / "home", version=18)
        port = 20_000 + random.SystemRandom().randrange(40_000)
        names = ("a", "b") if standby else ("a",)
        self._nodes = [Node(self._tools, name, port + at, on_small_disk=small_disk) for at, name in enumerate(names)]
        self.primary = self._nodes[0]

    @property
    def standby(self) -> Node | None:
        """The standby, if there is one."""
        return next((node for node in self._nodes if node is not self.primary), None)

    @property
    def has_small_disk(self) -> bool:
        """Whether the data is on a small disk that can be filled."""
        return all(node.is_on_small_disk for node in self._nodes)

    async def start(self) -> None:
        """Start the primary, and a standby that has caught up."""
        await asyncio.to_thread(self.primary.create)
        await self.execute(f"create database {DATABASE}", url=self.primary.maintenance_url)
        if self.standby is not None:
            await self._attach(self.standby)

    async def failover(self) -> Node:
        """Kill the primary and promote the standby; return the new primary."""
        old, new = self.primary, self.standby
        assert new is not None
        await asyncio.to_thread(old.stop, "immediate")
        await asyncio.to_thread(new.promote)
        self.primary = new
        # Without a standby nothing confirms commits.
        await self._set(synchronous_standby_names="")
        return new

    async def rebuild(self) -> None:
        """Make the old primary a standby of the new one, after a failover."""
        assert self.standby is not None
        await asyncio.to_thread(self.standby.stop, "immediate")
        await self._attach(self.standby)

    async def restart(self, mode: str) -> None:
        """Restart the primary."""
        await asyncio.to_thread(self.primary.stop, mode)
        await asyncio.to_thread(self.primary.start)

    async def heal(self) -> None:
        """Free the disks, start stopped servers, and make the primary writable."""
        for node in self._nodes:
            node.free_disk()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                if not await asyncio.to_thread(self.primary.is_running):
                    await asyncio.to_thread(self.primary.start)
                await self._set(default_transaction_read_only="off")
                break
            except (ClusterError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)
        standby = self.standby
        if standby is not None and not await asyncio.to_thread(standby.is_running):
            # Commits wait for the standby, so it must be back before anything else.
            try:
                await asyncio.to_thread(standby.start)
            except ClusterError:
                await self._set(synchronous_standby_names="")
                await self._attach(standby)

    async def read_only(self, *, on: bool) -> None:
        """Make new transactions read-only by default, or writable."""
        await self._set(default_transaction_read_only="on" if on else "off")

    async def execute(self, *commands: str, url: str = "") -> None:
        """Run commands on the primary without a proxy."""
        connection = await self.connect(url)
        try:
            for command in commands:
                await connection.execute(command)
        finally:
            connection.terminate()

    async def connect(self, url: str = "") -> Any:
        """A connection to the primary without a proxy."""
        return await asyncpg.connect(
            url or self.primary.url,
            timeout=10,
            command_timeout=20,
            server_settings={"default_transaction_read_only": "off", "synchronous_commit": "local"},
        )

    def discard(self) -> None:
        """Stop the servers and delete their data."""
        for node in self._nodes:
            node.discard()
        if self._tools.account is not None:
            shutil.rmtree(self._tools.folder, ignore_errors=True)
        shutil.rmtree(self._home, ignore_errors=True)

    async def _attach(self, standby: Node) -> None:
        await asyncio.to_thread(standby.copy_of, self.primary)
        await self._set(synchronous_standby_names="*")
        query = """select bool_or(sync_state = 'sync' and flush_lsn >= $1::text::pg_lsn) from pg_stat_replication"""
        connection = await self.connect()
        try:
            reached = await connection.fetchval("select pg_current_wal_lsn()::text")
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not await connection.fetchval(query, reached):
                if time.monotonic() > deadline:
                    raise ClusterError("the standby did not catch up in time")
                await asyncio.sleep(0.05)
        finally:
            connection.terminate()

    async def _set(self, **settings: str) -> None:
        commands = [f"alter system set {name} = '{value}'" for name, value in settings.items()]
        await self.execute(*commands, "select pg_reload_conf()", url=self.primary.maintenance_url)


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process that may have exited."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)

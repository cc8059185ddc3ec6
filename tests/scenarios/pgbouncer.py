"""A real PgBouncer in front of the test server."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg

from flowfabric.db.database import Database
from flowfabric.db.session import session_settings
from flowfabric.db.statements import Statement

BINARY = os.environ.get("FF_TEST_PGBOUNCER", "pgbouncer")
"""The program: the installed one, or the one that `FF_TEST_PGBOUNCER` names."""


def version() -> tuple[int, int]:
    """The version of the program."""
    output = subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"PgBouncer (\d+)\.(\d+)", output)
    assert found is not None, output
    return int(found[1]), int(found[2])


def keeps_statements() -> bool:
    """Whether this version supports prepared statements in transaction mode."""
    return version() >= (1, 21)


@asynccontextmanager
async def pgbouncer(url: str, **settings: object) -> AsyncIterator[str]:
    """The address of the same database through a new PgBouncer with these settings."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    host, database = query.get("host", [parts.hostname or ""])[0], parts.path[1:]
    server_port = query.get("port", [str(parts.port or 5432)])[0]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    required = session_settings("flowfabric")
    given: dict[str, object] = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        # Connections that send hints set one more.
        "ignore_startup_parameters": ",".join((*required, "synchronous_commit")),
        **settings,
    }
    target = f"host={host} port={server_port} dbname={database} user=postgres"
    lines = ["[databases]", f"{database} = {target}", "[pgbouncer]", *(f"{name} = {given[name]}" for name in given), ""]
    with tempfile.TemporaryDirectory() as folder:
        process = _start(Path(folder), "\n".join(lines), host)
        try:
            address = f"postgresql://postgres@127.0.0.1:{port}/{database}"
            async with _role_settings(url, database, required):
                await _wait_until_ready(address, process)
                yield address
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


def _start(folder: Path, configuration: str, host: str) -> "subprocess.Popen[bytes]":
    file = folder / "pgbouncer.ini"
    file.write_text(configuration)
    folder.chmod(0o755)
    # PgBouncer refuses to run as root; its user must be able to read the file and to reach the socket of the server.
    user = Path(host).owner() if host.startswith("/") else "nobody"
    with (folder / "log").open("w") as log:
        return subprocess.Popen([BINARY, *(["-u", user] if os.geteuid() == 0 else []), file], stdout=log, stderr=log)


async def _wait_until_ready(address: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(500):
        assert process.poll() is None, "PgBouncer has exited"
        with contextlib.suppress(OSError):
            connection = await asyncpg.connect(address)
            await connection.close()
            return
        await asyncio.sleep(0.02)
    raise AssertionError("PgBouncer does not answer")


@asynccontextmanager
async def _role_settings(url: str, database: str, required: dict[str, str]) -> AsyncIterator[None]:
    """Set what PgBouncer ignores on the role instead, as docs/pgbouncer.md says."""
    connection = await asyncpg.connect(url)
    try:
        for name, value in required.items():
            await connection.execute(f"alter role postgres in database {database} set {name} = '{value}'")
        yield
    finally:
        await connection.execute(f"alter role postgres in database {database} reset all")
        await connection.close()


@asynccontextmanager
async def load(address: str, *, sessions: int) -> AsyncIterator[None]:
    """Sessions that run one statement after the other."""
    database = Database(address, "flowfabric", sessions)
    statement = Statement("notify", "select pg_notify('flowfabric_work', '*')")

    async def run() -> None:
        while True:
            await database.fetch(statement, {})

    tasks = [asyncio.create_task(run()) for _ in range(sessions)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await database.close()

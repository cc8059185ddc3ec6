"""`ff migrate` on a server that takes no writes: one line that says why and what to do."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import asyncpg
import pytest

from databases import execute
from faults.cluster import Cluster


async def migrated(url: str, *options: str) -> tuple[int, str, str]:
    """The exit code and the output of the command on an address."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("FF_")}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "flowfabric.cli.main", "migrate", "--database-url", url, *options],
        env=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
async def read_only(url: str, connection: asyncpg.Connection) -> AsyncIterator[str]:
    """The address of a database whose transactions are read-only."""
    name = await connection.fetchval("select current_database()")
    await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    yield url
    await execute(url, "set default_transaction_read_only = off", f"alter database {name} reset all")


async def test_a_database_that_is_set_read_only_is_told_with_the_setting(read_only: str) -> None:
    code, out, err = await migrated(read_only, "--schema", "other")
    assert (code, out) == (1, "")
    assert err.startswith("ff: ")
    assert " is read-only: default_transaction_read_only is on; turn it off where it is set" in err
    assert err.count("\n") == 1
    # Nothing is to be written where nothing is missing.
    assert await migrated(read_only) == (0, "schema flowfabric is up to date\n", "")


async def test_a_standby_is_told_with_the_way_to_the_primary() -> None:
    cluster = Cluster(standby=True, small_disk=False)
    try:
        await cluster.start()
        assert cluster.standby is not None
        code, out, err = await migrated(cluster.standby.url)
        assert (code, out) == (1, "")
        assert " is read-only: it is a standby; name the primary in the database URL (FF_DATABASE_URL)" in err
        assert (err.startswith("ff: "), err.count("\n")) == (True, 1)
        code, out, _ = await migrated(cluster.primary.url, "--json")
        assert (code, len(json.loads(out)["applied"]) > 0) == (0, True)
    finally:
        await asyncio.to_thread(cluster.discard)

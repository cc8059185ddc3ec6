"""`ff migrate` on a server that takes no writes: one line that says why and what to do."""

import asyncio
import json
from collections.abc import AsyncIterator

import asyncpg
import pytest

from databases import execute
from faults.cluster import Cluster

from .command import migrate


@pytest.fixture
async def read_only(fresh_database: None, url: str, connection: asyncpg.Connection) -> AsyncIterator[str]:
    """The address of a database whose transactions are read-only."""
    name = await connection.fetchval("select current_database()")
    await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    yield url
    await execute(url, "set default_transaction_read_only = off", f"alter database {name} reset all")


async def test_a_database_that_is_set_read_only_is_told_with_the_setting(read_only: str) -> None:
    code, out, err = await migrate(read_only, "--schema", "other")
    assert (code, out) == (1, "")
    assert err.startswith("ff: ")
    assert " is read-only: default_transaction_read_only is on; turn it off where it is set" in err
    assert err.count("\n") == 1
    # Nothing is to be written where nothing is missing.
    assert await migrate(read_only) == (0, "schema flowfabric is up to date\n", "")


async def test_a_standby_is_told_with_the_way_to_the_primary() -> None:
    cluster = Cluster(standby=True, small_disk=False)
    try:
        await cluster.start()
        assert cluster.standby is not None
        code, out, err = await migrate(cluster.standby.url)
        assert (code, out) == (1, "")
        assert " is read-only: it is a standby; name the primary in the database URL (FF_DATABASE_URL)" in err
        assert (err.startswith("ff: "), err.count("\n")) == (True, 1)
        code, out, _ = await migrate(cluster.primary.url, "--json")
        assert (code, len(json.loads(out)["applied"]) > 0) == (0, True)
    finally:
        await asyncio.to_thread(cluster.discard)

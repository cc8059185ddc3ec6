"""Starting: what is prepared, what is compared, and what is refused."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databases import execute
from flowfabric.db.embedded import Embedded
from flowfabric.db.migrate import load_migrations
from flowfabric.engine.engine import Engine, engine_beside
from flowfabric.model.errors import TransportError, UnavailableError
from flowfabric.model.support import Applied, NothingToPrepare
from flowfabric.settings import Settings

from .state import new


async def opened(**settings: Any) -> None:
    """Start an engine and stop it again."""
    async with Engine.connect(settings=Settings(**settings)):
        pass


async def test_preparing_what_is_ready_does_nothing(engine: Engine, rows: Any) -> None:
    async with rows.unchanged():
        assert await engine.prepare() == NothingToPrepare()


async def test_an_empty_database_is_prepared_where_it_is_asked_for(url: str, connection: asyncpg.Connection) -> None:
    settings = Settings(database_url=url, schema_name="another", migrate_on_start=True)
    async with Engine.connect(settings=settings) as engine:
        made = await engine.create_execution(**new())
        assert await engine.prepare() == NothingToPrepare()
        assert await engine.read_execution_state(made.execution_id) == "waiting"
        await connection.execute("drop schema another cascade")
        applied = await engine.prepare()
        assert isinstance(applied, Applied)
        assert applied.description.startswith("0001_core.sql")


async def test_processes_that_start_at_once_on_an_empty_store_prepare_it_once(
    url: str, connection: asyncpg.Connection
) -> None:
    known = [migration.number for migration in load_migrations()]
    for schema in ("one", "another", "third"):
        starts = (
            opened(database_url=url, schema_name=schema, migrate_on_start=True, lanes=("a", "b")) for _ in range(4)
        )
        await asyncio.gather(*starts)
        ledger = await connection.fetch(f"select number from {schema}.schema_migration order by 1")
        assert [row["number"] for row in ledger] == known
        assert await connection.fetchval(f"select count(*) from {schema}.configuration") == 1
        assert await connection.fetchval(f"select array_agg(lane_id order by 1) from {schema}.lane") == ["a", "b"]
        assert await connection.fetchval(f"select array_agg(kid) from {schema}.signing_key") == ["k1"]


@pytest.mark.parametrize(
    "stored",
    [
        "insert into configuration (flow_partitions, budget_partitions, quota_partitions) values (256, 32, 32)",
        "insert into lane (lane_id, registered_at, registered_by) values ('default', 1, 'another')",
    ],
    ids=["partition counts", "lane"],
)
async def test_a_start_takes_what_another_is_just_storing(
    url: str, connection: asyncpg.Connection, rows: Any, eventually: Any, stored: str
) -> None:
    waits = "select exists (select from pg_locks where not granted and transactionid = pg_current_xact_id()::xid)"
    async with connection.transaction():
        await connection.execute(stored)
        starting = asyncio.create_task(opened(database_url=url))
        await eventually(lambda: connection.fetchval(waits))
    await starting
    assert (len(await rows.of("configuration")), len(await rows.of("lane"))) == (1, 1)


@pytest.mark.parametrize("asked", [None, False])
async def test_an_empty_database_is_refused_where_nobody_asked_to_prepare_it(url: str, asked: bool | None) -> None:  # noqa: FBT001
    with pytest.raises(UnavailableError, match="run `ff migrate`"):
        await opened(database_url=url, schema_name="another", migrate_on_start=asked)


@pytest.mark.parametrize("family", ["flow", "budget", "quota"])
async def test_other_partition_counts_than_the_stores_are_refused(url: str, rows: Any, family: str) -> None:
    await opened(database_url=url)
    (stored,) = await rows.of("configuration")
    assert [stored[f"{name}_partitions"] for name in ("flow", "budget", "quota")] == [256, 32, 32]
    async with rows.unchanged():
        with pytest.raises(UnavailableError) as refusal:
            await opened(database_url=url, **{f"{family}_partitions": 7})
    assert not refusal.value.retryable
    counts = {"flow": 256, "budget": 32, "quota": 32}
    made, here = (
        " ".join(f"FF_{name.upper()}_PARTITIONS={count}" for name, count in each.items())
        for each in (counts, {**counts, family: 7})
    )
    assert refusal.value.detail == (
        f"the store was made with {made}, this process has {here}; give it the counts of the store"
    )
    await opened(database_url=url)


async def test_the_first_start_decides_the_partition_counts(url: str) -> None:
    await opened(database_url=url, flow_partitions=1, budget_partitions=2, quota_partitions=32_768)
    async with Engine.connect(
        settings=Settings(database_url=url, flow_partitions=1, budget_partitions=2, quota_partitions=32_768)
    ) as engine:
        made = await engine.create_execution(**new())
        assert made.execution_id.startswith("{fp:0}:")
    with pytest.raises(UnavailableError):
        await opened(database_url=url)


async def test_a_start_refused_for_its_missing_key_stores_no_partition_counts(url: str, rows: Any) -> None:
    async with rows.unchanged():
        with pytest.raises(UnavailableError, match="no signing key is stored"):
            await opened(database_url=url, flow_partitions=16, waitpoint_hmac_secret=None)
    await opened(database_url=url)


async def test_a_damaged_embedded_store_names_the_folder_to_delete(tmp_path: Path) -> None:
    home = tmp_path / "home"
    embedded = await asyncio.to_thread(Embedded.start, home)
    folder = embedded.data.parent
    try:
        await opened(home=home)
        await execute(embedded.url, "update flowfabric.schema_migration set checksum = 'other' where number = 1")
        with pytest.raises(UnavailableError) as refusal:
            await opened(home=home)
    finally:
        await asyncio.to_thread(embedded.release)
    assert str(refusal.value.detail).endswith(
        "install the release of flowfabric that applied it,"
        f" or stop its processes and delete {folder}, which deletes all stored data"
    )
    shutil.rmtree(folder)
    await opened(home=home)
    (await asyncio.to_thread(Embedded.start, home)).release(discard=True)


async def test_a_store_that_is_not_there_is_a_transport_error(tmp_path: Any) -> None:
    with pytest.raises(TransportError) as refusal:
        await opened(database_url=f"postgresql://nobody@/nothing?host={tmp_path}")
    assert (refusal.value.code, refusal.value.retryable) == ("transport", True)


async def test_another_engine_beside_this_one_has_its_own_connections(engine: Engine) -> None:
    async with engine_beside(engine) as other:
        made = await other.create_execution(**new())
    assert await engine.read_execution_state(made.execution_id) == "waiting"

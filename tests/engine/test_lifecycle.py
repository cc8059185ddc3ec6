"""Starting an engine: what it prepares, compares with the store, and refuses."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databases import execute
from fixtures import Eventually, Given, Rows
from flowfabric.db.embedded import Embedded
from flowfabric.db.migrate import load_migrations
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import TransportError, UnavailableError
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.support import Applied, NothingToPrepare
from flowfabric.settings import Settings

from .core.test_keys import verifying
from .state import IS_WHOLE, new, rounds


async def opened(**settings: Any) -> None:
    """Start an engine and stop it again."""
    async with Engine.connect(settings=Settings(**settings)):
        pass


async def test_preparing_a_prepared_store_does_nothing(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        assert await engine.prepare() == NothingToPrepare()


async def test_an_empty_database_is_migrated_if_asked_for(url: str, connection: asyncpg.Connection) -> None:
    settings = Settings(database_url=url, schema_name="another", migrate_on_start=True)
    async with Engine.connect(settings=settings) as engine:
        made = await engine.create_execution(**new())
        assert await engine.prepare() == NothingToPrepare()
        assert await engine.read_execution_state(made.execution_id) == "waiting"
        await connection.execute("drop schema another cascade")
        applied = await engine.prepare()
        assert isinstance(applied, Applied)
        assert applied.description.startswith("0001_core.sql")


async def test_concurrent_starts_on_an_empty_store_prepare_it_once(url: str, connection: asyncpg.Connection) -> None:
    known = [migration.number for migration in load_migrations()]
    for nth in rounds(1, whole=3):
        schema = f"schema{nth}"
        starts = (
            opened(database_url=url, schema_name=schema, migrate_on_start=True, lanes=("a", "b")) for _ in range(4)
        )
        await asyncio.gather(*starts)
        ledger = await connection.fetch(f"select number from {schema}.schema_migration order by 1")
        assert [row["number"] for row in ledger] == known
        assert await connection.fetchval(f"select count(*) from {schema}.configuration") == 1
        assert await connection.fetchval(f"select array_agg(lane_id order by 1) from {schema}.lane") == ["a", "b"]
        assert await connection.fetchval(f"select array_agg(kid) from {schema}.signing_key") == ["k1"]


async def test_a_start_waits_for_another_that_is_storing_its_configuration(
    url: str, connection: asyncpg.Connection, rows: Rows, eventually: Eventually
) -> None:
    waits = "select exists (select from pg_locks where not granted and transactionid = pg_current_xact_id()::xid)"
    for stored in (
        "insert into configuration (flow_partitions, budget_partitions, quota_partitions) values (256, 32, 32)",
        "insert into lane (lane_id, registered_at, registered_by) values ('default', 1, 'another')",
    ):
        await connection.execute("delete from configuration")
        await connection.execute("delete from lane")
        async with connection.transaction():
            await connection.execute(stored)
            starting = asyncio.create_task(opened(database_url=url))
            await eventually(lambda: connection.fetchval(waits))
        await starting
        assert (len(await rows.of("configuration")), len(await rows.of("lane"))) == (1, 1), stored


async def test_an_empty_database_is_not_migrated_unless_asked_for(url: str) -> None:
    for asked in (None, False):
        with pytest.raises(UnavailableError, match="run `ff migrate`"):
            await opened(database_url=url, schema_name="another", migrate_on_start=asked)


async def test_partition_counts_that_differ_from_the_stored_ones_are_refused(url: str, rows: Rows) -> None:
    await opened(database_url=url)
    counts = {"flow": 256, "budget": 32, "quota": 32}
    (stored,) = await rows.of("configuration")
    assert {name: stored[f"{name}_partitions"] for name in counts} == counts
    async with rows.unchanged():
        for family in counts:
            with pytest.raises(UnavailableError) as refusal:
                await opened(database_url=url, **{f"{family}_partitions": 7})
            assert not refusal.value.retryable
            made, here = (
                " ".join(f"FF_{name.upper()}_PARTITIONS={count}" for name, count in each.items())
                for each in (counts, {**counts, family: 7})
            )
            assert refusal.value.detail == (
                f"the store was created with {made}, this process has {here}; set the counts of the store"
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


async def test_a_start_without_a_signing_key_stores_no_partition_counts(url: str, rows: Rows) -> None:
    async with rows.unchanged():
        with pytest.raises(UnavailableError, match="no signing key is stored"):
            await opened(database_url=url, flow_partitions=16, waitpoint_hmac_secret=None)
    await opened(database_url=url)


async def embedded_secret(home: Path) -> bytes:
    """The signing secret of an embedded store after a start without a configured one."""
    async with Engine.connect(settings=Settings(home=home, waitpoint_hmac_secret=None)) as engine:
        assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"
        assert await engine.prepare() == NothingToPrepare()
        key = await verifying(engine, "k1")
        assert key is not None
        return key.secret


async def test_an_embedded_store_generates_its_key_once_and_if_damaged_names_the_folder_to_delete(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    embedded = await asyncio.to_thread(Embedded.start, home)
    folder = embedded.data.parent
    try:
        secret = await embedded_secret(home)
        assert len(secret) == 32
        assert await embedded_secret(home) == secret
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
    if not IS_WHOLE:
        return
    # The advice works: the next start creates another store.
    embedded = await asyncio.to_thread(Embedded.start, home)
    try:
        assert await embedded_secret(home) != secret
    finally:
        await asyncio.to_thread(embedded.release, discard=True)


async def test_an_unreachable_store_is_a_transport_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError) as refusal:
        await opened(database_url=f"postgresql://nobody@/nothing?host={tmp_path}")
    assert (refusal.value.code, refusal.value.retryable) == ("transport", True)


async def test_a_second_engine_uses_the_same_store(engine: Engine) -> None:
    async with second_engine(engine) as other:
        made = await other.create_execution(**new())
    assert await engine.read_execution_state(made.execution_id) == "waiting"


async def test_a_second_engine_waits_without_a_connection_for_notifications(
    engine: Engine, given: Given, eventually: Eventually, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    async with second_engine(engine) as other:
        waits = [asyncio.create_task(each.wait_for_ending(handle.execution_id)) for each in (engine, other)]
        await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
        await engine.complete(handle)
        assert {(await wait).outcome for wait in waits} == {TerminalOutcome.SUCCESS}
        assert not parts_of(other).wakeups.hints.is_listening
        listeners = "select count(*) from pg_stat_activity where datname = current_database() and query like $1"
        assert await connection.fetchval(listeners, "/* listener */%") == 1

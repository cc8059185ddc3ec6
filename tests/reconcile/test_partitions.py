"""Daily event partitions: created ahead, dropped when old, never blocking a writer."""

import asyncio
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Given, Rows
from flowfabric.db import partitions
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of

SCHEMA = "flowfabric"
DAY = 86_400
DAY_MS = DAY * 1000


@pytest.fixture
async def clock(clock: Clock) -> Any:
    """A frozen clock: no day ends unless the test advances it."""
    await clock.stop()
    return clock


async def names(connection: asyncpg.Connection) -> list[str]:
    """The attached daily partitions of the event table."""
    query = """select c.relname from pg_inherits h join pg_class c on c.oid = h.inhrelid
                where h.inhparent = 'event'::regclass and c.relname <> 'event_default' order by 1"""
    return [row[0] for row in await connection.fetch(query)]


def test_the_name_of_a_daily_partition_determines_its_bounds() -> None:
    noon = 1_772_366_400_000
    assert partitions.name_of(noon) == "event_20260301"
    first, end = partitions.bounds_of("event_20260301")
    assert (end - first, first <= noon < end) == (DAY_MS, True)
    assert partitions.name_of(first) == partitions.name_of(end - 1) != partitions.name_of(end)
    for name in ("event_default", "event_2026031", "event_202603011", "other_20260301"):
        with pytest.raises(ValueError, match="not the name"):
            partitions.bounds_of(name)


async def test_today_and_the_next_two_days_have_partitions(
    engine: Engine, connection: asyncpg.Connection, clock: Clock
) -> None:
    assert await parts_of(engine).event_partitions.keep_partitions() == 3
    now = await clock.now()
    assert await names(connection) == [partitions.name_of(now + day * DAY_MS) for day in range(3)]
    assert await parts_of(engine).event_partitions.keep_partitions() == 0
    await clock.advance(seconds=DAY)
    assert await parts_of(engine).event_partitions.keep_partitions() == 1


async def test_events_are_written_to_the_partition_of_their_day(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    await parts_of(engine).event_partitions.keep_partitions()
    await given.completed()
    places = await connection.fetch("select distinct tableoid::regclass::text from event")
    assert [row[0] for row in places] == [(await names(connection))[0]]
    assert [row["kind"] for row in await connection.fetch("select kind from event order by event_id")] == [
        "acquired",
        "released",
    ]


async def test_a_partition_has_the_indexes_of_the_feed(engine: Engine, connection: asyncpg.Connection) -> None:
    await parts_of(engine).event_partitions.keep_partitions()
    query = """select substring(pg_get_indexdef(indexrelid) from 'USING.*') from pg_index
                where indrelid = $1::text::regclass order by 1"""
    parent = await connection.fetch(query, "event")
    assert parent
    assert await connection.fetch(query, (await names(connection))[0]) == parent


async def test_a_partition_older_than_the_feed_is_dropped(
    engine: Engine, given: Given, connection: asyncpg.Connection, clock: Clock, rows: Rows
) -> None:
    await parts_of(engine).event_partitions.keep_partitions()
    today = (await names(connection))[0]
    await given.completed()
    await clock.advance(seconds=DAY)
    await parts_of(engine).event_partitions.keep_partitions()
    assert today in await names(connection)
    await clock.advance(seconds=DAY)
    await parts_of(engine).event_partitions.keep_partitions()
    assert today not in await names(connection)
    assert await rows.of("event_each") == []
    assert await connection.fetchval("select to_regclass($1)", today) is None


async def test_a_detached_partition_is_dropped_by_the_next_run(
    engine: Engine, connection: asyncpg.Connection, clock: Clock
) -> None:
    await parts_of(engine).event_partitions.keep_partitions()
    today = (await names(connection))[0]
    await connection.execute(f"alter table event detach partition {today}")
    await clock.advance(seconds=2 * DAY)
    await parts_of(engine).event_partitions.keep_partitions()
    assert await connection.fetchval("select to_regclass($1)", today) is None


async def test_a_day_with_events_in_the_default_partition_gets_no_partition(
    engine: Engine, given: Given, connection: asyncpg.Connection, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await given.completed()
    caplog.set_level("INFO", "flowfabric.engine.event.partitions")
    assert await parts_of(engine).event_partitions.keep_partitions() == 2
    assert await parts_of(engine).event_partitions.keep_partitions() == 0
    logged = [record.getMessage() for record in caplog.records if record.name == "flowfabric.engine.event.partitions"]
    name = partitions.name_of(await clock.now())
    assert logged == [f"event partition {name} is not created: the default partition holds events of that day"]
    assert partitions.name_of(await clock.now()) not in await names(connection)


async def test_every_day_with_events_in_the_default_partition_is_skipped(
    engine: Engine, given: Given, connection: asyncpg.Connection, clock: Clock
) -> None:
    await given.completed()
    await clock.advance(seconds=DAY)
    await given.completed()
    now = await clock.now()
    kept = await partitions.ensure(connection, schema=SCHEMA, now_ms=now - DAY_MS, ahead_days=2)
    assert kept.created == (partitions.name_of(now + DAY_MS),)
    assert set(kept.skipped) == {partitions.name_of(now - DAY_MS), partitions.name_of(now)}


async def test_old_events_of_the_default_partition_are_deleted(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    await given.completed()
    await clock.advance(seconds=DAY - 10)
    fresh = await given.completed()
    await clock.advance(seconds=11)
    assert await parts_of(engine).event_partitions.trim_events() == 2
    assert {str(row["execution_id"]) for row in await rows.of("event_each")} == {fresh[-36:]}
    assert await parts_of(engine).event_partitions.trim_events() == 0


@pytest.fixture
def patient_with_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for locks on partitions as long as a test takes."""
    monkeypatch.setattr(partitions, "LOCK_TIMEOUT", "100s")


@pytest.mark.usefixtures("patient_with_partitions")
async def test_concurrent_processes_create_each_partition_once(url: str, engine: Engine, clock: Clock) -> None:
    now = await clock.now()

    async def ensure() -> partitions.EnsuredPartitions:
        connection = await asyncpg.connect(url)
        try:
            return await partitions.ensure(connection, schema=SCHEMA, now_ms=now, ahead_days=4)
        finally:
            await connection.close()

    kept = await asyncio.gather(*(ensure() for _ in range(4)))
    made = [name for one in kept for name in one.created]
    assert len(made) == len(set(made))
    assert await parts_of(engine).event_partitions.keep_partitions() == 0


@pytest.mark.usefixtures("patient_with_partitions")
async def test_concurrent_processes_drop_each_partition_once(
    url: str, engine: Engine, clock: Clock, connection: asyncpg.Connection
) -> None:
    await parts_of(engine).event_partitions.keep_partitions()
    later = await clock.advance(seconds=10 * DAY)

    async def record_nothing(_first: int, _until: int) -> None:
        pass

    async def drop() -> list[str]:
        connection = await asyncpg.connect(url)
        try:
            return await partitions.drop_older(connection, schema=SCHEMA, before_ms=later, record=record_nothing)
        finally:
            await connection.close()

    dropped = [name for names in await asyncio.gather(*(drop() for _ in range(4))) for name in names]
    assert len(dropped) == len(set(dropped))
    await drop()
    assert await names(connection) == []


async def test_a_locked_event_table_is_left_for_the_next_run(
    engine: Engine, url: str, connection: asyncpg.Connection, clock: Clock
) -> None:
    await parts_of(engine).event_partitions.keep_partitions()
    await clock.advance(seconds=10 * DAY)
    reader = await asyncpg.connect(url)
    try:
        async with reader.transaction():
            await reader.execute(f"lock table {SCHEMA}.event in row exclusive mode")
            await reader.execute(f"lock table {SCHEMA}.event_default in row exclusive mode")
            assert await parts_of(engine).event_partitions.keep_partitions() == 0
    finally:
        await reader.close()
    assert await parts_of(engine).event_partitions.keep_partitions() == 6
    assert len(await names(connection)) == 3

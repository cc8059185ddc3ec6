"""Feeds read events by their indexes: a page touches a bounded number of rows, however many events there are."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import asyncpg
import pytest

from databases import Databases
from fixtures import Clock, Eventually, Given, uuid_of
from flowfabric.db.database import Database, Transaction
from flowfabric.db.session import session_settings
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.event.reader import Reader
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import OLDEST, FeedEvent, ScannerFilter, Subscription
from flowfabric.settings import Settings
from sessions import session

from .filled import STATISTICS, copied, filled

COUNT = 20_000
"""How many common events there are."""
RARE = 1_000
DAY_MS = 86_400_000

# Written as rows: operations would take minutes for so many events, and all of them would be of one day.
_COMMON = f"""
insert into event (at, partition_key, kind, namespace_no, execution_id, lease_id, lease_epoch, attempt_index, outcome,
                   reason)
select ff_now() - (i % 3) * {DAY_MS} / 2, 0, (case when i % 2 = 0 then 'released' else 'acquired' end)::event_kind,
       1 + (i % 10000 = 0)::int, gen_random_uuid(), gen_random_uuid(), 1, 0,
       case when i % 2 = 0 then 1 end, case when i % 2 = 0 then 'completed' end
  from generate_series(1, {COUNT}) i
"""
_RARE = f"""
insert into event (at, partition_key, kind, namespace_no, execution_id, instance_tag)
select ff_now(), 0, (case when i % 2 = 0 then 'tag_attached' else 'tag_cleared' end)::event_kind, 1,
       gen_random_uuid(), 'a'
  from generate_series(1, {RARE}) i
"""


class Explained:
    """The generic plans of the statements that readers ran, with the rows that each part of a plan returned."""

    def __init__(self, session: asyncpg.Connection) -> None:
        self._session = session
        self.calls: list[tuple[Statement, list[object]]] = []
        self._types: dict[str, list[str]] = {}

    async def touched(self, name: str) -> list[int]:
        """How many entries of indexes on events each call of a statement read; a sequential scan fails the test."""
        counts = []
        for statement, arguments in self.calls:
            if statement.name == name:
                counts.append(sum(_entries(await self._plan(statement, arguments))))
        assert counts, f"{name} was not called"
        return counts

    async def _plan(self, statement: Statement, arguments: list[object]) -> dict[str, Any]:
        # An explained statement would be planned for its arguments; only a prepared one has a generic plan.
        if statement.name not in self._types:
            parameters = (await self._session.prepare(statement.sql)).get_parameters()
            self._types[statement.name] = [parameter.name for parameter in parameters]
            await self._session.execute(
                f"prepare {statement.name}({', '.join(self._types[statement.name])}) as {statement.sql}"
            )
        literals = [
            await self._session.fetchval(f"select quote_nullable($1::{name}::text)", argument)
            for name, argument in zip(self._types[statement.name], arguments, strict=True)
        ]
        explain = f"explain (analyze, timing off, format json) execute {statement.name}({', '.join(literals)})"
        (found,) = json.loads(await self._session.fetchval(explain))
        plan: dict[str, Any] = found["Plan"]
        return plan


def _entries(plan: dict[str, Any]) -> Iterator[int]:
    relation = plan.get("Relation Name", "")
    if relation.startswith("event") and plan["Node Type"].endswith("Scan"):
        assert plan["Node Type"] in ("Index Scan", "Index Only Scan"), plan["Node Type"]
        rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        yield round(rows * plan["Actual Loops"])
    for child in plan.get("Plans", ()):
        yield from _entries(child)


async def fill(engine: Engine) -> None:
    """Write events of several days."""
    await parts_of(engine).event_partitions.keep_partitions()


@pytest.fixture(scope="module")
async def template(databases: Databases) -> AsyncIterator[str]:
    """A database with many events, in several partitions."""
    async with filled(databases, fill, _RARE, _COMMON) as url:
        yield url


@pytest.fixture(params=STATISTICS)
async def store(
    request: pytest.FixtureRequest, databases: Databases, template: str, _leaves_no_task: None
) -> AsyncIterator[str]:
    """A copy of that database, whose tables have statistics or not."""
    async with copied(databases, template, *(("analyze",) if request.param == "statistics" else ())) as url:
        yield url


@pytest.fixture
async def reader(store: str) -> AsyncIterator[Engine]:
    """An engine on the filled database."""
    async with Engine.connect(settings=Settings(database_url=store)) as engine:
        yield engine


@pytest.fixture
async def explained(store: str, reader: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Explained]:
    """Record the statements of readers from now on."""
    planner = await asyncpg.connect(store, server_settings=session_settings("flowfabric"))
    found = Explained(planner)
    fetch = Database.fetch

    async def record(database: Database, statement: Statement, values: Mapping[str, object], **rest: Any) -> Any:
        found.calls.append((statement, statement.arguments(values)))
        return await fetch(database, statement, values, **rest)

    monkeypatch.setattr(Database, "fetch", record)
    yield found
    await planner.close()


async def take(subscription: Subscription[FeedEvent], count: int) -> list[FeedEvent]:
    """The next events."""
    return [await anext(subscription) for _ in range(count)]


async def test_a_page_reads_as_many_events_as_it_returns(reader: Engine, explained: Explained) -> None:
    async with reader.subscribe_completion(OLDEST) as events:
        await take(events, COUNT // 2)
    pages = await explained.touched("list_events")
    assert len(pages) > COUNT / 2 / Reader.PAGE
    # The first page starts with rare events. Then every second event is a completion, and a scan of each of the four
    # partitions reads one event ahead.
    assert pages[0] <= Reader.SCANNED + 4
    assert max(pages[1:]) <= 2 * Reader.PAGE + 4
    assert max(await explained.touched("open_window")) <= 8


async def test_a_page_of_a_filter_that_matches_little_reads_a_bounded_number(
    reader: Engine, explained: Explained, eventually: Eventually
) -> None:
    async with reader.subscribe_completion(OLDEST, ScannerFilter(instance_tag=("app.tenant", "none"))) as events:
        await eventually(lambda: events._buffer.reached is not None and events._buffer.reached.window is None)
    pages = await explained.touched("list_events")
    assert len(pages) >= COUNT / Reader.SCANNED
    assert max(pages) <= Reader.SCANNED + 4


async def test_a_page_of_rare_events_does_not_read_the_others(reader: Engine, explained: Explained) -> None:
    async with reader.subscribe_instance_tags(OLDEST) as events:
        await take(events, RARE)
    pages = await explained.touched("list_rare_events")
    assert len(pages) > RARE / Reader.PAGE
    # A page of each of the two kinds, and one ahead in each partition.
    assert max(pages) <= 2 * (Reader.PAGE + 4)


async def test_a_page_of_a_rare_kind_does_not_read_events_of_a_frequent_one(
    store: str, reader: Engine, explained: Explained, eventually: Eventually, request: pytest.FixtureRequest
) -> None:
    writer = await session(store, "test frequent")
    await writer.execute(
        f"""insert into event (at, partition_key, kind, namespace_no, execution_id, instance_tag)
            select ff_now() - (i % 3) * {DAY_MS} / 2, 0, 'tag_attached', 1, gen_random_uuid(), 'a'
              from generate_series(1, {COUNT} * 3) i"""
    )
    if request.node.callspec.params["store"] == "statistics":
        await writer.execute("analyze")
    await writer.close()
    async with reader.subscribe_signal_delivery(OLDEST) as events:
        await eventually(lambda: events._buffer.reached is not None and events._buffer.reached.window is None)
    assert max(await explained.touched("list_rare_events")) == 0


async def test_late_events_are_found_by_their_transactions(store: str, reader: Engine, explained: Explained) -> None:
    writer = await session(store, "test late")
    insert = """insert into event (at, partition_key, kind, namespace_no, execution_id, outcome)
                values (ff_now(), 0, 'ended', 1, gen_random_uuid(), 1) returning execution_id"""
    other = await session(store, "test early")
    assert await other.fetchval("select restored_event_id from feed_origin") == 0
    try:
        async with reader.subscribe_completion() as events:
            await writer.execute("begin")
            late = await writer.fetchval(insert)
            early = await other.fetchval(insert)
            parts_of(reader).wakeups.ended()
            assert uuid_of((await anext(events)).execution_id) == str(early)
            await writer.execute("commit")
            parts_of(reader).wakeups.ended()
            assert uuid_of((await anext(events)).execution_id) == str(late)
    finally:
        await writer.close()
        await other.close()
    assert max(await explained.touched("list_late_events")) <= 10


async def test_old_events_are_trimmed_by_a_bounded_number(
    reader: Engine, explained: Explained, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await session(store, "test clock")
    await connection.execute("update test_clock set offset_ms = offset_ms + $1", 2 * DAY_MS)
    await connection.close()
    monkeypatch.setattr("flowfabric.engine.event.partitions.TRIM_LIMIT", 100)
    while await parts_of(reader).event_partitions.trim_events():
        pass
    assert max(await explained.touched("take_old_events")) <= 300


async def test_dropping_a_partition_reads_a_bounded_number_of_its_events(
    reader: Engine, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.event.partitions.SCANNED", 100)
    counts = []
    fetch = Transaction.fetch

    async def explain(transaction: Transaction, statement: Statement, **values: object) -> Any:
        # Other sessions cannot read the events: the transaction has locked them.
        plan = await Explained(transaction.connection)._plan(statement, statement.arguments(values))
        counts.append(sum(_entries(plan)))
        return await fetch(transaction, statement, **values)

    connection = await session(store, "test clock")
    await connection.execute("update test_clock set offset_ms = offset_ms + $1", 2 * DAY_MS)
    await connection.close()
    monkeypatch.setattr(Transaction, "fetch", explain)
    assert await parts_of(reader).event_partitions.keep_partitions() > 0
    # The newest, those of the highest transactions, up to 100 of each rare kind, and the oldest.
    assert counts
    assert max(counts) <= 100 + 100 + 2 * 100 + 1


async def test_a_rare_event_cannot_name_several_executions(connection: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="event_of_many_is_common"):
        await connection.execute(
            """insert into event (at, partition_key, kind, namespace_no, execution_ids)
               values (ff_now(), 0, 'expired', 1, array[gen_random_uuid()])"""
        )


async def test_an_expiry_is_a_rare_event(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    await given.claimed(lease_ttl_ms=1000)
    await clock.advance(seconds=2)
    await parts_of(engine).lease_expiry.sweep()
    assert await connection.fetchval("select count(*) from event where kind = 'expired'") == 1

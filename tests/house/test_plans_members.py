"""Lists, counts and retention touch few rows of flows, and none for executions outside of flows."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from creates import new
from databases import Databases
from engine.flows import settle
from engine.state import claim
from fixtures import Clock
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.retention import RECHECK_MS, TRIM_LIMIT
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read import members as members_of
from flowfabric.engine.read import upstreams
from flowfabric.model.flow import FlowEdge, FlowNode, FlowSubmitted
from flowfabric.model.ids import FlowId, format_execution_id
from house.filled import STATISTICS, copied, filled
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

LARGE, SMALL, ALONE, WAITING = 3_000, 5, 1_000, 4_000
LIVE, ENDED, FEW = (FlowId(UUID(int=nth)) for nth in (1, 2, 3))
DAY = 86_400_000
FLOW_TABLES = ("flow", "edge", "edge_group", "cascade_entry", "cancel_backlog_member", "pending_cancel_group")


async def submit(engine: Engine, flow_id: FlowId, members: int, lane: str) -> None:
    """Submit a flow in which one member precedes all others."""
    common: dict[str, Any] = {"execution_kind": "job", "input_payload": b"{}", "creator_identity": "test"}
    nodes = [FlowNode(name=str(nth), lane_id=lane, **common) for nth in range(members)]
    edges = [FlowEdge(upstream="0", downstream=str(nth)) for nth in range(1, members)]
    answer = await engine.submit_flow(flow_kind="dag", namespace="tests", flow_id=flow_id, nodes=nodes, edges=edges)
    assert isinstance(answer, FlowSubmitted)


async def complete(engine: Engine, lane: str, count: int) -> None:
    """Complete executions of a lane."""
    while count:
        runs = await claim(engine, lane, limit=min(count, 500))
        count -= len(runs)
        await engine.complete_many([(run.handle, b"1") for run in runs])


async def fill(engine: Engine) -> None:
    """Create a flow with one live member, one that has ended, a small one, and many executions outside of flows."""
    for flow_id, lane in ((LIVE, "live"), (ENDED, "ended")):
        await submit(engine, flow_id, LARGE, lane)
        await complete(engine, lane, 1)
        await settle(engine, flow_id)
        await complete(engine, lane, LARGE - 1 - (flow_id == LIVE))
        await settle(engine, flow_id)
    await submit(engine, FEW, SMALL, "few")
    await engine.create_many([new(lane_id="alone") for _ in range(ALONE)])
    await complete(engine, "alone", ALONE)
    for _ in range(WAITING // 1000):
        await engine.create_many([new(lane_id="alone") for _ in range(1000)])


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with flows."""
    async with filled(databases, fill, VACUUM) as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """The address of a database with flows, with and without statistics."""
    async with copied(databases, store, *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


async def test_a_page_of_a_flow_reads_only_its_own_members(original: str, engine: Engine, touched: Touched) -> None:
    for flow_id, members in ((LIVE, LARGE), (ENDED, LARGE), (FEW, SMALL)):
        for order in ("newest", "oldest"):
            cursor, found = None, 0
            for _ in range(3):
                touched.clear()
                page = await engine.list_executions(flow_id=flow_id, order=order, cursor=cursor, limit=20)
                found += len(page.executions)
                assert set(touched.calls) == {f"list_{order}_members"}
                assert touched.sum(f"list_{order}_members") <= 21
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert found == min(members, 60)


async def test_a_page_of_few_members_reads_each_member_of_the_flow_at_most_once(
    original: str, engine: Engine, touched: Touched
) -> None:
    page = await engine.list_executions(flow_id=LIVE, public_state="waiting")
    assert len(page.executions) == 1
    page = await engine.list_executions(flow_id=LIVE, public_state="failed", order="oldest")
    assert page.executions == []
    assert touched.sum("list_oldest_members") == LARGE
    assert touched.sum("list_newest_members") <= LARGE
    assert len(touched.calls["list_oldest_members"]) <= 5


async def test_a_count_of_a_flow_reads_its_members(original: str, engine: Engine, touched: Touched) -> None:
    for flow_id, members in ((LIVE, LARGE), (FEW, SMALL)):
        touched.clear()
        assert sum(one.count for one in await engine.count_executions(flow_id=flow_id)) == members
        assert touched["count_executions_of_flow"] <= members


async def test_what_is_told_of_a_flow_reads_only_its_own_members(
    original: str, engine: Engine, touched: Touched, connection: asyncpg.Connection
) -> None:
    members = parts_of(engine).members
    for flow_id, size in ((LIVE, LARGE), (ENDED, LARGE), (FEW, SMALL)):
        touched.clear()
        await members.list_unmet(flow_id, limit=10, with_errors=True)
        assert touched["list_unmet_members"] <= 2 * size
        await members.list_to_replay(flow_id)
        assert touched["list_members_to_replay"] <= 2 * size
        unserved = await members.list_unserved(flow_id)
        assert len(unserved) == (flow_id != ENDED)
        assert touched["list_unserved_members"] <= 2 * size
        found = await members.count_deleted(flow_id)
        assert found is not None
        assert (found.count, found.final_count, found.of) == (0, 0, size)
        assert touched["count_deleted_members"] <= 2 * size + 10
        assert touched.of("count_deleted_members", "edge") == 0
    while await engine.trim_retention(retention_ms=0):
        pass
    await connection.execute(VACUUM)
    touched.clear()
    found = await members.count_deleted(ENDED)
    assert found is not None
    assert (found.count, found.final_count, found.of) == (LARGE, LARGE - 1, LARGE)
    # The edges, and the member that they leave.
    assert touched["count_deleted_members"] <= 2 * LARGE + 10


async def test_retention_reads_flows_for_members_only(
    original: str, engine: Engine, touched: Touched, clock: Clock, connection: asyncpg.Connection
) -> None:
    await clock.stop()
    await clock.advance(ms=DAY + 1)
    async with connection.transaction():
        # Only the executions outside of flows are due.
        await connection.execute(
            "update retained set retain_until = retain_until + $1 where execution_ids <@ array("
            "select execution_id from execution where flow_id is not null)",
            DAY,
        )
    await connection.execute(VACUUM)
    assert (await parts_of(engine).retention.trim_batch()).done == ALONE
    assert {table: touched.of("take_retained", table) for table in FLOW_TABLES} == dict.fromkeys(FLOW_TABLES, 0)
    assert touched.of("take_retained", "execution") <= 2 * ALONE
    await clock.advance(ms=DAY)
    done, is_full = 0, True
    while is_full:
        touched.clear()
        trimmed, is_full, _ = await parts_of(engine).retention.trim_batch()
        done += trimmed
        # Each member, and its flow, which is locked, or found again if it is not settled. Batches end with an entry.
        assert touched.of("take_retained", "execution") <= 2 * (TRIM_LIMIT + 500)
        assert touched.of("take_retained", "flow") <= 2 * (TRIM_LIMIT + 500)
        assert touched.of("take_retained", "edge") == 0
    assert done == LARGE
    touched.clear()
    # Members that are held are not looked at again until later.
    await connection.execute(VACUUM)
    assert (await parts_of(engine).retention.trim_batch()).done == 0
    assert touched["take_retained"] <= 10
    await clock.advance(ms=RECHECK_MS + 1)
    touched.clear()
    assert (await parts_of(engine).retention.trim_batch()).done == 0
    assert touched.of("take_retained", "execution") >= TRIM_LIMIT // 2


async def test_a_replay_finds_the_entry_of_a_held_member_by_its_time(
    original: str, engine: Engine, touched: Touched, clock: Clock, connection: asyncpg.Connection
) -> None:
    await clock.stop()
    # As if the last member had ended two days later.
    await connection.execute("update flow set ended_at = ended_at + $1 where flow_id = $2", 2 * DAY, ENDED)
    await clock.advance(ms=2 * DAY)
    while (await parts_of(engine).retention.trim_batch()).is_full:
        pass
    members = await connection.fetch("select partition_key, execution_id from execution where flow_id = $1", ENDED)
    assert len(members) == LARGE
    await connection.execute(VACUUM)
    touched.clear()
    for member in members[:2]:
        await engine.replay_execution(execution_id=format_execution_id(*member))
    assert "lock_ends_anywhere" not in touched.calls
    assert touched.of("lock_ends", "retained") <= 4 * await connection.fetchval(
        "select count(*) from retained where retain_until = (select ended_at + $1 from flow where flow_id = $2)",
        DAY,
        ENDED,
    )


async def test_trim_retention_reads_what_it_deletes(
    original: str, engine: Engine, touched: Touched, clock: Clock, connection: asyncpg.Connection
) -> None:
    await clock.advance(ms=1000)
    assert await engine.trim_retention(retention_ms=DAY) == 0
    # The entries of retained, each as an index entry and as a row, and no execution.
    entries = await connection.fetchval("select count(*) from retained")
    assert touched["read_retained_end"] + touched["list_trimmable"] <= 4 * entries
    assert touched.of("list_trimmable", "execution") == 0
    touched.clear()
    assert await engine.trim_retention(retention_ms=0) == 500
    assert touched.of("take_retained", "execution") <= 2 * 500
    assert touched.of("list_trimmable", "retained") <= 2 * entries


async def test_a_flow_is_deleted_in_bounded_steps(
    original: str, engine: Engine, touched: Touched, clock: Clock, connection: asyncpg.Connection
) -> None:
    flow_retention = parts_of(engine).flow_retention
    await flow_retention.trim_batch()
    await clock.advance(ms=DAY + 1)
    touched.clear()
    assert (await flow_retention.trim_batch()).done == 0
    # Live flows and those with members cost a few rows.
    assert touched["take_flows"] <= 30
    while await engine.trim_retention(retention_ms=0):
        pass
    await clock.advance(ms=RECHECK_MS + 1)
    steps = 0
    await connection.execute(VACUUM)
    while True:
        touched.clear()
        swept = await flow_retention.trim_batch(rows=500)
        # The edges and the groups, and the index entries of those that the step before has deleted.
        assert touched["take_flows"] <= 2 * (500 + 500) + 30
        if not swept.is_full:
            break
        steps += 1
        await connection.execute(VACUUM)
    assert (steps, swept.done) == (5, 1)
    assert await connection.fetchval("select count(*) from edge where flow_id = $1", ENDED) == 0


@pytest.mark.parametrize("statement", [upstreams.SQL.list_upstream_results, members_of.SQL.list_members_to_replay])
async def test_many_upstream_executions_are_looked_up_in_a_hash(
    connection: asyncpg.Connection, statement: Statement
) -> None:
    given = {"partition_key": 0, "flow_id": LIVE, "execution_id": LIVE, "upstream_ids": [LIVE]}
    values = {name: given[name] for name in statement.parameters}
    plan = "\n".join(row[0] for row in await connection.fetch(f"explain {statement.sql}", *statement.arguments(values)))
    assert "hashed SubPlan" in plan, plan

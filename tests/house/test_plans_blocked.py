"""A page of blocked executions touches few rows, however wide fan-ins are and however many executions wait."""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from databases import Databases
from engine.flows import stop_cascade
from engine.state import claim, refused
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import blocked
from flowfabric.engine.parts import parts_of
from flowfabric.model.flow import FlowEdge, FlowNode
from flowfabric.model.ids import format_execution_id
from house.filled import STATISTICS, copied, filled
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

UPSTREAMS, CHILDREN = 2_000, 2_000
PAGE = 50


async def fill(engine: Engine) -> None:
    """Create a flow with a wide fan-in, and one with a wide fan-out."""
    nodes = [_node(str(nth), "many") for nth in range(UPSTREAMS)]
    edges = [FlowEdge(upstream=node.name, downstream="in") for node in nodes]
    await engine.submit_flow(flow_kind="dag", namespace="tests", nodes=[*nodes, _node("in", "child")], edges=edges)
    nodes = [_node(str(nth), "child") for nth in range(CHILDREN)]
    edges = [FlowEdge(upstream="out", downstream=node.name) for node in nodes]
    await engine.submit_flow(flow_kind="dag", namespace="tests", nodes=[*nodes, _node("out", "one")], edges=edges)


def _node(name: str, lane_id: str) -> FlowNode:
    return FlowNode(name=name, lane_id=lane_id, execution_kind="job", input_payload=b"{}", creator_identity="test")


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many executions that wait for others."""
    async with filled(databases, fill, VACUUM) as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """A copy of it, with and without statistics."""
    async with copied(databases, store, *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


async def test_a_page_of_blocked_executions_touches_few_rows(
    original: str, engine: Engine, connection: asyncpg.Connection, touched: Touched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "PAGE_LIMIT", PAGE)
    parts = parts_of(engine)
    stop_cascade(engine)
    # The edges of the fan-in, which waits the longest, and one index entry of each upstream execution.
    assert (await parts.blocked.reconcile()).is_full
    by_table = touched.by_table("list_stuck")
    assert touched["list_stuck"] <= 6 * PAGE, by_table
    # A line for each of the others, though they began to wait in the same millisecond.
    child: dict[str, Any] = dict(
        await connection.fetchrow(
            "select at, execution_id, partition_key from listed order by at, execution_id limit 1"
        )
        or {}
    )
    parts.blocked._position = blocked._Position(child["at"], child["execution_id"])
    assert (await parts.blocked.reconcile()).is_full
    by_table = touched.by_table("list_stuck")
    assert touched.of("list_stuck", "listed") <= 2 * CHILDREN + 10, by_table
    assert by_table.total() - by_table["listed"] <= 12 * PAGE, by_table
    # Whether a single execution may run is not counted from its edges.
    await refused(
        engine.promote_blocked_to_eligible(format_execution_id(child["partition_key"], child["execution_id"])),
        "deps_not_satisfied",
    )
    assert touched["read_unresolved"] <= 10


async def test_a_repair_touches_few_rows_for_each_edge(
    original: str, engine: Engine, touched: Touched, connection: asyncpg.Connection
) -> None:
    parts = parts_of(engine)
    stop_cascade(engine)
    for lane, count in (("many", 20), ("one", 1)):
        await engine.complete_many([(run.handle, b"1") for run in await claim(engine, lane, limit=count)])
    # An older version ends members without an entry.
    await connection.execute("delete from cascade_entry")
    while (await parts.blocked.reconcile()).is_full:
        pass
    assert await connection.fetchval("select count(*) from ready") == UPSTREAMS - 20 + CHILDREN
    assert touched["list_ended_upstreams"] <= 10 * 1_000, touched.by_table("list_ended_upstreams")
    assert "lock_free" not in touched

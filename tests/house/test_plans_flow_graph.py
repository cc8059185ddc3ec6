"""Building and reading a flow touches few rows, however many flows there are and whatever the planner knows."""

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from databases import Databases
from engine.flow.graphs import BuiltFlow
from fixtures import Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.edge import AnyOfEdges, Incoming, OnSatisfied, Outgoing
from flowfabric.model.flow import FlowNode
from house.filled import STATISTICS, copied, filled
from house.test_plans_flow_submit import chains
from house.touched import Touched, touched

__all__ = ["touched"]

FLOWS = 60
SMALL_FLOWS = 1500
MEMBER: dict[str, Any] = {"lane_id": "default", "execution_kind": "job", "creator_identity": "test"}


async def fill(engine: Engine) -> None:
    """Submit many flows."""
    for _ in range(FLOWS):
        await engine.submit_flow(**chains(50))
    for _ in range(SMALL_FLOWS):
        await engine.submit_flow(
            flow_kind="dag",
            namespace="tests",
            nodes=[FlowNode(name="only", input_payload=b"", **MEMBER)],
            tags={"app.common": "yes"},
        )


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many flows."""
    async with filled(databases, fill, "vacuum") as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many flows, with and without statistics."""
    async with copied(databases, store, *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


async def test_building_and_reading_a_flow_touches_few_rows(
    original: str, given: Given, rows: Rows, touched: Touched
) -> None:
    engine = given.engine
    flow = await BuiltFlow.create(given, rows)
    first, second, child, last = await flow.members(4, lane_id="other")
    await flow.policy(last, AnyOfEdges(OnSatisfied.LET_RUN))
    await flow.connect(child, last)
    await flow.connect(first, child)
    ended = await flow.add(await given.completed(execution_id=flow.mint(), lane_id="ended"))
    edge = await flow.connect(ended, child)
    await flow.stage(second, child)
    own = (await given.claim(lane_id="other")).handle
    await engine.wait_children(own)
    await engine.set_flow_tag(flow.flow_id, "app.rare", "yes")
    assert await engine.describe_flow(flow.flow_id) is not None
    assert await engine.describe_edge(flow.flow_id, edge) is not None
    assert len(await engine.list_edges(flow.flow_id, Outgoing(child))) == 1
    assert len(await engine.list_edges(flow.flow_id, Incoming(child))) == 3
    await engine.evaluate_flow_eligibility(child)
    await engine.explain(child)
    read = {
        "read_flow_exists",
        "lock_new_member",
        "add_member",
        "read_new_edge",
        "insert_edge",
        "read_group_policy",
        "set_group_policy",
        "read_edge_to_apply",
        "apply_edge",
        "block_by_dependencies",
        "count_unsatisfied",
        "set_flow_tags",
        "read_flow_record",
        "read_edge",
        "list_outgoing_edges",
        "list_incoming_edges",
        "read_dependencies",
    }
    assert read <= set(touched.calls)
    assert {name: touched[name] for name in read if touched[name] > 30} == {}


async def test_a_cycle_is_looked_for_among_the_edges_behind_the_new_one(
    original: str, given: Given, rows: Rows, touched: Touched
) -> None:
    flow = await BuiltFlow.create(given, rows)
    members = await flow.members(20, lane_id="other")
    for upstream, downstream in pairwise(members):
        await flow.stage(upstream, downstream)
    # Nothing is behind the downstream execution.
    assert touched["read_new_edge"] <= 30
    await flow.stage(members[0], members[10])
    assert touched["read_new_edge"] <= 100


async def test_a_page_of_flows_touches_few_rows(original: str, given: Given, rows: Rows, touched: Touched) -> None:
    engine = given.engine
    ended = await BuiltFlow.create(given, rows)
    await ended.add(await given.completed(execution_id=ended.mint(), lane_id="ended"))
    await engine.set_flow_tag(ended.flow_id, "app.common", "yes")
    await engine.set_flow_tag(ended.flow_id, "app.rare", "yes")
    assert len((await engine.list_flows(limit=20)).flows) == 20
    assert touched["list_flows"] <= 200
    searches: tuple[dict[str, Any], ...] = (
        {"status": "completed"},
        {"status": "completed", "namespace": "tests"},
        {"status": "completed", "tag": ("app.common", "yes")},
        {"tag": ("app.rare", "yes")},
    )
    for filters in searches:
        page = await engine.list_flows(**filters, limit=20)
        assert [entry.flow_id for entry in page.flows] == [ended.flow_id]
    page = await engine.list_flows(limit=20)
    for _ in range(20):
        page = await engine.list_flows(limit=20, cursor=page.next_cursor)
    assert touched["list_flows"] <= 200

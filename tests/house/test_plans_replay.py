"""A replay touches few rows, however many executions have ended and however large the flow is."""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from creates import new
from databases import Databases
from engine.state import claim
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import FailureReason
from flowfabric.model.flow import FlowEdge, FlowNode
from house import touched as counting
from house.filled import STATISTICS, copied, filled
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

ENDED = 1_500
SMALL_FLOWS = 60
UPSTREAMS = 20
LOST = FailureReason("no luck", error_type="ValueError", traceback="Traceback")
OF_REPLAYS = (
    "list_flows_of",
    "lock_flows",
    "lock_executions",
    "read_ended",
    "list_queued_flows",
    "reset_groups",
    "delete_pending_cancels",
    "lock_ends",
    "take_ends",
    "replay_locked",
    "list_replayed",
    "set_member_counts",
)


async def fill(engine: Engine) -> None:
    """Create executions that have failed, and flows whose last member was skipped."""
    for _ in range(ENDED // 500):
        await engine.create_many([new() for _ in range(500)])
        for run in await claim(engine, limit=500):
            await engine.fail(run.handle, reason=LOST, classification="permanent")
    upstreams = [FlowNode(name=f"u{nth}", **_node("up")) for nth in range(UPSTREAMS)]
    edges = [FlowEdge(upstream=one.name, downstream="last") for one in upstreams]
    for _ in range(SMALL_FLOWS):
        nodes = [*upstreams, FlowNode(name="last", **_node("down"))]
        await engine.submit_flow(namespace="tests", flow_kind="dag", nodes=nodes, edges=edges)
    for _ in range(SMALL_FLOWS * UPSTREAMS // 500 + 1):
        for run in await claim(engine, "up", limit=500):
            await engine.fail(run.handle, reason=LOST, classification="permanent")
    await parts_of(engine).cascade.settle_left_over(since=0)


def _node(lane_id: str) -> dict[str, Any]:
    return {"lane_id": lane_id, "execution_kind": "job", "input_payload": b"{}", "creator_identity": "test"}


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many executions that have ended."""
    async with filled(databases, fill, VACUUM) as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """A copy of it, with and without statistics."""
    async with copied(databases, store, *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


async def test_a_replay_touches_few_rows(
    original: str, engine: Engine, connection: asyncpg.Connection, touched: Touched, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = (*counting.TABLES, "flow", "edge", "edge_group", "cascade_entry", "pending_cancel_group")
    monkeypatch.setattr(counting, "TABLES", tuple(dict.fromkeys(tables)))
    for query in (
        "select partition_key, execution_id from execution where flow_id is null limit 1 offset 700",
        "select partition_key, execution_id from execution where terminal_outcome = 'skipped' limit 1 offset 30",
    ):
        row = await connection.fetchrow(query)
        assert row is not None, query
        await engine.replay_execution(execution_id=f"{{fp:{row[0]}}}:{row[1]}")
    assert {name for name in OF_REPLAYS if name not in touched} == set()
    assert "lock_ends_anywhere" not in touched
    most = {name: touched[name] for name in OF_REPLAYS}
    assert {name: count for name, count in most.items() if count > 30 and name != "reset_groups"} == {}, most
    # Each edge is read by two indexes and updated, and its upstream execution is read.
    assert most["reset_groups"] <= 10 * UPSTREAMS, most

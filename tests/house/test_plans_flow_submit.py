"""Submitting a flow touches few rows, however many flows there are and whatever the planner knows."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from databases import Databases
from engine.flow.submitting import begin, is_awaited
from fixtures import Eventually, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.flow import FlowAlreadySatisfied, FlowEdge, FlowNode, FlowSubmitted
from house.filled import STATISTICS, copied, filled
from house.touched import Touched, touched

__all__ = ["touched"]

FLOWS = 100


def chains(count: int) -> dict[str, Any]:
    """The arguments of submit_flow for a flow of chains of ten nodes each."""
    names = [f"n{at}" for at in range(count)]
    fields: dict[str, Any] = {"lane_id": "default", "execution_kind": "job", "creator_identity": "test"}
    return {
        "flow_kind": "dag",
        "namespace": "tests",
        "nodes": [
            FlowNode(name=name, input_payload=b"x" * 300, tags={"app.a": "b", "ff.instance_id": "c"}, **fields)
            for name in names
        ],
        "edges": [FlowEdge(upstream=names[at - 1], downstream=names[at]) for at in range(1, count) if at % 10],
        "tags": {"app.a": "b"},
    }


async def fill(engine: Engine) -> None:
    """Submit many flows."""
    for _ in range(FLOWS):
        await engine.submit_flow(**chains(50))


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


async def test_submitting_a_flow_touches_few_rows(
    original: str,
    engine: Engine,
    connection: asyncpg.Connection,
    rows: Rows,
    touched: Touched,
    eventually: Eventually,
) -> None:
    flow_id = uuid4()
    for kind in (FlowSubmitted, FlowAlreadySatisfied):
        assert isinstance(await engine.submit_flow(**chains(1_500), flow_id=flow_id), kind)
    assert {"insert_flow", "insert_part"} <= set(touched.calls)
    assert touched["read_flow_exists"] <= 4
    # Inserts read no rows.
    assert {name for name in touched.calls if touched[name] > 0} == {"read_flow_exists"}
    # The second of two at the same time finds the flow only when it inserts it.
    flow_id = uuid4()
    async with connection.transaction():
        await begin(connection, flow_id)
        second = asyncio.create_task(engine.submit_flow(**chains(30), flow_id=flow_id))
        await eventually(lambda: is_awaited(rows, connection))
    assert isinstance(await second, FlowAlreadySatisfied)
    assert touched["read_submitted_flow"] <= 4

"""Replaying members with a quorum of more than their edges, which each next result makes impossible."""

from collections.abc import Sequence

import asyncpg
import pytest

from engine.state import REPLAYED, refused, vector
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import FlowEligibility
from flowfabric.model.execution import Replayed
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState

from .graphs import BuiltFlow
from .replaying import BLOCKED, SHORT, check, delete, edges, end, group, state, states


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """A flow without members yet."""
    return await BuiltFlow.create(given, rows)


async def too_small(flow: BuiltFlow, outcomes: Sequence[str]) -> list[ExecutionId]:
    """A skipped member with a quorum of more than its edges, behind its upstreams, the first of which have ended so."""
    *upstreams, child = members = await flow.members(3)
    await flow.policy(child, {"kind": "quorum", "k": 3, "on_satisfied": "let_run"})
    for upstream in upstreams:
        await flow.connect(upstream, child)
    for upstream, outcome in zip(upstreams, outcomes, strict=False):
        await end(flow, upstream, outcome)
    assert await state(flow.engine, child) is PublicState.SKIPPED
    assert (await group(flow.rows, child))[0] == "impossible"
    return members


@pytest.mark.parametrize(
    ("outcomes", "left", "reset"),
    [
        (["failed"], 2, ("pending", 0, 0, 0)),
        (["success"], 1, ("pending", 1, 0, 0)),
        (["failed", "failed"], 2, ("pending", 0, 0, 0)),
        (["success", "failed"], 1, ("pending", 1, 0, 0)),
    ],
)
async def test_a_member_with_a_quorum_of_more_than_its_edges_waits_for_the_next_result(
    engine: Engine,
    rows: Rows,
    connection: asyncpg.Connection,
    flow: BuiltFlow,
    outcomes: list[str],
    left: int,
    reset: tuple[str, int, int, int],
) -> None:
    _, second, child = await too_small(flow, outcomes)
    answer = await engine.replay_execution(child)
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    row = await rows.execution(child)
    assert (vector(row), row["blocking_detail"]) == (BLOCKED, f"{left} dep(s) unsatisfied after replay")
    assert await group(rows, child) == reset
    status = await engine.evaluate_flow_eligibility(child)
    assert status.status is FlowEligibility.BLOCKED_BY_DEPENDENCIES
    await check(engine, connection)
    await parts_of(engine).blocked.reconcile()
    if outcomes == ["success"]:
        # Nothing has ended that is not counted yet.
        assert await state(engine, child) is PublicState.WAITING_CHILDREN
        await end(flow, second, "success")
    assert await state(engine, child) is PublicState.SKIPPED
    assert (await group(rows, child))[0] == "impossible"
    await flow.settle()
    await check(engine, connection)


async def test_a_member_with_a_quorum_of_more_than_its_edges_runs_once_all_have_succeeded(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    first, second, child = await too_small(flow, ["success", "success"])
    answer = await engine.replay_execution(child)
    assert answer == Replayed(public_state=PublicState.WAITING)
    assert vector(await rows.execution(child)) == REPLAYED
    assert await group(rows, child) == ("pending", 2, 0, 0)
    assert await edges(rows, child) == {uuid_of(each): ("satisfied", True) for each in (first, second)}
    assert await states(flow) == (1, 0, "open")
    await check(engine, connection)
    assert (await parts_of(engine).blocked.reconcile()).done == 0
    assert await state(engine, child) is PublicState.WAITING
    await end(flow, child, "failed")
    assert await engine.replay_execution(child) == Replayed(public_state=PublicState.WAITING)
    await end(flow, child, "success")
    assert await states(flow) == (0, 0, "completed")
    await check(engine, connection)


async def test_a_quorum_of_more_than_its_edges_is_skipped_again_although_a_replayed_upstream_has_succeeded(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    first, second, child = await too_small(flow, ["failed", "success"])
    await engine.replay_execution(first)
    await end(flow, first, "success")
    answer = await engine.replay_execution(child)
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    assert (await rows.execution(child))["blocking_detail"] == "1 dep(s) unsatisfied after replay"
    assert await edges(rows, child) == {uuid_of(first): ("unsatisfied", False), uuid_of(second): ("satisfied", True)}
    await check(engine, connection)
    await parts_of(engine).blocked.reconcile()
    await flow.settle()
    assert await state(engine, child) is PublicState.SKIPPED
    assert await group(rows, child) == ("impossible", 2, 0, 0)
    await check(engine, connection)


@pytest.mark.parametrize("edge_state", ["applied", "staged"])
async def test_an_edge_added_to_a_quorum_that_lacked_it_counts_after_the_replay(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow, edge_state: str
) -> None:
    *_, child = await too_small(flow, ["success", "success"])
    third = await flow.member()
    edge_id = await flow.stage(third, child)
    if edge_state == "applied":
        await flow.apply(edge_id, third, child)
    answer = await engine.replay_execution(child)
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    assert (await rows.execution(child))["blocking_detail"] == "1 dep(s) unsatisfied after replay"
    assert await group(rows, child) == ("pending", 2, 0, 0)
    await check(engine, connection)
    await parts_of(engine).blocked.reconcile()
    assert await state(engine, child) is PublicState.WAITING_CHILDREN
    if edge_state == "staged":
        await flow.apply(edge_id, third, child)
    await end(flow, third, "success")
    assert await group(rows, child) == ("satisfied", 3, 0, 0)
    assert vector(await rows.execution(child)) == REPLAYED
    await check(engine, connection)


async def test_a_quorum_of_more_than_its_edges_is_not_replayed_without_a_deleted_execution(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow, clock: Clock
) -> None:
    bad = await flow.member(policy=SHORT)
    other, child = await flow.members(2)
    await flow.policy(child, {"kind": "quorum", "k": 3, "on_satisfied": "let_run"})
    for upstream in (bad, other):
        await flow.connect(upstream, child)
    await end(flow, bad, "failed")
    await end(flow, other, "success")
    await delete(flow, clock)
    async with rows.unchanged():
        refusal = await refused(engine.replay_execution(child), "replay_not_allowed")
    assert f"{child} depends on {bad}, which" in str(refusal.detail)
    await check(engine, connection)

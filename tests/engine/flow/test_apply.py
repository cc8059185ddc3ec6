"""Edges that are applied: their children wait, and every other state of a child stays as it is."""

import asyncio
from uuid import uuid4

import asyncpg
import pytest

from engine.flow.graphs import WAITS, BuiltFlow
from engine.flow.submitting import are_waiting
from engine.state import all_cases, refused, rounds, vector
from engine.waits import suspend_args
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.model.edge import AlreadyApplied, DependencyApplied
from flowfabric.model.ids import EdgeId, FlowId


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """An empty flow."""
    return await BuiltFlow.create(given, rows)


async def test_an_applied_edge_makes_its_child_wait(flow: BuiltFlow, rows: Rows, clock: Clock) -> None:
    first, second, child = await flow.members(3)
    staged = await flow.stage(first, child)
    also_staged = await flow.stage(second, child)
    now = await clock.advance(seconds=1)
    assert await flow.apply(staged, first, child, graph_revision=7) == DependencyApplied(unsatisfied_count=1)
    row = await rows.execution(child)
    assert vector(row) == WAITS
    assert row["blocking_detail"] == f"1 dep(s) unresolved incl {staged}"
    assert row["last_transition_at"] == now
    assert not await rows.of("ready", execution_id=uuid_of(child))
    (listed,) = await rows.of("listed", execution_id=uuid_of(child))
    assert (listed["public_state"], listed["at"]) == ("waiting_children", now)
    edge = await flow.engine.describe_edge(flow.flow_id, staged)
    assert edge is not None
    assert (edge.edge_state, edge.dependency_state, edge.applied_at) == ("applied", "unsatisfied", now)
    (group,) = await rows.of("edge_group", flow_id=flow.flow_id)
    assert (group["staged_count"], group["applied_count"], group["group_state"]) == (2, 1, "pending")
    assert (group["last_flow_graph_revision"], group["last_dependency_update_at"]) == (7, now)
    async with rows.unchanged():
        assert await flow.apply(staged, first, child) == AlreadyApplied()
    later = await clock.advance(seconds=1)
    assert await flow.apply(also_staged, second, child) == DependencyApplied(unsatisfied_count=2)
    row = await rows.execution(child)
    assert (vector(row), row["blocking_detail"]) == (WAITS, f"2 dep(s) unresolved incl {also_staged}")
    assert (row["last_transition_at"], row["last_mutation_at"]) == (now, later)
    assert await flow.engine.find_inconsistencies() == []
    claimed = {(await flow.given.claim()).execution_id for _ in range(2)}
    assert claimed == {first, second}


async def test_what_is_given_when_an_edge_is_applied_replaces_what_was_staged(flow: BuiltFlow) -> None:
    first, child = await flow.members(2)
    kept, changed, cleared = [await flow.stage(first, child, data_passing_ref="staged") for _ in range(3)]
    await flow.apply(kept, first, child)
    await flow.apply(changed, first, child, data_passing_ref="applied", dependency_kind="other")
    await flow.apply(cleared, first, child, data_passing_ref="")
    edges = [await flow.engine.describe_edge(flow.flow_id, edge_id) for edge_id in (kept, changed, cleared)]
    found = [(edge.dependency_kind, edge.data_passing_ref) for edge in edges if edge is not None]
    assert found == [("success_only", "staged"), ("other", "applied"), ("success_only", None)]


async def test_a_grant_of_a_child_that_begins_to_wait_is_withdrawn(flow: BuiltFlow, rows: Rows) -> None:
    first, child = await flow.members(2)
    await flow.engine.issue_claim_grant(
        execution_id=child, lane_id="default", worker_id="worker", worker_instance_id="worker-1"
    )
    await flow.connect(first, child)
    row = await rows.execution(child)
    assert (vector(row), row["granted_until"], row["attached"]) == (WAITS, None, 0)
    assert not await rows.of("claim_grant", execution_id=uuid_of(child))
    assert await flow.engine.find_inconsistencies() == []


async def test_a_delayed_child_waits_and_keeps_the_time_of_its_delay(flow: BuiltFlow, given: Given, rows: Rows) -> None:
    first = await flow.member()
    child = await flow.add(await given.delayed(execution_id=flow.mint()))
    until = (await rows.execution(child))["delay_until"]
    await flow.connect(first, child)
    row = await rows.execution(child)
    assert (vector(row), row["delay_until"]) == (WAITS, until)
    assert await rows.timers(child) == {}
    assert await flow.engine.find_inconsistencies() == []


async def test_a_resumable_child_waits_and_keeps_its_attempt(flow: BuiltFlow, rows: Rows) -> None:
    child = await flow.member()
    first = await flow.member()
    handle = (await flow.given.claim()).handle
    assert handle.execution_id == child
    await flow.engine.hand_back(handle)
    await flow.connect(first, child)
    row = await rows.execution(child)
    assert (row["attempt_state"], row["public_state"]) == ("attempt_interrupted", "waiting_children")
    (listed,) = await rows.of("listed", execution_id=uuid_of(child))
    assert listed["public_state"] == "waiting_children"
    assert await flow.engine.find_inconsistencies() == []


async def test_only_the_records_of_a_child_that_is_not_runnable_are_written(
    flow: BuiltFlow, given: Given, rows: Rows
) -> None:
    with all_cases() as case:
        for name in ("active", "suspended", "completed"):
            with case(name):
                child = await flow.outside(lane_id=name)
                handle = (await given.claim(lane_id=name)).handle
                await flow.add(child)
                if name == "suspended":
                    await flow.engine.suspend(handle, suspend_args())
                if name == "completed":
                    await flow.engine.complete(handle, b"done")
                before = await rows.execution(child)
                first = await flow.member(lane_id="upstream")
                await flow.connect(first, child)
                assert await rows.execution(child) == before
                (group,) = await rows.of("edge_group", downstream_id=uuid_of(child))
                assert group["applied_count"] == 1
    assert await flow.engine.find_inconsistencies() == []


async def test_apply_refuses_an_edge_that_is_not_staged_like_this(flow: BuiltFlow, given: Given, rows: Rows) -> None:
    first, second, child = await flow.members(3)
    edge = await flow.stage(first, child)
    nowhere = BuiltFlow(given, rows, FlowId(uuid4()))
    with all_cases() as case:
        with case("an unknown edge"):
            async with rows.unchanged():
                await refused(flow.apply(EdgeId(uuid4()), first, child), "invalid_dependency", "is not staged")
        with case("an unknown flow"):
            async with rows.unchanged():
                await refused(nowhere.apply(edge, first, child, graph_revision=0), "invalid_dependency")
        with case("other ends"):
            async with rows.unchanged():
                await refused(flow.apply(edge, second, child), "invalid_dependency", first)
                await refused(flow.apply(edge, child, first), "invalid_dependency", first)
        with case("ends of another partition"):
            for index in ("9999", "40000"):
                code = "invalid_dependency" if index == "9999" else "invalid_input"
                async with rows.unchanged():
                    await refused(flow.apply(edge, first, f"{{fp:{index}}}:{uuid_of(child)}"), code)
                    await refused(flow.apply(edge, f"{{fp:{index}}}:{uuid_of(first)}", child), "invalid_dependency")
        with case("a revision that is no number"):
            async with rows.unchanged():
                await refused(flow.apply(edge, first, child, graph_revision=-1), "invalid_input", "graph_revision")


async def test_an_edge_to_a_deleted_execution_is_not_applied(
    flow: BuiltFlow, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    ended = await flow.add(await given.completed(execution_id=flow.mint()))
    before = await flow.member()
    to_ended = await flow.stage(before, ended)
    # The retention of a version without flows deletes members of live flows.
    await connection.execute("delete from execution where execution_id = $1", uuid_of(ended))
    await connection.execute("delete from retained")
    async with rows.unchanged():
        await refused(flow.apply(to_ended, before, ended), "execution_not_found", ended)
    # The id may be used again, by an execution that is no member.
    await flow.given.created(execution_id=ended)
    async with rows.unchanged():
        await refused(flow.apply(to_ended, before, ended), "execution_not_in_flow", ended)


async def test_a_child_that_is_claimed_while_an_edge_is_applied_runs_or_waits(
    flow: BuiltFlow, engines: Engines, rows: Rows
) -> None:
    second = Given(await engines(), flow.given.clock)
    for nth in rounds(8, whole=60):
        first = await flow.member(lane_id="upstream")
        child = await flow.member(lane_id=f"lane {nth}")
        edge = await flow.stage(first, child)
        _, claimed = await asyncio.gather(
            flow.apply(edge, first, child),
            second.engine.claim_many(
                lanes=(f"lane {nth}",), worker_id="worker", worker_instance_id="worker-1", limit=1
            ),
        )
        state = await flow.engine.read_execution_state(child)
        assert state == ("active" if claimed else "waiting_children")
    assert await flow.engine.find_inconsistencies() == []


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_child_that_is_claimed_while_an_apply_waits_for_it_runs_on(
    flow: BuiltFlow, engines: Engines, rows: Rows, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    other = await engines()
    first, child = await flow.members(2)
    edge = await flow.stage(first, child)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(child))
        claimed = asyncio.create_task(
            other.issue_grant_and_claim(execution_id=child, lane_id="default", lease_duration_ms=60_000)
        )
        await eventually(lambda: are_waiting(rows, 1))
        # It waits behind the claim.
        applied = asyncio.create_task(flow.apply(edge, first, child))
        await eventually(lambda: are_waiting(rows, 2))
    await claimed
    assert await applied == DependencyApplied(unsatisfied_count=1)
    assert await flow.engine.read_execution_state(child) == "active"
    assert await flow.engine.find_inconsistencies() == []

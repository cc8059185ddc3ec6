"""Members are kept for their retention after the end of their flow, so that it can be replayed until then."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from engine.flow.graphs import BuiltFlow
from engine.flow.test_retention import RECHECK, sweep, trim
from engine.flows import flow_of, settle
from engine.state import all_cases, refused
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric import Fabric, FlowRunFailed
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow.retention import MEMBERS_MS
from flowfabric.engine.parts import parts_of
from flowfabric.flows import FlowState, FlowStatus
from flowfabric.model.edge import AnyOfEdges, OnSatisfied
from flowfabric.model.explanation import ImpossibleReason
from flowfabric.model.flow import WaitIndefinite
from flowfabric.model.ids import ExecutionId, FlowId

HOUR = 3_600_000
DAY = 24 * HOUR
TIMEOUT = 60

pytestmark = pytest.mark.usefixtures("consistent_rows")


async def trim_on_request(engine: Engine) -> int:
    """Delete on request what the sweep would delete; return how many."""
    return await engine.trim_retention(retention_ms=DAY)


def kept_for(retention_ms: int) -> dict[str, Any]:
    """The arguments of an execution with a retention of its own."""
    return {"policy": {"stream_policy": {"retention_ttl_ms": retention_ms}}}


async def long_flow(engine: Engine, given: Given, clock: Clock, *early: ExecutionId) -> tuple[FlowId, ExecutionId]:
    """A flow of members that have ended and one that fails two days later."""
    late = await given.claimed(lease_ttl_ms=3 * DAY)
    flow_id = await flow_of(engine, [*early, late.execution_id])
    await clock.advance(ms=2 * DAY)
    for deletes in (trim, trim_on_request):
        assert await deletes(engine) == 0
    await engine.fail(late, reason="no luck", classification="permanent")
    await settle(engine, flow_id)
    return flow_id, late.execution_id


async def stored(rows: Rows) -> set[str]:
    """The UUIDs of the stored executions."""
    return {str(row["execution_id"]) for row in await rows.of("execution")}


@pytest.mark.parametrize("deletes", [trim, trim_on_request])
async def test_the_retention_of_a_member_counts_from_the_end_of_its_flow(
    engine: Engine, given: Given, clock: Clock, rows: Rows, deletes: Callable[[Engine], Awaitable[int]]
) -> None:
    await clock.stop()
    short, plain, long = [await given.completed(**kept) for kept in (kept_for(HOUR), {}, kept_for(7 * DAY))]
    _, late = await long_flow(engine, given, clock, short, plain, long)
    expected = [(HOUR, {plain, long, late}), (DAY, {long}), (7 * DAY, set())]
    passed = 0
    for after, kept in expected:
        await clock.advance(ms=after - passed - 1)
        passed = after - 1
        assert await deletes(engine) == 0
        # The sweep has nothing to look at again before.
        async with rows.unchanged():
            assert await deletes(engine) == 0
        # What was held while the flow was live is looked at again when that is due.
        await clock.advance(ms=1 if after > RECHECK * 1000 else round(RECHECK * 1000))
        passed = after
        assert await deletes(engine) > 0
        assert await stored(rows) == {uuid_of(each) for each in kept}
    assert await rows.of("retained") == []


async def test_a_held_member_is_due_when_its_retention_after_the_end_of_the_flow_is_over(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    await clock.stop()
    early = [await given.completed(), await given.completed(**kept_for(HOUR))]
    flow_id, late = await long_flow(engine, given, clock, *early)
    flow_end = await clock.now()
    assert [row["ended_at"] for row in await rows.of("flow")] == [flow_end]
    await clock.advance(seconds=RECHECK)
    assert await trim(engine) == 0
    due = {str(each): row["retain_until"] for row in await rows.of("retained") for each in row["execution_ids"]}
    assert due == {
        uuid_of(early[0]): flow_end + DAY,
        uuid_of(early[1]): flow_end + HOUR,
        uuid_of(late): flow_end + DAY,
    }
    # A replay finds it by that time, also while another member runs again.
    for execution_id in (late, *early):
        await engine.replay_execution(execution_id=execution_id)
    assert await rows.of("retained") == []
    for execution_id in (late, *early):
        await engine.cancel_execution(execution_id=execution_id, reason="x")
    await settle(engine, flow_id)
    assert [row["ended_at"] for row in await rows.of("flow")] == [await clock.now()]


async def test_a_cancelled_flow_has_ended_when_its_last_member_has(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    await clock.stop()
    running = await given.claimed(lease_ttl_ms=9 * DAY)
    waiting = await given.created()
    flow_id = await flow_of(engine, [running.execution_id, waiting])
    await engine.cancel_flow(flow_id, reason="x", cancellation_policy="cancel_pending", wait=WaitIndefinite())
    await clock.advance(ms=2 * DAY)
    assert await trim(engine) == 0
    await engine.complete(running, b"1")
    await settle(engine, flow_id)
    await clock.advance(ms=DAY - 1)
    assert await trim(engine) == await engine.trim_retention() == 0
    await clock.advance(ms=1)
    assert await trim(engine) == 2
    assert await stored(rows) == set()


async def test_an_ended_execution_that_joins_a_flow_is_kept_from_then_on(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    await clock.stop()
    execution_id = await given.completed()
    await clock.advance(ms=DAY - 1)
    await flow_of(engine, [execution_id])
    await clock.advance(ms=DAY - 1)
    assert await trim(engine) == await engine.trim_retention() == 0
    await clock.advance(ms=1)
    assert await trim(engine) == 1
    assert await stored(rows) == set()


async def test_a_flow_without_members_tells_how_it_ended_until_its_retention_is_over(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    await clock.stop()
    flow_id, _ = await long_flow(engine, given, clock, await given.completed())
    assert await engine.trim_retention(retention_ms=0) == 2
    assert await sweep(engine) == 0
    await clock.advance(ms=DAY - 1)
    assert await sweep(engine) == 0
    found, ended = await engine.describe_flow(flow_id), await engine.wait_for_flow(flow_id, 0)
    assert found is not None
    assert ended is not None
    assert (found.derived_state, ended.status) == (FlowState.FAILED, FlowStatus.FAILED)
    await clock.advance(ms=1 + MEMBERS_MS)
    assert await sweep(engine) == 1
    assert await rows.of("flow") == []


async def test_a_flow_of_two_days_is_replayed_with_the_results_of_its_first_hour(
    url: str, engine: Engine, clock: Clock, rows: Rows
) -> None:
    fabric = Fabric(url)
    is_broken = True

    @fabric.task(lane="early")
    async def extract() -> int:
        return 7

    @fabric.task(lane="late")
    async def load(value: int) -> int:
        if is_broken:
            raise ValueError("the target is away")
        return value

    async with fabric:
        flow = fabric.flow("nightly")
        extracted = flow.add(extract)
        loaded = flow.add(load, extracted)
        run = await flow.submit()
        async with fabric.worker(lanes=["early"]):
            assert await run.run(extracted).result(timeout=TIMEOUT) == 7
        await clock.advance(ms=2 * DAY)
        assert await trim(engine) == 0
        async with fabric.worker(lanes=["late"]):
            with pytest.raises(FlowRunFailed):
                await run.result(timeout=TIMEOUT)
            await clock.advance(ms=DAY - HOUR)
            assert await trim(engine) == await engine.trim_retention() == 0
            is_broken = False
            await run.replay("the target is back")
            await run.result(timeout=TIMEOUT)
            assert await run.run(loaded).result(timeout=TIMEOUT) == 7
    await clock.advance(ms=DAY + 1)
    assert await trim(engine) == 2
    assert await rows.of("retained") == []


async def test_another_execution_with_the_id_of_a_deleted_member_is_not_taken_for_it(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    with all_cases() as case:
        with case("its result"):
            flow, deleted, child = await deleted_upstream(engine, given, clock, rows)
            await given.completed(execution_id=deleted, result=b"other")
            found = await parts_of(engine).upstreams.read_upstream_results(child, [UUID(uuid_of(deleted))])
            assert found == []
            members = parts_of(engine).members
            deleted_members = await members.count_deleted(flow.flow_id)
            assert deleted_members is not None
            assert (deleted_members.count, deleted_members.final_count) == (1, 0)
        with case("its edges"):
            flow, deleted, _ = await deleted_upstream(engine, given, clock, rows)
            other_flow = await flow_of(engine, [await given.failed(execution_id=deleted)])
            unmet = await parts_of(engine).members.list_unmet(other_flow, limit=10)
            assert (unmet.count, unmet.final_count) == (1, 1)
        with case("a replay that needs it"):
            flow, deleted, child = await deleted_upstream(engine, given, clock, rows, outcome="failed")
            await given.completed(execution_id=deleted)
            (edge,) = (await explained(engine, child)).edges
            assert edge.public_state is None
            async with rows.unchanged():
                await refused(engine.replay_execution(child), "replay_not_allowed", deleted)
        with case("a sibling"):
            flow, deleted, child = await deleted_upstream(engine, given, clock, rows, is_applied=False)
            other = await given.created(execution_id=deleted)
            await flow.connect(await flow.add(await given.completed(execution_id=flow.mint(), lane_id="more")), child)
            await parts_of(engine).siblings.drain()
            (group,) = await rows.of("edge_group", downstream_id=uuid_of(child))
            assert (group["group_state"], group["cancel_siblings_reason"]) == ("satisfied", "sibling_quorum_satisfied")
            assert await engine.read_execution_state(other) == "waiting"


async def explained(engine: Engine, execution_id: ExecutionId) -> ImpossibleReason:
    """Why an execution was skipped."""
    explanation = await engine.explain(execution_id)
    (reason,) = [each for each in explanation.reasons if isinstance(each, ImpossibleReason)]
    return reason


async def deleted_upstream(
    engine: Engine, given: Given, clock: Clock, rows: Rows, *, outcome: str = "success", is_applied: bool = True
) -> tuple[BuiltFlow, ExecutionId, ExecutionId]:
    """A flow that has ended, its deleted member, and the member behind that, which needs one success to run."""
    flow = await BuiltFlow.create(given, rows)
    upstream, child = await flow.member(lane_id="upstream", **kept_for(HOUR)), await flow.member(lane_id="child")
    await flow.policy(child, AnyOfEdges(OnSatisfied.CANCEL_REMAINING))
    edge = await flow.stage(upstream, child)
    if is_applied:
        await flow.apply(edge, upstream, child)
    handle = (await given.claim(lane_id="upstream")).handle
    if outcome == "success":
        await engine.complete(handle, b"done")
    else:
        await engine.fail(handle, reason="no luck", classification="permanent")
    await settle(engine, flow.flow_id)
    if await engine.read_execution_state(child) != "skipped":
        await engine.cancel_execution(execution_id=child, reason="x")
    await settle(engine, flow.flow_id)
    await clock.advance(ms=HOUR + 1)
    assert await trim_on_request(engine) == 1
    assert await engine.read_execution_state(upstream) is None
    return flow, upstream, child

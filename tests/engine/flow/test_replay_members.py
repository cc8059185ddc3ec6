"""Replaying members of flows: what they wait for, and how the flow counts them."""

import asyncpg
import pytest

from engine.counts import miscounts
from engine.state import attempts, claim, refused, vector
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Replayed
from flowfabric.model.states import PublicState

from .planted import PlantedFlow

BLOCKED = (
    "runnable/unowned/blocked_by_dependencies/waiting_for_children/none/pending_replay_attempt/waiting_children"
)


@pytest.fixture
async def planted(given: Given, connection: asyncpg.Connection) -> PlantedFlow:
    """A flow without members yet."""
    return PlantedFlow(given, connection)


async def check(engine: Engine, connection: asyncpg.Connection) -> None:
    """Nothing contradicts anything, and the counts are right."""
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []


async def test_a_member_of_a_cancelled_flow_is_replayed_only_on_request(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, planted: PlantedFlow
) -> None:
    member = await given.created()
    await planted.plant(member)
    await engine.cancel_execution(execution_id=member, reason="not wanted")
    await planted.settle()
    await connection.execute("update flow set public_flow_state = 'cancelled'")
    await connection.execute(
        "insert into cancel_backlog_member (partition_key, flow_id, execution_id) values ($1, $2, $3)",
        planted.partition_key,
        planted.flow_id,
        uuid_of(member),
    )
    async with rows.unchanged():
        refusal = await refused(engine.replay_execution(execution_id=member), "flow_already_terminal")
    assert "allow_cancelled_flow" in str(refusal.detail)
    answer = await engine.replay_execution(execution_id=member, allow_cancelled_flow=True)
    assert answer == Replayed(public_state=PublicState.WAITING)
    assert await rows.of("cancel_backlog_member") == []
    await check(engine, connection)


async def test_a_refusal_names_the_state_before_the_flow_and_the_flow_before_the_limit(
    engine: Engine, given: Given, connection: asyncpg.Connection, planted: PlantedFlow
) -> None:
    ended, running = await given.cancelled(policy={"max_replay_count": 0}), await given.created()
    await planted.plant(ended, running)
    await connection.execute("update flow set public_flow_state = 'cancelled'")
    await refused(engine.replay_execution(execution_id=running), "execution_not_terminal")
    await refused(engine.replay_execution(execution_id=ended), "flow_already_terminal")
    replay = engine.replay_execution(execution_id=ended, allow_cancelled_flow=True)
    await refused(replay, "max_replays_exhausted")


@pytest.mark.parametrize(
    ("outcome", "ended_state", "unhappy"), [("failed", "failed", 1), ("cancelled", "failed", 1), ("success", "completed", 0)]
)
async def test_a_replay_opens_an_ended_flow_again(
    engine: Engine, given: Given, rows: Rows, planted: PlantedFlow, outcome: str, ended_state: str, unhappy: int
) -> None:
    member = await given.claimed()
    await planted.plant(member.execution_id)
    match outcome:
        case "failed":
            await engine.fail(member, reason="no luck", classification="permanent")
        case "cancelled":
            await engine.cancel(member, "not wanted")
        case _:
            await engine.complete(member, b"done")
    await planted.settle()
    flow = await planted.row(rows)
    assert (flow["live_count"], flow["unhappy_count"], flow["derived_state"]) == (0, unhappy, ended_state)
    await engine.replay_execution(execution_id=member.execution_id)
    flow = await planted.row(rows)
    assert (flow["live_count"], flow["unhappy_count"], flow["derived_state"]) == (1, 0, "open")
    (event,) = [event for event in await rows.of("event") if event["reason"] == "flow_state_changed"]
    assert str(event["execution_id"]) == str(planted.flow_id)
    (run,) = await claim(engine)
    await engine.complete(run.handle, b"again")
    (entry,) = await rows.of("cascade_entry")
    assert [str(each) for each in entry["execution_ids"]] == [uuid_of(member.execution_id)]


async def test_a_member_that_ended_while_it_waited_waits_again(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, planted: PlantedFlow, clock: Clock
) -> None:
    one, other, child = await given.created(), await given.created(), await given.created()
    await planted.plant(one, other, child)
    await planted.block(child, one, other)
    await engine.cancel_execution(execution_id=child, reason="not wanted")
    await planted.settle()
    await check(engine, connection)
    now = await clock.advance(ms=3)
    answer = await engine.replay_execution(execution_id=child)
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    row = await rows.execution(child)
    assert (vector(row), row["blocking_detail"]) == (BLOCKED, "2 dep(s) unsatisfied after replay")
    (listed,) = await rows.of("listed", execution_id=uuid_of(child))
    assert (listed["public_state"], listed["at"]) == ("waiting_children", now)
    assert [row["details"] for row in await rows.events(child)][-1] == '{"branch": "normal"}'
    flow = await planted.row(rows)
    assert (flow["live_count"], flow["unhappy_count"], flow["derived_state"]) == (3, 0, "open")
    assert {run.execution_id for run in await claim(engine)} == {one, other}
    await check(engine, connection)


async def test_a_member_whose_group_is_satisfied_runs_at_once(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, planted: PlantedFlow
) -> None:
    one, child = await given.created(), await given.created()
    await planted.plant(one, child)
    await planted.block(child, one)
    await engine.cancel_execution(execution_id=child, reason="not wanted")
    await planted.settle()
    await planted.resolve(child, satisfied=[one])
    assert (await engine.replay_execution(execution_id=child)).public_state is PublicState.WAITING
    assert (await planted.group(rows, child))["group_state"] == "satisfied"
    await check(engine, connection)


async def test_a_skipped_member_waits_for_the_upstreams_that_failed(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, planted: PlantedFlow
) -> None:
    good, bad, worse, child = [await given.created() for _ in range(4)]
    await planted.plant(good, bad, worse, child)
    await planted.block(child, good, bad, worse)
    await planted.skip(child)
    await planted.settle()
    await planted.resolve(child, satisfied=[good], impossible=[bad, worse])
    await connection.execute(
        """update edge_group set cancel_siblings_pending_flag = true, cancel_siblings_pending_members = '{}',
                  cancel_siblings_reason = 'x'"""
    )
    await connection.execute(
        """insert into pending_cancel_group (partition_key, flow_id, downstream_id, enqueued_at)
           select partition_key, flow_id, downstream_id, ff_now() from edge_group"""
    )
    answer = await engine.replay_execution(execution_id=child, reason="upstream is fixed")
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    row = await rows.execution(child)
    assert (vector(row), row["blocking_detail"]) == (BLOCKED, "2 dep(s) unsatisfied after replay")
    assert await planted.edge_states(rows, child) == {
        uuid_of(good): ("satisfied", True),
        uuid_of(bad): ("unsatisfied", False),
        uuid_of(worse): ("unsatisfied", False),
    }
    group = await planted.group(rows, child)
    assert (group["group_state"], group["succeeded_count"], group["failed_count"], group["skipped_count"]) == (
        "pending",
        1,
        0,
        0,
    )
    assert (group["cancel_siblings_pending_flag"], group["cancel_siblings_pending_members"]) == (False, None)
    assert group["cancel_siblings_reason"] is None
    assert await rows.of("pending_cancel_group") == []
    lease, operator = (await rows.events(child))[-2:]
    assert (lease["reason"], operator["details"]) == (
        "skipped_flow_member",
        '{"branch": "skipped_flow_member", "groups_reset": 1}',
    )
    flow = await planted.row(rows)
    assert (flow["live_count"], flow["unhappy_count"]) == (4, 0)
    assert await attempts(rows, child) == []
    await check(engine, connection)


async def test_a_member_that_was_cancelled_before_its_group_became_impossible_does_not_run_without_it(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, planted: PlantedFlow
) -> None:
    bad, child = await given.created(), await given.created()
    await planted.plant(bad, child)
    await planted.block(child, bad)
    await engine.cancel_execution(execution_id=child, reason="not wanted")
    await planted.settle()
    await planted.resolve(child, impossible=[bad])
    answer = await engine.replay_execution(execution_id=child)
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    assert (await planted.group(rows, child))["group_state"] == "pending"
    assert [row["details"] for row in await rows.events(child)][-1] == '{"branch": "normal"}'
    await check(engine, connection)


async def test_a_pending_cancellation_of_a_member_does_not_reach_its_replay(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, planted: PlantedFlow
) -> None:
    one, sibling, child = await given.created(), await given.created(), await given.created()
    await planted.plant(one, sibling, child)
    await planted.block(child, one, sibling, policy="any_of")
    await engine.cancel_execution(execution_id=sibling, reason="not wanted")
    await planted.settle()
    await connection.execute(
        "update edge_group set cancel_siblings_pending_flag = true, cancel_siblings_pending_members = $1",
        [uuid_of(one), uuid_of(sibling)],
    )
    await engine.replay_execution(execution_id=sibling)
    group = await planted.group(rows, child)
    assert [str(each) for each in group["cancel_siblings_pending_members"]] == [uuid_of(one)]

"""Replaying members of flows: what they wait for, and how the flow counts them."""

import itertools

import asyncpg
import pytest

from engine.flows import stop_cascade
from engine.state import REPLAYED, attempts, claim, refused, vector
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import BulkResult, Replayed
from flowfabric.model.states import PublicState

from .graphs import BuiltFlow
from .replaying import BLOCKED, SHORT, check, delete, edges, end, group, state, states


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """A flow without members yet."""
    return await BuiltFlow.create(given, rows)


async def test_a_member_of_a_cancelled_flow_is_replayed_only_on_request(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    member, other = await flow.members(2)
    never = await flow.member(policy={"max_replay_count": 0})
    await end(flow, member, "cancelled")
    await end(flow, never, "cancelled")
    await engine.cancel_flow_header(flow_id=flow.flow_id, reason="not wanted", cancellation_policy="flow_only")
    async with rows.unchanged():
        refusal = await refused(engine.replay_execution(execution_id=member), "flow_already_terminal")
        assert "allow_cancelled_flow" in str(refusal.detail)
        # The state of the execution is checked before the flow, and the flow before the limit.
        await refused(engine.replay_execution(execution_id=other), "execution_not_terminal")
        await refused(engine.replay_execution(execution_id=never), "flow_already_terminal")
        await refused(engine.replay_execution(execution_id=never, allow_cancelled_flow=True), "max_replays_exhausted")
    answer = await engine.replay_execution(execution_id=member, allow_cancelled_flow=True)
    assert answer == Replayed(public_state=PublicState.WAITING)
    await check(engine, connection)


async def test_the_backlog_of_a_cancelled_flow_leaves_what_was_replayed(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    member = await flow.member()
    await engine.cancel_flow_header(flow_id=flow.flow_id, reason="not wanted", cancellation_policy="cancel_all")
    assert len(await rows.of("cancel_backlog_member")) == 1
    await engine.cancel_execution(execution_id=member, reason="not wanted")
    await engine.replay_execution(execution_id=member, allow_cancelled_flow=True)
    assert await rows.of("cancel_backlog_member") == []
    assert await state(engine, member) is PublicState.WAITING
    await check(engine, connection)


@pytest.mark.parametrize(
    ("outcome", "ended"),
    [("failed", (0, 1, "failed")), ("cancelled", (0, 1, "failed")), ("success", (0, 0, "completed"))],
)
async def test_a_replay_opens_an_ended_flow_again(
    engine: Engine,
    rows: Rows,
    connection: asyncpg.Connection,
    flow: BuiltFlow,
    outcome: str,
    ended: tuple[int, int, str],
) -> None:
    member = await flow.member()
    await end(flow, member, outcome)
    assert await states(flow) == ended
    await engine.replay_execution(execution_id=member)
    assert await states(flow) == (1, 0, "open")
    changes = [row for row in await rows.of("event") if row["reason"] == "flow_state_changed"]
    assert len(changes) == 2
    await end(flow, member, "success")
    assert await states(flow) == (0, 0, "completed")
    await check(engine, connection)


async def test_an_end_that_is_still_queued_is_settled_before_the_replay(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream, child = await flow.members(2)
    await flow.connect(upstream, child)
    stop_cascade(engine)
    await engine.cancel_execution(execution_id=upstream, reason="not wanted")
    assert len(await rows.of("cascade_entry")) == 1
    assert await edges(rows, child) == {uuid_of(upstream): ("unsatisfied", False)}
    answer = await engine.replay_execution(execution_id=upstream)
    assert answer == Replayed(public_state=PublicState.WAITING)
    assert await state(engine, child) is PublicState.SKIPPED
    assert await rows.of("cascade_entry") == []
    assert await states(flow) == (1, 0, "open")
    await end(flow, upstream, "success")
    assert await state(engine, child) is PublicState.SKIPPED
    await check(engine, connection)


async def test_a_member_that_ended_while_it_waited_waits_again(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow, clock: Clock
) -> None:
    one, other, child = await flow.members(3)
    await flow.connect(one, child)
    await flow.connect(other, child)
    await end(flow, child, "cancelled")
    now = await clock.advance(ms=3)
    answer = await engine.replay_execution(execution_id=child)
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    row = await rows.execution(child)
    assert (vector(row), row["blocking_detail"]) == (BLOCKED, "2 dep(s) unsatisfied after replay")
    (listed,) = await rows.of("listed", execution_id=uuid_of(child))
    assert (listed["public_state"], listed["at"]) == ("waiting_children", now)
    assert [row["details"] for row in await rows.events(child)][-1] == '{"branch": "normal"}'
    assert await states(flow) == (3, 0, "open")
    await check(engine, connection)
    await end(flow, one, "success")
    assert await state(engine, child) is PublicState.WAITING_CHILDREN
    await end(flow, other, "success")
    row = await rows.execution(child)
    assert vector(row) == REPLAYED
    (run,) = await claim(engine)
    assert (run.execution_id, run.attempt_type, run.attempt_index) == (child, "replay", 0)
    await engine.complete(run.handle, b"done")
    await flow.settle()
    assert await states(flow) == (0, 0, "completed")
    await check(engine, connection)


async def test_a_member_whose_group_was_satisfied_runs_at_once(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    one, child = await flow.members(2)
    await flow.connect(one, child)
    await end(flow, one, "success")
    await end(flow, child, "failed")
    await engine.replay_execution(execution_id=child)
    assert vector(await rows.execution(child)) == REPLAYED
    assert (await group(rows, child))[0] == "satisfied"
    await check(engine, connection)


async def test_a_skipped_member_runs_after_its_upstream_was_replayed(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    good, bad, child = await flow.members(3)
    for upstream in (good, bad):
        await flow.connect(upstream, child)
    await end(flow, good, "success")
    await end(flow, bad, "failed")
    assert await state(engine, child) is PublicState.SKIPPED
    await engine.replay_execution(execution_id=bad)
    assert await state(engine, child) is PublicState.SKIPPED
    answer = await engine.replay_execution(execution_id=child, reason="upstream is fixed")
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    row = await rows.execution(child)
    assert (vector(row), row["blocking_detail"]) == (BLOCKED, "1 dep(s) unsatisfied after replay")
    assert await edges(rows, child) == {uuid_of(good): ("satisfied", True), uuid_of(bad): ("unsatisfied", False)}
    assert await group(rows, child) == ("pending", 1, 0, 0)
    lease, operator = (await rows.events(child))[-2:]
    assert lease["reason"] == "skipped_flow_member"
    assert operator["details"] == '{"branch": "skipped_flow_member", "groups_reset": 1}'
    assert await states(flow) == (2, 0, "open")
    assert await attempts(rows, child) == []
    await check(engine, connection)
    await end(flow, bad, "success")
    assert await group(rows, child) == ("satisfied", 2, 0, 0)
    assert vector(await rows.execution(child)) == REPLAYED
    await end(flow, child, "success")
    assert await states(flow) == (0, 0, "completed")
    await check(engine, connection)


async def test_a_skipped_member_runs_at_once_if_its_upstream_has_succeeded_since(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    bad, child = await flow.members(2)
    await flow.connect(bad, child)
    await end(flow, bad, "failed")
    await engine.replay_execution(execution_id=bad)
    await end(flow, bad, "success")
    assert (await group(rows, child))[0] == "impossible"
    assert await states(flow) == (0, 0, "completed")
    answer = await engine.replay_execution(execution_id=child)
    assert answer == Replayed(public_state=PublicState.WAITING)
    assert vector(await rows.execution(child)) == REPLAYED
    assert await group(rows, child) == ("satisfied", 1, 0, 0)
    assert await states(flow) == (1, 0, "blocked")
    (run,) = await claim(engine)
    assert run.execution_id == child
    await check(engine, connection)


async def test_the_detail_of_a_replayed_member_counts_what_is_left(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    one, other, child = await flow.members(3)
    for upstream in (one, other):
        await flow.connect(upstream, child)
    for upstream in (one, other):
        await end(flow, upstream, "failed")
        await engine.replay_execution(upstream)
    await end(flow, one, "success")
    answer = await engine.replay_execution(child)
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    assert (await rows.execution(child))["blocking_detail"] == "1 dep(s) unsatisfied after replay"
    assert await group(rows, child) == ("pending", 1, 0, 0)
    await check(engine, connection)


async def test_a_member_that_depends_on_a_deleted_execution_is_not_replayed(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow, clock: Clock
) -> None:
    bad = await flow.member(policy=SHORT)
    other, child = await flow.members(2)
    for upstream in (bad, other):
        await flow.connect(upstream, child)
    await end(flow, bad, "failed")
    await end(flow, other, "failed")
    await delete(flow, clock)
    async with rows.unchanged():
        refusal = await refused(engine.replay_execution(child), "replay_not_allowed")
    assert f"{child} depends on {bad}, which" in str(refusal.detail)
    assert "submit the flow again" in str(refusal.detail)
    assert await engine.replay_matching(flow_id=flow.flow_id) == BulkResult(
        matched=2, changed=1, refused={"replay_not_allowed": 1}, is_dry_run=False
    )
    await check(engine, connection)


async def test_a_member_that_can_do_without_a_deleted_execution_waits_for_the_others(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow, clock: Clock
) -> None:
    bad = await flow.member(policy=SHORT)
    other, child = await flow.members(2)
    await flow.policy(child, {"kind": "any_of", "on_satisfied": "let_run"})
    for upstream in (bad, other):
        await flow.connect(upstream, child)
    await end(flow, bad, "failed")
    await end(flow, other, "failed")
    await delete(flow, clock)
    for outcome in ("failed", "success"):
        await engine.replay_execution(other)
        answer = await engine.replay_execution(child)
        assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
        assert await group(rows, child) == ("pending", 0, 0, 1)
        assert await edges(rows, child) == {uuid_of(bad): ("impossible", True), uuid_of(other): ("unsatisfied", False)}
        await check(engine, connection)
        await end(flow, other, outcome)
    assert await group(rows, child) == ("satisfied", 1, 0, 1)
    assert await state(engine, child) is PublicState.WAITING
    await check(engine, connection)


async def test_a_chain_of_skipped_members_runs_again_from_its_head(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    chain = await flow.members(3)
    for upstream, downstream in itertools.pairwise(chain):
        await flow.connect(upstream, downstream)
    await end(flow, chain[0], "failed")
    assert await group(rows, chain[2]) == ("impossible", 0, 0, 1)
    for execution_id in chain:
        await engine.replay_execution(execution_id=execution_id)
    assert await group(rows, chain[2]) == ("pending", 0, 0, 0)
    assert await states(flow) == (3, 0, "open")
    await check(engine, connection)
    for execution_id in chain:
        await end(flow, execution_id, "success")
    assert await states(flow) == (0, 0, "completed")
    await check(engine, connection)


@pytest.mark.parametrize(
    "policy", [{"kind": "any_of", "on_satisfied": "let_run"}, {"kind": "quorum", "k": 2, "on_satisfied": "let_run"}]
)
async def test_a_skipped_member_of_another_policy_fires_again(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow, policy: dict[str, object]
) -> None:
    upstreams = await flow.members(3)
    child = await flow.member()
    await flow.policy(child, policy)
    for upstream in upstreams:
        await flow.connect(upstream, child)
    for upstream in upstreams:
        await end(flow, upstream, "failed")
    assert await state(engine, child) is PublicState.SKIPPED
    for upstream in upstreams[:2]:
        await engine.replay_execution(execution_id=upstream)
    assert (await engine.replay_execution(execution_id=child)).public_state is PublicState.WAITING_CHILDREN
    assert await group(rows, child) == ("pending", 0, 0, 0)
    for upstream in upstreams[:2]:
        await end(flow, upstream, "success")
    assert await state(engine, child) is PublicState.WAITING
    await check(engine, connection)


async def test_a_member_is_skipped_again_while_its_upstream_stays_failed(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    bad, child = await flow.members(2)
    await flow.connect(bad, child)
    await end(flow, bad, "failed")
    for _ in range(2):
        assert (await engine.replay_execution(execution_id=child)).public_state is PublicState.WAITING_CHILDREN
        assert await states(flow) == (1, 1, "blocked")
        await check(engine, connection)
        await parts_of(engine).blocked.reconcile()
        await flow.settle()
        assert await state(engine, child) is PublicState.SKIPPED
        assert await states(flow) == (0, 1, "failed")
        await check(engine, connection)


async def test_a_member_that_was_cancelled_before_its_group_became_impossible_does_not_run_without_it(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, flow: BuiltFlow
) -> None:
    bad, child = await flow.members(2)
    await flow.connect(bad, child)
    await end(flow, child, "cancelled")
    await end(flow, bad, "failed")
    assert (await group(rows, child))[0] == "impossible"
    answer = await engine.replay_execution(execution_id=child)
    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    assert await group(rows, child) == ("pending", 0, 0, 0)
    assert [row["details"] for row in await rows.events(child)][-1] == '{"branch": "normal"}'
    await parts_of(engine).blocked.reconcile()
    assert await state(engine, child) is PublicState.SKIPPED
    await check(engine, connection)


async def test_a_pending_cancellation_of_a_sibling_does_not_reach_its_replay(
    engine: Engine, rows: Rows, flow: BuiltFlow, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner, ended, other = await flow.members(3)
    child = await flow.member()
    await flow.policy(child, {"kind": "any_of", "on_satisfied": "cancel_remaining"})
    for upstream in (winner, ended, other):
        await flow.connect(upstream, child)
    monkeypatch.setattr(parts_of(engine).wakeups, "on_siblings", None)
    await end(flow, winner, "success")
    (row,) = await rows.of("edge_group")
    assert row["cancel_siblings_pending_flag"]
    await end(flow, ended, "cancelled")
    await engine.replay_execution(execution_id=ended)
    (row,) = await rows.of("edge_group")
    assert [str(each) for each in row["cancel_siblings_pending_members"]] == [uuid_of(other)]


async def test_a_replayed_member_withdraws_the_cancellation_of_its_upstreams_until_it_fires_again(
    engine: Engine, rows: Rows, flow: BuiltFlow, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    *decisive, other = upstreams = await flow.members(3)
    child = await flow.member()
    await flow.policy(child, {"kind": "quorum", "k": 2, "on_satisfied": "cancel_remaining"})
    for upstream in upstreams:
        await flow.connect(upstream, child)
    monkeypatch.setattr(parts_of(engine).wakeups, "on_siblings", None)
    for upstream in decisive:
        await end(flow, upstream, "failed")
    (row,) = await rows.of("edge_group")
    assert row["cancel_siblings_pending_flag"]
    assert row["cancel_siblings_reason"] == "sibling_quorum_impossible"
    for execution_id in (*decisive, child):
        await engine.replay_execution(execution_id=execution_id)
    assert await group(rows, child) == ("pending", 0, 0, 0)
    assert await rows.of("pending_cancel_group") == []
    assert (await rows.of("edge_group"))[0]["satisfied_at"] is None
    await check(engine, connection)
    for upstream in decisive:
        await end(flow, upstream, "success")
    assert await state(engine, other) is PublicState.WAITING
    assert (await parts_of(engine).siblings.dispatch()).done == 1
    row = await rows.execution(other)
    assert (row["public_state"], row["cancellation_reason"]) == ("cancelled", "sibling_quorum_satisfied")
    await flow.settle()
    await check(engine, connection)

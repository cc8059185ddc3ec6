"""Blocking and unblocking: the states, the refusals, and what an execution keeps while it is blocked."""

from typing import Any

import pytest

from engine.flow.driving import DrivenFlow
from engine.flows import flow_of, stop_cascade
from engine.state import DELAYED, RESUMABLE, RETRYABLE, WAITING, claim, ids, refused, vector
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Blocked, Unblocked
from flowfabric.model.states import BlockingReason

ABSENT = "{fp:3}:11111111-1111-4111-8111-111111111111"

STATES = {
    "waiting_for_budget": ("blocked_by_budget", "rate_limited"),
    "waiting_for_quota": ("blocked_by_quota", "rate_limited"),
    "waiting_for_capable_worker": ("blocked_by_route", "waiting"),
    "paused_by_operator": ("blocked_by_operator", "waiting"),
    "paused_by_policy": ("blocked_by_lane_state", "waiting"),
}
KEEPING = ("waiting_for_budget", "waiting_for_quota")
"""The reasons under which an execution keeps its entry of ready."""
each_reason = pytest.mark.parametrize("reason", STATES)


def blocked(reason: str, attempt: str = "pending_first_attempt") -> str:
    eligibility, public = STATES[reason]
    return f"runnable/unowned/{eligibility}/{reason}/none/{attempt}/{public}"


async def entries(rows: Rows, execution_id: str) -> int:
    return len(await rows.of("ready", execution_id=uuid_of(execution_id)))


async def listing(rows: Rows, execution_id: str) -> tuple[str, int] | None:
    found = await rows.of("listed", execution_id=uuid_of(execution_id))
    return (found[0]["public_state"], found[0]["at"]) if found else None


@each_reason
async def test_a_blocked_execution_is_not_claimed_until_it_is_unblocked(
    engine: Engine, given: Given, rows: Rows, clock: Clock, reason: str
) -> None:
    execution_id, behind = await given.created(priority=5), await given.created()
    await clock.stop()
    now = await clock.advance(seconds=1)
    answer = await engine.block_execution_for_admission(execution_id, reason, "why")
    assert answer == Blocked(execution_id=execution_id, reason=BlockingReason(reason))
    row = await rows.execution(execution_id)
    assert (vector(row), row["blocking_detail"], row["last_transition_at"]) == (blocked(reason), "why", now)
    assert await listing(rows, execution_id) == (STATES[reason][1], now)
    assert await entries(rows, execution_id) == (reason in KEEPING)
    assert ids(await claim(engine)) == [behind]
    later = await clock.advance(seconds=1)
    assert await engine.unblock_execution(execution_id, reason) == Unblocked()
    row = await rows.execution(execution_id)
    assert (vector(row), row["blocking_detail"], row["last_transition_at"]) == (WAITING, None, later)
    assert (await listing(rows, execution_id), await entries(rows, execution_id)) == (None, 1)
    assert ids(await claim(engine)) == [execution_id]


@each_reason
async def test_an_attempt_is_kept_while_its_execution_is_blocked(
    engine: Engine, given: Given, rows: Rows, clock: Clock, reason: str
) -> None:
    handle = await given.claimed()
    await engine.hand_back(handle)
    retried = await given.backing_off(lane_id="other")
    await clock.advance(seconds=61)
    await engine.promote_delayed(retried.execution_id)
    for execution_id, attempt, after in (
        (handle.execution_id, "attempt_interrupted", RESUMABLE),
        (retried.execution_id, "pending_retry_attempt", RETRYABLE),
    ):
        await engine.block_execution_for_admission(execution_id, reason)
        assert vector(await rows.execution(execution_id)) == blocked(reason, attempt)
        await engine.unblock_execution(execution_id)
        assert vector(await rows.execution(execution_id)) == after
    assert await listing(rows, retried.execution_id) is None
    found = await listing(rows, handle.execution_id)
    assert found is not None
    assert found[0] == "resumable"


@each_reason
async def test_a_delayed_execution_stays_delayed_behind_its_block(
    engine: Engine, given: Given, rows: Rows, clock: Clock, reason: str
) -> None:
    execution_id = await given.delayed(seconds=60)
    due_at = (await rows.execution(execution_id))["delay_until"]
    retried = (await given.backing_off(lane_id="other")).execution_id
    backoff = vector(await rows.execution(retried))
    for each in (execution_id, retried):
        await engine.block_execution_for_admission(each, reason)
        assert (await rows.timers(each), await entries(rows, each)) == ({}, 0)
    await engine.unblock_execution(execution_id)
    row = await rows.execution(execution_id)
    assert (vector(row), row["blocking_detail"]) == (DELAYED, f"delayed until {due_at}")
    assert (await rows.timers(execution_id), await listing(rows, execution_id)) == ({"delay": due_at}, None)
    await engine.unblock_execution(retried)
    assert vector(await rows.execution(retried)) == backoff
    # A delay that has elapsed meanwhile is over.
    await engine.block_execution_for_admission(execution_id, reason)
    await clock.advance(seconds=60)
    await engine.unblock_execution(execution_id)
    row = await rows.execution(execution_id)
    assert (vector(row), row["delay_until"], await rows.timers(execution_id)) == (WAITING, None, {})
    assert ids(await claim(engine)) == [execution_id]


@each_reason
async def test_an_execution_that_waits_for_its_dependencies_waits_for_them_behind_its_block(
    engine: Engine, rows: Rows, reason: str
) -> None:
    stop_cascade(engine)
    flow = await DrivenFlow.submit(engine, rows, "a b c", "a>b a>c")
    before = vector(await rows.execution(flow.id("b")))
    for name in ("b", "c"):
        await engine.block_execution_for_admission(flow.id(name), reason)
        assert (vector(await flow.row(name)), await entries(rows, flow.id(name))) == (blocked(reason), 0)
    await engine.unblock_execution(flow.id("b"))
    assert vector(await flow.row("b")) == before
    found = await listing(rows, flow.id("b"))
    assert found is not None
    assert found[0] == "waiting_children"
    handle = await flow.claim("a")
    await engine.complete(handle, b"x")
    await parts_of(engine).cascade.settle_flow(int(handle.execution_id[4:].split("}")[0]), flow.flow_id)
    await flow.settle()
    assert vector(await flow.row("b")) == WAITING
    # The other one is still blocked; its dependencies are satisfied.
    assert vector(await flow.row("c")) == blocked(reason)
    await engine.unblock_execution(flow.id("c"))
    assert vector(await flow.row("c")) == WAITING


@each_reason
async def test_one_block_can_replace_another(
    engine: Engine, given: Given, rows: Rows, clock: Clock, reason: str
) -> None:
    await clock.stop()
    for other in STATES:
        execution_id = await given.created(lane_id=other)
        await engine.block_execution_for_admission(execution_id, other)
        since = await clock.now()
        await clock.advance(seconds=1)
        await engine.block_execution_for_admission(execution_id, reason, "again")
        row = await rows.execution(execution_id)
        assert (vector(row), row["blocking_detail"]) == (blocked(reason), "again")
        # The same block goes on.
        is_same = reason == other
        assert row["last_transition_at"] == since + (0 if is_same else 1000)
        assert row["last_mutation_at"] == since + 1000
        assert await listing(rows, execution_id) == (STATES[reason][1], row["last_transition_at"])
        assert await entries(rows, execution_id) == (reason in KEEPING and other in KEEPING)
        await engine.unblock_execution(execution_id)
        assert (vector(await rows.execution(execution_id)), await entries(rows, execution_id)) == (WAITING, 1)


async def test_a_block_by_the_route_has_a_default_detail(engine: Engine, given: Given, rows: Rows) -> None:
    for reason in STATES:
        execution_id = await given.created()
        await engine.block_execution_for_admission(execution_id, reason)
        expected = (
            "no connected worker satisfies required_capabilities" if reason == "waiting_for_capable_worker" else None
        )
        assert (await rows.execution(execution_id))["blocking_detail"] == expected


async def test_a_block_deletes_the_grant(engine: Engine, given: Given, rows: Rows) -> None:
    await given.registered()
    named: dict[str, Any] = {"lane_id": "default", "worker_id": "worker", "worker_instance_id": "worker-1"}
    for reason in STATES:
        execution_id = await given.created()
        await engine.issue_claim_grant(execution_id=execution_id, **named)
        await engine.block_execution_for_admission(execution_id, reason)
        assert await rows.of("claim_grant") == []
        await refused(engine.claim_execution(execution_id=execution_id, **named), "execution_not_leaseable")
        await engine.unblock_execution(execution_id)
        (row,) = await rows.of("ready", execution_id=uuid_of(execution_id))
        assert row["granted_until"] is None


@pytest.mark.parametrize("reason", [*STATES, "waiting_for_locality_match", "none", "nonsense", 7, None])
async def test_an_absent_execution_is_refused_before_the_reason(engine: Engine, rows: Rows, reason: Any) -> None:
    async with rows.unchanged():
        await refused(engine.block_execution_for_admission(ABSENT, reason), "execution_not_found")
        await refused(engine.unblock_execution(ABSENT, reason), "execution_not_found")


@pytest.mark.parametrize("reason", ["waiting_for_locality_match", "paused_by_flow_cancel", "none", "nonsense", 7, None])
async def test_an_unknown_reason_is_refused(engine: Engine, given: Given, rows: Rows, reason: Any) -> None:
    waiting = await given.created()
    async with rows.unchanged():
        await refused(engine.block_execution_for_admission(waiting, reason), "invalid_blocking_reason")


@pytest.mark.parametrize("reason", ["paused_by_flow_cancel", "nonsense", None])
async def test_an_execution_that_is_not_runnable_is_refused_before_the_reason(
    engine: Engine, given: Given, rows: Rows, reason: Any
) -> None:
    active, ended = await given.claimed(), await given.completed(lane_id="other")
    async with rows.unchanged():
        await refused(engine.block_execution_for_admission(active.execution_id, reason), "execution_not_eligible")
        await refused(engine.block_execution_for_admission(ended, reason), "execution_not_active")


@each_reason
async def test_only_a_runnable_execution_is_blocked(engine: Engine, given: Given, rows: Rows, reason: str) -> None:
    active, lost = await given.claimed(), await given.reclaimable(lane_id="lost")
    ended = await given.failed(lane_id="ended")
    async with rows.unchanged():
        for handle in (active, lost):
            call = engine.block_execution_for_admission(handle.execution_id, reason)
            await refused(call, "execution_not_eligible", "the execution is active")
        refusal = await refused(engine.block_execution_for_admission(ended, reason), "execution_not_active")
    assert refusal.detail == {
        "terminal_outcome": "failed",
        "lease_epoch": "1",
        "lifecycle_phase": "terminal",
        "attempt_id": str((await rows.execution(ended))["attempt_id"]),
    }


async def test_only_a_blocked_execution_is_unblocked_and_only_for_the_expected_reason(
    engine: Engine, given: Given, rows: Rows
) -> None:
    others = [
        await given.created(),
        await given.delayed(),
        (await given.claimed(lane_id="active")).execution_id,
        (await given.reclaimable(lane_id="lost")).execution_id,
        await given.completed(lane_id="ended"),
    ]
    one = await given.created()
    await engine.block_execution_for_admission(one, "waiting_for_quota")
    async with rows.unchanged():
        for other in others:
            await refused(engine.unblock_execution(other), "execution_not_eligible")
        for reason in ("waiting_for_budget", "nonsense", "waiting_for_worker"):
            await refused(engine.unblock_execution(one, reason), "execution_not_eligible", "waiting_for_quota")
    await engine.unblock_execution(one, BlockingReason.WAITING_FOR_QUOTA)


async def test_a_member_held_for_the_cancellation_of_its_flow_is_never_unblocked(
    engine: Engine, given: Given, rows: Rows
) -> None:
    execution_id = await given.created()
    limited = await given.created()
    await engine.block_execution_for_admission(limited, "waiting_for_quota")
    flow_id = await flow_of(engine, [execution_id, limited])
    await engine.cancel_flow_header(flow_id, reason="x", cancellation_policy="cancel_all")
    assert await rows.of("ready") == []
    async with rows.unchanged():
        for each in (execution_id, limited):
            for expected in (None, "paused_by_flow_cancel", "paused_by_operator"):
                await refused(engine.unblock_execution(each, expected), "execution_not_eligible")
            for reason in STATES:
                await refused(engine.block_execution_for_admission(each, reason), "execution_not_eligible")


@pytest.mark.parametrize("reason", KEEPING)
async def test_the_entry_of_a_limited_execution_is_deleted_when_it_ends(
    engine: Engine, given: Given, rows: Rows, clock: Clock, reason: str
) -> None:
    cancelled = await given.created()
    late = await given.created(execution_deadline_at=await clock.now() + 1000)
    for execution_id in (cancelled, late):
        await engine.block_execution_for_admission(execution_id, reason)
    assert len(await rows.of("ready")) == 2
    await engine.cancel_execution(execution_id=cancelled, reason="x")
    await clock.advance(seconds=2)
    await engine.expire_execution(late, "execution_deadline")
    assert await rows.of("ready") == []


@pytest.mark.parametrize("reason", KEEPING)
async def test_a_limited_member_that_gets_a_dependency_leaves_its_queue(
    engine: Engine, given: Given, rows: Rows, reason: str
) -> None:
    upstream, dependent = await given.created(), await given.created()
    await engine.block_execution_for_admission(dependent, reason)
    await flow_of(engine, [upstream, dependent], [(upstream, dependent)])
    assert (await entries(rows, dependent), await entries(rows, upstream)) == (0, 1)
    found = await listing(rows, dependent)
    assert found is not None
    assert found[0] == "waiting_children"


@pytest.mark.parametrize("reason", KEEPING)
async def test_a_limited_member_can_be_skipped(engine: Engine, rows: Rows, reason: str) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    await engine.block_execution_for_admission(flow.id("b"), reason)
    await flow.fail("a")
    assert (await flow.states())["b"] == "skipped"
    assert await entries(rows, flow.id("b")) == 0


@each_reason
async def test_a_blocked_execution_is_listed_and_counted_once(engine: Engine, given: Given, reason: str) -> None:
    execution_id, waiting = await given.created(), await given.created()
    await engine.block_execution_for_admission(execution_id, reason)
    public = STATES[reason][1]
    expected = {"waiting": [waiting]}
    expected.setdefault(public, []).append(execution_id)
    for state in ("waiting", "rate_limited"):
        page = await engine.list_executions(public_state=state)
        assert sorted(each.execution_id for each in page.executions) == sorted(expected.get(state, []))
        counts = await engine.count_executions(public_state=state)
        assert sum(each.count for each in counts) == len(expected.get(state, []))
    counts = await engine.count_executions()
    assert sum(each.count for each in counts) == 2


async def test_the_priority_of_a_blocked_execution_cannot_be_changed(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.created()
    await engine.block_execution_for_admission(execution_id, "waiting_for_quota")
    async with rows.unchanged():
        await refused(engine.change_priority(execution_id, 7), "execution_not_eligible")

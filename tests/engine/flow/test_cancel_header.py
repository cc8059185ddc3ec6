"""The header of a cancellation: it closes the graph, records what is owed, and holds members back from claims."""

from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.flows import connect, settle
from engine.state import EXPIRED_LEASE, all_cases, claim, refused, revoke, vector
from engine.waits import suspend_args
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.model.flow import CancellationPolicy, FlowAlreadyTerminal, FlowHeaderCancelled
from flowfabric.model.grant import NotReclaimable

from .conftest import NewFlow
from .flows import Flow, cancel_owed, owed, uuids

pytestmark = pytest.mark.usefixtures("consistent_rows")

HELD = "runnable/unowned/blocked_by_operator/paused_by_flow_cancel/none/pending_first_attempt/waiting"
HELD_RETRY = HELD.replace("pending_first_attempt", "pending_retry_attempt")
HELD_INTERRUPTED = HELD.replace("pending_first_attempt", "attempt_interrupted")
HELD_LOST = EXPIRED_LEASE.replace("waiting_for_worker", "paused_by_flow_cancel")
HELD_REVOKED = HELD_LOST.replace("lease_expired_reclaimable", "lease_revoked")


async def member_in(state: str, flow: Flow, given: Given, connection: asyncpg.Connection) -> Any:
    """The id of a member in a state, on a lane of that name."""
    match state:
        case "waiting":
            return await flow.member(lane_id=state)
        case "granted":
            execution_id = await flow.member(lane_id=state)
            await given.engine.issue_claim_grant(
                execution_id=execution_id, lane_id=state, worker_id="worker", worker_instance_id="worker-1"
            )
            return execution_id
        case "delayed":
            return await flow.member(given.delayed, lane_id=state)
        case "with deadline":
            deadline = await given.clock.now() + 3_600_000
            return await flow.member(given.created, lane_id=state, execution_deadline_at=deadline)
        case "backing off":
            return (await flow.member(given.backing_off, lane_id=state)).execution_id
        case "resumable":
            handle = await flow.member(given.claimed, lane_id=state)
            await given.engine.hand_back(handle)
            return handle.execution_id
        case "active":
            return (await flow.member(given.claimed, lane_id=state)).execution_id
        case "suspended":
            handle = await flow.member(given.claimed, lane_id=state)
            await given.engine.suspend(handle, suspend_args())
            return handle.execution_id
        case "reclaimable":
            return (await flow.member(given.reclaimable, lane_id=state)).execution_id
        case "revoked":
            handle = await flow.member(given.claimed, lane_id=state)
            await revoke(given.engine, handle.execution_id)
            return handle.execution_id
        case "reclaim granted":
            handle = await flow.member(given.reclaimable, lane_id=state)
            await given.engine.issue_reclaim_grant(
                execution_id=handle.execution_id, worker_id="worker", worker_instance_id="worker-1", lane_id=state
            )
            return handle.execution_id
        case "completed":
            return await flow.member(given.completed, lane_id=state)
        case _:
            raise AssertionError(state)


HELD_STATES = {
    "waiting": HELD,
    "granted": HELD,
    "delayed": HELD,
    "with deadline": HELD,
    "backing off": HELD_RETRY,
    "resumable": HELD_INTERRUPTED,
    "reclaimable": HELD_LOST,
    "revoked": HELD_REVOKED,
    "reclaim granted": HELD_LOST,
}
UNCHANGED = ("active", "suspended", "completed")
COVERED_BY_PENDING = ("waiting", "granted", "delayed", "with deadline", "backing off", "resumable")


async def test_the_header_holds_back_what_it_covers_and_records_it(
    flows: NewFlow, given: Given, rows: Rows, connection: asyncpg.Connection, clock: Clock
) -> None:
    for policy in ("cancel_all", "cancel_pending", "flow_only"):
        flow = await flows()
        members = {state: await member_in(state, flow, given, connection) for state in (*HELD_STATES, *UNCHANGED)}
        before = {state: vector(await rows.execution(each)) for state, each in members.items()}
        now = await clock.advance(ms=7)
        answer = await flow.cancel_header(policy)
        assert answer == FlowHeaderCancelled(
            cancellation_policy=CancellationPolicy(policy), member_execution_ids=sorted(members.values())
        )
        covered = {
            "cancel_all": [state for state in members if state != "completed"],
            "cancel_pending": list(COVERED_BY_PENDING),
            "flow_only": [],
        }[policy]
        assert await owed(rows, flow.flow_id) == uuids([members[state] for state in covered])
        with all_cases() as case:
            for state, execution_id in members.items():
                with case(f"{policy}: {state}"):
                    row = await rows.execution(execution_id)
                    is_held = state in covered and state in HELD_STATES
                    assert vector(row) == (HELD_STATES[state] if is_held else before[state])
                    if not is_held:
                        continue
                    assert await rows.of("ready", execution_id=uuid_of(execution_id)) == []
                    assert await rows.of("claim_grant", execution_id=uuid_of(execution_id)) == []
                    assert set(await rows.timers(execution_id)) == ({"deadline"} if state == "with deadline" else set())
                    assert (row["delay_until"], row["granted_until"]) == (None, None)
                    assert (row["blocking_detail"], row["last_mutation_at"]) == ("its flow is cancelled", now)
                    (listed,) = await rows.of("listed", execution_id=uuid_of(execution_id))
                    assert listed["public_state"] == row["public_state"]
        (stored,) = await rows.of("flow", flow_id=flow.flow_id)
        assert (stored["public_flow_state"], stored["cancellation_policy"]) == ("cancelled", policy)
        assert (stored["cancel_reason"], stored["cancelled_at"], stored["last_mutation_at"]) == ("not wanted", now, now)
        headers = await rows.of("cancel_backlog", flow_id=flow.flow_id)
        assert [(row["requested_at"], row["grace_until"], row["status"], row["reason"]) for row in headers] == (
            [(now, now + 30_000, "pending", "not wanted")] if covered else []
        )
        events = await rows.events(str(flow.flow_id))
        assert [(event["kind"], event["reason"], event["at"]) for event in events] == [
            ("operator_action", "flow_cancel_requested", now),
            ("operator_action", "flow_state_changed", now),
        ]
        claimable = [state for state in HELD_STATES if state not in covered]
        await clock.advance(seconds=3600)
        for state in HELD_STATES:
            claimed = await claim(given.engine, state)
            assert bool(claimed) == (state in claimable), (policy, state)
            for each in claimed:
                await given.engine.complete(each.handle)
        for execution_id in members.values():
            if (await rows.execution(execution_id))["lifecycle_phase"] != "terminal":
                await given.engine.cancel_execution(execution_id=execution_id, reason="the next case follows")


async def test_a_held_member_cannot_be_claimed_by_its_id(
    flows: NewFlow, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await flows()
    engine = given.engine
    members = {state: await member_in(state, flow, given, connection) for state in HELD_STATES}
    await flow.cancel_header()
    worker: dict[str, Any] = {"worker_id": "worker", "worker_instance_id": "worker-1"}
    async with rows.unchanged():
        for lane_id, execution_id in members.items():
            named: dict[str, Any] = {"execution_id": execution_id, "lane_id": lane_id}
            await refused(engine.claim_execution(**named, **worker), "execution_not_leaseable")
            await refused(engine.claim_resumed_execution(**named, **worker), "execution_not_leaseable")
            await refused(engine.issue_claim_grant(**named, **worker), "execution_not_eligible")
            await refused(
                engine.issue_grant_and_claim(**named, lease_duration_ms=1000),
                "execution_not_eligible"
                if (await rows.execution(execution_id))["lifecycle_phase"] == "active" or lane_id == "resumable"
                else "execution_not_in_eligible_set",
            )
            for answer in (
                await engine.issue_reclaim_grant(**named, **worker),
                await engine.reclaim_execution(**named, **worker),
            ):
                assert isinstance(answer, NotReclaimable)
                is_lost = lane_id in ("reclaimable", "revoked", "reclaim granted")
                assert (answer.detail == "its flow is cancelled") == is_lost


@pytest.mark.parametrize("outcome", ["success", "failed"])
async def test_the_end_of_an_upstream_execution_does_not_move_a_held_member(
    flows: NewFlow, given: Given, rows: Rows, outcome: str
) -> None:
    flow, engine = await flows(), given.engine
    upstream = await flow.member(given.claimed, lane_id="upstream")
    child = await flow.member(lane_id="child")
    await connect(engine, flow.flow_id, upstream.execution_id, child)
    await flow.cancel_header("cancel_pending")
    if outcome == "success":
        await engine.complete(upstream, b"done")
    else:
        await engine.fail(upstream, reason="no luck", classification="permanent")
    await settle(engine, flow.flow_id)
    (group,) = await rows.of("edge_group", downstream_id=uuid_of(child))
    assert group["group_state"] == ("satisfied" if outcome == "success" else "impossible")
    assert vector(await rows.execution(child)) == HELD
    assert await claim(engine, "child") == []
    assert await cancel_owed(engine, flow, [child]) == []
    assert await engine.read_execution_state(child) == "cancelled"


async def test_a_repeated_header_changes_nothing_and_returns_what_is_stored(
    flows: NewFlow, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await flows()
    members = await flow.members(3)
    await flow.cancel_header("cancel_pending")
    async with rows.unchanged():
        for policy in CancellationPolicy:
            assert await given.engine.cancel_flow_header(
                flow.flow_id, reason="another", cancellation_policy=policy
            ) == FlowAlreadyTerminal(
                stored_cancellation_policy=CancellationPolicy.CANCEL_PENDING,
                stored_cancel_reason="not wanted",
                member_execution_ids=members,
            )


async def test_what_cannot_be_cancelled_is_refused_and_nothing_is_written(
    flows: NewFlow, given: Given, rows: Rows
) -> None:
    flow = await flows()
    await flow.members(2)
    good = {"flow_id": flow.flow_id, "reason": "not wanted", "cancellation_policy": "cancel_all"}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"flow_id": uuid4()}, "flow_not_found"),
        ({"flow_id": "no uuid"}, "invalid_input"),
        ({"reason": None}, "invalid_input"),
        ({"cancellation_policy": "cancel_some"}, "invalid_input"),
        ({"cancellation_policy": None}, "invalid_input"),
        *(({"grace_ms": grace}, "invalid_grace_ms") for grace in (-1, 2**53, 1.5, float("inf"), True, "1")),
    ]
    async with rows.unchanged():
        for overrides, code in wrong:
            for call in (given.engine.cancel_flow_header, given.engine.cancel_flow):
                await refused(call(**{**good, **overrides}), code)


async def test_the_grace_is_given_by_the_call_or_the_settings_and_a_synonym_is_accepted(
    flows: NewFlow, given: Given, rows: Rows, clock: Clock
) -> None:
    now = await clock.now()
    for grace_ms in (0, 2**53 - 1):
        flow = await flows()
        await flow.members(1)
        await flow.cancel_header(grace_ms=grace_ms)
        (header,) = await rows.of("cancel_backlog", flow_id=flow.flow_id)
        assert header["grace_until"] == now + grace_ms
    flow = await flows()
    answer = await flow.cancel_header("cancel_flow_only")
    assert answer.cancellation_policy is CancellationPolicy.FLOW_ONLY

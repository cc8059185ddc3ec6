"""Cancelling a flow with its members: what each wait returns, and what becomes of the members."""

import asyncio
import time
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.event.following import take
from engine.flows import settle
from engine.state import ACTIVE, CANCELLED, refused, vector
from engine.waits import suspend_args
from fixtures import Eventually, Given, Rows, uuid_of
from flowfabric import Context, Worker
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.event import CompletionOutcome
from flowfabric.model.flow import (
    CancellationPolicy,
    CancellationScheduled,
    FlowCancelled,
    NoWait,
    WaitIndefinite,
    WaitUpTo,
)

from .conftest import NewFlow
from .flows import (
    LOCK_SUSPENSION,
    cancel_owed,
    drained,
    is_settled,
    nothing_owed,
    submitted_flow,
    suspended_among,
)
from .graphs import BuiltFlow

pytestmark = pytest.mark.usefixtures("consistent_rows")

ALL = CancellationPolicy.CANCEL_ALL
WAITS = (NoWait(), WaitUpTo(60_000), WaitIndefinite())


async def test_cancel_all_ends_every_member_as_a_cancel_of_its_own_would(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, eventually: Eventually
) -> None:
    for wait in WAITS:
        flow = await flows()
        waiting = await flow.member()
        handle = await flow.member(given.claimed, lane_id="active")
        suspended = await flow.member(given.claimed, lane_id="active")
        await engine.suspend(suspended, suspend_args())
        completed = await flow.member(given.completed, lane_id="active")
        members = sorted([waiting, handle.execution_id, suspended.execution_id, completed])
        answer = await flow.cancel(wait=wait)
        if isinstance(wait, NoWait):
            assert answer == CancellationScheduled(
                cancellation_policy=ALL, member_count=3, member_execution_ids=members
            )
            await drained(engine)
        else:
            assert answer == FlowCancelled(cancellation_policy=ALL, member_execution_ids=members)
        states = await flow.states(rows)
        assert states.pop(completed) == "completed"
        assert set(states.values()) == {"cancelled"}
        await nothing_owed(rows)
        row = await rows.execution(handle.execution_id)
        assert vector(row) == CANCELLED
        assert (row["cancellation_reason"], row["cancelled_by"]) == ("not wanted", "operator_override")
        events = [(event["kind"], event["reason"], event["outcome"]) for event in await rows.events(waiting)]
        assert events == [("ended", "cancelled", CompletionOutcome.CANCELLED)]
        (released,) = [event for event in await rows.events(handle.execution_id) if event["kind"] == "released"]
        assert (released["reason"], released["outcome"]) == ("cancelled", CompletionOutcome.CANCELLED)
        (waitpoint,) = await rows.of("waitpoint", execution_id=uuid_of(suspended.execution_id))
        assert waitpoint["state"] == "closed"
        await refused(engine.renew(handle), "execution_not_active")
        await refused(engine.complete(handle, b"late"), "execution_not_active")
        await eventually(lambda flow=flow: is_settled(rows, flow))


async def test_cancel_pending_lets_active_and_suspended_members_end_by_themselves(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    flow = await flows()
    pending = [await flow.member(), await flow.member(given.delayed), await flow.member()]
    handle = await flow.member(given.claimed, lane_id="other")
    waiting = await flow.member(given.claimed, lane_id="other")
    await engine.suspend(waiting, suspend_args())
    answer = await flow.cancel("cancel_pending", wait=WaitIndefinite())
    assert isinstance(answer, FlowCancelled)
    assert vector(await rows.execution(handle.execution_id)) == ACTIVE
    await engine.complete(handle, b"done")
    assert await flow.states(rows) == {
        **dict.fromkeys(pending, "cancelled"),
        handle.execution_id: "completed",
        waiting.execution_id: "suspended",
    }
    await nothing_owed(rows)


async def test_a_flow_that_owes_nothing_is_cancelled_at_once(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    for wait in WAITS:
        empty, ended, kept = await flows(), await flows(), await flows()
        await ended.member(given.completed, lane_id="active")
        await kept.members(2)
        for flow, policy in ((empty, "cancel_all"), (ended, "cancel_all"), (kept, "flow_only")):
            answer = await flow.cancel(policy, wait=wait)
            assert answer == FlowCancelled(
                cancellation_policy=CancellationPolicy(policy), member_execution_ids=sorted(await flow.states(rows))
            )
            # Again, by another policy: what is stored counts.
            async with rows.unchanged():
                assert await flow.cancel("cancel_pending", wait=wait) == answer
        assert set((await kept.states(rows)).values()) == {"waiting"}
    await nothing_owed(rows)


async def test_a_repeated_cancel_returns_at_most_a_thousand_members(given: Given) -> None:
    flow = await submitted_flow(given, 1001)
    members = (await flow.cancel("flow_only")).member_execution_ids
    assert len(members) == 1001
    assert (await flow.cancel("flow_only")).member_execution_ids == members[:1000]
    assert (await flow.cancel_header()).member_execution_ids == members


async def test_a_wait_that_expires_leaves_the_cancel_in_effect(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, connection: asyncpg.Connection
) -> None:
    flow = await flows()
    locked, members = await suspended_among(flow, given, 2)
    async with connection.transaction():
        await connection.execute(LOCK_SUSPENSION, uuid_of(locked))
        timeout = await refused(flow.cancel(wait=WaitUpTo(100)), "timeout")
        assert timeout.detail == {"op": "cancel_flow", "elapsed_ms": 100}
        # A repeated call waits for the members too, and a short one reads once.
        for ms in (0, 50):
            timeout = await refused(flow.cancel(wait=WaitUpTo(ms)), "timeout")
            assert timeout.detail == {"op": "cancel_flow", "elapsed_ms": ms}
    assert await flow.cancel(wait=WaitIndefinite()) == FlowCancelled(
        cancellation_policy=ALL, member_execution_ids=members
    )
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    await drained(engine)
    await nothing_owed(rows)


async def test_a_repeated_call_waits_only_for_what_the_stored_policy_covers(
    flows: NewFlow, given: Given, engine: Engine
) -> None:
    flow = await flows()
    await flow.members(2)
    await flow.member(given.claimed, lane_id="other")
    await flow.cancel("cancel_pending", wait=WaitIndefinite())
    answer = await flow.cancel("cancel_all", wait=WaitUpTo(0))
    assert answer.cancellation_policy is CancellationPolicy.CANCEL_PENDING
    await refused(flow.cancel(wait=WaitUpTo(300_001)), "invalid_input")
    await refused(flow.cancel(wait=True), "invalid_input", "NoWait, WaitUpTo or WaitIndefinite")


async def test_whatever_the_policy_a_repeated_call_waits_for_members_that_are_held_back_and_not_for_replayed_ones(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    for policy in ("cancel_all", "cancel_pending"):
        flow = await flows()
        acknowledged, ended = await flow.members(2)
        await flow.cancel_header(policy)
        for each in (acknowledged, ended):
            await engine.ack_cancel_member(flow.flow_id, each)
        await engine.cancel_execution(execution_id=ended, reason="x")
        await engine.replay_execution(execution_id=ended, allow_cancelled_flow=True)
        await refused(flow.cancel(wait=WaitUpTo(0)), "timeout")
        await engine.cancel_execution(execution_id=acknowledged, reason="x")
        assert isinstance(await flow.cancel(wait=WaitUpTo(0)), FlowCancelled)
        assert await flow.states(rows) == {acknowledged: "cancelled", ended: "waiting"}
    await nothing_owed(rows)


async def test_a_cancel_without_a_reason_gives_the_members_a_default(
    flows: NewFlow, rows: Rows, engine: Engine
) -> None:
    flow = await flows()
    (member,) = await flow.members(1)
    await engine.cancel_flow(flow.flow_id, reason="", cancellation_policy=ALL, wait=WaitIndefinite())
    assert (await rows.execution(member))["cancellation_reason"] == "flow_cancelled"


async def test_a_flow_that_is_gone_ends_the_wait_and_owes_nothing(
    flows: NewFlow, rows: Rows, engine: Engine, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    flow = await flows()
    (member,) = await flow.members(1)
    await flow.cancel_header()
    waiting = asyncio.create_task(flow.cancel(wait=WaitIndefinite()))
    await eventually(lambda: has_polled(connection))
    # Retention deletes a flow only after its members have ended.
    await connection.execute("delete from flow where flow_id = $1", flow.flow_id)
    await connection.execute("update execution set flow_id = null where flow_id = $1", flow.flow_id)
    assert isinstance(await waiting, FlowCancelled)
    await connection.execute("update cancel_backlog set grace_until = 0")
    async with rows.unchanged(without=("cancel_backlog", "cancel_backlog_member")):
        assert (await parts_of(engine).cancel_backlog.reconcile_due()).done == 1
    await nothing_owed(rows)
    assert await engine.read_execution_state(member) == "waiting"


async def has_polled(connection: asyncpg.Connection) -> bool:
    """Whether a session of this database has looked for live members of a cancelled flow."""
    found: bool = await connection.fetchval(
        """select exists (select from pg_stat_activity where datname = current_database()
                     and pid <> pg_backend_pid() and query like '/* read_cancellation%')"""
    )
    return found


async def test_a_worker_stops_a_handler_whose_flow_is_cancelled(
    flows: NewFlow, rows: Rows, engine: Engine, eventually: Eventually
) -> None:
    stopped: list[str] = []
    started = asyncio.Event()

    async def job(ctx: Context, a: int) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append(ctx.execution_id)
            raise

    flow = await flows()
    execution_id = await flow.member()
    async with Worker(engine, handlers={"job": job}, lanes=["default"], namespace="tests"):
        await started.wait()
        # Its heartbeat would find out only after ten seconds.
        await flow.cancel()
        await eventually(lambda: stopped == [execution_id], timeout=5)
    await drained(engine)
    await nothing_owed(rows)


async def test_a_flow_of_five_thousand_members_is_cancelled_in_seconds(given: Given, rows: Rows) -> None:
    flow = await submitted_flow(given, 5000)
    began = time.monotonic()
    answer = await flow.cancel(wait=WaitIndefinite())
    seconds = time.monotonic() - began
    assert isinstance(answer, FlowCancelled)
    assert len(answer.member_execution_ids) == 5000
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    await nothing_owed(rows)
    assert seconds < 30


async def test_a_cancelled_flow_takes_no_member_and_no_edge(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    flow = await flows()
    upstream, downstream = await flow.members(2)
    await flow.cancel("flow_only")
    stranger = await given.created(execution_id=flow.mint())
    edge: dict[str, Any] = {"upstream_execution_id": upstream, "downstream_execution_id": downstream}
    async with rows.unchanged():
        await refused(engine.add_execution_to_flow(flow.flow_id, stranger), "flow_already_terminal")
        await refused(
            engine.stage_dependency_edge(flow.flow_id, edge_id=uuid4(), expected_graph_revision=2, **edge),
            "flow_already_terminal",
        )


async def test_a_cancelled_flow_without_members_refuses_them_before_anything_else_and_keeps_its_policy(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    flow = await flows()
    assert await flow.cancel("cancel_pending") == FlowCancelled(
        cancellation_policy=CancellationPolicy.CANCEL_PENDING, member_execution_ids=[]
    )
    first, second = [await given.created(execution_id=flow.mint()) for _ in range(2)]
    edge: dict[str, Any] = {"upstream_execution_id": first, "downstream_execution_id": second}
    async with rows.unchanged():
        # The graph is closed whether or not the execution exists, the revision is current, and the ends are members.
        for execution_id in (first, flow.mint()):
            await refused(engine.add_execution_to_flow(flow.flow_id, execution_id), "flow_already_terminal")
        for revision in (0, 7):
            await refused(
                engine.stage_dependency_edge(flow.flow_id, edge_id=uuid4(), expected_graph_revision=revision, **edge),
                "flow_already_terminal",
            )
        assert await flow.cancel("cancel_all") == FlowCancelled(
            cancellation_policy=CancellationPolicy.CANCEL_PENDING, member_execution_ids=[]
        )


async def test_members_that_wait_for_others_are_cancelled_and_their_edges_change_nothing(
    given: Given, rows: Rows, engine: Engine, eventually: Eventually
) -> None:
    flow = await submitted_flow(given, 4, edges=[("0", "1"), ("0", "2"), ("1", "3"), ("2", "3")])
    assert sorted((await flow.states(rows)).values()) == ["waiting", *["waiting_children"] * 3]
    await flow.cancel_header()
    assert set((await flow.states(rows)).values()) == {"waiting"}
    await cancel_owed(engine, flow, sorted(await flow.states(rows)))
    await eventually(lambda: is_settled(rows, flow))
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    for execution_id in await flow.states(rows):
        assert [event["outcome"] for event in await rows.events(execution_id)] == [CompletionOutcome.CANCELLED]
    await nothing_owed(rows)


async def test_held_members_are_cancelled_even_if_their_upstream_ends_before(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    flow = await flows()
    built = BuiltFlow(given, rows, flow.flow_id)
    upstream, waiting, middle, last = await built.members(4)
    lost = await flow.member(given.claimed, lane_id="lost")
    await engine.revoke_lease(execution_id=lost.execution_id)
    for child in (waiting, middle, lost.execution_id):
        await built.connect(upstream, child)
    await built.connect(middle, last)
    await flow.cancel_header()
    await engine.cancel_execution(execution_id=upstream, reason="its own")
    await settle(engine, flow.flow_id)
    held = {waiting: "waiting", middle: "waiting", last: "waiting", lost.execution_id: "active"}
    assert await flow.states(rows) == {upstream: "cancelled", **held}
    assert await engine.find_inconsistencies() == []
    assert await cancel_owed(engine, flow, sorted([upstream, *held])) == []
    assert await flow.states(rows) == dict.fromkeys((upstream, *held), "cancelled")
    assert {(await rows.execution(each))["cancellation_reason"] for each in held} == {"not wanted"}
    await nothing_owed(rows)
    await settle(engine, flow.flow_id)
    assert await is_settled(rows, flow)


async def test_the_operator_feed_reports_the_cancellation_once(flows: NewFlow, engine: Engine, given: Given) -> None:
    async with engine.subscribe_operator_events() as events:
        flow = await flows()
        await flow.members(2)
        await flow.member(given.completed, lane_id="other")
        for _ in range(2):
            await flow.cancel_header()
        found = [await anext(events) for _ in range(2)]
    assert [event.event_type for event in found] == ["flow_cancel_requested", "flow_state_changed"]
    assert {event.execution_id for event in found} == {str(flow.flow_id)}
    details = {"flow_id": str(flow.flow_id), "cancellation_policy": "cancel_all", "reason": "not wanted"}
    assert found[0].details == {**details, "member_count": 2}
    assert found[1].details == {"flow_id": str(flow.flow_id), "from": "open", "to": "cancelled"}
    await cancel_owed(engine, flow, (await flow.cancel_header()).member_execution_ids)


async def test_the_operator_feed_reports_that_a_flow_that_ends_was_cancelled(
    flows: NewFlow, engine: Engine, given: Given
) -> None:
    for is_cancelled in (False, True):
        flow = await flows()
        handle = await flow.member(given.claimed)
        if is_cancelled:
            await flow.cancel("flow_only")
        async with engine.subscribe_operator_events() as events:
            await engine.complete(handle)
            (found,) = await take(events, 1)
        assert (found.event_type, found.execution_id) == ("flow_state_changed", str(flow.flow_id))
        change = {"flow_id": str(flow.flow_id), "from": "open", "to": "completed"}
        assert found.details == change | ({"public_flow_state": "cancelled"} if is_cancelled else {})


async def test_the_cancellation_of_a_flow_that_has_ended_tells_how_it_ended(
    flows: NewFlow, engine: Engine, given: Given
) -> None:
    for make, state in ((given.completed, "completed"), (given.failed, "failed")):
        flow = await flows()
        await flow.member(make)
        async with engine.subscribe_operator_events() as events:
            await flow.cancel()
            requested, changed = await take(events, 2)
        assert requested.details["member_count"] == 0
        assert changed.details == {"flow_id": str(flow.flow_id), "from": state, "to": "cancelled"}

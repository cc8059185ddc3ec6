"""Summaries of flows: the counts, the states derived from them, the sweep, and counts that it corrects."""

from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from engine.event.following import take
from engine.flow.graphs import BuiltFlow
from engine.flows import stop_cascade
from engine.state import claim, refused
from engine.waits import suspend_run
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import summary
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import OperatorEventType
from flowfabric.model.flow import FlowState, FlowSummary
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.reconcile.loop import Reconciler

INTERVAL_MS = 15_000
COUNTS = tuple(name for name in FlowSummary.__dataclass_fields__ if name.startswith("members_"))


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """An empty flow."""
    return await BuiltFlow.create(given, rows)


async def projected(flow: BuiltFlow) -> FlowSummary:
    """The summary of a flow as it is now."""
    assert await flow.engine.project_flow_summary(flow.flow_id) is True
    found = await flow.engine.read_flow_summary(flow.flow_id)
    assert found is not None
    return found


def counts(found: FlowSummary | None) -> dict[str, int]:
    """The states that members are in, with their number."""
    assert found is not None
    return {name.removeprefix("members_"): getattr(found, name) for name in COUNTS if getattr(found, name)}


async def running(flow: BuiltFlow, **overrides: Any) -> Handle:
    """The handle of a running member."""
    lane = f"lane {uuid4()}"
    await flow.member(lane_id=lane, **overrides)
    (run,) = await claim(flow.engine, lane)
    handle: Handle = run.handle
    return handle


async def test_members_are_counted_by_their_public_state(flow: BuiltFlow, rows: Rows, clock: Clock) -> None:
    engine = flow.engine
    deadline = await clock.now() + 1_000
    failed, upstream, completed, suspended, resumable = [await running(flow) for _ in range(5)]
    await flow.connect(upstream.execution_id, await flow.member())
    await flow.connect(suspended.execution_id, await flow.member())
    await engine.fail(failed, reason="no luck")
    await engine.fail(upstream, reason="no luck")
    await engine.complete(completed)
    await suspend_run(engine, suspended)
    await engine.wait_children(resumable)
    await engine.cancel_execution(execution_id=await flow.member(), reason="not wanted")
    await flow.member(execution_deadline_at=deadline)
    await clock.advance(seconds=1)
    await parts_of(engine).timeouts.expire_due()
    await flow.settle()
    await flow.member()
    await flow.member(delay_ms=60_000)
    await running(flow)
    # Executions outside of the flow do not count.
    await flow.outside()
    now = await clock.advance(seconds=1)
    found = await projected(flow)
    assert counts(found) == {
        "completed": 1,
        "failed": 2,
        "cancelled": 1,
        "expired": 1,
        "skipped": 1,
        "active": 1,
        "suspended": 1,
        "waiting": 2,
        "delayed": 1,
        "waiting_children": 1,
    }
    assert (found.flow_id, found.total_members, found.sampled_members) == (flow.flow_id, 12, 12)
    assert (found.public_flow_state, found.last_summary_update_at) == (FlowState.RUNNING, now)
    async with rows.unchanged():
        # The projection is idempotent.
        assert await projected(flow) == found


async def test_the_state_follows_the_members(flow: BuiltFlow, rows: Rows) -> None:
    engine = flow.engine

    async def states() -> tuple[str, str]:
        return (await projected(flow)).public_flow_state, (await flow.row())["derived_state"]

    first = await flow.member(lane_id="running")
    assert await states() == ("open", "open")
    (run,) = await claim(engine, "running")
    second = await flow.member(delay_ms=60_000)
    assert await states() == ("running", "running")
    await engine.wait_children(run.handle)
    assert await states() == ("blocked", "blocked")
    await engine.cancel_execution(execution_id=second, reason="not wanted")
    assert await states() == ("open", "open")
    (run,) = await claim(engine, "running")
    waiting = await suspend_run(engine, run.handle)
    assert waiting.details is not None
    assert await states() == ("blocked", "blocked")
    await engine.resume_execution(execution_id=first)
    (run,) = await claim(engine, "running")
    await engine.complete(run.handle)
    await flow.settle()
    # A cancelled member makes the flow failed.
    assert await states() == ("failed", "failed")


async def test_skipped_members_do_not_make_a_flow_failed(
    given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await BuiltFlow.create(given, rows)
    await given.engine.complete(await running(flow))
    await flow.settle()
    found = await projected(flow)
    assert (found.public_flow_state, counts(found)) == ("completed", {"completed": 1})
    # A state of its own, whatever made it: no member of this flow failed.
    await connection.execute(
        """update execution set terminal_outcome = 'skipped', failure_reason = 'dependency_impossible'
            where flow_id = $1""",
        flow.flow_id,
    )
    found = await projected(flow)
    assert (found.public_flow_state, counts(found)) == ("completed", {"skipped": 1})


async def test_a_flow_without_members_has_no_summary(engine: Engine, flow: BuiltFlow, rows: Rows) -> None:
    async with rows.unchanged():
        assert await engine.project_flow_summary(flow.flow_id) is False
        assert await engine.read_flow_summary(flow.flow_id) is None
        for absent in (uuid4(), str(uuid4())):
            assert await engine.project_flow_summary(absent) is False
            assert await engine.read_flow_summary(absent) is None


async def test_a_flow_is_given_as_a_uuid_or_as_text(engine: Engine, flow: BuiltFlow, rows: Rows) -> None:
    await flow.member()
    flow_id = UUID(int=flow.flow_id.int)
    assert await engine.project_flow_summary(str(flow_id)) is True
    found = await engine.read_flow_summary(flow_id)
    assert found is not None
    malformed: list[Any] = ["nonsense", "", 5, None, str(flow_id)[:-1]]
    async with rows.unchanged():
        assert await engine.project_flow_summary(flow_id) is True
        assert await engine.read_flow_summary(str(flow_id).upper()) == found
        for call in (engine.project_flow_summary, engine.read_flow_summary):
            for wrong in malformed:
                await refused(call(wrong), "invalid_input", "flow_id: must be a UUID")


async def test_the_sweep_projects_each_live_flow_once_in_an_interval(
    engine: Engine, flow: BuiltFlow, given: Given, rows: Rows, clock: Clock
) -> None:
    reconciler = Reconciler(engine)
    other = await BuiltFlow.create(given, rows)
    member = await flow.member()
    now = await clock.now()
    await reconciler.catch_up()
    assert (await flow.row())["project_at"] == now + INTERVAL_MS
    assert (await other.row())["project_at"] is None
    assert counts(await engine.read_flow_summary(flow.flow_id)) == {"waiting": 1}
    handle = await given.claim(worker="w")
    await clock.advance(ms=INTERVAL_MS - 1)
    async with rows.unchanged():
        await reconciler.catch_up()
    await clock.advance(ms=1)
    await reconciler.catch_up()
    assert counts(await engine.read_flow_summary(flow.flow_id)) == {"active": 1}
    # Once all members have ended, it is projected one last time.
    assert handle.execution_id == member
    await engine.complete(handle.handle)
    await flow.settle()
    await clock.advance(ms=INTERVAL_MS)
    await reconciler.catch_up()
    assert counts(await engine.read_flow_summary(flow.flow_id)) == {"completed": 1}
    assert (await flow.row())["project_at"] is None
    async with rows.unchanged():
        await clock.advance(ms=10 * INTERVAL_MS)
        await reconciler.catch_up()
    # A new member makes it due again.
    await flow.member()
    await reconciler.catch_up()
    assert counts(await engine.read_flow_summary(flow.flow_id)) == {"completed": 1, "waiting": 1}
    assert reconciler.stats["flow_projector"].processed == 4


async def test_a_flow_in_which_nothing_changes_is_projected_less_often_until_a_member_ends(
    engine: Engine, flow: BuiltFlow, rows: Rows, clock: Clock
) -> None:
    await clock.stop()
    reconciler = Reconciler(engine)
    member, _ = await flow.members(2)

    async def pause() -> int:
        await reconciler.catch_up()
        wait: int = (await flow.row())["project_at"] - await clock.now()
        return wait // INTERVAL_MS

    found = []
    for _ in range(6):
        found.append(await pause())
        await clock.advance(ms=found[-1] * INTERVAL_MS)
    assert found == [1, 2, 4, 8, 8, 8]
    # Another change counts from the next projection, an end at once.
    await engine.change_priority(execution_id=member, new_priority=1)
    await pause()
    await engine.cancel_execution(execution_id=member, reason="x")
    await flow.settle()
    assert await pause() == 1
    assert counts(await engine.read_flow_summary(flow.flow_id)) == {"cancelled": 1, "waiting": 1}


async def test_a_large_flow_is_projected_less_often(
    flow: BuiltFlow, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "MEMBER_MS", 10_000)
    await flow.members(2)
    now = await clock.now()
    await projected(flow)
    assert (await flow.row())["project_at"] == now + 20_000


async def test_pages_of_flows_are_projected_and_locked_flows_are_left(
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary, "FLOW_LIMIT", 3)
    monkeypatch.setattr(summary, "MEMBER_LIMIT", 4)
    flows = [await BuiltFlow.create(given, rows) for _ in range(7)]
    for nth, flow in enumerate(flows):
        await clock.advance(ms=1)
        await flow.members(nth + 1)
    locked = flows[1]
    summaries = parts_of(engine).flow_summaries
    async with connection.transaction():
        await connection.execute("select from flow where flow_id = $1 for update", locked.flow_id)
        assert await summaries.project_due() == (2, True, ())
        assert await summaries.project_due() == (2, True, ())
        assert await summaries.project_due() == (2, True, ())
        assert await summaries.project_due() == (0, False, ())
    assert await engine.read_flow_summary(locked.flow_id) is None
    assert await summaries.project_due() == (1, False, ())
    for nth, flow in enumerate(flows):
        assert counts(await engine.read_flow_summary(flow.flow_id)) == {"waiting": nth + 1}


@pytest.mark.usefixtures("altered_rows")
async def test_a_flow_that_cannot_be_projected_does_not_stop_the_others(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await connection.execute("alter table flow_summary add constraint test_poison check (total_members <> 2)")
    flows = [await BuiltFlow.create(given, rows) for _ in range(3)]
    for flow, size in zip(flows, (1, 2, 3), strict=True):
        await flow.members(size)
    assert (await parts_of(engine).flow_summaries.project_due()).done == 2
    assert [await engine.read_flow_summary(flow.flow_id) is None for flow in flows] == [False, True, False]
    assert str(flows[1].flow_id) in caplog.text
    # It is skipped for a while.
    async with rows.unchanged():
        assert (await parts_of(engine).flow_summaries.project_due()).done == 0


# Counts that are corrected.


async def end_as_an_older_version(flow: BuiltFlow, connection: asyncpg.Connection, *members: ExecutionId) -> None:
    """Cancel members without queueing them for the cascade, as versions without flows do."""
    stop_cascade(flow.engine)
    for member in members:
        await flow.engine.cancel_execution(execution_id=member, reason="not wanted")
    await connection.execute(
        "delete from cascade_entry where execution_ids && $1::uuid[]", [uuid_of(member) for member in members]
    )


async def test_ends_that_an_older_version_did_not_queue_are_counted(
    flow: BuiltFlow, rows: Rows, connection: asyncpg.Connection
) -> None:
    engine = flow.engine
    first, second = await flow.members(2)
    async with engine.subscribe_operator_events() as events:
        await end_as_an_older_version(flow, connection, first)
        assert ((await flow.row())["live_count"], (await flow.row())["failed_count"]) == (2, 0)
        await projected(flow)
        row = await flow.row()
        assert (row["live_count"], row["failed_count"], row["derived_state"]) == (1, 1, "open")
        await end_as_an_older_version(flow, connection, second)
        await projected(flow)
        row = await flow.row()
        assert (row["live_count"], row["failed_count"], row["derived_state"]) == (0, 2, "failed")
        assert row["project_at"] is None
        (event,) = await take(events, 1)
    assert event.event_type is OperatorEventType.FLOW_STATE_CHANGED
    assert event.details == {"flow_id": str(flow.flow_id), "from": "open", "to": "failed"}


async def test_queued_ends_count_once(flow: BuiltFlow, rows: Rows) -> None:
    engine = flow.engine
    failed, completed = await running(flow), await running(flow)
    stop_cascade(engine)
    await engine.fail(failed, reason="no luck")
    await engine.complete(completed)
    found = await projected(flow)
    # The summary shows the members as they are; the flow ends when the cascade has settled them.
    assert (found.public_flow_state, counts(found)) == ("failed", {"completed": 1, "failed": 1})
    row = await flow.row()
    assert (row["live_count"], row["failed_count"], row["derived_state"]) == (2, 0, "open")
    assert row["project_at"] is not None
    await flow.settle()
    row = await flow.row()
    assert (row["live_count"], row["failed_count"], row["derived_state"]) == (0, 1, "failed")
    async with rows.unchanged(without=["flow", "flow_summary"]):
        await projected(flow)
    assert (await flow.row())["failed_count"] == 1


async def test_deleted_members_still_count_as_failed(
    flow: BuiltFlow, rows: Rows, connection: asyncpg.Connection
) -> None:
    handle = await running(flow)
    await flow.engine.fail(handle, reason="no luck")
    await flow.settle()
    await flow.member()
    # As retention deletes members of a flow that is still alive.
    await connection.execute("delete from execution where execution_id = $1", uuid_of(handle.execution_id))
    await connection.execute("delete from retained")
    await connection.execute("delete from listed where execution_id = $1", uuid_of(handle.execution_id))
    assert counts(await projected(flow)) == {"waiting": 1}
    row = await flow.row()
    assert (row["live_count"], row["failed_count"]) == (1, 1)

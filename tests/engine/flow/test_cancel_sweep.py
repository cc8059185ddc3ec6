"""What a cancelled flow owes: members that are acknowledged, and those that the sweep cancels after the grace."""

import asyncio
from collections.abc import Sequence

import asyncpg
import pytest

from engine.state import rounds
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.cancel_many import CancelDisposition, CancelResult
from flowfabric.engine.flow import backlog
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import error
from flowfabric.model.flow import (
    CancellationPolicy,
    PartiallyCancelled,
    WaitIndefinite,
)
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId

from .conftest import NewFlow
from .flows import (
    LOCK_SUSPENSION,
    cancel_owed,
    is_settled,
    nothing_owed,
    owed,
    suspended_among,
)

pytestmark = pytest.mark.usefixtures("consistent_rows")

ALL = CancellationPolicy.CANCEL_ALL


async def test_a_member_that_stays_locked_is_named_delays_no_other_and_is_left_to_the_sweep(
    flows: NewFlow,
    given: Given,
    rows: Rows,
    engine: Engine,
    connection: asyncpg.Connection,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "PATIENCE_SECONDS", 0.2)
    flow = await flows()
    locked, members = await suspended_among(flow, given, 4)
    async with connection.transaction():
        await connection.execute(LOCK_SUSPENSION, uuid_of(locked))
        answer = await flow.cancel(wait=WaitIndefinite())
        assert answer == PartiallyCancelled(
            cancellation_policy=ALL, member_execution_ids=members, failed_member_execution_ids=[locked]
        )
        states = await flow.states(rows)
        assert states.pop(locked) == "suspended"
        assert set(states.values()) == {"cancelled"}
        assert await owed(rows, flow.flow_id) == [uuid_of(locked)]
        # It is past its grace, but still locked: the sweep leaves it.
        await clock.advance(seconds=31)
        assert await parts_of(engine).cancel_backlog.reconcile_due() == (0, False, ())
        assert await owed(rows, flow.flow_id) == [uuid_of(locked)]
    parts_of(engine).cancel_backlog.quarantine._failures.clear()
    assert (await parts_of(engine).cancel_backlog.reconcile_due()).done == 1
    assert (await flow.states(rows))[locked] == "cancelled"
    await nothing_owed(rows)


async def test_a_member_whose_end_a_trigger_refuses_is_the_only_one_that_fails(
    flows: NewFlow, rows: Rows, engine: Engine, connection: asyncpg.Connection, clock: Clock
) -> None:
    flow, unattended = await flows(), await flows()
    members, left = await flow.members(3), await unattended.members(3)
    for trigger, refused in (("first", members[1]), ("second", left[1])):
        await connection.execute(
            f"""create or replace function refuse() returns trigger language plpgsql as
                $$begin raise exception 'not this one'; end$$;
                create trigger {trigger} before update on execution for each row
                  when (new.execution_id = '{uuid_of(refused)}' and new.lifecycle_phase = 'terminal')
                  execute function refuse()"""
        )
    answer = await flow.cancel(wait=WaitIndefinite())
    assert answer == PartiallyCancelled(
        cancellation_policy=ALL, member_execution_ids=members, failed_member_execution_ids=[members[1]]
    )
    await unattended.cancel_header()
    await clock.advance(seconds=31)
    assert (await parts_of(engine).cancel_backlog.reconcile_due()).done == 2
    assert await owed(rows, flow.flow_id) == [uuid_of(members[1])]
    assert await owed(rows, unattended.flow_id) == [uuid_of(left[1])]
    await connection.execute("drop trigger first on execution; drop trigger second on execution")
    parts_of(engine).cancel_backlog.quarantine._failures.clear()
    assert (await parts_of(engine).cancel_backlog.reconcile_due()).done == 2
    await nothing_owed(rows)


async def test_acknowledging_the_last_members_at_the_same_time_leaves_no_header(
    flows: NewFlow, rows: Rows, engine: Engine, engines: Engines, eventually: Eventually
) -> None:
    other = await engines()
    for _ in rounds(5, whole=30):
        flow = await flows()
        first, second = await flow.members(2)
        await flow.cancel_header()
        await asyncio.gather(
            engine.ack_cancel_member(flow.flow_id, first),
            other.ack_cancel_member(flow.flow_id, second),
        )
        await nothing_owed(rows)
        async with rows.unchanged():
            await engine.ack_cancel_member(flow.flow_id, first)
        for each in (first, second):
            await engine.cancel_execution(execution_id=each, reason="the next round follows")
        await eventually(lambda flow=flow: is_settled(rows, flow))


async def test_a_member_is_not_acknowledged_by_an_id_of_another_partition(flows: NewFlow, rows: Rows) -> None:
    flow = await flows()
    (member,) = await flow.members(1)
    await flow.cancel_header()
    async with rows.unchanged():
        await flow.engine.ack_cancel_member(flow.flow_id, f"{{fp:9999}}:{uuid_of(member)}")
    await flow.engine.ack_cancel_member(flow.flow_id, member)
    await nothing_owed(rows)


async def test_the_sweep_waits_for_the_grace_and_cancels_with_the_stored_reason(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, clock: Clock
) -> None:
    flow, unnamed = await flows(), await flows()
    members = [*await flow.members(3), (await flow.member(given.claimed, lane_id="other")).execution_id]
    (nameless,) = await unnamed.members(1)
    await flow.cancel_header()
    await engine.cancel_flow_header(unnamed.flow_id, reason="", cancellation_policy=ALL)
    sweep = parts_of(engine).cancel_backlog
    async with rows.unchanged():
        assert (await sweep.reconcile_due()).done == 0
    await clock.advance(seconds=30)
    assert await sweep.reconcile_due() == (5, False, ())
    assert set((await flow.states(rows)).values()) == {"cancelled"}
    for each in members:
        assert (await rows.execution(each))["cancellation_reason"] == "not wanted"
    assert (await rows.execution(nameless))["cancellation_reason"] == "flow_cancelled"
    await nothing_owed(rows)


async def test_the_sweep_works_in_batches_and_passes_over_members_that_it_failed_to_cancel(
    flows: NewFlow,
    given: Given,
    rows: Rows,
    engine: Engine,
    connection: asyncpg.Connection,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "FLOW_LIMIT", 1)
    monkeypatch.setattr(backlog, "MEMBER_LIMIT", 2)
    stuck, other = await flows(), await flows()
    locked, _ = await suspended_among(stuck, given, 3)
    await stuck.cancel_header()
    await clock.advance(ms=1)
    await other.members(3)
    await other.cancel_header()
    await clock.advance(seconds=31)
    sweep = parts_of(engine).cancel_backlog
    async with connection.transaction():
        await connection.execute(LOCK_SUSPENSION, uuid_of(locked))
        results = [await sweep.reconcile_due() for _ in range(6)]
        assert sum(result.done for result in results) == 6
        assert [result.is_full for result in results][-1:] == [False]
        assert await owed(rows, stuck.flow_id) == [uuid_of(locked)]
        assert await owed(rows, other.flow_id) == []
    await engine.cancel_execution(execution_id=locked, reason="by hand")
    sweep.quarantine._failures.clear()
    assert (await sweep.reconcile_due()).done == 1
    await nothing_owed(rows)


async def test_a_pass_that_has_taken_its_time_leaves_the_other_flows_to_the_next_one(
    flows: NewFlow, rows: Rows, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "PASS_SECONDS", -1.0)
    for _ in range(3):
        flow = await flows()
        await flow.members(2)
        await flow.cancel_header(grace_ms=0)
    sweep = parts_of(engine).cancel_backlog
    results = [await sweep.reconcile_due() for _ in range(3)]
    assert results == [(2, True, ()), (2, True, ()), (2, False, ())]
    await nothing_owed(rows)


async def test_the_sweep_forgets_a_flow_whose_only_owed_member_was_replayed(
    flows: NewFlow, rows: Rows, engine: Engine, clock: Clock
) -> None:
    flow = await flows()
    (member,) = await flow.members(1)
    await flow.cancel_header()
    await engine.cancel_execution(execution_id=member, reason="its own")
    await engine.replay_execution(execution_id=member, allow_cancelled_flow=True)
    assert await owed(rows, flow.flow_id) == []
    await clock.advance(seconds=30)
    assert await parts_of(engine).cancel_backlog.reconcile_due() == (1, False, ())
    await nothing_owed(rows)
    assert await flow.states(rows) == {member: "waiting"}


async def test_a_member_that_is_replayed_after_the_backlog_was_read_is_not_cancelled(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine
) -> None:
    flow = await flows()
    handle = await flow.member(given.claimed)
    (other,) = await flow.members(1)
    await flow.cancel_header(grace_ms=0)
    sweep = parts_of(engine).cancel_backlog
    (due,) = await sweep._list_due()
    await engine.complete(handle, b"done")
    await engine.replay_execution(execution_id=handle.execution_id, allow_cancelled_flow=True)
    # What a dispatch has in memory is as old.
    for _ in range(2):
        assert await cancel_owed(engine, flow, [handle.execution_id]) == []
        assert await sweep._reconcile(due) == 2
    assert await flow.states(rows) == {handle.execution_id: "waiting", other: "cancelled"}
    await nothing_owed(rows)


async def test_of_a_replay_and_a_sweep_at_the_same_time_the_replay_wins(
    flows: NewFlow, given: Given, rows: Rows, engine: Engine, engines: Engines
) -> None:
    other = await engines()
    sweep = parts_of(engine).cancel_backlog
    for _ in rounds(5, whole=40):
        flow = await flows()
        handles = [await flow.member(given.claimed, lane_id="raced") for _ in range(3)]
        (waiting,) = await flow.members(1)
        await flow.cancel_header(grace_ms=0)
        for handle in handles:
            await engine.complete(handle, b"done")

        async def replay(handles: Sequence[Handle] = handles) -> None:
            for handle in handles:
                await other.replay_execution(execution_id=handle.execution_id, allow_cancelled_flow=True)

        await asyncio.gather(replay(), sweep.reconcile_due())
        while await owed(rows, flow.flow_id):
            sweep.quarantine._failures.clear()
            await sweep.reconcile_due()
        replayed = dict.fromkeys([handle.execution_id for handle in handles], "waiting")
        assert await flow.states(rows) == {**replayed, waiting: "cancelled"}
        for execution_id in replayed:
            await engine.cancel_execution(execution_id=execution_id, reason="the next round follows")


async def test_the_sweep_gives_up_what_can_never_be_cancelled(
    flows: NewFlow,
    rows: Rows,
    engine: Engine,
    clock: Clock,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = await flows()
    gone, left = await flow.members(2)
    await flow.cancel_header(grace_ms=0)
    sweep = parts_of(engine).cancel_backlog
    answers: dict[ExecutionId, CancelResult] = {gone: CancelDisposition.NOT_FOUND, left: error("internal", "a test")}

    async def cancel_many(execution_ids: Sequence[ExecutionId], **_: object) -> list[CancelResult]:
        return [answers[each] for each in execution_ids]

    sweep._cancel_many.cancel = cancel_many  # type: ignore[method-assign]
    assert (await sweep.reconcile_due()).done == 2
    assert "cannot be cancelled, giving it up" in caplog.text
    await nothing_owed(rows)
    for each in (gone, left):
        await engine.cancel_execution(execution_id=each, reason="by hand")

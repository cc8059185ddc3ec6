"""Cancelling the siblings of decided groups while others hold rows, replay siblings, or have many of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flow.graphs import BuiltFlow
from engine.state import refused, rounds
from fixtures import Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import siblings
from flowfabric.engine.flow.siblings import Siblings
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import AnyOfEdges, OnSatisfied, SiblingDrain, SiblingReconcile
from flowfabric.model.ids import ExecutionId

pytestmark = pytest.mark.usefixtures("consistent_rows")

ANY_OF: dict[str, Any] = {"groups": {"z": {"kind": "any_of", "on_satisfied": "cancel_remaining"}}}


@pytest.fixture
def sweep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Siblings:
    """The sweep of an engine that leaves the siblings of the groups it decides to it, however slow its cascade is."""
    monkeypatch.setattr(siblings, "GROUP_PATIENCE_SECONDS", 60.0)
    parts = parts_of(engine)
    parts.wakeups.on_siblings = None
    return parts.siblings


async def decided(engine: Engine, rows: Rows, upstreams: str = "a b") -> DrivenFlow:
    """A flow whose node z any of its upstream nodes satisfies, as a has; the others are its siblings."""
    pairs = " ".join(f"{name}>z" for name in upstreams.split())
    flow = await DrivenFlow.submit(engine, rows, f"{upstreams} z", pairs, **ANY_OF)
    await flow.succeed("a")
    return flow


@asynccontextmanager
async def locked(connection: asyncpg.Connection, *execution_ids: ExecutionId) -> AsyncIterator[None]:
    """Lock the rows of executions for the block."""
    async with connection.transaction():
        uuids = [uuid_of(each) for each in execution_ids]
        await connection.execute("select from execution where execution_id = any($1::uuid[]) for update", uuids)
        yield


async def states(engine: Engine, execution_ids: Sequence[ExecutionId]) -> list[str]:
    """The public states of executions."""
    return [str(await engine.read_execution_state(each)) for each in execution_ids]


async def test_a_group_behind_groups_that_are_locked_is_drained_by_the_next_pass(
    engine: Engine, rows: Rows, sweep: Siblings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long the call waits for a locked sibling, but never the sweep.
    monkeypatch.setattr(siblings, "PATIENCE_SECONDS", 3600.0)
    flows = [await decided(engine, rows) for _ in range(4)]
    stuck = [flow.id("b") for flow in flows[:3]]
    async with locked(connection, *stuck):
        assert await sweep.dispatch(3) == (0, True, ())
        assert await sweep.dispatch(3) == (1, False, ())
        assert await states(engine, [flows[3].id("b")]) == ["cancelled"]
    sweep.quarantine._failures.clear()
    assert await sweep.dispatch() == (3, False, ())
    assert await states(engine, stuck) == ["cancelled"] * 3


async def test_a_pass_that_has_taken_its_time_leaves_the_other_groups_to_the_next_one(
    engine: Engine, rows: Rows, sweep: Siblings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "PASS_SECONDS", -1.0)
    for _ in range(3):
        await decided(engine, rows)
    assert [await sweep.dispatch() for _ in range(3)] == [(1, True, ()), (1, True, ()), (1, False, ())]
    assert await rows.of("pending_cancel_group") == []


async def test_a_group_that_is_locked_is_not_reported_as_drained(
    engine: Engine, rows: Rows, sweep: Siblings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATIENCE_SECONDS", "GROUP_PATIENCE_SECONDS"):
        monkeypatch.setattr(siblings, name, 0.05)
    with_sibling, without = await decided(engine, rows), await decided(engine, rows, "a")
    async with connection.transaction():
        await connection.execute("select from edge_group for update")
        # It ends, although no group can be finished.
        sweep._start()
        await sweep.drain()
        assert await states(engine, [with_sibling.id("b")]) == ["cancelled"]
        for flow in (with_sibling, without):
            call = engine.drain_sibling_cancel_group(flow.flow_id, flow.id("z"))
            await refused(call, "retry_exhausted", f"the dependencies of execution {flow.id('z')} are locked")
            assert (await flow.group("z"))["cancel_siblings_pending_flag"]
            # Whoever has locked it may be about to finish it.
            assert await engine.reconcile_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingReconcile.NO_OP
        assert len(await rows.of("pending_cancel_group")) == 2
    for flow in (with_sibling, without):
        assert await engine.drain_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingDrain.DRAINED
    assert await rows.of("pending_cancel_group") == []


async def test_a_group_is_not_found_by_an_id_of_another_partition(engine: Engine, rows: Rows, sweep: Siblings) -> None:
    flow = await decided(engine, rows)
    elsewhere = f"{{fp:9999}}:{uuid_of(flow.id('z'))}"
    async with rows.unchanged():
        drained = await engine.drain_sibling_cancel_group(flow.flow_id, elsewhere)
        reconciled = await engine.reconcile_sibling_cancel_group(flow.flow_id, elsewhere)
    assert (drained, reconciled) == (SiblingDrain.ALREADY_DRAINED, SiblingReconcile.NO_OP)
    assert await engine.drain_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingDrain.DRAINED


async def test_a_sibling_that_is_locked_for_a_moment_is_cancelled_without_the_sweep(
    engine: Engine,
    rows: Rows,
    sweep: Siblings,
    connection: asyncpg.Connection,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(siblings, "RUN_PATIENCE_SECONDS", 60.0)
    flow = await decided(engine, rows, "a b c")

    async def is_cancelled() -> bool:
        return await states(engine, [flow.id("c")]) == ["cancelled"]

    async with locked(connection, flow.id("b")):
        sweep._start()
        await eventually(is_cancelled)
    await sweep.drain()
    assert await states(engine, [flow.id("b")]) == ["cancelled"]
    assert await rows.of("pending_cancel_group") == []


async def test_a_sibling_that_cannot_be_cancelled_does_not_hold_up_the_rest_of_a_long_list(
    engine: Engine, rows: Rows, sweep: Siblings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "MEMBER_LIMIT", 2)
    flow = await decided(engine, rows, "a b c d e")
    others = [flow.id(name) for name in "bcde"]
    stuck, *_ = sorted(others)
    async with locked(connection, stuck):
        while (await sweep.dispatch()).done:
            pass
        assert sorted(await states(engine, others)) == [*["cancelled"] * 3, "waiting"]
    sweep.quarantine._failures.clear()
    while (await sweep.dispatch()).done:
        pass
    assert await states(engine, others) == ["cancelled"] * 4
    assert await rows.of("pending_cancel_group") == []


async def test_the_sweep_leaves_groups_to_the_dispatcher_of_its_process_while_it_works(
    engine: Engine, rows: Rows, sweep: Siblings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "GROUP_PATIENCE_SECONDS", 1.0)
    flow = await decided(engine, rows)
    async with connection.transaction():
        await connection.execute("select from edge_group for update")
        sweep._start()
        assert await sweep.dispatch() == (0, False, ())
    await sweep.drain()
    assert sweep.quarantine.skipped() == []
    assert await states(engine, [flow.id("b")]) == ["cancelled"]
    assert await rows.of("pending_cancel_group") == []


async def test_a_call_cancels_all_siblings_of_a_long_list(
    engine: Engine, rows: Rows, sweep: Siblings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "MEMBER_LIMIT", 2)
    flow = await decided(engine, rows, "a b c d e")
    assert await engine.drain_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingDrain.DRAINED
    assert await states(engine, [flow.id(name) for name in "bcde"]) == ["cancelled"] * 4


async def test_an_upstream_execution_whose_edge_is_only_staged_is_a_sibling(
    engine: Engine, given: Given, rows: Rows, sweep: Siblings
) -> None:
    flow = await BuiltFlow.create(given, rows)
    winner = await given.claimed(execution_id=flow.mint(), lane_id="upstream")
    await flow.add(winner.execution_id)
    sibling, child = await flow.members(2)
    await flow.policy(child, AnyOfEdges(OnSatisfied.CANCEL_REMAINING))
    await flow.connect(winner.execution_id, child)
    await flow.stage(sibling, child)
    await engine.complete(winner, b"done")
    await parts_of(engine).cascade.drain()
    assert (await sweep.dispatch()).done == 1
    assert await states(engine, [sibling]) == ["cancelled"]


@pytest.mark.usefixtures("altered_rows")
async def test_without_a_stored_reason_and_effect_the_siblings_are_cancelled_for_the_satisfied_group(
    engine: Engine, rows: Rows, sweep: Siblings, connection: asyncpg.Connection
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b z", "a>z b>z", **ANY_OF)
    # Every operation stores them.
    await connection.execute("update edge_group set on_satisfied = null")
    await flow.succeed("a")
    await connection.execute("update edge_group set cancel_siblings_reason = null")
    assert (await sweep.dispatch()).done == 1
    assert (await flow.row("b"))["cancellation_reason"] == "sibling_quorum_satisfied"
    found = await engine.describe_flow(flow.flow_id)
    assert found is not None
    assert [group.policy for group in found.edge_groups] == [AnyOfEdges(OnSatisfied.CANCEL_REMAINING)]


async def test_a_sibling_that_is_replayed_after_the_sweep_has_read_its_list_is_not_cancelled(
    engine: Engine, rows: Rows, sweep: Siblings
) -> None:
    flow = await decided(engine, rows, "a b c")
    (group,) = await sweep._list(10)
    await flow.fail("b")
    await engine.replay_execution(execution_id=flow.id("b"))
    assert await sweep._drain(group) is SiblingDrain.DRAINED
    assert await states(engine, [flow.id("b"), flow.id("c")]) == ["waiting", "cancelled"]
    assert await rows.of("pending_cancel_group") == []


async def test_a_sibling_that_is_listed_again_while_a_pass_is_stopped_is_cancelled_again(
    engine: Engine, rows: Rows, sweep: Siblings
) -> None:
    group = {"kind": "quorum", "k": 2, "on_satisfied": "cancel_remaining"}
    flow = await DrivenFlow.submit(engine, rows, "a b c z", "a>z b>z c>z", groups={"z": group})

    async def decide() -> None:
        for name in "ab":
            flow.handles.clear()
            await flow.fail(name)

    await decide()
    (stopped,) = await sweep._list(10)
    await flow.cancel("c")
    for name in "abcz":
        await engine.replay_execution(execution_id=flow.id(name))
    await decide()
    # The pass goes on behind its cancellation of the sibling.
    assert await sweep._take(stopped, [uuid_of(flow.id("c"))], 60) == "pending"
    assert (await sweep.dispatch()).done == 1
    assert await states(engine, [flow.id("c")]) == ["cancelled"]
    assert await rows.of("pending_cancel_group") == []


async def test_of_a_replay_and_a_sweep_at_the_same_time_the_replay_wins(
    engine: Engine, engines: Engines, rows: Rows, sweep: Siblings
) -> None:
    other = await engines()
    for _ in rounds(5, whole=40):
        flow = await decided(engine, rows, "a b c d")
        failed = [flow.id(name) for name in "bc"]
        for name in "bc":
            await flow.fail(name)

        async def replay(execution_ids: Sequence[ExecutionId] = failed) -> None:
            for execution_id in execution_ids:
                await other.replay_execution(execution_id=execution_id)

        await asyncio.gather(replay(), sweep.dispatch())
        await flow.settle()
        # The sweep leaves what the replay has locked.
        while await rows.of("pending_cancel_group"):
            sweep.quarantine._failures.clear()
            await sweep.dispatch()
        assert await states(engine, [*failed, flow.id("d")]) == ["waiting", "waiting", "cancelled"]

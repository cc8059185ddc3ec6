"""Edges whose upstream execution ends before or while they are applied, and runs that wait for children."""

import asyncio

import pytest

from engine.flow.graphs import PARKED_FOR_CHILDREN, BuiltFlow
from engine.state import RESUMABLE, WAITING, all_cases, attempts, claim, rounds, vector
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import AnyOfEdges, DependencyApplied, OnSatisfied
from flowfabric.model.handle import Handle


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """An empty flow."""
    return await BuiltFlow.create(given, rows)


async def settle(flow: BuiltFlow) -> None:
    """Settle the queued ends of the members."""
    partition = (await flow.row())["partition_key"]
    await parts_of(flow.engine).cascade.settle_flow(partition, flow.flow_id)


async def test_an_edge_from_a_success_is_satisfied_when_it_is_applied(
    flow: BuiltFlow, given: Given, rows: Rows
) -> None:
    ended = await flow.add(await given.completed(execution_id=flow.mint(), result=b'"done"'))
    child = await flow.member()
    edge = await flow.stage(ended, child, data_passing_ref="result")
    assert await flow.apply(edge, ended, child) == DependencyApplied(unsatisfied_count=1)
    row = await rows.execution(child)
    assert (vector(row), row["blocking_detail"]) == (WAITING, None)
    found = await flow.engine.describe_edge(flow.flow_id, edge)
    assert found is not None
    assert found.dependency_state == "satisfied"
    claimed = await given.claim()
    assert (claimed.execution_id, claimed.input_payload) == (child, b'"done"')
    assert await flow.engine.find_inconsistencies() == []


async def test_an_edge_from_any_other_end_skips_the_child(flow: BuiltFlow, given: Given) -> None:
    with all_cases() as case:
        for make in (given.failed, given.cancelled):
            with case(make.__name__):
                ended = await flow.add(await make(execution_id=flow.mint()))
                child = await flow.member()
                await flow.connect(ended, child)
                assert await flow.engine.read_execution_state(child) == "skipped"
                # The skip has queued an entry: only its settling counts the child as ended.
                await settle(flow)
                assert (await flow.row())["live_count"] == 0
    assert (await flow.row())["derived_state"] == "failed"
    assert await flow.engine.find_inconsistencies() == []


async def test_an_edge_from_a_deleted_execution_counts_as_skipped_when_it_is_applied(
    flow: BuiltFlow, given: Given, clock: Clock
) -> None:
    short = {"stream_policy": {"retention_ttl_ms": 1_000}}
    with all_cases() as case:
        for name in ("its id is free", "another execution has its id"):
            with case(name):
                deleted = await flow.add(await given.completed(execution_id=flow.mint(), policy=short))
                child = await flow.add(await given.cancelled(execution_id=flow.mint()))
                edge = await flow.stage(deleted, child, data_passing_ref="result")
                await clock.advance(seconds=2)
                assert await flow.engine.trim_retention() == 1
                if name == "another execution has its id":
                    await given.completed(execution_id=deleted)
                await flow.engine.replay_execution(child)
                assert await flow.apply(edge, deleted, child) == DependencyApplied(unsatisfied_count=1)
                assert await flow.engine.read_execution_state(child) == "skipped"
                assert (await flow.engine.read_execution_context(child)).input_payload == b'{"a": 1}'
                (group,) = await flow.rows.of("edge_group", downstream_id=uuid_of(child))
                assert (group["succeeded_count"], group["failed_count"], group["skipped_count"]) == (0, 0, 1)
                await settle(flow)
    assert await flow.engine.find_inconsistencies() == []


async def test_a_delayed_child_is_delayed_again_once_its_dependencies_are_satisfied(
    flow: BuiltFlow, given: Given, rows: Rows
) -> None:
    ended = await flow.add(await given.completed(execution_id=flow.mint()))
    delayed = await flow.add(await given.delayed(execution_id=flow.mint()))
    backing_off = await flow.add((await given.backing_off(execution_id=flow.mint())).execution_id)
    for child, detail in ((delayed, "delayed until"), (backing_off, "retry backoff until")):
        before = await rows.execution(child)
        until = before["delay_until"]
        await flow.connect(ended, child)
        row = await rows.execution(child)
        assert (vector(row), row["delay_until"]) == (vector(before), until)
        assert row["blocking_detail"] == f"{detail} {until}"
        assert await rows.timers(child) == {"delay": until}
    assert await flow.engine.find_inconsistencies() == []


async def test_a_decided_group_does_not_block_its_child_again(flow: BuiltFlow, given: Given, rows: Rows) -> None:
    ended = await flow.add(await given.completed(execution_id=flow.mint()))
    late, child = await flow.members(2)
    await flow.policy(child, AnyOfEdges(OnSatisfied.LET_RUN))
    await flow.connect(ended, child)
    edge = await flow.stage(late, child)
    before = await rows.execution(child)
    assert await flow.apply(edge, late, child) == DependencyApplied(unsatisfied_count=1)
    assert await rows.execution(child) == before
    assert before["public_state"] == "waiting"


async def test_a_completion_at_the_same_time_as_an_apply_always_reaches_the_child(
    flow: BuiltFlow, engines: Engines
) -> None:
    second = await engines()
    for nth in rounds(8, whole=60):
        first, child = await flow.member(lane_id=f"lane {nth}"), await flow.member(lane_id=f"child {nth}")
        handle = (await flow.given.claim(lane_id=f"lane {nth}")).handle
        edge = await flow.stage(first, child)
        await asyncio.gather(flow.apply(edge, first, child), second.complete(handle, b"done"))
        await settle(flow)
        assert await flow.engine.read_execution_state(child) == "waiting"
        (group,) = await flow.rows.of("edge_group", downstream_id=uuid_of(child))
        assert (group["succeeded_count"], group["group_state"]) == (1, "satisfied")
    assert await flow.engine.find_inconsistencies() == []


async def parked(flow: BuiltFlow, *, applied: bool = True) -> tuple[Handle, Handle]:
    """The handles of a run whose upstream execution is running, and of that one."""
    child = await flow.member(lane_id="child")
    first = await flow.member(lane_id="first")
    own = (await flow.given.claim(lane_id="child")).handle
    upstream = (await flow.given.claim(lane_id="first")).handle
    edge = await flow.stage(first, child)
    if applied:
        await flow.apply(edge, first, child)
    return own, upstream


async def test_a_run_that_waits_for_children_is_parked_until_they_have_ended(
    flow: BuiltFlow, rows: Rows, clock: Clock
) -> None:
    own, upstream = await parked(flow)
    now = await clock.advance(seconds=1)
    await flow.engine.wait_children(own)
    row = await rows.execution(own.execution_id)
    assert (vector(row), row["blocking_detail"]) == (PARKED_FOR_CHILDREN, "1 dep(s) unresolved")
    (listed,) = await rows.of("listed", execution_id=uuid_of(own.execution_id))
    assert (listed["public_state"], listed["at"]) == ("waiting_children", now)
    assert not await rows.of("ready", execution_id=uuid_of(own.execution_id))
    (attempt,) = await attempts(rows, own.execution_id)
    assert (attempt["attempt_state"], attempt["suspension_marker"]) == ("suspended", "waiting_children")
    assert await flow.engine.find_inconsistencies() == []
    await flow.engine.complete(upstream, b"done")
    await settle(flow)
    assert vector(await rows.execution(own.execution_id)) == RESUMABLE
    claimed = await flow.given.claim(lane_id="child")
    assert (claimed.handle.kind, claimed.handle.attempt_index) == ("Resumed", 0)


async def test_a_run_without_unsatisfied_dependencies_does_not_wait(flow: BuiltFlow, rows: Rows) -> None:
    with all_cases() as case:
        with case("only staged"):
            own, _ = await parked(flow, applied=False)
            await flow.engine.wait_children(own)
            assert vector(await rows.execution(own.execution_id)) == RESUMABLE
            await flow.given.claim(lane_id="child")
        with case("satisfied before"):
            own, upstream = await parked(flow)
            await flow.engine.complete(upstream, b"done")
            await settle(flow)
            await flow.engine.wait_children(own)
            assert vector(await rows.execution(own.execution_id)) == RESUMABLE
    assert await flow.engine.find_inconsistencies() == []


async def test_a_run_whose_group_is_decided_does_not_wait_for_a_later_edge(flow: BuiltFlow, rows: Rows) -> None:
    own, upstream = await parked(flow)
    await flow.engine.complete(upstream, b"done")
    await settle(flow)
    await flow.connect(await flow.member(lane_id="late"), own.execution_id)
    (group,) = await rows.of("edge_group", downstream_id=uuid_of(own.execution_id))
    assert (group["group_state"], group["applied_count"], group["succeeded_count"]) == ("satisfied", 2, 1)
    await flow.engine.wait_children(own)
    assert vector(await rows.execution(own.execution_id)) == RESUMABLE


async def test_a_run_that_parks_while_its_upstream_ends_is_woken(flow: BuiltFlow, engines: Engines) -> None:
    second = await engines()
    for _ in rounds(8, whole=60):
        own, upstream = await parked(flow)

        async def end(upstream: Handle = upstream) -> None:
            await second.complete(upstream, b"done")
            await settle(flow)

        await asyncio.gather(flow.engine.wait_children(own), end())
        assert await flow.engine.read_execution_state(own.execution_id) == "resumable"
        # If the other engine promoted it, this one learns of it by a hint.
        (claimed,) = await claim(flow.engine, "child", max_wait_ms=10_000)
        assert claimed.execution_id == own.execution_id
    assert await flow.engine.find_inconsistencies() == []

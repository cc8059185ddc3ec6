"""Which results become the input of a child if several upstreams end before one settlement, and after a replay."""

from typing import Any

import asyncpg
import pytest

from engine.flows import stop_cascade
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Replayed
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState

from .graphs import BuiltFlow

pytestmark = pytest.mark.usefixtures("consistent_rows")


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """A flow without members yet; the test settles its ends."""
    stop_cascade(given.engine)
    return await BuiltFlow.create(given, rows)


async def settle(flow: BuiltFlow) -> None:
    """Settle every queued end together."""
    row = await flow.row()
    await parts_of(flow.engine).cascade.settle_flow(row["partition_key"], flow.flow_id)


async def run(flow: BuiltFlow, member: ExecutionId, result: bytes | None) -> None:
    """Run a waiting member: it succeeds with a result, or fails without."""
    await flow.engine.issue_grant_and_claim(execution_id=member, lane_id="default", lease_duration_ms=60_000)
    named: dict[str, Any] = {"execution_id": member, "source": "operator_override"}
    if result is None:
        await flow.engine.fail_execution(**named, failure_reason="no luck", failure_category="permanent")
    else:
        await flow.engine.complete_execution(**named, payload=result)


async def payload(rows: Rows, member: ExecutionId) -> bytes:
    """The input of a member."""
    (row,) = await rows.of("execution", execution_id=uuid_of(member))
    found: bytes = row["input_payload"]
    return found


@pytest.mark.parametrize("order", ["success first", "failure first"])
async def test_a_success_before_a_failure_passes_its_result_even_if_both_settle_together(
    flow: BuiltFlow, engine: Engine, rows: Rows, order: str
) -> None:
    good, bad, child = await flow.members(3)
    await flow.connect(good, child, data_passing_ref="input")
    await flow.connect(bad, child)
    results = {good: b"result", bad: None}
    for member in (good, bad) if order == "success first" else (bad, good):
        await run(flow, member, results[member])
    await settle(flow)
    assert await engine.read_execution_state(child) is PublicState.SKIPPED
    assert await payload(rows, child) == (b"result" if order == "success first" else b'{"a": 1}')
    await settle(flow)

    await engine.replay_execution(execution_id=bad)
    await run(flow, bad, b"unused")
    await settle(flow)
    assert await engine.replay_execution(execution_id=child) == Replayed(public_state=PublicState.WAITING)
    assert await payload(rows, child) == (b"result" if order == "success first" else b'{"a": 1}')


async def test_a_success_without_a_result_leaves_the_result_of_the_one_before(
    flow: BuiltFlow, engine: Engine, rows: Rows
) -> None:
    first, silent, child = await flow.members(3)
    for upstream in (first, silent):
        await flow.connect(upstream, child, data_passing_ref="input")
    await run(flow, first, b"result")
    await engine.issue_grant_and_claim(execution_id=silent, lane_id="default", lease_duration_ms=60_000)
    await engine.complete_execution(execution_id=silent, source="operator_override")
    # Both are settled together.
    await settle(flow)
    assert await engine.read_execution_state(child) is PublicState.WAITING
    assert await payload(rows, child) == b"result"


@pytest.mark.parametrize("policy", ["all_of", "any_of"])
async def test_an_edge_that_joins_a_satisfied_group_passes_no_result(
    flow: BuiltFlow, engine: Engine, rows: Rows, policy: str
) -> None:
    first, late, child = await flow.members(3)
    if policy == "any_of":
        await flow.policy(child, {"kind": "any_of", "on_satisfied": "let_run"})
    await flow.connect(first, child, data_passing_ref="input")
    await run(flow, first, b"first")
    await settle(flow)
    await flow.connect(late, child, data_passing_ref="input")
    await run(flow, late, b"late")
    await settle(flow)
    assert await engine.read_execution_state(child) is PublicState.WAITING
    assert await payload(rows, child) == b"first"
    (group,) = await rows.of("edge_group", downstream_id=uuid_of(child))
    assert (group["group_state"], group["succeeded_count"]) == ("satisfied", 2)


@pytest.mark.parametrize("policy", ["any_of", "quorum"])
async def test_the_edge_that_decides_a_replayed_group_passes_its_result_though_kept_successes_were_enough(
    flow: BuiltFlow, engine: Engine, rows: Rows, policy: str
) -> None:
    first, late, child = await flow.members(3)
    await flow.policy(child, {"kind": policy, "on_satisfied": "let_run", **({"k": 1} if policy == "quorum" else {})})
    await flow.connect(first, child, data_passing_ref="input")
    await run(flow, first, None)
    await settle(flow)
    await settle(flow)
    assert await engine.read_execution_state(child) is PublicState.SKIPPED

    # The late success is counted but decides nothing.
    await run(flow, late, b"late")
    await flow.connect(late, child)
    await engine.replay_execution(execution_id=first)
    await run(flow, first, b"result")
    await settle(flow)
    assert await engine.replay_execution(execution_id=child) == Replayed(public_state=PublicState.WAITING)
    assert await payload(rows, child) == b"result"


async def test_a_replayed_member_waits_for_the_staged_edges_that_it_has_waited_for(
    flow: BuiltFlow, engine: Engine, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    done, other, child = await flow.members(3)
    await flow.connect(done, child)
    staged = await flow.stage(other, child)
    await run(flow, done, b"done")
    await settle(flow)
    assert await engine.read_execution_state(child) is PublicState.WAITING_CHILDREN
    await engine.cancel_execution(execution_id=child, reason="not wanted")
    assert await engine.replay_execution(execution_id=child) == Replayed(public_state=PublicState.WAITING_CHILDREN)
    await flow.apply(staged, other, child)
    await run(flow, other, b"done")
    await settle(flow)
    assert await engine.read_execution_state(child) is PublicState.WAITING


async def test_an_edge_that_a_replay_has_opened_again_is_no_inconsistency(flow: BuiltFlow, engine: Engine) -> None:
    upstream, child = await flow.members(2)
    await flow.connect(upstream, child)
    await run(flow, upstream, None)
    await settle(flow)
    await settle(flow)
    assert await engine.replay_execution(execution_id=child) == Replayed(public_state=PublicState.WAITING_CHILDREN)
    assert await engine.find_inconsistencies() == []
    await engine.cancel_execution(execution_id=child, reason="not wanted")
    await settle(flow)
    assert await engine.find_inconsistencies() == []

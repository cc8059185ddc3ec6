"""Edge groups: when they are decided, what late results do, which data is passed, and which siblings are cancelled."""

from typing import Any

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flow.graphs import BuiltFlow
from engine.flow.submitting import node
from engine.flows import stop_cascade
from engine.state import refused
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import DependencyResolved, Resolution, ResolutionMarker, SiblingDrain, SiblingReconcile
from flowfabric.model.flow import FlowEdge
from flowfabric.reconcile.loop import Reconciler

THREE = "a>z b>z c>z"
FIVE = "a>z b>z c>z d>z e>z"


def group(kind: str, on_satisfied: str = "let_run", k: int | None = None) -> dict[str, Any]:
    """The groups of a flow whose node z has this policy."""
    return {"groups": {"z": {"kind": kind, "on_satisfied": on_satisfied} | ({} if k is None else {"k": k})}}


async def test_the_first_success_of_any_of_runs_the_child_and_cancels_the_others(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c z", THREE, **group("any_of", "cancel_remaining"))
    running = await flow.claim("b")
    await flow.succeed("a")
    assert await flow.states() == {"a": "completed", "b": "cancelled", "c": "cancelled", "z": "waiting"}
    for name in "bc":
        row = await flow.row(name)
        assert (row["cancellation_reason"], row["cancelled_by"]) == ("sibling_quorum_satisfied", "operator_override")
        assert len(await flow.outcomes(name)) == 1
    await refused(engine.complete(running, b""), "execution_not_active")
    stored = await flow.group("z")
    assert (stored["cancel_siblings_pending_flag"], stored["cancel_siblings_pending_members"]) == (False, None)
    assert stored["cancel_siblings_reason"] == "sibling_quorum_satisfied"
    assert await flow.counts("z") == ("satisfied", 1, 2, 0)
    assert await rows.of("pending_cancel_group") == []
    assert await engine.find_inconsistencies() == []


async def test_the_others_of_any_of_run_on_if_the_policy_says_so(engine: Engine, rows: Rows, clock: Clock) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c z", THREE, **group("any_of"))
    await flow.succeed("a")
    satisfied_at = (await flow.group("z"))["satisfied_at"]
    assert await flow.states() == {"a": "completed", "b": "waiting", "c": "waiting", "z": "waiting"}
    await flow.succeed("z")
    await clock.advance(seconds=1)
    await flow.succeed("b")
    await flow.fail("c")
    assert await flow.counts("z") == ("satisfied", 2, 1, 0)
    assert (await flow.group("z"))["satisfied_at"] == satisfied_at
    assert await flow.states() == {"a": "completed", "b": "completed", "c": "failed", "z": "completed"}
    assert await rows.of("pending_cancel_group") == []
    assert await engine.find_inconsistencies() == []


async def test_a_quorum_fires_with_its_last_missing_success(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d e z", FIVE, **group("quorum", "cancel_remaining", 3))
    await flow.succeed("a")
    await flow.fail("b")
    await flow.succeed("c")
    assert (await flow.states())["z"] == "waiting_children"
    await flow.succeed("d")
    assert await flow.states() == {
        "a": "completed",
        "b": "failed",
        "c": "completed",
        "d": "completed",
        "e": "cancelled",
        "z": "waiting",
    }
    assert await flow.counts("z") == ("satisfied", 3, 2, 0)
    assert await engine.find_inconsistencies() == []


@pytest.mark.parametrize("on_satisfied", ["cancel_remaining", "let_run"])
async def test_a_quorum_that_cannot_be_reached_skips_the_child(engine: Engine, rows: Rows, on_satisfied: str) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d e z y", f"{FIVE} z>y", **group("quorum", on_satisfied, 3))
    for name in "abc":
        await flow.fail(name)
    states = await flow.states()
    assert (states["z"], states["y"]) == ("skipped", "skipped")
    if on_satisfied == "let_run":
        assert (states["d"], states["e"]) == ("waiting", "waiting")
        assert (await flow.group("z"))["cancel_siblings_reason"] is None
    else:
        for name in "de":
            row = await flow.row(name)
            assert (row["public_state"], row["cancellation_reason"]) == ("cancelled", "sibling_quorum_impossible")
    assert await engine.find_inconsistencies() == []


@pytest.mark.parametrize("outcome", ["success", "failed"])
async def test_a_quorum_of_more_than_all_is_impossible_from_the_first_result(
    engine: Engine, rows: Rows, given: Given, outcome: str
) -> None:
    flow = await BuiltFlow.create(given, rows)
    first, second, child = await flow.members(3)
    await flow.policy(child, {"kind": "quorum", "k": 3, "on_satisfied": "let_run"})
    edge = await flow.connect(first, child)
    await flow.connect(second, child)
    resolved = await engine.resolve_dependency(flow.flow_id, edge, outcome)
    assert resolved == RESOLVED["skipped"]
    assert await engine.read_execution_state(child) == "skipped"


async def test_one_failure_of_a_quorum_of_all_skips_through_a_child_of_the_child(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c z y", f"{THREE} z>y", **group("quorum", "let_run", 3))
    await flow.fail("b")
    states = await flow.states()
    assert (states["z"], states["y"]) == ("skipped", "skipped")
    assert await flow.counts("z") == ("impossible", 0, 1, 0)
    assert await flow.counts("y") == ("impossible", 0, 0, 1)


async def test_a_cancelled_sibling_makes_its_other_children_impossible(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b z y", "a>z b>z b>y", **group("any_of", "cancel_remaining"))
    await flow.succeed("a")
    assert await flow.states() == {"a": "completed", "b": "cancelled", "z": "waiting", "y": "skipped"}


async def test_a_sweep_cancels_the_siblings_that_the_deciding_process_left(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c z", THREE, **group("any_of", "cancel_remaining"))
    parts_of(engine).wakeups.on_siblings = None
    await flow.succeed("a")
    assert len(await rows.of("pending_cancel_group")) == 1
    # The child does not wait until its siblings are cancelled.
    assert await flow.states() == {"a": "completed", "b": "waiting", "c": "waiting", "z": "waiting"}
    assert await engine.reconcile_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingReconcile.NO_OP
    async with rows.unchanged():
        await parts_of(engine).siblings.reconcile()
    await Reconciler(engine).catch_up()
    await flow.settle()
    assert await flow.states() == {"a": "completed", "b": "cancelled", "c": "cancelled", "z": "waiting"}
    assert await rows.of("pending_cancel_group") == []
    async with rows.unchanged():
        drained = await engine.drain_sibling_cancel_group(flow.flow_id, flow.id("z"))
        assert drained is SiblingDrain.ALREADY_DRAINED
        assert await engine.reconcile_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingReconcile.NO_OP


async def test_the_sibling_reconciler_finishes_what_is_done_and_drops_what_is_stale(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c z", THREE, **group("any_of", "cancel_remaining"))
    parts_of(engine).wakeups.on_siblings = None
    await flow.succeed("a")
    for name in "bc":
        await flow.cancel(name)
    assert await engine.reconcile_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingReconcile.COMPLETED_DRAIN
    assert not (await flow.group("z"))["cancel_siblings_pending_flag"]
    # An entry without a flag, and one without a group, as an interrupted or older version may leave them.
    insert = "insert into pending_cancel_group select partition_key, flow_id, $1, 0 from flow where flow_id = $2"
    await connection.execute(insert, uuid_of(flow.id("z")), flow.flow_id)
    await connection.execute(insert, uuid_of(flow.id("a")), flow.flow_id)
    assert await engine.reconcile_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingReconcile.SREMMED_STALE
    drained = await engine.drain_sibling_cancel_group(flow.flow_id, flow.id("a"))
    assert drained is SiblingDrain.DRAINED_SANS_GROUP
    assert await rows.of("pending_cancel_group") == []


async def test_a_locked_sibling_leaves_the_group_for_a_later_pass(
    engine: Engine, rows: Rows, patient_with_locks: None
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c z", THREE, **group("any_of", "cancel_remaining"))
    parts_of(engine).wakeups.on_siblings = None
    await flow.succeed("a")
    connection = await parts_of(engine).store.database.connect()
    locked = connection.transaction()
    try:
        await locked.start()
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(flow.id("b")))
        await refused(engine.drain_sibling_cancel_group(flow.flow_id, flow.id("z")), "retry_exhausted")
        assert (await flow.states())["c"] == "cancelled"
        stored = await flow.group("z")
        assert stored["cancel_siblings_pending_flag"]
        # The next pass tries all of them.
        assert {str(each) for each in stored["cancel_siblings_pending_members"]} == {
            uuid_of(flow.id(name)) for name in "bc"
        }
        await locked.rollback()
    finally:
        await connection.close()
    assert await engine.drain_sibling_cancel_group(flow.flow_id, flow.id("z")) is SiblingDrain.DRAINED
    assert (await flow.states())["b"] == "cancelled"


async def test_the_result_of_an_upstream_execution_becomes_the_input(engine: Engine, rows: Rows) -> None:
    passed = [FlowEdge(upstream="a", downstream="b", data_passing_ref="any text")]
    for result in (b'"small"', b"x" * 5_000, b"", None):
        flow = await DrivenFlow.submit(engine, rows, "a b", passed)
        await flow.succeed("a", result)
        context = await engine.read_execution_context(flow.id("b"))
        assert context.input_payload == (b'{"a": 1}' if result is None else result)
        await flow.cancel("b")
    # A large input is replaced by a small result.
    flow = await DrivenFlow.submit(engine, rows, [*large_nodes()], passed)
    await flow.succeed("a", b'"small"')
    assert (await engine.read_execution_context(flow.id("b"))).input_payload == b'"small"'
    assert await rows.of("execution_input", execution_id=uuid_of(flow.id("b"))) == []
    assert await engine.find_inconsistencies() == []


async def test_a_result_is_passed_with_its_encoding(engine: Engine, rows: Rows) -> None:
    passed = [FlowEdge(upstream="a", downstream="b", data_passing_ref="x")]
    for encoding in ("application/cbor", None):
        flow = await DrivenFlow.submit(engine, rows, [node("a"), node("b", payload_encoding="text/plain")], passed)
        await flow.claim("a")
        await engine.complete_execution(
            execution_id=flow.id("a"), source="operator_override", payload=b"1", result_encoding=encoding
        )
        await flow.settle()
        assert (await flow.row("b"))["payload_encoding"] == encoding


def large_nodes() -> list[Any]:
    """Two nodes with inputs that are not stored in their rows."""
    return [node("a", input_payload=b"y" * 3_000), node("b", input_payload=b"y" * 3_000)]


async def test_only_the_decisive_success_of_any_of_and_quorum_passes_its_result(engine: Engine, rows: Rows) -> None:
    passed = [FlowEdge(upstream=name, downstream="z", data_passing_ref="x") for name in "abc"]
    for kind, k, expected in (("any_of", None, b"1"), ("quorum", 2, b"2")):
        flow = await DrivenFlow.submit(engine, rows, "a b c z", passed, **group(kind, k=k))
        for number, name in enumerate("abc", 1):
            await flow.succeed(name, str(number).encode())
        assert (await engine.read_execution_context(flow.id("z"))).input_payload == expected, kind
    flow = await DrivenFlow.submit(engine, rows, "a b c z", passed)
    for number, name in enumerate("cab", 1):
        await flow.succeed(name, str(number).encode())
    assert (await engine.read_execution_context(flow.id("z"))).input_payload == b"3"


async def test_ends_that_are_settled_together_pass_data_in_their_order(engine: Engine, rows: Rows) -> None:
    passed = [FlowEdge(upstream=name, downstream="z", data_passing_ref="x") for name in "abc"]
    for kind, k, expected in (("all_of", None, b"3"), ("any_of", None, b"1"), ("quorum", 2, b"2")):
        groups = {} if kind == "all_of" else group(kind, k=k)
        flow = await DrivenFlow.submit(engine, rows, "a b c z", passed, **groups)
        wakeups = parts_of(engine).wakeups
        settle, wakeups.on_members_ended = wakeups.on_members_ended, None
        for number, name in enumerate("cab", 1):
            await flow.succeed(name, str(number).encode())
        wakeups.on_members_ended = settle
        (stored,) = await rows.of("flow", flow_id=flow.flow_id)
        await parts_of(engine).cascade.settle_flow(stored["partition_key"], flow.flow_id)
        assert (await engine.read_execution_context(flow.id("z"))).input_payload == expected, kind


RESOLVED = {
    "already_resolved": DependencyResolved(resolution=Resolution.ALREADY_RESOLVED),
    "pending": DependencyResolved(resolution=Resolution.PENDING),
    "satisfied": DependencyResolved(resolution=Resolution.SATISFIED),
    "already_fired": DependencyResolved(resolution=Resolution.ALREADY_FIRED),
    "skipped": DependencyResolved(resolution=Resolution.IMPOSSIBLE, marker=ResolutionMarker.CHILD_SKIPPED),
    "impossible": DependencyResolved(resolution=Resolution.IMPOSSIBLE),
    "copied": DependencyResolved(resolution=Resolution.SATISFIED, marker=ResolutionMarker.DATA_INJECTED),
}


async def test_single_edges_are_resolved_by_hand_with_every_answer(engine: Engine, rows: Rows) -> None:
    async def resolve(flow: DrivenFlow, pair: str, outcome: str) -> str:
        answer = await engine.resolve_dependency(flow.flow_id, flow.edge(pair), outcome)
        return next(name for name, expected in RESOLVED.items() if expected == answer)

    flow = await DrivenFlow.submit(engine, rows, "a b c z", THREE)
    assert await resolve(flow, "a>z", "success") == "satisfied"
    assert await resolve(flow, "a>z", "failed") == "already_resolved"
    assert await resolve(flow, "b>z", "skipped") == "skipped"
    assert await resolve(flow, "c>z", "success") == "already_fired"
    assert await flow.counts("z") == ("impossible", 2, 0, 1)

    flow = await DrivenFlow.submit(engine, rows, "a b c z", THREE, **group("quorum", k=2))
    assert await resolve(flow, "a>z", "success") == "pending"
    assert await resolve(flow, "b>z", "expired") == "pending"
    assert await resolve(flow, "c>z", "success") == "satisfied"
    assert (await flow.states())["z"] == "waiting"

    flow = await DrivenFlow.submit(engine, rows, "a z", "a>z")
    await flow.cancel("z")
    assert await resolve(flow, "a>z", "cancelled") == "impossible"

    passed = [FlowEdge(upstream="a", downstream="z", data_passing_ref="x")]
    flow = await DrivenFlow.submit(engine, rows, "a z", passed)
    stop_cascade(engine)
    await flow.succeed("a")
    assert await resolve(flow, "a>z", "success") == "copied"


async def test_resolving_refuses_unknown_edges_and_outcomes_and_writes_nothing(engine: Engine, rows: Rows) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    unknown = "11111111-2222-3333-4444-555555555555"
    async with rows.unchanged():
        await refused(engine.resolve_dependency(flow.flow_id, unknown, "success"), "invalid_dependency")
        await refused(engine.resolve_dependency(unknown, flow.edge("a>b"), "success"), "invalid_dependency")
        for word in ("resumable", "completed", "", None):
            await refused(engine.resolve_dependency(flow.flow_id, flow.edge("a>b"), word), "invalid_input")  # type: ignore[arg-type]
        await refused(engine.promote_blocked_to_eligible(flow.id("b")), "deps_not_satisfied")
        await refused(engine.promote_blocked_to_eligible(flow.id("a")), "not_blocked_by_deps")
        await refused(engine.promote_blocked_to_eligible(f"{{fp:1}}:{unknown}"), "execution_not_found")
    await flow.claim("a")
    await refused(engine.promote_blocked_to_eligible(flow.id("a")), "not_runnable")

"""Graphs built step by step: what each call answers and writes, and every refusal."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from engine.flow.graphs import BuiltFlow
from engine.flows import settle
from engine.state import all_cases, refused, rounds
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import (
    AllOfEdges,
    AlreadySet,
    AnyOfEdges,
    EdgeSnapshot,
    Incoming,
    OnSatisfied,
    PolicySet,
    QuorumOfEdges,
    Staged,
)
from flowfabric.model.errors import ConflictError, EngineError
from flowfabric.model.flow import Added, AlreadyMember, FlowAlreadySatisfied, FlowCreated
from flowfabric.model.ids import EdgeId, FlowId


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """An empty flow."""
    return await BuiltFlow.create(given, rows)


async def test_a_flow_is_created_once_whatever_the_second_call_says(engine: Engine, rows: Rows, clock: Clock) -> None:
    flow_id = FlowId(uuid4())
    created = await engine.create_flow(flow_id, flow_kind="dag", namespace="tests")
    assert created == FlowCreated(flow_id=flow_id)
    now = await clock.now()
    (row,) = await rows.of("flow", flow_id=flow_id)
    counts = {name: row[name] for name in ("graph_revision", "node_count", "edge_count", "live_count")}
    assert counts == {"graph_revision": 0, "node_count": 0, "edge_count": 0, "live_count": 0}
    assert (row["public_flow_state"], row["created_at"], row["last_mutation_at"]) == ("open", now, now)
    await clock.advance(seconds=1)
    async with rows.unchanged():
        again = await engine.create_flow(str(flow_id), flow_kind="pipeline", namespace="elsewhere")
    assert again == FlowAlreadySatisfied(flow_id=flow_id)


async def test_a_flow_with_an_unusable_kind_or_namespace_is_refused(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        for word in ("", "x" * 1025, "a\0b", 3):
            for name in ("flow_kind", "namespace"):
                arguments: dict[str, Any] = {"flow_kind": "dag", "namespace": "tests", name: word}
                await refused(engine.create_flow(uuid4(), **arguments), "invalid_input")


async def test_many_creates_of_one_flow_create_it_once(engine: Engine, rows: Rows) -> None:
    flow_id = FlowId(uuid4())
    answers = await asyncio.gather(
        *(engine.create_flow(flow_id, flow_kind="dag", namespace="tests") for _ in range(10))
    )
    assert sum(isinstance(answer, FlowCreated) for answer in answers) == 1
    assert len(await rows.of("flow", flow_id=flow_id)) == 1


async def test_a_member_is_added_once(flow: BuiltFlow, rows: Rows, clock: Clock) -> None:
    member = await flow.outside()
    now = await clock.advance(seconds=1)
    added = await flow.engine.add_execution_to_flow(flow.flow_id, member)
    assert added == Added(execution_id=member, new_node_count=1)
    row = await flow.row()
    assert (row["node_count"], row["graph_revision"], row["live_count"], row["last_mutation_at"]) == (1, 1, 1, now)
    execution = await rows.execution(member)
    assert (execution["flow_id"], execution["last_mutation_at"]) == (flow.flow_id, now)
    assert await flow.engine.resolve_execution_flow_id(member) == flow.flow_id
    await clock.advance(seconds=1)
    async with rows.unchanged():
        again = await flow.engine.add_execution_to_flow(flow.flow_id, member)
    assert again == AlreadyMember(execution_id=member, node_count=1)


async def test_ended_executions_join_a_flow_with_the_state_that_follows(
    flow: BuiltFlow, given: Given, rows: Rows, clock: Clock
) -> None:
    async def state() -> tuple[str, int, int]:
        row = await flow.row()
        return row["derived_state"], row["live_count"], row["failed_count"]

    completed = await given.completed(execution_id=flow.mint())
    kept = await rows.of("retained")
    await clock.advance(seconds=1)
    await flow.add(completed)
    assert await state() == ("completed", 0, 0)
    assert await rows.of("retained") == kept
    live = await flow.member()
    assert await state() == ("open", 1, 0)
    await flow.add(await given.cancelled(execution_id=flow.mint()))
    assert await state() == ("open", 1, 1)
    changes = [(row["details"]) for row in await rows.of("event", reason="flow_state_changed")]
    assert len(changes) == 2
    assert await flow.engine.find_inconsistencies() == []
    assert (await rows.execution(live))["public_state"] == "waiting"
    # Retention still finds the execution that ended before it joined, once the flow is settled.
    await flow.engine.cancel_execution(execution_id=live, reason="x")
    await settle(flow.engine, flow.flow_id)
    await clock.advance(seconds=25 * 3600)
    assert (await parts_of(flow.engine).retention.trim_batch()).done >= 1
    assert await flow.engine.read_execution_state(completed) is None


async def test_add_refuses_what_cannot_be_a_member(flow: BuiltFlow, given: Given, rows: Rows) -> None:
    other = await BuiltFlow.create(given, rows)
    while other.mint()[:-37] == flow.mint()[:-37]:
        other = await BuiltFlow.create(given, rows)
    taken = await flow.member()
    await rows.of("flow")
    add = flow.engine.add_execution_to_flow
    missing = FlowId(uuid4())
    with all_cases() as case:
        with case("another partition"):
            async with rows.unchanged():
                await refused(add(flow.flow_id, other.mint()), "invalid_input", "partition_mismatch")
        with case("the partition is checked before the flow"):
            async with rows.unchanged():
                await refused(add(missing, "{fp:300}:" + str(uuid4())), "invalid_input", "partition_mismatch")
        with case("no flow"):
            async with rows.unchanged():
                nowhere = BuiltFlow(given, rows, missing).mint()
                await refused(add(missing, nowhere), "flow_not_found", str(missing))
        with case("no execution"):
            async with rows.unchanged():
                await refused(add(flow.flow_id, flow.mint()), "execution_not_found")
        with case("bad ids"):
            async with rows.unchanged():
                await refused(add("no uuid", taken), "invalid_input", "flow_id")
                await refused(add(flow.flow_id, "no id"), "invalid_input")


async def test_a_member_of_one_flow_cannot_join_another(given: Given, rows: Rows) -> None:
    first = await BuiltFlow.create(given, rows)
    second = await BuiltFlow.create(given, rows)
    while first.mint()[:-37] != second.mint()[:-37]:
        second = BuiltFlow(given, rows, FlowId(uuid4()))
    await given.engine.create_flow(second.flow_id, flow_kind="dag", namespace="tests")
    member = await first.member()
    async with rows.unchanged():
        await refused(
            given.engine.add_execution_to_flow(second.flow_id, member),
            "execution_already_in_flow",
            f"already_member_of_different_flow:{first.flow_id}",
        )


async def test_an_edge_is_staged_without_blocking_anything(flow: BuiltFlow, rows: Rows, clock: Clock) -> None:
    first, second = await flow.members(2)
    before = await rows.execution(second)
    now = await clock.advance(seconds=1)
    edge_id = EdgeId(uuid4())
    staged = await flow.engine.stage_dependency_edge(
        flow.flow_id,
        edge_id=edge_id,
        upstream_execution_id=first,
        downstream_execution_id=second,
        expected_graph_revision=2,
        data_passing_ref="result",
    )
    assert staged == Staged(edge_id=edge_id, new_graph_revision=3)
    row = await flow.row()
    assert (row["edge_count"], row["graph_revision"], row["last_mutation_at"]) == (1, 3, now)
    (edge,) = await rows.of("edge", flow_id=flow.flow_id)
    assert (edge["state"], edge["staged_at"], edge["applied_at"]) == ("staged", now, None)
    assert (edge["dependency_kind"], edge["data_passing_ref"]) == ("success_only", "result")
    assert await rows.execution(second) == before
    # Another edge between the same executions counts too.
    await flow.stage(first, second)
    (group,) = await rows.of("edge_group", flow_id=flow.flow_id)
    assert (group["policy"], group["staged_count"], group["applied_count"]) == ("all_of", 2, 0)
    assert group["group_state"] == "pending"


async def test_stage_checks_in_order(flow: BuiltFlow, given: Given, rows: Rows) -> None:
    a, b, c = await flow.members(3)
    stranger = await flow.outside()
    first = await flow.stage(a, b, data_passing_ref="")
    await flow.stage(b, c)
    missing = FlowId(uuid4())
    nowhere = BuiltFlow(given, rows, missing)
    now = await flow.revision()
    with all_cases() as case:
        with case("to itself, before the flow is looked up"):
            async with rows.unchanged():
                await refused(nowhere.stage(a, a, expected_graph_revision=0), "self_referencing_edge", a)
        with case("no flow"):
            async with rows.unchanged():
                await refused(nowhere.stage(a, b, expected_graph_revision=0), "flow_not_found")
        with case("a stale revision, before the ends"):
            async with rows.unchanged():
                refusal = await refused(
                    flow.stage(a, stranger, expected_graph_revision=now - 1), "stale_graph_revision", str(now)
                )
                assert refusal.retryable
        for name, ends in {
            "no member upstream": (stranger, a),
            "no member downstream": (a, stranger),
            "no execution": (a, flow.mint()),
            "another partition": (a, "{fp:" + ("1" if a[4:-38] != "1" else "2") + "}:" + uuid_of(b)),
        }.items():
            with case(name):
                async with rows.unchanged():
                    await refused(flow.stage(*ends), "execution_not_in_flow")
        with case("a cycle, before the edge id"):
            async with rows.unchanged():
                await refused(flow.stage(c, a, edge_id=first), "cycle_detected")
                await refused(flow.stage(b, a), "cycle_detected")
        with case("an edge that exists"):
            async with rows.unchanged():
                refusal = await refused(flow.stage(a, c, edge_id=first), "dependency_already_exists")
                assert isinstance(refusal, ConflictError)
                assert isinstance(refusal.detail, dict)
                existing = refusal.detail["existing"]
                assert isinstance(existing, EdgeSnapshot)
                assert (existing.edge_id, existing.upstream_execution_id, existing.downstream_execution_id) == (
                    first,
                    a,
                    b,
                )
                assert (existing.edge_state, existing.data_passing_ref) == ("pending", None)
                assert str(refusal) == f"dependency_already_exists: edge {first} is staged already: {a} to {b}"
        with case("arguments"):
            async with rows.unchanged():
                await refused(flow.stage(a, c, dependency_kind=""), "invalid_input", "dependency_kind")
                await refused(flow.stage(a, c, data_passing_ref="x" * 1025), "invalid_input", "data_passing_ref")
                await refused(flow.stage(a, c, expected_graph_revision=-1), "invalid_input", "expected_graph_revision")


async def test_a_cycle_through_satisfied_edges_is_refused(flow: BuiltFlow, given: Given) -> None:
    ended = [await flow.add(await given.completed(execution_id=flow.mint())) for _ in range(2)]
    child = await flow.member()
    await flow.connect(ended[0], ended[1])
    await flow.connect(ended[1], child)
    edges = await flow.engine.list_edges(flow.flow_id, Incoming(child))
    assert [edge.dependency_state for edge in edges] == ["satisfied"]
    await refused(flow.stage(child, ended[0]), "cycle_detected")


async def test_the_policy_of_a_group_is_set_before_its_first_edge(flow: BuiltFlow, given: Given, rows: Rows) -> None:
    child = await flow.outside()
    assert await flow.policy(child, AllOfEdges()) == PolicySet()
    async with rows.unchanged():
        assert await flow.policy(child, {"kind": "all_of"}) == AlreadySet()
    quorum: dict[str, object] = {"kind": "quorum", "k": 2, "on_satisfied": "let_run"}
    assert await flow.policy(child, quorum) == PolicySet()
    assert await flow.policy(child, {**quorum, "k": 3}) == PolicySet()
    assert await flow.policy(child, {**quorum, "k": 3, "on_satisfied": "cancel_remaining"}) == PolicySet()
    (group,) = await rows.of("edge_group", flow_id=flow.flow_id)
    assert (group["policy"], group["k"], group["on_satisfied"]) == ("quorum", 3, "cancel_remaining")
    with all_cases() as case:
        refusals: dict[str, dict[str, object]] = {
            "quorum k must be >= 1": {**quorum, "k": 0},
            "k": {**quorum, "k": 2**31},
            "on_satisfied": {"kind": "any_of", "on_satisfied": "sometimes"},
            "policy": {"kind": "none_of"},
        }
        for name, policy in refusals.items():
            with case(name):
                async with rows.unchanged():
                    await refused(flow.policy(child, policy), "invalid_input", name)
        with case("an unknown flow"):
            async with rows.unchanged():
                nowhere = BuiltFlow(given, rows, FlowId(uuid4()))
                await refused(nowhere.policy(nowhere.mint(), AllOfEdges()), "flow_not_found")
        with case("a missing on_satisfied"):
            async with rows.unchanged():
                await refused(flow.policy(child, {"kind": "any_of"}), "invalid_input")
    await flow.add(child)
    await flow.stage(await flow.member(), child)
    async with rows.unchanged():
        for fixed in (AllOfEdges(), QuorumOfEdges(3, OnSatisfied.CANCEL_REMAINING), AnyOfEdges(OnSatisfied.LET_RUN)):
            await refused(flow.policy(child, fixed), "invalid_input", "edge_group_policy_already_fixed")


async def test_two_stages_with_one_revision_have_one_winner(flow: BuiltFlow, engines: Engines) -> None:
    other = BuiltFlow(Given(await engines(), flow.given.clock), flow.rows, flow.flow_id)
    for _ in rounds(5, whole=40):
        a, b = await flow.members(2)
        revision = await flow.revision()
        answers = await asyncio.gather(
            flow.stage(a, b, expected_graph_revision=revision),
            other.stage(a, b, expected_graph_revision=revision),
            return_exceptions=True,
        )
        (refusal,) = [answer for answer in answers if isinstance(answer, EngineError)]
        assert refusal.code == "stale_graph_revision"


async def test_two_edges_that_close_a_cycle_together_have_one_winner(flow: BuiltFlow, engines: Engines) -> None:
    other = BuiltFlow(Given(await engines(), flow.given.clock), flow.rows, flow.flow_id)

    async def persist(graph: BuiltFlow, upstream: str, downstream: str) -> str:
        while True:
            try:
                await graph.stage(upstream, downstream)
            except EngineError as refusal:
                if refusal.code != "stale_graph_revision":
                    return refusal.code
            else:
                return "staged"

    for _ in rounds(5, whole=40):
        a, b = await flow.members(2)
        answers = await asyncio.gather(persist(flow, a, b), persist(other, b, a))
        assert sorted(answers) == ["cycle_detected", "staged"]


async def test_one_member_added_twice_at_once_is_counted_once(flow: BuiltFlow, engines: Engines) -> None:
    second = await engines()
    for count in rounds(5, whole=40):
        member = await flow.outside()
        answers = await asyncio.gather(
            flow.engine.add_execution_to_flow(flow.flow_id, member),
            second.add_execution_to_flow(flow.flow_id, member),
        )
        assert sorted(type(answer).__name__ for answer in answers) == ["Added", "AlreadyMember"]
        row = await flow.row()
        assert (row["node_count"], row["graph_revision"], row["live_count"]) == (count + 1,) * 3


async def test_an_execution_that_ends_while_it_is_added_is_counted_once(flow: BuiltFlow, engines: Engines) -> None:
    second = await engines()
    for count in rounds(5, whole=40):
        member = await flow.outside()
        handle = (await flow.given.claim()).handle
        await asyncio.gather(flow.engine.add_execution_to_flow(flow.flow_id, member), second.complete(handle, b"done"))
        # A member that has ended is live until its end, if that is queued for the cascade, is settled.
        await settle(flow.engine, flow.flow_id)
        row = await flow.row()
        assert (row["node_count"], row["live_count"]) == (count + 1, 0)

"""Reads of flows, edges and dependencies, and the tags of flows."""

from uuid import uuid4

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flow.graphs import BuiltFlow
from engine.flow.submitting import node
from engine.state import all_cases, refused
from fixtures import Clock, Explain, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.edge import (
    AllOfEdges,
    AnyOfEdges,
    EdgeGroupSnapshot,
    Incoming,
    OnSatisfied,
    Outgoing,
    QuorumOfEdges,
)
from flowfabric.model.explanation import (
    MAX_EDGES,
    MAX_FAILED_EDGES,
    DependenciesReason,
    EndedReason,
    HeldReason,
    ImpossibleReason,
    UnmetEdge,
)
from flowfabric.model.flow import FlowSnapshot
from flowfabric.model.ids import FlowId
from flowfabric.model.tag import TagsSet


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """An empty flow."""
    return await BuiltFlow.create(given, rows)


async def test_a_flow_is_described_with_its_tags_and_the_groups_that_have_edges(flow: BuiltFlow, clock: Clock) -> None:
    created_at = await clock.now()
    await clock.advance(seconds=1)
    a, b, c, unused = sorted(await flow.members(4), key=lambda each: each[-36:])
    await flow.policy(c, QuorumOfEdges(2, OnSatisfied.LET_RUN))
    await flow.policy(unused, AnyOfEdges(OnSatisfied.LET_RUN))
    await flow.connect(a, c)
    await flow.stage(b, c)
    await flow.connect(a, b)
    await flow.engine.set_flow_tags(flow.flow_id, {"app.customer": "acme", "app.run": "7"})
    found = await flow.engine.describe_flow(str(flow.flow_id))
    counts = {"satisfied_count": 0, "failed_count": 0, "skipped_count": 0, "group_state": "pending"}
    assert found == FlowSnapshot(
        flow_id=flow.flow_id,
        flow_kind="dag",
        namespace="tests",  # type: ignore[arg-type]
        public_flow_state="open",  # type: ignore[arg-type]
        derived_state="open",  # type: ignore[arg-type]
        graph_revision=7,
        node_count=4,
        edge_count=3,
        created_at=created_at,
        last_mutation_at=created_at + 1000,
        cancelled_at=None,
        cancel_reason=None,
        cancellation_policy=None,
        tags={"app.customer": "acme", "app.run": "7"},
        edge_groups=[
            EdgeGroupSnapshot(downstream_execution_id=b, policy=AllOfEdges(), total_deps=1, running_count=1, **counts),  # type: ignore[arg-type]
            EdgeGroupSnapshot(
                downstream_execution_id=c,
                policy=QuorumOfEdges(2, OnSatisfied.LET_RUN),
                total_deps=2,
                running_count=2,
                **counts,  # type: ignore[arg-type]
            ),
        ],
    )
    await flow.engine.cancel_execution(execution_id=a, reason="not wanted")
    await flow.settle()
    found = await flow.engine.describe_flow(flow.flow_id)
    assert found is not None
    groups = [(each.group_state, each.failed_count, each.running_count) for each in found.edge_groups]
    assert groups[0] == ("impossible", 1, 0)
    assert groups[1][0] == "impossible"
    assert await flow.engine.describe_flow(uuid4()) is None
    await refused(flow.engine.describe_flow("no uuid"), "invalid_input", "flow_id")


@pytest.mark.usefixtures("altered_rows")
async def test_stored_literals_that_cannot_be_read_are_reported_as_corruption(
    given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    # As a newer or broken version may leave them.
    damages = {
        "public_flow_state": ("flow", "public_flow_state = 'paused'"),
        "derived_state": ("flow", "derived_state = 'paused'"),
        "cancellation_policy": ("flow", "cancellation_policy = 'some'"),
        "policy 'none_of'": ("edge_group", "policy = 'none_of'"),
        "k None": ("edge_group", "policy = 'quorum'"),
        "on_satisfied 'stop'": ("edge_group", "policy = 'any_of', on_satisfied = 'stop'"),
    }
    with all_cases() as case:
        for named, (table, damage) in damages.items():
            with case(named):
                flow = await BuiltFlow.create(given, rows)
                await flow.connect(*await flow.members(2))
                await connection.execute(f"update {table} set {damage} where flow_id = $1", flow.flow_id)
                await refused(flow.engine.describe_flow(flow.flow_id), "corruption", named)


async def test_edges_are_listed_by_either_end_in_the_order_of_their_ids(flow: BuiltFlow) -> None:
    a, b, c = await flow.members(3)
    out = sorted([await flow.stage(a, b), await flow.stage(a, c), await flow.stage(a, c)])
    last = await flow.stage(b, c)
    assert [edge.edge_id for edge in await flow.engine.list_edges(flow.flow_id, Outgoing(a))] == out
    incoming = await flow.engine.list_edges(flow.flow_id, Incoming(to_node=c))
    assert [edge.edge_id for edge in incoming] == sorted(edge.edge_id for edge in incoming)
    assert last in {edge.edge_id for edge in incoming}
    assert {edge.upstream_execution_id for edge in incoming} == {a, b}
    assert {edge.downstream_execution_id for edge in incoming} == {c}
    assert len(incoming) == 3
    described = [await flow.engine.describe_edge(flow.flow_id, edge.edge_id) for edge in incoming]
    assert described == incoming
    edge = incoming[0]
    assert (edge.satisfaction_condition, edge.created_by, edge.created_at) == ("all_required", "engine", edge.staged_at)
    with all_cases() as case:
        with case("no edges"):
            assert await flow.engine.list_edges(flow.flow_id, Outgoing(c)) == []
            assert await flow.engine.list_edges(uuid4(), Outgoing(a)) == []
            assert await flow.engine.list_edges(flow.flow_id, Incoming("{fp:9999}:" + str(uuid4()))) == []
        with case("no such edge"):
            assert await flow.engine.describe_edge(flow.flow_id, uuid4()) is None
        with case("not a selector"):
            await refused(flow.engine.list_edges(flow.flow_id, a), "invalid_input", "Outgoing")  # type: ignore[arg-type]


async def test_the_edges_of_another_flow_are_not_listed(flow: BuiltFlow) -> None:
    first, child = await flow.members(2)
    await flow.connect(first, child)
    other = BuiltFlow(flow.given, flow.rows, FlowId(uuid4()))
    while other.mint()[:-37] != flow.mint()[:-37]:
        other = BuiltFlow(flow.given, flow.rows, FlowId(uuid4()))
    for selector in (Incoming(child), Outgoing(first)):
        assert len(await flow.engine.list_edges(flow.flow_id, selector)) == 1
        assert await flow.engine.list_edges(other.flow_id, selector) == []


async def test_the_eligibility_of_an_execution_follows_from_its_dependencies_alone(
    flow: BuiltFlow, given: Given, connection: asyncpg.Connection
) -> None:
    async def status(execution_id: str) -> str:
        return (await flow.engine.evaluate_flow_eligibility(execution_id)).status

    with all_cases() as case:
        for expected, found in {
            "not_found": flow.mint(),
            "eligible": await given.created(),
            "not_runnable": await given.completed(lane_id="other"),
        }.items():
            with case(expected):
                assert await status(found) == expected
        with case("staged, then applied, then satisfied"):
            first, child = await flow.members(2)
            edge = await flow.stage(first, child)
            assert await status(child) == "eligible"
            await flow.apply(edge, first, child)
            assert await status(child) == "blocked_by_dependencies"
            ended = await flow.add(await given.completed(execution_id=flow.mint(), lane_id="ended"))
            quick = await flow.member()
            await flow.policy(quick, AnyOfEdges(OnSatisfied.LET_RUN))
            await flow.connect(ended, quick)
            await flow.connect(first, quick)
            assert await status(quick) == "eligible"
        with case("delayed"):
            delayed = await flow.add(await given.delayed(execution_id=flow.mint()))
            assert await status(delayed) == "eligible"
        with case("impossible"):
            # An operation that makes a group impossible also ends its execution.
            await connection.execute(
                "update edge_group set group_state = 'impossible' where downstream_id = $1", uuid_of(child)
            )
            assert await status(child) == "impossible"


@pytest.mark.usefixtures("altered_rows")
async def test_the_stored_state_of_the_group_decides_the_eligibility(
    flow: BuiltFlow, connection: asyncpg.Connection
) -> None:
    first, child = await flow.members(2)
    await flow.connect(first, child)
    # An operation that stores this also skips the execution.
    await connection.execute("update edge_group set group_state = 'impossible'")
    assert (await flow.engine.evaluate_flow_eligibility(child)).status == "impossible"


async def test_tags_of_flows_are_set_read_and_checked(flow: BuiltFlow, rows: Rows, clock: Clock) -> None:
    engine, flow_id, missing = flow.engine, flow.flow_id, FlowId(uuid4())
    now = await clock.advance(seconds=1)
    await engine.set_flow_tag(flow_id, "app.customer", "acme")
    row = await flow.row()
    assert (row["last_mutation_at"], row["graph_revision"]) == (now, 0)
    assert await engine.set_flow_tags(flow_id, {"app.customer": "other", "app.run": "7"}) == TagsSet(count=2)
    assert await engine.get_flow_tag(flow_id, "app.customer") == "other"
    assert await engine.get_flow_tag(flow_id, "app.none") is None
    assert await engine.get_flow_tag(missing, "app.customer") is None
    async with rows.unchanged():
        with all_cases() as case:
            for key in ("customer", "App.x", "1.x", "app.", ""):
                with case(f"key {key!r}"):
                    await refused(engine.set_flow_tag(flow_id, key, "x"), "invalid_tag_key", key)
                    await refused(engine.set_flow_tags(flow_id, {"app.ok": "x", key: "x"}), "invalid_tag_key", key)
                    await refused(engine.get_flow_tag(flow_id, key), "invalid_tag_key", key)
            with case("no tags"):
                await refused(engine.set_flow_tags(flow_id, {}), "invalid_input", "tags")
            with case("no flow"):
                await refused(engine.set_flow_tag(missing, "app.x", "x"), "flow_not_found")
                await refused(engine.set_flow_tags(missing, {"app.x": "x"}), "flow_not_found")


async def test_an_execution_that_waits_for_dependencies_is_explained(flow: BuiltFlow, explain: Explain) -> None:
    first, second, child = await flow.members(3)
    await flow.policy(child, QuorumOfEdges(2, OnSatisfied.LET_RUN))
    applied = await flow.connect(first, child)
    staged = await flow.stage(second, child)
    found = await explain(child)
    (reason,) = found.reasons
    assert isinstance(reason, DependenciesReason)
    edges = {
        applied: UnmetEdge(
            edge_id=applied,
            upstream_execution_id=first,
            execution_kind="job",
            public_state="waiting",  # type: ignore[arg-type]
        ),
        staged: UnmetEdge(
            edge_id=staged,
            upstream_execution_id=second,
            execution_kind="job",
            public_state="waiting",  # type: ignore[arg-type]
            is_applied=False,
        ),
    }
    assert reason.policy == QuorumOfEdges(2, OnSatisfied.LET_RUN)
    assert (reason.unmet_count, {edge.edge_id: edge for edge in reason.edges}) == (2, edges)
    assert reason.detail == f"1 dep(s) unresolved incl {applied}"
    assert found.summary.startswith("waiting until 2 of its dependencies have succeeded; 2 unresolved: ")
    assert f"job {second} (waiting, not applied)" in found.summary


async def test_a_skipped_execution_is_explained_by_the_upstream_executions_without_success(
    engine: Engine, rows: Rows, explain: Explain, clock: Clock
) -> None:
    members = [node(name, execution_kind=f"kind {name}") for name in "abcdez"]
    quorum = QuorumOfEdges(4, OnSatisfied.LET_RUN)
    driven = await DrivenFlow.submit(engine, rows, members, "a>b a>z b>z c>z d>z e>z", groups={"z": quorum})
    await driven.succeed("c")
    await driven.fail("a")
    await driven.cancel("d")
    found = await explain(driven.id("z"))
    ended, reason = found.reasons
    assert isinstance(ended, EndedReason)
    assert isinstance(reason, ImpossibleReason)
    assert (reason.policy, reason.needed_count, reason.total_count, reason.failed_count) == (quorum, 4, 5, 3)
    upstreams = [(edge.upstream_execution_id, edge.execution_kind, edge.public_state) for edge in reason.edges]
    assert set(upstreams) == {
        (driven.id("a"), "kind a", "failed"),
        (driven.id("b"), "kind b", "skipped"),
        (driven.id("d"), "kind d", "cancelled"),
    }
    assert upstreams[-1][2] == "skipped"
    named = ", ".join(f"{kind} {execution_id} ({state})" for execution_id, kind, state in upstreams)
    assert found.summary.endswith(f"; 3 of 5 dependencies ended without success, 4 must succeed: {named}")
    assert (await explain(driven.id("b"))).summary.endswith(
        f"; 1 of 1 dependencies ended without success, 1 must succeed: kind a {driven.id('a')} (failed)"
    )
    assert [each.kind for each in (await explain(driven.id("a"))).reasons] == ["ended"]


async def test_an_explanation_of_a_skipped_execution_lists_at_most_ten_dependencies(
    engine: Engine, rows: Rows, explain: Explain
) -> None:
    names = [f"n{at}" for at in range(MAX_FAILED_EDGES + 1)]
    policy = AnyOfEdges(OnSatisfied.LET_RUN)
    pairs = " ".join(f"{name}>z" for name in names)
    driven = await DrivenFlow.submit(engine, rows, [*map(node, names), node("z")], pairs, groups={"z": policy})
    for name in names:
        await driven.cancel(name)
    found = await explain(driven.id("z"))
    reason = found.reasons[-1]
    assert isinstance(reason, ImpossibleReason)
    assert (len(reason.edges), reason.failed_count, reason.needed_count) == (MAX_FAILED_EDGES, len(names), 1)
    assert "; 11 of 11 dependencies ended without success, 1 must succeed: job " in found.summary
    assert found.summary.endswith(" and 8 more")


async def test_an_explanation_lists_at_most_a_hundred_dependencies(flow: BuiltFlow, explain: Explain) -> None:
    first, child = await flow.members(2)
    await flow.connect(first, child)
    for _ in range(MAX_EDGES):
        await flow.stage(first, child)
    found = await explain(child)
    (reason,) = found.reasons
    assert isinstance(reason, DependenciesReason)
    assert (len(reason.edges), reason.unmet_count) == (MAX_EDGES, MAX_EDGES + 1)
    assert found.summary.startswith("waiting until all of its dependencies have succeeded; 101 unresolved: ")
    assert found.summary.endswith(" and 98 more")


async def test_a_member_held_for_the_cancellation_of_its_flow_is_explained(flow: BuiltFlow, explain: Explain) -> None:
    first, child = await flow.members(2)
    await flow.connect(first, child)
    await flow.engine.cancel_flow_header(flow_id=flow.flow_id, reason="not wanted", cancellation_policy="cancel_all")
    for member in (first, child):
        found = await explain(member)
        assert found.reasons == (
            HeldReason(blocking_reason="paused_by_flow_cancel", detail="its flow is cancelled"),  # type: ignore[arg-type]
        )
        assert found.summary == "waiting: paused by flow cancel, its flow is cancelled"


async def test_an_edge_to_a_member_that_is_held_leaves_it_held(flow: BuiltFlow, rows: Rows) -> None:
    first, child = await flow.members(2)
    edge = await flow.stage(first, child)
    await flow.engine.cancel_flow_header(flow_id=flow.flow_id, reason="not wanted", cancellation_policy="cancel_all")
    before = await rows.execution(child)
    await flow.apply(edge, first, child)
    assert await rows.execution(child) == before
    assert (await rows.execution(child))["blocking_reason"] == "paused_by_flow_cancel"


async def test_the_graph_of_a_cancelled_flow_does_not_change(flow: BuiltFlow, rows: Rows) -> None:
    a, b = await flow.members(2)
    new = await flow.outside()
    await flow.engine.cancel_flow_header(flow_id=flow.flow_id, reason="not wanted", cancellation_policy="flow_only")
    async with rows.unchanged():
        await refused(flow.engine.add_execution_to_flow(flow.flow_id, new), "flow_already_terminal", "cancelled")
        await refused(flow.stage(a, b), "flow_already_terminal")
        # Checked before the execution, the revision and the ends.
        for each in (a, flow.mint()):
            await refused(flow.engine.add_execution_to_flow(flow.flow_id, each), "flow_already_terminal")
        await refused(flow.stage(a, new, expected_graph_revision=99), "flow_already_terminal")


@pytest.mark.usefixtures("altered_rows")
async def test_the_graph_of_a_flow_in_another_final_state_does_not_change(
    flow: BuiltFlow, rows: Rows, connection: asyncpg.Connection
) -> None:
    a, b = await flow.members(2)
    new = await flow.outside()
    revision = await flow.revision()
    # No operation of this version stores these.
    for state in ("completed", "failed"):
        await connection.execute("update flow set public_flow_state = $1", state)
        async with rows.unchanged():
            await refused(flow.engine.add_execution_to_flow(flow.flow_id, new), "flow_already_terminal", state)
            await refused(flow.stage(a, b, expected_graph_revision=revision), "flow_already_terminal", state)

"""What submit_flow refuses: with which code, and at which place; a refusal writes nothing."""

from collections.abc import Iterable
from typing import Any

import pytest

from engine.state import all_cases
from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.model import graph
from flowfabric.model.edge import AnyOfEdges, OnSatisfied, QuorumOfEdges
from flowfabric.model.errors import EngineError
from flowfabric.model.flow import MAX_EDGES, MAX_NODES, FlowAlreadySatisfied, FlowEdge
from flowfabric.model.states import LaneState

from .submitting import edges, flow, node, nodes, submitted

LONE_SURROGATE = "half \ud800 a character"
ANY = {"kind": "any_of", "on_satisfied": "let_run"}
NO_LISTS: list[Any] = [None, 5, b"ab", iter([]), {"a": 1}]
NO_NAMES: list[Any] = ["", None, 5, "\0", []]
WRONG_EFFECTS: list[Any] = ["perhaps", None, 5, []]

Refusal = tuple[dict[str, Any], str, str]


def second(**fields: Any) -> dict[str, Any]:
    """A flow whose second node has these fields."""
    return flow([node("a"), node("b", **fields)])


def edge(**fields: Any) -> dict[str, Any]:
    """A flow whose second edge has these fields."""
    return flow("a b", [*edges("a>b"), FlowEdge(**{"upstream": "a", "downstream": "b", **fields})])


def grouped(**groups: Any) -> dict[str, Any]:
    """A flow of a and b, of which b depends twice on a, with these policies."""
    return flow("a b", "a>b a>b", groups=groups)


FLOWS: list[Refusal] = [
    *((flow("a", flow_id=wrong), "invalid_input", "flow_id: must be a UUID") for wrong in ("x", 5, "")),
    *((flow("a", flow_kind=wrong), "invalid_input", "flow_kind: must") for wrong in ("", None, "\0", "k" * 1025)),
    *((flow("a", namespace=wrong), "invalid_input", "namespace: must") for wrong in ("", None, "\0", "n" * 1025)),
    (flow("a", tags={"customer": "x"}), "invalid_tag_key", "tag key 'customer' must be namespaced"),
    (flow("a", tags={"app.x": 5}), "invalid_input", "tags.app.x: must be text"),
    (flow("a", tags=["app.x"]), "invalid_input", "tags: must be a mapping"),
    *((flow(wrong), "invalid_input", "nodes: expected a list") for wrong in NO_LISTS),
    *((flow("a", wrong), "invalid_input", "edges: expected a list") for wrong in NO_LISTS),
]

NODES: list[Refusal] = [
    (flow([node("a"), "b"]), "invalid_input", "nodes[1]: expected a FlowNode or a mapping, got 'b'"),
    (flow([{"name": "a", "lane": "x"}]), "invalid_input", "nodes[0]: has no field 'lane'; did you mean"),
    (flow([{"name": "a", 5: "x"}]), "invalid_input", "nodes[0]: has no field 5"),
    (flow([{"name": "a"}]), "invalid_input", "nodes[0]: missing required argument"),
    *((flow([node("a"), node(wrong)]), "invalid_input", "nodes[1].name: must") for wrong in NO_NAMES),
    (flow("a b a"), "invalid_input", "nodes[2].name: nodes[0] has the name 'a' too"),
    (flow("a b b"), "invalid_input", "nodes[2].name: nodes[1] has the name 'b' too"),
    *((second(priority=wrong), "invalid_input", "nodes[1].priority: must") for wrong in (None, "1", 1.5, True)),
    *((second(input_payload=wrong), "invalid_input", "nodes[1].input_payload: must") for wrong in (None, "text", 5)),
    (second(delay_until="1"), "invalid_input", "nodes[1].delay_until: must"),
    (second(delay_ms=-1), "invalid_input", "nodes[1].delay_ms: must"),
    (second(delay_ms=1, delay_until=1), "invalid_input", "nodes[1].delay_ms: must be absent"),
    (second(execution_deadline_at=2**63), "invalid_input", "nodes[1].execution_deadline_at: must"),
    (second(lane_id="x" * 65), "invalid_input", "nodes[1].lane_id: TooLong(65)"),
    (second(lane_id=None), "invalid_input", "nodes[1].lane_id: must"),
    *(
        (second(**{field: wrong}), "invalid_input", f"nodes[1].{field}:")
        for field in ("execution_kind", "creator_identity", "payload_encoding")
        for wrong in ("nul \0", LONE_SURROGATE, 5)
    ),
    (second(tags={"app.fine": "x", "Wrong": "x"}), "invalid_tag_key", "nodes[1].tags: tag key 'Wrong' must"),
    (second(tags={"app.x": 5}), "invalid_input", "nodes[1].tags.app.x: must be text"),
    (second(tags=["app.x"]), "invalid_input", "nodes[1].tags: must be a mapping"),
    (second(policy="{"), "invalid_policy_json", "nodes[1].policy: malformed"),
    (second(policy={"max_replay_count": -1}), "invalid_policy_json", "nodes[1].policy: max_replay_count"),
    (second(policy={"unknown": 1}), "invalid_policy_json", "nodes[1].policy: unknown"),
    (second(policy=5), "invalid_policy_json", "nodes[1].policy: "),
    (
        second(policy={"routing_requirements": {"required_capabilities": [""]}}),
        "invalid_capabilities",
        "nodes[1].policy: required:empty_token",
    ),
]

EDGES: list[Refusal] = [
    (flow("a b", ["a>b"]), "invalid_input", "edges[0]: expected a FlowEdge or a mapping, got 'a>b'"),
    (flow("a b", [{"upstream": "a", "to": "b"}]), "invalid_input", "edges[0]: has no field 'to'"),
    (flow("a b", [{"upstream": "a"}]), "invalid_input", "edges[0]: missing required argument 'downstream'"),
    (edge(upstream="c"), "invalid_input", "edges[1].upstream: no node has the name 'c'"),
    (edge(downstream="c"), "invalid_input", "edges[1].downstream: no node has the name 'c'"),
    (edge(downstream=["b"]), "invalid_input", "edges[1].downstream: no node has the name ['b']"),
    (edge(upstream=None), "invalid_input", "edges[1].upstream: no node has the name None"),
    (edge(downstream="a"), "self_referencing_edge", "edges[1]: node 'a' cannot depend on itself"),
    *((edge(dependency_kind=wrong), "invalid_input", "edges[1].dependency_kind: must") for wrong in ("", None, "\0")),
    (
        flow("a b", [FlowEdge(upstream="a", downstream="b", dependency_kind=None)]),  # type: ignore[arg-type]
        "invalid_input",
        "edges[0].dependency_kind: must",
    ),
    *(
        (edge(data_passing_ref=wrong), "invalid_input", "edges[1].data_passing_ref:")
        for wrong in (5, LONE_SURROGATE, "r" * 1025)
    ),
    (flow("a b", "a>b b>a"), "cycle_detected", "edges: a -> b -> a is a cycle"),
    (flow("x d c b a", "x>a a>b b>c c>d d>a x>c"), "cycle_detected", "edges: d -> a -> b -> c -> d is a cycle"),
    (
        flow(
            " ".join(f"n{at}" for at in range(100)), [*edges(" ".join(f"n{at}>n{(at + 1) % 100}" for at in range(100)))]
        ),
        "cycle_detected",
        "edges: n0 -> n1 -> n2 -> n3 -> n4 -> n5 -> n6 -> n7 -> n8 -> n9 -> n10 -> n11 -> n12 -> n13 -> n14 -> n15 -> "
        "n16 -> n17 -> n18 -> n19 -> 81 more is a cycle",
    ),
]

GROUPS: list[Refusal] = [
    (flow("a b", "a>b", groups=["b"]), "invalid_input", "groups: expected a mapping"),
    (grouped(c=ANY), "invalid_input", "groups['c']: no node has this name"),
    (grouped(a=ANY), "invalid_input", "groups['a']: the node has no inbound edges"),
    (grouped(b=5), "invalid_input", "groups['b']: expected AllOfEdges, AnyOfEdges or QuorumOfEdges, or a mapping"),
    *(
        (
            grouped(b=wrong),
            "invalid_input",
            f"groups['b']: kind must be all_of, any_of or quorum, got {wrong.get('kind')!r}",
        )
        for wrong in ({"kind": "some_of"}, {"kind": ["any_of"]}, {"on_satisfied": "let_run"}, {})
    ),
    (grouped(b={"kind": "any_of"}), "invalid_input", "groups['b']: a policy of kind any_of needs on_satisfied"),
    (grouped(b={"kind": "quorum"}), "invalid_input", "groups['b']: a policy of kind quorum needs k and on_satisfied"),
    (grouped(b={**ANY, "k": 2}), "invalid_input", "groups['b']: a policy of kind any_of has no field 'k'"),
    (grouped(b={**ANY, 5: 2}), "invalid_input", "groups['b']: a policy of kind any_of has no field 5"),
    (grouped(b={"kind": "all_of", "k": 2}), "invalid_input", "groups['b']: a policy of kind all_of has no field 'k'"),
    (
        grouped(b={"kind": "any_of", "on_satisfied": "stop"}),
        "invalid_input",
        "groups['b']: on_satisfied must be cancel_remaining or let_run, got 'stop'",
    ),
    (
        grouped(b={**ANY, "kind": "quorum", "k": "2"}),
        "invalid_input",
        "groups['b']: quorum k must be an integer up to 2147483647, got '2'",
    ),
    *(
        (grouped(b=AnyOfEdges(wrong)), "invalid_input", "groups['b']: on_satisfied must be cancel_remaining or let_run")
        for wrong in WRONG_EFFECTS
    ),
    (grouped(b=QuorumOfEdges(0, OnSatisfied.LET_RUN)), "invalid_input", "groups['b']: quorum k must be >= 1"),
    (
        grouped(b=QuorumOfEdges(2**31, OnSatisfied.LET_RUN)),
        "invalid_input",
        "groups['b']: quorum k must be an integer up to",
    ),
    (
        grouped(b=QuorumOfEdges(3, OnSatisfied.LET_RUN)),
        "invalid_input",
        "groups['b']: quorum k must be at most 2, the number of inbound edges, got 3",
    ),
]


async def refusal(engine: Engine, arguments: dict[str, Any]) -> EngineError:
    """The error of a refused flow."""
    with pytest.raises(EngineError) as refused:
        await engine.submit_flow(**arguments)
    return refused.value


@pytest.mark.parametrize("cases", [FLOWS, NODES, EDGES, GROUPS], ids=["flow", "nodes", "edges", "groups"])
async def test_the_first_fault_is_named_with_its_place_and_nothing_is_written(
    engine: Engine, rows: Rows, cases: Iterable[Refusal]
) -> None:
    async with rows.unchanged():
        with all_cases() as case:
            for arguments, code, place in cases:
                with case(f"{code} {place}"):
                    found = await refusal(engine, arguments)
                    assert (found.code, str(found.detail)[: len(place)]) == (code, place)


async def test_a_flow_of_too_many_nodes_or_edges_is_refused(
    engine: Engine, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (MAX_NODES, MAX_EDGES) == (50_000, 250_000)
    monkeypatch.setattr(graph, "MAX_NODES", 2)
    monkeypatch.setattr(graph, "MAX_EDGES", 3)
    await submitted(engine, "a b", "a>b a>b a>b")
    async with rows.unchanged():
        for arguments, text in (
            (flow("a b c"), "nodes: must have at most 2 items, got 3"),
            (flow("a b", "a>b a>b a>b a>b"), "edges: must have at most 3 items, got 4"),
        ):
            found = await refusal(engine, arguments)
            assert (found.code, found.detail) == ("invalid_input", text)


async def test_a_lane_that_refuses_submissions_refuses_the_whole_flow(engine: Engine, rows: Rows) -> None:
    both = flow([node("a"), node("b", lane_id="closing")], "a>b")
    await submitted(engine, **both)
    for state in (LaneState.DRAINING, LaneState.DISABLED):
        await engine.set_lane_state("closing", state)
        async with rows.unchanged():
            found = await refusal(engine, both)
            assert found.code == "invalid_input"
            assert found.detail == (
                f"nodes[1].lane_id: lane 'closing' accepts no submissions: it is {state}; set_lane_state activates it"
            )
    await engine.set_lane_state("closing", LaneState.PAUSED)
    await submitted(engine, **both)


async def test_an_existing_flow_takes_precedence_over_every_refusal(engine: Engine, rows: Rows) -> None:
    answer = await submitted(engine, [node("a", lane_id="closing")])
    await engine.set_lane_state("closing", LaneState.DISABLED)
    async with rows.unchanged():
        for other in (flow([node("a", lane_id="closing")]), flow(nodes("a a")), flow(tags={"Wrong": "x"})):
            again = await engine.submit_flow(**{**other, "flow_id": answer.flow_id})
            assert again == FlowAlreadySatisfied(flow_id=answer.flow_id)

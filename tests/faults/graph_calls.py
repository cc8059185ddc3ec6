"""The calls that build and read the graph of a flow, each with its preparation."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from flowfabric.engine.engine import Engine
from flowfabric.model.edge import Incoming, OnSatisfied, QuorumOfEdges

from .preparations import (
    beside_flow,
    in_flow,
    nothing,
    with_dependency,
    with_ended_upstream,
    with_staged_edge,
    with_upstream,
)
from .scene import Subject

Prepare: TypeAlias = Callable[[Subject], Awaitable[None]]
Call: TypeAlias = Callable[[Engine, Subject], Awaitable[Any]]

GRAPH_WRITES: Sequence[tuple[str, Prepare, Call] | tuple[str, Prepare, Call, str]] = (
    ("wait_children", with_dependency, lambda e, s: e.wait_children(s.handle), "with a dependency"),
    ("create_flow", nothing, lambda e, s: e.create_flow(s.ids[0], flow_kind=s.name, namespace="tests")),
    ("add_execution_to_flow", beside_flow, lambda e, s: e.add_execution_to_flow(s.flow_id, s.execution_id)),
    (
        "stage_dependency_edge",
        with_upstream,
        lambda e, s: e.stage_dependency_edge(s.flow_id, **s.edge, expected_graph_revision=2),
    ),
    (
        "apply_dependency_to_child",
        with_staged_edge,
        lambda e, s: e.apply_dependency_to_child(s.flow_id, **s.edge, graph_revision=3),
    ),
    (
        "apply_dependency_to_child",
        with_ended_upstream,
        lambda e, s: e.apply_dependency_to_child(s.flow_id, **s.edge, graph_revision=3),
        "after its upstream execution",
    ),
    (
        "set_edge_group_policy",
        in_flow,
        lambda e, s: e.set_edge_group_policy(s.flow_id, s.execution_id, QuorumOfEdges(2, OnSatisfied.LET_RUN)),
    ),
    ("set_flow_tag", in_flow, lambda e, s: e.set_flow_tag(s.flow_id, "app.key", "value")),
    ("set_flow_tags", in_flow, lambda e, s: e.set_flow_tags(s.flow_id, {"app.key": "value", "app.other": "word"})),
)

GRAPH_READS: Sequence[tuple[str, Prepare, Call]] = (
    ("describe_flow", with_staged_edge, lambda e, s: e.describe_flow(s.flow_id)),
    ("describe_edge", with_staged_edge, lambda e, s: e.describe_edge(s.flow_id, s.ids[0])),
    ("list_edges", with_staged_edge, lambda e, s: e.list_edges(s.flow_id, Incoming(s.execution_id))),
    ("list_flows", in_flow, lambda e, _: e.list_flows(tag=("app.key", "value"))),
    ("get_flow_tag", in_flow, lambda e, s: e.get_flow_tag(s.flow_id, "app.key")),
    (
        "evaluate_flow_eligibility",
        with_staged_edge,
        lambda e, s: e.evaluate_flow_eligibility(s.execution_id),
    ),
)

"""The operations on flows for the fault sweeps."""

from collections.abc import Awaitable, Callable
from typing import Any

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import OnSatisfied, QuorumOfEdges
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import parse_execution_id

from .operation import Call, Operation, Prepare
from .preparations import (
    LARGE_INPUT,
    beside_flow,
    claimed,
    delayed_until,
    in_flow,
    nothing,
    owed,
    running_in_flow,
    with_cancelled_sibling,
    with_decided_group,
    with_ended_upstream,
    with_lost_promotion,
    with_staged_edge,
    with_unsettled_upstream,
    with_upstream,
)
from .scene import MINUTE, Subject


def submit_flow(engine: Engine, subject: Subject, **overrides: Any) -> Awaitable[object]:
    """Submit a flow of three members, two of them ahead of the third."""
    fields = ("lane_id", "execution_kind", "input_payload", "creator_identity", "policy")
    member = {field: subject.new(input_payload=LARGE_INPUT)[field] for field in fields}
    return engine.submit_flow(
        flow_kind="dag",
        namespace="tests",
        nodes=[
            {"name": "first", **member, "tags": {"ff.instance_id": "one"}},
            {"name": "late", **member, "delay_ms": MINUTE},
            {"name": "last", **member, "execution_deadline_at": delayed_until(subject)},
        ],
        edges=[{"upstream": name, "downstream": "last"} for name in ("first", "late")],
        groups={"last": {"kind": "any_of", "on_satisfied": "let_run"}},
        tags={"app.key": "value"},
        **overrides,
    )


def cancel_graph(cancel: Callable[..., Awaitable[object]], subject: Subject, policy: str) -> Awaitable[object]:
    """Cancel the flow of a subject by one of the operations that do it."""
    return cancel(subject.flow_id, reason="x", cancellation_policy=policy)


async def cancel_many(engine: Engine, subject: Subject) -> None:
    """Cancel the execution of a subject among many, and raise its error."""
    (result,) = await parts_of(engine).cancel_many.cancel([parse_execution_id(subject.execution_id)], reason="x")
    if isinstance(result, EngineError):
        raise result


def flow_operations() -> list[Operation]:
    """The operations that build, change and cancel flows."""
    found: list[Operation] = []

    def add(name: str, prepare: Prepare, call: Call, variant: str = "", *, is_idempotent: bool = True) -> None:
        found.append(Operation(name=name, variant=variant, prepare=prepare, call=call, is_idempotent=is_idempotent))

    add("create_flow", nothing, lambda e, s: e.create_flow(s.ids[0], flow_kind=s.name, namespace="tests"))
    add("add_execution_to_flow", beside_flow, lambda e, s: e.add_execution_to_flow(s.flow_id, s.execution_id))
    add(
        "stage_dependency_edge",
        with_upstream,
        lambda e, s: e.stage_dependency_edge(s.flow_id, **s.edge, expected_graph_revision=2),
    )
    add(
        "apply_dependency_to_child",
        with_staged_edge,
        lambda e, s: e.apply_dependency_to_child(s.flow_id, **s.edge, graph_revision=3),
    )
    add(
        "apply_dependency_to_child",
        with_ended_upstream,
        lambda e, s: e.apply_dependency_to_child(s.flow_id, **s.edge, graph_revision=3),
        "after its upstream execution",
    )
    add(
        "set_edge_group_policy",
        in_flow,
        lambda e, s: e.set_edge_group_policy(s.flow_id, s.execution_id, QuorumOfEdges(2, OnSatisfied.LET_RUN)),
    )
    add("set_flow_tag", in_flow, lambda e, s: e.set_flow_tag(s.flow_id, "app.key", "value"))
    add("set_flow_tags", in_flow, lambda e, s: e.set_flow_tags(s.flow_id, {"app.key": "value", "app.other": "word"}))
    add("submit_flow", nothing, submit_flow, "without an id", is_idempotent=False)
    add("submit_flow", nothing, lambda e, s: submit_flow(e, s, flow_id=s.ids[0]), "with an id")

    add("cascade_completion", with_unsettled_upstream, lambda e, s: e.cascade_completion(s.event_id))
    add(
        "resolve_dependency",
        with_unsettled_upstream,
        lambda e, s: e.resolve_dependency(s.flow_id, s.ids[0], "success"),
    )
    add(
        "promote_blocked_to_eligible",
        with_lost_promotion,
        lambda e, s: e.promote_blocked_to_eligible(s.execution_id),
    )
    # Siblings are cancelled in transactions of their own.
    add(
        "drain_sibling_cancel_group",
        with_decided_group,
        lambda e, s: e.drain_sibling_cancel_group(s.flow_id, s.execution_id),
    )
    add(
        "reconcile_sibling_cancel_group",
        with_cancelled_sibling,
        lambda e, s: e.reconcile_sibling_cancel_group(s.flow_id, s.execution_id),
    )
    add("cancel_flow_header", in_flow, lambda e, s: cancel_graph(e.cancel_flow_header, s, "cancel_all"))
    add(
        "cancel_flow_header",
        running_in_flow,
        lambda e, s: cancel_graph(e.cancel_flow_header, s, "cancel_all"),
        "running",
    )
    # The members are cancelled in further transactions.
    add("cancel_flow", in_flow, lambda e, s: cancel_graph(e.cancel_flow, s, "flow_only"), "of the graph only")
    add("ack_cancel_member", owed, lambda e, s: e.ack_cancel_member(s.flow_id, s.execution_id))
    add("cancel_many", claimed, cancel_many)
    return found

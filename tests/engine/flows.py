"""Flows of given executions, built by real operations, and the cascade at a time that the test chooses."""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import ExecutionId, FlowId, flow_partition, split_execution_id


async def flow_of(
    engine: Engine, members: Sequence[ExecutionId] = (), edges: Iterable[tuple[ExecutionId, ExecutionId]] = ()
) -> FlowId:
    """A new flow of executions of one partition, with applied edges between them."""
    flow_id = FlowId(uuid4())
    while members and partition_of(engine, flow_id) != split_execution_id(members[0])[0]:
        flow_id = FlowId(uuid4())
    await engine.create_flow(flow_id, flow_kind="dag", namespace="tests")
    for member in members:
        await engine.add_execution_to_flow(flow_id, member)
    for upstream, downstream in edges:
        await connect(engine, flow_id, upstream, downstream)
    return flow_id


async def connect(engine: Engine, flow_id: FlowId, upstream: ExecutionId, downstream: ExecutionId) -> None:
    """Stage and apply an edge of a flow."""
    found = await engine.describe_flow(flow_id)
    assert found is not None
    edge: dict[str, Any] = {
        "edge_id": uuid4(),
        "upstream_execution_id": upstream,
        "downstream_execution_id": downstream,
    }
    staged = await engine.stage_dependency_edge(flow_id, expected_graph_revision=found.graph_revision, **edge)
    await engine.apply_dependency_to_child(flow_id, graph_revision=staged.new_graph_revision, **edge)


def partition_of(engine: Engine, flow_id: FlowId) -> int:
    """The partition of a flow."""
    return flow_partition(flow_id, parts_of(engine).store.rules.partitions.flow)


def stop_cascade(engine: Engine) -> None:
    """Leave the ends of members queued until the test settles them."""
    parts_of(engine).wakeups.on_members_ended = None


async def settle(engine: Engine, flow_id: FlowId) -> None:
    """Settle the queued ends of members of a flow."""
    await parts_of(engine).cascade.drain()
    await parts_of(engine).cascade.settle_flow(partition_of(engine, flow_id), flow_id)

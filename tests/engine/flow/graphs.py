"""A flow that a test builds step by step."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from engine.flows import partition_of
from fixtures import Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import DependencyApplied, EdgePolicy
from flowfabric.model.flow import Added, FlowCreated
from flowfabric.model.ids import EdgeId, ExecutionId, FlowId, mint_for_flow

WAITS = "runnable/unowned/blocked_by_dependencies/waiting_for_children/none/pending_first_attempt/waiting_children"
PARKED_FOR_CHILDREN = (
    "runnable/unowned/blocked_by_dependencies/waiting_for_children/none/attempt_interrupted/waiting_children"
)


@dataclass
class BuiltFlow:
    """A flow in the namespace `tests`, with the calls that extend it."""

    given: Given
    rows: Rows
    flow_id: FlowId

    @classmethod
    async def create(cls, given: Given, rows: Rows, *, namespace: str = "tests") -> "BuiltFlow":
        """A new empty flow."""
        flow_id = FlowId(uuid4())
        assert isinstance(await given.engine.create_flow(flow_id, flow_kind="dag", namespace=namespace), FlowCreated)
        return cls(given, rows, flow_id)

    @property
    def engine(self) -> Engine:
        """The engine of the flow."""
        return self.given.engine

    async def row(self) -> dict[str, Any]:
        """The row of the flow."""
        (row,) = await self.rows.of("flow", flow_id=self.flow_id)
        return row

    async def revision(self) -> int:
        """The graph revision."""
        found = await self.engine.describe_flow(self.flow_id)
        assert found is not None
        return found.graph_revision

    def mint(self) -> ExecutionId:
        """An id in the partition of the flow."""
        return mint_for_flow(self.flow_id, parts_of(self.engine).store.rules.partitions)

    async def outside(self, **overrides: Any) -> ExecutionId:
        """A new execution that could be a member but is not."""
        return await self.given.created(execution_id=self.mint(), **overrides)

    async def add(self, execution_id: ExecutionId) -> ExecutionId:
        """Make an execution a member."""
        assert isinstance(await self.engine.add_execution_to_flow(self.flow_id, execution_id), Added)
        return execution_id

    async def member(self, **overrides: Any) -> ExecutionId:
        """A new member; the overrides are arguments of create_execution."""
        return await self.add(await self.outside(**overrides))

    async def members(self, count: int, **overrides: Any) -> list[ExecutionId]:
        """New members."""
        return [await self.member(**overrides) for _ in range(count)]

    async def stage(self, upstream: str, downstream: str, **overrides: Any) -> EdgeId:
        """Stage an edge at the current revision, and return its id."""
        edge_id = EdgeId(UUID(str(overrides.pop("edge_id", uuid4()))))
        if "expected_graph_revision" not in overrides:
            overrides["expected_graph_revision"] = await self.revision()
        await self.engine.stage_dependency_edge(
            self.flow_id,
            edge_id=edge_id,
            upstream_execution_id=upstream,
            downstream_execution_id=downstream,
            **overrides,
        )
        return edge_id

    async def apply(self, edge_id: EdgeId, upstream: str, downstream: str, **overrides: Any) -> Any:
        """Apply a staged edge."""
        if "graph_revision" not in overrides:
            overrides["graph_revision"] = await self.revision()
        return await self.engine.apply_dependency_to_child(
            self.flow_id,
            edge_id=edge_id,
            upstream_execution_id=upstream,
            downstream_execution_id=downstream,
            **overrides,
        )

    async def connect(self, upstream: str, downstream: str, **overrides: Any) -> EdgeId:
        """Stage and apply an edge."""
        edge_id = await self.stage(upstream, downstream, **overrides)
        assert isinstance(await self.apply(edge_id, upstream, downstream), DependencyApplied)
        return edge_id

    async def settle(self) -> None:
        """Settle the queued ends of the members."""
        await parts_of(self.engine).cascade.settle_flow(partition_of(self.engine, self.flow_id), self.flow_id)

    async def policy(self, downstream: str, policy: EdgePolicy | dict[str, object]) -> Any:
        """Set the policy of a group."""
        return await self.engine.set_edge_group_policy(self.flow_id, downstream, policy)

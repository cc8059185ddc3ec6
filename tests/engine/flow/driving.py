"""A submitted flow whose members a test runs one by one, by their names."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from engine.flow.submitting import submitted
from engine.grants import claim_granted, claim_resumed, issue_grant
from fixtures import Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Cancelled
from flowfabric.model.flow import FlowEdge, FlowNode, FlowSubmitted
from flowfabric.model.handle import Handle
from flowfabric.model.ids import EdgeId, ExecutionId, FlowId


@dataclass
class DrivenFlow:
    """A flow, its members by name, and the leases that the test holds."""

    engine: Engine
    rows: Rows
    answer: FlowSubmitted
    pairs: str = ""
    handles: dict[str, Handle] = field(default_factory=dict)

    @classmethod
    async def submit(
        cls,
        engine: Engine,
        rows: Rows,
        names: str | Sequence[FlowNode],
        pairs: str | Sequence[FlowEdge] = "",
        **overrides: Any,
    ) -> "DrivenFlow":
        """Submit a flow; edges are written as `a>b b>c`."""
        written = pairs if isinstance(pairs, str) else " ".join(f"{edge.upstream}>{edge.downstream}" for edge in pairs)
        return cls(engine, rows, await submitted(engine, names, pairs, **overrides), written)

    @property
    def flow_id(self) -> FlowId:
        """The id of the flow."""
        return self.answer.flow_id

    def id(self, name: str) -> ExecutionId:
        """The execution of a node."""
        return self.answer.execution_ids[name]

    def edge(self, pair: str) -> EdgeId:
        """The id of the edge that was written like this."""
        return self.answer.edge_ids[self.pairs.split().index(pair)]

    async def connect(self, pair: str) -> None:
        """Stage and apply an edge written as `a>b`."""
        found = await self.engine.describe_flow(self.flow_id)
        assert found is not None
        upstream, downstream = pair.split(">")
        ends: dict[str, Any] = {
            "edge_id": uuid4(),
            "upstream_execution_id": self.id(upstream),
            "downstream_execution_id": self.id(downstream),
        }
        revision = found.graph_revision
        staged = await self.engine.stage_dependency_edge(self.flow_id, **ends, expected_graph_revision=revision)
        await self.engine.apply_dependency_to_child(self.flow_id, **ends, graph_revision=staged.new_graph_revision)

    async def claim(self, name: str) -> Handle:
        """Claim the execution of a node, which must be claimable."""
        if (await self.states())[name] == "resumable":
            claimed = await claim_resumed(self.engine, self.id(name))
        else:
            await issue_grant(self.engine, self.id(name))
            claimed = await claim_granted(self.engine, self.id(name))
        handle: Handle = claimed.handle
        self.handles[name] = handle
        return handle

    async def succeed(self, name: str, result: bytes | None = b'"done"') -> None:
        """Run a node to success, and settle what follows."""
        handle = self.handles.pop(name, None) or await self.claim(name)
        await self.engine.complete(handle, result)
        await self.settle()

    async def fail(self, name: str) -> None:
        """Run a node to a final failure, and settle what follows."""
        handle = self.handles.pop(name, None) or await self.claim(name)
        await self.engine.fail(handle, reason="no luck", classification="permanent")
        await self.settle()

    async def cancel(self, name: str) -> None:
        """Cancel a node, and settle what follows."""
        answer = await self.engine.cancel_execution(execution_id=self.id(name), reason="not wanted")
        assert isinstance(answer, Cancelled)
        await self.settle()

    async def settle(self) -> None:
        """Wait until this engine has settled what it queued."""
        parts = parts_of(self.engine)
        await parts.cascade.drain()
        await parts.siblings.drain()
        await parts.cascade.drain()

    async def states(self) -> dict[str, str]:
        """The public states of the nodes."""
        found = await self.rows.of("execution", flow_id=self.flow_id)
        by_id = {str(row["execution_id"]): row["public_state"] for row in found}
        return {
            name: by_id[uuid_of(each)] for name, each in self.answer.execution_ids.items() if uuid_of(each) in by_id
        }

    async def row(self, name: str) -> dict[str, Any]:
        """The row of a node."""
        return await self.rows.execution(self.id(name))

    async def group(self, name: str) -> dict[str, Any]:
        """The group of the edges that enter a node."""
        (row,) = await self.rows.of("edge_group", downstream_id=uuid_of(self.id(name)))
        return row

    async def counts(self, name: str) -> tuple[str, int, int, int]:
        """The state of a group and how many of its edges succeeded, failed and were skipped."""
        row = await self.group(name)
        return row["group_state"], row["succeeded_count"], row["failed_count"], row["skipped_count"]

    async def outcomes(self, name: str) -> list[tuple[str, int]]:
        """The ends of a node on the completion feed, as kind and outcome."""
        events = await self.rows.events(self.id(name))
        return [(row["kind"], row["outcome"]) for row in events if row["outcome"] is not None]

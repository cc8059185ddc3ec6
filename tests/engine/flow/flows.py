"""Flows that a test cancels, with members in any state."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

from engine.waits import suspend_args
from fixtures import Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.flow import FlowEdge, FlowNode
from flowfabric.model.ids import ExecutionId, FlowId, flow_partition, format_execution_id, mint_for_flow

LOCK_SUSPENSION = "select from suspension where execution_id = $1 for update"
"""A cancel needs this row, the header does not."""


class Flow:
    """A flow in the namespace `tests`, and executions that join it."""

    def __init__(self, given: Given, flow_id: FlowId) -> None:
        self.flow_id = flow_id
        self._given = given
        self._partitions = parts_of(given.engine).store.rules.partitions

    @property
    def engine(self) -> Engine:
        """The engine under test."""
        return self._given.engine

    @property
    def partition(self) -> int:
        """The partition of the flow."""
        return flow_partition(self.flow_id, self._partitions.flow)

    async def add(self, *execution_ids: ExecutionId) -> None:
        """Make executions members of the flow."""
        for each in execution_ids:
            await self.engine.add_execution_to_flow(self.flow_id, each)

    def mint(self) -> ExecutionId:
        """An id for a member."""
        return mint_for_flow(self.flow_id, self._partitions)

    async def member(self, make: Callable[..., Awaitable[Any]] | None = None, **overrides: Any) -> Any:
        """What `make`, by default `given.created`, returns for a new member."""
        execution_id = self.mint()
        made = await (make or self._given.created)(execution_id=execution_id, **overrides)
        await self.add(execution_id)
        return made

    async def members(self, count: int, **overrides: Any) -> list[ExecutionId]:
        """New members that wait for a worker, in ascending order."""
        return sorted([await self.member(**overrides) for _ in range(count)])

    async def cancel(self, policy: str = "cancel_all", **overrides: Any) -> Any:
        """Cancel the flow and its members."""
        return await self.engine.cancel_flow(self.flow_id, reason="not wanted", cancellation_policy=policy, **overrides)

    async def cancel_header(self, policy: str = "cancel_all", **overrides: Any) -> Any:
        """Cancel the flow, and leave its members to somebody else."""
        return await self.engine.cancel_flow_header(
            self.flow_id, reason="not wanted", cancellation_policy=policy, **overrides
        )

    async def states(self, rows: Rows) -> dict[ExecutionId, str]:
        """The public states of the members, by execution id."""
        found = await rows.of("execution", flow_id=self.flow_id)
        return {format_execution_id(row["partition_key"], row["execution_id"]): row["public_state"] for row in found}


async def new_flow(given: Given) -> Flow:
    """A new flow without members."""
    flow = Flow(given, FlowId(uuid4()))
    await given.engine.create_flow(flow.flow_id, flow_kind="dag", namespace="tests")
    return flow


async def submitted_flow(given: Given, count: int, edges: Sequence[tuple[str, str]] = ()) -> Flow:
    """A new flow with this many members, named by their numbers, and edges between them."""
    flow = Flow(given, FlowId(uuid4()))
    nodes = [
        FlowNode(name=str(n), lane_id="default", execution_kind="job", input_payload=b"{}", creator_identity="test")
        for n in range(count)
    ]
    await given.engine.submit_flow(
        flow_kind="dag",
        namespace="tests",
        nodes=nodes,
        flow_id=flow.flow_id,
        edges=[FlowEdge(upstream=upstream, downstream=downstream) for upstream, downstream in edges],
    )
    return flow


async def owed(rows: Rows, flow_id: UUID) -> list[str]:
    """The UUIDs of the members that a flow still owes, in ascending order."""
    return sorted(str(row["execution_id"]) for row in await rows.of("cancel_backlog_member", flow_id=flow_id))


def uuids(execution_ids: Sequence[str]) -> list[str]:
    """The UUIDs of executions, in ascending order."""
    return sorted(uuid_of(each) for each in execution_ids)


async def drained(engine: Engine) -> None:
    """Wait until the members of all flows that the engine has cancelled are cancelled."""
    await parts_of(engine).flow_cancel.drain()


async def nothing_owed(rows: Rows) -> None:
    """Check that no flow owes anything."""
    assert await rows.of("cancel_backlog") == []
    assert await rows.of("cancel_backlog_member") == []


async def is_settled(rows: Rows, flow: Flow) -> bool:
    """Whether the cascade has counted every member of a flow as ended."""
    (row,) = await rows.of("flow", flow_id=flow.flow_id)
    return (row["live_count"], row["derived_state"]) == (0, "failed")


async def suspended_among(flow: Flow, given: Given, count: int) -> tuple[ExecutionId, list[ExecutionId]]:
    """A suspended member, and all members of a flow: it and this many others."""
    handle = await flow.member(given.claimed, lane_id="suspended")
    await given.engine.suspend(handle, suspend_args())
    others = await flow.members(count)
    return handle.execution_id, sorted([handle.execution_id, *others])


async def cancel_owed(engine: Engine, flow: Flow, members: list[ExecutionId]) -> list[ExecutionId]:
    """Cancel members as a dispatch does; return those that failed."""
    return await parts_of(engine).cancel_backlog.dispatch(flow.partition, flow.flow_id, members, "not wanted")

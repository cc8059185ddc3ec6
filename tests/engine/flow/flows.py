"""Flows for tests of cancellation, with members in any state."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

from fixtures import Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.ids import ExecutionId, FlowId, Partitions, flow_partition, mint_for_flow

PARTITIONS = Partitions(flow=256, budget=32, quota=32)


class Flow:
    """A flow, and executions that join it."""

    def __init__(self, given: Given, flow_id: FlowId) -> None:
        self.flow_id = flow_id
        self.partition = flow_partition(flow_id, PARTITIONS.flow)
        self._given = given

    @property
    def engine(self) -> Engine:
        """The engine under test."""
        return self._given.engine

    def new_id(self) -> ExecutionId:
        """An id for a member."""
        return mint_for_flow(self.flow_id, PARTITIONS)

    async def add(self, *execution_ids: ExecutionId) -> None:
        """Make executions members of the flow."""
        for each in execution_ids:
            await self.engine.add_execution_to_flow(self.flow_id, each)

    async def member(self, make: Callable[..., Awaitable[Any]] | None = None, **overrides: Any) -> Any:
        """What `make`, by default `given.created`, returns for a new member."""
        execution_id = self.new_id()
        made = await (make or self._given.created)(execution_id=execution_id, **overrides)
        await self.add(execution_id)
        return made

    async def members(self, count: int, **overrides: Any) -> list[ExecutionId]:
        """New members that wait for a worker, in ascending order."""
        return sorted([await self.member(**overrides) for _ in range(count)])

    async def cancel(self, policy: str = "cancel_all", **overrides: Any) -> Any:
        """Cancel the flow and its members."""
        return await self.engine.cancel_flow(
            flow_id=self.flow_id, reason="not wanted", cancellation_policy=policy, **overrides
        )

    async def cancel_header(self, policy: str = "cancel_all", **overrides: Any) -> Any:
        """Cancel the flow, and leave its members to somebody else."""
        return await self.engine.cancel_flow_header(
            flow_id=self.flow_id, reason="not wanted", cancellation_policy=policy, **overrides
        )

    async def states(self, rows: Rows) -> dict[str, str]:
        """The public states of the members, by execution id."""
        found = await rows.of("execution", flow_id=self.flow_id)
        return {f"{{fp:{row['partition_key']}}}:{row['execution_id']}": row["public_state"] for row in found}


async def new_flow(given: Given) -> Flow:
    """A new flow without members."""
    flow = Flow(given, FlowId(uuid4()))
    await given.engine.create_flow(flow.flow_id, flow_kind="dag", namespace="tests")
    return flow


async def owed(rows: Rows, flow_id: UUID) -> list[str]:
    """The UUIDs of the members that a flow still owes, in ascending order."""
    return sorted(str(row["execution_id"]) for row in await rows.of("cancel_backlog_member", flow_id=flow_id))


def uuids(execution_ids: Sequence[str]) -> list[str]:
    """The UUIDs of executions, in ascending order."""
    return sorted(uuid_of(each) for each in execution_ids)

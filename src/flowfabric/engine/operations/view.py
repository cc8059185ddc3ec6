"""Reads, and operations on the store itself."""

from flowfabric.engine.families import Families
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import (
    Applied,
    Ended,
    ExecutionInfo,
    NoOp,
)
from flowfabric.model.states import LaneState, PublicState


class ViewOperations(Families):
    """Reads, and operations on the store itself."""

    async def read_execution_state(self, execution_id: ExecutionId | str) -> PublicState | None:
        """The public state of an execution."""
        return await self._view.state(execution_id)

    async def read_execution_info(self, execution_id: ExecutionId | str) -> ExecutionInfo | None:
        """What an operator sees of an execution."""
        return await self._view.info(execution_id)

    async def get_execution_result(self, execution_id: ExecutionId | str) -> bytes | None:
        """The result of a completed execution."""
        return await self._view.result(execution_id)

    async def wait_for_ending(self, execution_id: ExecutionId | str, *, timeout: float | None = None) -> Ended:
        """How an execution ended, as soon as it has."""
        return await self._view.wait_for_ending(execution_id, timeout)

    async def set_lane_state(self, lane_id: str, state: LaneState | str) -> None:
        """Change what a lane accepts: submissions, claims, both or neither."""
        await self._lanes.set_state(lane_id, state)

    async def server_time_ms(self) -> int:
        """The store's wall clock in milliseconds."""
        return await self._view.clock()

    async def ping(self) -> None:
        """One round trip to the store."""
        await self._view.clock()

    async def prepare(self) -> NoOp | Applied:
        """Bring the store to where this code can run on it."""
        return await self._boot.prepare()

    def backend_label(self) -> str:
        """What this engine stores in."""
        return "postgres"

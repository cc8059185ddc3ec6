"""Reads, and operations on the store itself."""

from collections.abc import Iterable
from uuid import UUID

from flowfabric.engine.families import Families
from flowfabric.model.ids import ExecutionId, FlowId, Namespace
from flowfabric.model.outcomes import (
    Applied,
    Ended,
    ExecutionInfo,
    NoOp,
)
from flowfabric.model.snapshots import (
    Attempt,
    ExecutionContext,
    ExecutionPage,
    ExecutionSnapshot,
    Inconsistency,
    LanePage,
)
from flowfabric.model.states import LaneState, PublicState
from flowfabric.model.support import Capabilities, capabilities_of, identify
from flowfabric.version import __version__

STAGE = "alpha"


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

    async def describe_execution(self, execution_id: ExecutionId | str) -> ExecutionSnapshot | None:
        """An execution as it stands, with its lease and its tags."""
        return await self._view.describe(execution_id)

    async def read_execution_context(self, execution_id: ExecutionId | str) -> ExecutionContext:
        """What the handler of a claimed execution works from."""
        return await self._view.context(execution_id)

    async def read_current_attempt_index(self, execution_id: ExecutionId | str) -> int:
        """The index of the latest attempt, 0 before the first claim."""
        return await self._view.attempt_index(execution_id)

    async def read_total_attempt_count(self, execution_id: ExecutionId | str) -> int:
        """How many attempts were made so far."""
        return await self._view.attempt_count(execution_id)

    async def read_exec_core_fields(
        self, execution_id: ExecutionId | str, names: Iterable[str]
    ) -> dict[str, str | None]:
        """Fields of an execution as texts, by their names."""
        return await self._view.fields(execution_id, names)

    async def resolve_execution_flow_id(self, execution_id: ExecutionId | str) -> FlowId | None:
        """The flow an execution belongs to."""
        return await self._view.flow_id(execution_id)

    async def get_execution_namespace(self, execution_id: ExecutionId | str) -> Namespace | None:
        """The namespace of an execution."""
        return await self._view.namespace(execution_id)

    async def list_attempts(self, execution_id: ExecutionId | str) -> list[Attempt]:
        """The attempts of an execution in order, the running one included."""
        return await self._view.attempts(execution_id)

    async def list_executions(
        self,
        *,
        namespace: str | Iterable[str] | None = None,
        lane_id: str | Iterable[str] | None = None,
        public_state: PublicState | str | Iterable[PublicState | str] | None = None,
        execution_kind: str | Iterable[str] | None = None,
        tag: tuple[str, str] | None = None,
        flow_id: UUID | str | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
        completed_after: int | None = None,
        completed_before: int | None = None,
        order: str = "newest",
        cursor: str | None = None,
        limit: int = 50,
    ) -> ExecutionPage:
        """A page of the executions that meet every filter, in the order of their creation."""
        return await self._listing.list_executions(
            namespace=namespace,
            lane_id=lane_id,
            public_state=public_state,
            execution_kind=execution_kind,
            tag=tag,
            flow_id=flow_id,
            created_after=created_after,
            created_before=created_before,
            completed_after=completed_after,
            completed_before=completed_before,
            order=order,
            cursor=cursor,
            limit=limit,
        )

    async def find_inconsistencies(self, *, limit: int = 1000) -> list[Inconsistency]:
        """What stored rows say that no operation can have brought about."""
        return await self._consistency.find(limit)

    async def wait_for_ending(self, execution_id: ExecutionId | str, *, timeout: float | None = None) -> Ended:
        """How an execution ended, as soon as it has."""
        return await self._results.wait(execution_id, timeout)

    async def set_lane_state(self, lane_id: str, state: LaneState | str) -> None:
        """Change what a lane accepts: submissions, claims, both or neither."""
        await self._lanes.set_state(lane_id, state)

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 100) -> LanePage:
        """A page of the lanes by name, behind the one the cursor names."""
        return await self._lanes.page(cursor, limit)

    async def server_time_ms(self) -> int:
        """The store's wall clock in milliseconds."""
        return await self._view.clock()

    async def ping(self) -> None:
        """One round trip to the store."""
        await self._view.clock()

    async def prepare(self) -> NoOp | Applied:
        """Bring the store to where this code can run on it."""
        return await self._lifecycle.prepare()

    def backend_label(self) -> str:
        """What this engine stores in."""
        return "postgres"

    def capabilities(self) -> Capabilities:
        """Which backend this is and what it offers."""
        identity = identify(self.backend_label(), __version__, STAGE)
        return capabilities_of(identity, lambda operation: hasattr(type(self), operation))

    async def shutdown_prepare(self, grace_ms: int) -> None:
        """Send away who waits, refuse new waits, and answer what is under way within the grace."""
        await self._shutdown.prepare(grace_ms)

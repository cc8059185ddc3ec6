"""Operations that let a run wait for signals, and those on the waitpoints it waits on."""

from uuid import UUID

from flowfabric.engine.families import Families
from flowfabric.model.handle import Handle
from flowfabric.model.outcomes import AlreadyMet
from flowfabric.model.suspension import SuspendArgs
from flowfabric.model.tokens import WaitpointToken
from flowfabric.model.waits import (
    AlreadyClosed,
    Closed,
    CloseReason,
    PendingWaitpoint,
    Suspended,
    SuspendedPage,
    WaitpointPage,
)


class SuspendOperations(Families):
    """Operations that let a run wait for signals, and those on the waitpoints it waits on."""

    async def suspend(self, handle: Handle, args: SuspendArgs) -> Suspended | AlreadyMet:
        """Give up the lease and wait until the condition is met; where it is met already the lease is kept."""
        return await self._suspend.suspend(handle, args)

    async def suspend_by_triple(
        self,
        *,
        execution_id: str,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
        args: SuspendArgs,
    ) -> Suspended | AlreadyMet:
        """Suspend a run on behalf of whoever holds its fence."""
        return await self._suspend.suspend_by_triple(execution_id, (lease_id, lease_epoch, attempt_id), args)

    async def create_waitpoint(
        self, handle: Handle, *, waitpoint_key: str, expires_in_ms: int, waitpoint_id: UUID | str | None = None
    ) -> PendingWaitpoint:
        """Make a waitpoint ahead of a suspend, so that signals may come before it; the lease is kept.

        A caller that names the id may repeat the call: it gets the same waitpoint.
        """
        return await self._waitpoints.create(handle, waitpoint_key, expires_in_ms, waitpoint_id)

    async def close_waitpoint(
        self, *, execution_id: str, waitpoint_id: UUID | str, reason: str = CloseReason.PROACTIVE_CLOSE
    ) -> Closed | AlreadyClosed:
        """Let a waitpoint take no more signals; no execution resumes by it."""
        return await self._waitpoints.close(execution_id, waitpoint_id, reason)

    async def read_waitpoint_token(self, *, execution_id: str, waitpoint_id: UUID | str) -> WaitpointToken | None:
        """The token of a waitpoint that takes signals, for callers who may be trusted with it; else None."""
        return await self._waitpoints.token(execution_id, waitpoint_id)

    async def list_pending_waitpoints(
        self, *, execution_id: str, after: UUID | str | None = None, limit: int | None = 100
    ) -> WaitpointPage:
        """The waitpoints of an execution that take signals, by id, without their tokens."""
        return await self._waitpoints.list_pending(execution_id, after, limit)

    async def list_suspended(
        self,
        *,
        namespace: str | None = None,
        lane_id: str | None = None,
        reason: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> SuspendedPage:
        """The executions that wait, those that wait longest first."""
        return await self._waitpoints.list_suspended(namespace, lane_id, reason, cursor, limit)

"""Operations on leases."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.engine.core.row import GivenFence
from flowfabric.engine.families import Families
from flowfabric.engine.lease.claim import DEFAULT_LEASE_TTL_MS
from flowfabric.engine.lease.claim_named import Lease
from flowfabric.engine.lease.expire import DEFAULT_LISTED
from flowfabric.engine.lease.grant import Grantee
from flowfabric.engine.lease.renew import DEFAULT_HISTORY_GRACE_MS
from flowfabric.model.errors import EngineError
from flowfabric.model.grants import (
    DEFAULT_GRANT_TTL_MS,
    Granted,
    GrantNotFound,
    NotReclaimable,
    ReclaimCapExceeded,
)
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import (
    AlreadySatisfied,
    ClaimedExecution,
    ExpiredLeaseCursor,
    ExpiredLeases,
    Marked,
    Renewed,
)


class LeaseOperations(Families):
    """Operations on leases."""

    async def renew(self, handle: Handle) -> Renewed:
        """Extend a lease by the time its handle holds."""
        return await self._renewals.renew(handle)

    async def renew_many(self, handles: Sequence[Handle]) -> list[Renewed | EngineError]:
        """Extend up to a thousand leases in one statement, each with its own verdict."""
        return await self._renewals.renew_many(handles)

    async def renew_lease(
        self,
        *,
        execution_id: ExecutionId | str,
        attempt_index: int,
        lease_ttl_ms: int,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
        lease_history_grace_ms: int = DEFAULT_HISTORY_GRACE_MS,
    ) -> Renewed:
        """Extend a lease by a time on behalf of whoever holds its fence."""
        given = GivenFence.read(lease_id, lease_epoch, attempt_id, attempt_index)
        return await self._renewals.renew_lease(execution_id, given, lease_ttl_ms, lease_history_grace_ms)

    async def mark_lease_expired_if_due(self, execution_id: ExecutionId | str) -> Marked | AlreadySatisfied:
        """Mark the lease of an execution as expired, where its time is up, so that the next claim takes it."""
        return await self.lease_expiry.mark_if_due(execution_id)

    async def list_expired_leases(
        self,
        *,
        as_of: int | None = None,
        after: ExpiredLeaseCursor | tuple[int, str] | None = None,
        limit: int = DEFAULT_LISTED,
        namespace: str | None = None,
    ) -> ExpiredLeases:
        """Leases that end by a time, marked or not, in the order of their end; a cursor leads to the next page."""
        return await self.lease_expiry.list_expired(as_of, after, limit, namespace)

    async def issue_reclaim_grant(
        self,
        *,
        execution_id: ExecutionId | str,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str,
        grant_ttl_ms: int = DEFAULT_GRANT_TTL_MS,
        worker_capabilities: Sequence[str] = (),
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> Granted | NotReclaimable | ReclaimCapExceeded:
        """Reserve an execution whose lease was lost for a worker; one that was lost too often ends here."""
        grantee = Grantee.of(
            worker_id, worker_instance_id, grant_ttl_ms, capability_hash, route_snapshot_json, admission_summary
        )
        return await self._reclaim.issue_reclaim_grant(execution_id, lane_id, grantee, worker_capabilities)

    async def reclaim_execution(
        self,
        *,
        execution_id: ExecutionId | str,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        lease_id: UUID | str | None = None,
        attempt_id: UUID | str | None = None,
        capability_hash: str | None = None,
        attempt_policy_json: str | None = None,
        max_reclaim_count: int | None = None,
        old_worker_instance_id: str | None = None,
        current_attempt_index: int | None = None,
    ) -> ClaimedExecution | NotReclaimable | GrantNotFound | ReclaimCapExceeded:
        """Take a lost lease by the reclaim grant its worker has, as a new attempt.

        `capability_hash`, `old_worker_instance_id` and `current_attempt_index` are what the caller believes of the
        execution: the stored row decides.
        """
        _ = capability_hash, old_worker_instance_id
        lease = Lease.of(
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            lease_id=lease_id,
            attempt_id=attempt_id,
            attempt_policy_json=attempt_policy_json,
            attempt_index=current_attempt_index,
        )
        return await self._reclaim.reclaim_execution(execution_id, lane_id, lease, max_reclaim_count)

"""Operations that lease executions to workers."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.engine.families import Families
from flowfabric.engine.lease.claim import DEFAULT_LEASE_TTL_MS
from flowfabric.engine.lease.claim_named import Lease
from flowfabric.engine.lease.grant import Grantee
from flowfabric.model.grants import DEFAULT_GRANT_TTL_MS, Granted, GrantedClaim, NoWork, ResumeToken
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.outcomes import (
    ClaimedExecution,
)


class ClaimOperations(Families):
    """Operations that lease executions to workers."""

    async def claim(
        self,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> Handle | None:
        """Lease the best claimable execution of a lane; None when there is none within the wait.

        Kinds and a namespace, where given, are all that is taken.
        """
        claimed = await self.claim_many(
            lanes=(lane_id,),
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            kinds=kinds,
            namespace=namespace,
            lease_ttl_ms=lease_ttl_ms,
            limit=1,
            max_wait_ms=max_wait_ms,
        )
        return claimed[0].handle if claimed else None

    async def claim_many(
        self,
        *,
        lanes: Sequence[str],
        worker_id: str,
        worker_instance_id: str,
        limit: int,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> list[ClaimedExecution]:
        """Lease up to `limit` executions of several lanes, by priority, then age; empty when there are none.

        Kinds and a namespace, where given, are all that is taken.
        """
        return await self._claim.claim_many(
            lanes=lanes,
            capabilities=capabilities,
            kinds=kinds,
            namespace=namespace,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            limit=limit,
            max_wait_ms=max_wait_ms,
        )

    async def claim_for_worker(
        self,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        grant_ttl_ms: int = DEFAULT_GRANT_TTL_MS,
    ) -> Granted | NoWork:
        """Reserve for a worker what a claim of a lane would take; `claim_execution` then leases it."""
        grantee = Grantee.of(worker_id, worker_instance_id, grant_ttl_ms)
        return await self._grants.claim_for_worker(lane_id, grantee, worker_capabilities, kinds, namespace)

    async def scan_eligible_executions(self, *, lane_id: str, limit: int = 100) -> list[ExecutionId]:
        """The executions of a lane that wait for a worker and are granted to none, in the order of claims."""
        return await self._grants.scan_eligible(lane_id, limit)

    async def issue_claim_grant(
        self,
        *,
        execution_id: str,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Sequence[str] = (),
        grant_ttl_ms: int = DEFAULT_GRANT_TTL_MS,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> Granted:
        """Reserve a named execution for a worker."""
        grantee = Grantee.of(
            worker_id, worker_instance_id, grant_ttl_ms, capability_hash, route_snapshot_json, admission_summary
        )
        return await self._grants.issue_claim_grant(execution_id, lane_id, grantee, worker_capabilities)

    async def claim_execution(
        self,
        *,
        execution_id: str,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        lease_id: UUID | str | None = None,
        attempt_id: UUID | str | None = None,
        expected_attempt_index: int | None = None,
        attempt_policy_json: str | None = None,
        attempt_timeout_ms: int | None = None,
        execution_deadline_at: int | None = None,
    ) -> ClaimedExecution:
        """Lease an execution by the grant its worker has, which is consumed."""
        lease = Lease.of(
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            lease_id=lease_id,
            attempt_id=attempt_id,
            attempt_policy_json=attempt_policy_json,
            attempt_timeout_ms=attempt_timeout_ms,
            execution_deadline_at=execution_deadline_at,
            attempt_index=expected_attempt_index,
        )
        return await self._named_claims.claim_execution(execution_id, lane_id, lease)

    async def claim_resumed_execution(
        self,
        *,
        execution_id: str,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str,
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        lease_id: UUID | str | None = None,
        current_attempt_index: int | None = None,
        remaining_attempt_timeout_ms: int | None = None,
    ) -> ClaimedExecution:
        """Lease an execution whose attempt was put aside and may go on; no grant is needed."""
        lease = Lease.of(
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            lease_id=lease_id,
            attempt_timeout_ms=remaining_attempt_timeout_ms,
            attempt_index=current_attempt_index,
        )
        return await self._named_claims.claim_resumed_execution(execution_id, lane_id, lease)

    async def claim_from_resume_grant(self, token: ResumeToken) -> Handle | None:
        """Lease an execution whose attempt may go on by a grant; None when it cannot go on any more."""
        return await self._named_claims.claim_from_resume_grant(token)

    async def issue_grant_and_claim(self, *, execution_id: str, lane_id: str, lease_duration_ms: int) -> GrantedClaim:
        """Lease a named execution without a worker, for an operator."""
        return await self._named_claims.issue_grant_and_claim(execution_id, lane_id, lease_duration_ms)

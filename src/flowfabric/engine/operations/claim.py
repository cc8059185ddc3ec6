"""Operations that lease executions to workers."""

from collections.abc import Sequence

from flowfabric.engine.claim import DEFAULT_LEASE_TTL_MS
from flowfabric.engine.families import Families
from flowfabric.model.handle import Handle
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
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> Handle | None:
        """Lease the best claimable execution of a lane; None when there is none within the wait."""
        claimed = await self.claim_many(
            lanes=(lane_id,),
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
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
        lease_ttl_ms: int = DEFAULT_LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> list[ClaimedExecution]:
        """Lease up to `limit` executions of several lanes, by priority, then age; empty when there are none."""
        return await self._claim.claim_many(
            lanes=lanes,
            capabilities=capabilities,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            limit=limit,
            max_wait_ms=max_wait_ms,
        )

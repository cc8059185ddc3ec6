"""Operations on the registry of workers."""

from collections.abc import Sequence

from flowfabric.engine.families import Families
from flowfabric.model.outcomes import (
    Marked,
    NotRegistered,
    Refreshed,
    Registered,
)
from flowfabric.model.snapshots import WorkerCursor, WorkerPage


class WorkerOperations(Families):
    """Operations on the registry of workers."""

    async def register_worker(
        self,
        *,
        worker_id: str,
        worker_instance_id: str,
        lanes: Sequence[str],
        liveness_ttl_ms: int,
        namespace: str,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        serves_all_namespaces: bool = False,
    ) -> Registered | Refreshed:
        """Enter a worker process into the registry, or renew its entry; without kinds it runs any."""
        return await self.workers.register(
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lanes=lanes,
            capabilities=capabilities,
            kinds=kinds,
            liveness_ttl_ms=liveness_ttl_ms,
            namespace=namespace,
            serves_all_namespaces=serves_all_namespaces,
        )

    async def heartbeat_worker(self, *, worker_instance_id: str, namespace: str) -> Refreshed | NotRegistered:
        """Keep a live registration alive."""
        return await self.workers.heartbeat(worker_instance_id, namespace)

    async def mark_worker_dead(self, *, worker_instance_id: str, namespace: str, reason: str) -> Marked | NotRegistered:
        """End a live registration; its leases are not touched."""
        return await self.workers.mark_dead(worker_instance_id, namespace, reason)

    async def list_workers(
        self, *, namespace: str | None = None, after: WorkerCursor | str | None = None, limit: int = 1000
    ) -> WorkerPage:
        """A page of the live workers by namespace and instance, behind the place of the cursor."""
        return await self.workers.page(namespace, after, limit)

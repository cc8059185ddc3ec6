"""The worker registry: the live workers with their lanes, capabilities, kinds and namespaces."""

from collections.abc import Awaitable, Callable, Sequence

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.ids import (
    LaneId,
    Namespace,
    WorkerId,
    WorkerInstanceId,
    check_lane_id,
    check_worker_id,
    worker_partition,
)
from flowfabric.model.kind import check_kinds
from flowfabric.model.lease import Marked
from flowfabric.model.policy import check_capabilities
from flowfabric.model.text import check_items, check_limit, check_range, check_short, check_text, has_control, shown
from flowfabric.model.worker import NotRegistered, Refreshed, Registered, WorkerCursor, WorkerEntry, WorkerPage

SQL = statements_beside(__file__)

MAX_REASON_BYTES = 256
SWEEP_LIMIT = 1000
MAX_TTL_MS = 2**53 - 1
MAX_LIMIT = 10_000


class Workers:
    """The operations on the worker registry."""

    def __init__(self, store: Store, on_registered: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._on_registered = on_registered

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
        """Register a worker process, or refresh its registration; without `kinds` it runs every kind."""
        lane_ids = sorted({check_lane_id(lane) for lane in check_items(lanes, "lanes")})
        if not lane_ids:
            raise error("invalid_input", "lanes: must contain at least one lane id, e.g. ['default']")
        check_range(liveness_ttl_ms, "liveness_ttl_ms", 1, MAX_TTL_MS)
        if type(serves_all_namespaces) is not bool:
            raise error(
                "invalid_input", f"serves_all_namespaces: must be True or False, got {shown(serves_all_namespaces)}"
            )
        key = self._key(worker_instance_id, namespace)
        entry: dict[str, object] = {
            **key,
            "worker_id": check_worker_id(worker_id, "worker_id"),
            "lanes": lane_ids,
            "capabilities": check_capabilities(capabilities),
            "kinds": None if kinds is None else check_kinds(kinds, least=0),
            "serves_all_namespaces": serves_all_namespaces,
            "liveness_ttl_ms": liveness_ttl_ms,
        }

        async def write(transaction: Transaction) -> list[Record]:
            held = await transaction.fetch(SQL.lock_worker, **key)
            has_expired = bool(held) and not held[0]["is_live"]
            return await transaction.fetch(SQL.insert_worker, **entry, has_expired=has_expired)

        rows = await self._store.transact(write)
        if not rows:
            raise error(
                "invalid_input",
                f"instance_id reassigned: {worker_instance_id!r} is registered by another worker_id;"
                " use another worker_instance_id, or wait until that registration expires",
            )
        await self._on_registered()
        return Registered() if rows[0]["is_fresh"] else Refreshed()

    async def heartbeat_worker(self, *, worker_instance_id: str, namespace: str) -> Refreshed | NotRegistered:
        """Extend a live registration by its time to live."""
        rows = await self._store.fetch(SQL.renew_worker, **self._key(worker_instance_id, namespace))
        return Refreshed(next_expiry_ms=rows[0]["lapses_at"]) if rows else NotRegistered()

    async def mark_worker_dead(self, *, worker_instance_id: str, namespace: str, reason: str) -> Marked | NotRegistered:
        """End a live registration; its leases are not touched."""
        check_text(reason, "reason")
        if len(reason.encode()) > MAX_REASON_BYTES:
            raise error(
                "invalid_input", f"reason: must be at most {MAX_REASON_BYTES} bytes, got {len(reason.encode())}"
            )
        if has_control(reason):
            raise error("invalid_input", f"reason: must not contain control characters, got {shown(reason)}")
        key = self._key(worker_instance_id, namespace)

        async def end(transaction: Transaction) -> bool:
            await transaction.fetch(SQL.lock_worker, **key)
            return bool(await transaction.fetch(SQL.take_worker, **key, reason=reason))

        return Marked() if await self._store.transact(end) else NotRegistered()

    async def list_workers(
        self, *, namespace: str | None = None, after: WorkerCursor | str | None = None, limit: int = 1000
    ) -> WorkerPage:
        """A page of the live workers ordered by namespace and instance, after the cursor."""
        limit = check_limit(limit, MAX_LIMIT)
        if namespace is not None:
            check_text(namespace, "namespace")
        position = _position(after, namespace)
        if limit == 0:
            return WorkerPage(entries=[], cursor=None)
        rows = await self._store.fetch(
            SQL.list_live_workers,
            namespace=namespace,
            after_namespace=position.namespace,
            after_instance=position.worker_instance_id,
            limit=limit + 1,
        )
        entries = [_entry(row) for row in rows[:limit]]
        cursor = None
        if len(rows) > limit:
            last = entries[-1]
            cursor = WorkerCursor(namespace=last.namespace, worker_instance_id=last.worker_instance_id)
        return WorkerPage(entries=entries, cursor=cursor)

    async def sweep_expired(self) -> int:
        """Delete expired registrations; return how many."""
        rows = await self._store.fetch(SQL.take_expired_workers, limit=SWEEP_LIMIT)
        swept: int = rows[0]["swept"]
        return swept

    @staticmethod
    def _key(worker_instance_id: str, namespace: str) -> dict[str, object]:
        instance = WorkerInstanceId(check_worker_id(worker_instance_id, "worker_instance_id"))
        return {
            "partition_key": worker_partition(instance),
            "namespace": check_short(namespace, "namespace"),
            "worker_instance_id": instance,
        }


def _position(after: WorkerCursor | str | None, namespace: str | None) -> WorkerCursor:
    """The position after which a page starts; within one namespace an instance id suffices."""
    match after:
        case None:
            return WorkerCursor(namespace=namespace or "", worker_instance_id="")
        case str() if namespace is not None:
            return WorkerCursor(namespace=namespace, worker_instance_id=check_text(after, "after"))
        case WorkerCursor() if namespace in (None, after.namespace):
            check_text(after.namespace, "after")
            check_text(after.worker_instance_id, "after")
            return after
        case _:
            raise error(
                "invalid_input",
                "after: must be the cursor of an earlier page, or a worker_instance_id if namespace is given,"
                f" got {shown(after)}",
            )


def _entry(row: Record) -> WorkerEntry:
    return WorkerEntry(
        namespace=Namespace(row["namespace"]),
        worker_instance_id=WorkerInstanceId(row["worker_instance_id"]),
        worker_id=WorkerId(row["worker_id"]),
        lanes=tuple(LaneId(lane) for lane in row["lanes"]),
        capabilities=tuple(row["capabilities"]),
        kinds=None if row["kinds"] is None else tuple(row["kinds"]),
        serves_all_namespaces=row["serves_all_namespaces"],
        last_heartbeat_ms=row["last_heartbeat_at"],
        liveness_ttl_ms=row["liveness_ttl_ms"],
        registered_at_ms=row["registered_at"],
    )

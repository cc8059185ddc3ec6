"""Workers: the answers of the registry, and how it lists workers."""

from dataclasses import dataclass

from flowfabric.model.ids import LaneId, Namespace, WorkerId, WorkerInstanceId


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """The worker was registered: it is new or had expired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """The worker was live, and its liveness was extended."""

    next_expiry_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRegistered:
    """There is no live worker of this name; it must register again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEntry:
    """A live worker of the registry."""

    namespace: Namespace
    worker_instance_id: WorkerInstanceId
    worker_id: WorkerId
    lanes: tuple[LaneId, ...]
    capabilities: tuple[str, ...]
    kinds: tuple[str, ...] | None
    """The kinds it runs; None means any kind."""
    serves_all_namespaces: bool
    """Whether it runs executions of every namespace, or only those of its own."""
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    registered_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCursor:
    """The last worker of a page; the next page starts after it."""

    namespace: str
    worker_instance_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPage:
    """A page of live workers; `cursor` is None on the last page."""

    entries: list[WorkerEntry]
    cursor: WorkerCursor | None

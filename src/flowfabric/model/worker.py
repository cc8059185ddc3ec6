"""Workers: what the registry answers to one, and how it lists them."""

from dataclasses import dataclass

from flowfabric.model.ids import LaneId, Namespace, WorkerId, WorkerInstanceId


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """The worker is new, or had expired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """The worker was live and stays so."""

    next_expiry_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRegistered:
    """No live worker of that name; it must register again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEntry:
    """A live worker of the registry."""

    namespace: Namespace
    worker_instance_id: WorkerInstanceId
    worker_id: WorkerId
    lanes: tuple[LaneId, ...]
    capabilities: tuple[str, ...]
    kinds: tuple[str, ...] | None
    """What it runs; None is any."""
    serves_all_namespaces: bool
    """Whether it takes the work of every namespace, or only that of its own."""
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    registered_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCursor:
    """A place in the list of workers: what follows it comes next."""

    namespace: str
    worker_instance_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPage:
    """A part of the list of live workers; `cursor` leads on where there is more."""

    entries: list[WorkerEntry]
    cursor: WorkerCursor | None

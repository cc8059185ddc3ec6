"""The options of a worker, and the checks of their values."""

from collections.abc import Iterable
from typing import TypedDict

from flowfabric.model.text import shown
from flowfabric.worker.handler import Handler


class WorkerOptions(TypedDict, total=False):
    """How a worker works, as `Worker` takes it."""

    lanes: Iterable[str]
    concurrency: int
    worker_id: str
    worker_instance_id: str
    capabilities: Iterable[str]
    lease_ttl_ms: int
    namespace: str | None
    claim_poll_interval_ms: int
    drain_seconds: float
    threads: int
    reconcile: bool


def is_handler(value: object) -> bool:
    """Whether a worker can call a value."""
    return isinstance(value, Handler) or callable(value)


def check_count(name: str, value: int, most: int | None = None) -> None:
    """Refuse what is no whole number from 1 to a limit."""
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f", at most {most}"
        raise ValueError(f"{name}: a whole number, at least 1{limit}, got {shown(value)}")

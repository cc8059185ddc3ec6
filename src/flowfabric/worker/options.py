"""The options of a worker and the checks of their values."""

from collections.abc import Iterable
from typing import TypedDict

from flowfabric.model.duration import Duration
from flowfabric.model.errors import error
from flowfabric.model.text import shown
from flowfabric.worker.handler import Handler


class WorkerOptions(TypedDict, total=False):
    """The keyword options of `fabric.worker()`, `fabric.run_worker()` and `Worker`."""

    lanes: Iterable[str]
    """The lanes to claim from; for a fabric, by default the lanes of its tasks."""
    concurrency: int
    """How many handlers run at a time; by default 64."""
    worker_id: str
    """The name that workers of one group share; by default the host name."""
    worker_instance_id: str
    """The unique name of this worker; by default made of `worker_id`, the process id and a random suffix."""
    capabilities: Iterable[str]
    """The capabilities that this worker offers; executions that require others are not claimed."""
    lease_ttl: Duration
    """How long a lease lasts without a renewal before another worker may take over; by default 30 seconds."""
    namespace: str | None
    """The namespace to claim from, or None for every namespace."""
    poll_interval: Duration
    """The longest pause between two claims while no notifications arrive; by default 1 second."""
    drain: Duration
    """How long a stop waits for running handlers before it cancels them; by default 30 seconds."""
    threads: int
    """How many `def` handlers run at a time, each in a thread; by default `concurrency`, and at most 32."""
    reconcile: bool
    """Whether it also runs the sweeps for expired leases, due retries, timeouts and retention; by default True."""


def is_handler(value: object) -> bool:
    """Whether a worker can call this value."""
    return isinstance(value, Handler) or callable(value)


def check_flag(name: str, value: object) -> bool:
    """Return the value if it is True or False."""
    if not isinstance(value, bool):
        raise error("invalid_input", f"{name}: must be True or False, got {shown(value)}")
    return value


def check_count(name: str, value: object) -> None:
    """Refuse a value that is not a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise error("invalid_input", f"{name}: must be a whole number of at least 1, got {shown(value)}")

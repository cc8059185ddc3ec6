"""The options of a worker, and the checks of their values."""

from collections.abc import Iterable
from typing import TypedDict

from flowfabric.model.duration import Duration
from flowfabric.model.errors import error
from flowfabric.model.text import shown
from flowfabric.worker.handler import Handler


class WorkerOptions(TypedDict, total=False):
    """How a worker works, as `Worker` takes it."""

    lanes: Iterable[str]
    """The lanes it claims from."""
    concurrency: int
    """How many handlers run at a time."""
    worker_id: str
    """The name of the group of workers it belongs to; the host's name when absent."""
    worker_instance_id: str
    """Its own name, unlike that of any other; made from the group's when absent."""
    capabilities: Iterable[str]
    """What it offers to executions that require capabilities."""
    lease_ttl: Duration
    """How long a lease lasts between two renewals."""
    namespace: str | None
    """The namespace it serves; None for every one."""
    poll_interval: Duration
    """The longest pause between two looks for work while no hints arrive."""
    drain: Duration
    """How long a stop waits for running handlers before it cancels them."""
    threads: int
    """How many `def` handlers run at a time."""
    reconcile: bool
    """Whether it also runs the sweeps: expired leases, due retries, timeouts, retention."""


def is_handler(value: object) -> bool:
    """Whether a worker can call a value."""
    return isinstance(value, Handler) or callable(value)


def check_count(name: str, value: object) -> None:
    """Refuse what is no whole number from 1 on."""
    if type(value) is not int or value < 1:
        raise error("invalid_input", f"{name}: must be a whole number of at least 1, got {shown(value)}")

"""The executions whose handlers run in this process, across all of its workers."""

import asyncio
import contextlib
from concurrent.futures import Future, InvalidStateError

from flowfabric.engine.lifecycle import StoreKey
from flowfabric.model.ids import ExecutionId
from flowfabric.worker.running import Running

_LATEST: dict[tuple[StoreKey, ExecutionId], Running] = {}
"""By store and execution, the latest run that has not left this process."""


def enter(store: StoreKey, running: Running) -> Running | None:
    """Record a run; return the earlier run of its execution that has not left this process, if any."""
    earlier = _LATEST.get((store, running.execution_id))
    _LATEST[store, running.execution_id] = running
    return earlier


def latest(store: StoreKey, execution_id: ExecutionId) -> Running | None:
    """Return the latest run of an execution in this process."""
    return _LATEST.get((store, execution_id))


def leave(store: StoreKey, running: Running) -> None:
    """Record that a run has left this process, and let the next run of its execution start."""
    key = (store, running.execution_id)
    if _LATEST.get(key) is running:
        earlier = running.earlier
        while earlier is not None and earlier.has_left:
            earlier = earlier.earlier
        if earlier is None:
            del _LATEST[key]
        else:
            # This run was stopped while it waited: the next one waits for the same earlier run.
            _LATEST[key] = earlier
    running.has_left = True
    if running.left is not None:
        # Cancelled already if the run that waited for it was stopped.
        with contextlib.suppress(InvalidStateError):
            running.left.set_result(None)


async def wait_for_earlier(running: Running) -> None:
    """Wait until every earlier run of the same execution has left this process."""
    while (earlier := running.earlier) is not None:
        if not earlier.has_left:
            left: Future[None] = Future()
            # Set before the second check: the earlier run may leave in another thread. Only one run waits for it.
            earlier.left = left
            if not earlier.has_left:
                await asyncio.wrap_future(left)
        # If the earlier run was stopped while it waited too, continue with the run that it waited for.
        running.earlier = earlier.earlier

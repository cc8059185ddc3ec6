"""Which executions have code running in this process, whichever worker runs them."""

import asyncio
import contextlib
from concurrent.futures import Future, InvalidStateError

from flowfabric.engine.lifecycle import StoreKey
from flowfabric.model.ids import ExecutionId
from flowfabric.worker.context import Running

_LATEST: dict[tuple[StoreKey, ExecutionId], Running] = {}
"""The latest run of each execution of a store that has not left this process."""


def enter(store: StoreKey, running: Running) -> Running | None:
    """Note that a run is in this process; answer the earlier run of its execution that has not left, if any."""
    earlier = _LATEST.get((store, running.execution_id))
    _LATEST[store, running.execution_id] = running
    return earlier


def latest(store: StoreKey, execution_id: ExecutionId) -> Running | None:
    """The latest run of an execution in this process."""
    return _LATEST.get((store, execution_id))


def leave(store: StoreKey, running: Running) -> None:
    """Note that the code of a run has left this process, and let the next run of its execution begin."""
    key = (store, running.execution_id)
    if _LATEST.get(key) is running:
        earlier = running.earlier
        while earlier is not None and earlier.has_left:
            earlier = earlier.earlier
        if earlier is None:
            del _LATEST[key]
        else:
            # It was stopped while it waited: whoever comes next waits for the same run.
            _LATEST[key] = earlier
    running.has_left = True
    if running.left is not None:
        # Cancelled where the run that waited for it was stopped.
        with contextlib.suppress(InvalidStateError):
            running.left.set_result(None)


async def earlier_has_left(running: Running) -> None:
    """Wait until no earlier run of the same execution is in this process."""
    while (earlier := running.earlier) is not None:
        if not earlier.has_left:
            left: Future[None] = Future()
            # Only the next run waits for a run, and it looks again after it has said so: runs may be of other threads.
            earlier.left = left
            if not earlier.has_left:
                await asyncio.wrap_future(left)
        # One that was stopped while it waited itself leaves its own predecessor to its successor.
        running.earlier = earlier.earlier

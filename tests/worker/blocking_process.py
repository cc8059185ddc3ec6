"""A worker process whose handlers do not stop: `python blocking_process.py <database url> <drain seconds>`."""

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

from flowfabric import Fabric
from flowfabric.worker import start, worker

LEASE_TTL_MS = 120_000
THREADS = 40
"""More than the default executor of an event loop has."""

fabric = Fabric(sys.argv[1] if __name__ == "__main__" else None)


def report_start(file: str) -> None:
    """Create a file to show that a run has started."""
    Path(file).touch()


@fabric.task
def block(file: str) -> None:
    """Block a thread for longer than any test."""
    report_start(file)
    time.sleep(600)


@fabric.task
async def ignore_cancellation(file: str) -> None:
    """Ignore every cancellation."""
    report_start(file)
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


@fabric.task
async def block_threads(file: str) -> None:
    """Block every thread that `asyncio.to_thread` has."""
    report_start(file)
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 600) for _ in range(THREADS)))


if __name__ == "__main__":
    worker.CANCEL_SECONDS = worker.CLAIM_SECONDS = 0.5
    start.LEFT_SECONDS = 0.1
    fabric.run_worker(worker_instance_id="w-1", lease_ttl=LEASE_TTL_MS / 1000, drain=float(sys.argv[2]))

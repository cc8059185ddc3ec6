"""A worker process whose handlers do not stop: `python blocking_process.py <database url> <drain seconds>`."""

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

from flowfabric import Fabric

LEASE_TTL_MS = 120_000
THREADS = 40
"""More than the default executor of an event loop has."""

fabric = Fabric(sys.argv[1] if __name__ == "__main__" else None)


def say_started(file: str) -> None:
    """Say in a file that a run has started."""
    Path(file).touch()


@fabric.task
def block(file: str) -> None:
    """Say in a file that this run has started, and do not return in the time of a test."""
    say_started(file)
    time.sleep(600)


@fabric.task
async def ignore_cancellation(file: str) -> None:
    """Say in a file that this run has started, and go on whatever happens."""
    say_started(file)
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


@fabric.task
async def block_threads(file: str) -> None:
    """Say in a file that this run has started, and block every thread that `asyncio.to_thread` has."""
    say_started(file)
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 600) for _ in range(THREADS)))


if __name__ == "__main__":
    fabric.run_worker(worker_instance_id="w-1", lease_ttl=LEASE_TTL_MS / 1000, drain=float(sys.argv[2]))

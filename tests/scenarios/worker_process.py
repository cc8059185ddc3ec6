"""A worker in a process of its own: `python worker_process.py <database url> <worker instance id>`."""

import asyncio
import sys
from pathlib import Path
from typing import TypedDict

from flowfabric import Context, Fabric

LEASE_TTL_MS = 1000


class Told(TypedDict):
    """What a run tells of itself."""

    worker: str
    attempt_index: int
    attempt_type: str


fabric = Fabric(sys.argv[1] if __name__ == "__main__" else None)


@fabric.task
async def wait_for_gate(ctx: Context, folder: str) -> Told:
    """Say in a folder that this run has started, and end when there is a file named `gate`."""
    place = Path(folder)
    (place / f"{ctx.worker_instance_id} {ctx.execution_id[-36:]}").touch()
    while not (place / "gate").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return told(ctx)


@fabric.task
async def pause(ctx: Context, seconds: float) -> Told:
    """Take a little time."""
    await asyncio.sleep(seconds)
    return told(ctx)


def told(ctx: Context) -> Told:
    """What a run knows of itself."""
    return {
        "worker": ctx.worker_instance_id,
        "attempt_index": ctx.attempt_index,
        "attempt_type": ctx.attempt_type.value,
    }


if __name__ == "__main__":
    fabric.run_worker(
        worker_id="pool", worker_instance_id=sys.argv[2], lease_ttl=LEASE_TTL_MS / 1000, concurrency=10, drain=20
    )

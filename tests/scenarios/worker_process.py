"""A worker in a process of its own, on the database of FF_DATABASE_URL: `python worker_process.py <instance id>`."""

import asyncio
import sys
from pathlib import Path
from typing import TypedDict

from flowfabric import Context, Fabric
from flowfabric.worker import start

LEASE_TTL_MS = 1000


class RunInfo(TypedDict):
    """Which worker ran an attempt, and which attempt it was."""

    worker: str
    attempt_index: int
    attempt_type: str


fabric = Fabric()


@fabric.task
async def wait_for_gate(ctx: Context, folder: str) -> RunInfo:
    """Create a file named after this run in a folder, and return when a file named `gate` is there."""
    place = Path(folder)
    (place / f"{ctx.worker_instance_id} {ctx.execution_id[-36:]}").touch()
    while not (place / "gate").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return info(ctx)


@fabric.task
async def write_until_gate(ctx: Context, folder: str) -> int:
    """Write numbers to the stream until a file named `gate` is there; return how many."""
    count = 0
    while not (Path(folder) / "gate").exists():
        await ctx.stream.write(str(count))
        count += 1
        await asyncio.sleep(0.002)
    return count


@fabric.task
async def pause(ctx: Context, seconds: float) -> RunInfo:
    """Sleep for some seconds."""
    await asyncio.sleep(seconds)
    return info(ctx)


@fabric.task
async def collect(ctx: Context, infos: list[RunInfo], folder: str) -> list[str]:
    """Write what was passed into a file named after this run, and return it when a file named `gate` is there."""
    place, names = Path(folder), [one["worker"] for one in infos]
    # Renamed once it is whole: the test may kill this process as soon as it sees the file.
    draft = place / f"{ctx.worker_instance_id}.draft"
    draft.write_text(f"{names} {ctx.attempt}")
    draft.rename(place / f"{ctx.worker_instance_id} {ctx.execution_id[-36:]}")
    while not (place / "gate").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return names


def info(ctx: Context) -> RunInfo:
    """Describe the run of a context."""
    return {
        "worker": ctx.worker_instance_id,
        "attempt_index": ctx.attempt_index,
        "attempt_type": ctx.attempt_type.value,
    }


def run(name: str) -> None:
    """Run a worker until it is told to stop; it tries again soon if the server does not answer."""
    start.WAIT_SECONDS = (0.02, 0.2)
    fabric.run_worker(
        worker_id="pool", worker_instance_id=name, lease_ttl=LEASE_TTL_MS / 1000, concurrency=10, drain=20
    )


if __name__ == "__main__":
    run(sys.argv[1])

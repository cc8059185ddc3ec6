"""A worker process of its own: `python service.py worker` works until SIGTERM, `python service.py` asks it to."""

import asyncio
import sys

from flowfabric import Fabric

fabric = Fabric(lane="service")


@fabric.task(retries=2)
async def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


async def submit() -> None:
    """Submit from another process, and wait there."""
    async with fabric:
        print(await (await shout.submit("hello")).result(timeout=30))


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        fabric.run_worker(concurrency=16)
    else:
        asyncio.run(submit())

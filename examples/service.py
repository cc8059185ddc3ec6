"""A worker in its own process: run `python service.py worker`, then submit to it with `python service.py`."""

import asyncio
import sys

from flowfabric import Fabric

fabric = Fabric(lane="service")


@fabric.task(retries=2)
async def shout(text: str) -> str:
    """Return the text in capital letters."""
    return text.upper()


async def submit() -> None:
    """Submit a call from this process and wait for its result."""
    async with fabric:
        print(await (await shout.submit("hello")).result(timeout=30))


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        fabric.run_worker(concurrency=16)
    else:
        asyncio.run(submit())

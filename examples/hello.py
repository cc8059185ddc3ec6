"""Submit a call, run it and read its result: all in one process, on an embedded Postgres."""

import asyncio

from flowfabric import Fabric

fabric = Fabric()


@fabric.task
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    """Submit one call and wait for its result."""
    async with fabric, fabric.worker():
        run = await add.submit(1, 2)
        print(f"{run.id} is {(await run.status()).state}")
        print(f"1 + 2 = {await run.result()}")


if __name__ == "__main__":
    asyncio.run(main())

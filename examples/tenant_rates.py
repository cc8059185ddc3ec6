"""Limits per tenant: a noisy tenant waits for itself, and the quiet one is not delayed."""

import asyncio

from flowfabric import Fabric

fabric = Fabric()
running: dict[str, int] = {}
most: dict[str, int] = {}


# Each tenant has two slots and 100 starts a minute of its own, over all workers.
@fabric.task(max_running=2, rate="100/m", per="tenant")
async def render(tenant: str, page: int) -> str:
    running[tenant] = running.get(tenant, 0) + 1
    most[tenant] = max(most.get(tenant, 0), running[tenant])
    await asyncio.sleep(0.05)
    running[tenant] -= 1
    return f"page {page}"


async def main() -> None:
    async with fabric, fabric.worker(concurrency=8):
        noisy = await render.submit_many(render.bind("noisy", page) for page in range(60))
        quiet = await render.submit("quiet", 1)
        print(await quiet.result(timeout=30))
        ended = [(await run.status()).has_ended for run in noisy]
        print(f"the quiet tenant is served while the noisy one has a queue: {ended.count(False) > 20}")
        print(f"the noisy one waits for itself: {(await noisy[-1].explain()).summary}")
        for run in noisy:
            await run.result(timeout=60)
        print(f"most at a time: {dict(sorted(most.items()))}")


if __name__ == "__main__":
    asyncio.run(main())

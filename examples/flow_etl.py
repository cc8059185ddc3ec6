"""A nightly ETL as a flow: one extraction, five transformations of its result, one load of all of theirs."""

import asyncio
from dataclasses import dataclass

from flowfabric import Fabric, all_of

fabric = Fabric(lane="etl")


@dataclass
class Order:
    """A row of the source."""

    number: int
    cents: int


@fabric.task(retries=3)
async def extract(source: str) -> list[Order]:
    """Read the orders."""
    return [Order(number=n, cents=100 * n) for n in range(1, 11)] if source == "orders" else []


@fabric.task
def transform(orders: list[Order], *, part: int, of: int) -> int:
    """Add up one part of the orders."""
    return sum(order.cents for order in orders if order.number % of == part)


@fabric.task
async def load(totals: list[int], day: str) -> str:
    """Store the sum of the parts."""
    return f"{day}: {sum(totals)} cents in {len(totals)} parts"


@fabric.task
async def announce(text: str) -> None:
    """Tell the others."""
    print(text)


async def main() -> None:
    """Submit the flow of a day twice, and wait for its end."""
    day = "2026-01-31"
    flow = fabric.flow("nightly", id=day, tags={"app.team": "data"})
    orders = flow.add(extract, "orders")
    totals = [flow.add(transform, orders, part=part, of=5) for part in range(5)]
    loaded = flow.add(load, all_of(totals), day)
    flow.add(announce, loaded)
    async with fabric, fabric.worker():
        run = await flow.submit()
        again = await flow.submit()
        print(f"submitted once: {again == run}")
        await run.result(timeout=60)
        print(f"parts: {[await run.run(total).result() for total in totals]}")
        print(f"{(await run.status()).ended} runs have ended")


if __name__ == "__main__":
    asyncio.run(main())

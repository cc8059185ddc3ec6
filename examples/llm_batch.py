"""A batch of calls of a language model under one ceiling: it stops cleanly when the tokens are used up."""

import asyncio
from uuid import uuid4

from flowfabric import BudgetExceeded, Context, Fabric

CEILING, AT_MOST = 10_000, 2_000

fabric = Fabric()
# No run of the batch, on any worker, can spend past it. With an id of its own, each batch begins at zero.
tokens = fabric.budget("summaries", tokens=CEILING, id=uuid4())


async def ask_model(page: int) -> tuple[str, int]:
    """Stand for a model, which says only afterwards how many tokens an answer took."""
    await asyncio.sleep(0.01)
    return f"summary of page {page}", 1000 + 100 * (page % 5)


@fabric.task(max_running=4)
async def summarise(ctx: Context, page: int) -> int:
    try:
        # Set aside the most that the call may take, and settle what it took.
        async with ctx.reserve(tokens, tokens=AT_MOST) as spend:
            _, taken = await ask_model(page)
            spend.used(tokens=taken)
    except BudgetExceeded:
        return 0
    return taken


async def main() -> None:
    async with fabric, fabric.worker():
        runs = await summarise.submit_many(summarise.bind(page) for page in range(20))
        costs = [await run.result(timeout=30) for run in runs]
        status = await tokens.status()
        print(f"within the ceiling: {0 < status.usage['tokens'] <= CEILING}")
        print(f"every answer is counted once, at its true cost: {status.usage['tokens'] == sum(costs)}")
        print(f"every other page was refused before its call: {status.breach_count == costs.count(0) > 0}")
        print(f"still set aside: {status.reserved}")


if __name__ == "__main__":
    asyncio.run(main())

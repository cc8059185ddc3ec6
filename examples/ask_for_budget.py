"""A run that reaches its ceiling asks a person, without holding a worker, and goes on with a higher one."""

import asyncio
from uuid import uuid4

from flowfabric import BudgetExceeded, Context, Fabric, Run

fabric = Fabric()
# With an id of its own, each start of this program begins at zero.
money = fabric.budget("research", usd_cents=100, on_breach="ask", id=uuid4())


@fabric.task
async def research(ctx: Context, question: str, price: int) -> str:
    try:
        async with ctx.reserve(money, usd_cents=price):
            answer = f"{question}: forty-two"
    except BudgetExceeded as refused:
        return f"{question}: no answer ({refused})"
    return answer


async def wait_until_it_asks(run: Run[str]) -> None:
    while True:
        info = await fabric.engine.read_execution_info(run.id)
        if info is not None and info.public_state == "suspended":
            print(f"it asks: {info.blocking_detail}")
            return
        await asyncio.sleep(0.05)


async def main() -> None:
    async with fabric, fabric.worker(concurrency=1):
        print(await (await research.submit("what", 80)).result(timeout=30))

        run = await research.submit("why", 150)
        await wait_until_it_asks(run)
        print(await (await research.submit("who", 10)).result(timeout=30))  # the worker is free meanwhile
        await run.approve_budget(raise_to={"usd_cents": 500}, by="ada")
        print(await run.result(timeout=30))

        run = await research.submit("how", 1000)
        await wait_until_it_asks(run)
        await run.reject_budget(by="ada")
        print(await run.result(timeout=30))

        status = await money.status()
        print(f"spent {status.usage['usd_cents']} of {status.hard_limits['usd_cents']}")


if __name__ == "__main__":
    asyncio.run(main())

"""Retries after a pause, failures without a retry, and calls that are submitted only once."""

import asyncio

from flowfabric import Context, Fabric, NoRetry, RunFailed

fabric = Fabric(lane="payments")


@fabric.task(retries=3, backoff=0.1)
async def charge(ctx: Context, amount: int) -> str:
    """Succeed at the third attempt; fail for good if the amount is wrong."""
    if amount <= 0:
        raise NoRetry(f"{amount} is not an amount")
    if ctx.retry_count < 2:
        raise ConnectionError("the bank does not answer")
    return f"charged {amount} at attempt {ctx.attempt}"


async def main() -> None:
    """Charge an amount, charge a wrong amount, and charge twice with one idempotency key."""
    async with fabric, fabric.worker():
        print(await (await charge.submit(10)).result())
        try:
            await (await charge.submit(-1)).result()
        except RunFailed as failed:
            print(f"{type(failed).__name__}: {failed.reason}")
        once = charge.options(idempotency_key="invoice-7", tags={"shop.customer": "acme"})
        first, second = await once.submit(20), await once.submit(20)
        print(f"submitted once: {first.id == second.id}")
        await first.result()


if __name__ == "__main__":
    asyncio.run(main())

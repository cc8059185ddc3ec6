"""A payment provider calls back: the run waits without a worker, and a signed token keeps forgers out."""

import asyncio

from flowfabric import Callback, Context, Engine, Fabric, Run, verify_and_deliver
from flowfabric.errors import CallbackError
from flowfabric.outcomes import Accepted

fabric = Fabric(lane="shop")
outbox: "asyncio.Queue[Callback]" = asyncio.Queue()
"""Stands for the requests to the API of the payment provider."""


@fabric.task
async def take_payment(ctx: Context, order: str) -> str:
    """Ask the provider to call back, and wait; then the function runs again and reads the answer."""
    if not ctx.is_resumed:
        waitpoint = await ctx.create_waitpoint("payment", expires_in=60)
        await outbox.put(ctx.callback(waitpoint, base_url="https://shop.example/callbacks"))
        await ctx.suspend(keys=["payment"], waitpoints=[waitpoint], reason_code="waiting_for_callback")
    signals = ctx.resumed_signals()
    if not signals:  # an operator resumed it
        return f"order {order}: not paid"
    return f"order {order}: {(signals[-1].payload or b'').decode()}"


async def receive(engine: Engine, callback: Callback, presented: str, body: bytes) -> str:
    """Handle a call to the callback URL, as the web server of the shop does; the token comes in a header."""
    try:
        answer = await verify_and_deliver(
            engine,
            callback.execution_id,
            callback.waitpoint_id,
            presented,
            {"signal_name": "paid", "source_type": "external", "source_identity": "provider", "payload": body},
        )
    except CallbackError as refused:
        return f"{refused.http_status} {refused.code} (the log says {type(refused).__name__})"
    return f"202 {answer.effect}" if isinstance(answer, Accepted) else "202 known already"


async def until_it_waits(run: Run[str]) -> None:
    """Wait until the run is suspended."""
    while True:
        if (await run.status()).state == "suspended":
            return
        await asyncio.sleep(0.05)


async def main() -> None:
    """Sell something, refuse a forged callback, and get paid."""
    async with fabric, fabric.worker():
        run = await take_payment.submit("A-7")
        callback = await outbox.get()
        print(f"the provider may call {callback.url}")
        print(f"with the token        {callback.token}")
        await until_it_waits(run)
        print(f"the order is {(await run.status()).state}: no worker is busy with it")

        token = callback.token.reveal()
        forged = token[:-1] + ("0" if token[-1] != "0" else "1")
        print(f"a forger says 'paid':     {await receive(fabric.engine, callback, forged, b'paid')}")
        print(f"the order is still {(await run.status()).state}")
        print(f"the provider says 'paid': {await receive(fabric.engine, callback, token, b'paid')}")
        print(await run.result(timeout=30))


if __name__ == "__main__":
    asyncio.run(main())

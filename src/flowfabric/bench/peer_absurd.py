"""Absurd: four async workers in one process, each with its own connection and a hundred tasks per claim."""

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from absurd_sdk import AsyncAbsurd

from flowfabric.bench.observer import SQL, observing
from flowfabric.bench.subject import BATCH, CONNECTIONS, PAYLOAD, Drain, Figures, Task, rate, spread

CONCURRENCY = 25


async def measure(task: Task) -> Figures:
    """Spawn tasks one by one, since it has no batches, then process them."""
    many = task.count(2_000)
    drain = Drain(many)

    async def noop(_parameters: Any, _context: Any) -> None:
        drain.start()

    async with observing(task.url) as observer:
        await observer.execute(importlib.import_module("absurdctl").BUNDLED_SCHEMA_SQL)
        # A client has one connection, which its tasks share.
        clients = [AsyncAbsurd(task.url, queue_name="bench") for _ in range(CONNECTIONS)]
        await clients[0].create_queue()
        for client in clients:
            client.register_task("noop")(noop)
        submit = await rate(many, spread(many, *map(spawner, clients)))
        await observer.analyze()
        workers = [
            asyncio.create_task(client.start_worker(concurrency=CONCURRENCY, batch_size=BATCH, poll_interval=0.05))
            for client in clients
        ]
        end_to_end = await drain.rate(lambda: observer.ask(SQL.absurd_is_drained))
        for client in clients:
            client.stop_worker()
        await asyncio.gather(*workers)
        for client in clients:
            await client.close()
    return {"absurd_submit": submit, "absurd_worker_end_to_end": end_to_end}


def spawner(client: AsyncAbsurd) -> Callable[[], Awaitable[object]]:
    """A function that spawns one task through this client."""
    return lambda: client.spawn("noop", {"payload": PAYLOAD.decode()})

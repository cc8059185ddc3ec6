"""PgQueuer: a hundred jobs an enqueue, and a worker that dequeues a hundred and ends them through its buffer."""

import asyncio

import asyncpg
from pgqueuer import AsyncpgPoolDriver, Job, PgQueuer, Queries

from flowfabric.bench.observer import SQL, observing
from flowfabric.bench.subject import BATCH, CONNECTIONS, PAYLOAD, Drain, Figures, Task, rate, spread


async def measure(task: Task) -> Figures:
    """Enqueue one by one and in batches, then work off the batches."""
    few, many = task.count(3_000), task.count(20_000)
    # One connection more than callers: the worker keeps one to listen.
    size = CONNECTIONS + 1
    async with asyncpg.create_pool(task.url, min_size=size, max_size=size) as pool, observing(task.url) as observer:
        worker = PgQueuer(AsyncpgPoolDriver(pool))
        queries = Queries(AsyncpgPoolDriver(pool))
        await queries.install()
        drain = Drain(many)

        @worker.entrypoint("noop")
        async def noop(_: Job) -> None:
            drain.start()

        async def enqueue() -> None:
            await queries.enqueue("noop", PAYLOAD)

        async def enqueue_batch() -> None:
            await queries.enqueue(["noop"] * BATCH, [PAYLOAD] * BATCH, [0] * BATCH)

        submit = await rate(few, spread(few, *[enqueue] * CONNECTIONS))
        await queries.clear_queue()
        submit_batch = await rate(many, spread(many // BATCH, *[enqueue_batch] * CONNECTIONS))
        await observer.analyze()
        running = asyncio.create_task(worker.run(batch_size=BATCH))
        end_to_end = await drain.rate(lambda: observer.ask(SQL.pgqueuer_is_drained))
        worker.shutdown.set()
        await running
    return {
        "pgqueuer_submit": submit,
        "pgqueuer_submit_batch": submit_batch,
        "pgqueuer_worker_end_to_end": end_to_end,
    }

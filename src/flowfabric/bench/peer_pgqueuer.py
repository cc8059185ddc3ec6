"""PgQueuer: a hundred jobs per enqueue, and a worker that dequeues in batches and completes through its buffer."""

import asyncio

import asyncpg
from pgqueuer import AsyncpgPoolDriver, Job, PgQueuer, Queries

from flowfabric.bench.observer import SQL, Observer, observing
from flowfabric.bench.subject import BATCH, CONNECTIONS, PAYLOAD, Drain, Figure, Figures, Task, rate, spread

BATCHES = (50, 100, 200, 500, 1_000)


async def measure(task: Task) -> Figures:
    """Enqueue jobs one by one and in batches, then process them a hundred at a time and at its best batch size."""
    few, some, many = task.count(2_000), task.count(5_000), task.count(20_000)
    # One connection more than callers: the worker uses one to listen.
    size = CONNECTIONS + 1
    async with asyncpg.create_pool(task.url, min_size=size, max_size=size) as pool, observing(task.url) as observer:
        queries = Queries(AsyncpgPoolDriver(pool))
        await queries.install()

        async def enqueue() -> None:
            await queries.enqueue("noop", PAYLOAD)

        async def enqueue_batch() -> None:
            await queries.enqueue(["noop"] * BATCH, [PAYLOAD] * BATCH, [0] * BATCH)

        async def fill(count: int) -> Figure:
            submitted = await rate(count, spread(count // BATCH, *[enqueue_batch] * CONNECTIONS))
            await observer.analyze()
            return submitted

        async def work_off(count: int, batch_size: int) -> Figure:
            await fill(count)
            return await drained(pool, observer, count, batch_size)

        submit = await rate(few, spread(few, *[enqueue] * CONNECTIONS))
        await queries.clear_queue()
        submit_batch = await fill(many)
        hundred = await drained(pool, observer, many, BATCH)
        tried = {batch_size: (await work_off(some, batch_size)).value for batch_size in BATCHES}
        best = max(tried, key=tried.__getitem__)
        at_best = await work_off(many, best)
    return {
        "pgqueuer_submit": submit,
        "pgqueuer_submit_batch": submit_batch,
        "pgqueuer_worker_end_to_end": hundred,
        "pgqueuer_worker_end_to_end_best": max(hundred, at_best, key=lambda figure: figure.value),
        "pgqueuer_best_batch": Figure(value=best, unit="jobs"),
    }


async def drained(pool: asyncpg.Pool, observer: Observer, count: int, batch_size: int) -> Figure:
    """The rate of a worker that dequeues `batch_size` jobs at a time."""
    worker = PgQueuer(AsyncpgPoolDriver(pool))
    drain = Drain(count)

    @worker.entrypoint("noop")
    async def noop(_: Job) -> None:
        drain.start()

    running = asyncio.create_task(worker.run(batch_size=batch_size))
    figure = await drain.rate(lambda: observer.ask(SQL.pgqueuer_is_drained))
    worker.shutdown.set()
    await running
    return figure

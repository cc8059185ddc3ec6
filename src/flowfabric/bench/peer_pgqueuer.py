"""PgQueuer: a hundred jobs an enqueue, and a worker that dequeues in batches and ends them through its buffer."""

import asyncio

import asyncpg
from pgqueuer import AsyncpgPoolDriver, Job, PgQueuer, Queries

from flowfabric.bench.observer import SQL, Observer, observing
from flowfabric.bench.subject import BATCH, CONNECTIONS, PAYLOAD, Drain, Figure, Figures, Task, rate, spread

LARGE_BATCH = 500


async def measure(task: Task) -> Figures:
    """Enqueue one by one and in batches, then work off the batches a hundred and five hundred at a time."""
    few, many = task.count(2_000), task.count(20_000)
    # One connection more than callers: the worker keeps one to listen.
    size = CONNECTIONS + 1
    async with asyncpg.create_pool(task.url, min_size=size, max_size=size) as pool, observing(task.url) as observer:
        queries = Queries(AsyncpgPoolDriver(pool))
        await queries.install()

        async def enqueue() -> None:
            await queries.enqueue("noop", PAYLOAD)

        async def enqueue_batch() -> None:
            await queries.enqueue(["noop"] * BATCH, [PAYLOAD] * BATCH, [0] * BATCH)

        figures = {"pgqueuer_submit": await rate(few, spread(few, *[enqueue] * CONNECTIONS))}
        await queries.clear_queue()
        for name, batch_size in (("", BATCH), ("_batch500", LARGE_BATCH)):
            submitted = await rate(many, spread(many // BATCH, *[enqueue_batch] * CONNECTIONS))
            figures.setdefault("pgqueuer_submit_batch", submitted)
            await observer.analyze()
            figures[f"pgqueuer_worker_end_to_end{name}"] = await work_off(pool, observer, many, batch_size)
    return figures


async def work_off(pool: asyncpg.Pool, observer: Observer, count: int, batch_size: int) -> Figure:
    """The rate of a worker that dequeues so many jobs at a time."""
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

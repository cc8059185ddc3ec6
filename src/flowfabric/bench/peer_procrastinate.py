"""Procrastinate: four async workers in one process, with a hundred slots in total."""

import asyncio

from procrastinate import App, PsycopgConnector
from procrastinate.types import JSONDict

from flowfabric.bench.observer import SQL, observing
from flowfabric.bench.subject import BATCH, CONNECTIONS, PAYLOAD, Drain, Figures, Task, rate, spread

WORKERS = 4
CONCURRENCY = 25


async def measure(task: Task) -> Figures:
    """Defer jobs one by one and in batches, then process all of them."""
    few, many = task.count(600), task.count(1_000)
    connector = PsycopgConnector(conninfo=task.url, min_size=10, max_size=10)
    app = App(connector=connector)
    drain = Drain(few + many)

    @app.task(name="noop", queue="bench")
    async def noop(**_: str) -> None:
        drain.start()

    async with app.open_async(), observing(task.url) as observer:
        await app.schema_manager.apply_schema_async()

        async def defer() -> None:
            await noop.defer_async(payload=PAYLOAD.decode())

        batch: list[JSONDict] = [{"payload": PAYLOAD.decode()} for _ in range(BATCH)]

        async def defer_batch() -> None:
            await noop.batch_defer_async(*batch)

        submit = await rate(few, spread(few, *[defer] * CONNECTIONS))
        submit_batch = await rate(many, spread(many // BATCH, *[defer_batch] * CONNECTIONS))
        await observer.analyze()
        # A worker fetches one job per statement, so several workers fetch concurrently.
        workers = [
            asyncio.create_task(app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False))
            for _ in range(WORKERS)
        ]
        end_to_end = await drain.rate(lambda: observer.ask(SQL.procrastinate_is_drained))
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return {
        "procrastinate_submit": submit,
        "procrastinate_submit_batch": submit_batch,
        "procrastinate_worker_end_to_end": end_to_end,
    }

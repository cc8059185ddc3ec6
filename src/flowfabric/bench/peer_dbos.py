"""DBOS: plain workflows on a queue without limits, run by its thread pool."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from dbos import DBOS

from flowfabric.bench.observer import SQL, observing
from flowfabric.bench.subject import CONNECTIONS, PAYLOAD, Drain, Figures, Task, rate, spread

THREADS = 16


async def measure(task: Task) -> Figures:
    """Enqueue workflows one by one, since it has no batches, then process the queue."""
    many = task.count(400)
    drain = Drain(many)
    DBOS(
        config={
            "name": "bench",
            "system_database_url": task.url.replace("postgresql://", "postgresql+psycopg://", 1),
            "sys_db_pool_size": THREADS + CONNECTIONS,
            "max_executor_threads": THREADS,
            "log_level": "CRITICAL",
        }
    )

    @DBOS.workflow()
    def noop(_: str) -> None:
        drain.start()

    await asyncio.to_thread(DBOS.launch)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(CONNECTIONS) as threads:

        async def enqueue() -> None:
            await loop.run_in_executor(threads, DBOS.enqueue_workflow, "bench", noop, PAYLOAD.decode())

        submit = await rate(many, spread(many, *[enqueue] * CONNECTIONS))
    async with observing(task.url) as observer:
        await observer.analyze()
        # Polling starts with the registration, so register the queue after the backlog is complete.
        await asyncio.to_thread(lambda: DBOS.register_queue("bench", polling_interval_sec=0.05))
        end_to_end = await drain.rate(lambda: observer.ask(SQL.dbos_is_drained))
    await asyncio.to_thread(DBOS.destroy)
    return {"dbos_submit": submit, "dbos_worker_end_to_end": end_to_end}

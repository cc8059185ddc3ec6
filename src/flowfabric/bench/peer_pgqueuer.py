"""PgQueuer: a hundred jobs an enqueue, a worker that dequeues a hundred and ends them through its buffer."""

import asyncio
from pathlib import Path

import asyncpg
from pgqueuer import AsyncpgPoolDriver, Job, PgQueuer, Queries

from flowfabric.bench.subject import BATCH, CONNECTIONS, PAYLOAD, Drain, Figures, Task, rate, spread
from flowfabric.db.statements import Statements

SQL = Statements(Path(__file__).with_name("peers.sql"))
import os
N=int(os.environ.get("N","20000"))
SIZE=int(os.environ.get("SIZE","5"))
BS=int(os.environ.get("BS","100"))

async def measure(task: Task) -> Figures:
    """Submit one by one and in batches, then work off the batches."""
    async with asyncpg.create_pool(task.url, min_size=SIZE, max_size=SIZE) as pool:
        driver = AsyncpgPoolDriver(pool)
        await Queries(driver).install()
        single, many = task.count(4_000), task.count(N)
        submit = await rate(
            single, spread(single, among=CONNECTIONS, each=lambda: Queries(driver).enqueue("noop", PAYLOAD))
        )
        await Queries(driver).clear_queue()
        submit_batch = await rate(
            many,
            spread(
                many // BATCH,
                among=CONNECTIONS,
                each=lambda: Queries(driver).enqueue(["noop"] * BATCH, [PAYLOAD] * BATCH, [0] * BATCH),
            ),
        )
        worker = PgQueuer(driver)
        drain = Drain(many)

        @worker.entrypoint("noop")
        async def noop(job: Job) -> None:
            drain.start()

        running = asyncio.create_task(worker.run(batch_size=BS))
        end_to_end = await drain.rate(lambda: pool.fetchval(SQL.pgqueuer_is_drained.sql))
        worker.shutdown.set()
        await running
    return {
        "pgqueuer_submit": submit,
        "pgqueuer_submit_batch": submit_batch,
        "pgqueuer_worker_end_to_end": end_to_end,
    }

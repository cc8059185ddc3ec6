"""awa: submissions by COPY, and the worker of its Rust core with Python handlers."""

from dataclasses import dataclass
from typing import Any

import awa

from flowfabric.bench.observer import observing
from flowfabric.bench.subject import BATCH, CONNECTIONS, PAYLOAD, Drain, Figures, Task, rate, spread

QUEUE = {"name": "bench", "max_workers": 1_000, "claimers": 2, "claim_batch_size": 500}


@dataclass
class Noop:
    """The arguments of the no-op."""

    payload: str


async def measure(task: Task) -> Figures:
    """Insert jobs one by one and by COPY, then process those inserted by COPY."""
    few, many = task.count(400), task.count(10_000)
    drain = Drain(many)
    job = Noop(payload=PAYLOAD.decode())
    # Its driver requires a host in the address, even for a socket.
    client = awa.AsyncClient(task.url.replace("@/", "@localhost/", 1), max_connections=20)
    await client.migrate()
    await client.install_queue_storage(schema="awa")

    @client.task(Noop, queue="bench")
    async def noop(_: Any) -> None:
        drain.start()

    async def insert() -> None:
        await client.insert(job, queue="single")

    async def copy() -> None:
        await client.enqueue_many_copy([job] * BATCH, queue="bench")

    async def stop() -> bool:
        # Its own count of a queue takes minutes; shutdown waits until every job is committed.
        await client.shutdown(timeout_ms=60_000)
        return True

    submit = await rate(few, spread(few, *[insert] * CONNECTIONS))
    submit_batch = await rate(many, spread(many // BATCH, *[copy] * CONNECTIONS))
    async with observing(task.url) as observer:
        await observer.analyze()
    await client.start([QUEUE], poll_interval_ms=50)
    end_to_end = await drain.rate(stop)
    await client.close()
    return {"awa_submit": submit, "awa_submit_batch": submit_batch, "awa_worker_end_to_end": end_to_end}

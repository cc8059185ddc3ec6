"""FlowFabric: the rate of claiming and completing, by the engine alone and by a worker."""

from typing import Any

from flowfabric.bench.api import Engine, Worker
from flowfabric.bench.observer import Observer, observing
from flowfabric.bench.ours import KIND, LANE, SQL, check, engine_on, fill, noops
from flowfabric.bench.subject import BATCH, CONNECTIONS, Drain, Figure, Figures, Task, rate, spread

CONCURRENCY = 1500
LARGE_BATCH = 500


async def measure(task: Task) -> Figures:
    """Process backlogs, without a worker and with one."""
    count = task.count(40_000)
    async with engine_on(task.url) as engine, observing(task.url) as observer:
        # Open the connections and prepare the statements, as for the raw limit.
        await fill(engine, noops(), 10 * LARGE_BATCH)
        await claim_and_finish(engine, 10 * LARGE_BATCH, LARGE_BATCH)
        await fill(engine, noops(), count)
        await observer.analyze()
        hundred = await rate(count, claim_and_finish(engine, count, BATCH))
        await fill(engine, noops(), count)
        claim_finish = await rate(count, claim_and_finish(engine, count, LARGE_BATCH))
        await fill(engine, noops(), count)
        end_to_end = await work_off(engine, observer, count, concurrency=CONCURRENCY)
        await fill(engine, noops(), count)
        default_slots = await work_off(engine, observer, count)
    return {
        "engine_claim_finish_100": hundred,
        "engine_claim_finish": claim_finish,
        "worker_end_to_end": end_to_end,
        "worker_default_slots": default_slots,
    }


async def work_off(engine: Engine, observer: Observer, count: int, *, lane: str = LANE, **options: Any) -> Figure:
    """The rate at which a worker with these options processes a backlog."""
    drain = Drain(count)

    async def handle() -> None:
        drain.start()

    async with Worker(engine, lanes=[lane], handlers={KIND: handle}, **options):
        return await drain.rate(lambda: observer.ask(SQL.is_drained))


async def claim_and_finish(
    engine: Engine, count: int, batch: int, *, lane: str = LANE, lease_ttl_ms: int = 60_000
) -> None:
    """Claim and complete a backlog, `batch` per call."""

    async def work() -> None:
        claimed = await engine.claim_many(
            lanes=[lane], worker_id="bench", worker_instance_id="bench-1", limit=batch, lease_ttl_ms=lease_ttl_ms
        )
        if claimed:
            check(await engine.complete_many([(each.handle, b"{}") for each in claimed]))

    await spread(count // batch, *[work] * CONNECTIONS)

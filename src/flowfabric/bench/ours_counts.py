"""FlowFabric: the time of a count by lane and state, compared with a plain `group by` of all rows."""

import asyncio

from flowfabric.bench.api import Engine, Reconciler
from flowfabric.bench.observer import Observer, observing
from flowfabric.bench.ours import SQL, engine_on, fill, noops
from flowfabric.bench.ours_backlog import short
from flowfabric.bench.ours_work import LARGE_BATCH, claim_and_finish
from flowfabric.bench.subject import Figures, Task, median_ms, timed

LEASE_MS = 5_000
STEP = 20_000
MARGIN_S = 0.5
"""Added to the lease time, after which the claims have certainly expired."""
COUNTS = 15


async def measure(task: Task) -> Figures:
    """Count in a store with many ended executions, and again when as many are waiting."""
    size = 1_000_000 if task.scale >= 1 else task.count(100_000)
    async with engine_on(task.url) as engine, observing(task.url) as observer:
        for done in range(0, size, STEP):
            step = min(STEP, size - done)
            await fill(engine, noops(), step)
            await claim_and_finish(engine, step, min(LARGE_BATCH, step), lease_ttl_ms=LEASE_MS)
        await asyncio.sleep(LEASE_MS / 1000 + MARGIN_S)
        # Removes the claims, whose leases have all ended.
        await Reconciler(engine).catch_up()
        ended = await costs(engine, observer, f"{short(size)}_ended")
        await fill(engine, noops(), size)
        return ended | await costs(engine, observer, f"{short(size)}_waiting")


async def costs(engine: Engine, observer: Observer, name: str) -> Figures:
    """The median durations of both ways to count."""
    await observer.vacuum()
    counts = [await timed(engine.count_executions(by=("lane", "state"))) for _ in range(COUNTS)]
    plain = [await timed(observer.execute(SQL.group_executions.sql)) for _ in range(COUNTS)]
    return {f"count_{name}": median_ms(counts), f"group_by_{name}": median_ms(plain)}

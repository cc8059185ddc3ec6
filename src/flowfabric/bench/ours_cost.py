"""FlowFabric: the cost of an execution on the server in write-ahead log, CPU time and HOT updates."""

from collections.abc import Awaitable, Callable

from flowfabric.bench.api import Engine
from flowfabric.bench.meter import Meter
from flowfabric.bench.observer import SQL, Observer, observing
from flowfabric.bench.ours import LARGEST_BATCH, engine_on, fill, noops
from flowfabric.bench.ours_work import CONCURRENCY, LARGE_BATCH, claim_and_finish, work_off
from flowfabric.bench.subject import Figure, Figures, Task

COUNT = 20_000
NO_FPI = "_no_fpi"

Work = Callable[[Engine, Observer, int], Awaitable[object]]


async def measure(task: Task) -> Figures:
    """Submit, claim and finish, and run a worker, each right after a checkpoint and long after one."""
    # `fill` creates whole batches.
    count = max(LARGEST_BATCH, task.count(COUNT) // LARGEST_BATCH * LARGEST_BATCH)
    figures: Figures = {}
    async with observing(task.url) as observer:
        await warm_up(task.url, observer)
        await observer.checkpoint()
        for suffix in (NO_FPI, ""):
            for name, work in (("claim_finish", claim_finish), ("worker", by_worker)):
                # Without a checkpoint the pages of these executions are new since the last one and not logged in full.
                if not suffix:
                    await observer.checkpoint()
                figures |= await submitting(task.url, observer, count, suffix)
                if not suffix:
                    await observer.checkpoint()
                figures |= await working(task.url, observer, count, name, work, suffix)
    for suffix in ("", NO_FPI):
        figures[f"wal_execution{suffix}"] = Figure(
            value=figures[f"wal_submit{suffix}"].value + figures[f"wal_worker{suffix}"].value, unit="bytes"
        )
    return dict(sorted(figures.items()))


async def claim_finish(engine: Engine, _: Observer, count: int) -> None:
    """Process a backlog without a worker."""
    await claim_and_finish(engine, count, LARGE_BATCH)


async def by_worker(engine: Engine, observer: Observer, count: int) -> None:
    """Process a backlog with a worker."""
    await work_off(engine, observer, count, concurrency=CONCURRENCY)


async def warm_up(url: str, observer: Observer) -> None:
    """Process some executions and analyze, so that the planner knows tables with rows."""
    async with engine_on(url) as engine:
        await fill(engine, noops(), 2 * LARGE_BATCH)
        await claim_and_finish(engine, 2 * LARGE_BATCH, LARGE_BATCH)
        await observer.analyze()


async def submitting(url: str, observer: Observer, count: int, suffix: str = "") -> Figures:
    """The cost of submitting `count` executions, a thousand per call."""
    meter = await Meter.of(observer)
    async with engine_on(url) as engine:
        before = await meter.read()
        await fill(engine, noops(), count)
        return await meter.since(before, count=count, name="submit", suffix=suffix)


async def working(url: str, observer: Observer, count: int, name: str, work: Work, suffix: str = "") -> Figures:
    """The cost of processing `count` executions, and the share of HOT updates of `execution`."""
    meter = await Meter.of(observer)
    await observer.until_alone()
    updates_before, hot_before = await observer.read(SQL.read_updates)
    async with engine_on(url) as engine:
        before = await meter.read()
        await work(engine, observer, count)
        figures = await meter.since(before, count=count, name=name, suffix=suffix)
    await observer.until_alone()
    updates, hot = await observer.read(SQL.read_updates)
    if not suffix:
        share = (hot - hot_before) / max(1, updates - updates_before)
        figures[f"hot_{name}"] = Figure(value=share, unit="of updates")
    return figures

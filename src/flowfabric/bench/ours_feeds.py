"""FlowFabric: how closely a completion feed follows a worker, and how fast many events are read."""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, islice

from flowfabric.bench.api import Engine, NewExecution, Worker
from flowfabric.bench.observer import observing
from flowfabric.bench.ours import KIND, LANE, check, engine_on, fill, noop, noops
from flowfabric.bench.ours_streams import running
from flowfabric.bench.ours_suspend import median_rate
from flowfabric.bench.ours_work import CONCURRENCY, LARGE_BATCH
from flowfabric.bench.run import on_loop
from flowfabric.bench.subject import CONNECTIONS, Drain, Figure, Figures, Task, per_second, rate

# Not imported by `api`: the other subjects can be compared with a version that has no feeds.
from flowfabric.feeds import CompletionEvent, ScannerFilter, Subscription

EVENTS = 1_000_000
PARTS = 40
"""The first and the last of this many equal parts of the events are compared."""
READS = 3
STEP = 20_000
TAG = "bench.tenant"
TENANTS = 10_000
SAMPLES = 60
IDLE_S = 0.02
"""The pause before each single completion."""
DRAINED = 20_000
DRAINS = 3


async def measure(task: Task) -> Figures:
    """Follow a worker at full rate and single completions, then read a large number of events."""
    many, samples, drained = task.count(EVENTS), max(10, round(SAMPLES * task.scale)), task.count(DRAINED)
    tenants = min(TENANTS, many)
    async with engine_on(task.url) as engine, observing(task.url) as observer:
        # Open the connections and prepare the statements.
        await produce(engine, noops(), STEP)
        await observer.analyze()
        async with engine.subscribe_completion() as events:
            before = events.cursor
        figures = await follow_drains(engine, task.url, drained)
        # Without a subscriber and with each of two.
        grouped = 3 * DRAINS * drained
        figures["feed_catch_up_grouped"] = await rate(grouped, catch_up(engine, grouped, before))
        figures |= await follow_single(engine, task.url, samples)
        async with engine.subscribe_completion() as events:
            before = events.cursor
        await produce(engine, of_tenants(tenants), many)
        await observer.analyze()
        return figures | await read_all(engine, many, tenants, before)


def of_tenants(tenants: int) -> Iterator[NewExecution]:
    """Executions of as many tenants in turn.

    No two executions of one call have the same tags, so that every completion is a row of the event table.
    """
    for number in count(1):
        yield noop(tags={TAG: f"tenant-{number % tenants}"})


async def produce(engine: Engine, items: Iterator[NewExecution], count: int) -> None:
    """Create and complete exactly `count` executions."""
    for done in range(0, count, STEP):
        step = min(STEP, count - done)
        await fill(engine, islice(items, step), step)
        await finish(engine, step)


async def finish(engine: Engine, count: int) -> None:
    """Claim and complete exactly `count` executions; the lane has that many."""
    left = count

    async def work() -> None:
        nonlocal left
        while left:
            limit = min(left, LARGE_BATCH)
            left -= limit
            claimed = await engine.claim_many(
                lanes=[LANE], worker_id="bench", worker_instance_id="bench-1", limit=limit, lease_ttl_ms=60_000
            )
            left += limit - len(claimed)
            check(await engine.complete_many([(each.handle, b"{}") for each in claimed]))

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def read_all(engine: Engine, count: int, tenants: int, cursor: bytes) -> Figures:
    """The rates of reading this many events after a cursor, all and of one tenant."""
    part = count // PARTS
    began = time.perf_counter()
    before_last = await catch_up(engine, count - part, cursor)
    await catch_up(engine, part, before_last)
    whole = per_second(count, time.perf_counter() - began)
    first: list[Figure] = []
    last: list[Figure] = []
    # In turn, so that a temporary disturbance of the machine affects both.
    for _ in range(READS):
        first.append(await rate(part, catch_up(engine, part, cursor)))
        last.append(await rate(part, catch_up(engine, part, before_last)))
    one = ScannerFilter(instance_tag=(TAG, "tenant-0"))
    return {
        "feed_catch_up": whole,
        "feed_catch_up_first": median_rate(first),
        "feed_catch_up_last": median_rate(last),
        "feed_sparse": await rate(count, catch_up(engine, count // tenants, cursor, filter=one)),
    }


async def catch_up(engine: Engine, count: int, cursor: bytes, *, filter: ScannerFilter | None = None) -> bytes:
    """Read this many events after a cursor as fast as possible; return the cursor after them."""
    async with engine.subscribe_completion(cursor, filter) as events:
        received = 0
        async for _ in events:
            received += 1
            if received == count:
                break
        return events.cursor


@dataclass(frozen=True, kw_only=True)
class Lag:
    """The milliseconds from events, by the clock of the database, to their delivery.

    The clocks are the same if the server runs on this machine.
    """

    p50: float
    p99: float
    last: float
    """From the newest event to the delivery of all."""


async def receive(events: Subscription[CompletionEvent], count: int) -> Lag:
    """Receive this many events and return how late they were."""
    lags: list[float] = []
    newest = 0
    async for event in events:
        lags.append(time.time() * 1000 - event.at)
        newest = max(newest, event.at)
        if len(lags) == count:
            break
    last = time.time() * 1000 - newest
    lags.sort()
    return Lag(p50=lags[len(lags) // 2], p99=lags[len(lags) * 99 // 100], last=last)


Reader = Callable[[int], AbstractAsyncContextManager[Awaitable[Lag]]]
"""Subscribes for the duration of a block, and yields the lag of that many events."""


def readers(engine: Engine, url: str) -> Mapping[str, Reader]:
    """A subscriber of this engine and one in another process, by the ending of the names of their figures."""
    return {"": partial(reader_here, engine), "_across": partial(reader_process, url)}


@asynccontextmanager
async def reader_here(engine: Engine, count: int) -> AsyncIterator[Awaitable[Lag]]:
    """Subscribe with this engine."""
    async with engine.subscribe_completion() as events:
        receiving = asyncio.create_task(receive(events, count))
        try:
            yield receiving
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)


@asynccontextmanager
async def reader_process(url: str, count: int) -> AsyncIterator[Awaitable[Lag]]:
    """Subscribe in another process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, "--url", url, "--count", str(count), stdout=asyncio.subprocess.PIPE
    )
    answers = process.stdout
    assert answers is not None

    async def lag() -> Lag:
        return Lag(**json.loads(await answers.readline()))

    try:
        # The first line says that the subscription has started.
        if not await answers.readline():
            raise RuntimeError(f"the process that reads exited with {await process.wait()}")
        yield lag()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def read(url: str, count: int) -> None:
    """Subscribe, print a line, receive this many events, and print their lag."""
    async with engine_on(url) as engine, engine.subscribe_completion() as events:
        print("subscribed", flush=True)
        print(json.dumps(asdict(await receive(events, count))), flush=True)


async def follow_single(engine: Engine, url: str, samples: int) -> Figures:
    """The median lag of single completions on an otherwise idle system."""
    figures: Figures = {}
    for suffix, reader in readers(engine, url).items():
        handles = await running(engine, samples)
        async with reader(samples) as lag:
            for handle in handles:
                await asyncio.sleep(IDLE_S)
                await engine.complete(handle, b"{}")
            figures[f"feed_single{suffix}"] = Figure(value=(await lag).p50, unit="ms")
    return figures


async def follow_drains(engine: Engine, url: str, count: int) -> Figures:
    """The rate of a worker without and with a subscriber, and the lag of the subscriber."""
    alone: list[Figure] = []
    followed: dict[str, list[tuple[Figure, Lag]]] = {}
    for _ in range(DRAINS):
        await fill(engine, islice(noops(), count), count)
        alone.append(await drain(engine, count))
        for suffix, reader in readers(engine, url).items():
            await fill(engine, islice(noops(), count), count)
            async with reader(count) as lag:
                followed.setdefault(suffix, []).append((await drain(engine, count), await lag))
    figures = {"feed_drain_alone": median_rate(alone)}
    for suffix, drains in followed.items():
        figures[f"feed_drain{suffix}"] = median_rate([each for each, _ in drains])
        for name in ("p50", "p99", "last"):
            value = statistics.median(getattr(lag, name) for _, lag in drains)
            figures[f"feed_lag{suffix}_{name}"] = Figure(value=value, unit="ms")
    return figures


async def drain(engine: Engine, count: int) -> Figure:
    """The rate at which a worker processes a backlog of this size."""
    backlog = Drain(count)

    async def handle() -> None:
        backlog.start()

    async with Worker(engine, lanes=[LANE], handlers={KIND: handle}, concurrency=CONCURRENCY) as worker:

        async def is_drained() -> bool:
            # A slot is freed after the completion is committed.
            return not worker.running

        return await backlog.rate(is_drained)


def main() -> None:
    """Run the process that reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    on_loop(read(options.url, options.count))


if __name__ == "__main__":
    main()

"""FlowFabric: the cost of renewing the leases of ten thousand running executions."""

import statistics

from flowfabric.bench.api import Handle
from flowfabric.bench.observer import SQL, Observer, observing
from flowfabric.bench.ours import LANE, LARGEST_BATCH, check, engine_on, fill, noops
from flowfabric.bench.subject import CONNECTIONS, Figure, Figures, Task, spread, timed

RUNNING = 10_000
ROUNDS = 3
SMALL_CLAIM = 10


async def measure(task: Task) -> Figures:
    """Renew ten thousand leases, a thousand per call, of executions claimed in large and in small batches."""
    figures: Figures = {}
    async with observing(task.url) as observer:
        for suffix, claim in (("", LARGEST_BATCH), (f"_claims_of_{SMALL_CLAIM}", SMALL_CLAIM)):
            seconds, writes = await renewals(task.url, observer, running=RUNNING, claim=claim)
            figures[f"renew_10000{suffix}"] = Figure(value=seconds, unit="s")
            figures[f"renew_10000{suffix}_writes"] = Figure(value=writes, unit="rows")
    return figures


async def renewals(url: str, observer: Observer, *, running: int, claim: int) -> tuple[float, float]:
    """The median seconds of a round of renewals, and the rows written per round."""
    handles = await run_many(url, observer, running=running, claim=claim)
    (before,) = await observer.read(SQL.read_writes)
    async with engine_on(url) as engine:

        async def renew() -> None:
            for at in range(0, len(handles), LARGEST_BATCH):
                check(await engine.renew_many(handles[at : at + LARGEST_BATCH]))

        seconds = [await timed(renew()) for _ in range(ROUNDS)]
    await observer.until_alone()
    (after,) = await observer.read(SQL.read_writes)
    return statistics.median(seconds), (after - before) / ROUNDS


async def run_many(url: str, observer: Observer, *, running: int, claim: int) -> list[Handle]:
    """Claim `running` executions, `claim` per call, and wait until the sessions have reported their statistics."""
    handles: list[Handle] = []
    async with engine_on(url) as engine:

        async def take() -> None:
            claimed = await engine.claim_many(
                lanes=[LANE], worker_id="bench", worker_instance_id="bench-1", limit=claim, lease_ttl_ms=600_000
            )
            handles.extend(each.handle for each in claimed)

        await fill(engine, noops(), running)
        await observer.analyze()
        await spread(running // claim, *[take] * CONNECTIONS)
        while len(handles) < running:
            await take()
    await observer.until_alone()
    return handles

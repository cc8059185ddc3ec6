"""The soak: full rate for ten minutes, with a million ended executions in the store and an open transaction."""

import asyncio
import sys
import time

from flowfabric.bench.api import Engine, Worker, drain_option
from flowfabric.bench.observer import SQL as STORE
from flowfabric.bench.observer import observing, pinned
from flowfabric.bench.ours import KIND, LANE, SQL, check, engine_on, fill, noop, noops
from flowfabric.bench.ours_work import CONCURRENCY, LARGE_BATCH, claim_and_finish
from flowfabric.bench.subject import BATCH, CONNECTIONS, Figure, Figures, Task, per_second

SECONDS = 600
WINDOWS = 10
RETAINED = 1_000_000
BACKLOG = 20_000
RETENTION = {"retention_ms": 10_000, "retention_trimmer_interval_s": 1}


async def measure(task: Task) -> Figures:
    """Submit and process at full rate in one process while retention deletes; compare the first and last tenth."""
    retained = task.count(RETAINED)
    async with engine_on(task.url) as engine:
        await retain(engine, retained)
    async with (
        observing(task.url) as observer,
        engine_on(task.url, **RETENTION) as engine,
        pinned(task.url),
    ):
        await observer.analyze()
        (log_before,) = await observer.read(STORE.read_position)
        tables_before, indexes_before = await observer.read(SQL.read_sizes)
        load = Load(engine)
        rates = await load.run(SECONDS * task.scale)
        (log_after,) = await observer.read(STORE.read_position)
        tables_after, indexes_after = await observer.read(SQL.read_sizes)
        (kept,) = await observer.read(SQL.count_retained)
    return {
        "soak_first_tenth": rates[0],
        "soak_last_tenth": rates[-1],
        "soak_log_per_execution": Figure(value=(log_after - log_before) / load.ended, unit="bytes"),
        "soak_table_growth": Figure(value=(tables_after - tables_before) / 2**20, unit="MiB"),
        "soak_index_growth": Figure(value=(indexes_after - indexes_before) / 2**20, unit="MiB"),
        "soak_ended": Figure(value=load.ended, unit="executions"),
        "soak_retained_before": Figure(value=retained, unit="executions"),
        "soak_retained_after": Figure(value=kept, unit="executions"),
    }


async def retain(engine: Engine, count: int) -> None:
    """Complete `count` executions, which are retained for longer than the run."""
    step = BACKLOG
    for done in range(0, count, step):
        size = min(step, count - done)
        await fill(engine, noops(), size)
        await claim_and_finish(engine, size, LARGE_BATCH)


class Load:
    """A worker and callers that keep its backlog filled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._submitted = 0
        self.ended = 0

    async def run(self, seconds: float) -> list[Figure]:
        """Run for this time and return the throughput of each tenth."""
        rates: list[Figure] = []
        callers = [asyncio.create_task(self._submit()) for _ in range(CONNECTIONS)]
        try:
            async with Worker(
                self._engine, lanes=[LANE], handlers={KIND: self._end}, concurrency=CONCURRENCY, **drain_option(5)
            ):
                for number in range(1, WINDOWS + 1):
                    ended, started = self.ended, time.perf_counter()
                    await asyncio.sleep(seconds / WINDOWS)
                    rates.append(per_second(self.ended - ended, time.perf_counter() - started))
                    print(f"{number} of {WINDOWS}: {rates[-1].value:,.0f}/s", file=sys.stderr, flush=True)
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
        return rates

    async def _end(self) -> None:
        self.ended += 1

    async def _submit(self) -> None:
        while True:
            if self._submitted - self.ended < BACKLOG:
                self._submitted += BATCH
                check(await self._engine.create_many([noop() for _ in range(BATCH)]))
            else:
                await asyncio.sleep(0.002)

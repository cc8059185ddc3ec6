"""FlowFabric with an open transaction: the time of claims while dead rows cannot be removed."""

import asyncio
import time
from collections import deque

from flowfabric.bench.api import Engine, Worker, drain_option
from flowfabric.bench.observer import SQL, Observer, observing, pinned
from flowfabric.bench.ours import KIND, LANE, check, engine_on
from flowfabric.bench.ours_submit import create_one
from flowfabric.bench.subject import Figure, Figures, Task, median_ms, per_second

SECONDS = 40
RATE = 800
TICK_S = 0.005
PROBE_S = 0.05
TENTH = 0.1
WATCHED = 0.25
"""The share of the run, at its end, in which index entries are counted."""


async def measure(task: Task) -> Figures:
    """Submit and process at a steady rate; compare the claims and starts of the first and the last tenth."""
    seconds = SECONDS * task.scale
    async with observing(task.url) as observer, engine_on(task.url) as engine, pinned(task.url):
        load = Steady(engine)
        reads = await load.run(seconds, observer)
    first, last = (0.0, seconds * TENTH), (seconds * (1 - TENTH), seconds)
    return {
        "pinned_claim_first": load.probes.median(*first),
        "pinned_claim_last": load.probes.median(*last),
        "pinned_start_first": load.starts.median(*first),
        "pinned_start_last": load.starts.median(*last),
        "pinned_rate_last": per_second(load.starts.count(*last), seconds * TENTH),
        "pinned_index_reads": reads,
    }


class Durations:
    """Durations, each with the time at which it ended, in seconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._all: list[tuple[float, float]] = []

    def add(self, since: float) -> None:
        """Add a duration from `since` to now."""
        now = time.perf_counter()
        self._all.append((now - self._began, now - since))

    def median(self, first: float, last: float) -> Figure:
        """The median of those that ended between these times."""
        return median_ms(seconds for at, seconds in self._all if first <= at <= last)

    def count(self, first: float, last: float) -> int:
        """The number of those that ended between these times."""
        return sum(first <= at <= last for at, _ in self._all)


class Steady:
    """Submissions at a fixed rate, a worker that processes them, and claims beside it that mostly find nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[float] = deque()
        self.starts = Durations()
        self.probes = Durations()

    async def run(self, seconds: float, observer: Observer) -> Figure:
        """Run for this time and return the index entries read per second at its end."""
        async with Worker(self._engine, lanes=[LANE], handlers={KIND: self._start}, **drain_option(5)):
            self.starts, self.probes = Durations(), Durations()
            tasks = [asyncio.create_task(self._submit()), asyncio.create_task(self._probe())]
            try:
                await asyncio.sleep(seconds * (1 - WATCHED))
                (before,) = await observer.read(SQL.read_index_entries)
                await asyncio.sleep(seconds * WATCHED)
                (after,) = await observer.read(SQL.read_index_entries)
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if not isinstance(end, asyncio.CancelledError):
                raise RuntimeError(f"the load ended early: {end!r}")
        return Figure(value=(after - before) / (seconds * WATCHED), unit="entries/s")

    async def _start(self) -> None:
        # The oldest submission: executions are claimed in the order of their submission.
        if self._waiting:
            self.starts.add(self._waiting.popleft())

    async def _submit(self) -> None:
        began, submitted = time.perf_counter(), 0
        while True:
            now = time.perf_counter()
            due = int((now - began) * RATE) - submitted
            submitted += due
            self._waiting.extend([now] * due)
            await asyncio.gather(*(create_one(self._engine) for _ in range(due)))
            await asyncio.sleep(TICK_S)

    async def _probe(self) -> None:
        while True:
            began = time.perf_counter()
            claimed = await self._engine.claim_many(
                lanes=[LANE], worker_id="bench", worker_instance_id="bench-probe", limit=1, lease_ttl_ms=60_000
            )
            self.probes.add(began)
            if claimed:
                check(await self._engine.complete_many([(each.handle, b"{}") for each in claimed]))
                await self._start()
            await asyncio.sleep(PROBE_S)

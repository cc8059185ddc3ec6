"""FlowFabric: the rates of claiming and completing within limits, compared with those without limits."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from flowfabric.bench.api import Engine, ExecutionPolicy, NewExecution, Worker, uuid7
from flowfabric.bench.observer import Observer, observing
from flowfabric.bench.ours import KIND, SQL, engine_on, fill, noop
from flowfabric.bench.ours_suspend import median_rate
from flowfabric.bench.ours_work import CONCURRENCY, LARGE_BATCH, claim_and_finish, work_off
from flowfabric.bench.run import on_loop
from flowfabric.bench.subject import BATCH, Figure, Figures, Task, rate

KEYS = 1_000
TAG = "bench.tenant"
ROOM = 10_000
"""A cap and a rate per second that never bind."""
RUNS = 3
PROCESSES = 4


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit of every execution of a lane of its name; 0 is no limit."""

    name: str
    cap: int = 0
    per_second: int = 0
    is_tagged: bool = False
    """Whether the executions are of many tenants in turn, by a tag."""
    is_keyed: bool = False
    """Whether the limit counts each tenant of its own."""

    async def items(self, engine: Engine) -> Iterator[NewExecution]:
        """Create the quota, and return an endless supply of executions that it limits."""
        policy = None
        if self.cap or self.per_second:
            quota = uuid7()
            await engine.create_quota_policy(
                quota, 1, self.per_second, self.cap, key_from=f"tag:{TAG}" if self.is_keyed else None
            )
            policy = ExecutionPolicy(quota_policy_id=str(quota))
        return (
            noop(lane=self.name, policy=policy, tags={TAG: f"tenant-{number % KEYS}"} if self.is_tagged else None)
            for number in count()
        )


FREE = Limit(name="free")
TAGGED = Limit(name="tagged", is_tagged=True)
SHARED = Limit(name="shared", cap=CONCURRENCY)
TIGHT = Limit(name="tight", cap=CONCURRENCY // 4)
ROOMY = Limit(name="roomy", cap=ROOM)
KEYED = Limit(name="keyed", cap=10, is_tagged=True, is_keyed=True)
RATED = Limit(name="rated", per_second=100 * ROOM)
OF_WORKER = (FREE, TAGGED, SHARED, TIGHT, KEYED, RATED)
OF_ENGINE = (FREE, TAGGED, ROOMY, KEYED)


async def measure(task: Task) -> Figures:
    """Process backlogs with each kind of limit in turn, with a worker and without one."""
    amount = task.count(20_000)
    async with engine_on(task.url) as engine, observing(task.url) as observer:
        lanes = {limit: await limit.items(engine) for limit in dict.fromkeys((*OF_WORKER, *OF_ENGINE))}
        # Open the connections and prepare the statements.
        for limit, items in lanes.items():
            await fill(engine, items, LARGE_BATCH)
            await work_off(engine, observer, 2 * LARGE_BATCH, lane=limit.name, concurrency=CONCURRENCY)
        await observer.analyze()
        rates: dict[str, list[Figure]] = {}
        # In turn, so that a temporary disturbance of the machine affects all.
        for _ in range(RUNS):
            for limit in OF_WORKER:
                await fill(engine, lanes[limit], amount)
                found = await work_off(engine, observer, amount, lane=limit.name, concurrency=CONCURRENCY)
                rates.setdefault(f"limits_worker_{limit.name}", []).append(found)
            for batch in (BATCH, LARGE_BATCH):
                for limit in OF_ENGINE:
                    await fill(engine, lanes[limit], amount)
                    found = await rate(amount, claim_and_finish(engine, amount, batch, lane=limit.name))
                    rates.setdefault(f"limits_engine_{batch}_{limit.name}", []).append(found)
                    # What batches that found no room have left.
                    await finish_rest(engine, observer, limit.name)
            await observer.analyze()
        figures = {name: median_rate(found) for name, found in rates.items()}
        figures["over_admissions"] = await over_admissions(engine, observer, task, lanes[TIGHT])
    return figures


async def finish_rest(engine: Engine, observer: Observer, lane: str) -> None:
    """Claim and complete until nothing is left."""
    while not await observer.ask(SQL.is_drained):
        await claim_and_finish(engine, LARGE_BATCH, LARGE_BATCH, lane=lane)


async def over_admissions(engine: Engine, observer: Observer, task: Task, items: Iterator[NewExecution]) -> Figure:
    """How many executions several worker processes have started beyond a cap that they share."""
    (since,) = await observer.read(SQL.read_clock)
    await fill(engine, items, task.count(20_000))
    async with working(task.url, TIGHT.name):
        await until_drained(observer)
    (count,) = await observer.read(SQL.count_over_admissions, since, TIGHT.cap)
    return Figure(value=count, unit="executions")


async def until_drained(observer: Observer) -> None:
    """Wait until every execution has ended."""
    while True:
        if await observer.ask(SQL.is_drained):
            return
        await asyncio.sleep(0.05)


@asynccontextmanager
async def working(url: str, lane: str) -> AsyncIterator[None]:
    """Run workers on a lane, each in its own process, for the duration of the block."""
    command = (sys.executable, "-m", __name__, "--url", url, "--lane", lane)
    processes = [await asyncio.create_subprocess_exec(*command) for _ in range(PROCESSES)]
    try:
        yield
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))


async def work(url: str, lane: str) -> None:
    """Run no-ops until the process is terminated."""

    async def handle() -> None:
        pass

    async with engine_on(url) as engine:
        await Worker(engine, lanes=[lane], handlers={KIND: handle}, concurrency=CONCURRENCY).run()


def main() -> None:
    """Run the process of a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--lane", required=True)
    options = parser.parse_args()
    on_loop(work(options.url, options.lane))


if __name__ == "__main__":
    main()

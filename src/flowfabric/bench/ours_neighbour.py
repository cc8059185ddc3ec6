"""FlowFabric: how long the executions of one tenant wait while another one has filled the lane."""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator

from flowfabric.bench.api import Context, Engine, ExecutionPolicy, NewExecution, Worker, uuid7
from flowfabric.bench.observer import observing
from flowfabric.bench.ours import KIND, check, engine_on, fill, noop
from flowfabric.bench.ours_limits import TAG
from flowfabric.bench.subject import Figures, Task, milliseconds

BACKLOG = 100_000
SAMPLES = 100
SLOTS = 10
CAP = 8
"""How many executions of one tenant may run at once, where the lane is not fair."""
SERVICE_S = 0.02
LONGEST_PAUSE_S = 0.05
NOISY, QUIET = "noisy", "quiet"


async def measure(task: Task) -> Figures:
    """Submit single executions of one tenant beside the backlog of another, on a fair lane and with a cap for each."""
    samples = max(5, round(SAMPLES * task.scale))
    figures: Figures = {}
    services: list[float] = []
    async with engine_on(task.url) as engine, observing(task.url) as observer:
        quota = uuid7()
        await engine.create_quota_policy(quota, 60, 0, CAP, key_from=f"tag:{TAG}")
        for name, policy in (("fair", None), ("capped", ExecutionPolicy(quota_policy_id=str(quota)))):
            lane = f"bench_{name}"
            check(await engine.create_many([of_tenant(NOISY, lane, policy)]))
            if policy is None:
                await engine.set_lane_fairness(lane_id=lane, fair_by=f"tag:{TAG}")
            await fill(engine, backlog(lane, policy), task.count(BACKLOG))
            await observer.analyze()
            waits = sorted(await disturb(engine, of_tenant(QUIET, lane, policy), samples, services))
            figures[f"neighbour_{name}_mean"] = milliseconds(statistics.mean(waits))
            figures[f"neighbour_{name}_p95"] = milliseconds(waits[len(waits) * 95 // 100])
    return {"neighbour_service": milliseconds(statistics.mean(services)), **figures}


def of_tenant(tenant: str, lane: str, policy: ExecutionPolicy | None) -> NewExecution:
    """An execution of this tenant."""
    return noop(lane=lane, policy=policy, tags={TAG: tenant})


def backlog(lane: str, policy: ExecutionPolicy | None) -> Iterator[NewExecution]:
    """An endless supply of executions of the tenant with the backlog."""
    while True:
        yield of_tenant(NOISY, lane, policy)


async def disturb(engine: Engine, item: NewExecution, samples: int, services: list[float]) -> list[float]:
    """Submit an execution so many times, one after the other; return the seconds until each of them starts."""
    loop = asyncio.get_running_loop()
    warm = asyncio.Event()
    started: asyncio.Future[float] = loop.create_future()

    async def handle(ctx: Context) -> None:
        began = time.perf_counter()
        if ctx.tags[TAG] == QUIET:
            started.set_result(began)
        await asyncio.sleep(SERVICE_S)
        services.append(time.perf_counter() - began)
        if len(services) >= 2 * SLOTS:
            warm.set()

    waits: list[float] = []
    async with Worker(engine, lanes=[item.lane_id], handlers={KIND: handle}, concurrency=SLOTS, drain=5):
        await warm.wait()
        for _ in range(samples):
            await asyncio.sleep(random.uniform(0, LONGEST_PAUSE_S))
            started = loop.create_future()
            submitted = time.perf_counter()
            check(await engine.create_many([item]))
            waits.append(await started - submitted)
    return waits

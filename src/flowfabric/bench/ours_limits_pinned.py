"""FlowFabric with an open transaction: the rate of a worker while the dead rows of a limit cannot be removed."""

import time

from flowfabric.bench.api import Engine, Worker
from flowfabric.bench.observer import Observer, observing, pinned
from flowfabric.bench.ours import KIND, SQL, engine_on, fill
from flowfabric.bench.ours_limits import FREE, SHARED, Limit
from flowfabric.bench.ours_work import CONCURRENCY
from flowfabric.bench.subject import Drain, Figures, Task, per_second

EXECUTIONS = 200_000
QUARTER = 4


async def measure(task: Task) -> Figures:
    """Process a backlog without a limit and one with a limit that all executions share."""
    async with engine_on(task.url) as engine, observing(task.url) as observer, pinned(task.url):
        return {
            **await quarters(engine, observer, FREE, task.count(EXECUTIONS), "limits_pinned_free"),
            **await quarters(engine, observer, SHARED, task.count(EXECUTIONS), "limits_pinned"),
        }


async def quarters(engine: Engine, observer: Observer, limit: Limit, count: int, name: str) -> Figures:
    """The rates at which a worker starts the first and the last quarter of a backlog."""
    await fill(engine, await limit.items(engine), count)
    await observer.analyze()
    drain = Drain(count)
    starts: list[float] = []

    async def handle() -> None:
        starts.append(time.perf_counter())
        drain.start()

    async with Worker(engine, lanes=[limit.name], handlers={KIND: handle}, concurrency=CONCURRENCY):
        await drain.rate(lambda: observer.ask(SQL.is_drained))
    part = count // QUARTER
    return {
        f"{name}_first": per_second(part, starts[part] - starts[0]),
        f"{name}_last": per_second(part, starts[-1] - starts[-1 - part]),
    }

"""FlowFabric, idle: how soon a new execution starts, and how many statements idle processes send."""

import asyncio
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from urllib.parse import urlsplit

import asyncpg

from flowfabric.bench.api import Engine, Worker
from flowfabric.bench.ours import KIND, LANE, SQL, engine_on
from flowfabric.bench.ours_submit import create_one
from flowfabric.bench.subject import Figure, Figures, Task, milliseconds

SUBMITS = 200
WINDOW_S = 20
SAME_STATEMENT = timedelta(milliseconds=5)


async def measure(task: Task) -> Figures:
    """Time submits up to the start of the handler, with an own engine for the worker; then count idle statements."""
    async with engine_on(task.url) as engine, engine_on(task.url) as other:
        started = asyncio.Event()

        async def handle() -> None:
            started.set()

        async with Worker(other, lanes=[LANE], handlers={KIND: handle}):
            latencies = sorted([await submit_to_start(engine, started) for _ in range(task.count(SUBMITS))])
            await asyncio.sleep(0.5)
            idle = await idle_statements(task.url, max(3, WINDOW_S * task.scale))
    return {
        "submit_to_start_p50": milliseconds(latencies[len(latencies) // 2]),
        "submit_to_start_p99": milliseconds(latencies[len(latencies) * 99 // 100]),
        "idle_statements": idle,
    }


async def submit_to_start(engine: Engine, started: asyncio.Event) -> float:
    """The seconds from the call that submits to the start of the handler."""
    started.clear()
    submitted = time.perf_counter()
    await create_one(engine)
    await started.wait()
    seconds = time.perf_counter() - submitted
    # The worker completes this execution and is idle again before the next.
    await asyncio.sleep(0.01)
    return seconds


async def idle_statements(url: str, seconds: float) -> Figure:
    """The statements per second of all clients of a database, watched from another database."""
    name = urlsplit(url).path[1:]
    connection = await asyncpg.connect(url, database="postgres")
    try:
        before = {(row[0], row[1]) for row in await connection.fetch(SQL.list_activity.sql, name)}
        seen = set(before)
        started = time.perf_counter()
        # A statement is missed only if the same connection starts another one within this pause.
        while time.perf_counter() - started < seconds:
            seen.update((row[0], row[1]) for row in await connection.fetch(SQL.list_activity.sql, name))
            await asyncio.sleep(0.005)
    finally:
        await connection.close()
    return Figure(value=count_statements(seen - before) / seconds, unit="statements/s")


def count_statements(starts: Iterable[tuple[int, datetime]]) -> int:
    """The number of statements among these start times: the bind and the execute of one have times close together."""
    ordered = sorted(starts)
    return sum(
        index == 0 or pid != ordered[index - 1][0] or at - ordered[index - 1][1] > SAME_STATEMENT
        for index, (pid, at) in enumerate(ordered)
    )

"""FlowFabric: the time from a submission to its result, with a worker in this process and in another."""

import argparse
import asyncio
import signal
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flowfabric.bench.api import Fabric, Task
from flowfabric.bench.ours import settings_on
from flowfabric.bench.run import on_loop
from flowfabric.bench.subject import Figure, Figures, median_ms, timed
from flowfabric.bench.subject import Task as Given

SUBMITS = 200
MANY = 3_000
BURSTS = 3
FIRST_RESULT_S = 30
IDLE_S = 0.03
"""The pause after each result, in which the worker becomes idle again."""


async def measure(task: Given) -> Figures:
    """Await results one at a time, with an idle worker, and thousands at once."""
    count = max(10, round(SUBMITS * task.scale))
    fabric, noop = app(task.url)
    async with fabric:
        async with fabric.worker():
            here = [await result_when_idle(noop) for _ in range(count)]
            bursts = [await timed(many_results(noop)) for _ in range(BURSTS)]
        async with worker_process(task.url):
            await (await noop.submit()).result(timeout=FIRST_RESULT_S)
            across = [await result_when_idle(noop) for _ in range(count)]
    return {
        "submit_to_result": median_ms(here),
        "submit_to_result_across": median_ms(across),
        "results_3000": Figure(value=statistics.median(bursts), unit="s"),
    }


def app(url: str) -> tuple[Fabric, Task[[], [], Any]]:
    """A fabric with one no-op task; every process creates the same."""
    fabric = Fabric(settings=settings_on(url))

    @fabric.task
    async def noop() -> None:
        pass

    return fabric, noop


async def result_when_idle(noop: Task[[], [], Any]) -> float:
    """The seconds from the call that submits to the result, and then a pause."""

    async def submit_and_await() -> None:
        await (await noop.submit()).result()

    seconds = await timed(submit_and_await())
    await asyncio.sleep(IDLE_S)
    return seconds


async def many_results(noop: Task[[], [], Any]) -> None:
    """Submit thousands at once and await all their results."""

    async def one() -> None:
        await (await noop.submit()).result()

    await asyncio.gather(*(one() for _ in range(MANY)))


@asynccontextmanager
async def worker_process(url: str) -> AsyncIterator[None]:
    """Run a worker in another process for the duration of the block."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, "--url", url)
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def work(url: str) -> None:
    """Run a worker until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    fabric, _ = app(url)
    async with fabric, fabric.worker():
        await stop.wait()


def main() -> None:
    """Run the worker process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    on_loop(work(parser.parse_args().url))


if __name__ == "__main__":
    main()

"""Shared by all subjects: the task, timing, and figures."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

BATCH = 100
CONNECTIONS = 4
PAYLOADS = tuple(b"%0100d" % number for number in range(1000))
"""A hundred bytes each, all different: equal payloads of a batch could be sent as one."""
LARGE_PAYLOADS = tuple(b"%01500d" % number for number in range(1000))
PAYLOAD = PAYLOADS[-1]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number with its unit."""

    value: float
    unit: str


Figures = dict[str, Figure]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The empty database of a subject, and its share of the full load."""

    url: str
    scale: float

    def count(self, full: int) -> int:
        """The number of items at this scale, rounded to whole batches."""
        return max(1, round(full * self.scale / BATCH)) * BATCH


Measure = Callable[[Task], Coroutine[Any, Any, Figures]]


def per_second(count: int, seconds: float) -> Figure:
    """A throughput."""
    return Figure(value=count / seconds, unit="/s")


def milliseconds(seconds: float) -> Figure:
    """A duration."""
    return Figure(value=seconds * 1000, unit="ms")


def median_ms(durations: Iterable[float]) -> Figure:
    """The median of durations in seconds, as milliseconds."""
    return milliseconds(statistics.median(durations))


async def timed(work: Awaitable[object]) -> float:
    """The seconds until the work is done."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def rate(count: int, work: Awaitable[object]) -> Figure:
    """The throughput of work on `count` items."""
    started = time.perf_counter()
    await work
    return per_second(count, time.perf_counter() - started)


async def spread(times: int, *calls: Callable[[], Awaitable[object]]) -> None:
    """Make `times` calls in total; each of `calls` is a concurrent loop that takes the next one."""
    tickets = iter(range(times))

    async def repeat(call: Callable[[], Awaitable[object]]) -> None:
        for _ in tickets:
            await call()

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(repeat(call))


class Drain:
    """Times a backlog of no-ops from the start of the first to the committed completion of the last."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers = itertools.count(1)
        self._first = 0.0
        self._loop = asyncio.get_running_loop()
        self._all_started = asyncio.Event()

    def start(self) -> None:
        """Record the start of a no-op; safe in any thread."""
        number = next(self._numbers)
        if number == 1:
            self._first = time.perf_counter()
        if number == self._count:
            self._loop.call_soon_threadsafe(self._all_started.set)

    async def rate(self, is_drained: Callable[[], Awaitable[bool]]) -> Figure:
        """Wait until the store says that the backlog is empty, and return the throughput."""
        await self._all_started.wait()
        while True:
            if await is_drained():
                return per_second(self._count, time.perf_counter() - self._first)
            await asyncio.sleep(0.005)

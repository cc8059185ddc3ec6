"""FlowFabric: the rate of appending frames to streams, and how soon waiting tails return them."""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import NamedTuple

from flowfabric.bench.api import Engine, Handle
from flowfabric.bench.observer import observing
from flowfabric.bench.ours import check, engine_on, noop
from flowfabric.bench.ours_suspend import claim_many
from flowfabric.bench.run import on_loop
from flowfabric.bench.subject import Figure, Figures, Task, median_ms, milliseconds, rate, spread

# Not imported by `api`: the other subjects can be compared with a version that has no streams.
from flowfabric.streams import BestEffortLive, BestEffortLiveConfig, Durable, DurableSummary, Frame, StreamMode

STREAMS = 10
PENDING = 1_000
TOKENS = tuple(b"%020d" % number for number in range(1_000))
PATCHES = tuple(b'{"step": {"name": "build", "done": %d}, "left": null}' % number for number in range(1_000))
DURABLE = Durable()
SUMMARY = DurableSummary()
LIVE = BestEffortLive(config=BestEffortLiveConfig(ttl_ms=5_000))
SAMPLES = 60
TAILS = 200
POOL = 4
BURSTS = 3
PARK_S = 0.01
"""The pause before each append, in which the tail finds nothing and starts to wait."""
PARK_ALL_S = 0.2
"""The same for many tails."""
BLOCK_MS = 30_000
LEASE_MS = 600_000
PROBES = "probes"
"""The lane of the executions that are processed while tails wake up."""


async def measure(task: Task) -> Figures:
    """Append with many concurrent calls and one by one, then wake one tail and many."""
    async with engine_on(task.url) as engine:
        figures = await appends(engine, task)
        samples = max(10, round(SAMPLES * task.scale))
        (handle,) = await running(engine, 1)
        here = await delays(engine, handle.execution_id, lambda: append_time(engine, handle), samples)
        async with writer_process(task.url) as (execution_id, append):
            across = await delays(engine, execution_id, append, samples)
    figures |= {"append_to_tail": median_ms(here), "append_to_tail_across": median_ms(across)}
    async with engine_on(task.url, database_pool_size=POOL) as engine:
        return figures | await wake_many(engine)


async def running(engine: Engine, count: int) -> list[Handle]:
    """Create and claim `count` executions."""
    check(await engine.create_many([noop() for _ in range(count)]))
    return await claim_many(engine, count, lease_ttl_ms=LEASE_MS)


async def appends(engine: Engine, task: Task) -> Figures:
    """The rates of appending, by concurrent calls in each mode and one by one."""
    many, few = task.count(30_000), task.count(500)
    handles = await running(engine, 3 * STREAMS + 2)
    durable, live, summary = (handles[at : at + STREAMS] for at in range(0, 3 * STREAMS, STREAMS))
    single, alone = handles[-2:]
    # Open the connections and prepare the statements.
    await append_all(engine, durable, 2 * PENDING)
    async with observing(task.url) as observer:
        await observer.analyze()
    return {
        "frames_grouped": await rate(many, append_all(engine, durable, many)),
        "frames_one_stream": await rate(many, append_all(engine, [single], many)),
        "frames_one_commit": await rate(few, append_all(engine, [alone], few, callers=1)),
        "live_frames": await rate(many, append_all(engine, live, many, mode=LIVE)),
        "summary_patches": await rate(many // 2, append_all(engine, summary, many // 2, mode=SUMMARY)),
    }


async def append_all(
    engine: Engine,
    handles: Sequence[Handle],
    count: int,
    *,
    mode: StreamMode = DURABLE,
    callers: int = PENDING,
) -> None:
    """Append `count` frames to these streams in turn; each of the concurrent callers awaits one append at a time."""
    targets = cycle(handles)
    payloads = cycle(PATCHES if mode is SUMMARY else TOKENS)

    async def append() -> None:
        await engine.append_frame(next(targets), Frame(bytes=next(payloads), mode=mode))

    await spread(count, *[append] * callers)


async def append_time(engine: Engine, handle: Handle) -> None:
    """Append a frame with the time of this call as its payload."""
    await engine.append_frame(handle, Frame(bytes=str(time.perf_counter()).encode()))


class Delivery(NamedTuple):
    """The id of the frame that a tail returned, and the seconds since the call that appended it."""

    frame_id: str
    seconds: float


async def next_frame(engine: Engine, execution_id: str, after: str) -> Delivery:
    """Wait for the frame that `append_time` appends after this position."""
    found = await engine.tail_stream(execution_id, 0, after=after, block_ms=BLOCK_MS)
    now = time.perf_counter()
    if not found.frames:
        raise RuntimeError(f"a tail of {execution_id} after {after} returned no frame within {BLOCK_MS} ms")
    # The clock of `perf_counter` is the same in all processes of a machine.
    return Delivery(found.frames[0].id, now - float(found.frames[0].text))


async def delays(engine: Engine, execution_id: str, append: Callable[[], Awaitable[None]], samples: int) -> list[float]:
    """The seconds from each call of `append_frame` to the return of a tail that waited for it."""
    seconds: list[float] = []
    after = "0-0"
    # The first one opens the stream, and the tail may still poll.
    for _ in range(samples + 1):
        tail = asyncio.create_task(next_frame(engine, execution_id, after))
        await asyncio.sleep(PARK_S)
        await append()
        after, delay = await tail
        seconds.append(delay)
    return seconds[1:]


@asynccontextmanager
async def writer_process(url: str) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """Start a process with a stream for the duration of the block; yield its execution and a call that appends."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, "--url", url, stdin=pipe, stdout=pipe
    )
    commands, answers = process.stdin, process.stdout
    assert commands is not None
    assert answers is not None

    async def append() -> None:
        commands.write(b"\n")
        await commands.drain()

    try:
        if not (execution_id := (await answers.readline()).decode().strip()):
            raise RuntimeError(f"the process that appends exited with {await process.wait()}")
        yield execution_id, append
    finally:
        commands.close()
        await process.wait()


async def write(url: str) -> None:
    """Print the id of a new execution, and append one frame to its stream for each line on stdin."""
    async with engine_on(url) as engine:
        (handle,) = await running(engine, 1)
        print(handle.execution_id, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            await append_time(engine, handle)


class Wake(NamedTuple):
    """The seconds until the last tail returned, and the longest probe meanwhile."""

    seconds: float
    longest_probe: float


async def wake_many(engine: Engine) -> Figures:
    """The time to wake tails of as many streams, or of a single one, whichever is longer."""
    handles = await running(engine, TAILS)
    for handle in handles:
        await append_time(engine, handle)
    apart = [await wake(engine, handles) for _ in range(BURSTS)]
    together = [await wake(engine, handles[:1]) for _ in range(BURSTS)]
    slowest = max(statistics.median(each.seconds for each in wakes) for wakes in (apart, together))
    return {
        "tails_200_wake": Figure(value=slowest, unit="s"),
        "tails_200_probe": milliseconds(max(each.longest_probe for each in (*apart, *together))),
    }


async def wake(engine: Engine, handles: Sequence[Handle]) -> Wake:
    """Append one frame to each of these streams, for which TAILS tails wait in total."""
    newest = [(await engine.read_stream(each.execution_id, 0, count_limit=1_000)).frames[-1].id for each in handles]
    tails = [
        asyncio.create_task(next_frame(engine, handle.execution_id, after))
        for (handle, after), _ in zip(cycle(zip(handles, newest, strict=True)), range(TAILS), strict=False)
    ]
    await asyncio.sleep(PARK_ALL_S)
    probes: list[float] = []
    probing = asyncio.create_task(probe(engine, probes))
    try:
        began = time.perf_counter()
        await asyncio.gather(*(append_time(engine, handle) for handle in handles), *tails)
        seconds = time.perf_counter() - began
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    return Wake(seconds, max(probes))


async def probe(engine: Engine, seconds: list[float]) -> None:
    """Submit, claim and complete one execution after the other; record how long each took, also the cancelled one."""
    while True:
        began = time.perf_counter()
        try:
            check(await engine.create_many([noop(lane=PROBES)]))
            (claimed,) = await engine.claim_many(
                lanes=[PROBES], worker_id="bench", worker_instance_id="bench-probe", limit=1, lease_ttl_ms=LEASE_MS
            )
            await engine.complete(claimed.handle, b"{}")
        finally:
            seconds.append(time.perf_counter() - began)


def main() -> None:
    """Run the process that appends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    on_loop(write(parser.parse_args().url))


if __name__ == "__main__":
    main()

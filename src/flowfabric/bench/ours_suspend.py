"""FlowFabric: how soon a signal resumes a suspended execution, and the rate of many concurrent signals.

For comparison, as many executions are completed, also by concurrent calls.
"""

import asyncio
import statistics
import time

from flowfabric.bench.api import (
    Accepted,
    Context,
    Engine,
    Fresh,
    Handle,
    PendingWaitpoint,
    Single,
    SuspendArgs,
    Suspended,
    SuspensionId,
    SuspensionReason,
    WaitpointId,
    Worker,
    uuid7,
)
from flowfabric.bench.observer import observing
from flowfabric.bench.ours import KIND, LANE, engine_on, fill, noops
from flowfabric.bench.ours_submit import create_one
from flowfabric.bench.subject import Figure, Figures, Task, milliseconds, rate

WAITS = 200
BURST = 1_000
BURSTS = 3
CLAIMED = 500
KEY = "answer"
CONDITION = Single(waitpoint_key=KEY)


async def measure(task: Task) -> Figures:
    """Measure round trips one at a time with an otherwise idle worker, then bursts without a worker."""
    async with engine_on(task.url) as engine:
        async with engine_on(task.url) as other:
            trips = await round_trips(engine, other, task.count(WAITS))
        async with observing(task.url) as observer:
            resumes, completions = [], []
            for burst in range(BURSTS):
                waiting = await suspend_many(engine, task.count(BURST))
                if burst == 0:
                    await observer.analyze()
                resumes.append(await rate(len(waiting), resume_all(engine, waiting)))
                leased = await claim_many(engine, len(waiting))
                completions.append(await rate(len(leased), complete_all(engine, leased)))
    return {
        "suspend_resume_round_trip": milliseconds(statistics.median(trips)),
        "signal_resume_burst": median_rate(resumes),
        "complete_burst": median_rate(completions),
    }


def median_rate(rates: list[Figure]) -> Figure:
    """The median of an odd number of rates."""
    return sorted(rates, key=lambda each: each.value)[len(rates) // 2]


async def round_trips(engine: Engine, other: Engine, count: int) -> list[float]:
    """The seconds from a handler's call of suspend, through its signal and second run, to its committed completion."""
    began = 0.0
    suspended: asyncio.Queue[tuple[Context, PendingWaitpoint]] = asyncio.Queue()
    resumed = asyncio.Event()

    async def handle(ctx: Context) -> None:
        nonlocal began
        if ctx.is_resumed:
            resumed.set()
            return
        waitpoint = await ctx.create_waitpoint(KEY, 60_000)
        began = time.perf_counter()
        try:
            await ctx.suspend(condition=CONDITION, waitpoints=[waitpoint])
        finally:
            # `suspend` ends the handler after its commit.
            suspended.put_nowait((ctx, waitpoint))

    async def trip(worker: Worker) -> float:
        resumed.clear()
        await create_one(engine)
        ctx, waitpoint = await suspended.get()
        await engine.deliver_signal(
            execution_id=ctx.execution_id,
            waitpoint_id=waitpoint.waitpoint_id,
            waitpoint_token=waitpoint.hmac_token,
            signal_name="go",
        )
        await resumed.wait()
        await until_idle(worker)
        return time.perf_counter() - began

    async with Worker(other, lanes=[LANE], handlers={KIND: handle}) as worker:
        return [await trip(worker) for _ in range(count)]


async def until_idle(worker: Worker) -> None:
    """Wait until the worker runs nothing: a slot is freed after the completion is committed."""
    while True:
        if not worker.running:
            return
        await asyncio.sleep(0.0005)


async def suspend_many(engine: Engine, count: int) -> list[Suspended]:
    """Create and suspend `count` executions."""
    await fill(engine, noops(), count)
    return await asyncio.gather(*(suspend(engine, each) for each in await claim_many(engine, count)))


async def suspend(engine: Engine, handle: Handle) -> Suspended:
    """Suspend an execution on a new waitpoint."""
    outcome = await engine.suspend(
        handle,
        SuspendArgs(
            suspension_id=SuspensionId(uuid7()),
            waitpoints=(Fresh(waitpoint_id=WaitpointId(uuid7()), waitpoint_key=KEY),),
            resume_condition=CONDITION,
            reason_code=SuspensionReason.WAITING_FOR_SIGNAL,
        ),
    )
    assert isinstance(outcome, Suspended)
    return outcome


async def resume_all(engine: Engine, waiting: list[Suspended]) -> None:
    """Signal all of them concurrently, one call each."""
    answers = await asyncio.gather(
        *(
            engine.deliver_signal(
                execution_id=each.handle.execution_id,
                waitpoint_id=each.details.waitpoint_id,
                waitpoint_token=each.details.waitpoint_token,
                signal_name="go",
            )
            for each in waiting
        )
    )
    assert all(isinstance(each, Accepted) for each in answers)


async def complete_all(engine: Engine, handles: list[Handle]) -> None:
    """Complete all of them concurrently, one call each."""
    await asyncio.gather(*(engine.complete(handle, b"{}") for handle in handles))


async def claim_many(engine: Engine, count: int, *, lease_ttl_ms: int = 60_000) -> list[Handle]:
    """Claim `count` executions; the lane has that many."""
    handles: list[Handle] = []
    while len(handles) < count:
        claimed = await engine.claim_many(
            lanes=[LANE],
            worker_id="bench",
            worker_instance_id="bench-1",
            limit=min(count - len(handles), CLAIMED),
            lease_ttl_ms=lease_ttl_ms,
        )
        handles += [each.handle for each in claimed]
    return handles

"""FlowFabric with an open transaction: claims and checks for due timers, past dead rows that cannot be removed."""

import asyncio
from itertools import repeat

from flowfabric.bench.api import ExecutionPolicy, Reconciler, TimeoutPolicy
from flowfabric.bench.observer import observing, pinned
from flowfabric.bench.ours import engine_on, fill, noop, noops
from flowfabric.bench.ours_work import claim_and_finish
from flowfabric.bench.subject import BATCH, Figures, Task, median_ms, rate, timed

BACKLOG = 40_000
LEASE_MS = 10_000
MARGIN_S = 0.5
"""Added to the lease time, after which the timeouts have certainly passed."""
CHECKS = 30
TIMED = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout_ms=LEASE_MS))


async def measure(task: Task) -> Figures:
    """Process a backlog, then one with timeouts, and check for due timers after these have passed."""
    tenth = task.count(BACKLOG // 10)
    async with observing(task.url) as observer, engine_on(task.url) as engine, pinned(task.url):
        await fill(engine, noops(), 10 * tenth)
        await observer.analyze()
        tenths = [await rate(tenth, claim_and_finish(engine, tenth, BATCH, lease_ttl_ms=LEASE_MS)) for _ in range(10)]
        await fill(engine, repeat(noop(policy=TIMED)), 10 * tenth)
        await claim_and_finish(engine, 10 * tenth, BATCH, lease_ttl_ms=LEASE_MS)
        await asyncio.sleep(LEASE_MS / 1000 + MARGIN_S)
        reconciler = Reconciler(engine)
        checks = [await timed(reconciler.catch_up()) for _ in range(CHECKS)]
    return {
        "pinned_backlog_first": tenths[0],
        "pinned_backlog_last": tenths[-1],
        "pinned_timer_look": median_ms(checks),
    }

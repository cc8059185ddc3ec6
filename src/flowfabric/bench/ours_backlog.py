"""FlowFabric: the time of a claim of a hundred from backlogs of different sizes and mixtures."""

import time
from collections.abc import Iterator, Sequence
from itertools import count

from flowfabric.bench.api import Engine, ExecutionPolicy, NewExecution, RoutingRequirements
from flowfabric.bench.observer import observing
from flowfabric.bench.ours import KIND, engine_on, fill, noop, noops
from flowfabric.bench.subject import BATCH, Figure, Figures, Task, median_ms

SMALL = 20_000
CLAIMS = 30
PRIORITIES = 10
CAPABILITIES = ("gpu", "eu", "large")


async def measure(task: Task) -> Figures:
    """Claim from a small and from a large backlog, and behind executions that the worker cannot take."""
    large, unmatched = (1_000_000, 300_000) if task.scale >= 1 else (100_000, 30_000)
    figures: Figures = {}
    async with engine_on(task.url) as engine, observing(task.url) as observer:

        async def grow(items: Iterator[NewExecution], size: int) -> None:
            await fill(engine, items, size)
            await observer.analyze()

        for suffix, items in (("", noops(lane="plain")), ("_mixed", mixed("mixed"))):
            lane = next(items).lane_id
            await grow(items, SMALL)
            figures[f"claim_{short(SMALL)}{suffix}"] = await claim_cost(engine, lane, CAPABILITIES)
            await grow(items, large - SMALL)
            figures[f"claim_{short(large)}{suffix}"] = await claim_cost(engine, lane, CAPABILITIES)
        await grow(unmatchable_first("behind", unmatched), unmatched + 2 * CLAIMS * BATCH)
        figures[f"claim_behind_{short(unmatched)}_unmatched"] = await claim_cost(engine, "behind", ())
        await grow(of_another_kind_first("kinds", unmatched), unmatched + 2 * CLAIMS * BATCH)
        figures[f"claim_behind_{short(unmatched)}_of_other_kinds"] = await claim_cost(engine, "kinds", (), kinds=[KIND])
    return figures


def mixed(lane: str) -> Iterator[NewExecution]:
    """Executions of every priority in turn, which require no capability, one of them or all."""
    needs = [requiring(), *map(requiring, CAPABILITIES), requiring(*CAPABILITIES)]
    for number in count():
        yield noop(lane=lane, priority=number % PRIORITIES, policy=needs[number // PRIORITIES % len(needs)])


def unmatchable_first(lane: str, unmatched: int) -> Iterator[NewExecution]:
    """Executions of high priority that require a capability no worker has, then plain ones."""
    needs = requiring("quantum")
    for _ in range(unmatched):
        yield noop(lane=lane, priority=PRIORITIES, policy=needs)
    yield from noops(lane=lane)


def of_another_kind_first(lane: str, others: int) -> Iterator[NewExecution]:
    """Executions of high priority and another kind, then plain ones."""
    for _ in range(others):
        yield noop(lane=lane, kind="other", priority=PRIORITIES)
    yield from noops(lane=lane)


def requiring(*capabilities: str) -> ExecutionPolicy | None:
    """A policy that requires these capabilities, or None without any."""
    if not capabilities:
        return None
    return ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=capabilities))


async def claim_cost(
    engine: Engine, lane: str, capabilities: tuple[str, ...], *, kinds: Sequence[str] | None = None
) -> Figure:
    """The median duration of a claim of a hundred from a lane."""
    durations = []
    for _ in range(CLAIMS):
        started = time.perf_counter()
        claimed = await engine.claim_many(
            lanes=[lane],
            worker_id="bench",
            worker_instance_id="bench-1",
            limit=BATCH,
            capabilities=capabilities,
            kinds=kinds,
            lease_ttl_ms=600_000,
        )
        durations.append(time.perf_counter() - started)
        if len(claimed) != BATCH:
            raise RuntimeError(f"a claim of {BATCH} from lane {lane!r} returned {len(claimed)} executions")
    return median_ms(durations)


def short(number: int) -> str:
    """A round number with the suffix k or m."""
    return f"{number // 1_000_000}m" if number >= 1_000_000 else f"{number // 1_000}k"

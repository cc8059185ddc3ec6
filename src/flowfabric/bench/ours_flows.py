"""FlowFabric: the rates and delays of flows, from chains to wide fans, and of the cancellation of their members."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import NamedTuple

from flowfabric.bench.api import Engine, Worker
from flowfabric.bench.observer import Observer, observing
from flowfabric.bench.ours import KIND, LANE, SQL, engine_on, fill, noops
from flowfabric.bench.ours_suspend import median_rate
from flowfabric.bench.ours_work import work_off
from flowfabric.bench.subject import PAYLOAD, Figure, Figures, Task, milliseconds, per_second, timed

# Not imported by `api`: the other subjects can be compared with a version that has no flows.
from flowfabric.model.edge import OnSatisfied, QuorumOfEdges
from flowfabric.model.flow import CancellationPolicy, FlowCancelled, FlowEdge, FlowNode, FlowSubmitted, WaitIndefinite

CHAINS = 100
CHAIN = 10
HOPS = 20
"""How many nodes the chain has that runs alone."""
ROUNDS_OF_CHAINS = 10
"""How often the chains run together: one round is too short for one figure."""
SAMPLES = 20
"""How many chains run alone, one after the other, and how many groups cancel their siblings."""
WIDTH = 10_000
SIBLINGS = 1_000
RUNS = 3
CHILD_LANE = "bench_children"
"""The lane of the executions that are not claimed."""
POLL_S = 0.005

Edges = Sequence[tuple[str, str]]


async def measure(task: Task) -> Figures:
    """Run flows with a worker, then cancel members without one."""
    width, samples = task.count(WIDTH), max(2, round(SAMPLES * task.scale))
    async with engine_on(task.url) as engine, observing(task.url) as observer:
        async with working(engine) as starts:
            # Open the connections and prepare the statements.
            await run_chains(engine)
            await observer.analyze()
            chains = [await run_chains(engine) for _ in range(ROUNDS_OF_CHAINS)]
            hops = [hop for _ in range(samples) for hop in await run_hops(engine, starts)]
        fans: list[Fan] = []
        plain: list[Figure] = []
        # In turn, so that a temporary disturbance of the machine affects both.
        for _ in range(RUNS):
            fans.append(await run_fan(engine, width))
            await fill(engine, noops(), width)
            plain.append(await work_off(engine, observer, width))
            await observer.analyze()
        siblings = [await cancel_siblings(engine, observer) for _ in range(samples)]
        cancels = [await cancel_members(engine, width) for _ in range(RUNS)]
    return {
        "flow_chains": Figure(value=CHAINS / statistics.median(chains), unit="flows/s"),
        **percentiles("flow_hop", hops),
        "flow_fan_submit": Figure(value=statistics.median(fan.submit_s for fan in fans), unit="s"),
        "flow_fan_rate": median_rate([fan.rate for fan in fans]),
        "flow_fan_plain": median_rate(plain),
        **percentiles("sibling_cancel", siblings),
        "flow_cancel": Figure(value=statistics.median(cancels), unit="s"),
    }


def percentiles(name: str, seconds: Iterable[float]) -> Figures:
    """The median and the 99th percentile of durations."""
    ordered = sorted(seconds)
    return {
        f"{name}_p50": milliseconds(statistics.median(ordered)),
        f"{name}_p99": milliseconds(ordered[len(ordered) * 99 // 100]),
    }


@asynccontextmanager
async def working(engine: Engine) -> AsyncIterator[list[float]]:
    """Run a worker with default slots for the duration of the block; yield the times at which its handlers start."""
    starts: list[float] = []

    async def handle() -> None:
        starts.append(time.perf_counter())

    async with Worker(engine, lanes=[LANE], handlers={KIND: handle}):
        yield starts


async def run_hops(engine: Engine, starts: list[float]) -> list[float]:
    """Run one chain alone; return the seconds from the start of each handler to that of the next."""
    starts.clear()
    await run_to_end(engine, *chain(HOPS))
    return [after - before for before, after in pairwise(starts)]


def chain(length: int) -> tuple[list[str], Edges]:
    """The nodes and edges of a chain."""
    names = [f"n{number}" for number in range(length)]
    return names, list(pairwise(names))


def fan(width: int) -> tuple[list[str], Edges]:
    """The nodes and edges of a flow that spreads from one node to many, which lead to one."""
    names = [f"m{number}" for number in range(width)]
    return ["first", *names, "last"], [("first", name) for name in names] + [(name, "last") for name in names]


def node(name: str, *, lane: str = LANE) -> FlowNode:
    """A no-op node."""
    return FlowNode(name=name, lane_id=lane, execution_kind=KIND, input_payload=PAYLOAD, creator_identity="bench")


async def submit(
    engine: Engine, nodes: Sequence[FlowNode], edges: Edges = (), groups: dict[str, QuorumOfEdges] | None = None
) -> FlowSubmitted:
    """Submit a flow by one call."""
    submitted = await engine.submit_flow(
        flow_kind="bench",
        namespace="bench",
        nodes=nodes,
        edges=[FlowEdge(upstream=upstream, downstream=downstream) for upstream, downstream in edges],
        groups=groups,
    )
    assert isinstance(submitted, FlowSubmitted)
    return submitted


async def run_to_end(engine: Engine, names: Sequence[str], edges: Edges) -> None:
    """Submit a flow of no-ops and wait until it has ended."""
    flow = await submit(engine, [node(name) for name in names], edges)
    await engine.wait_for_flow(flow.flow_id)


async def run_chains(engine: Engine) -> float:
    """The seconds in which chains, submitted by concurrent calls, run from the first call to the last end."""
    return await timed(asyncio.gather(*(run_to_end(engine, *chain(CHAIN)) for _ in range(CHAINS))))


class Fan(NamedTuple):
    """The seconds of the call that submits a fan, and the rate of its executions from then on."""

    submit_s: float
    rate: Figure


async def run_fan(engine: Engine, width: int) -> Fan:
    """Run a fan by a worker with default slots that is idle before."""
    names, edges = fan(width)
    nodes = [node(name) for name in names]
    async with working(engine):
        began = time.perf_counter()
        flow = await submit(engine, nodes, edges)
        submitted = time.perf_counter()
        await engine.wait_for_flow(flow.flow_id)
        ended = time.perf_counter()
    return Fan(submitted - began, per_second(len(nodes), ended - submitted))


async def cancel_siblings(engine: Engine, observer: Observer) -> float:
    """The seconds from the return of the completion that decides a quorum to the end of the last sibling."""
    names = [f"s{number}" for number in range(SIBLINGS + 1)]
    flow = await submit(
        engine,
        [*(node(name) for name in names), node("child", lane=CHILD_LANE)],
        [(name, "child") for name in names],
        {"child": QuorumOfEdges(1, OnSatisfied.CANCEL_REMAINING)},
    )
    (claimed,) = await engine.claim_many(
        lanes=[LANE], worker_id="bench", worker_instance_id="bench-1", limit=1, lease_ttl_ms=60_000
    )
    await engine.complete(claimed.handle, b"{}")

    return await timed(until_only_child_left(observer, flow))


async def until_only_child_left(observer: Observer, flow: FlowSubmitted) -> None:
    """Wait until all members of a flow have ended except one."""
    while True:
        if await observer.ask(SQL.is_only_member_left, flow.flow_id):
            return
        await asyncio.sleep(POLL_S)


async def cancel_members(engine: Engine, count: int) -> float:
    """The seconds in which one call of `cancel_flow` cancels a flow and all of its waiting members."""
    flow = await submit(engine, [node(f"n{number}") for number in range(count)])
    began = time.perf_counter()
    outcome = await engine.cancel_flow(
        flow.flow_id, reason="bench", cancellation_policy=CancellationPolicy.CANCEL_ALL, wait=WaitIndefinite()
    )
    assert isinstance(outcome, FlowCancelled)
    return time.perf_counter() - began

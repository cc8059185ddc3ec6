"""FlowFabric: the time of a claim from a lane with one queue and with a thousand queues."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from flowfabric.bench.api import Engine, NewExecution
from flowfabric.bench.observer import observing
from flowfabric.bench.ours import LARGEST_BATCH, engine_on, fill, noop
from flowfabric.bench.subject import Figures, Task, median_ms

QUEUES = 1_000
CLAIMS = 30
SIZES = (1, 64, 500)


@dataclass(frozen=True, kw_only=True)
class Claimer:
    """One way to claim, and the durations of its claims by size."""

    name: str
    lane: str
    kinds: tuple[str, ...] | None
    seconds: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in SIZES})

    async def claim(self, engine: Engine, size: int) -> None:
        """Claim `size` executions; the lane has that many."""
        started = time.perf_counter()
        claimed = await engine.claim_many(
            lanes=[self.lane],
            kinds=self.kinds,
            worker_id="bench",
            worker_instance_id="bench-1",
            limit=size,
            lease_ttl_ms=600_000,
        )
        self.seconds[size].append(time.perf_counter() - started)
        if len(claimed) != size:
            raise RuntimeError(f"a claim of {size} from lane {self.lane!r} returned {len(claimed)} executions")


async def measure(task: Task) -> Figures:
    """Claim from a lane with one queue and from a lane with a thousand, which have the same number of executions."""
    kinds = [f"noop-{number}" for number in range(QUEUES)]
    claimers = (
        Claimer(name="queues_1", lane="one", kinds=None),
        Claimer(name="queues_1000", lane="many", kinds=None),
        Claimer(name="queues_1000", lane="many", kinds=tuple(kinds)),
    )
    claims = max(3, round(CLAIMS * task.scale))
    # Two claimers share a lane and each makes one extra claim; the factor 3 leaves a third over, so no queue runs dry.
    backlog = -(-3 * (claims + 1) * sum(SIZES) // LARGEST_BATCH) * LARGEST_BATCH
    async with engine_on(task.url) as engine, observing(task.url) as observer:
        await fill(engine, of_kinds("one", kinds[:1]), backlog)
        await fill(engine, of_kinds("many", kinds), backlog)
        await observer.analyze()
        for size in SIZES:
            # The first claim, which plans the statement, is not counted.
            for _ in range(claims + 1):
                for claimer in claimers:
                    await claimer.claim(engine, size)
    return {
        f"{claimer.name}_claim_{size}{'_named' if claimer.kinds else ''}": median_ms(seconds[1:])
        for claimer in claimers
        for size, seconds in claimer.seconds.items()
    }


def of_kinds(lane: str, kinds: Sequence[str]) -> Iterator[NewExecution]:
    """An endless supply of no-op executions, of each kind in turn."""
    return (noop(lane=lane, kind=kind) for kind in cycle(kinds))

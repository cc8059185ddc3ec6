"""FlowFabric: the rate of submissions, one by one, from concurrent callers and in batches."""

from flowfabric.bench.api import Engine
from flowfabric.bench.ours import check, engine_on, noop
from flowfabric.bench.subject import BATCH, CONNECTIONS, LARGE_PAYLOADS, PAYLOADS, Figures, Task, rate, spread

CALLERS = 100
LARGE_BATCH = len(PAYLOADS)
TAGS = tuple({"bench.customer": f"customer-{number}"} for number in range(LARGE_BATCH))


async def measure(task: Task) -> Figures:
    """Create executions; each call returns after its commit."""
    few, some, many, large = task.count(1_000), task.count(20_000), task.count(60_000), task.count(40_000)
    async with engine_on(task.url) as engine:

        async def create() -> None:
            await create_one(engine)

        async def create_hundred() -> None:
            check(await engine.create_many([noop() for _ in range(BATCH)]))

        async def create_batch() -> None:
            check(await engine.create_many([noop(payload=payload) for payload in PAYLOADS]))

        async def create_large_batch() -> None:
            pairs = zip(LARGE_PAYLOADS, TAGS, strict=True)
            check(await engine.create_many([noop(payload=payload, tags=tags) for payload, tags in pairs]))

        # Open the connections and prepare the statements, as for the raw limit.
        await spread(2 * CONNECTIONS, *[create_hundred] * CONNECTIONS)
        return {
            "submit_1_caller": await rate(few, spread(few, create)),
            "submit": await rate(few, spread(few, *[create] * CONNECTIONS)),
            "submit_100_callers": await rate(some, spread(some, *[create] * CALLERS)),
            "submit_batch_100": await rate(many, spread(many // BATCH, *[create_hundred] * CONNECTIONS)),
            "submit_batch": await rate(many, spread(many // LARGE_BATCH, *[create_batch] * CONNECTIONS)),
            "submit_batch_1500b_tag": await rate(
                large, spread(large // LARGE_BATCH, *[create_large_batch] * CONNECTIONS)
            ),
        }


async def create_one(engine: Engine) -> None:
    """Create one execution."""
    item = noop()
    await engine.create_execution(
        namespace=item.namespace,
        lane_id=item.lane_id,
        execution_kind=item.execution_kind,
        input_payload=item.input_payload,
        priority=item.priority,
        creator_identity=item.creator_identity,
    )

"""x"""

import asyncio
from fixtures import Given
from flowfabric.engine.engine import Engine
from flowfabric.feeds import OLDEST, CompletionEvent


async def test_smoke(engine: Engine, given: Given) -> None:
    async with engine.subscribe_completion() as events:
        one = await given.completed()
        event = await asyncio.wait_for(anext(events), 5)
        assert isinstance(event, CompletionEvent)
        print(event, len(event.cursor))
        assert event.execution_id == one
    async with engine.subscribe_lease_history(OLDEST) as events:
        print(await anext(events), await anext(events))
    async with engine.subscribe_instance_tags(OLDEST) as events:
        two = await given.completed(tags={"ff.instance_id": "a"})
        print(await anext(events))

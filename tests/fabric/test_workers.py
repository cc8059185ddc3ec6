"""The workers of a fabric: which lanes and namespaces they claim from."""

import pytest

from flowfabric import Context, Fabric, PublicState
from flowfabric.model.errors import InvalidInputError


async def test_a_worker_serves_the_lanes_of_the_tasks_and_the_namespace_of_its_fabric(url: str) -> None:
    ours, theirs = Fabric(url, namespace="ours", lane="main"), Fabric(url, namespace="theirs", lane="main")

    @ours.task(lane="other")
    async def elsewhere(ctx: Context) -> str:
        return ctx.lane_id

    async def here(ctx: Context) -> str:
        return ctx.lane_id

    our_task, their_task = ours.task(here), theirs.task(here)
    async with ours, theirs:
        waiting = await their_task.submit()
        async with ours.worker() as worker:
            assert worker.lanes == ("main", "other")
            assert await (await elsewhere.submit()).result(timeout=60) == "other"
            assert await (await our_task.submit()).result(timeout=60) == "main"
            assert (await waiting.status()).state is PublicState.WAITING
        async with ours.worker(namespace=None):
            assert await waiting.result(timeout=60) == "main"
        with pytest.raises(InvalidInputError, match="invalid_input: lanes: "):
            ours.worker(lanes="mail")

"""Tasks and flows pass limits to the engine."""

from uuid import uuid4

import pytest

from flowfabric import Fabric
from flowfabric.model.errors import EngineError


async def test_a_run_has_the_limits_of_its_parent(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(number: int) -> int:
        return number

    async with fabric:
        flow = fabric.flow("jobs", budgets=[budget := uuid4()], quota=str(quota := uuid4()))
        node = flow.add(job, 1)
        parent = (await flow.submit()).run(node)
        child = await job.options(parent=parent.id).submit(2)
        (many,) = await job.options(parent=child.id).submit_many([job.options(parent=child.id).bind(3)])
        assert len({parent.id, child.id, many.id}) == 3
        found = await fabric.engine.list_attachments("flow", flow.id)
        assert (found.budget_ids, found.quota_policy_id) == ((budget,), quota)


async def test_a_node_cannot_have_a_parent(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    flow = fabric.flow("jobs")
    with pytest.raises(EngineError, match="parent"):
        flow.add(job.options(parent="fp1-00000000-0000-7000-8000-000000000000"))

"""Flows: what users build, and how values get from node to node."""

import asyncio
from typing import Any

import pytest

from fixtures import Eventually
from flowfabric import Context, Fabric, FlowFailed, FlowStatus, all_of, any_of, quorum


async def test_a_result_is_the_argument_of_the_next_task(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def extract(source: str) -> list[int]:
        return [len(source), 2, 3]

    @fabric.task
    def transform(rows: list[int], part: int) -> int:
        return sum(rows) * part

    @fabric.task
    async def load(parts: list[int], *, name: str) -> str:
        return f"{name}: {parts}"

    flow = fabric.flow("nightly")
    rows = flow.add(extract, "orders")
    parts = [flow.add(transform, rows, part=n) for n in range(4)]
    done = flow.add(load, all_of(parts), name="x")
    async with fabric, fabric.worker():
        run = await flow.submit()
        assert await run.wait(timeout=30) is FlowStatus.COMPLETED
        assert await run.run(done).result() == "x: [0, 11, 22, 33]"
        assert await run.result() is None
        print(await run.status())

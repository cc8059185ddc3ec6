"""Flows of which retention has deleted runs: nothing says that they completed unless that is certain."""

import asyncio

import pytest

from flowfabric import Fabric, FlowRunFailed, FlowStatus, RunFailed, any_of
from flowfabric.errors import NotFoundError

TIMEOUT = 60


class Tasks:
    """A task that fails until it is repaired, and one that waits for the gate."""

    def __init__(self, fabric: Fabric) -> None:
        self.is_broken = True
        self.gate = asyncio.Event()

        @fabric.task
        async def fail() -> int:
            if self.is_broken:
                raise ValueError("no luck")
            return 1

        @fabric.task
        async def copy(number: int) -> int:
            await self.gate.wait()
            return number

        self.fail, self.copy = fail, copy


async def delete(fabric: Fabric, count: int) -> None:
    """Delete runs that have ended, the oldest end first."""
    assert await fabric.engine.trim_retention(retention_ms=0, batch_size=count) == count


async def test_a_failed_flow_stays_failed_when_its_runs_are_deleted(url: str) -> None:
    fabric = Fabric(url)
    tasks = Tasks(fabric)
    tasks.gate.set()
    flow = fabric.flow("nightly")
    flow.add(tasks.fail)
    flow.add(tasks.copy, 1)
    async with fabric, fabric.worker():
        run = await flow.submit()
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.FAILED
        await delete(fabric, 2)
        for found in (run, fabric.flow_run(flow.id)):
            assert await found.wait() is (await found.status()).state is FlowStatus.FAILED
            with pytest.raises(FlowRunFailed) as failed:
                await found.result()
            assert str(failed.value) == (
                f"flow {run.id} failed: a run did not succeed, and whether the final runs did is not known: "
                "retention has deleted 2 of its 2 runs"
            )
            with pytest.raises(
                NotFoundError, match="cannot be replayed: retention has deleted 2 of its 2 runs; submit"
            ):
                await found.replay()


async def test_a_flow_has_completed_while_its_final_runs_show_it(url: str) -> None:
    fabric = Fabric(url)
    tasks = Tasks(fabric)
    flow = fabric.flow("review")
    judges = [flow.add(tasks.fail), flow.add(tasks.copy, 2)]
    flow.add(tasks.copy, any_of(judges))
    async with fabric, fabric.worker():
        run = await flow.submit()
        with pytest.raises(RunFailed):
            await run.run(judges[0]).result(timeout=TIMEOUT)
        tasks.gate.set()
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.COMPLETED
        # The judge that failed.
        await delete(fabric, 1)
        await run.result()
        assert (await run.status()).state is FlowStatus.COMPLETED
        assert await run.replay() == []
        # The engine calls the flow failed, and nothing else is left.
        await delete(fabric, 2)
        assert (await run.status()).state is FlowStatus.FAILED
        with pytest.raises(FlowRunFailed, match="retention has deleted 3 of its 3 runs"):
            await run.result()


async def test_a_completed_flow_stays_completed_when_its_runs_are_deleted(url: str) -> None:
    fabric = Fabric(url)
    tasks = Tasks(fabric)
    tasks.gate.set()
    flow = fabric.flow("nightly")
    flow.add(tasks.copy, flow.add(tasks.copy, 1))
    async with fabric, fabric.worker():
        run = await flow.submit()
        await run.result(timeout=TIMEOUT)
        await delete(fabric, 2)
        await run.result()
        assert (await run.status()).state is FlowStatus.COMPLETED
        assert await run.replay() == []


async def test_a_failed_flow_says_that_some_of_its_runs_were_deleted(url: str) -> None:
    fabric = Fabric(url)
    tasks = Tasks(fabric)
    flow = fabric.flow("nightly")
    bad = flow.add(tasks.fail)
    flow.add(tasks.copy, bad)
    last = flow.add(tasks.copy, 3)
    async with fabric, fabric.worker():
        run = await flow.submit()
        with pytest.raises(RunFailed):
            await run.run(bad).result(timeout=TIMEOUT)
        tasks.gate.set()
        await run.run(last).result(timeout=TIMEOUT)
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.FAILED
        await delete(fabric, 1)
        with pytest.raises(FlowRunFailed) as failed:
            await run.result()
        assert str(failed.value) == (
            f"flow {run.id} failed: 1 of 3 runs did not succeed, and retention has deleted 1 of its 3 runs"
        )
        with pytest.raises(NotFoundError, match="retention has deleted 1 of its 3 runs"):
            await run.replay()


async def test_a_flow_with_a_skipped_final_run_has_not_completed(url: str) -> None:
    fabric = Fabric(url)
    tasks = Tasks(fabric)
    flow = fabric.flow("nightly")
    bad = flow.add(tasks.fail)
    flow.add(tasks.copy, bad)
    async with fabric, fabric.worker():
        run = await flow.submit()
        assert await run.wait(timeout=TIMEOUT) is FlowStatus.FAILED
        tasks.is_broken = False
        await run.run(bad).replay()
        await run.run(bad).result(timeout=TIMEOUT)
        assert await run.wait(timeout=TIMEOUT) is (await run.status()).state is FlowStatus.FAILED
        with pytest.raises(FlowRunFailed, match="1 of 2 runs did not succeed"):
            await run.result()

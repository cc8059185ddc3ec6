"""Replayed runs, as their submitters and handlers see them."""

import asyncio

import pytest

from flowfabric import Context, Fabric, PublicState, RunFailed

from .reading import read, texts


async def test_a_replayed_run_returns_its_new_result_and_streams_all_of_its_attempts(url: str) -> None:
    fabric = Fabric(url)
    types: list[str] = []

    @fabric.task
    async def answer(ctx: Context) -> int:
        types.append(ctx.attempt_type)
        await ctx.stream.write(f"attempt {ctx.attempt}")
        if ctx.attempt == 1:
            raise ValueError("no luck")
        return ctx.attempt

    async with fabric, fabric.worker():
        run = await answer.submit()
        with pytest.raises(RunFailed, match="no luck"):
            await run.result(timeout=60)
        for attempt in (2, 3):
            await fabric.engine.replay_execution(execution_id=run.id)
            assert await run.result(timeout=60) == attempt
        status = await run.status()
        frames = await read(run.stream())
    assert types == ["initial", "replay", "replay"]
    assert (status.state, status.attempt, status.result, status.error) == (PublicState.COMPLETED, 3, 3, None)
    assert texts(frames) == ["attempt 1", "attempt 2", "attempt 3"]


async def test_a_replayed_run_shows_neither_its_old_result_nor_its_old_error(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def fail() -> None:
        raise ValueError("no luck")

    @fabric.task
    async def succeed() -> str:
        return "done"

    async with fabric:
        async with fabric.worker():
            runs = [await fail.submit(), await succeed.submit()]
            with pytest.raises(RunFailed):
                await runs[0].result(timeout=60)
            assert await runs[1].result(timeout=60) == "done"
        for run in runs:
            await fabric.engine.replay_execution(execution_id=run.id)
            status = await run.status()
            assert (status.state, status.result, status.error) == (PublicState.WAITING, None, None)
            assert (status.last_failure, status.ended_at, status.has_ended) == (None, None, False)
        waiting = asyncio.create_task(runs[1].result(timeout=60))
        async with fabric.worker():
            assert await waiting == "done"

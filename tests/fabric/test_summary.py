"""Reading the summary of a run from any process."""

import asyncio

from flowfabric import Context, Fabric

from .reading import read


async def test_the_summary_is_the_newest_document_of_the_run(url: str) -> None:
    fabric, goes_on = Fabric(url), asyncio.Event()

    @fabric.task(retries=1, backoff=0.001)
    async def build(ctx: Context) -> None:
        if ctx.attempt == 1:
            await ctx.summary.patch({"step": "compile", "done": 1})
            await ctx.summary.patch({"step": None})
            raise ValueError("no luck")
        await ctx.stream.write("second")
        await goes_on.wait()
        await ctx.summary.patch({"step": "again"})

    async with fabric, fabric.worker():
        run = await build.submit()
        frames = run.stream()
        assert [(frame.mode, frame.summary_version) for frame in await read(frames, 3)] == [
            ("summary", 1),
            ("summary", 2),
            ("durable", None),
        ]
        assert await run.summary() == {"done": 1}
        goes_on.set()
        await run.result(timeout=60)
        assert await run.summary() == {"step": "again"}


async def test_a_run_without_a_patch_has_no_summary(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(ctx: Context) -> None:
        await ctx.stream.write("a")

    async with fabric, fabric.worker():
        run = await job.submit()
        assert await run.summary() is None
        await run.result(timeout=60)
        assert await run.summary() is None

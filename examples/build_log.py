"""A build that writes its log and keeps a summary up to date, while others watch; its first attempt fails.

Every patch of the summary trims the stream to its newest 64 frames, so a longer log is complete only for readers that
follow it while it is written.
"""

import asyncio

from flowfabric import Context, Fabric
from flowfabric.streams import FrameKind

fabric = Fabric(lane="builds")

STEPS = ("checkout", "compile", "test")


@fabric.task(retries=1, backoff=0.05)
def build(ctx: Context, commit: str) -> str:
    """Build in a thread: a line of the log for each step, and a summary of what is done."""
    ctx.from_thread(ctx.summary.patch({"commit": commit, "steps": dict.fromkeys(STEPS, "pending")}))
    for step in STEPS:
        ctx.from_thread(ctx.stream.write(f"{step} {commit}\n"))
        if step == "test" and ctx.attempt == 1:
            ctx.from_thread(ctx.stream.write("the test server does not answer\n", kind=FrameKind.STDERR))
            ctx.from_thread(ctx.summary.patch({"steps": {step: "failed"}}))
            raise ConnectionError("the test server does not answer")
        # Merged into the document: the other steps stay as they are.
        ctx.from_thread(ctx.summary.patch({"steps": {step: "done"}}))
    return f"{commit} is built"


async def main() -> None:
    """Print the log while the build runs, and the summary at its end."""
    async with fabric, fabric.worker():
        run = await build.submit("4f2a")
        async for frame in run.stream():
            if frame.mode == "summary":
                continue  # a patch of the summary, which is a frame as well
            print(f"attempt {frame.attempt} {frame.frame_type}: {frame.text}", end="")
        print(await run.summary())
        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())

"""A wait with a timeout: if nobody answers, the handler continues with a default."""

import asyncio

from flowfabric import Context, Fabric

fabric = Fabric(lane="questions")


@fabric.task
async def ask(ctx: Context, question: str) -> str:
    """Ask, and return a default if no answer arrives within half a second."""
    if not ctx.is_resumed:
        print(f"run 1 asks: {question}")
        await ctx.suspend(keys=["answer"], timeout=0.5, timeout_behavior="auto_resume_with_timeout_signal")
    signals = ctx.resumed_signals()
    if not signals:
        return "an operator resumed it, so: blue"
    last = signals[-1]
    print(f"run 2 of the same attempt finds the signal {last.signal_name!r} from {last.source_identity!r}")
    return "no answer, so: blue" if last.signal_name == "timeout" else (last.payload or b"").decode()


async def main() -> None:
    """Ask a question that nobody answers."""
    async with fabric, fabric.worker():
        run = await ask.submit("which colour?")
        print(await run.result(timeout=30))


if __name__ == "__main__":
    asyncio.run(main())

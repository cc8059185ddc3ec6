"""The tokens of a language model as they are made, for a reader that disconnects and comes back."""

import asyncio
from collections.abc import AsyncIterator

from flowfabric import Context, Fabric

fabric = Fabric(lane="chat")


async def complete(prompt: str) -> AsyncIterator[str]:
    """Stand for the API of a language model, which returns its answer piece by piece."""
    for word in f"You asked: {prompt} The answer is forty-two.".split():
        await asyncio.sleep(0.01)
        yield f"{word} "


@fabric.task
async def answer(ctx: Context, prompt: str) -> int:
    """Write every token to the stream as it arrives, and return how many there were."""
    count = 0
    async for token in complete(prompt):
        await ctx.stream.write(token)  # queued: a token does not cost a transaction
        count += 1
    return count


async def read_some(run_id: str, tokens: int) -> tuple[str, str | None]:
    """Read the first tokens as a browser does that is closed too early; return them and the id of the last one."""
    text, last = "", None
    async for frame in fabric.run(run_id).stream():
        text, last = text + frame.text, frame.id
        tokens -= 1
        if tokens == 0:
            break
    return text, last


async def read_rest(run_id: str, last: str | None) -> str:
    """Read what follows, as the browser does when it is opened again; it needs only the two ids."""
    return "".join([frame.text async for frame in fabric.run(run_id).stream(after=last)])


async def main() -> None:
    """Ask, disconnect after three tokens, and read the rest."""
    async with fabric, fabric.worker():
        run = await answer.submit("What is the answer?")
        first, last = await read_some(run.id, 3)
        print(f"before the disconnect: {first}")
        rest = await read_rest(run.id, last)
        print(f"after it:              {rest}")
        print(f"{await run.result()} tokens, none lost, none twice: {len((first + rest).split())}")


if __name__ == "__main__":
    asyncio.run(main())

"""Reading the frames of a run."""

import asyncio

from flowfabric.streams import RunFrame, RunFrames


async def read(frames: RunFrames, count: int | None = None) -> list[RunFrame]:
    """The frames of an iterator: all of them, or the first ones."""
    found: list[RunFrame] = []
    async with asyncio.timeout(60):
        while count is None or len(found) < count:
            try:
                found.append(await anext(frames))
            except StopAsyncIteration:
                break
    return found


def texts(frames: list[RunFrame]) -> list[str]:
    return [frame.text for frame in frames]

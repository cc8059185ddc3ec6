"""How long to wait: before each further try, for an event, and for work that an event ends."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Iterator


def pauses(first: float, longest: float) -> Iterator[float]:
    """Seconds that double from the first to the longest, each shortened at random so that many do not come at once."""
    pause = first
    while True:
        yield pause * random.uniform(0.75, 1)
        pause = min(pause * 2, longest)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set, now or before the time is up."""
    with contextlib.suppress(TimeoutError):
        # Not asyncio.wait_for: in Python 3.11 it loses a cancellation that comes together with the event.
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def is_done_before(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Whether some work is done before an event is set; else it is cancelled. An error of the work is raised."""
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        stopped.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

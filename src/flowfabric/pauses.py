"""Waiting: pauses between retries, waits for an event, and work that an event cancels."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Iterator


def pauses(first: float, longest: float) -> Iterator[float]:
    """Seconds that double from the first to the longest, with jitter so that many callers do not retry at once."""
    pause = first
    while True:
        yield pause * random.uniform(0.75, 1)
        pause = min(pause * 2, longest)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for at most these seconds; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        # asyncio.wait_for of Python 3.11 loses a cancellation that arrives together with the event.
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def is_done_before(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Run work until it is done or an event is set, which cancels it; return whether it is done, or raise its error."""
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

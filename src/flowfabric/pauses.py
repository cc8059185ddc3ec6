"""How long to wait: before each further try, and for an event."""

import asyncio
import contextlib
import random
from collections.abc import Iterator


def pauses(first: float, longest: float) -> Iterator[float]:
    """Seconds that double from the first to the longest, each shortened at random so that many do not come at once."""
    pause = first
    while True:
        yield pause * random.uniform(0.75, 1)
        pause = min(pause * 2, longest)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set, now or before the time is up."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()

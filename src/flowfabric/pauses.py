"""How long to wait before each further try of what may pass."""

import random
from collections.abc import Iterator


def pauses(first: float, longest: float) -> Iterator[float]:
    """Seconds that double from the first to the longest, each shortened at random so that many do not come at once."""
    pause = first
    while True:
        yield pause * random.uniform(0.75, 1)
        pause = min(pause * 2, longest)

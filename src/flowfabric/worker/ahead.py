"""How many executions a worker claims ahead of its free slots."""

import time
from collections.abc import Callable


class Ahead:
    """How many executions to hold beyond the slots, computed from the rate at which handlers return.

    While claims come back full, this is the number that the slots will start within SECONDS. If handlers are so slow
    that not every slot becomes free within SECONDS, it is 0: an execution would wait here while another worker could
    run it.
    """

    SECONDS = 0.1
    """The longest time that an execution claimed ahead should wait for a slot."""
    STALE_SECONDS = 0.5
    """An execution that has waited this long is handed back."""
    WINDOW_SECONDS = 0.02
    """The shortest time over which the rate is measured."""

    def __init__(self, concurrency: int, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = 0
        """How many executions may be held beyond the slots now."""
        self.returned = 0
        """How many handlers have returned since the window began."""
        self._concurrency = concurrency
        self._most = most
        self._clock = clock
        self._began = clock()

    def claimed(self, *, is_full: bool) -> None:
        """Adjust the size after a claim; a claim that did not come back full means there is no backlog."""
        if not is_full:
            self.size = 0
            self._begin_window(self._clock())
        else:
            self._measure()

    def _measure(self) -> None:
        now = self._clock()
        elapsed = now - self._began
        if elapsed < self.WINDOW_SECONDS:
            return
        wanted = int(self.returned / elapsed * self.SECONDS)
        self._begin_window(now)
        if wanted < self._concurrency:
            self.size = 0
        else:
            # At most doubled per window: a few fast handlers do not mean that the whole backlog is fast.
            self.size = min(wanted, 2 * max(self.size, self._concurrency), self._most)

    def _begin_window(self, now: float) -> None:
        self._began, self.returned = now, 0

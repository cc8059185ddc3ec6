"""How many executions a worker claims ahead of its free slots."""

import time
from collections.abc import Callable


class Ahead:
    """The number of executions to hold beyond the slots, from the rate at which handlers return.

    It is what the slots will take up within SECONDS, while claims come back full. Where the slots take longer than that
    to turn over once, it is nothing: an execution would wait here while another worker could run it.
    """

    SECONDS = 0.1
    """How long an execution that was claimed ahead should wait for a slot at most."""
    STALE_SECONDS = 0.5
    """One that has waited this long is handed back."""
    WINDOW_SECONDS = 0.02
    """The shortest time a rate is measured over."""

    def __init__(self, concurrency: int, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = 0
        """How many executions may be held beyond the slots now."""
        self.returned = 0
        """Handlers that have returned since the window began."""
        self._concurrency = concurrency
        self._most = most
        self._clock = clock
        self._began = clock()

    def claimed(self, *, is_full: bool) -> None:
        """A claim was answered; unless it brought all that was asked for, there is no backlog."""
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
            # Doubled from window to window: a few fast handlers do not speak for all of a backlog.
            self.size = min(wanted, 2 * max(self.size, self._concurrency), self._most)

    def _begin_window(self, now: float) -> None:
        self._began, self.returned = now, 0

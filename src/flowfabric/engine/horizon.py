"""How far the timers of the store have been swept, so that a look begins where live ones can be."""

import time
from collections.abc import Callable


class Horizon:
    """The time before which no timer is live, as far as this process has seen.

    An index keeps the entries of timers that are gone until no open transaction can see them any more; a look that
    began at its head would step over all of them. A timer may still appear before the horizon, set late or for a
    time long past: the margin covers what is common, and a whole look at fixed intervals finds the rest.
    """

    SHARE = 20
    """A whole look is made again when this many times its own time has passed."""
    LONGEST_SECONDS = 60.0
    """A whole look is made again after this time at the latest, however long it takes."""

    def __init__(
        self, *, whole_every_seconds: float, margin_ms: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._whole_every = whole_every_seconds
        self._margin_ms = margin_ms
        self._whole_at = 0.0
        self._reached = 0

    @property
    def since(self) -> int:
        """Where a sweep begins."""
        return max(self._reached - self._margin_ms, 0)

    def look(self) -> int:
        """Where a look begins: at the horizon, or at the beginning of time when that is due."""
        return 0 if self._clock() >= self._whole_at else self.since

    def looked(self, since: int, seconds: float) -> None:
        """A look from there has taken the server this long: the longer a whole one took, the later the next."""
        if since == 0:
            rationed = min(self.SHARE * seconds, self.LONGEST_SECONDS)
            self._whole_at = self._clock() + max(self._whole_every, rationed)

    def reach(self, at_ms: int) -> None:
        """The oldest live timer is at this time, or later."""
        self._reached = at_ms

"""Watermarks: where the walk of a queue or of the timers begins, so that dead index entries before it cost nothing.

An index keeps the entries of rows that have left it until no open transaction can see them any more. A walk that began
at the head would step over all of them while any transaction stays open.
"""

import time
from collections.abc import Callable

BAND_BITS = 48
"""The bits of a place below its priority band."""
_END = 2**63 - 1


class QueueWatermarks:
    """For each queue and priority, the first place this process has not yet taken."""

    LIFE_SECONDS = 1.0
    """How long watermarks are trusted: a row that came back below one without a hint is found when they end."""
    MOST_BANDS = 16
    """With more priorities than this in use a queue is walked whole: so many short walks would cost more."""

    CHEAP_SECONDS = 0.5
    """A claim that finds nothing where the watermarks lead may repeat a whole walk that took no longer at once."""
    SHARE = 20
    """A whole walk is made again when this many times its own time has passed."""
    LONGEST_SECONDS = 10.0
    """Watermarks end after this time at the latest, so that a row is never found later than that."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bands: dict[int, dict[int, int]] = {}
        self._ends_at = 0.0
        self._whole_again_at = 0.0

    def spans(self) -> tuple[list[int], list[int], list[int]]:
        """What to walk, as sorted columns of queue, first place and last place; an absent queue is walked whole."""
        now = self._clock()
        if now >= self._ends_at:
            self._bands.clear()
            self._ends_at = now + self.LIFE_SECONDS
        queues: list[int] = []
        firsts: list[int] = []
        lasts: list[int] = []
        for queue_no, bands in sorted(self._bands.items()):
            if not bands:
                continue
            first = 0
            for band in sorted(bands):
                if first < band << BAND_BITS:
                    queues.append(queue_no)
                    firsts.append(first)
                    lasts.append((band << BAND_BITS) - 1)
                first = bands[band]
            queues.append(queue_no)
            firsts.append(first)
            lasts.append(_END)
        return queues, firsts, lasts

    def raise_to(self, queue_no: int, place: int) -> None:
        """Everything of this place's priority up to it was seen and taken, or is held by others."""
        bands = self._bands.setdefault(queue_no, {})
        band = place >> BAND_BITS
        if bands.get(band, 0) <= place:
            bands[band] = place + 1
            if len(bands) > self.MOST_BANDS:
                bands.clear()

    def lower(self, queue_no: int, place: int) -> None:
        """A row stands at this place again, or stands there late."""
        bands = self._bands.get(queue_no)
        if bands is not None:
            band = place >> BAND_BITS
            if bands.get(band, 0) > place:
                bands[band] = place

    def walked_whole(self, seconds: float) -> None:
        """A walk of whole queues has taken the server this long: the longer it took, the later the watermarks end.

        The time at the server, not until the answer: a slow network or a slow commit makes no walk more expensive.
        """
        now = self._clock()
        self._ends_at = now + max(self.LIFE_SECONDS, min(self.SHARE * seconds, self.LONGEST_SECONDS))
        self._whole_again_at = now if seconds <= self.CHEAP_SECONDS else self._ends_at

    @property
    def may_walk_whole(self) -> bool:
        """Whether a claim that found nothing where the watermarks led should walk the whole queues now."""
        return self._clock() >= self._whole_again_at

    def clear(self) -> None:
        """Walk every queue whole the next time."""
        self._bands.clear()


class TimerWatermark:
    """The time before which no timer is live, as far as this process has seen.

    An index keeps the entries of timers that are gone until no open transaction can see them any more; a look that
    began at its head would step over all of them. A timer may still appear before the watermark, set late or for a
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
        """Where a look begins: at the watermark, or at the beginning of time when that is due."""
        return 0 if self._clock() >= self._whole_at else self.since

    def looked(self, since: int, seconds: float) -> None:
        """A look from there has taken the server this long: the longer a whole one took, the later the next."""
        if since == 0:
            rationed = min(self.SHARE * seconds, self.LONGEST_SECONDS)
            self._whole_at = self._clock() + max(self._whole_every, rationed)

    def reach(self, at_ms: int) -> None:
        """The oldest live timer is at this time, or later."""
        self._reached = at_ms

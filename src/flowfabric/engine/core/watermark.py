"""Watermarks: where the walk of a queue or of the timers begins, so that dead index entries before it cost nothing.

An index keeps the entries of rows that have left it until no open transaction can see them any more. A walk that began
at the head would step over all of them while any transaction stays open.
"""

import time
from collections.abc import Callable, Hashable

BAND_BITS = 48
"""The bits of a place below its priority band."""
_END = 2**63 - 1


class WalkWatermarks:
    """For each route or queue that one kind of claim walks, and each priority, the first place not yet taken."""

    LIFE_SECONDS = 1.0
    """How long watermarks are trusted: an entry that came back below one without a hint is found when they end."""
    FREE_SECONDS = 0.002
    """A claim that finds nothing where the watermarks lead repeats a walk of everything that took no longer."""
    SHARE = 20
    """A longer walk of everything is made again when this many times its own time has passed."""
    LONGEST_SECONDS = 10.0
    """Watermarks end after this time at the latest, so that an entry is never found later than that."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bands: dict[int, dict[int, int]] = {}
        self._ends_at = 0.0
        self._whole_again_at = 0.0

    def spans(self) -> tuple[list[int], list[int], list[int]]:
        """What to walk, as sorted columns of walk, first place and last place; an absent walk is walked whole."""
        now = self._clock()
        if now >= self._ends_at:
            # A walk of everything; what it finds says which watermarks still hold.
            self._ends_at = now + self.LIFE_SECONDS
            return [], [], []
        walks: list[int] = []
        firsts: list[int] = []
        lasts: list[int] = []
        for walk_no, bands in sorted(self._bands.items()):
            first = 0
            for band in sorted(bands):
                if first < band << BAND_BITS:
                    walks.append(walk_no)
                    firsts.append(first)
                    lasts.append((band << BAND_BITS) - 1)
                first = bands[band]
            walks.append(walk_no)
            firsts.append(first)
            lasts.append(_END)
        return walks, firsts, lasts

    def raise_to(self, walk_no: int, place: int) -> None:
        """Everything of this place's priority up to it was seen and taken, or is held by others."""
        bands = self._bands.setdefault(walk_no, {})
        band = place >> BAND_BITS
        if bands.get(band, 0) <= place:
            bands[band] = place + 1

    def lower(self, walk_no: int, place: int) -> None:
        """An entry stands at this place again, or stands there late."""
        bands = self._bands.get(walk_no)
        if bands is not None:
            band = place >> BAND_BITS
            if bands.get(band, 0) > place:
                bands[band] = place

    def walked_whole(self, seconds: float, *, up_to: int | None = None) -> None:
        """A walk of everything, up to a place, has taken the server this long: the longer it took, the later the next.

        The time at the server, not until the answer: a slow network or a slow commit makes no walk more expensive.
        Watermarks up to that place hold, as the walk would have found what stands below them.
        """
        if up_to is not None:
            last = up_to >> BAND_BITS
            for bands in self._bands.values():
                for band in [band for band in bands if band > last]:
                    del bands[band]
                if last in bands:
                    bands[last] = min(bands[last], up_to + 1)
        now = self._clock()
        share = min(self.SHARE * seconds, self.LONGEST_SECONDS)
        self._ends_at = now + max(self.LIFE_SECONDS, share)
        self._whole_again_at = now if seconds <= self.FREE_SECONDS else now + share

    @property
    def may_walk_whole(self) -> bool:
        """Whether a claim that found nothing where the watermarks led should walk everything now."""
        return self._clock() >= self._whole_again_at

    def end(self) -> None:
        """Walk everything the next time, and then go on from the watermarks that still hold."""
        self._ends_at = 0.0

    def clear(self) -> None:
        """Walk everything until something is taken."""
        self._bands.clear()


class Watermarks:
    """The watermarks of this process, apart for each kind of claim: what one passes over, another may want."""

    MOST_KINDS = 256
    """Kinds of claims with watermarks at the same time; the oldest begins anew."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_route: dict[Hashable, WalkWatermarks] = {}
        self._by_queue: dict[Hashable, WalkWatermarks] = {}

    def of_routes(self, claim: Hashable) -> WalkWatermarks:
        """The watermarks of one kind of claim along routes."""
        return self._of(self._by_route, claim)

    def of_queues(self, claim: Hashable) -> WalkWatermarks:
        """The watermarks of one kind of claim along queues."""
        return self._of(self._by_queue, claim)

    def lower(self, route_no: int, queue_no: int, place: int) -> None:
        """An entry of a queue stands at this place again, or stands there late."""
        for watermarks in self._by_route.values():
            watermarks.lower(route_no, place)
        for watermarks in self._by_queue.values():
            watermarks.lower(queue_no, place)

    def clear(self) -> None:
        """Walk everything until something is taken."""
        for watermarks in (*self._by_route.values(), *self._by_queue.values()):
            watermarks.clear()

    def _of(self, known: dict[Hashable, WalkWatermarks], claim: Hashable) -> WalkWatermarks:
        if (watermarks := known.get(claim)) is None:
            while len(known) >= self.MOST_KINDS:
                del known[next(iter(known))]
            watermarks = known[claim] = WalkWatermarks(self._clock)
        return watermarks


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

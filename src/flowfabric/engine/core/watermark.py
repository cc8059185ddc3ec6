"""Watermarks: where the scan of a queue or of the timers starts, so that dead index entries before it cost nothing.

An index keeps the entries of deleted rows until no open transaction can see them. While a transaction stays open, a
scan from the head of the index would step over all of them.
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias

from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.turns import Turns

_END = 2**63 - 1
_ANY_ROUTE = 0

Appeared: TypeAlias = dict[tuple[int, int], int]
"""The lowest place at which an entry has appeared, by route or queue and by priority band."""
_NOTHING: Mapping[tuple[int, int], int] = MappingProxyType({})


class ScanWatermarks:
    """The first place not yet claimed, for each priority of each route or queue that one kind of claim scans.

    Routes and queues are named by their numbers.
    """

    LIFE_SECONDS = 1.0
    """How long watermarks are valid; then an entry that reappeared below one without a hint is found."""
    FREE_SECONDS = 0.002
    """A full scan that takes at most this long may be repeated by every claim that finds nothing."""
    SHARE = 20
    """A slower full scan is repeated only after this many times its own duration."""
    LONGEST_SECONDS = 10.0
    """Watermarks expire after this time at the latest, so that no entry is found later than that."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bands: dict[int, dict[int, int]] = {}
        self._valid_until = 0.0
        self._next_full_scan_at = 0.0
        self._running: list[Appeared] = []

    @contextmanager
    def scanning(self) -> Iterator[Appeared]:
        """Yield the lowest places at which entries appear while the block runs: a scan in it may not have seen them."""
        appeared: Appeared = {}
        self._running.append(appeared)
        try:
            yield appeared
        finally:
            self._running = [each for each in self._running if each is not appeared]

    def spans(self) -> tuple[list[int], list[int], list[int]]:
        """What to scan, as sorted columns of route or queue, first place and last place; any other is scanned whole."""
        now = self._clock()
        if now >= self._valid_until:
            # A full scan; what it finds decides which watermarks remain valid.
            self._valid_until = now + self.LIFE_SECONDS
            return [], [], []
        numbers: list[int] = []
        firsts: list[int] = []
        lasts: list[int] = []
        for number, bands in sorted(self._bands.items()):
            first = 0
            for band in sorted(bands):
                if first < band << BAND_BITS:
                    numbers.append(number)
                    firsts.append(first)
                    lasts.append((band << BAND_BITS) - 1)
                first = bands[band]
            numbers.append(number)
            firsts.append(first)
            lasts.append(_END)
        return numbers, firsts, lasts

    def raise_to(self, number: int, place: int, appeared: Mapping[tuple[int, int], int] = _NOTHING) -> None:
        """Record that every entry of this place's priority up to it is claimed, or locked by others.

        Entries that have appeared since the scan began stay above the watermark.
        """
        bands = self._bands.setdefault(number, {})
        band = place >> BAND_BITS
        place = min(place, appeared.get((number, band), place + 1) - 1)
        if bands.get(band, 0) <= place:
            bands[band] = place + 1

    def lower(self, number: int, place: int) -> None:
        """Record that an entry has appeared at this place, possibly below the watermark."""
        band = place >> BAND_BITS
        for appeared in self._running:
            appeared[number, band] = min(place, appeared.get((number, band), place))
        bands = self._bands.get(number)
        if bands is not None and bands.get(band, 0) > place:
            bands[band] = place

    def record_full_scan(self, seconds: float, *, up_to: int | None = None) -> None:
        """Record the duration of a full scan, which stopped at `up_to` if given: the slower, the later the next one.

        The duration is the server's: a slow network or commit does not make a scan more expensive. Watermarks up to
        that place stay valid, as the scan would have found any entry below them.
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
        self._valid_until = now + max(self.LIFE_SECONDS, share)
        self._next_full_scan_at = now if seconds <= self.FREE_SECONDS else now + share

    @property
    def may_scan_all(self) -> bool:
        """Whether a claim that found nothing above the watermarks should do a full scan now."""
        return self._clock() >= self._next_full_scan_at

    def end(self) -> None:
        """Scan everything once, and then continue from the watermarks that are still valid."""
        self._valid_until = 0.0

    def clear(self) -> None:
        """Scan everything until something is claimed."""
        self._bands.clear()


class Watermarks:
    """The watermarks of this process, separate for each kind of claim: one may skip what another claims."""

    MAX_KINDS = 256
    """The most kinds of claims with watermarks; the oldest is dropped."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_route: dict[Hashable, ScanWatermarks] = {}
        self._by_queue: dict[Hashable, ScanWatermarks] = {}
        self._turns: dict[Hashable, Turns] = {}
        self._appearances: Counter[int] = Counter()
        self.changes = 0
        """How often there may have been a new route, or other limits."""

    def of_routes(self, claim: Hashable) -> ScanWatermarks:
        """The watermarks of one kind of claim that scans routes."""
        return self._of(self._by_route, claim)

    def of_queues(self, claim: Hashable) -> ScanWatermarks:
        """The watermarks of one kind of claim that scans queues."""
        return self._of(self._by_queue, claim)

    def turns_of(self, claim: Hashable) -> Turns:
        """The turns of the queues that one kind of claim serves."""
        if (turns := self._turns.get(claim)) is None:
            while len(self._turns) >= self.MAX_KINDS:
                del self._turns[next(iter(self._turns))]
            turns = self._turns[claim] = Turns(self._clock)
        return turns

    def resume(self) -> None:
        """Choose all queues again: limits may have changed."""
        self.changes += 1
        for turns in self._turns.values():
            turns.resume()

    def all_turns(self) -> Iterable[Turns]:
        """The turns of every kind of claim."""
        return self._turns.values()

    def lower(self, route_no: int, queue_no: int, place: int) -> None:
        """Record that an entry of a queue has appeared at this place, possibly below a watermark."""
        if route_no not in self._appearances:
            self.changes += 1
        self._appearances[route_no] += 1
        for watermarks in self._by_route.values():
            watermarks.lower(route_no, place)
        for watermarks in self._by_queue.values():
            watermarks.lower(queue_no, place)
        for turns in self._turns.values():
            if route_no in turns.route_nos:
                turns.appeared(queue_no, place)

    def appearances(self, route_nos: Iterable[int]) -> int:
        """How often entries of these routes have appeared; it changes whenever another one does."""
        return self._appearances[_ANY_ROUTE] + sum(self._appearances[route_no] for route_no in route_nos)

    def clear(self) -> None:
        """Scan everything until something is claimed."""
        self._appearances[_ANY_ROUTE] += 1
        self.changes += 1
        for watermarks in (*self._by_route.values(), *self._by_queue.values()):
            watermarks.clear()
        for turns in self._turns.values():
            turns.expire()

    def _of(self, known: dict[Hashable, ScanWatermarks], claim: Hashable) -> ScanWatermarks:
        if (watermarks := known.get(claim)) is None:
            while len(known) >= self.MAX_KINDS:
                del known[next(iter(known))]
            watermarks = known[claim] = ScanWatermarks(self._clock)
        return watermarks


class TimerWatermark:
    """The time before which this process has seen no live timer.

    A timer may still appear before the watermark, committed late or set for a time long past. A margin covers the
    common cases, and a full scan at intervals finds the rest.
    """

    SHARE = 20
    """A full scan is repeated only after this many times its own duration."""
    LONGEST_SECONDS = 60.0
    """A full scan is repeated after this time at the latest, however slow it is."""

    def __init__(
        self, *, full_scan_seconds: float, margin_ms: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._full_scan_seconds = full_scan_seconds
        self._margin_ms = margin_ms
        self._full_scan_at = 0.0
        self._reached = 0

    @property
    def since(self) -> int:
        """The time from which a sweep scans: the watermark less the margin."""
        return max(self._reached - self._margin_ms, 0)

    def scan_start(self) -> int:
        """The time from which the next scan starts: the watermark, or 0 when a full scan is due."""
        return 0 if self._clock() >= self._full_scan_at else self.since

    def record_scan(self, since: int, seconds: float) -> None:
        """Record the server's duration of a scan from `since`: the slower a full scan, the later the next one."""
        if since == 0:
            pause = min(self.SHARE * seconds, self.LONGEST_SECONDS)
            self._full_scan_at = self._clock() + max(self._full_scan_seconds, pause)

    def move_to(self, at_ms: int) -> None:
        """Set the watermark: no live timer is older than this."""
        self._reached = at_ms

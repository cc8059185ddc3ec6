"""Entries of queues in memory, claimed as the engine claims them, for tests of turns."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from engine.state import HandClock
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.turns import UNFAIR, Changes, Fairness, Head, Span, Turns

LANE = "lane"
NOW = 1_000_000
FAIR = Fairness(is_fair=True, weights={}, ageing_ms=None)


def place(band: int, number: int) -> int:
    """A place of a priority band."""
    return (band << BAND_BITS) + number


def head(queue_no: int, at: int, *, group: str = "", lane: str = LANE, since: int = NOW) -> Head:
    """The first entry of a queue."""
    return Head(queue_no, lane, group, at, since)


def load(turns: Turns, *heads: Head, fairness: Fairness = UNFAIR, changes: Changes | None = None) -> None:
    """Load the result of a fast full scan."""
    turns.load(heads, {LANE: fairness}, 0.001, NOW, changes=changes)


def firsts(turns: Turns, limit: int = 100, now: int = NOW) -> list[tuple[int, int]]:
    """The queue and first place of each span that a claim reads."""
    return [(span.queue_no, span.first_place) for span in turns.choose(limit, now)]


def shares(turns: Turns, limit: int) -> list[tuple[int, int]]:
    """The queue and share of each span that a claim reads."""
    return [(span.queue_no, span.share) for span in turns.choose(limit, NOW)]


class Entries:
    """Entries of queues in memory, and a claim that reads them as a statement would."""

    def __init__(self, fairness: Mapping[str, Fairness], clock: HandClock | None = None) -> None:
        self.clock = clock or HandClock()
        self.turns = Turns(self.clock)
        self.fairness = fairness
        self.queues: dict[int, tuple[str, str]] = {}
        self.waiting: dict[int, dict[int, int]] = defaultdict(dict)
        self.now = NOW
        self._numbers = count(1)

    def add(self, queue_no: int, band: int = 0, *, group: str = "", lane: str = LANE, is_hinted: bool = True) -> int:
        """Add an entry at the end of a priority band of a queue."""
        self.queues[queue_no] = lane, group
        at = place(band, next(self._numbers))
        self.waiting[queue_no][at] = self.now
        if is_hinted:
            self.turns.appeared(queue_no, at)
        return at

    def heads(self) -> list[Head]:
        """What a full scan finds."""
        found = []
        for queue_no, entries in self.waiting.items():
            first: dict[int, int] = {}
            for at in sorted(entries):
                first.setdefault(at >> BAND_BITS, at)
            found += [Head(queue_no, *self.queues[queue_no], at, entries[at]) for at in first.values()]
        return found

    def scan(self) -> None:
        """Do a full scan."""
        self.turns.load(self.heads(), self.fairness, 0.001, self.now)

    def claim(self, limit: int, *, saturated: Iterable[int] = ()) -> list[tuple[int, int]]:
        """Lease up to `limit` entries; return the queue and the place of each, in that order."""
        if self.turns.needs_scan:
            self.scan()
        leased: list[tuple[int, int]] = []
        while len(leased) < limit:
            with self.turns.scanning() as changes:
                spans = self.turns.choose(limit - len(leased), self.now)
                if not spans:
                    break
                leased += self._lease(spans, limit - len(leased), set(saturated), changes)
        return leased

    def _lease(self, spans: list[Span], limit: int, saturated: set[int], changes: Changes) -> list[tuple[int, int]]:
        assert len(spans) <= limit
        assert sum(span.share for span in spans) <= 3 * limit
        found = [(index, at) for index, span in enumerate(spans) for at in self._read(span)]
        leased: list[tuple[int, int]] = []
        for index, at in (found[each] for each in self.turns.order(spans, found)):
            queue_no = spans[index].queue_no
            if queue_no in saturated:
                self.turns.pause(queue_no, 60, changes=changes)
            elif len(leased) < limit:
                leased.append((queue_no, at))
        for queue_no, at in leased:
            del self.waiting[queue_no][at]
        for index, span in enumerate(spans):
            read = [at for each, at in found if each == index]
            self.turns.taken(
                span,
                [at for at in read if (span.queue_no, at) in leased],
                is_exhausted=len(read) < span.share,
                now_ms=self.now,
                left=min((at for at in read if (span.queue_no, at) not in leased), default=None),
                changes=changes,
            )
        return leased

    def groups_of(self, leased: Sequence[tuple[int, int]]) -> Counter[str]:
        """How many of the leased entries each fair group had."""
        return Counter(self.queues[queue_no][1] for queue_no, _ in leased)

    def _read(self, span: Span) -> list[int]:
        within = (at for at in sorted(self.waiting[span.queue_no]) if span.first_place <= at <= span.last_place)
        return [at for at, _ in zip(within, range(span.share), strict=False)]

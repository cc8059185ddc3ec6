"""Turns: which queues a claim reads, in what order and how much of each, by priority, ageing and fairness."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import nsmallest
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from flowfabric.engine.core.fair_queueing import Client, Schedule, nested_turns
from flowfabric.engine.core.place import BAND_BITS

_END = 2**63 - 1
_Band: TypeAlias = tuple[int, int]
"""A queue and one of its priority bands."""


class Head(NamedTuple):
    """The first entry of one priority band of a queue; later, a place before which no entry is known."""

    queue_no: int
    lane_id: str
    fair_group: str
    place: int
    waiting_since: int
    """When the entry began to wait, in milliseconds of the database clock."""


class Fairness(NamedTuple):
    """How a lane orders its entries."""

    is_fair: bool
    weights: Mapping[str, float]
    """The share of a fair group relative to others, more than 0; 1 if it is not listed."""
    ageing_ms: int | None
    """An entry gains one step of priority each time it has waited this long; None if entries do not age."""


UNFAIR = Fairness(is_fair=False, weights={}, ageing_ms=None)


class Span(NamedTuple):
    """What one statement reads of a queue: up to `share` entries of one priority band."""

    queue_no: int
    first_place: int
    last_place: int
    share: int
    lane_id: str
    fair_group: str
    ahead: int
    """How far the head has moved ahead by waiting; entries of all spans are ordered by their place less this."""


class Changes:
    """What was reported while a statement ran; the statement may not have seen it."""

    def __init__(self) -> None:
        self.appeared: dict[_Band, int] = {}
        """The lowest place at which an entry has appeared."""
        self.resumed: set[int | None] = set()
        """The queues whose limits may have got room; None stands for all."""


class _Group(Client):
    """A fair group of a lane, or all entries of a lane that is not fair."""

    def __init__(self) -> None:
        super().__init__()
        self.ageing_ms: int | None = None
        self.heads: dict[_Band, Head] = {}

    def ranked(self, paused: Mapping[int, float], now_ms: int) -> Iterator[tuple[int, Head]]:
        """Yield the heads that are not paused, each with its effective place."""
        ageing_ms = self.ageing_ms
        for head in self.heads.values():
            if head.queue_no not in paused:
                place = head.place
                if ageing_ms and (steps := (now_ms - head.waiting_since) // ageing_ms) > 0:
                    place -= min(steps, place >> BAND_BITS) << BAND_BITS
                yield place, head

    def is_ready(self, paused: Mapping[int, float]) -> bool:
        """Whether it has a head that is not paused, if it has any."""
        return not paused or any(queue_no not in paused for queue_no, _ in self.heads)


class _Lane(Client):
    """A lane, its fair groups, and whose turn it is."""

    def __init__(self, fairness: Fairness) -> None:
        super().__init__()
        self.fairness = fairness
        self.groups: dict[str, _Group] = {}
        self.schedule = Schedule()

    def group(self, fair_group: str) -> _Group:
        """The group of this name; the only one if the lane is not fair."""
        name = fair_group if self.fairness.is_fair else ""
        if (group := self.groups.get(name)) is None:
            group = self.groups[name] = _Group()
            self._set_up(name, group)
        return group

    def clear(self, fairness: Fairness) -> None:
        """Forget the heads, but not the virtual times."""
        self.fairness = fairness
        for name, group in self.groups.items():
            group.heads.clear()
            self._set_up(name, group)

    def drop_idle(self) -> None:
        """Forget the groups without entries that would only be moved up to the others."""
        reached = self.schedule.virtual_time
        self.groups = {name: each for name, each in self.groups.items() if each.heads or each.virtual_time > reached}

    @property
    def has_entries(self) -> bool:
        """Whether any group has entries."""
        return any(group.heads for group in self.groups.values())

    def begin(self, paused: Mapping[int, float]) -> list[_Group]:
        """Start a round of its groups, and return those that may be served."""
        return self.schedule.begin({each: each.is_ready(paused) for each in self.groups.values() if each.heads})

    def _set_up(self, name: str, group: _Group) -> None:
        group.weight = self.fairness.weights.get(name, 1.0)
        group.ageing_ms = self.fairness.ageing_ms


class Turns:
    """The order in which one kind of claim serves queues.

    By priority, ageing and sequence over all queues. If one of its lanes is fair, the lanes take turns, and so do the
    fair groups of a fair lane by their weights.
    """

    LIFE_SECONDS = 1.0
    """How long a full scan is valid; then an entry that appeared without a hint is found."""
    SHARE = 20
    """A slower full scan is repeated only after this many times its own duration."""
    LONGEST_SECONDS = 10.0
    """A full scan is repeated after this time at the latest."""
    PAUSED_QUEUES = 1000
    """If more are paused, pauses are longer in proportion, so that claims do not look at all of them all the time."""
    MAX_QUEUES = 100_000
    """The most queues without entries that are remembered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._queues: dict[int, tuple[str, str]] = {}
        self._schedule = Schedule()
        self._is_fair = False
        self._paused: dict[int, float] = {}
        self._running: list[Changes] = []
        self._valid_until = float("-inf")
        self._has_unknown = False
        self._ms_ahead = 0.0
        self.route_nos: frozenset[int] = frozenset()
        """The routes of the queues that it serves."""

    @contextmanager
    def scanning(self) -> Iterator[Changes]:
        """Yield what is reported while the block runs: from before `choose` or a full scan until its result is in."""
        changes = Changes()
        self._running.append(changes)
        try:
            yield changes
        finally:
            self._running = [each for each in self._running if each is not changes]

    def expire(self) -> None:
        """Do a full scan before the next claim."""
        self._valid_until = float("-inf")

    @property
    def now_ms(self) -> int:
        """The time of the database, as far as it is known."""
        return int(self._clock() * 1000 + self._ms_ahead)

    @property
    def needs_scan(self) -> bool:
        """Whether the next claim should do a full scan first."""
        return self._has_unknown or self._clock() >= self._valid_until

    def load(
        self,
        heads: Iterable[Head],
        fairness: Mapping[str, Fairness],
        seconds: float,
        now_ms: int,
        *,
        changes: Changes | None = None,
    ) -> None:
        """Replace what is known by the result of a full scan that took so long on the server."""
        self._set_clock(now_ms)
        self._is_fair = any(each.is_fair for each in fairness.values())
        for lane_id, lane in self._lanes.items():
            lane.clear(fairness.get(lane_id, UNFAIR))
        if len(self._queues) > self.MAX_QUEUES:
            self._queues.clear()
        for head in heads:
            if (known := self._lanes.get(head.lane_id)) is None:
                known = self._lanes[head.lane_id] = _Lane(fairness.get(head.lane_id, UNFAIR))
            self._queues[head.queue_no] = head.lane_id, head.fair_group
            known.group(head.fair_group).heads[head.queue_no, head.place >> BAND_BITS] = head
        self._has_unknown = False
        if changes is not None:
            for (queue_no, _), place in list(changes.appeared.items()):
                self.appeared(queue_no, place)
        for lane in self._lanes.values():
            lane.drop_idle()
        self._valid_until = self._clock() + max(self.LIFE_SECONDS, min(self.SHARE * seconds, self.LONGEST_SECONDS))

    def appeared(self, queue_no: int, place: int) -> None:
        """Record that an entry has appeared at this place."""
        band = queue_no, place >> BAND_BITS
        for changes in self._running:
            changes.appeared[band] = min(place, changes.appeared.get(band, place))
        if (known := self._queues.get(queue_no)) is None:
            self._has_unknown = True
            return
        lane_id, fair_group = known
        heads = self._lanes[lane_id].group(fair_group).heads
        if (head := heads.get(band)) is None:
            heads[band] = Head(queue_no, lane_id, fair_group, place, self.now_ms)
        elif place < head.place:
            heads[band] = head._replace(place=place)

    def choose(self, limit: int, now_ms: int, *, width: int = 0) -> list[Span]:
        """Return up to `limit` spans, or up to `width`, the best first, with about twice `limit` entries in all."""
        width = max(limit, width)
        self._set_clock(now_ms)
        self._paused = {queue_no: until for queue_no, until in self._paused.items() if until > self._clock()}
        if not self._is_fair:
            all_groups = (group for lane in self._lanes.values() for group in lane.groups.values())
            heads = chain.from_iterable(group.ranked(self._paused, now_ms) for group in all_groups)
            return _spans(nsmallest(width, heads), max(2 * limit, width), limit)
        offers: dict[_Lane, dict[_Group, int]] = {}
        for lane in self._lanes.values():
            best = nsmallest(width, lane.begin(self._paused), key=attrgetter("virtual_time", "number"))
            offers[lane] = dict.fromkeys(best, width)
        self._schedule.begin({lane: bool(best) for lane, best in offers.items() if best or lane.has_entries})
        spans: list[Span] = []
        for group, turns in Counter(islice(nested_turns(offers), width)).items():
            spans += _spans(nsmallest(turns, group.ranked(self._paused, now_ms)), 2 * turns, limit)
        return spans

    def order(self, spans: Sequence[Span], found: Sequence[tuple[int, int]]) -> list[int]:
        """Return the order in which to lease what the spans had, as indexes of `found`.

        `found` names each entry by the index of its span and its place. A claim leases the first ones up to its limit:
        turns that one group cannot use go to the others. Without ageing, entries are left out if unread ones may have
        a better priority; a claim that gets too few chooses again.
        """
        lanes = [self._lanes[span.lane_id] for span in spans]
        groups = [lane.group(span.fair_group) for lane, span in zip(lanes, spans, strict=True)]
        read = Counter(index for index, _ in found)
        ends = dict.fromkeys(groups, _END)
        for index, (span, group) in enumerate(zip(spans, groups, strict=True)):
            # There may be more of this priority. Entries that age may be late: that saves statements.
            if read[index] >= span.share and not group.ageing_ms:
                ends[group] = min(ends[group], span.last_place)
        ranked = sorted((place - spans[index].ahead, number) for number, (index, place) in enumerate(found))
        if not self._is_fair:
            end = min(ends.values(), default=_END)
            return [number for place, number in ranked if place <= end]
        entries: dict[_Lane, dict[_Group, list[int]]] = {}
        for place, number in ranked:
            lane, group = lanes[found[number][0]], groups[found[number][0]]
            if place <= ends[group]:
                entries.setdefault(lane, {}).setdefault(group, []).append(number)
        nexts = {group: iter(numbers) for of_lane in entries.values() for group, numbers in of_lane.items()}
        offers = {
            lane: {group: len(numbers) for group, numbers in of_lane.items()} for lane, of_lane in entries.items()
        }
        return [next(nexts[group]) for group in nested_turns(offers)]

    def taken(
        self,
        span: Span,
        places: Sequence[int],
        *,
        is_exhausted: bool,
        now_ms: int,
        left: int | None = None,
        waiting_since: int | None = None,
        changes: Changes | None = None,
    ) -> None:
        """Record what a committed claim has leased of a span, and whether the span had no more than was read.

        `left` is the lowest place that was read but not leased; `waiting_since` is when the last one leased began to
        wait, which the next one did not do before.
        """
        self._set_clock(now_ms)
        lane = self._lanes[span.lane_id]
        group = lane.group(span.fair_group)
        if places and self._is_fair:
            self._schedule.charge(lane, len(places))
            lane.schedule.charge(group, len(places))
        band = span.queue_no, span.first_place >> BAND_BITS
        place = max(places, default=span.first_place - 1) + 1
        if left is not None:
            place = left
        elif is_exhausted:
            place = _END
        if changes is not None:
            place = min(place, changes.appeared.get(band, place))
        head = group.heads.get(band)
        if head is not None and head.place < place:
            if place > span.last_place:
                del group.heads[band]
                if self._is_fair and not group.heads:
                    group.leave()
                    if not lane.has_entries:
                        lane.leave()
            else:
                since = max(head.waiting_since, waiting_since or 0)
                group.heads[band] = head._replace(place=place, waiting_since=since)
        if left is not None:
            # A claim that ran beside this one has skipped it as locked.
            self.appeared(span.queue_no, left)

    def pause(
        self, queue_no: int, seconds: float, *, most: float | None = None, changes: Changes | None = None
    ) -> None:
        """Do not choose a queue without room for so long, unless its limits may have got room since they were read.

        The more queues are paused, the longer; but not longer than `most`, the seconds after which it has room.
        """
        if changes is None or changes.resumed.isdisjoint((None, queue_no)):
            seconds *= max(1, len(self._paused) / self.PAUSED_QUEUES)
            self._paused[queue_no] = self._clock() + (seconds if most is None else min(seconds, most))

    def resume(self, queue_nos: Iterable[int] | None = None) -> None:
        """Choose these queues, or all, again: their limits may have room."""
        resumed: set[int | None] = {None} if queue_nos is None else set(queue_nos)
        for changes in self._running:
            changes.resumed |= resumed
        self._paused = {each: until for each, until in self._paused.items() if resumed.isdisjoint((None, each))}

    def _set_clock(self, now_ms: int) -> None:
        self._ms_ahead = now_ms - self._clock() * 1000


def _spans(ranked: Sequence[tuple[int, Head]], total: int, most: int) -> list[Span]:
    """Split `total` over heads in order; a band gets half of what is left while there are worse ones.

    So a better band alone can fill a claim, however many worse ones are read with it.
    """
    spans: list[Span] = []
    for _, band in groupby(ranked, key=lambda each: each[0] >> BAND_BITS):
        heads = list(band)
        is_last = len(spans) + len(heads) == len(ranked)
        share = min(most, max(1, -(-(total if is_last else total // 2) // len(heads))))
        total = max(0, total - share * len(heads))
        for place, head in heads:
            last_place = head.place | (1 << BAND_BITS) - 1
            ahead = head.place - place
            spans.append(Span(head.queue_no, head.place, last_place, share, head.lane_id, head.fair_group, ahead))
    return spans

"""Turns: which queues a claim reads, by priority, ageing and fairness, and what is known of them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.state import HandClock
from flowfabric.engine.core.turns import UNFAIR, Changes, Fairness, Head, Span, Turns
from flowfabric.engine.core.place import BAND_BITS

LANE = "lane"
NOW = 1_000_000
FAIR = Fairness(is_fair=True, weights={}, ageing_ms=None)


def place(band: int, number: int) -> int:
    """A place of a priority band."""
    return (band << BAND_BITS) + number


def head(queue_no: int, at: int, *, group: str = "", lane: str = LANE, since: int = NOW) -> Head:
    """The first entry of a queue."""
    return Head(queue_no, lane, group, at, since)


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


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def turns(clock: HandClock) -> Turns:
    """Turns that know nothing."""
    return Turns(clock)


def load(turns: Turns, *heads: Head, fairness: Fairness = UNFAIR, changes: Changes | None = None) -> None:
    """Load the result of a fast full scan."""
    turns.load(heads, {LANE: fairness}, 0.001, NOW, changes=changes)


def firsts(turns: Turns, limit: int = 100, now: int = NOW) -> list[tuple[int, int]]:
    """The queue and first place of each span that a claim reads."""
    return [(span.queue_no, span.first_place) for span in turns.choose(limit, now)]


def shares(turns: Turns, limit: int) -> list[tuple[int, int]]:
    """The queue and share of each span that a claim reads."""
    return [(span.queue_no, span.share) for span in turns.choose(limit, NOW)]


# Order and shares


bands = st.integers(0, 5)
places = st.builds(place, bands, st.integers(0, 50))


@given(st.dictionaries(st.tuples(st.integers(1, 20), bands), st.integers(0, 50)), st.integers(1, 30))
def test_without_fairness_the_spans_are_the_best_heads_by_priority_and_sequence(
    known: dict[tuple[int, int], int], limit: int
) -> None:
    turns = Turns(HandClock())
    load(turns, *(head(queue_no, place(band, number)) for (queue_no, band), number in known.items()))
    spans = turns.choose(limit, NOW)
    expected = sorted((place(band, number), queue_no) for (queue_no, band), number in known.items())[:limit]
    assert [(span.first_place, span.queue_no) for span in spans] == expected
    assert all(span.last_place == place((span.first_place >> BAND_BITS) + 1, 0) - 1 for span in spans)
    assert all(1 <= span.share <= limit for span in spans)
    assert sum(span.share for span in spans) <= 2 * limit + len(spans)


def test_a_single_span_may_fill_the_claim_and_several_share_twice_as_much(turns: Turns) -> None:
    load(turns, head(1, place(0, 1)))
    assert shares(turns, 10) == [(1, 10)]
    load(turns, *(head(queue_no, place(0, queue_no)) for queue_no in (1, 2, 3)))
    assert shares(turns, 10) == [(1, 7), (2, 7), (3, 7)]
    assert shares(turns, 2) == [(1, 2), (2, 2)]


def test_worse_priorities_share_what_the_better_ones_leave(turns: Turns) -> None:
    load(turns, *(head(number, place(number // 3, number)) for number in range(8)))
    assert [share for _, share in shares(turns, 12)] == [4, 4, 4, 2, 2, 2, 3, 3]


def test_a_better_priority_alone_can_fill_a_claim(turns: Turns) -> None:
    load(turns, head(1, place(0, 100)), *(head(queue_no, place(1, queue_no)) for queue_no in range(2, 60)))
    assert shares(turns, 50)[:2] == [(1, 50), (2, 2)]
    entries = Entries({LANE: UNFAIR})
    for number in range(200):
        entries.add(1, 0)
        entries.add(2 + number % 50, 1)
    for _ in range(4):
        assert {queue_no for queue_no, _ in entries.claim(50)} == {1}


@given(st.lists(st.tuples(st.integers(1, 6), bands), max_size=60), st.integers(1, 20))
def test_every_entry_is_claimed_once_and_none_before_one_of_a_better_priority(
    added: list[tuple[int, int]], limit: int
) -> None:
    entries = Entries({LANE: UNFAIR})
    expected = {(queue_no, entries.add(queue_no, band)) for queue_no, band in added}
    claimed: list[tuple[int, int]] = []
    while leased := entries.claim(limit):
        claimed += leased
    priorities = [at >> BAND_BITS for _, at in claimed]
    assert priorities == sorted(priorities)
    assert len(claimed) == len(added)
    assert set(claimed) == expected


# Ageing


AGEING = Fairness(is_fair=False, weights={}, ageing_ms=1000)


def test_an_entry_gains_a_step_of_priority_each_time_it_has_waited(turns: Turns) -> None:
    old, new = head(1, place(5, 9), since=NOW - 2_999), head(2, place(3, 10))
    load(turns, old, new, fairness=AGEING)
    assert [queue_no for queue_no, _ in firsts(turns)] == [1, 2]
    load(turns, old, head(2, place(3, 8)), fairness=AGEING)
    assert [queue_no for queue_no, _ in firsts(turns)] == [2, 1]
    assert [queue_no for queue_no, _ in firsts(turns, now=NOW + 1)] == [1, 2]
    load(turns, head(1, place(5, 9), since=NOW - 900_000), head(2, place(0, 8)), fairness=AGEING)
    assert [(span.queue_no, span.ahead) for span in turns.choose(9, NOW)] == [(2, 0), (1, place(5, 0))]


def test_an_entry_from_the_future_loses_no_priority(turns: Turns) -> None:
    load(turns, head(1, place(5, 9), since=NOW + 60_000), head(2, place(6, 1)), fairness=AGEING)
    assert [queue_no for queue_no, _ in firsts(turns)] == [1, 2]


def test_a_low_priority_is_not_starved_if_entries_age() -> None:
    for fairness in (AGEING, UNFAIR):
        entries = Entries({LANE: fairness})
        entries.add(1, 20)
        claimed: set[int] = set()
        for _ in range(30):
            for _ in range(6):
                entries.add(2, 3)
            claimed.update(queue_no for queue_no, _ in entries.claim(3))
            entries.now += 1000
            entries.clock.now += 1
        assert claimed == ({1, 2} if fairness.ageing_ms else {2})


# Fairness


weights = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 10.0]), min_size=2)


@given(weights, st.lists(st.integers(1, 8), min_size=1, max_size=10))
def test_fair_groups_are_served_by_their_weights_within_one_entry_each(of: dict[str, float], limits: list[int]) -> None:
    entries = Entries({LANE: Fairness(is_fair=True, weights=of, ageing_ms=None)})
    for queue_no, group in enumerate(of):
        for number in range(4 * sum(limits)):
            entries.add(10 * queue_no + number % 2, number // 2 % 2, group=group)
    served: Counter[str] = Counter()
    for limit in limits:
        leased = entries.claim(limit)
        assert len(leased) == limit
        served += entries.groups_of(leased)
        # Each group has had its weight in every turn of the slowest, and at most one entry more.
        least = min(served[group] / weight for group, weight in of.items())
        assert all(served[group] <= weight * least + 1 + 1e-9 for group, weight in of.items())


def test_fair_groups_with_many_small_queues_are_served_by_their_weights() -> None:
    entries = Entries({LANE: Fairness(is_fair=True, weights={"b": 3}, ageing_ms=None)})
    for number in range(600):
        entries.add(number // 2, number % 7, group="ab"[number % 4 // 2])
    served: Counter[str] = Counter()
    for _ in range(10):
        served += entries.groups_of(entries.claim(20))
    assert served.total() == 200
    assert abs(served["a"] - 50) <= 2


@given(st.lists(st.integers(1, 10), max_size=8), st.integers(1, 10))
def test_a_group_that_becomes_active_is_served_first_by_the_next_claim(limits: list[int], limit: int) -> None:
    entries = Entries({LANE: Fairness(is_fair=True, weights={"a": 5, "b": 0.5}, ageing_ms=None)})
    entries.add(99, group="new")
    for number in range(400):
        entries.add(number % 4, number % 3, group="abcd"[number % 4])
    entries.claim(30)
    for each in limits:
        entries.claim(each)
    late = entries.add(98, 7, group="late")
    assert entries.claim(limit)[0] == (98, late)
    again = entries.add(99, 7, group="new")
    assert (99, again) in entries.claim(30)


def test_an_idle_group_gets_no_credit() -> None:
    entries = Entries({LANE: FAIR})
    entries.add(2, group="b")
    for _ in range(500):
        entries.add(1, group="a")
    entries.claim(100)
    for _ in range(100):
        entries.add(2, group="b")
    assert entries.groups_of(entries.claim(50)) == {"a": 25, "b": 25}


def test_a_group_that_always_has_a_little_saves_no_turns() -> None:
    entries = Entries({LANE: FAIR})
    for _ in range(500):
        entries.add(1, group="a")
    for _ in range(20):
        entries.add(2, group="b")
        entries.claim(10)
    for _ in range(100):
        entries.add(2, group="b")
    assert entries.groups_of(entries.claim(50)) == {"a": 25, "b": 25}


def test_turns_that_a_group_cannot_use_go_to_the_others() -> None:
    entries = Entries({LANE: FAIR})
    entries.add(1, group="a")
    for number in range(100):
        entries.add(2 + number % 2, group="b" if number % 2 else "c")
    assert entries.groups_of(entries.claim(30)) == {"a": 1, "b": 14, "c": 15}


def test_within_a_group_the_order_is_by_priority(turns: Turns) -> None:
    load(turns, head(1, place(1, 1)), head(2, place(0, 2)), head(3, place(2, 3), group="b"), fairness=FAIR)
    spans = turns.choose(4, NOW)
    assert sorted(span.queue_no for span in spans) == [1, 2, 3]
    found = [(index, span.first_place + more) for index, span in enumerate(spans) for more in range(span.share)]
    order = [spans[found[each][0]].queue_no for each in turns.order(spans, found)[:4]]
    assert sorted(order) == [2, 2, 3, 3]


@given(st.lists(st.tuples(st.integers(1, 6), bands), max_size=60), st.integers(1, 20))
def test_within_a_group_no_entry_is_claimed_before_one_of_a_better_priority(
    added: list[tuple[int, int]], limit: int
) -> None:
    entries = Entries({LANE: FAIR})
    for queue_no, band in added:
        entries.add(queue_no, band, group="ab"[queue_no % 2])
    claimed = [each for _ in range(60) for each in entries.claim(limit)]
    assert len(claimed) == len(added)
    for group in range(2):
        priorities = [at >> BAND_BITS for queue_no, at in claimed if queue_no % 2 == group]
        assert priorities == sorted(priorities)


def test_groups_that_share_a_saturated_limit_keep_their_weights() -> None:
    entries = Entries({LANE: Fairness(is_fair=True, weights={"b": 3}, ageing_ms=None)})
    for _ in range(100):
        entries.add(1, group="a")
        entries.add(2, group="b")
    served: Counter[str] = Counter()
    for _ in range(80):
        served += entries.groups_of(entries.claim(1))
        for _ in range(2):
            entries.claim(1, saturated=(1, 2))
        assert entries.claim(1) == []
        entries.turns.resume()
    assert served == {"a": 20, "b": 60}


def test_a_group_that_was_saturated_does_not_catch_up() -> None:
    entries = Entries({LANE: FAIR})
    for number in range(400):
        entries.add(1 + number % 2, group="ab"[number % 2])
    entries.turns.pause(1, 60)
    assert entries.groups_of(entries.claim(50)) == {"b": 50}
    entries.turns.resume([1])
    assert entries.groups_of(entries.claim(50)) == {"a": 26, "b": 24}


def test_a_newcomer_gets_no_credit_from_a_group_that_is_saturated() -> None:
    entries = Entries({LANE: FAIR})
    for number in range(400):
        entries.add(1 + number % 2, group="ab"[number % 2])
    entries.claim(10)
    entries.turns.pause(1, 60)
    assert entries.groups_of(entries.claim(50)) == {"b": 50}
    for _ in range(100):
        entries.add(3, group="c")
    assert entries.groups_of(entries.claim(50)) == {"b": 25, "c": 25}


def test_newcomers_do_not_starve_a_group_with_a_backlog() -> None:
    entries = Entries({LANE: FAIR})
    for _ in range(5):
        entries.add(0, group="old")
    entries.claim(1)
    claimed = 0
    for number in range(1, 1_500):
        entries.add(number, group=f"new {number}")
        claimed += entries.groups_of(entries.claim(1))["old"]
    assert claimed


def test_a_fair_lane_and_one_that_is_not_take_turns() -> None:
    entries = Entries({LANE: FAIR, "plain": UNFAIR})
    for number in range(400):
        entries.add(number % 4, 5, group=f"group {number % 4}")
        entries.add(9, 0, group="other", lane="plain")
    counts = [Counter(entries.queues[queue_no][0] for queue_no, _ in entries.claim(limit)) for limit in (1, 1, 20)]
    assert counts[0] + counts[1] == {LANE: 1, "plain": 1}
    assert counts[2] == {LANE: 10, "plain": 10}


def test_a_lane_that_was_idle_gets_no_credit() -> None:
    entries = Entries({LANE: FAIR, "plain": UNFAIR})
    for _ in range(400):
        entries.add(1, group="a")
    entries.claim(100)
    for _ in range(100):
        entries.add(9, 0, group="other", lane="plain")
    assert entries.groups_of(entries.claim(20)) == {"a": 10, "other": 10}


def test_fairness_may_change_at_run_time() -> None:
    entries = Entries({LANE: UNFAIR})
    for group in "ab":
        for _ in range(300):
            entries.add(ord(group), group=group)
    for fairness, expected in [
        (FAIR, {"a": 20, "b": 20}),
        (Fairness(is_fair=True, weights={"b": 3}, ageing_ms=None), {"a": 10, "b": 30}),
        (UNFAIR, {"a": 40}),
        (FAIR, {"a": 20, "b": 20}),
    ]:
        entries.fairness = {LANE: fairness}
        entries.scan()
        assert entries.groups_of(entries.claim(40)) == expected


def test_groups_that_are_served_and_gone_are_forgotten() -> None:
    entries = Entries({LANE: FAIR})
    for number in range(200):
        entries.add(number, group=f"group {number}")
        entries.claim(1)
        entries.claim(1)
        entries.scan()
    assert len(entries.turns._lanes[LANE].groups) < 5


# What is known


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("appeared"), st.integers(1, 3), places),
            st.tuples(st.just("taken"), st.integers(0, 9), st.integers(0, 9)),
        ),
        max_size=30,
    )
)
def test_a_head_moves_forward_by_what_is_taken_and_backward_by_what_appears(
    steps: list[tuple[str, int, int]],
) -> None:
    turns = Turns(HandClock())
    load(turns, *(head(queue_no, place(2, 20)) for queue_no in (1, 2, 3)))
    heads = {(queue_no, 2): place(2, 20) for queue_no in (1, 2, 3)}
    for step, first, second in steps:
        if step == "appeared":
            turns.appeared(first, second)
            band = first, second >> BAND_BITS
            heads[band] = min(second, heads.get(band, second))
        elif spans := turns.choose(10, NOW):
            span = spans[first % len(spans)]
            band = span.queue_no, span.first_place >> BAND_BITS
            taken = [span.first_place + each for each in range(second)]
            turns.taken(span, taken, is_exhausted=second == 9, now_ms=NOW)
            if second == 9:
                del heads[band]
            else:
                heads[band] += second
        assert sorted(firsts(turns)) == sorted((queue_no, at) for (queue_no, _), at in heads.items())


def test_a_span_that_had_no_more_is_not_read_again_until_an_entry_appears(turns: Turns) -> None:
    load(turns, head(1, place(0, 5)))
    (span,) = turns.choose(10, NOW)
    turns.taken(span, [place(0, 5)], is_exhausted=True, now_ms=NOW)
    assert turns.choose(10, NOW) == []
    turns.appeared(1, place(0, 3))
    assert firsts(turns) == [(1, place(0, 3))]
    assert not turns.needs_scan


def test_what_appears_while_a_full_scan_runs_stays_known(turns: Turns) -> None:
    load(turns, head(1, place(0, 10)))
    with turns.scanning() as changes:
        turns.appeared(1, place(0, 3))
        turns.appeared(1, place(0, 7))
        turns.appeared(1, place(1, 1))
        load(turns, head(2, place(0, 1)), changes=changes)
    assert firsts(turns) == [(2, place(0, 1)), (1, place(0, 3)), (1, place(1, 1))]


def test_what_appears_while_a_claim_runs_stays_known(turns: Turns) -> None:
    load(turns, head(1, place(0, 10)))
    for is_exhausted in (False, True):
        turns.appeared(1, place(0, 10))
        with turns.scanning() as changes:
            (span,) = turns.choose(10, NOW)
            turns.appeared(1, place(0, 12))
            turns.taken(span, [place(0, 11), place(0, 14)], is_exhausted=is_exhausted, now_ms=NOW, changes=changes)
        assert firsts(turns) == [(1, place(0, 12))]


def test_an_entry_that_was_read_and_not_leased_stays_known(turns: Turns) -> None:
    load(turns, head(1, place(0, 10)))
    for is_exhausted in (False, True):
        (span,) = turns.choose(10, NOW)
        turns.taken(span, [place(0, 10)], is_exhausted=is_exhausted, now_ms=NOW, left=place(0, 12))
        assert firsts(turns) == [(1, place(0, 12))]


def test_an_entry_that_another_claim_had_locked_and_left_stays_known(turns: Turns) -> None:
    for is_first in (True, False):
        load(turns, head(1, place(0, 10)))
        with turns.scanning() as first, turns.scanning() as second:
            (span,) = turns.choose(10, NOW)
            if is_first:
                turns.taken(span, [place(0, 15)], is_exhausted=True, now_ms=NOW, changes=second)
            turns.taken(span, [place(0, 10)], is_exhausted=False, now_ms=NOW, left=place(0, 12), changes=first)
            if not is_first:
                turns.taken(span, [place(0, 15)], is_exhausted=True, now_ms=NOW, changes=second)
        assert firsts(turns) == [(1, place(0, 12))]


def test_the_next_entry_waits_since_the_last_one_taken(turns: Turns) -> None:
    load(turns, head(1, place(5, 1), since=NOW - 3_000), head(2, place(3, 1)), fairness=AGEING)
    assert [queue_no for queue_no, _ in firsts(turns)] == [1, 2]
    span = next(span for span in turns.choose(10, NOW) if span.queue_no == 1)
    assert span.ahead == place(3, 0)
    turns.taken(span, [place(5, 1)], is_exhausted=False, now_ms=NOW, waiting_since=NOW - 1_000)
    assert {span.queue_no: span.ahead for span in turns.choose(10, NOW)} == {1: place(1, 0), 2: 0}


def test_an_entry_that_appears_begins_to_wait_then(turns: Turns, clock: HandClock) -> None:
    load(turns, head(1, place(5, 1)), head(2, place(5, 2)), fairness=AGEING)
    for span in turns.choose(10, NOW):
        turns.taken(span, [], is_exhausted=True, now_ms=NOW)
    clock.now += 30
    turns.appeared(1, place(5, 1))
    assert [span.ahead for span in turns.choose(10, NOW + 30_999)] == [0]
    assert [span.ahead for span in turns.choose(10, NOW + 31_000)] == [place(1, 0)]


# When a full scan is needed


def test_a_scan_is_needed_at_first_when_it_is_old_and_when_an_unknown_queue_appears(
    turns: Turns, clock: HandClock
) -> None:
    assert turns.needs_scan
    load(turns)
    assert not turns.needs_scan
    clock.now += Turns.LIFE_SECONDS
    assert turns.needs_scan
    load(turns)
    turns.appeared(7, place(0, 1))
    assert turns.needs_scan
    load(turns, head(7, place(0, 1)))
    assert not turns.needs_scan


def test_a_scan_that_may_have_missed_an_unknown_queue_is_repeated(turns: Turns) -> None:
    with turns.scanning() as changes:
        turns.appeared(7, place(0, 1))
        load(turns, changes=changes)
        assert turns.needs_scan
        load(turns, head(7, place(0, 1)), changes=changes)
    assert not turns.needs_scan


@pytest.mark.parametrize(("seconds", "life"), [(0.0, 1.0), (0.04, 1.0), (0.1, 2.0), (60.0, 10.0)])
def test_the_slower_a_scan_the_longer_it_is_valid(turns: Turns, clock: HandClock, seconds: float, life: float) -> None:
    turns.load([], {}, seconds, NOW)
    clock.now += life - 0.01
    assert not turns.needs_scan
    clock.now += 0.02
    assert turns.needs_scan


def test_an_entry_without_a_hint_is_found_by_the_next_scan() -> None:
    entries = Entries({LANE: UNFAIR})
    entries.scan()
    at = entries.add(1, is_hinted=False)
    assert entries.claim(5) == []
    entries.clock.now += Turns.LIFE_SECONDS
    assert entries.claim(5) == [(1, at)]


# Paused queues


@pytest.mark.parametrize("fairness", [UNFAIR, FAIR], ids=["unfair", "fair"])
def test_a_paused_queue_is_not_chosen_until_its_time_or_until_it_is_resumed(
    turns: Turns, clock: HandClock, fairness: Fairness
) -> None:
    load(turns, *(head(queue_no, place(0, queue_no), group=str(queue_no)) for queue_no in (1, 2, 3)), fairness=fairness)
    assert turns.next_resume is None
    turns.pause(1, 2.0)
    turns.pause(2, 5.0)
    turns.appeared(1, place(0, 0))
    assert firsts(turns) == [(3, place(0, 3))]
    assert turns.next_resume == 2.0
    clock.now += 2.0
    assert turns.next_resume == 0.0
    assert sorted(queue_no for queue_no, _ in firsts(turns)) == [1, 3]
    assert turns.next_resume == 3.0
    turns.resume([2])
    assert sorted(queue_no for queue_no, _ in firsts(turns)) == [1, 2, 3]
    for queue_no in (1, 2, 3):
        turns.pause(queue_no, 5.0)
    assert firsts(turns) == []
    turns.resume()
    assert len(firsts(turns)) == 3


def test_a_pause_survives_a_scan(turns: Turns) -> None:
    turns.pause(1, 2.0)
    load(turns, head(1, place(0, 1)), head(2, place(0, 2)))
    assert firsts(turns) == [(2, place(0, 2))]


@pytest.mark.parametrize("resumed", [[1], None], ids=["one", "all"])
def test_a_queue_that_got_room_while_the_claim_ran_is_not_paused(turns: Turns, resumed: list[int] | None) -> None:
    load(turns, head(1, place(0, 1)))
    with turns.scanning() as changes:
        turns.resume(resumed)
        turns.pause(1, 60, changes=changes)
    assert len(firsts(turns)) == 1

"""Turns: which queues a claim reads, by priority and ageing, and what is known of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.entries import FAIR, LANE, NOW, Entries, firsts, head, load, place, shares
from engine.state import HandClock
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.turns import UNFAIR, Fairness, Turns


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def turns(clock: HandClock) -> Turns:
    """Turns that know nothing."""
    return Turns(clock)


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
    turns.pause(1, 2.0)
    turns.pause(2, 5.0)
    turns.appeared(1, place(0, 0))
    assert firsts(turns) == [(3, place(0, 3))]
    clock.now += 2.0
    assert sorted(queue_no for queue_no, _ in firsts(turns)) == [1, 3]
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


def test_the_more_queues_are_paused_the_longer_they_are(turns: Turns, clock: HandClock) -> None:
    count = 4 * Turns.PAUSED_QUEUES
    load(turns, *(head(queue_no, place(0, queue_no)) for queue_no in range(count)))
    for queue_no in range(count):
        turns.pause(queue_no, 1.0)
    clock.now += 1.5
    assert len(firsts(turns, count)) < count / 2


def test_a_pause_ends_when_the_queue_has_room(turns: Turns, clock: HandClock) -> None:
    load(turns, head(1, place(0, 1)))
    turns.pause(1, 2.0, most=0.5)
    assert firsts(turns) == []
    clock.now += 0.5
    assert len(firsts(turns)) == 1

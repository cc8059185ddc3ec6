"""Turns of fair groups: served by their weights, without credit for the time they were idle."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.core.entries import FAIR, LANE, NOW, Entries, head, load, place
from engine.state import HandClock
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.turns import UNFAIR, Fairness, Turns

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


def test_within_a_group_the_order_is_by_priority() -> None:
    turns = Turns(HandClock())
    load(turns, head(1, place(1, 1)), head(2, place(0, 2)), head(3, place(2, 3), group="b"), fairness=FAIR)
    spans = turns.choose(4, NOW)
    assert sorted(span.queue_no for span in spans) == [1, 2, 3]
    found = [(index, span.first_place + more) for index, span in enumerate(spans) for more in range(span.share)]
    order = [spans[found[each][0]].queue_no for each in turns.order(spans, found)[:4]]
    assert sorted(order) == [2, 2, 3, 3]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=60), st.integers(1, 20))
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

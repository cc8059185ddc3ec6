"""Marks: a walk begins where the last one ended, for as long as that is worth believing."""

import pytest

from flowfabric.engine.marks import BAND_BITS, Marks

from .state import HandClock

END = 2**63 - 1


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def marks(clock: HandClock) -> Marks:
    """Marks that have just begun."""
    marks = Marks(clock=clock)
    marks.spans()
    return marks


def place(band: int, number: int) -> int:
    """A place of a priority band."""
    return (band << BAND_BITS) + number


def spans(marks: Marks) -> list[tuple[int, int, int]]:
    """What to walk, as queue, first and last place."""
    return list(zip(*marks.spans(), strict=True))


def test_without_marks_every_queue_is_walked_whole(marks: Marks) -> None:
    assert spans(marks) == []


def test_a_walk_begins_behind_what_was_taken(marks: Marks) -> None:
    marks.raise_to(7, place(0, 41))
    assert spans(marks) == [(7, place(0, 42), END)]
    marks.raise_to(7, place(0, 10))
    assert spans(marks) == [(7, place(0, 42), END)]


def test_each_priority_has_a_mark_and_what_no_mark_speaks_of_is_walked(marks: Marks) -> None:
    marks.raise_to(7, place(3, 5))
    marks.raise_to(7, place(5, 9))
    marks.raise_to(8, place(0, 0))
    assert spans(marks) == [
        (7, 0, place(3, 0) - 1),
        (7, place(3, 6), place(5, 0) - 1),
        (7, place(5, 10), END),
        (8, place(0, 1), END),
    ]


def test_a_row_that_comes_back_lowers_the_mark_of_its_priority_alone(marks: Marks) -> None:
    for band in (0, 1):
        marks.raise_to(7, place(band, 100))
    marks.lower(7, place(1, 50))
    marks.lower(7, place(1, 70))
    marks.lower(7, place(2, 5))
    marks.lower(9, place(0, 5))
    assert spans(marks) == [(7, place(0, 101), place(1, 0) - 1), (7, place(1, 50), END)]


def test_a_queue_of_many_priorities_is_walked_whole(marks: Marks) -> None:
    for band in range(Marks.MOST_BANDS):
        marks.raise_to(7, place(band, 1))
    assert len(spans(marks)) == Marks.MOST_BANDS
    marks.raise_to(7, place(Marks.MOST_BANDS, 1))
    assert spans(marks) == []


def test_marks_are_forgotten_when_their_time_is_up(marks: Marks, clock: HandClock) -> None:
    marks.raise_to(7, place(0, 1))
    clock.now += Marks.LIFE_SECONDS - 0.01
    assert spans(marks)
    clock.now += 0.01
    assert spans(marks) == []
    marks.raise_to(7, place(0, 1))
    assert spans(marks)


def test_the_dearer_a_whole_walk_the_longer_the_marks_live(marks: Marks, clock: HandClock) -> None:
    marks.walked_whole(0.4)
    marks.raise_to(7, place(0, 1))
    clock.now += Marks.SHARE * 0.4 - 0.01
    assert spans(marks)
    clock.now += 0.02
    assert spans(marks) == []


def test_a_cheap_walk_may_be_repeated_at_once_and_a_dear_one_only_when_the_marks_end(
    marks: Marks, clock: HandClock
) -> None:
    assert marks.may_walk_whole
    marks.walked_whole(Marks.CHEAP_SECONDS)
    assert marks.may_walk_whole
    dear = Marks.CHEAP_SECONDS * 1.01
    marks.walked_whole(dear)
    assert not marks.may_walk_whole
    clock.now += Marks.LONGEST_SECONDS - 0.01
    assert not marks.may_walk_whole
    clock.now += 0.02
    assert marks.may_walk_whole


def test_no_walk_is_so_expensive_that_marks_outlive_their_longest_time(marks: Marks, clock: HandClock) -> None:
    marks.walked_whole(3600)
    marks.raise_to(7, place(0, 1))
    clock.now += Marks.LONGEST_SECONDS - 0.01
    assert spans(marks)
    clock.now += 0.02
    assert marks.may_walk_whole
    assert spans(marks) == []


def test_cleared_marks_lead_nowhere(marks: Marks) -> None:
    marks.raise_to(7, place(0, 1))
    marks.clear()
    assert spans(marks) == []

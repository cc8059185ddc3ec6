"""Queue watermarks: a walk begins where the last one ended, for as long as that is worth believing."""

import pytest

from engine.state import HandClock
from flowfabric.engine.core.watermark import BAND_BITS, QueueWatermarks

END = 2**63 - 1


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def watermarks(clock: HandClock) -> QueueWatermarks:
    """Queue watermarks that have just begun."""
    watermarks = QueueWatermarks(clock=clock)
    watermarks.spans()
    return watermarks


def place(band: int, number: int) -> int:
    """A place of a priority band."""
    return (band << BAND_BITS) + number


def spans(watermarks: QueueWatermarks) -> list[tuple[int, int, int]]:
    """What to walk, as queue, first and last place."""
    return list(zip(*watermarks.spans(), strict=True))


def test_without_watermarks_every_queue_is_walked_whole(watermarks: QueueWatermarks) -> None:
    assert spans(watermarks) == []


def test_a_walk_begins_behind_what_was_taken(watermarks: QueueWatermarks) -> None:
    watermarks.raise_to(7, place(0, 41))
    assert spans(watermarks) == [(7, place(0, 42), END)]
    watermarks.raise_to(7, place(0, 10))
    assert spans(watermarks) == [(7, place(0, 42), END)]


def test_each_priority_has_a_mark_and_what_no_mark_speaks_of_is_walked(watermarks: QueueWatermarks) -> None:
    watermarks.raise_to(7, place(3, 5))
    watermarks.raise_to(7, place(5, 9))
    watermarks.raise_to(8, place(0, 0))
    assert spans(watermarks) == [
        (7, 0, place(3, 0) - 1),
        (7, place(3, 6), place(5, 0) - 1),
        (7, place(5, 10), END),
        (8, place(0, 1), END),
    ]


def test_a_row_that_comes_back_lowers_the_mark_of_its_priority_alone(watermarks: QueueWatermarks) -> None:
    for band in (0, 1):
        watermarks.raise_to(7, place(band, 100))
    watermarks.lower(7, place(1, 50))
    watermarks.lower(7, place(1, 70))
    watermarks.lower(7, place(2, 5))
    watermarks.lower(9, place(0, 5))
    assert spans(watermarks) == [(7, place(0, 101), place(1, 0) - 1), (7, place(1, 50), END)]


def test_a_queue_of_many_priorities_is_walked_whole(watermarks: QueueWatermarks) -> None:
    for band in range(QueueWatermarks.MOST_BANDS):
        watermarks.raise_to(7, place(band, 1))
    assert len(spans(watermarks)) == QueueWatermarks.MOST_BANDS
    watermarks.raise_to(7, place(QueueWatermarks.MOST_BANDS, 1))
    assert spans(watermarks) == []


def test_watermarks_are_forgotten_when_their_time_is_up(watermarks: QueueWatermarks, clock: HandClock) -> None:
    watermarks.raise_to(7, place(0, 1))
    clock.now += QueueWatermarks.LIFE_SECONDS - 0.01
    assert spans(watermarks)
    clock.now += 0.01
    assert spans(watermarks) == []
    watermarks.raise_to(7, place(0, 1))
    assert spans(watermarks)


def test_the_dearer_a_whole_walk_the_longer_the_watermarks_live(watermarks: QueueWatermarks, clock: HandClock) -> None:
    watermarks.walked_whole(0.4)
    watermarks.raise_to(7, place(0, 1))
    clock.now += QueueWatermarks.SHARE * 0.4 - 0.01
    assert spans(watermarks)
    clock.now += 0.02
    assert spans(watermarks) == []


def test_a_cheap_walk_may_be_repeated_at_once_and_a_dear_one_only_when_the_watermarks_end(
    watermarks: QueueWatermarks, clock: HandClock
) -> None:
    assert watermarks.may_walk_whole
    watermarks.walked_whole(QueueWatermarks.CHEAP_SECONDS)
    assert watermarks.may_walk_whole
    dear = QueueWatermarks.CHEAP_SECONDS * 1.01
    watermarks.walked_whole(dear)
    assert not watermarks.may_walk_whole
    clock.now += QueueWatermarks.LONGEST_SECONDS - 0.01
    assert not watermarks.may_walk_whole
    clock.now += 0.02
    assert watermarks.may_walk_whole


def test_no_walk_is_so_expensive_that_watermarks_outlive_their_longest_time(
    watermarks: QueueWatermarks, clock: HandClock
) -> None:
    watermarks.walked_whole(3600)
    watermarks.raise_to(7, place(0, 1))
    clock.now += QueueWatermarks.LONGEST_SECONDS - 0.01
    assert spans(watermarks)
    clock.now += 0.02
    assert watermarks.may_walk_whole
    assert spans(watermarks) == []


def test_cleared_watermarks_lead_nowhere(watermarks: QueueWatermarks) -> None:
    watermarks.raise_to(7, place(0, 1))
    watermarks.clear()
    assert spans(watermarks) == []

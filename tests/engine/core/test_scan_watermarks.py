"""Queue watermarks: a scan starts where the last one ended, until the watermarks expire."""

import pytest

from engine.state import HandClock
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.watermark import ScanWatermarks, Watermarks

END = 2**63 - 1


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def watermarks(clock: HandClock) -> ScanWatermarks:
    """Fresh watermarks."""
    watermarks = ScanWatermarks(clock)
    watermarks.spans()
    return watermarks


def place(band: int, number: int) -> int:
    """A place of a priority band."""
    return (band << BAND_BITS) + number


def spans(watermarks: ScanWatermarks) -> list[tuple[int, int, int]]:
    """What to scan, as queue, first and last place."""
    return list(zip(*watermarks.spans(), strict=True))


def test_without_watermarks_every_queue_is_scanned_whole(watermarks: ScanWatermarks) -> None:
    assert spans(watermarks) == []


def test_a_scan_does_not_pass_what_appeared_while_it_ran(watermarks: ScanWatermarks) -> None:
    with watermarks.scanning() as first, watermarks.scanning() as second:
        watermarks.lower(7, place(0, 20))
        watermarks.lower(7, place(0, 10))
    with watermarks.scanning() as later:
        watermarks.raise_to(7, place(0, 30), first)
        assert spans(watermarks) == [(7, place(0, 10), END)]
        watermarks.raise_to(7, place(0, 30), later)
    assert spans(watermarks) == [(7, place(0, 31), END)]
    watermarks.raise_to(8, place(0, 30), second)
    assert spans(watermarks)[-1] == (8, place(0, 31), END)


def test_a_scan_starts_after_what_was_taken(watermarks: ScanWatermarks) -> None:
    watermarks.raise_to(7, place(0, 41))
    assert spans(watermarks) == [(7, place(0, 42), END)]
    watermarks.raise_to(7, place(0, 10))
    assert spans(watermarks) == [(7, place(0, 42), END)]


def test_each_priority_has_its_own_watermark_and_the_rest_is_scanned(watermarks: ScanWatermarks) -> None:
    watermarks.raise_to(7, place(3, 5))
    watermarks.raise_to(7, place(5, 9))
    watermarks.raise_to(8, place(0, 0))
    assert spans(watermarks) == [
        (7, 0, place(3, 0) - 1),
        (7, place(3, 6), place(5, 0) - 1),
        (7, place(5, 10), END),
        (8, place(0, 1), END),
    ]


def test_an_entry_that_reappears_lowers_the_watermark_of_its_priority_only(watermarks: ScanWatermarks) -> None:
    for band in (0, 1):
        watermarks.raise_to(7, place(band, 100))
    watermarks.lower(7, place(1, 50))
    watermarks.lower(7, place(1, 70))
    watermarks.lower(7, place(2, 5))
    watermarks.lower(9, place(0, 5))
    assert spans(watermarks) == [(7, place(0, 101), place(1, 0) - 1), (7, place(1, 50), END)]


def test_a_queue_may_have_any_number_of_priorities(watermarks: ScanWatermarks) -> None:
    for band in range(100):
        watermarks.raise_to(7, place(band, 1))
    assert spans(watermarks)[-1] == (7, place(99, 2), END)
    assert len(spans(watermarks)) == 100


def test_watermarks_expire(watermarks: ScanWatermarks, clock: HandClock) -> None:
    watermarks.raise_to(7, place(0, 1))
    clock.now += ScanWatermarks.LIFE_SECONDS - 0.01
    assert spans(watermarks)
    clock.now += 0.01
    assert spans(watermarks) == []
    watermarks.raise_to(7, place(0, 1))
    assert spans(watermarks)


def test_the_slower_a_full_scan_the_longer_the_watermarks_are_valid(
    watermarks: ScanWatermarks, clock: HandClock
) -> None:
    watermarks.record_full_scan(0.4)
    watermarks.raise_to(7, place(0, 1))
    clock.now += ScanWatermarks.SHARE * 0.4 - 0.01
    assert spans(watermarks)
    clock.now += 0.02
    assert spans(watermarks) == []


def test_a_fast_full_scan_may_be_repeated_at_once_and_a_slow_one_later(
    watermarks: ScanWatermarks, clock: HandClock
) -> None:
    assert watermarks.may_scan_all
    watermarks.record_full_scan(ScanWatermarks.FREE_SECONDS)
    assert watermarks.may_scan_all
    longer = ScanWatermarks.FREE_SECONDS * 1.5
    watermarks.record_full_scan(longer)
    assert not watermarks.may_scan_all
    clock.now += ScanWatermarks.SHARE * longer * 0.99
    assert not watermarks.may_scan_all
    clock.now += ScanWatermarks.SHARE * longer * 0.02
    assert watermarks.may_scan_all


def test_watermarks_expire_after_their_longest_time_however_slow_a_scan_is(
    watermarks: ScanWatermarks, clock: HandClock
) -> None:
    watermarks.record_full_scan(3600)
    watermarks.raise_to(7, place(0, 1))
    clock.now += ScanWatermarks.LONGEST_SECONDS - 0.01
    assert spans(watermarks)
    clock.now += 0.02
    assert watermarks.may_scan_all
    assert spans(watermarks) == []


def test_after_clear_everything_is_scanned(watermarks: ScanWatermarks) -> None:
    watermarks.raise_to(7, place(0, 1))
    watermarks.clear()
    assert spans(watermarks) == []


def test_each_kind_of_claim_has_its_own_watermarks_and_all_are_lowered(clock: HandClock) -> None:
    every = Watermarks(clock=clock)
    one, other, queues = every.of_routes("one"), every.of_routes("other"), every.of_queues("one")
    for each, number in ((one, 7), (other, 7), (queues, 3)):
        each.spans()
        each.raise_to(number, place(0, 10))
    assert every.of_routes("one") is one
    one.raise_to(7, place(0, 20))
    assert spans(other) == [(7, place(0, 11), END)]
    every.lower(7, 3, place(0, 5))
    assert [spans(each) for each in (one, other, queues)] == [[(number, place(0, 5), END)] for number in (7, 7, 3)]
    every.clear()
    assert [spans(each) for each in (one, other, queues)] == [[], [], []]


def test_the_oldest_kind_of_claim_is_forgotten_beyond_the_limit(clock: HandClock) -> None:
    every = Watermarks(clock=clock)
    first = every.of_routes(0)
    for number in range(1, Watermarks.MAX_KINDS + 1):
        every.of_routes(number)
    assert every.of_routes(0) is not first


def test_ended_watermarks_are_valid_again_after_a_full_scan_that_found_nothing(
    watermarks: ScanWatermarks, clock: HandClock
) -> None:
    watermarks.raise_to(7, place(0, 1))
    watermarks.end()
    assert spans(watermarks) == []
    watermarks.record_full_scan(0.01)
    assert spans(watermarks) == [(7, place(0, 2), END)]


def test_a_full_scan_that_found_something_keeps_the_watermarks_up_to_it(watermarks: ScanWatermarks) -> None:
    for band in (0, 1, 2):
        watermarks.raise_to(7, place(band, 100))
        watermarks.raise_to(8, place(band, 10))
    watermarks.end()
    watermarks.spans()
    # The best entry was here: nothing better is left, and the scan has not seen anything worse.
    watermarks.record_full_scan(0.01, up_to=place(1, 50))
    assert spans(watermarks) == [
        (7, place(0, 101), place(1, 0) - 1),
        (7, place(1, 51), END),
        (8, place(0, 11), place(1, 0) - 1),
        (8, place(1, 11), END),
    ]

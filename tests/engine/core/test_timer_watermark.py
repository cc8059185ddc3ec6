"""Timer watermarks: a scan starts at the oldest live timer, and at intervals from 0."""

import pytest

from engine.state import HandClock
from flowfabric.engine.core.watermark import TimerWatermark

EVERY, MARGIN = 30.0, 1_000


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def watermark(clock: HandClock) -> TimerWatermark:
    """A watermark after its first full scan."""
    watermark = TimerWatermark(full_scan_seconds=EVERY, margin_ms=MARGIN, clock=clock)
    assert watermark.scan_start() == 0
    watermark.record_scan(0, 0)
    return watermark


def test_a_scan_starts_a_margin_before_the_oldest_live_timer(watermark: TimerWatermark) -> None:
    watermark.move_to(50_000)
    assert watermark.scan_start() == watermark.since == 50_000 - MARGIN


def test_a_watermark_is_not_negative(watermark: TimerWatermark) -> None:
    watermark.move_to(MARGIN // 2)
    assert watermark.scan_start() == 0


def test_a_watermark_moves_in_both_directions(watermark: TimerWatermark) -> None:
    watermark.move_to(50_000)
    watermark.move_to(20_000)
    assert watermark.since == 20_000 - MARGIN


def test_a_full_scan_is_due_at_intervals(watermark: TimerWatermark, clock: HandClock) -> None:
    watermark.move_to(50_000)
    clock.now += EVERY - 0.01
    assert watermark.scan_start() == 49_000
    clock.now += 0.02
    assert watermark.scan_start() == 0
    watermark.record_scan(0, 0)
    watermark.move_to(60_000)
    assert watermark.scan_start() == 59_000


def test_a_full_scan_without_an_answer_is_due_again(watermark: TimerWatermark, clock: HandClock) -> None:
    watermark.move_to(50_000)
    clock.now += EVERY
    assert watermark.scan_start() == watermark.scan_start() == 0
    assert watermark.since == 49_000


@pytest.mark.parametrize(
    ("seconds", "pause"),
    [
        (EVERY / TimerWatermark.SHARE, EVERY),
        (2.0, 2.0 * TimerWatermark.SHARE),
        (1000.0, TimerWatermark.LONGEST_SECONDS),
    ],
)
def test_the_slower_a_full_scan_the_later_the_next(
    watermark: TimerWatermark, clock: HandClock, seconds: float, pause: float
) -> None:
    watermark.move_to(50_000)
    clock.now += EVERY
    watermark.record_scan(watermark.scan_start(), seconds)
    clock.now += pause - 0.01
    assert watermark.scan_start() == 49_000
    clock.now += 0.02
    assert watermark.scan_start() == 0

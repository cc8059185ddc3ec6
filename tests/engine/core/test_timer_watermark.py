"""Timer watermarks: a look begins where live timers can be, and from time to time at the beginning of time."""

import pytest

from engine.state import HandClock
from flowfabric.engine.core.watermark import TimerWatermark

EVERY, MARGIN = 30.0, 1_000


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def watermark(clock: HandClock) -> TimerWatermark:
    """A watermark whose first look is over."""
    watermark = TimerWatermark(whole_every_seconds=EVERY, margin_ms=MARGIN, clock=clock)
    assert watermark.look() == 0
    watermark.looked(0, 0)
    return watermark


def test_a_look_begins_a_margin_before_the_oldest_timer_seen(watermark: TimerWatermark) -> None:
    watermark.reach(50_000)
    assert watermark.look() == watermark.since == 50_000 - MARGIN


def test_a_watermark_does_not_lie_before_the_beginning_of_time(watermark: TimerWatermark) -> None:
    watermark.reach(MARGIN // 2)
    assert watermark.look() == 0


def test_a_watermark_follows_what_was_seen_in_both_directions(watermark: TimerWatermark) -> None:
    watermark.reach(50_000)
    watermark.reach(20_000)
    assert watermark.since == 20_000 - MARGIN


def test_from_time_to_time_a_look_is_whole(watermark: TimerWatermark, clock: HandClock) -> None:
    watermark.reach(50_000)
    clock.now += EVERY - 0.01
    assert watermark.look() == 49_000
    clock.now += 0.02
    assert watermark.look() == 0
    watermark.looked(0, 0)
    watermark.reach(60_000)
    assert watermark.look() == 59_000


def test_a_whole_look_without_an_answer_is_made_again_and_the_watermark_stays(
    watermark: TimerWatermark, clock: HandClock
) -> None:
    watermark.reach(50_000)
    clock.now += EVERY
    assert watermark.look() == watermark.look() == 0
    assert watermark.since == 49_000


@pytest.mark.parametrize(
    ("seconds", "pause"),
    [
        (EVERY / TimerWatermark.SHARE, EVERY),
        (2.0, 2.0 * TimerWatermark.SHARE),
        (1000.0, TimerWatermark.LONGEST_SECONDS),
    ],
)
def test_the_longer_a_whole_look_takes_the_later_the_next(
    watermark: TimerWatermark, clock: HandClock, seconds: float, pause: float
) -> None:
    watermark.reach(50_000)
    clock.now += EVERY
    watermark.looked(watermark.look(), seconds)
    clock.now += pause - 0.01
    assert watermark.look() == 49_000
    clock.now += 0.02
    assert watermark.look() == 0

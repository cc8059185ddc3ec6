"""Horizons: a look begins where live timers can be, and from time to time at the beginning of time."""

import pytest

from flowfabric.engine.horizon import Horizon

from .state import HandClock

EVERY, MARGIN = 30.0, 1_000


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def horizon(clock: HandClock) -> Horizon:
    """A horizon whose first look is over."""
    horizon = Horizon(whole_every_seconds=EVERY, margin_ms=MARGIN, clock=clock)
    assert horizon.look() == 0
    horizon.looked(0, 0)
    return horizon


def test_a_look_begins_a_margin_before_the_oldest_timer_seen(horizon: Horizon) -> None:
    horizon.reach(50_000)
    assert horizon.look() == horizon.since == 50_000 - MARGIN


def test_a_horizon_does_not_lie_before_the_beginning_of_time(horizon: Horizon) -> None:
    horizon.reach(MARGIN // 2)
    assert horizon.look() == 0


def test_a_horizon_follows_what_was_seen_in_both_directions(horizon: Horizon) -> None:
    horizon.reach(50_000)
    horizon.reach(20_000)
    assert horizon.since == 20_000 - MARGIN


def test_from_time_to_time_a_look_is_whole(horizon: Horizon, clock: HandClock) -> None:
    horizon.reach(50_000)
    clock.now += EVERY - 0.01
    assert horizon.look() == 49_000
    clock.now += 0.02
    assert horizon.look() == 0
    horizon.looked(0, 0)
    horizon.reach(60_000)
    assert horizon.look() == 59_000


def test_a_whole_look_without_an_answer_is_made_again_and_the_horizon_stays(horizon: Horizon, clock: HandClock) -> None:
    horizon.reach(50_000)
    clock.now += EVERY
    assert horizon.look() == horizon.look() == 0
    assert horizon.since == 49_000


@pytest.mark.parametrize(
    ("seconds", "pause"),
    [(EVERY / Horizon.SHARE, EVERY), (2.0, 2.0 * Horizon.SHARE), (1000.0, Horizon.LONGEST_SECONDS)],
)
def test_the_longer_a_whole_look_takes_the_later_the_next(
    horizon: Horizon, clock: HandClock, seconds: float, pause: float
) -> None:
    horizon.reach(50_000)
    clock.now += EVERY
    horizon.looked(horizon.look(), seconds)
    clock.now += pause - 0.01
    assert horizon.look() == 49_000
    clock.now += 0.02
    assert horizon.look() == 0

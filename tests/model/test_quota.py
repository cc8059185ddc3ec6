"""The rules of a quota's key: the rate is never exceeded in any window, and the time until the next try is exact."""

from hypothesis import example, given
from hypothesis import strategies as st

from flowfabric.model.quota import (
    MAX_EXACT_ENTRIES,
    ConcurrencyExceeded,
    KeyState,
    QuotaLimits,
    RateExceeded,
)

WINDOW = 1000


def state_of(rate: int, cap: int = 0, *, used: int = 0) -> KeyState:
    return KeyState(
        limits=QuotaLimits(max_requests_per_window=rate, requests_per_window_seconds=1, active_concurrency_cap=cap),
        used=used,
    )


steps = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 12)), max_size=300)


@given(st.integers(1, 30), steps)
@example(200, [(3, 1)] * 300)
@example(1000, [(1, 2)] * 300)
def test_no_window_has_more_tokens_than_the_rate_allows(rate: int, steps: list[tuple[int, int]]) -> None:
    state = state_of(rate)
    admitted: list[tuple[int, int]] = []
    now = 1_000_000
    for pause, weight in steps:
        now += pause
        state.sweep(now)
        if state.denial(now, weight=weight) is None:
            assert state.admit(now, weight=weight) == now
            admitted.append((now, min(weight, rate)))
            assert len(state.entries) <= MAX_EXACT_ENTRIES + 1
    for start, _ in admitted:
        assert sum(tokens for at, tokens in admitted if start <= at < start + WINDOW) <= rate


@given(st.integers(1, 30), steps, st.integers(1, 12))
def test_a_denied_execution_is_admitted_after_the_time_of_the_answer_and_not_before(
    rate: int, steps: list[tuple[int, int]], weight: int
) -> None:
    state = state_of(rate)
    now = 1_000_000
    for pause, each in steps:
        now += pause
        state.sweep(now)
        if state.denial(now, weight=each) is None:
            state.admit(now, weight=each)
    denial = state.denial(now, weight=weight)
    if denial is None:
        return
    assert isinstance(denial, RateExceeded)
    assert 0 < denial.retry_after_ms <= WINDOW
    entries = state.entries
    for at, is_admitted in ((now + denial.retry_after_ms - 1, False), (now + denial.retry_after_ms, True)):
        state.entries = list(entries)
        state.sweep(at)
        assert (state.denial(at, weight=weight) is None) is is_admitted


def test_many_entries_are_merged_and_none_leaves_the_window_early() -> None:
    state = state_of(10_000)
    for ms in range(500):
        state.admit(1_000_000 + ms)
    assert len(state.entries) <= MAX_EXACT_ENTRIES
    assert state.tokens_used == 500
    state.sweep(1_000_000 + WINDOW)
    # The first part of ten milliseconds leaves as a whole with its latest.
    assert state.tokens_used == 500
    state.sweep(1_000_009 + WINDOW)
    assert state.tokens_used == 490


def test_a_clock_that_goes_back_adds_to_the_latest_entry() -> None:
    state = state_of(5)
    assert state.admit(2000) == 2000
    assert state.admit(1000) == 2000
    assert state.entries == [(2000, 2)]


def test_tokens_taken_back_are_those_of_their_entry() -> None:
    state = state_of(9)
    for at, weight in ((1000, 1), (1100, 3), (1200, 1)):
        state.admit(at, weight=weight)
    state.take_back(1100, 2)
    assert state.entries == [(1000, 1), (1100, 1), (1200, 1)]
    state.take_back(1000)
    assert state.entries == [(1100, 1), (1200, 1)]
    state.take_back(1300)
    assert state.entries == [(1100, 1), (1200, 1)]


def test_an_execution_heavier_than_the_rate_is_admitted_alone() -> None:
    state = state_of(3)
    assert state.denial(0, weight=10) is None
    state.admit(1000, weight=10)
    assert state.entries == [(1000, 3)]
    assert state.denial(1500, weight=1) == RateExceeded(retry_after_ms=500)


def test_slots_are_counted_only_under_a_cap() -> None:
    state = state_of(0, 1)
    state.admit(0)
    assert (state.used, state.entries) == (1, [])
    assert state.denial(0) == ConcurrencyExceeded()
    assert state.denial(0, needs_slot=False) is None
    unlimited = state_of(0)
    unlimited.admit(0)
    assert (unlimited.used, unlimited.entries) == (0, [])

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.policy import (
    Backoff,
    ExecutionPolicy,
    ExponentialBackoff,
    FixedBackoff,
    RetryPolicy,
    dedup_window_ms,
    reclaim_cap,
)
from flowfabric.model.retry import may_retry, retry_delay_ms
from model.cases import for_each

draws = st.floats(0, 1, exclude_max=True)
growing = st.builds(
    ExponentialBackoff,
    initial_delay_ms=st.integers(0, 2**53 - 1),
    max_delay_ms=st.integers(0, 2**53 - 1),
    multiplier=st.floats(0, 2**53 - 1, exclude_min=True),
)


@for_each(
    "backoff, delays",
    [
        (None, [1000, 1000, 1000]),
        (FixedBackoff(), [1000, 1000, 1000]),
        (FixedBackoff(delay_ms=250), [250, 250, 250]),
        (FixedBackoff(delay_ms=0), [0, 0, 0]),
        (ExponentialBackoff(), [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]),
        (ExponentialBackoff(initial_delay_ms=10, multiplier=1.5), [10, 15, 22, 33]),
        (ExponentialBackoff(initial_delay_ms=100, multiplier=0.5), [100, 50, 25, 12]),
        (ExponentialBackoff(initial_delay_ms=0), [0, 0]),
        (ExponentialBackoff(initial_delay_ms=100, max_delay_ms=30), [30, 30]),
    ],
)
def test_each_kind_of_backoff_has_these_delays(backoff: Backoff | None, delays: list[int]) -> None:
    assert [retry_delay_ms(backoff, count, draw=0.5) for count in range(len(delays))] == delays


def test_a_huge_retry_count_stays_within_the_limit() -> None:
    assert retry_delay_ms(ExponentialBackoff(), 2**31 - 1, draw=0.0) == 60_000
    assert retry_delay_ms(ExponentialBackoff(initial_delay_ms=0), 2**31 - 1, draw=0.0) == 0
    assert retry_delay_ms(ExponentialBackoff(multiplier=0.1), 2**31 - 1, draw=0.0) == 0


@given(growing, st.integers(0, 2**31 - 1), draws)
def test_a_delay_never_exceeds_its_maximum(backoff: ExponentialBackoff, count: int, draw: float) -> None:
    delay = retry_delay_ms(backoff, count, draw=draw)
    assert type(delay) is int
    assert 0 <= delay <= backoff.max_delay_ms


@given(growing, st.integers(0, 100), draws)
def test_jitter_stays_in_the_upper_half_of_the_delay(backoff: ExponentialBackoff, count: int, draw: float) -> None:
    full = retry_delay_ms(backoff, count, draw=draw)
    jittered = ExponentialBackoff(
        initial_delay_ms=backoff.initial_delay_ms,
        max_delay_ms=backoff.max_delay_ms,
        multiplier=backoff.multiplier,
        jitter=True,
    )
    assert full <= 2 * retry_delay_ms(jittered, count, draw=draw) <= 2 * full


def test_jitter_reaches_both_limits() -> None:
    jittered = ExponentialBackoff(initial_delay_ms=10, jitter=True)
    assert {retry_delay_ms(jittered, 0, draw=step / 100) for step in range(100)} == {5, 6, 7, 8, 9, 10}


@for_each(
    "policy, retry_count, category, verdict",
    [
        (None, 0, "transient", False),
        (RetryPolicy(max_retries=0), 0, "transient", False),
        (RetryPolicy(max_retries=1), 0, "transient", True),
        (RetryPolicy(max_retries=1), 1, "transient", False),
        (RetryPolicy(), 2, "timeout", True),
        (RetryPolicy(), 3, "timeout", False),
        (RetryPolicy(), 0, "permanent", False),
        (RetryPolicy(), 0, "cancelled", False),
        (RetryPolicy(retryable_categories=("permanent",)), 0, "permanent", False),
        (RetryPolicy(retryable_categories=("timeout",)), 0, "timeout", True),
        (RetryPolicy(retryable_categories=("timeout",)), 0, "transient", False),
        (RetryPolicy(), 0, "my_own", True),
    ],
)
def test_a_retry_depends_on_count_and_category(
    policy: RetryPolicy | None, retry_count: int, category: str, verdict: Any
) -> None:
    assert may_retry(policy, retry_count=retry_count, category=category) is verdict


def test_the_reclaim_cap_is_the_policys_else_the_arguments_else_1000() -> None:
    assert reclaim_cap(ExecutionPolicy(max_reclaim_count=7), 3) == 7
    assert reclaim_cap(ExecutionPolicy(), 3) == 100
    assert reclaim_cap(None, 3) == 3
    assert reclaim_cap(None, 0) == 0
    assert reclaim_cap(None) == 1000


def test_an_idempotency_key_is_kept_a_day_by_default() -> None:
    assert dedup_window_ms(None) == dedup_window_ms(ExecutionPolicy()) == 86_400_000
    assert dedup_window_ms(ExecutionPolicy(dedup_window_ms=-1)) == -1

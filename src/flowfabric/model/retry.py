"""Retry rules: whether a failed attempt is retried, and after which delay."""

from flowfabric.model.policy import DEFAULT_RETRY_DELAY_MS, Backoff, ExponentialBackoff, FixedBackoff, RetryPolicy

_NEVER_RETRIED = frozenset({"permanent", "cancelled"})


def may_retry(retry_policy: RetryPolicy | None, *, retry_count: int, category: str) -> bool:
    """Whether an attempt that failed with this category is retried."""
    if retry_policy is None or retry_count >= retry_policy.max_retries or category in _NEVER_RETRIED:
        return False
    return not retry_policy.retryable_categories or category in retry_policy.retryable_categories


def retry_delay_ms(backoff: Backoff | None, retry_count: int, *, draw: float) -> int:
    """Return the delay before the next retry; `draw` is a random number from [0, 1) that jitter uses."""
    match backoff:
        case None:
            return DEFAULT_RETRY_DELAY_MS
        case FixedBackoff():
            return backoff.delay_ms
        case ExponentialBackoff():
            delay = _grown_delay(backoff, retry_count)
            if not backoff.jitter:
                return delay
            least = (delay + 1) // 2
            return min(least + int(draw * (delay - least + 1)), delay)


def _grown_delay(backoff: ExponentialBackoff, retry_count: int) -> int:
    if backoff.initial_delay_ms == 0:
        return 0
    try:
        growth = backoff.multiplier**retry_count
    except OverflowError:
        return backoff.max_delay_ms
    return int(min(backoff.initial_delay_ms * growth, backoff.max_delay_ms))

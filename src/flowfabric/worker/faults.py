"""Which errors of the engine pass by themselves, and which say that a lease is gone."""

from flowfabric.model.errors import EngineError

LEASE_IS_LOST = frozenset(
    {
        "lease_conflict",
        "stale_lease",
        "lease_expired",
        "lease_revoked",
        "execution_not_active",
        "execution_not_found",
    }
)
"""The errors that say that a lease is no longer held: repeating the call cannot help."""

FAULT_SECONDS = (0.05, 1.0)
"""The first and the longest pause before a call that met a fault of the store is repeated."""

_FAULTS = frozenset({"transport", "resource_exhausted"})


def is_passing(error: Exception) -> bool:
    """Whether the store was at fault or in contention, so that the same call may succeed later.

    That an error is retryable does not say so: a waitpoint that is not found does not come by waiting.
    """
    return (
        isinstance(error, EngineError)
        and error.retryable
        and (error.category in _FAULTS or error.code == "retry_exhausted")
    )

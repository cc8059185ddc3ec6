"""When the time of a run is up."""

import math

from flowfabric.engine.expire import ExpiryPhase
from flowfabric.model.outcomes import ClaimedExecution


def time_limit(claimed: ClaimedExecution) -> tuple[float, ExpiryPhase]:
    """How many seconds after its claim a run must be stopped, and why; infinity where nothing limits it."""
    attempt_ms: float = math.inf if claimed.attempt_timeout_ms is None else claimed.attempt_timeout_ms
    deadline_ms: float = math.inf
    if claimed.execution_deadline_at is not None:
        claimed_at = claimed.lease_expires_at - claimed.handle.lease_ttl_ms
        deadline_ms = claimed.execution_deadline_at - claimed_at
    if deadline_ms <= attempt_ms:
        return deadline_ms / 1000, ExpiryPhase.EXECUTION_DEADLINE
    return attempt_ms / 1000, ExpiryPhase.ATTEMPT_TIMEOUT

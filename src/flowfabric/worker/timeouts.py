"""Timers that stop runs at their attempt timeout or execution deadline."""

import asyncio
import logging
import math

from flowfabric.engine.lease.expire import ExpiryPhase
from flowfabric.model.lease import ClaimedExecution
from flowfabric.worker.log_lines import log_stop
from flowfabric.worker.reports import Reports
from flowfabric.worker.running import Running

RECHECK_SECONDS = 0.1
"""How long a timeout is postponed while its run is suspending."""


class TimeLimits:
    """Stops a run at its attempt timeout or its execution deadline, whichever comes first.

    The store then decides, by its own clock, how the attempt or the execution ends.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def begin(self, running: Running) -> None:
        """Start the timer of a run that was just claimed; a run that is already late is stopped before it starts."""
        seconds, phase = _time_limit(running.claimed)
        if seconds > 0:
            running.timer = asyncio.get_running_loop().call_later(seconds, self._stop, running, phase)
        else:
            self._stop(running, phase)

    def _stop(self, running: Running, phase: ExpiryPhase) -> None:
        if running.has_ended or running.is_dropped:
            return
        if running.is_suspending:
            # The answer is near, and a suspended run keeps the rest of its time.
            running.timer = asyncio.get_running_loop().call_later(RECHECK_SECONDS, self._stop, running, phase)
            return
        limit = "execution deadline"
        if phase is ExpiryPhase.ATTEMPT_TIMEOUT:
            limit = f"attempt timeout of {running.claimed.attempt_timeout_ms} ms"
        log_stop(running, logging.WARNING, f"its {limit} has passed")
        running.stop()
        running.expiry = asyncio.create_task(self._reports.expire(running, phase))


def seconds_left(claimed: ClaimedExecution) -> float:
    """Return how many seconds after its claim a run must be stopped; infinity if it has no limit."""
    if claimed.attempt_timeout_ms is None and claimed.execution_deadline_at is None:
        return math.inf
    return _time_limit(claimed)[0]


def _time_limit(claimed: ClaimedExecution) -> tuple[float, ExpiryPhase]:
    """Return how many seconds after its claim a run must be stopped, and why."""
    attempt_ms: float = math.inf if claimed.attempt_timeout_ms is None else claimed.attempt_timeout_ms
    deadline_ms: float = math.inf
    if claimed.execution_deadline_at is not None:
        claimed_at = claimed.lease_expires_at - claimed.handle.lease_ttl_ms
        deadline_ms = claimed.execution_deadline_at - claimed_at
    if deadline_ms <= attempt_ms:
        return deadline_ms / 1000, ExpiryPhase.EXECUTION_DEADLINE
    return attempt_ms / 1000, ExpiryPhase.ATTEMPT_TIMEOUT

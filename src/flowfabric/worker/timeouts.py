"""Stopping runs whose time is up, by timers of this process."""

import asyncio
import logging
import math

from flowfabric.engine.lease.expire import ExpiryPhase
from flowfabric.model.lease import ClaimedExecution
from flowfabric.worker.context import Running
from flowfabric.worker.logs import log_about
from flowfabric.worker.reports import Reports

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
"""The pause before a timeout that met a run about to suspend is looked at again."""


class TimeLimits:
    """Stops a run when the time of its attempt or of its execution is up, whichever is first.

    The store decides by its own clock how the attempt or the execution ends then.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def begin(self, running: Running) -> None:
        """Arm the timer of a run that was just claimed; one that comes too late is stopped before it begins."""
        seconds, phase = _time_limit(running.claimed)
        if seconds > 0:
            running.timer = asyncio.get_running_loop().call_later(seconds, self._stop, running, phase)
        else:
            self._stop(running, phase)

    def _stop(self, running: Running, phase: ExpiryPhase) -> None:
        if running.has_ended or running.is_dropped:
            return
        if running.is_suspending:
            # Answered in a moment: a run that is suspended keeps what is left of its time.
            running.timer = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._stop, running, phase)
            return
        limit = "execution deadline"
        if phase is ExpiryPhase.ATTEMPT_TIMEOUT:
            limit = f"attempt timeout of {running.claimed.attempt_timeout_ms} ms"
        log_about(running.claimed, logger, logging.WARNING, "%s is stopped: its %s has passed", running, limit)
        running.stop()
        running.expiry = asyncio.create_task(self._reports.expire(running, phase))


def seconds_left(claimed: ClaimedExecution) -> float:
    """How many seconds after its claim a run must be stopped; infinity where it has no limit."""
    if claimed.attempt_timeout_ms is None and claimed.execution_deadline_at is None:
        return math.inf
    return _time_limit(claimed)[0]


def _time_limit(claimed: ClaimedExecution) -> tuple[float, ExpiryPhase]:
    """How many seconds after its claim a run must be stopped, and why."""
    attempt_ms: float = math.inf if claimed.attempt_timeout_ms is None else claimed.attempt_timeout_ms
    deadline_ms: float = math.inf
    if claimed.execution_deadline_at is not None:
        claimed_at = claimed.lease_expires_at - claimed.handle.lease_ttl_ms
        deadline_ms = claimed.execution_deadline_at - claimed_at
    if deadline_ms <= attempt_ms:
        return deadline_ms / 1000, ExpiryPhase.EXECUTION_DEADLINE
    return attempt_ms / 1000, ExpiryPhase.ATTEMPT_TIMEOUT

"""Due work that a claim does itself when no reconciler runs in this process: expire leases, promote delays."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from flowfabric.engine.core.quarantine import is_connection_fault, pause_after
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.lease.delay import Delays
from flowfabric.engine.lease.expire import LeaseExpiry
from flowfabric.model.errors import EngineError

MAX_BATCHES = 100
"""The most full batches that one claim processes."""
FAULT_SECONDS = 1.0
"""How long claims skip due work after it failed; ten times as long after three failures in a row."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _DueWork:
    """One kind of due work, and when a claim may next try it."""

    name: str
    run: Callable[[int], Awaitable[SweepResult]]
    failures: int = 0
    not_before: float = -math.inf


class CatchUp:
    """Makes expired leases and elapsed delays claimable without waiting for a sweep."""

    def __init__(self, expiry: LeaseExpiry, delays: Delays) -> None:
        self._kinds = (
            _DueWork("expired leases", expiry.mark_since),
            _DueWork("elapsed delays", delays.promote_since),
        )
        self._caught_up_at = -math.inf
        self.is_swept = False
        """Set while a reconciler in this process handles due work; claims then skip it."""

    async def run(self, lanes: Sequence[str], *, within_seconds: float) -> bool:
        """Process due work and return whether these lanes gained any.

        Skipped when a reconciler runs in this process, or when the last run was less than `within_seconds` ago. A
        failure is logged and does not fail the claim, except when the database cannot be reached.
        """
        now = time.monotonic()
        if self.is_swept or now < self._caught_up_at + within_seconds:
            return False
        self._caught_up_at = now
        has_gained = False
        for due in self._kinds:
            if now < due.not_before:
                continue
            try:
                has_gained = await self._process(due, lanes) or has_gained
                due.failures = 0
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                due.failures += 1
                due.not_before = time.monotonic() + pause_after(due.failures, FAULT_SECONDS)
                logger.warning(
                    "cannot process %s, claiming without them: %s", due.name, fault, exc_info=due.failures == 1
                )
        return has_gained

    @staticmethod
    async def _process(due: _DueWork, lanes: Sequence[str]) -> bool:
        # Full batches of work for other lanes may be due before the work of these lanes.
        for _ in range(MAX_BATCHES):
            batch = await due.run(0)
            if any(each.lane_id in lanes for each in batch.work):
                return True
            if not batch.is_full:
                break
        return False

"""Due work that a claim does itself when no reconciler runs in this process: leases, delays and slots of grants."""

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
"""How long claims skip due work after it failed; ten times as long after every third failure in a row."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _DueWork:
    """One kind of due work, and when a claim may next try it."""

    name: str
    run_batch: Callable[[int], Awaitable[SweepResult]]
    """Process one batch of what was due after this time."""
    is_for_any_lane: bool = False
    """Whether it may help any lane."""
    failures: int = 0
    next_try_at: float = -math.inf


class CatchUp:
    """Makes expired leases and elapsed delays claimable without waiting for a sweep."""

    def __init__(
        self, expiry: LeaseExpiry, delays: Delays, return_slots: Callable[[int], Awaitable[SweepResult]]
    ) -> None:
        self._due_work = (
            _DueWork("expired leases", expiry.mark_since),
            _DueWork("elapsed delays", delays.promote_since),
            _DueWork("slots of expired grants", return_slots, is_for_any_lane=True),
        )
        self._last_run_at = -math.inf
        self.is_left_to_sweeps = False
        """Set while a reconciler in this process processes due work; claims then do not."""

    async def run(self, lanes: Sequence[str], *, min_interval_seconds: float) -> bool:
        """Process due work; return whether anything on these lanes became claimable.

        Skipped when a reconciler runs in this process, or when the last run was less than `min_interval_seconds` ago. A
        failure is logged and does not fail the claim, except when the database cannot be reached.
        """
        now = time.monotonic()
        if self.is_left_to_sweeps or now < self._last_run_at + min_interval_seconds:
            return False
        self._last_run_at = now
        has_claimable = False
        for due in self._due_work:
            if now < due.next_try_at:
                continue
            try:
                has_claimable = await self._process(due, lanes) or has_claimable
                due.failures = 0
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                due.failures += 1
                due.next_try_at = time.monotonic() + pause_after(due.failures, FAULT_SECONDS)
                logger.warning(
                    "cannot process %s, claiming without them: %s", due.name, fault, exc_info=due.failures == 1
                )
        return has_claimable

    @staticmethod
    async def _process(due: _DueWork, lanes: Sequence[str]) -> bool:
        # Work is processed in the order of its due times, so full batches for other lanes may come first.
        for _ in range(MAX_BATCHES):
            batch = await due.run_batch(0)
            if (due.is_for_any_lane and batch.done) or any(each.lane_id in lanes for each in batch.work):
                return True
            if not batch.is_full:
                break
        return False

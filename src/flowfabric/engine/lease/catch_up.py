"""Doing what is due before a claim, while no reconciler of this process does it."""

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

MOST_BATCHES = 100
"""Full batches that one claim goes through at most."""
FAULT_SECONDS = 1.0
"""For how long no claim meets a fault of what is due again; after three in a row, ten times that."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Chore:
    """One kind of what is due, and when a claim may do it."""

    name: str
    run: Callable[[int], Awaitable[SweepResult]]
    failures: int = 0
    not_before: float = -math.inf


class CatchUp:
    """Lets claims find expired leases and elapsed delays without waiting for a sweep."""

    def __init__(self, expiry: LeaseExpiry, delays: Delays) -> None:
        self._chores = (_Chore("expired leases", expiry.mark_since), _Chore("elapsed delays", delays.promote_since))
        self._caught_up_at = -math.inf
        self.is_swept = False
        """Set while a reconciler of this process does what is due; a claim then need not."""

    async def run(self, lanes: Sequence[str], *, within_seconds: float) -> bool:
        """Do what is due, unless that was done within this time or a reconciler does it; whether these lanes gained.

        A fault of what is due is logged and is not the claim's; only a store that is out of reach raises.
        """
        now = time.monotonic()
        if self.is_swept or now < self._caught_up_at + within_seconds:
            return False
        self._caught_up_at = now
        is_gain = False
        for chore in self._chores:
            if now < chore.not_before:
                continue
            try:
                is_gain = await self._do(chore, lanes) or is_gain
                chore.failures = 0
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                chore.failures += 1
                chore.not_before = time.monotonic() + pause_after(chore.failures, FAULT_SECONDS)
                logger.warning("a claim goes on without %s: %s", chore.name, fault, exc_info=chore.failures == 1)
        return is_gain

    @staticmethod
    async def _do(chore: _Chore, lanes: Sequence[str]) -> bool:
        # A full batch of other lanes may stand before what is due on these.
        for _ in range(MOST_BATCHES):
            batch = await chore.run(0)
            if any(each.lane_id in lanes for each in batch.work):
                return True
            if not batch.is_full:
                break
        return False

"""Doing what is due before a claim, while no reconciler of this process does it."""

import math
import time
from collections.abc import Sequence

from flowfabric.engine.lease.delay import Delays
from flowfabric.engine.lease.expire import CLAIM_LIMIT, SWEEP_LIMIT, LeaseExpiry

MOST_BATCHES = 100
"""Full batches that one claim goes through at most."""


class CatchUp:
    """Lets claims find expired leases and elapsed delays without waiting for a sweep."""

    def __init__(self, expiry: LeaseExpiry, delays: Delays) -> None:
        self._expiry = expiry
        self._delays = delays
        self._caught_up_at = -math.inf
        self.is_swept = False
        """Set while a reconciler of this process does what is due; a claim then need not."""

    async def run(self, lanes: Sequence[str], *, within_seconds: float) -> bool:
        """Do what is due, unless that was done within this time or a reconciler does it; whether these lanes gained."""
        now = time.monotonic()
        if self.is_swept or now < self._caught_up_at + within_seconds:
            return False
        self._caught_up_at = now
        is_gain = False
        for bring, limit in ((self._expiry.mark_since, CLAIM_LIMIT), (self._delays.promote_since, SWEEP_LIMIT)):
            # A full batch of other lanes may stand before what is due on these.
            for _ in range(MOST_BATCHES):
                count, work = await bring(0)
                is_gain = is_gain or any(each.lane_id in lanes for each in work)
                if is_gain or count < limit:
                    break
        return is_gain

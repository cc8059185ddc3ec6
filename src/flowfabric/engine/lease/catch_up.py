"""Doing what is due before a claim, while no reconciler of this process does it."""

import math
import time
from collections.abc import Sequence

from flowfabric.engine.lease.delay import Delays
from flowfabric.engine.lease.expire import SWEEP_LIMIT, LeaseExpiry


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
        for bring in (self._expiry.mark_since, self._delays.promote_since):
            # A full batch of other lanes may stand before what is due on these.
            while rows := await bring(0):
                is_gain = is_gain or any(row["lane_id"] in lanes for row in rows)
                if is_gain or len(rows) < SWEEP_LIMIT:
                    break
        return is_gain

"""The families of the engine, each built once on the same store."""

import asyncio
import contextlib

from flowfabric.engine.boot import Boot
from flowfabric.engine.cancel import Cancel
from flowfabric.engine.claim import Claim
from flowfabric.engine.consistency import Consistency
from flowfabric.engine.endings import Endings
from flowfabric.engine.expire import Expire
from flowfabric.engine.explain import Explain
from flowfabric.engine.feed import Feed
from flowfabric.engine.finish import Finish
from flowfabric.engine.grant import Grants
from flowfabric.engine.lanes import Lanes
from flowfabric.engine.lease import Leases
from flowfabric.engine.listing import Listing
from flowfabric.engine.named import NamedClaims
from flowfabric.engine.park import Park
from flowfabric.engine.reclaim import Reclaim
from flowfabric.engine.release import Releases
from flowfabric.engine.resubmit import Resubmit
from flowfabric.engine.resume import Resumes
from flowfabric.engine.retention import Retention
from flowfabric.engine.sessions import Sessions
from flowfabric.engine.setbacks import Setbacks
from flowfabric.engine.shutdown import Shutdown
from flowfabric.engine.signals import Signals
from flowfabric.engine.submit import Submit
from flowfabric.engine.suspend import Suspend
from flowfabric.engine.suspension_timeouts import SuspensionTimeouts
from flowfabric.engine.tagging import Tagging
from flowfabric.engine.view import View
from flowfabric.engine.waitpoint import Waitpoints
from flowfabric.engine.workers import Workers

DRAIN_SECONDS = 3.0
"""How long closing waits for calls under way."""


class Families:
    """What the operations of the engine are made of."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self.settings = boot.settings
        self.store_key = boot.store_key
        store = boot.store
        self.wakeups = store.wakeups
        self.leases = Leases(store)
        self._releases = Releases(store, self.leases)
        self._submit = Resubmit(Submit(store), store, patience_ms=boot.settings.submit_patience_ms)
        self._finish = Finish(store, self._releases)
        self._park = Park(self._releases)
        self._claim = Claim(store, self.leases, self._finish)
        self._keys = boot.keys
        self._grants = Grants(store, self._keys, self.leases, self._finish)
        self._named_claims = NamedClaims(store, self._keys)
        self._reclaim = Reclaim(store, self._grants, self._named_claims, self._releases)
        self._waitpoints = Waitpoints(store, self._keys, self.leases)
        self._suspend = Suspend(store, self._keys, self._releases, self.leases)
        self._resumes = Resumes(store)
        self._signals = Signals(store, self._keys, self._resumes)
        self.suspension_timeouts = SuspensionTimeouts(
            store, self._releases, self._resumes, Setbacks(self.settings.suspension_timeout_interval_s)
        )
        self._cancel = Cancel(store, self._releases)
        self.expiry = Expire(store, self._releases, Setbacks(self.settings.attempt_timeout_interval_s))
        self.retention = Retention(store, (self.suspension_timeouts.setbacks, self.expiry.setbacks))
        self.feed = Feed(store)
        self.sessions = Sessions(store)
        self.workers = Workers(store)
        self._lanes = Lanes(store)
        self._tagging = Tagging(store)
        self._view = View(store)
        self._explain = Explain(store)
        self._endings = Endings(store)
        self._listing = Listing(store)
        self._consistency = Consistency(store)
        self._shutdown = Shutdown(
            [self._claim.refuse_waits, self._endings.refuse],
            [
                self._claim.settle,
                self._submit.drain,
                self._signals.drain,
                self._suspend.drain,
                self._releases.drain,
                self.leases.drain,
            ],
        )

    async def _close(self) -> None:
        """Answer what is under way, give up what the store does not answer in time, and leave the store."""
        await self._endings.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                for family in (self._claim, self._submit, self._signals, self._suspend, self._releases, self.leases):
                    await family.drain()
        await self._boot.close()

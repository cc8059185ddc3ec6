"""The families of the engine, each built once on the same store."""

from flowfabric.engine.core.consequence import LeaseEnds
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.event.partitions import EventPartitions
from flowfabric.engine.execution.cancel import Cancel
from flowfabric.engine.execution.create import Submit
from flowfabric.engine.execution.resubmit import Resubmit
from flowfabric.engine.execution.results import Results
from flowfabric.engine.execution.retention import Retention
from flowfabric.engine.execution.tags import Tags
from flowfabric.engine.fleet.lanes import Lanes
from flowfabric.engine.fleet.sessions import Sessions
from flowfabric.engine.fleet.workers import Workers
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.claim import Claim
from flowfabric.engine.lease.claim_named import NamedClaims
from flowfabric.engine.lease.delay import Delays
from flowfabric.engine.lease.expire import LeaseExpiry, Timeouts
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.lease.grant import Grants
from flowfabric.engine.lease.reclaim import Reclaim
from flowfabric.engine.lease.renew import Renewals
from flowfabric.engine.lifecycle import Lifecycle, Shutdown
from flowfabric.engine.read.consistency import Consistency
from flowfabric.engine.read.explain import Explain
from flowfabric.engine.read.listing import Listing
from flowfabric.engine.read.view import View
from flowfabric.engine.wait.deliver import Signals
from flowfabric.engine.wait.resume import Resumes
from flowfabric.engine.wait.suspend import Suspend
from flowfabric.engine.wait.timeout import SuspensionTimeouts
from flowfabric.engine.wait.waitpoint import Waitpoints


class Families:
    """What the operations of the engine are made of."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self.settings = lifecycle.settings
        self.store_key = lifecycle.store_key
        store = lifecycle.store
        self.wakeups = store.wakeups
        self.lease_expiry = LeaseExpiry(store)
        self._renewals = Renewals(store, self.lease_expiry)
        self._lease_ends = LeaseEnds(store, self.lease_expiry.mark_expired)
        self.delays = Delays(store, self._lease_ends)
        self.catch_up = CatchUp(self.lease_expiry, self.delays)
        self._submit = Resubmit(Submit(store), store, patience_ms=lifecycle.settings.submit_patience_ms)
        self._finish = Finish(store, self._lease_ends)
        self._claim = Claim(store, self.catch_up, self._finish)
        self._keys = lifecycle.keys
        self._grants = Grants(store, self._keys, self.catch_up, self._finish)
        self._named_claims = NamedClaims(store, self._keys)
        self._reclaim = Reclaim(store, self._grants, self._named_claims, self._lease_ends)
        self._waitpoints = Waitpoints(store, self._keys, self.lease_expiry)
        self._suspend = Suspend(store, self._keys, self._lease_ends, self.lease_expiry)
        self._resumes = Resumes(store)
        self._signals = Signals(store, self._keys, self._resumes)
        self.suspension_timeouts = SuspensionTimeouts(
            store, self._lease_ends, self._resumes, Quarantine(self.settings.suspension_timeout_interval_s)
        )
        self._cancel = Cancel(store, self._lease_ends)
        self.timeouts = Timeouts(store, self._lease_ends, Quarantine(self.settings.attempt_timeout_interval_s))
        self.retention = Retention(store, (self.suspension_timeouts.quarantine, self.timeouts.quarantine))
        self.event_partitions = EventPartitions(store)
        self.sessions = Sessions(store)
        self.workers = Workers(store)
        self._lanes = Lanes(store)
        self._tags = Tags(store)
        self._view = View(store)
        self._explain = Explain(store)
        self._results = Results(store)
        self._listing = Listing(store)
        self._consistency = Consistency(store)
        self._shutdown = Shutdown(
            self._claim,
            self._results,
            [family.drain for family in (self._submit, self._signals, self._suspend, self._lease_ends, self._renewals)],
        )

    async def _close(self) -> None:
        """End waits, answer calls under way, and leave the store."""
        await self._shutdown.close()
        await self._lifecycle.close()

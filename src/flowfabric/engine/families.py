"""The families of the engine, each built once on the same store."""

from flowfabric.engine.boot import Boot
from flowfabric.engine.cancel import Cancel
from flowfabric.engine.claim import Claim
from flowfabric.engine.expire import Expire
from flowfabric.engine.feed import Feed
from flowfabric.engine.finish import Finish
from flowfabric.engine.lanes import Lanes
from flowfabric.engine.lease import Leases
from flowfabric.engine.release import Releases
from flowfabric.engine.retention import Retention
from flowfabric.engine.submit import Submit
from flowfabric.engine.view import View
from flowfabric.engine.workers import Workers


class Families:
    """What the operations of the engine are made of."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self.settings = boot.settings
        store = boot.store
        self.wakeups = store.wakeups
        self.leases = Leases(store)
        self._releases = Releases(store, self.leases)
        self._submit = Submit(store)
        self._finish = Finish(store, self._releases)
        self._claim = Claim(store, self.leases, self._finish)
        self._cancel = Cancel(store, self._releases)
        self.expiry = Expire(store, self._releases)
        self.retention = Retention(store)
        self.feed = Feed(store)
        self.workers = Workers(store)
        self._lanes = Lanes(store)
        self._view = View(store)

    async def _close(self) -> None:
        """Answer what is under way and leave the store."""
        await self._view.close()
        for family in (self._claim, self._submit, self._releases, self.leases):
            await family.drain()
        await self._boot.close()

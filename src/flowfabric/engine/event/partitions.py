"""The event feed's storage: daily partitions ahead of time, and the end of what is past its age."""

import logging

from flowfabric.db import partitions
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store, error_of

SQL = statements_beside(__file__)

TRIM_LIMIT = 1000

logger = logging.getLogger(__name__)


class EventPartitions:
    """Keeps the tables of events in shape."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._skipped: set[str] = set()
        self._has_warned_of_owner = False

    async def keep_partitions(self) -> int:
        """Make the partitions of the days ahead and drop those past the feed's age; answers how many.

        A role that does not own the tables makes none, and says so once.
        """
        schema = self._store.database.schema
        (clock,) = await self._store.fetch(SQL.read_feed_clock, retention_ms=self._store.rules.feed_retention_ms)
        try:
            async with self._store.database.acquire() as connection:
                kept = await partitions.ensure(connection, schema=schema, now_ms=clock["now"])
                dropped = await partitions.drop_older(connection, schema=schema, before_ms=clock["oldest"])
        except StoreFault as fault:
            raise error_of(fault) from fault
        except partitions.NotOwner as refused:
            if not self._has_warned_of_owner:
                self._has_warned_of_owner = True
                logger.warning("no daily partitions are made: %s", refused)
            return 0
        for name, reason in kept.skipped.items():
            if name not in self._skipped:
                self._skipped.add(name)
                logger.info("%s is not made: %s", name, reason)
        return len(kept.made) + len(dropped)

    async def trim_events(self) -> int:
        """Delete events past the feed's age that no daily partition holds; answers how many."""
        rows = await self._store.fetch(
            SQL.take_old_events, retention_ms=self._store.rules.feed_retention_ms, limit=TRIM_LIMIT
        )
        trimmed: int = rows[0]["trimmed"]
        return trimmed

    async def trim_worker_events(self) -> int:
        """Delete the registry's history past the feed's age; answers how many."""
        rows = await self._store.fetch(
            SQL.take_old_worker_events, retention_ms=self._store.rules.feed_retention_ms, limit=TRIM_LIMIT
        )
        trimmed: int = rows[0]["trimmed"]
        return trimmed

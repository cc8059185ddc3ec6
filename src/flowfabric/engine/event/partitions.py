"""Storage of events: daily partitions created in advance, and deletion of events past the feed's retention."""

import logging
from collections.abc import Sequence

from flowfabric.db import partitions
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store, error_of
from flowfabric.model.event import FAMILY_KINDS, RARE_FAMILIES, EventFamily

SQL = statements_beside(__file__)

_PAIRS = [(family, kind) for family, kinds in FAMILY_KINDS.items() for kind in kinds]
_DROPPED: dict[str, Sequence[str] | None] = {
    family: FAMILY_KINDS[family] if family in RARE_FAMILIES else None for family in EventFamily
}
"""The kinds to look for in a dropped partition; None means any."""

TRIM_LIMIT = 1000

logger = logging.getLogger(__name__)


class EventPartitions:
    """Maintains the tables of events."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._skipped: set[str] = set()
        self._has_warned = False

    async def keep_partitions(self) -> int:
        """Create the partitions of the next days and drop those past the feed's retention; return how many.

        A role that does not own the tables creates none, and logs that once.
        """
        schema = self._store.database.schema
        (clock,) = await self._store.fetch(SQL.read_event_window, retention_ms=self._store.rules.feed_retention_ms)
        try:
            async with self._store.database.acquire() as connection:
                ensured = await partitions.ensure(connection, schema=schema, now_ms=clock["now"])
                dropped = await partitions.drop_older(
                    connection, schema=schema, before_ms=clock["oldest"], families=_DROPPED
                )
        except StoreFault as fault:
            raise error_of(fault) from fault
        except partitions.NotOwner as refused:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("cannot create daily event partitions: %s", refused)
            return 0
        for name, reason in ensured.skipped.items():
            if name not in self._skipped:
                self._skipped.add(name)
                logger.info("event partition %s is not created: %s", name, reason)
        return len(ensured.created) + len(dropped)

    async def trim_events(self) -> int:
        """Delete events past the feed's retention that are in no daily partition; return how many."""
        rows = await self._store.fetch(
            SQL.take_old_events,
            retention_ms=self._store.rules.feed_retention_ms,
            limit=TRIM_LIMIT,
            families=[family for family, _ in _PAIRS],
            kinds=[kind for _, kind in _PAIRS],
            other_family=EventFamily.LEASE,
        )
        trimmed: int = rows[0]["trimmed"]
        return trimmed

    async def trim_worker_events(self) -> int:
        """Delete events of the worker registry past the feed's retention; return how many."""
        rows = await self._store.fetch(
            SQL.take_old_worker_events, retention_ms=self._store.rules.feed_retention_ms, limit=TRIM_LIMIT
        )
        trimmed: int = rows[0]["trimmed"]
        return trimmed

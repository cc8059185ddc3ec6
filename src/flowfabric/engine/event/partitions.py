"""Storage of events: daily partitions created in advance, and deletion of events past the feed's retention."""

import logging
from collections.abc import Mapping
from functools import partial

from flowfabric.db import partitions
from flowfabric.db.database import Connection, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store, error_of
from flowfabric.model.event import FAMILY_KINDS, RARE_FAMILIES, EventFamily

SQL = statements_beside(__file__)

TRIM_LIMIT = 1000
LISTED = 1000
"""How many of the transactions that wrote deleted events are recorded for each family."""
SCANNED = 2_000
"""How many events of a dropped partition are read, while writers wait, to find those transactions."""

_PAIRS = [(family, kind) for family, kinds in FAMILY_KINDS.items() for kind in kinds]
_RECORDING: Mapping[str, object] = {
    "families": [family for family, _ in _PAIRS],
    "kinds": [kind for _, kind in _PAIRS],
    "outcome_family": EventFamily.COMPLETION,
    "other_family": EventFamily.LEASE,
}
"""Which families an event belongs to."""

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
                    connection, schema=schema, before_ms=clock["oldest"], record=partial(_record, connection)
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
            listed=LISTED,
            **_RECORDING,
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


async def _record(connection: Connection, first: int, until: int) -> None:
    await Transaction(connection).fetch(
        SQL.insert_dropped_events,
        first=first,
        until=until,
        scanned=SCANNED,
        listed=LISTED,
        rare_families=RARE_FAMILIES,
        **_RECORDING,
    )

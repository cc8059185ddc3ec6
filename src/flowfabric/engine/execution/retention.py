"""Letting go: ended executions past their retention, spent keys, expired grants, old events."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.grant import MAX_GRANT_TTL_MS

SQL = statements_beside(__file__)

TRIM_LIMIT = 2000
PURGE_LIMIT = 1000
GRANT_MEMORY_MS = 10 * MAX_GRANT_TTL_MS
"""How long an expired grant is kept: its worker is told that it was late, and any other that it has none."""


class Retention:
    """Deletes what nobody needs any more."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def trim(self, limit: int = TRIM_LIMIT) -> int:
        """Delete ended executions past their retention, the oldest first; answers how many."""
        watermark = self._store.retained_watermark
        (row,) = await self._store.fetch(SQL.take_retained, since=watermark.since, limit=limit)
        watermark.reach(row["reached"])
        trimmed: int = row["trimmed"]
        return trimmed

    async def purge_keys(self) -> int:
        """Delete idempotency keys of submissions, suspends and signals past their time to live; answers how many."""
        (row,) = await self._store.fetch(SQL.take_spent_keys, limit=PURGE_LIMIT)
        purged: int = row["purged"]
        return purged

    async def purge_grants(self) -> int:
        """Delete grants that expired long ago; answers how many."""
        rows = await self._store.fetch(SQL.take_spent_grants, limit=PURGE_LIMIT, grant_memory_ms=GRANT_MEMORY_MS)
        purged: int = rows[0]["purged"]
        return purged

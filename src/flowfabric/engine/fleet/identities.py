"""Identities of worker processes: kept while a lease names them, and for as long as most of what they did is kept."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Rules, Store

SQL = statements_beside(__file__)

DAY_MS = 24 * 60 * 60 * 1000
PURGE_LIMIT = 1000


def memory_ms(rules: Rules) -> int:
    """How long an identity is kept after it was last in use: longer than executions and events by default."""
    return max(rules.retention_ms, rules.feed_retention_ms) + DAY_MS


class Identities:
    """Deletes the identities of worker processes that are long gone."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def purge(self) -> int:
        """Delete identities that were last in use so long ago and that no lease names; returns how many."""
        memory = memory_ms(self._store.rules)
        (row,) = await self._store.fetch(SQL.take_old_identities, memory_ms=memory, limit=PURGE_LIMIT)
        purged: int = row["purged"]
        return purged

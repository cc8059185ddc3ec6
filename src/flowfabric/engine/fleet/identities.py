"""Identities of worker processes: old ones are deleted unless a lease refers to them."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Rules, Store

SQL = statements_beside(__file__)

DAY_MS = 24 * 60 * 60 * 1000
PURGE_LIMIT = 1000


def memory_ms(rules: Rules) -> int:
    """How long an unused identity is kept: a day longer than executions and events by default."""
    return max(rules.retention_ms, rules.feed_retention_ms) + DAY_MS


class Identities:
    """Deletes old identities of worker processes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def purge(self) -> int:
        """Delete identities that are older than `memory_ms` and that no lease refers to; return how many."""
        memory = memory_ms(self._store.rules)
        (row,) = await self._store.fetch(SQL.take_old_identities, memory_ms=memory, limit=PURGE_LIMIT)
        purged: int = row["purged"]
        return purged

"""Database sessions whose client went silent in the middle of a statement: they are ended."""

import logging

from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store

SQL = statements_beside(__file__)

ENDED_LIMIT = 100

logger = logging.getLogger(__name__)


class Sessions:
    """Ends sessions that wait for their client beyond any timeout of the server."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def end_silent(self) -> int:
        """End the sessions of this role that have waited too long for their client; return how many.

        Postgres limits how long a statement runs and how long a transaction is idle. Neither limit applies to a client
        that goes silent between the messages of one statement while a pooler keeps its connection open: its rows would
        stay locked.
        """
        silent_ms = self._store.database.limits.silent_ms
        rows = await self._store.fetch(SQL.end_silent_sessions, silent_ms=silent_ms, limit=ENDED_LIMIT)
        for row in rows:
            logger.warning("ended session %d: its client went silent in the middle of a statement", row["pid"])
        return len(rows)

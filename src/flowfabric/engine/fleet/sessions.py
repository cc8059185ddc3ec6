"""Sessions whose client fell silent in the middle of a statement."""

import logging

from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store

SQL = statements_beside(__file__)

ENDED_LIMIT = 100

logger = logging.getLogger(__name__)


class Sessions:
    """Ends sessions that the server waits for without a limit of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def end_silent(self) -> int:
        """End the sessions of this user that have waited too long for their clients; returns how many.

        The server limits how long a statement runs and how long a transaction is idle. A client that falls silent
        between the parts of one statement, with a pooler or a proxy that keeps its connection open, is under neither
        limit, and its rows would stay locked.
        """
        silent_ms = self._store.database.limits.silent_ms
        rows = await self._store.fetch(SQL.end_silent_sessions, silent_ms=silent_ms, limit=ENDED_LIMIT)
        for row in rows:
            logger.warning("session %d is ended: its client fell silent in the middle of a statement", row["pid"])
        return len(rows)

"""Expiry of streams: hidden frames are deleted, and streams whose execution is gone."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.store import Rules, Store

SQL = statements_beside(__file__)

STREAM_LIMIT = 500
FRAME_LIMIT = 20_000
HOUR_MS = 3_600_000


def check_ms(rules: Rules) -> int:
    """How long after its creation a stream is swept, and again as long as it exists.

    Most executions, and their streams with them, are deleted before. A version without streams leaves the streams of
    the executions that it deletes.
    """
    return rules.retention_ms + HOUR_MS


class StreamExpiry:
    """Deletes frames that readers no longer see."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def sweep_batch(self) -> SweepResult:
        """Delete hidden frames of the streams that are due; the result counts streams that have none left."""
        (row,) = await self._store.fetch(
            SQL.take_hidden_frames, limit=STREAM_LIMIT, frames=FRAME_LIMIT, check_ms=check_ms(self._store.rules)
        )
        return SweepResult(row["freed"], is_full=row["due"] >= STREAM_LIMIT or row["deleted"] >= FRAME_LIMIT)

"""Expiry of streams: the frames of expired streams are deleted."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.store import Store

SQL = statements_beside(__file__)

STREAM_LIMIT = 500
FRAME_LIMIT = 20_000


class StreamExpiry:
    """Deletes the frames of streams whose readers no longer see them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def sweep_batch(self) -> SweepResult:
        """Delete frames of expired streams, those that expired first; the result counts streams without frames left."""
        (row,) = await self._store.fetch(SQL.take_expired_frames, limit=STREAM_LIMIT, frames=FRAME_LIMIT)
        is_full = row["emptied"] >= STREAM_LIMIT or row["deleted"] >= FRAME_LIMIT
        return SweepResult(row["emptied"], is_full)

"""Expiry of streams: hidden frames are deleted, and streams whose execution is gone."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.core.sweep import BatchSize, SweepResult
from flowfabric.engine.store import Rules, Store
from flowfabric.model.ids import ExecutionId, format_execution_id, split_execution_id

SQL = statements_beside(__file__)

STREAM_LIMIT = 500
FRAME_LIMIT = 20_000
BYTE_LIMIT = 64 * 2**20
STREAM_PAUSE_SECONDS = 60.0
"""How long the streams of an execution are skipped that could not be swept."""
HOUR_MS = 3_600_000


def check_ms(rules: Rules) -> int:
    """How long after its creation a stream is swept, and again as long as it exists.

    Most executions, and their streams with them, are deleted before. A version without streams leaves the streams of
    the executions that it deletes.
    """
    return rules.retention_ms + HOUR_MS


class StreamExpiry:
    """Deletes frames that readers no longer see."""

    def __init__(self, store: Store, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._size = BatchSize()

    async def sweep_batch(self) -> SweepResult:
        """Delete hidden frames of the streams that are due; the result counts streams that have none left."""
        size, was_reduced = self._size, self._size.is_reduced
        freed, is_full = 0, False

        async def take(*, only: Sequence[str] | None, skipped: Sequence[UUID]) -> int:
            nonlocal freed, is_full
            (row,) = await self._store.fetch(
                SQL.take_hidden_frames,
                only=only,
                skipped=skipped,
                limit=STREAM_LIMIT,
                frames=size.of(FRAME_LIMIT),
                bytes=size.of(BYTE_LIMIT),
                check_ms=check_ms(self._store.rules),
            )
            is_full = is_full or row["has_more"] or row["due"] >= STREAM_LIMIT
            freed += row["freed"]
            # Of each, frames are deleted or the time of its next sweep is moved.
            due: int = row["due"]
            return due

        async def sweep_due(skipped: Sequence[UUID]) -> int:
            return await take(only=None, skipped=skipped)

        async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
            rows = await self._store.fetch(SQL.list_due_streams, skipped=skipped, limit=STREAM_LIMIT)
            return [format_execution_id(row["partition_key"], row["execution_id"]) for row in rows]

        async def sweep_items(execution_ids: Sequence[ExecutionId]) -> int:
            return await take(only=[split_execution_id(each)[1] for each in execution_ids], skipped=())

        swept = await self.quarantine.sweep_in_time(
            sweep_due, list_due, sweep_items, limit=STREAM_LIMIT, size=size, parts=FRAME_LIMIT
        )
        return SweepResult(freed, is_full=is_full or size.is_reduced or (was_reduced and swept > 0))

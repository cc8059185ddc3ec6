"""Retention: ended executions, expired idempotency keys and old grants are deleted."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.store import Store
from flowfabric.model.grant import MAX_GRANT_TTL_MS
from flowfabric.model.ids import ExecutionId, format_execution_id, split_execution_id

SQL = statements_beside(__file__)

TRIM_LIMIT = 2000
FRAME_LIMIT = 20_000
"""The most frames that one trim deletes, except those of a single execution."""
PURGE_LIMIT = 1000
GRANT_MEMORY_MS = 10 * MAX_GRANT_TTL_MS
"""How long an expired grant is kept, so that its worker gets `claim_grant_expired` instead of "no grant"."""


class Retention:
    """Deletes expired rows."""

    def __init__(self, store: Store, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._has_streams = True
        """Whether there were streams at the last trim."""

    async def trim(self, limit: int = TRIM_LIMIT) -> int:
        """Delete ended executions past their retention, the oldest first; return how many."""
        return (await self.trim_batch(limit)).done

    async def trim_batch(self, limit: int = TRIM_LIMIT) -> SweepResult:
        """Do one batch of `trim`: as many executions as have few enough frames together.

        If the first one has too many, some of its frames are deleted instead.
        """
        watermark = self._store.retained_watermark
        since = watermark.since
        is_cut = False

        async def take(*, only: Sequence[UUID | str] | None, skipped: Sequence[UUID]) -> Record:
            (row,) = await self._store.fetch(SQL.take_retained, since=since, only=only, skipped=skipped, limit=limit)
            return row

        async def batch(skipped: Sequence[UUID]) -> int:
            nonlocal is_cut
            only: Sequence[UUID] | None = None
            is_cut = False
            if self._has_streams:
                (frames,) = await self._store.fetch(
                    SQL.read_frames_to_trim, since=since, skipped=skipped, limit=limit, frames=FRAME_LIMIT
                )
                is_cut = frames["is_cut"]
                if is_cut and not frames["fitting_ids"]:
                    await self._trim_frames(frames["next_partition"], frames["next_id"])
                    return 0
                only = frames["fitting_ids"] if is_cut else None
            row = await take(only=only, skipped=skipped)
            self._has_streams = row["has_streams"]
            if not skipped and not is_cut:
                # Not raised above skipped items: it would hide them when their pause is over.
                watermark.move_to(row["reached"])
            trimmed: int = row["trimmed"]
            # Without progress the rest waits for the next pass: the rows are locked.
            is_cut = is_cut and trimmed > 0
            return trimmed

        async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
            rows = await self._store.fetch(SQL.list_retained, since=since, skipped=skipped, limit=limit)
            return [format_execution_id(row["partition_key"], row["execution_id"]) for row in rows]

        async def trim_items(execution_ids: Sequence[ExecutionId]) -> int:
            row = await take(only=[split_execution_id(each)[1] for each in execution_ids], skipped=())
            trimmed: int = row["trimmed"]
            return trimmed

        trimmed = await self.quarantine.sweep_by_halves(batch, list_due, trim_items, limit=limit)
        return SweepResult(trimmed, is_full=is_cut or trimmed >= limit)

    async def _trim_frames(self, partition_key: int, execution_id: UUID) -> None:
        """Delete some frames of an execution that has too many to be deleted at once."""
        (row,) = await self._store.fetch(
            SQL.take_ended_frames, partition_key=partition_key, execution_id=execution_id, frames=FRAME_LIMIT
        )
        if not row["deleted"]:
            # The next batch skips it.
            self.quarantine.failed(format_execution_id(partition_key, execution_id), "it is locked by another session")

    async def purge_keys(self) -> int:
        """Delete expired idempotency keys of submissions, suspends and signals; return how many."""
        (row,) = await self._store.fetch(SQL.take_expired_keys, limit=PURGE_LIMIT)
        purged: int = row["purged"]
        return purged

    async def purge_grants(self) -> int:
        """Delete grants that expired long ago; return how many."""
        rows = await self._store.fetch(SQL.take_old_grants, limit=PURGE_LIMIT, grant_memory_ms=GRANT_MEMORY_MS)
        purged: int = rows[0]["purged"]
        return purged

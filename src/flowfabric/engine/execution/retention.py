"""Retention: ended executions, expired idempotency keys and old grants are deleted."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import MAX_SKIPPED, Quarantine
from flowfabric.engine.core.sweep import BatchSize, SweepResult
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.feed import ScannerFilter
from flowfabric.model.grant import MAX_GRANT_TTL_MS
from flowfabric.model.ids import ExecutionId, format_execution_id, split_execution_id
from flowfabric.model.text import MAX_BATCH, check_range, shown

SQL = statements_beside(__file__)

TRIM_LIMIT = 2000
FRAME_LIMIT = 20_000
"""The most frames that one batch deletes."""
BYTE_LIMIT = 64 * 2**20
"""How many bytes the frames have at most that one batch deletes."""
RECHECK_MS = 15 * 60 * 1000
"""How long a member past its retention is kept at least, if its flow is not settled when retention looks at it."""
WINDOW = 1000
"""How many rows of retained `trim_retention` reads in one statement."""
DAY_MS = 86_400_000
MAX_RETENTION_MS = 2**53
PURGE_LIMIT = 1000
GRANT_MEMORY_MS = 10 * MAX_GRANT_TTL_MS
"""How long an expired grant is kept, so that its worker gets `claim_grant_expired` instead of "no grant"."""


class Retention:
    """Deletes expired rows."""

    def __init__(self, store: Store, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self._size = BatchSize()

    async def trim_batch(self, limit: int = TRIM_LIMIT) -> SweepResult:
        """Delete ended executions past their retention, the oldest first; the result counts them.

        The frames of an execution with more than FRAME_LIMIT or BYTE_LIMIT, and of one that cannot be deleted in time,
        are deleted by the sweep of streams before. A member of a flow that is not settled is looked at again after
        RECHECK_MS, and one of a flow that is, when its retention after the end of the flow is over.
        """
        size, was_reduced = self._size, self._size.is_reduced
        watermark = self._store.retained_watermark
        since = watermark.since
        trimmed, held, has_more = 0, 0, False

        async def take(*, only: Sequence[str] | None, skipped: Sequence[UUID]) -> Record:
            nonlocal trimmed, held, has_more
            (row,) = await self._store.fetch(
                SQL.take_retained,
                since=since,
                until=None,
                only=only,
                skipped=skipped,
                limit=limit,
                frames=FRAME_LIMIT,
                bytes=BYTE_LIMIT,
                retention_ms=self._store.rules.retention_ms,
                recheck_ms=RECHECK_MS,
            )
            trimmed += row["trimmed"]
            held += row["held"]
            has_more = row["has_more"]
            return row

        async def batch(skipped: Sequence[UUID]) -> int:
            row = await take(only=None, skipped=skipped)
            if not skipped and not has_more:
                # Not raised above skipped items: it would hide them when their pause is over.
                watermark.move_to(row["reached"])
            changed: int = row["changed"]
            return changed

        async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
            rows = await self._store.fetch(SQL.list_retained, since=since, skipped=skipped, limit=limit)
            return [format_execution_id(row["partition_key"], row["execution_id"]) for row in rows]

        async def trim_items(execution_ids: Sequence[ExecutionId]) -> int:
            row = await take(only=[split_execution_id(each)[1] for each in execution_ids], skipped=())
            changed: int = row["changed"]
            return changed

        async def hide_frames(execution_id: ExecutionId) -> bool:
            partition, uuid = split_execution_id(execution_id)
            (row,) = await self._store.fetch(SQL.hide_frames, partition_key=partition, execution_id=uuid)
            has_hidden: bool = row["has_hidden"]
            return has_hidden

        changed = await self.quarantine.sweep_in_time(
            batch, list_due, trim_items, limit=limit, size=size, set_aside=hide_frames
        )
        # Without progress the rest waits for the next pass: its frames are deleted before, or its rows are locked.
        is_full = trimmed + held >= limit or (has_more and trimmed > 0)
        return SweepResult(trimmed, is_full=is_full or size.is_reduced or (was_reduced and changed > 0))

    async def trim_retention(
        self, *, retention_ms: int = DAY_MS, batch_size: int = 500, filter: ScannerFilter | None = None
    ) -> int:
        """Delete up to `batch_size` executions that ended at least `retention_ms` ago; return how many were deleted.

        An execution with a retention of its own is deleted after that instead. For a member of a flow the time counts
        from the end of the flow. One that cannot be deleted is logged, and skipped for a while. Call it again while it
        returns `batch_size`.
        """
        check_range(retention_ms, "retention_ms", 0, MAX_RETENTION_MS)
        check_range(batch_size, "batch_size", 1, MAX_BATCH)
        if filter is not None and not isinstance(filter, ScannerFilter):
            raise error("invalid_input", f"filter: expected a ScannerFilter or None, got {shown(filter)}")
        failed_before = self.quarantine.skipped()
        trimmed, since = 0, 0
        while trimmed < batch_size:
            ((until,),) = await self._store.fetch(SQL.read_retained_end, since=since, size=WINDOW)
            if until is None:
                break
            tried: list[UUID] = []
            while trimmed < batch_size:
                wanted = batch_size - trimmed
                found = await self._store.fetch(
                    SQL.list_trimmable,
                    since=since,
                    until=until,
                    skipped=failed_before + tried,
                    retention_ms=retention_ms,
                    namespace=None if filter is None else filter.namespace,
                    tag_key=None if filter is None or filter.instance_tag is None else filter.instance_tag[0],
                    tag_value=None if filter is None or filter.instance_tag is None else filter.instance_tag[1],
                    limit=wanted,
                )
                trimmed += await self._trim_found(found, since, retention_ms)
                # Those that could not be deleted, because they are locked, for example, are not tried again.
                tried += (row["execution_id"] for row in found)
                if len(found) < wanted or len(tried) > MAX_SKIPPED:
                    since = until
                    break
        return trimmed

    async def _trim_found(self, found: Sequence[Record], since: int, retention_ms: int) -> int:
        """Delete executions that `list_trimmable` has found, except those that fail; return how many."""
        if not found:
            return 0

        async def trim_items(execution_ids: Sequence[ExecutionId]) -> int:
            (row,) = await self._store.fetch(
                SQL.take_retained,
                since=since,
                until=found[-1]["retain_until"],
                only=[split_execution_id(each)[1] for each in execution_ids],
                skipped=(),
                # Entries may have many executions that the filter does not match.
                limit=10 * TRIM_LIMIT,
                frames=FRAME_LIMIT,
                bytes=BYTE_LIMIT,
                retention_ms=retention_ms,
                recheck_ms=RECHECK_MS,
            )
            trimmed: int = row["trimmed"]
            return trimmed

        execution_ids = [format_execution_id(row["partition_key"], row["execution_id"]) for row in found]
        return await self.quarantine.process_found(execution_ids, trim_items)

    async def purge_keys(self) -> int:
        """Delete expired idempotency keys, whatever they are of; return how many."""
        (row,) = await self._store.fetch(SQL.take_expired_keys, limit=PURGE_LIMIT)
        purged: int = row["purged"]
        return purged

    async def purge_grants(self) -> int:
        """Delete grants that expired long ago; return how many."""
        rows = await self._store.fetch(SQL.take_old_grants, limit=PURGE_LIMIT, grant_memory_ms=GRANT_MEMORY_MS)
        purged: int = rows[0]["purged"]
        return purged

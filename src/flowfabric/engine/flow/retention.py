"""Retention of flows: a flow without members is deleted with its edges."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.core.watermark import TimerWatermark
from flowfabric.engine.execution.retention import RECHECK_MS
from flowfabric.engine.store import Store
from flowfabric.model.ids import ExecutionId, format_execution_id, split_execution_id

SQL = statements_beside(__file__)

FLOW_LIMIT = 100
MEMBERS_MS = 60_000
"""How long after its retention a flow is looked at: retention has deleted the members by then."""
ROW_LIMIT = 10_000
"""The most edges, and the most groups, that one batch deletes."""


class FlowRetention:
    """Deletes flows whose members are all deleted."""

    def __init__(self, store: Store, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store = store
        self.watermark = TimerWatermark(full_scan_seconds=0, margin_ms=100)

    async def trim_batch(self, limit: int = FLOW_LIMIT, rows: int = ROW_LIMIT) -> SweepResult:
        """Delete flows without members, unless they have changed within the retention; the result counts them.

        A flow with more than ROW_LIMIT edges is deleted in several batches, its row last. One that cannot be deleted is
        skipped for a while.
        """
        deleted, has_more = 0, False
        since = self.watermark.scan_start()

        async def take(*, only: Sequence[str] | None, skipped: Sequence[UUID]) -> Record:
            nonlocal deleted, has_more
            (row,) = await self._store.fetch(
                SQL.take_flows,
                since=since,
                retention_ms=self._store.rules.retention_ms,
                members_ms=MEMBERS_MS,
                recheck_ms=RECHECK_MS,
                only=only,
                skipped=skipped,
                limit=limit,
                rows=rows,
            )
            deleted += row["deleted"]
            has_more |= row["has_more"]
            return row

        async def batch(skipped: Sequence[UUID]) -> int:
            row = await take(only=None, skipped=skipped)
            self.watermark.record_scan(since, row["took_ms"] / 1000)
            # Flows that are skipped now are still due later.
            if not skipped:
                self.watermark.move_to(row["reached"])
            looked_at: int = row["looked_at"]
            return looked_at

        async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
            found = await self._store.fetch(SQL.list_retained_flows, since=since, skipped=skipped, limit=limit)
            return [format_execution_id(row["partition_key"], row["flow_id"]) for row in found]

        async def trim_items(flows: Sequence[ExecutionId]) -> int:
            row = await take(only=[split_execution_id(each)[1] for each in flows], skipped=())
            looked_at: int = row["looked_at"]
            return looked_at

        looked_at = await self.quarantine.sweep_by_halves(batch, list_due, trim_items, limit=limit)
        return SweepResult(deleted, is_full=has_more or looked_at >= limit)

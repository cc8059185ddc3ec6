"""Retention of flows: a flow without members is deleted with its edges."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.core.watermark import TimerWatermark
from flowfabric.engine.execution.retention import RECHECK_MS
from flowfabric.engine.store import Store

SQL = statements_beside(__file__)

FLOW_LIMIT = 100
MEMBERS_MS = 60_000
"""How long after its retention a flow is looked at: retention has deleted the members by then."""
ROW_LIMIT = 10_000
"""The most edges, and the most groups, that one batch deletes."""


class FlowRetention:
    """Deletes flows whose members are all deleted."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.watermark = TimerWatermark(full_scan_seconds=0, margin_ms=100)

    async def trim_batch(self, limit: int = FLOW_LIMIT, rows: int = ROW_LIMIT) -> SweepResult:
        """Delete flows without members, unless they have changed within the retention; the result counts them.

        A flow with more than ROW_LIMIT edges is deleted in several batches, its row last.
        """
        since = self.watermark.scan_start()
        (row,) = await self._store.fetch(
            SQL.take_flows,
            since=since,
            retention_ms=self._store.rules.retention_ms,
            members_ms=MEMBERS_MS,
            recheck_ms=RECHECK_MS,
            limit=limit,
            rows=rows,
        )
        self.watermark.record_scan(since, row["took_ms"] / 1000)
        self.watermark.move_to(row["reached"])
        return SweepResult(row["deleted"], is_full=row["has_more"] or row["looked_at"] >= limit)

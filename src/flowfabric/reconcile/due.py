"""The one statement that finds out which sweeps have work."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.execution.retention import GRANT_MEMORY_MS
from flowfabric.engine.fleet.identities import memory_ms
from flowfabric.engine.flow.cascade import LEFT_OVER_MS
from flowfabric.engine.store import Store
from flowfabric.model.errors import TransportError, TransportKind

SQL = statements_beside(__file__)

SAMPLE = 1000
AHEAD_MS = 2_000
"""How far ahead `read_due` searches for the next timer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """The work that waits for each sweep, and the milliseconds until the next timer if it is within AHEAD_MS."""

    expired_claims: int
    elapsed_delays: int
    expiries: int
    suspension_timeouts: int
    has_retained: bool
    has_expired_keys: bool
    has_old_grants: bool
    has_expired_workers: bool
    has_old_identities: bool
    has_silent_sessions: bool
    has_expired_waitpoints: bool
    has_due_streams: bool
    has_cascade_entries: bool
    has_pending_groups: bool
    has_due_cancellations: bool
    has_due_flows: bool
    has_blocked: bool
    has_quota_keys: bool
    has_expired_slots: bool
    has_expired_guards: bool
    has_due_budgets: bool
    has_budgets: bool
    next_due_in_ms: int | None


async def read_due(store: Store, quarantines: Sequence[Quarantine]) -> Due:
    """Read what is due. The sample grows by the quarantined ids, so that they cannot hide other work."""
    watermarks = (store.due_watermark, store.retained_watermark, store.projection_watermark)
    starts = [watermark.scan_start() for watermark in watermarks]
    due_since, retained_since, projected_since = starts

    def record(seconds: float) -> None:
        for watermark, since in zip(watermarks, starts, strict=True):
            watermark.record_scan(since, seconds)

    began = time.monotonic()
    try:
        (row,) = await store.fetch(
            SQL.read_due,
            due_since=due_since,
            retained_since=retained_since,
            projected_since=projected_since,
            ahead_ms=AHEAD_MS,
            grant_memory_ms=GRANT_MEMORY_MS,
            identity_memory_ms=memory_ms(store.rules),
            left_over_ms=LEFT_OVER_MS,
            silent_ms=store.database.limits.silent_ms,
            sample=SAMPLE + sum(len(each.skipped()) for each in quarantines),
        )
    except TransportError as fault:
        if fault.kind is TransportKind.TIMEOUT and not fault.outcome_unknown:
            # The statement timed out: record how long it took, so that the next scan starts from the watermark.
            record(time.monotonic() - began)
        raise
    record(row["took_ms"] / 1000)
    store.due_watermark.move_to(row["oldest_due_at"])
    oldest_projection_at = row["oldest_projection_at"]
    store.projection_watermark.move_to(row["now"] if oldest_projection_at is None else oldest_projection_at)
    if not row["has_retained"]:
        store.retained_watermark.move_to(row["now"])
    elif retained_since == 0:
        # A full scan may have found entries before the watermark: trim from the start.
        store.retained_watermark.move_to(0)
    return Due(
        expired_claims=row["expired_claims"],
        elapsed_delays=row["elapsed_delays"],
        expiries=row["expiries"],
        suspension_timeouts=row["suspension_timeouts"],
        has_retained=row["has_retained"],
        has_expired_keys=row["has_expired_keys"],
        has_old_grants=row["has_old_grants"],
        has_expired_workers=row["has_expired_workers"],
        has_old_identities=row["has_old_identities"],
        has_silent_sessions=row["has_silent_sessions"],
        has_expired_waitpoints=row["has_expired_waitpoints"],
        has_due_streams=row["has_due_streams"],
        has_cascade_entries=row["oldest_entry_at"] is not None,
        has_pending_groups=row["has_pending_groups"],
        has_due_cancellations=row["has_due_cancellations"],
        has_due_flows=oldest_projection_at is not None,
        has_blocked=row["has_blocked"],
        has_quota_keys=row["has_quota_keys"],
        has_expired_slots=row["has_expired_slots"],
        has_expired_guards=row["has_expired_guards"],
        has_due_budgets=row["has_due_budgets"],
        has_budgets=row["has_budgets"],
        next_due_in_ms=row["next_due_in_ms"],
    )

"""Letting go: ended executions past their retention, spent keys, expired grants, old events."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.store import Store
from flowfabric.model.errors import TransportError, TransportKind
from flowfabric.model.grants import MAX_GRANT_TTL_MS

SQL = statements_beside(__file__)

TRIM_LIMIT = 2000
PURGE_LIMIT = 1000
SAMPLE = 1000
AHEAD_MS = 2_000
"""How far a look goes ahead to see when the next timer runs out."""
GRANT_MEMORY_MS = 10 * MAX_GRANT_TTL_MS
"""How long an expired grant is kept: its worker is told that it was late, and any other that it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """What waits for a sweep, and in how many milliseconds the next timer runs out if that is soon."""

    expired_leases: int
    elapsed_delays: int
    expiries: int
    suspension_timeouts: int
    has_retained: bool
    has_spent_keys: bool
    has_spent_grants: bool
    has_expired_workers: bool
    has_silent_sessions: bool
    has_expired_waitpoints: bool
    next_due_in_ms: int | None


class Retention:
    """What is due, and the deletion of what nobody needs any more."""

    def __init__(self, store: Store, quarantine: Sequence[Quarantine]) -> None:
        self._store = store
        self._quarantine = quarantine

    async def read_due(self) -> Due:
        """What is due of everything the engine does by itself, in one statement."""
        store = self._store
        due_since, retained_since = store.due_watermark.look(), store.retained_watermark.look()
        began = time.monotonic()
        try:
            (row,) = await store.fetch(
                SQL.read_due,
                due_since=due_since,
                retained_since=retained_since,
                ahead_ms=AHEAD_MS,
                grant_memory_ms=GRANT_MEMORY_MS,
                silent_ms=store.database.limits.silent_ms,
                # What is left out stands before the rest and must not hide it.
                sample=SAMPLE + sum(len(each.left_out()) for each in self._quarantine),
            )
        except TransportError as fault:
            if fault.kind is TransportKind.TIMEOUT and not fault.outcome_unknown:
                # The server gave up on it: only a look from the watermark can succeed now.
                self._looked(due_since, retained_since, time.monotonic() - began)
            raise
        self._looked(due_since, retained_since, row["took_ms"] / 1000)
        store.due_watermark.reach(row["oldest_due_at"])
        if not row["has_retained"]:
            store.retained_watermark.reach(row["now"])
        elif retained_since == 0:
            # What a whole look has found may lie before the watermark, where a trim begins.
            store.retained_watermark.reach(0)
        return Due(
            expired_leases=row["expired_leases"],
            elapsed_delays=row["elapsed_delays"],
            expiries=row["attempt_timeouts"] + row["deadlines"],
            suspension_timeouts=row["suspension_timeouts"],
            has_retained=row["has_retained"],
            has_spent_keys=row["has_spent_keys"],
            has_spent_grants=row["has_spent_grants"],
            has_expired_workers=row["has_expired_workers"],
            has_silent_sessions=row["has_silent_sessions"],
            has_expired_waitpoints=row["has_expired_waitpoints"],
            next_due_in_ms=row["next_due_in_ms"],
        )

    def _looked(self, due_since: int, retained_since: int, seconds: float) -> None:
        self._store.due_watermark.looked(due_since, seconds)
        self._store.retained_watermark.looked(retained_since, seconds)

    async def trim(self, limit: int = TRIM_LIMIT) -> int:
        """Delete ended executions past their retention, the oldest first; answers how many."""
        watermark = self._store.retained_watermark
        (row,) = await self._store.fetch(SQL.take_retained, since=watermark.since, limit=limit)
        watermark.reach(row["reached"])
        trimmed: int = row["trimmed"]
        return trimmed

    async def purge_keys(self) -> int:
        """Delete idempotency keys of submissions, suspends and signals past their time to live; answers how many."""
        purged = 0
        for statement in (SQL.take_spent_keys, SQL.take_spent_suspend_keys, SQL.take_spent_signal_keys):
            (row,) = await self._store.fetch(statement, limit=PURGE_LIMIT)
            purged += row["purged"]
        return purged

    async def purge_grants(self) -> int:
        """Delete grants that expired long ago; answers how many."""
        rows = await self._store.fetch(SQL.take_spent_grants, limit=PURGE_LIMIT, grant_memory_ms=GRANT_MEMORY_MS)
        purged: int = rows[0]["purged"]
        return purged

"""Count the rows and index entries that statements read while real operations run on the plans they really use."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest

from flowfabric.db.database import Database, Transaction
from flowfabric.db.statements import Statement

TABLES = (
    "execution",
    "execution_input",
    "execution_result",
    "ready",
    "timer",
    "claim",
    "retained",
    "listed",
    "attempt",
    "claim_grant",
    "execution_tag",
    "idempotency_key",
    "suspension",
    "waitpoint",
    "signal",
    "stream",
    "stream_frame",
    "stream_summary",
    "flow",
    "edge",
    "edge_group",
    "cascade_entry",
    "cancel_backlog_member",
    "pending_cancel_group",
    "flow_tag",
    "quota_key",
    "slot_return",
    "quota_admission",
    "budget_limit",
    "budget_usage",
)
"""The tables that grow with the load."""

# The rows returned by scans of each table, plus the entries returned by scans of its indexes, and the number of
# sequential scans, in this transaction so far. A row found by its ctid is not counted.
_TOUCHED = """
select c.relname::text, sum(pg_stat_get_xact_tuples_returned(r.oid))::int, pg_stat_get_xact_numscans(c.oid)::int
  from unnest($1::text[]) as t(name)
  join pg_class c on c.oid = t.name::regclass
 cross join lateral (select c.oid union all select i.indexrelid from pg_index i where i.indrelid = c.oid) r(oid)
 group by c.oid, c.relname
"""

VACUUM = "vacuum (index_cleanup on)"
"""Removes the index entries of deleted rows. Without it scans count them until a later scan has marked them as dead,
which an open transaction in any database of the server prevents."""


@dataclass
class Touched:
    """The rows and index entries that each call of each statement has touched, by table."""

    calls: dict[str, list[Counter[str]]] = field(default_factory=dict)
    scanned: dict[str, set[str]] = field(default_factory=dict)
    """The tables that each statement has scanned sequentially; `clear` keeps them."""

    def __contains__(self, name: str) -> bool:
        """Whether the statement was called."""
        return name in self.calls

    def __getitem__(self, name: str) -> int:
        """The sum of `by_table`; a sequential scan fails the test."""
        self._assert_no_sequential_scan(name)
        return self.by_table(name).total()

    def of(self, name: str, table: str) -> int:
        """The most that one call touched in one table; a sequential scan fails the test."""
        self._assert_no_sequential_scan(name)
        return self.by_table(name)[table]

    def by_table(self, name: str) -> Counter[str]:
        """The most that one call touched in each table."""
        most: Counter[str] = Counter()
        for call in self.calls[name]:
            most |= call
        return most

    def sum(self, name: str) -> int:
        """What all calls touched in all tables together."""
        return sum(call.total() for call in self.calls.get(name, ()))

    def above(self, limit: int) -> dict[str, int]:
        """The statements that touched more than the limit in one call, with the most that one call touched."""
        most = {name: max(call.total() for call in calls) for name, calls in self.calls.items()}
        return {name: count for name, count in most.items() if count > limit}

    def readers_of(self, table: str) -> set[str]:
        """The statements that touched a table."""
        return {name for name in self.calls if self.by_table(name)[table]}

    def clear(self) -> None:
        """Forget the calls so far."""
        self.calls.clear()

    async def count(self, connection: asyncpg.Connection, statement: Statement, arguments: list[object]) -> Any:
        """Run a statement and ask the server what it touched."""
        before = {row[0]: row for row in await connection.fetch(_TOUCHED, TABLES)}
        found = await connection.fetch(statement.sql, *arguments)
        call: Counter[str] = Counter()
        scanned = self.scanned.setdefault(statement.name, set())
        for table, rows, scans in await connection.fetch(_TOUCHED, TABLES):
            call[table] = rows - before[table][1]
            if scans > before[table][2]:
                scanned.add(table)
        self.calls.setdefault(statement.name, []).append(call)
        return found

    def _assert_no_sequential_scan(self, name: str) -> None:
        assert not self.scanned[name], f"{name} scanned {sorted(self.scanned[name])} sequentially"


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    """Count what statements touch from now on; each runs in a transaction of its own unless it is in one already."""
    seen = Touched()

    async def fetch(database: Database, statement: Statement, values: Mapping[str, object], **_: object) -> Any:
        async with database.acquire() as connection, connection.transaction():
            return await seen.count(connection, statement, statement.arguments(values))

    async def fetch_within(transaction: Transaction, statement: Statement, **values: object) -> Any:
        return await seen.count(transaction.connection, statement, statement.arguments(values))

    monkeypatch.setattr(Database, "fetch", fetch)
    monkeypatch.setattr(Transaction, "fetch", fetch_within)
    return seen

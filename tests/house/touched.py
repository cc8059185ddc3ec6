"""Counts the rows and index entries that statements read, while real operations run on the plans they really use."""

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
)
"""The tables that grow with the work."""

# Rows that scans of a table gave, entries that scans of its indexes gave, and how often it was scanned whole, in this
# transaction so far. A row that is found by its ctid counts as none.
_TOUCHED = """
select c.relname::text, sum(pg_stat_get_xact_tuples_returned(r.oid))::int, pg_stat_get_xact_numscans(c.oid)::int
  from unnest($1::text[]) as t(name)
  join pg_class c on c.oid = t.name::regclass
 cross join lateral (select c.oid union all select i.indexrelid from pg_index i where i.indrelid = c.oid) r(oid)
 group by c.oid, c.relname
"""

VACUUM = "vacuum (index_cleanup on)"
"""Removes the index entries of rows that have left an index: a scan counts them until a later one has marked them dead,
which a transaction of any database of the server prevents while it is open."""


@dataclass
class Touched:
    """What each statement has touched of each table, the most of all its calls since the last `clear`."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    scans: dict[str, Counter[str]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        """The rows and entries of all tables."""
        assert not self.whole(name), f"{name} scanned a table whole"
        return self.rows[name].total()

    def of(self, name: str, table: str) -> int:
        """The rows and entries of one table."""
        assert not self.whole(name), f"{name} scanned a table whole"
        return self.rows[name][table]

    def whole(self, name: str) -> set[str]:
        """The tables that were scanned whole."""
        return {table for table, scans in self.scans[name].items() if scans}

    def clear(self) -> None:
        """Begin anew."""
        self.rows.clear()

    async def count(self, connection: asyncpg.Connection, statement: Statement, arguments: list[object]) -> Any:
        """Run a statement and ask the server what it did."""
        before = {row[0]: row for row in await connection.fetch(_TOUCHED, TABLES)}
        found = await connection.fetch(statement.sql, *arguments)
        seen = self.rows.setdefault(statement.name, Counter())
        scanned = self.scans.setdefault(statement.name, Counter())
        for table, rows, scans in await connection.fetch(_TOUCHED, TABLES):
            seen[table] = max(seen[table], rows - before[table][1])
            scanned[table] += scans - before[table][2]
        return found


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    """Count while operations run, each statement in a transaction of its own."""
    seen = Touched()

    async def fetch(database: Database, statement: Statement, values: Mapping[str, object], **_: object) -> Any:
        async with database.acquire() as connection, connection.transaction():
            return await seen.count(connection, statement, statement.arguments(values))

    async def fetch_within(transaction: Transaction, statement: Statement, **values: object) -> Any:
        return await seen.count(transaction.connection, statement, statement.arguments(values))

    monkeypatch.setattr(Database, "fetch", fetch)
    monkeypatch.setattr(Transaction, "fetch", fetch_within)
    return seen

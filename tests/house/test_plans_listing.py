"""A page of each state touches few rows, however many executions of other states stand before them."""

from collections.abc import Mapping
from typing import Any

import asyncpg
import pytest

from creates import new
from engine.reach import DAY, one_of
from fixtures import Clock, Given
from flowfabric.db.database import Database
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.read.listing import FIRST_SCAN
from flowfabric.model.states import PublicState

BACKLOG = 8_000

TABLES = "{execution,ready,timer,listed,claim,retained,suspension}"

# Rows and entries that scans of these tables gave, in this transaction so far.
_TOUCHED = f"""
select coalesce(sum(pg_stat_get_xact_tuples_returned(r.oid)), 0)::int
  from (select unnest('{TABLES}'::regclass[])::oid
        union all
        select i.indexrelid from pg_index i where i.indrelid = any('{TABLES}'::regclass[])) r(oid)
"""


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The rows each statement of a page has touched, all its calls together."""
    seen: dict[str, int] = {}

    async def fetch(database: Database, statement: Statement, values: Mapping[str, object], **_: object) -> Any:
        async with database.acquire() as connection, connection.transaction():
            before = await connection.fetchval(_TOUCHED)
            found = await connection.fetch(statement.sql, *statement.arguments(values))
            rows = await connection.fetchval(_TOUCHED) - before
            seen[statement.name] = seen.get(statement.name, 0) + rows
            return found

    monkeypatch.setattr(Database, "fetch", fetch)
    return seen


async def backlog(engine: Engine, **overrides: Any) -> None:
    """Many executions that are newer than all before, not too many of one millisecond."""
    for _ in range(BACKLOG // 200):
        await engine.create_many([new(**overrides) for _ in range(200)])


@pytest.mark.parametrize("upkeep", ["vacuum", "vacuum analyze"])
@pytest.mark.parametrize("state", PublicState)
async def test_a_page_of_a_state_is_found_behind_many_executions_of_another(
    engine: Engine,
    given: Given,
    clock: Clock,
    connection: asyncpg.Connection,
    touched: dict[str, int],
    state: PublicState,
    upkeep: str,
) -> None:
    wanted = await one_of(state, given, clock, connection)
    tomorrow = await clock.now() + DAY
    # What is not looked for has timers too, so that those of delays are not all there are.
    later = "delay_until" if state is PublicState.WAITING else "execution_deadline_at"
    await backlog(engine, **{later: tomorrow})
    await connection.execute(upkeep)
    for namespace in (None, "tests"):
        touched.clear()
        page = await engine.list_executions(public_state=state, namespace=namespace)
        assert {line.execution_id for line in page.executions} == wanted
        assert page.next_cursor is None
        # Where there has been a walk along the order of creation, it has given up; a narrow table led to all there is.
        assert touched.get("list_newest", 0) <= 8 * FIRST_SCAN
        assert touched["list_candidates"] <= 40


async def test_ordinary_work_is_in_no_list_and_has_no_timer(engine: Engine, connection: asyncpg.Connection) -> None:
    await engine.create_many([new() for _ in range(500)])
    claimed = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=400)
    await engine.renew_many([run.handle for run in claimed[:100]])
    await engine.complete_many([(run.handle, b"1") for run in claimed[:300]])
    for table in ("listed", "timer"):
        assert await connection.fetchval("select pg_relation_size($1::text::regclass)", table) == 0


@pytest.mark.parametrize("order", ["newest", "oldest"])
async def test_a_page_of_many_namespaces_reads_of_those_that_come_first(
    engine: Engine, touched: dict[str, int], order: str
) -> None:
    spaces = 600
    for nth in range(8):
        for first in range(0, spaces, 50):
            await engine.create_many([new(namespace=f"n{(first + at + nth) % spaces}") for at in range(50)])
    found: list[str] = []
    cursor = None
    for _ in range(3):
        touched.clear()
        page = await engine.list_executions(order=order, cursor=cursor, limit=20)
        assert len(page.executions) == 20
        assert touched["list_pairs"] <= 3 * spaces
        assert touched[f"list_{order}"] <= 4 * FIRST_SCAN
        found += [line.execution_id for line in page.executions]
        cursor = page.next_cursor
    whole = await engine.list_executions(order=order, limit=60)
    assert found == [line.execution_id for line in whole.executions]


async def test_a_span_of_completion_that_holds_nothing_is_not_looked_for(
    engine: Engine, touched: dict[str, int]
) -> None:
    for before in (5, 4, -5):
        page = await engine.list_executions(completed_after=5, completed_before=before)
        assert (page.executions, page.next_cursor, touched) == ([], None, {})

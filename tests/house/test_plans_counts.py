"""A count reads no row of an ended or waiting execution, and of the other tables only what was requested."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from creates import new
from databases import Databases
from engine.waits import suspend_args
from fixtures import Clock
from flowfabric.db.database import Transaction
from flowfabric.db.session import connect
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read.counting import SQL
from flowfabric.model.flow import FlowEdge, FlowNode
from flowfabric.model.states import PublicState
from flowfabric.settings import Settings
from house.filled import STATISTICS
from house.touched import VACUUM, Touched, touched
from sessions import session

__all__ = ["touched"]

ENDED, WAITING, DELAYED, LEASED, SUSPENDED, RESUMED = 1_500, 3_000, 200, 200, 100, 100
BATCH = 500
HOUR = 3_600_000
STATEMENT = "count_executions"


async def run(engine: Engine, count: int, *, lease_ttl_ms: int = HOUR) -> list[Any]:
    """Create executions in the lane `past` and claim them, a hundred at a time."""
    runs: list[Any] = []
    for _ in range(count // 100):
        await engine.create_many([new(lane_id="past") for _ in range(100)])
        runs += await engine.claim_many(
            lanes=("past",), worker_id="w", worker_instance_id="w-1", limit=100, lease_ttl_ms=lease_ttl_ms
        )
    return runs


async def fill(engine: Engine, clock: Clock) -> None:
    """Create executions in every state that a count reads from a table of its own."""
    for _ in range(ENDED // BATCH):
        ended = await run(engine, BATCH, lease_ttl_ms=1000)
        await engine.complete_many([(each.handle, b"1") for each in ended[1:]])
        await engine.fail(ended[0].handle, reason="no", classification="permanent")
    await clock.advance(seconds=2)
    while await parts_of(engine).lease_expiry.sweep():
        pass
    waiting = await run(engine, SUSPENDED + RESUMED)
    await asyncio.gather(*(engine.suspend(each.handle, suspend_args()) for each in waiting))
    # The row of a closed suspension is kept as long as its execution.
    for each in waiting[SUSPENDED:]:
        await engine.resume_execution(execution_id=each.execution_id)
        await engine.cancel_execution(execution_id=each.execution_id, reason="no")
    await run(engine, LEASED)
    later = await clock.now() + HOUR
    await engine.create_many([new(delay_until=later) for _ in range(DELAYED)])
    for nth in range(3):
        # Most timers are not those of a delay.
        await engine.create_many([new(lane_id=f"lane{nth}", execution_deadline_at=later) for _ in range(WAITING // 3)])


@pytest.fixture(scope="module")
async def planned_early(databases: Databases) -> AsyncIterator[tuple[Engine, asyncpg.Connection]]:
    """An engine that planned its count on empty tables, which have been filled since, and a session of the test."""
    async with databases.new() as url:
        connection = await session(url, "test filled")
        settings = Settings(database_url=url, database_pool_size=1, listen=False)
        async with Engine.connect(settings=settings) as engine:
            assert await engine.count_executions() == []
            await fill(engine, Clock(connection))
            await connection.execute(VACUUM)
            yield engine, connection
        await connection.close()


@pytest.fixture(scope="module", params=STATISTICS)
async def full(request: pytest.FixtureRequest, planned_early: tuple[Engine, asyncpg.Connection]) -> Engine:
    """That engine before and after the tables are analyzed; pytest runs the tests of the first parameter first."""
    engine, connection = planned_early
    if request.param == "statistics":
        await connection.execute("analyze")
    return engine


async def test_a_count_looks_up_only_delayed_suspended_and_claimed_executions(full: Engine, touched: Touched) -> None:
    found = {one.public_state: one.count for one in await full.count_executions(by="state")}
    assert found == {
        "active": LEASED,
        "cancelled": RESUMED,
        "completed": ENDED - ENDED // BATCH,
        "delayed": DELAYED,
        "failed": ENDED // BATCH,
        "suspended": SUSPENDED,
        "waiting": WAITING,
    }
    read = touched.by_table(STATEMENT)
    # The claims of suspended and resumed executions have not expired yet.
    claimed = LEASED + SUSPENDED + RESUMED
    assert read["execution"] <= claimed + DELAYED + SUSPENDED
    assert read["ready"] <= WAITING + 100
    assert read["timer"] <= DELAYED
    assert read["suspension"] <= SUSPENDED
    assert read["retained"] <= ENDED // BATCH * 3 + RESUMED
    assert read["claim"] <= claimed // 100
    assert touched.scanned[STATEMENT] <= {"retained", "claim"}


INDEXES = {"timer_due", "suspension_list", "listed_state", "execution_pkey", "ready_queue", "retained_mixed"}


@pytest.mark.parametrize("upkeep", ["vacuum", "vacuum analyze"])
async def test_a_count_planned_on_empty_tables_scans_only_indexes_that_contain_just_what_it_needs(
    url: str, upkeep: str
) -> None:
    tables = "timer|suspension|listed|execution|ready|retained|claim"
    values: dict[str, object] = {
        **dict.fromkeys(SQL.count_executions.parameters),
        "states": list(PublicState),
        "by_lane": True,
    }
    connection = await connect(url, schema="flowfabric")
    try:
        await connection.execute(upkeep)
        statement = f"explain {SQL.count_executions.sql}"
        plan = "\n".join(row[0] for row in await connection.fetch(statement, *SQL.count_executions.arguments(values)))
    finally:
        await connection.close()
    scanned = re.findall(rf"Scan using (\w+) on (?:{tables})\b(?: \w+)?  .*\n(?:.*Index Cond: (.*))?", plan)
    assert {index for index, _ in scanned if index != "ready_route"} == INDEXES
    assert {condition.count(" = ") for index, condition in scanned if index == "ready_route"} <= {2}
    assert set(re.findall(rf"Seq Scan on ({tables})\b", plan)) == {"retained", "claim"}


async def test_a_count_of_some_states_reads_only_the_tables_of_those_states(full: Engine, touched: Touched) -> None:
    for state, tables in (
        ("waiting", {"ready"}),
        ("completed", {"retained"}),
        (["completed", "failed", "expired"], {"retained"}),
        ("delayed", {"timer", "execution"}),
        ("suspended", {"suspension", "execution"}),
        ("active", {"claim", "execution"}),
        ("resumable", set()),
        (["rate_limited", "waiting_children"], set()),
    ):
        touched.clear()
        await full.count_executions(public_state=state)
        assert set(touched.by_table(STATEMENT)) == tables, state


async def test_a_count_of_waiting_executions_of_a_lane_reads_no_entry_of_another_lane(
    full: Engine, touched: Touched
) -> None:
    for filters in ({"lane_id": "lane1"}, {"lane_id": "lane1", "namespace": "tests", "execution_kind": "job"}):
        touched.clear()
        (found,) = await full.count_executions(public_state="waiting", **filters)
        assert found.count == WAITING // 3
        assert touched.by_table(STATEMENT).total() <= WAITING // 3 + 50
    touched.clear()
    assert await full.count_executions(lane_id="unknown", public_state="waiting") == []
    assert touched[STATEMENT] == 0


_INDEX_SCANS = """
select sum(pg_stat_get_xact_numscans(i.indexrelid))::int
  from pg_index i where i.indrelid in ('queue'::regclass, 'ready'::regclass)
"""


async def test_the_queue_of_a_blocked_execution_is_not_looked_up_for_each(engine: Engine) -> None:
    common: dict[str, Any] = {"lane_id": "default", "execution_kind": "job", "creator_identity": "test"}
    await engine.submit_flow(
        flow_kind="dag",
        namespace="tests",
        nodes=[FlowNode(name=str(nth), input_payload=b"", **common) for nth in range(301)],
        edges=[FlowEdge(upstream="0", downstream=str(nth)) for nth in range(1, 301)],
    )

    async def count(transaction: Transaction) -> tuple[int, int]:
        before = await transaction.connection.fetchval(_INDEX_SCANS)
        rows = await transaction.fetch(
            SQL.count_executions,
            namespaces=None,
            lanes=None,
            kinds=None,
            states=list(PublicState),
            by_lane=False,
            by_state=True,
            by_namespace=False,
            by_kind=False,
        )
        scans = await transaction.connection.fetchval(_INDEX_SCANS) - before
        return {row["public_state"]: row["executions"] for row in rows}["waiting_children"], scans

    blocked, scans = await parts_of(engine).store.transact(count)
    assert blocked == 300
    assert scans <= 20

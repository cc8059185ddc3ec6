"""A count reads no row of an execution that has ended or waits, and of the other tables only what it asks for."""

import re
from typing import Any

import asyncpg
import pytest

from creates import new
from engine.waits import args
from fixtures import Clock, Engines
from flowfabric.db.session import connect
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read.counting import SQL
from flowfabric.model.states import PublicState
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

ENDED, WAITING, DELAYED, LEASED, SUSPENDED, RESUMED = 4_000, 6_000, 300, 200, 100, 300
HOUR = 3_600_000
STATEMENT = "count_executions"


async def run(engine: Engine, count: int, *, lease_ttl_ms: int = 1000) -> list[Any]:
    """New executions of one lane, claimed a hundred at a time."""
    runs: list[Any] = []
    for _ in range(count // 100):
        await engine.create_many([new(lane_id="past") for _ in range(100)])
        runs += await engine.claim_many(
            lanes=("past",), worker_id="w", worker_instance_id="w-1", limit=100, lease_ttl_ms=lease_ttl_ms
        )
    return runs


@pytest.fixture(params=["no statistics", "statistics"])
async def full(
    request: pytest.FixtureRequest, engines: Engines, clock: Clock, connection: asyncpg.Connection
) -> Engine:
    """An engine that has planned its count on empty tables, which hold much now."""
    engine: Engine = await engines(database_pool_size=1, listen=False)
    assert await engine.count_executions() == []
    for _ in range(ENDED // 500):
        ended = await run(engine, 500)
        await engine.complete_many([(each.handle, b"1") for each in ended[1:]])
        await engine.fail(ended[0].handle, reason="no", classification="permanent")
    await clock.advance(seconds=2)
    while await parts_of(engine).lease_expiry.sweep():
        pass
    for waiting in await run(engine, SUSPENDED, lease_ttl_ms=HOUR):
        await engine.suspend(waiting.handle, args())
    # Closed waits stay for as long as their executions.
    for waiting in await run(engine, RESUMED, lease_ttl_ms=HOUR):
        await engine.suspend(waiting.handle, args())
        await engine.resume_execution(execution_id=waiting.execution_id)
        await engine.cancel_execution(execution_id=waiting.execution_id, reason="no")
    await run(engine, LEASED, lease_ttl_ms=HOUR)
    later = await clock.now() + HOUR
    await engine.create_many([new(delay_until=later) for _ in range(DELAYED)])
    for nth in range(WAITING // 1000):
        # Their timers are none of a delay.
        await engine.create_many([new(lane_id=f"lane{nth % 3}", execution_deadline_at=later) for _ in range(1000)])
    await connection.execute(VACUUM)
    if request.param == "statistics":
        await connection.execute("analyze")
    return engine


async def test_a_count_looks_up_only_what_is_delayed_suspended_or_claimed(full: Engine, touched: Touched) -> None:
    found = {one.public_state: one.count for one in await full.count_executions(by="state")}
    assert found == {
        "active": LEASED,
        "cancelled": RESUMED,
        "completed": ENDED - 8,
        "delayed": DELAYED,
        "failed": 8,
        "suspended": SUSPENDED,
        "waiting": WAITING,
    }
    read = touched.rows[STATEMENT]
    # The claims of what was suspended and resumed have not expired yet.
    claimed = LEASED + SUSPENDED + RESUMED
    assert read["execution"] <= claimed + DELAYED + SUSPENDED
    assert read["ready"] <= WAITING + 100
    assert read["timer"] <= DELAYED
    assert read["suspension"] <= SUSPENDED
    assert read["retained"] <= ENDED // 500 * 3 + RESUMED
    assert read["claim"] <= claimed // 100
    assert touched.whole(STATEMENT) <= {"retained", "claim"}


INDEXES = {"timer_due", "suspension_list", "listed_state", "execution_pkey", "ready_queue", "retained_mixed"}


@pytest.mark.parametrize("upkeep", ["vacuum", "vacuum analyze"])
async def test_a_count_planned_on_empty_tables_walks_no_index_that_holds_more_than_it_asks_for(
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
    walked = re.findall(rf"Scan using (\w+) on (?:{tables})\b(?: \w+)?  .*\n(?:.*Index Cond: (.*))?", plan)
    assert {index for index, _ in walked if index != "ready_route"} == INDEXES
    assert {condition.count(" = ") for index, condition in walked if index == "ready_route"} <= {2}
    assert set(re.findall(rf"Seq Scan on ({tables})\b", plan)) == {"retained", "claim"}


async def test_a_count_of_some_states_reads_nothing_of_the_others(full: Engine, touched: Touched) -> None:
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
        assert {table for table, rows in touched.rows[STATEMENT].items() if rows} == tables, state


async def test_a_count_of_a_lane_reads_no_entry_of_another_that_waits(full: Engine, touched: Touched) -> None:
    for filters in ({"lane_id": "lane1"}, {"lane_id": "lane1", "namespace": "tests", "execution_kind": "job"}):
        touched.clear()
        (found,) = await full.count_executions(public_state="waiting", **filters)
        assert found.count == WAITING // 3
        assert touched.rows[STATEMENT].total() <= WAITING // 3 + 50
    touched.clear()
    assert await full.count_executions(lane_id="unknown", public_state="waiting") == []
    assert touched[STATEMENT] == 0

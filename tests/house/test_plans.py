"""Hot statements touch few rows, whatever the tables hold and whatever the planner knows of them.

The rows are counted by the server while real operations run, on the plans they really use.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from creates import new
from flowfabric.db.database import Database, Transaction
from flowfabric.db.session import session_settings
from flowfabric.db.statements import Statement, Statements
from flowfabric.engine.core import consequence
from flowfabric.engine.core.watermark import QueueWatermarks
from flowfabric.engine.engine import Engine
from flowfabric.engine.wait import deliver, resume
from flowfabric.model.conditions import Single
from flowfabric.model.errors import EngineError
from flowfabric.model.grants import Granted
from flowfabric.model.ids import SuspensionId, WaitpointId
from flowfabric.model.outcomes import Created
from flowfabric.model.suspension import Fresh, SuspendArgs, SuspensionReason

ENGINE = Path(__file__).parents[2] / "src" / "flowfabric" / "engine"

BACKLOG = 10_000
DELAYED = 5_000
LEASED = 2_000
ENDED = 1_000
ROUTED = {"routing_requirements": {"required_capabilities": ["gpu"]}}
HOUR = 3_600_000
DAY = 86_400_000
VACUUM = "vacuum (index_cleanup on)"
"""Removes the index entries of rows that have left an index: a scan counts them until a later one has marked them dead,
which a transaction of any database of the server prevents while it is open."""

# Rows a table's scans gave, and entries its indexes' scans gave, in this transaction so far.
_TOUCHED = """
select coalesce(sum(pg_stat_get_xact_tuples_returned(r.oid)), 0)::int
  from (select c.oid from pg_class c where c.oid = $1::text::regclass
        union all select i.indexrelid from pg_index i where i.indrelid = $1::text::regclass) r(oid)
"""
_SCANNED = "select pg_stat_get_xact_numscans($1::text::regclass)::int"


@dataclass
class Touched:
    """Rows of the execution table that each statement has touched, and how often it was scanned whole."""

    rows: dict[str, int] = field(default_factory=dict)
    scans: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        assert self.scans[name] == 0, f"{name} scanned the table of executions"
        return self.rows[name]


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    """Count while operations run: each statement in a transaction of its own asks the server what it did."""
    seen = Touched()

    async def count(connection: Any, statement: Statement, arguments: list[object]) -> Any:
        before = await connection.fetchval(_TOUCHED, "execution"), await connection.fetchval(_SCANNED, "execution")
        found = await connection.fetch(statement.sql, *arguments)
        after = await connection.fetchval(_TOUCHED, "execution"), await connection.fetchval(_SCANNED, "execution")
        seen.rows[statement.name] = max(seen.rows.get(statement.name, 0), after[0] - before[0])
        seen.scans[statement.name] = seen.scans.get(statement.name, 0) + after[1] - before[1]
        return found

    async def fetch(database: Database, statement: Statement, values: Mapping[str, object], **_: object) -> Any:
        async with database.acquire() as connection, connection.transaction():
            return await count(connection, statement, statement.arguments(values))

    async def fetch_within(transaction: Transaction, statement: Statement, **values: object) -> Any:
        return await count(transaction.connection, statement, statement.arguments(values))

    monkeypatch.setattr(Database, "fetch", fetch)
    monkeypatch.setattr(Transaction, "fetch", fetch_within)
    return seen


async def claim(engine: Engine, limit: int, **overrides: Any) -> list[Any]:
    return await engine.claim_many(
        **{"lanes": ("default",), "worker_id": "w", "worker_instance_id": "w-1", "limit": limit, **overrides}
    )


@pytest.fixture(params=["no statistics", "statistics"])
async def full(
    request: pytest.FixtureRequest,
    lasting_watermarks: None,
    engine: Engine,
    clock: Any,
    connection: asyncpg.Connection,
) -> Engine:
    """An engine on tables that hold ended, leased, delayed and waiting executions, of one lane and of others."""
    for _ in range(ENDED // 1000):
        await engine.create_many([new() for _ in range(1000)])
        await engine.complete_many([(run.handle, b"1") for run in await claim(engine, 1000)])
    for _ in range(LEASED // 1000):
        await engine.create_many([new(execution_deadline_at=await clock.now() + DAY) for _ in range(1000)])
        await claim(engine, 1000, lease_ttl_ms=4 * HOUR)
    later = await clock.now() + HOUR
    for nth in range(DELAYED // 1000):
        await engine.create_many([new(delay_until=later + (nth * 1000 + n) * 1000) for n in range(1000)])
    for nth in range(BACKLOG // 1000):
        await engine.create_many([new(lane_id=f"lane{nth % 4}" if nth % 2 else "default") for _ in range(1000)])
    await connection.execute(VACUUM)
    if request.param == "statistics":
        await connection.execute("analyze")
    return engine


async def test_operations_on_few_executions_touch_few_rows(full: Engine, touched: Touched) -> None:
    await full.create_many([new() for _ in range(10)])
    assert touched["insert_alike"] <= 20
    await full.create_many([new(idempotency_key=f"key{n}") for n in range(10)])
    assert touched["insert_executions"] <= 20
    runs = await claim(full, 10)
    assert touched["claim_best"] <= 40
    assert len(await claim(full, 10, lanes=("default", "lane0", "lane1", "lane2", "lane3"))) == 10
    # The head of each lane, and of each as many as its share may come to, are read before the best of all are taken.
    assert touched["claim_best"] <= 5 * (1 + 5) + 40
    await full.renew_many([run.handle for run in runs])
    assert touched["renew_leases"] <= 40
    await full.progress(runs[0].handle, percent=50)
    assert touched["set_progress"] <= 10
    await full.complete_many([(run.handle, b"1") for run in runs[:5]])
    assert touched["complete_held"] <= 40
    await full.fail(runs[5].handle, reason="no luck")
    await full.cancel_execution(execution_id=runs[6].execution_id, reason="not wanted")
    assert touched["release_executions"] <= 40
    await full.read_execution_info(runs[0].execution_id)
    assert touched["read_info"] <= 5


async def test_a_claim_over_many_queues_reads_about_what_it_takes(
    full: Engine, touched: Touched, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The marks lead past what the claims before have taken, however slow the machine is.
    monkeypatch.setattr(QueueWatermarks, "LIFE_SECONDS", 600.0)
    for lane_id, are_marked in (("marked", True), ("unmarked", False)):
        for nth in range(0, 4000, 1000):
            kinds = (f"kind{n % 200}" for n in range(nth, nth + 1000))
            await full.create_many([new(lane_id=lane_id, execution_kind=kind) for kind in kinds])

        async def begin(*, are_marked: bool = are_marked) -> None:
            """Count anew. Without marks the queues are walked from their heads, where a vacuum has tidied up."""
            touched.rows.clear()
            if not are_marked:
                full.wakeups.watermarks.clear()
                await connection.execute(VACUUM)

        for limit in (10, 100, 500):
            await begin()
            assert len(await claim(full, limit, lanes=(lane_id,))) == limit
            # The head of each queue, a sample of the best, and what is taken: read, locked, and found again.
            assert touched["claim_best"] <= 200 + 3 * limit + 200 + 4 * limit
        await begin()
        named = [f"kind{n}" for n in range(20)]
        assert len(await claim(full, 100, lanes=(lane_id,), kinds=named)) == 100
        assert touched["claim_best"] <= 20 + 3 * 100 + 20 + 4 * 100
        await begin()
        assert len(await claim(full, 10, lanes=(lane_id,), kinds=named[:1])) == 10
        assert touched["claim_best"] <= 40
        await begin()
        planner: dict[str, Any] = {"lane_id": lane_id, "worker_id": "w", "worker_instance_id": "w-1"}
        assert isinstance(await full.claim_for_worker(**planner), Granted)
        assert touched["lock_best"] <= 200 + 10


async def test_an_explanation_counts_what_is_ahead_no_further_than_it_tells(full: Engine, touched: Touched) -> None:
    await full.create_many([new(policy=ROUTED) for _ in range(1000)])
    (first,) = await full.create_many([new(priority=9)])
    (run,) = await claim(full, 1)
    (second,) = await full.create_many([new(priority=9)])
    *_, last = await full.create_many([new() for _ in range(1000)])
    assert isinstance(first, Created)
    assert isinstance(second, Created)
    assert isinstance(last, Created)
    assert run.execution_id == first.execution_id
    for execution_id in (first.execution_id, second.execution_id):
        await full.explain(execution_id)
        assert touched["read_reasons"] <= 10
    found = await full.explain(last.execution_id)
    assert [getattr(reason, "ahead", None) for reason in found.reasons][:1] == [1000]
    assert touched["read_reasons"] <= 1000 + 10


async def test_grants_and_named_claims_touch_few_rows(full: Engine, touched: Touched) -> None:
    planner: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    assert len(await full.scan_eligible_executions(lane_id="default", limit=10)) == 10
    assert touched["list_eligible"] <= 25
    granted = [await full.claim_for_worker(**planner) for _ in range(5)]
    assert touched["lock_best"] <= 20
    assert touched["read_with_grant"] <= 5
    assert touched["insert_grant"] <= 5
    assert isinstance(granted[0], Granted)
    await full.claim_execution(execution_id=granted[0].execution_id, **planner)
    assert touched["lease_held"] <= 10


async def test_signals_touch_few_rows(full: Engine, touched: Touched) -> None:
    handles = [run.handle for run in await claim(full, 10)]
    waits = [await full.suspend(handle, suspension()) for handle in handles]
    await asyncio.gather(*(full.deliver_signal(**signal(wait)) for wait in waits[:5]))
    assert touched["lock_targets"] <= 20
    assert touched["read_deliveries"] <= 20
    assert touched["insert_deliveries"] <= 5
    assert touched["resume_held"] <= 40
    with contextlib.suppress(EngineError):
        await full.deliver_signal(**{**signal(waits[5]), "waitpoint_token": "k1:" + "0" * 64})
    assert touched["insert_deliveries"] <= 10
    await full.resume_execution(execution_id=handles[6].execution_id)
    assert touched["resume_held"] <= 40


def suspension() -> SuspendArgs:
    return SuspendArgs(
        suspension_id=SuspensionId(uuid4()),
        waitpoints=(Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key="wait"),),
        resume_condition=Single(waitpoint_key="wait"),
        reason_code=SuspensionReason.WAITING_FOR_SIGNAL,
    )


def signal(wait: Any) -> dict[str, Any]:
    return {
        "execution_id": wait.handle.execution_id,
        "waitpoint_id": wait.details.waitpoint_id,
        "waitpoint_token": wait.details.waitpoint_token,
        "signal_name": "ready",
    }


WAITS = ("suspension", "waitpoint", "signal", "suspend_key", "signal_key")
WALKS = {"list_candidates", "list_suspended", "list_impossible"}
"""Statements that walk these tables, for a list or to look for what cannot be."""

_SCAN = re.compile(rf"Scan using (\w+) on ({'|'.join(WAITS)})\b")


async def planned(connection: asyncpg.Connection, statement: Statement) -> list[str]:
    """The plan of a statement, line by line."""
    nothing = f"({', '.join(['null'] * len(statement.parameters))})" if statement.parameters else ""
    await connection.execute(f"prepare {statement.name} as {statement.sql}")
    return [row[0].strip() for row in await connection.fetch(f"explain execute {statement.name}{nothing}")]


async def walks(connection: asyncpg.Connection, statement: Statement) -> list[str]:
    """The scans of tables of waits, in the plan of a statement, that do not look for what is given."""
    wrong = []
    plan = await planned(connection, statement)
    for at, line in enumerate(plan):
        found = _SCAN.search(line)
        condition = next((each for each in plan[at + 1 : at + 3] if each.startswith("Index Cond")), None)
        is_of_existence = found is not None and plan[at - 1].startswith(("InitPlan", "One-Time Filter"))
        if found is None or is_of_existence:
            continue
        if condition is None or condition.count(" = ") + condition.count(" <= ") < 1:
            wrong.append(f"{statement.name}: {line}")
        elif re.fullmatch(r"Index Cond: \(partition_key = [^)]*\)", condition):
            wrong.append(f"{statement.name}: {line} {condition}")
    return wrong


async def test_a_plan_made_while_nothing_waits_finds_waits_by_their_keys(url: str) -> None:
    # An index that fits beside the primary key looks as good on an empty table, and the plan lives on.
    connection = await asyncpg.connect(url, server_settings=session_settings("flowfabric"))
    wrong = []
    try:
        for statement in (each for path in sorted(ENGINE.rglob("*.sql")) for each in Statements(path)):
            if statement.name in WALKS or not any(re.search(rf"\b{table}\b", statement.sql) for table in WAITS):
                continue
            wrong += await walks(connection, statement)
    finally:
        await connection.close()
    assert wrong == []


async def test_an_update_of_waits_begins_with_what_is_given_where_the_tables_are_known_to_be_empty(url: str) -> None:
    # There, a walk over all of an index with what is given as the inner side of the join looks as good.
    connection = await asyncpg.connect(url, server_settings=session_settings("flowfabric"))
    try:
        await connection.execute("vacuum analyze")
        for statement in (deliver.SQL.insert_deliveries, resume.SQL.resume_held, consequence.SQL.release_executions):
            assert await walks(connection, statement) == []
    finally:
        await connection.close()


LISTS = {"list_newest", "list_oldest", "list_pairs", "list_orphans"}
"""Statements that walk the inputs, for a list or to look for what cannot be."""
_INPUT_SCAN = re.compile(r"(Scan using \w+|Seq Scan|Heap Scan) on execution_input\b")
_INPUT_KEY = ("namespace_no", "lane_no", "created_at", "partition_key", "execution_id")


@pytest.mark.parametrize("known", ["nothing", "that the tables are empty"])
async def test_a_plan_made_while_there_is_no_work_finds_inputs_by_their_whole_key(url: str, known: str) -> None:
    connection = await asyncpg.connect(url, server_settings=session_settings("flowfabric"))
    wrong, looked_at = [], 0
    try:
        if known != "nothing":
            await connection.execute("vacuum analyze")
        for statement in (each for path in sorted(ENGINE.rglob("*.sql")) for each in Statements(path)):
            if statement.name in LISTS or not re.search(r"\bff_input\b|\bexecution_input\b", statement.sql):
                continue
            plan = await planned(connection, statement)
            for at, line in enumerate(plan):
                # A call that the planner has not put the body of in its place.
                assert "Function Scan on ff_input" not in line, statement.name
                if _INPUT_SCAN.search(line):
                    looked_at += 1
                    condition = next((each for each in plan[at + 1 : at + 3] if each.startswith("Index Cond")), "")
                    if not all(re.search(rf"\b{column} = ", condition) for column in _INPUT_KEY):
                        wrong.append(f"{statement.name}: {line} {condition}")
    finally:
        await connection.close()
    assert wrong == []
    assert looked_at > 15


async def test_sweeps_touch_what_is_due_and_of_that_a_batch(
    full: Engine, touched: Touched, clock: Any, connection: asyncpg.Connection
) -> None:
    due = await full.retention.read_due()
    assert (due.expired_leases, due.elapsed_delays, due.expiries) == (0, 0, 0)
    assert touched["read_due"] <= 10
    await clock.stop()
    first = await connection.fetchval("select min(delay_until) from execution")
    await clock.advance(ms=first + 10_000 - await clock.now())
    assert await full.lease_expiry.mark_expired() == 0
    assert touched["mark_expired_leases"] <= 100
    assert await full.timeouts.expire_due() == 0
    assert touched["lock_expired"] <= 100
    assert await full.delays.promote_due() == 11
    assert touched["promote_delayed"] <= 200
    await clock.advance(ms=DAY + HOUR)
    assert await full.delays.promote_due() == 1000
    assert touched["promote_delayed"] <= 4_000
    while await full.delays.promote_due():
        pass
    await connection.execute(f"{VACUUM} execution")
    assert await full.lease_expiry.mark_expired() == 1000
    assert touched["mark_expired_leases"] <= 4_000
    assert await full.timeouts.expire_due() == 1000
    assert touched["lock_expired"] <= 4_000
    assert await full.retention.trim(limit=100) == 100
    assert touched["take_retained"] <= 4 * 100


async def test_a_page_of_a_list_touches_few_rows_whatever_is_asked_for(full: Engine, touched: Touched) -> None:
    # Executions of one millisecond are read together: the fixture makes a thousand of them at a time.
    page = 5 * 1000 + 200
    for order in ("newest", "oldest"):
        for plenty in ({}, {"namespace": "tests"}, {"lane_id": "lane1"}, {"execution_kind": "job"}):
            touched.rows.clear()
            found = await full.list_executions(order=order, limit=20, **plenty)  # type: ignore[arg-type]
            assert len(found.executions) == 20
            assert touched[f"list_{order}"] <= page
            assert "list_candidates" not in touched.rows
        for rare in (
            {"public_state": "failed"},
            {"public_state": ["cancelled", "expired"]},
            {"public_state": "rate_limited"},
        ):
            touched.rows.clear()
            assert (await full.list_executions(order=order, **rare)).executions == []
            assert f"list_{order}" not in touched.rows
            assert touched["list_candidates"] <= 10
        # What is tagged is found by its tags, without a walk.
        touched.rows.clear()
        assert (await full.list_executions(order=order, tag=("a.b", "c"))).executions == []
        assert touched["list_candidates"] <= 10
        assert f"list_{order}" not in touched.rows
        # A narrow index leads to the ended executions, which are few, past all the others.
        touched.rows.clear()
        found = await full.list_executions(order=order, public_state="completed", limit=20)
        assert len(found.executions) == 20
        assert touched.rows.get("list_candidates", 0) <= 2 * ENDED + 10

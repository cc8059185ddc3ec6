"""Statements of waits touch few rows, however many executions wait and whatever the planner knows of them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from databases import Databases
from fixtures import Clock
from flowfabric.db.database import Database, Transaction
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.condition import all_of_waitpoints
from flowfabric.model.execution import NewExecution
from flowfabric.model.ids import SuspensionId, WaitpointId
from flowfabric.model.states import TimeoutBehavior
from flowfabric.model.suspension import SuspendArgs, Suspended, SuspensionReason
from flowfabric.model.waitpoint import Fresh, UsePending
from house.filled import filled
from house.touched import VACUUM

WAITING = 500
WAITED = 40
KEYS = ("a", "b")
WEEK = 604_800_000

# Entries that scans of the tables of waits gave, in this transaction so far.
_TOUCHED = """
select coalesce(sum(pg_stat_get_xact_tuples_returned(r.oid)), 0)::int
  from (select c.oid from pg_class c
         where c.relnamespace = 'flowfabric'::regnamespace
           and c.relname in ('suspension', 'waitpoint', 'signal', 'idempotency_key', 'execution', 'attempt', 'timer',
                             'ready', 'listed')
        union all
        select i.indexrelid from pg_index i join pg_class c on c.oid = i.indrelid
         where c.relnamespace = 'flowfabric'::regnamespace
           and c.relname in ('suspension', 'waitpoint', 'signal', 'idempotency_key', 'execution', 'attempt', 'timer',
                             'ready', 'listed')) r(oid)
"""


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most rows each statement has touched at once, while operations run."""
    seen: dict[str, int] = {}

    async def count(connection: asyncpg.Connection, statement: Statement, arguments: list[object]) -> Any:
        before = await connection.fetchval(_TOUCHED)
        found = await connection.fetch(statement.sql, *arguments)
        seen[statement.name] = max(seen.get(statement.name, 0), await connection.fetchval(_TOUCHED) - before)
        return found

    async def fetch(database: Database, statement: Statement, values: Mapping[str, object], **_: object) -> Any:
        async with database.acquire() as connection, connection.transaction():
            return await count(connection, statement, statement.arguments(values))

    async def fetch_within(transaction: Transaction, statement: Statement, **values: object) -> Any:
        return await count(transaction.connection, statement, statement.arguments(values))

    monkeypatch.setattr(Database, "fetch", fetch)
    monkeypatch.setattr(Transaction, "fetch", fetch_within)
    return seen


def on_all(**overrides: Any) -> SuspendArgs:
    return SuspendArgs(
        **{
            "suspension_id": SuspensionId(uuid4()),
            "waitpoints": tuple(Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key=key) for key in KEYS),
            "resume_condition": all_of_waitpoints(KEYS),
            "reason_code": SuspensionReason.WAITING_FOR_SIGNAL,
            "idempotency_key": "once",
            **overrides,
        }
    )


async def claimed(engine: Engine, count: int) -> list[Any]:
    """Handles of new executions."""
    new = NewExecution(
        namespace="tests",
        lane_id="default",
        execution_kind="job",
        input_payload=b"1",
        priority=0,
        creator_identity="test",
    )
    await engine.create_many([new] * count)
    runs = await engine.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=count)
    return [run.handle for run in runs]


async def waits(engine: Engine, count: int) -> list[Suspended]:
    """Executions that wait, one signal short of what they wait for."""
    found = await asyncio.gather(*(engine.suspend(handle, on_all()) for handle in await claimed(engine, count)))
    outcomes = [each for each in found if isinstance(each, Suspended)]
    assert len(outcomes) == count
    await asyncio.gather(*(signal(engine, each) for each in outcomes))
    return outcomes


async def signal(engine: Engine, outcome: Suspended, *, is_last: bool = False) -> None:
    details = outcome.details
    point = details.additional_waitpoints[-1] if is_last else details
    await engine.deliver_signal(
        execution_id=outcome.handle.execution_id,
        waitpoint_id=point.waitpoint_id,
        waitpoint_token=point.waitpoint_token,
        signal_name="one",
    )


async def fill(engine: Engine) -> None:
    """Leave many waits."""
    await waits(engine, WAITING)


@pytest.fixture(scope="module", params=["no statistics", "statistics"])
async def original(request: pytest.FixtureRequest, databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many waits."""
    async with filled(databases, fill, "vacuum", *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


@pytest.fixture
def full(original: str, engine: Engine) -> Engine:
    """An engine on tables that hold many waits."""
    return engine


async def test_one_wait_touches_its_own_rows_alone(full: Engine, touched: dict[str, int], clock: Clock) -> None:
    (one, two) = await waits(full, 2)
    (ahead,) = await claimed(full, 1)
    pending = await full.create_waitpoint(ahead, waitpoint_key="a", expires_in_ms=WEEK)
    binding = UsePending(waitpoint_id=pending.waitpoint_id)
    third = await full.suspend(ahead, on_all(waitpoints=(binding,), resume_condition=all_of_waitpoints(["a"])))
    assert isinstance(third, Suspended)
    await full.suspend(ahead, on_all())
    for operation in (
        full.describe_execution(ahead.execution_id),
        full.explain(ahead.execution_id),
        full.list_pending_waitpoints(execution_id=ahead.execution_id),
        full.read_waitpoint_token(execution_id=ahead.execution_id, waitpoint_id=pending.waitpoint_id),
        full.close_waitpoint(execution_id=ahead.execution_id, waitpoint_id=pending.waitpoint_id),
        full.cancel_execution(execution_id=ahead.execution_id, reason="not wanted"),
        full.cancel_execution(execution_id=one.handle.execution_id, reason="not wanted"),
        full.cancel_execution(execution_id=two.handle.execution_id, reason="not wanted"),
    ):
        await operation
    few = {name: touched[name] for name in touched if name not in ("claim_by_route", "insert_alike")}
    assert {"lock_executions", "lock_free_executions", "read_runs", "insert_suspensions"} <= set(few)
    assert {"set_activated", "list_buffered", "read_reasons"} <= set(few)
    assert {name: count for name, count in few.items() if count > 40} == {}
    await clock.advance(ms=WEEK * 52)
    assert await parts_of(full).retention.trim(limit=2) == 2
    assert touched["take_retained"] <= 60


async def test_a_hundred_that_suspend_together_touch_their_own_rows(full: Engine, touched: dict[str, int]) -> None:
    handles = await claimed(full, 100)
    touched.clear()
    await asyncio.gather(*(full.suspend(handle, on_all()) for handle in handles))
    assert {name: count for name, count in touched.items() if count > 10 * 100} == {}


async def test_a_hundred_that_are_resumed_together_touch_their_own_rows(
    full: Engine, touched: dict[str, int], clock: Clock
) -> None:
    outcomes = await waits(full, 100)
    touched.clear()
    await asyncio.gather(*(signal(full, each, is_last=True) for each in outcomes))
    assert "resume_held" in touched
    assert {name: count for name, count in touched.items() if count > 20 * 100} == {}


@pytest.mark.parametrize("behavior", TimeoutBehavior)
async def test_a_hundred_timeouts_touch_their_own_rows(
    full: Engine, touched: dict[str, int], clock: Clock, behavior: TimeoutBehavior
) -> None:
    due_at = await clock.now() + 1
    asked = [on_all(timeout_at=due_at, timeout_behavior=behavior) for _ in range(100)]
    handles = await claimed(full, 100)
    await asyncio.gather(*(full.suspend(handle, args) for handle, args in zip(handles, asked, strict=True)))
    await clock.advance(ms=1)
    touched.clear()
    assert await parts_of(full).suspension_timeouts.expire_due() == 100
    assert touched["lock_timed_out"] <= 4 * 100
    assert {name: count for name, count in touched.items() if count > 20 * 100} == {}


async def test_the_waits_that_an_execution_has_behind_it_cost_the_next_nothing(
    engine: Engine, connection: asyncpg.Connection, touched: dict[str, int]
) -> None:
    async def cost() -> dict[str, int]:
        (run,) = await engine.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=1)
        touched.clear()
        outcome = await engine.suspend(run.handle, on_all(idempotency_key=None))
        assert isinstance(outcome, Suspended)
        await signal(engine, outcome)
        await engine.observe_signals(run.handle)
        await engine.resume_execution(execution_id=run.execution_id)
        # Every waitpoint counts for how many signals the execution may take.
        return {name: count for name, count in touched.items() if name != "read_deliveries"}

    (handle,) = await claimed(engine, 1)
    await engine.suspend(handle, on_all())
    await engine.resume_execution(execution_id=handle.execution_id)
    first = await cost()
    for _ in range(WAITED):
        await cost()
    await connection.execute(VACUUM)
    later = await cost()
    assert {name: (first[name], count) for name, count in later.items() if count > first[name] + 2} == {}


async def test_a_page_of_waits_touches_little_more_than_itself(
    full: Engine, touched: dict[str, int], connection: asyncpg.Connection
) -> None:
    # As if no two had suspended in the same millisecond, which are read together.
    await connection.execute(
        """update suspension s set suspended_at = o.at
             from (select ctid as tid, row_number() over () as at from suspension) o where s.ctid = o.tid"""
    )
    await connection.execute("vacuum")
    touched.clear()
    page = await full.list_suspended(limit=10)
    assert [entry.suspended_at_ms for entry in page.entries] == list(range(1, 11))
    page = await full.list_suspended(limit=10, cursor=page.next_cursor)
    assert [entry.suspended_at_ms for entry in page.entries] == list(range(11, 21))
    assert touched["list_suspended"] <= 2 * (10 + 2)

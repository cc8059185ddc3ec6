"""Statements about suspensions touch few rows, however many executions are suspended and whatever the planner knows."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from databases import Databases
from engine.state import all_cases
from fixtures import Clock
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.condition import all_of_waitpoints
from flowfabric.model.execution import NewExecution
from flowfabric.model.ids import SuspensionId, WaitpointId
from flowfabric.model.states import TimeoutBehavior
from flowfabric.model.suspension import SuspendArgs, Suspended, SuspensionReason
from flowfabric.model.waitpoint import Fresh, UsePending
from house.filled import STATISTICS, copied, filled
from house.touched import VACUUM, Touched, touched

__all__ = ["touched"]

WAITING = 500
EARLIER = 20
KEYS = ("a", "b")
WEEK = 604_800_000


def on_all(**overrides: Any) -> SuspendArgs:
    """The arguments of a suspend that waits for all waitpoints of KEYS."""
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
    """The handles of new executions that are claimed."""
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
    """Suspend new executions on two waitpoints and signal the first."""
    found = await asyncio.gather(*(engine.suspend(handle, on_all()) for handle in await claimed(engine, count)))
    outcomes = [each for each in found if isinstance(each, Suspended)]
    assert len(outcomes) == count
    await asyncio.gather(*(signal(engine, each) for each in outcomes))
    return outcomes


async def signal(engine: Engine, outcome: Suspended, *, is_last: bool = False) -> None:
    """Signal the first waitpoint of a suspension, or the last."""
    details = outcome.details
    point = details.additional_waitpoints[-1] if is_last else details
    await engine.deliver_signal(
        execution_id=outcome.handle.execution_id,
        waitpoint_id=point.waitpoint_id,
        waitpoint_token=point.waitpoint_token,
        signal_name="one",
    )


async def fill(engine: Engine) -> None:
    """Create many suspended executions."""
    await waits(engine, WAITING)


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many suspended executions."""
    async with filled(databases, fill, "vacuum") as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """The address of a database with many suspended executions, with and without statistics."""
    async with copied(databases, store, *(["analyze"] if request.param == "statistics" else [])) as url:
        yield url


@pytest.fixture
def full(original: str, engine: Engine) -> Engine:
    """An engine on a store with many suspended executions."""
    return engine


async def test_the_operations_of_one_suspension_touch_only_its_own_rows(
    full: Engine, touched: Touched, clock: Clock
) -> None:
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
    assert {"lock_executions", "lock_free_executions", "read_runs", "insert_suspensions"} <= set(touched.calls)
    assert {"activate_waitpoint", "list_buffered_signals", "read_reasons"} <= set(touched.calls)
    assert set(touched.above(40)) <= {"claim_by_route", "insert_alike"}
    await clock.advance(ms=WEEK * 52)
    assert (await parts_of(full).retention.trim_batch(limit=2)).done == 2
    assert touched["take_retained"] <= 60


async def test_a_hundred_concurrent_suspends_touch_only_their_own_rows(full: Engine, touched: Touched) -> None:
    handles = await claimed(full, 100)
    touched.clear()
    await asyncio.gather(*(full.suspend(handle, on_all()) for handle in handles))
    assert touched.above(10 * 100) == {}


async def test_a_hundred_concurrent_resumes_touch_only_their_own_rows(
    full: Engine, touched: Touched, clock: Clock
) -> None:
    outcomes = await waits(full, 100)
    touched.clear()
    await asyncio.gather(*(signal(full, each, is_last=True) for each in outcomes))
    assert "resume_locked" in touched
    assert touched.above(20 * 100) == {}


async def test_a_hundred_timeouts_touch_only_their_own_rows(full: Engine, touched: Touched, clock: Clock) -> None:
    await clock.stop()
    with all_cases() as case:
        for behavior in TimeoutBehavior:
            with case(behavior):
                due_at = await clock.now() + 1
                asked = [
                    on_all(timeout_at=due_at, timeout_behavior=behavior, idempotency_key=behavior) for _ in range(100)
                ]
                handles = await claimed(full, 100)
                await asyncio.gather(*(full.suspend(handle, args) for handle, args in zip(handles, asked, strict=True)))
                await clock.advance(ms=1)
                touched.clear()
                assert await parts_of(full).suspension_timeouts.expire_due() == 100
                assert touched["lock_timed_out"] <= 4 * 100
                assert touched.above(20 * 100) == {}


async def test_the_earlier_suspensions_of_an_execution_add_nothing_to_the_cost_of_the_next(
    engine: Engine, connection: asyncpg.Connection, touched: Touched
) -> None:
    async def cost() -> dict[str, int]:
        (run,) = await engine.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=1)
        touched.clear()
        outcome = await engine.suspend(run.handle, on_all(idempotency_key=None))
        assert isinstance(outcome, Suspended)
        await signal(engine, outcome)
        await engine.observe_signals(run.handle)
        await engine.resume_execution(execution_id=run.execution_id)
        # It reads every waitpoint of the execution to count its signals against the limit.
        return {name: count for name, count in touched.above(0).items() if name != "read_deliveries"}

    (handle,) = await claimed(engine, 1)
    await engine.suspend(handle, on_all())
    await engine.resume_execution(execution_id=handle.execution_id)
    first = await cost()
    for _ in range(EARLIER):
        await cost()
    await connection.execute(VACUUM)
    later = await cost()
    assert {name: (first.get(name, 0), count) for name, count in later.items() if count > first.get(name, 0) + 2} == {}


async def test_a_page_of_suspensions_touches_little_more_than_its_entries(
    full: Engine, touched: Touched, connection: asyncpg.Connection
) -> None:
    # Suspensions of the same millisecond are read together, so give each its own.
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

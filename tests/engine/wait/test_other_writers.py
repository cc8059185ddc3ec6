"""Concurrent writes to the rows of a suspension by another session, such as a migration: no update is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.sending import Waiting, waiting
from engine.state import claim
from engine.waits import on_all, rewriting, suspension, waitpoint, waitpoints
from fixtures import Clock, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import Count, CountKind

APPENDED = "appended_to_waitpoint"
SATISFIED = "resume_condition_satisfied"
MINUTE = 60_000
TABLES = ["execution", "suspension", "waitpoint"]


@pytest.fixture
def meanwhile(connection: asyncpg.Connection, eventually: Eventually) -> Any:
    """The outcome of an operation that meets a row written by another session, which commits once it is waited for."""

    async def is_waited_for() -> bool:
        waiters = "select count(*) from pg_stat_activity where pg_backend_pid() = any(pg_blocking_pids(pid))"
        return bool(await connection.fetchval(waiters) > 0)

    async def answer(table: str, execution_id: str, operation: Awaitable[Any]) -> Any:
        async with rewriting(connection, table, execution_id):
            under_way = asyncio.ensure_future(operation)
            await eventually(is_waited_for)
            assert not under_way.done()
        return await under_way

    return answer


async def test_no_counted_signal_or_closed_row_is_lost(
    engine: Engine, given: Given, rows: Rows, clock: Clock, meanwhile: Any, subtests: pytest.Subtests
) -> None:
    for table in TABLES:
        with subtests.test(f"count, {table}"):
            await check_count(engine, given, rows, meanwhile, table)
        with subtests.test(f"signal, {table}"):
            await check_signal(engine, given, rows, meanwhile, table)
        for end, behavior, state, reason in ENDS:
            with subtests.test(f"{end.__name__} ({behavior}), {table}"):
                request = on_all("a", "b", timeout_at=await clock.now() + MINUTE, timeout_behavior=behavior)
                wait = await waiting(engine, given, request, lane_id=f"{uuid4()}")
                await clock.advance(ms=MINUTE)
                await meanwhile(table, wait.execution_id, end(engine, wait))
                assert (await rows.execution(wait.execution_id))["public_state"] == state
                assert (await suspension(rows, wait.execution_id))["close_reason"] == reason
                points = await waitpoints(rows, wait.execution_id)
                assert [(point["state"], point["close_reason"]) for point in points] == [("closed", reason)] * 2
    assert await engine.find_inconsistencies() == []


async def check_count(engine: Engine, given: Given, rows: Rows, meanwhile: Any, table: str) -> None:
    """Assert that a signal counts though another session writes the row."""
    approvals = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("wait",))
    lane_id = f"{uuid4()}"
    wait = await waiting(engine, given, resume_condition=approvals, lane_id=lane_id)
    first = await meanwhile(table, wait.execution_id, wait.send("approve", source_identity="one"))
    assert first.effect == APPENDED
    assert (await suspension(rows, wait.execution_id))["satisfier_ids"] == [first.signal_id]
    point = await waitpoint(rows, wait.points["wait"].waitpoint_id)
    assert (point["signal_count"], point["matched_signal_count"]) == (1, 1)
    second = await wait.send("approve", source_identity="two")
    assert second.effect == SATISFIED
    closed = await suspension(rows, wait.execution_id)
    assert closed["satisfier_ids"] == [first.signal_id, second.signal_id]
    assert len(await claim(engine, lane_id)) == 1


async def check_signal(engine: Engine, given: Given, rows: Rows, meanwhile: Any, table: str) -> None:
    """Assert that a signal resumes and closes everything though another session writes the row."""
    lane_id = f"{uuid4()}"
    wait = await waiting(engine, given, lane_id=lane_id)
    answer = await meanwhile(table, wait.execution_id, wait.send("ready"))
    assert answer.effect == SATISFIED
    closed = await suspension(rows, wait.execution_id)
    assert (closed["close_reason"], closed["satisfier_ids"]) == ("resumed", [answer.signal_id])
    point = await waitpoint(rows, wait.points["wait"].waitpoint_id)
    assert (point["state"], point["close_reason"], point["signal_count"]) == ("closed", "resumed", 1)
    assert len(await claim(engine, lane_id)) == 1


Ending = Callable[[Engine, Waiting], Awaitable[Any]]


def resume(engine: Engine, wait: Waiting) -> Awaitable[Any]:
    return engine.resume_execution(execution_id=wait.execution_id)


def cancel(engine: Engine, wait: Waiting) -> Awaitable[Any]:
    return engine.cancel_execution(execution_id=wait.execution_id, reason="not wanted")


def time_out(engine: Engine, wait: Waiting) -> Awaitable[Any]:
    return engine.expire_suspension(wait.execution_id)


ENDS = [
    (resume, "fail", "resumable", "resumed"),
    (cancel, "fail", "cancelled", "cancelled"),
    (time_out, "fail", "failed", "timed_out_fail"),
    (time_out, "auto_resume", "resumable", "timed_out_auto_resume"),
]


async def test_an_escalation_is_not_lost(
    engine: Engine, given: Given, rows: Rows, clock: Clock, meanwhile: Any, subtests: pytest.Subtests
) -> None:
    for table in ("execution", "suspension"):
        with subtests.test(table):
            request = on_all("a", "b", timeout_at=await clock.now() + MINUTE, timeout_behavior="escalate")
            wait = await waiting(engine, given, request)
            await clock.advance(ms=MINUTE)
            await meanwhile(table, wait.execution_id, engine.expire_suspension(wait.execution_id))
            escalated = await suspension(rows, wait.execution_id)
            assert (escalated["reason_code"], escalated["timeout_at"]) == ("waiting_for_operator_review", None)
            assert (await rows.execution(wait.execution_id))["blocking_reason"] == "paused_by_operator"

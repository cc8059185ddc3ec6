"""Rows of a wait that another session writes meanwhile, as a migration does or an operator: nothing of it gets lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from engine.sending import Waiting, waiting
from engine.state import claim
from engine.waits import on_all, rewriting, suspension, waitpoint, waitpoints
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import Count, CountKind

APPENDED = "appended_to_waitpoint"
MET = "resume_condition_satisfied"
MINUTE = 60_000
TABLES = ["execution", "suspension", "waitpoint"]


@pytest.fixture
def meanwhile(connection: asyncpg.Connection, eventually: Any) -> Any:
    """The answer to an operation that finds a row written by a session that commits only when it is waited for."""

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


@pytest.mark.parametrize("table", TABLES)
async def test_what_a_condition_has_counted_is_kept(
    engine: Engine, given: Any, rows: Any, meanwhile: Any, table: str
) -> None:
    approvals = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("wait",))
    wait = await waiting(engine, given, resume_condition=approvals)
    first = await meanwhile(table, wait.execution_id, wait.send("approve", source_identity="one"))
    assert first.effect == APPENDED
    assert (await suspension(rows, wait.execution_id))["satisfier_ids"] == [first.signal_id]
    point = await waitpoint(rows, wait.points["wait"][0])
    assert (point["signal_count"], point["matched_signal_count"]) == (1, 1)
    second = await wait.send("approve", source_identity="two")
    assert second.effect == MET
    closed = await suspension(rows, wait.execution_id)
    assert closed["satisfier_ids"] == [first.signal_id, second.signal_id]
    assert await engine.find_inconsistencies() == []


@pytest.mark.parametrize("table", TABLES)
async def test_a_signal_that_resumes_closes_all_that_was_waited_for(
    engine: Engine, given: Any, rows: Any, meanwhile: Any, table: str
) -> None:
    wait = await waiting(engine, given)
    answer = await meanwhile(table, wait.execution_id, wait.send("ready"))
    assert answer.effect == MET
    closed = await suspension(rows, wait.execution_id)
    assert (closed["close_reason"], closed["satisfier_ids"]) == ("resumed", [answer.signal_id])
    point = await waitpoint(rows, wait.points["wait"][0])
    assert (point["state"], point["close_reason"], point["signal_count"]) == ("closed", "resumed", 1)
    assert len(await claim(engine)) == 1
    assert await engine.find_inconsistencies() == []


Ending = Callable[[Engine, Waiting], Awaitable[Any]]


def resume(engine: Engine, wait: Waiting) -> Awaitable[Any]:
    return engine.resume_execution(execution_id=wait.execution_id)


def cancel(engine: Engine, wait: Waiting) -> Awaitable[Any]:
    return engine.cancel_execution(execution_id=wait.execution_id, reason="not wanted")


def time_out(engine: Engine, wait: Waiting) -> Awaitable[Any]:
    return engine.expire_suspension(wait.execution_id)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("end", "behavior", "state", "reason"),
    [
        (resume, "fail", "resumable", "resumed"),
        (cancel, "fail", "cancelled", "cancelled"),
        (time_out, "fail", "failed", "timed_out_fail"),
        (time_out, "auto_resume", "resumable", "timed_out_auto_resume"),
    ],
    ids=["resume", "cancel", "timeout that fails", "timeout that resumes"],
)
async def test_an_ended_wait_leaves_nothing_open(
    engine: Engine,
    given: Any,
    rows: Any,
    clock: Any,
    meanwhile: Any,
    table: str,
    end: Ending,
    behavior: str,
    state: str,
    reason: str,
) -> None:
    asked = on_all("a", "b", timeout_at=await clock.now() + MINUTE, timeout_behavior=behavior)
    wait = await waiting(engine, given, asked)
    await clock.advance(ms=MINUTE)
    await meanwhile(table, wait.execution_id, end(engine, wait))
    assert (await rows.execution(wait.execution_id))["public_state"] == state
    assert (await suspension(rows, wait.execution_id))["close_reason"] == reason
    points = await waitpoints(rows, wait.execution_id)
    assert [(point["state"], point["close_reason"]) for point in points] == [("closed", reason)] * 2
    assert await engine.find_inconsistencies() == []


@pytest.mark.parametrize("table", ["execution", "suspension"])
async def test_a_timeout_that_escalates_is_written_down(
    engine: Engine, given: Any, rows: Any, clock: Any, meanwhile: Any, table: str
) -> None:
    asked = on_all("a", "b", timeout_at=await clock.now() + MINUTE, timeout_behavior="escalate")
    wait = await waiting(engine, given, asked)
    await clock.advance(ms=MINUTE)
    await meanwhile(table, wait.execution_id, engine.expire_suspension(wait.execution_id))
    escalated = await suspension(rows, wait.execution_id)
    assert (escalated["reason_code"], escalated["timeout_at"]) == ("waiting_for_operator_review", None)
    assert (await rows.execution(wait.execution_id))["blocking_reason"] == "paused_by_operator"

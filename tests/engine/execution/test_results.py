"""Waiting for the end of an execution: timeouts, a closing engine, cancelled waits, unreadable outcomes."""

import asyncio
import math
from typing import Any

import asyncpg
import pytest

from engine.state import all_cases, refused
from fixtures import Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings


async def test_a_wait_of_any_length_returns_what_has_ended(engine: Engine, given: Given) -> None:
    ended, running = await given.completed(result=b"x"), await given.claimed()
    absent = "{fp:0}:00000000-0000-0000-0000-000000000000"
    for timeout in (0, 0.0, -0.0, 1e-9, 1e300, math.inf, 10**400):
        found = await engine.wait_for_ending(ended, timeout=timeout)
        assert (found.result, found.outcome) == (b"x", TerminalOutcome.SUCCESS), timeout
        await refused(engine.wait_for_ending(absent, timeout=timeout), "execution_not_found")
        if timeout < 1:
            await refused(engine.wait_for_ending(running.execution_id, timeout=timeout), "timeout")


async def test_a_timeout_that_is_no_time_is_refused(engine: Engine, given: Given, rows: Rows) -> None:
    ended = await given.completed()
    wrong: list[Any] = [-1, -1e-9, math.nan, -math.inf, "5", True, b"", [], object]
    async with rows.unchanged():
        with all_cases() as case:
            for timeout in wrong:
                with case(repr(timeout)):
                    waiting = engine.wait_for_ending(ended, timeout=timeout)
                    await refused(waiting, "invalid_input", "timeout: must be seconds >= 0")


async def test_a_closing_engine_fails_its_waiters(url: str, given: Given, eventually: Eventually) -> None:
    run = await given.claimed()
    async with Engine.connect(settings=Settings(database_url=url)) as closing:
        waiting = [asyncio.create_task(closing.wait_for_ending(run.execution_id, timeout=at)) for at in (None, 60)]
        await eventually(lambda: parts_of(closing).wakeups.hints.is_listening)
    for task in waiting:
        await refused(task, "unavailable", "the engine is closing")
    await refused(closing.wait_for_ending(run.execution_id), "unavailable", "the engine is closing")


async def test_a_cancelled_wait_leaves_the_others_waiting(engine: Engine, given: Given, eventually: Eventually) -> None:
    run = await given.claimed()
    gone, kept = (asyncio.create_task(engine.wait_for_ending(run.execution_id, timeout=60)) for _ in range(2))
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    gone.cancel()
    await engine.complete(run, b"x")
    assert (await kept).result == b"x"
    assert gone.cancelled()


@pytest.mark.usefixtures("altered_rows")
async def test_an_unknown_stored_outcome_fails_only_its_own_waiter(
    engine: Engine, given: Given, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    strange = await given.failed(lane_id="strange")
    run = await given.claimed()
    # What a newer version may have stored.
    await connection.execute("alter type terminal_outcome add value 'evaporated'")
    await connection.execute(
        "update execution set terminal_outcome = 'evaporated' where execution_id = $1", uuid_of(strange)
    )
    waiting = asyncio.create_task(engine.wait_for_ending(run.execution_id, timeout=60))
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    detail = "terminal_outcome: unknown literal 'evaporated'"
    await refused(engine.wait_for_ending(strange, timeout=60), "corruption", detail)
    await engine.complete(run, b"x")
    assert (await waiting).result == b"x"

"""Waiting for an ending: short waits, wrong waits, a closing engine, and what another version has stored."""

import asyncio
import math
from typing import Any

import asyncpg
import pytest

from engine.state import refused
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings


@pytest.mark.parametrize("timeout", [0, 0.0, -0.0, 1e-9])
async def test_a_wait_of_no_time_sees_what_has_ended(engine: Engine, given: Any, timeout: float) -> None:
    ended = await given.completed(result=b"x")
    assert (await engine.wait_for_ending(ended, timeout=timeout)).result == b"x"
    running = await given.claimed()
    await refused(engine.wait_for_ending(running.execution_id, timeout=timeout), "timeout")
    await refused(
        engine.wait_for_ending("{fp:0}:00000000-0000-0000-0000-000000000000", timeout=timeout), "execution_not_found"
    )


@pytest.mark.parametrize("timeout", [math.inf, 10**400, 1e300], ids=["infinite", "beyond floats", "huge"])
async def test_a_wait_may_be_as_long_as_one_likes(engine: Engine, given: Any, timeout: float) -> None:
    assert (await engine.wait_for_ending(await given.completed(), timeout=timeout)).outcome is TerminalOutcome.SUCCESS


@pytest.mark.parametrize("timeout", [-1, -1e-9, math.nan, -math.inf, "5", True, b"", [], object], ids=str)
async def test_what_is_no_time_is_refused(engine: Engine, given: Any, rows: Any, timeout: Any) -> None:
    ended = await given.completed()
    async with rows.unchanged():
        await refused(engine.wait_for_ending(ended, timeout=timeout), "invalid_input", "timeout: must be seconds >= 0")


async def test_a_closing_engine_tells_its_waiters(url: str, given: Any, eventually: Any) -> None:
    run = await given.claimed()
    async with Engine.connect(settings=Settings(database_url=url)) as closing:
        waiting = [asyncio.create_task(closing.wait_for_ending(run.execution_id, timeout=at)) for at in (None, 60)]
        await eventually(lambda: parts_of(closing).wakeups.hints.is_listening)
    for task in waiting:
        await refused(task, "unavailable", "the engine is closing")
    await refused(closing.wait_for_ending(run.execution_id), "unavailable", "the engine is closing")


async def test_a_cancelled_wait_leaves_the_others_waiting(engine: Engine, given: Any, eventually: Any) -> None:
    run = await given.claimed()
    gone, kept = (asyncio.create_task(engine.wait_for_ending(run.execution_id, timeout=60)) for _ in range(2))
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    gone.cancel()
    await engine.complete(run, b"x")
    assert (await kept).result == b"x"
    assert gone.cancelled()


@pytest.mark.usefixtures("altered_rows")
async def test_an_outcome_of_a_newer_version_is_told_to_its_waiter_alone(
    engine: Engine, given: Any, connection: asyncpg.Connection, eventually: Any
) -> None:
    strange = await given.failed(lane_id="strange")
    run = await given.claimed()
    # What a newer version may have stored.
    await connection.execute("alter type terminal_outcome add value 'evaporated'")
    await connection.execute(
        "update execution set terminal_outcome = 'evaporated' where execution_id = $1", strange[-36:]
    )
    waiting = asyncio.create_task(engine.wait_for_ending(run.execution_id, timeout=60))
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    detail = "terminal_outcome: unknown literal 'evaporated'"
    await refused(engine.wait_for_ending(strange, timeout=60), "corruption", detail)
    await engine.complete(run, b"x")
    assert (await waiting).result == b"x"

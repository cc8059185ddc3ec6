"""Timeouts and delays given as durations, which count from the clock of the store."""

from typing import Any

import pytest

from engine.state import refused
from engine.waits import suspend_args
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import TimeoutOnly
from flowfabric.model.errors import InvalidInputError


async def test_a_timeout_counts_from_the_suspend(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    claimed = await given.run(policy={"suspension_policy": {"default_timeout_ms": 1, "timeout_behavior": "cancel"}})
    now = await clock.advance(seconds=5)
    await engine.suspend(claimed.handle, suspend_args(timeout_ms=60_000))
    (suspension,) = await rows.of("suspension")
    assert (suspension["timeout_at"], suspension["timeout_behavior"]) == (now + 60_000, "fail")
    assert await rows.timers(claimed.execution_id) == {"suspension_timeout": now + 60_000}


async def test_a_timeout_only_wait_may_have_a_relative_timeout(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    await engine.suspend(
        handle, suspend_args(resume_condition=TimeoutOnly(), timeout_ms=1000, timeout_behavior="auto_resume")
    )
    await clock.advance(seconds=2)
    await engine.expire_suspension(execution_id=handle.execution_id)
    assert await engine.read_execution_state(handle.execution_id) == "resumable"


def test_a_timeout_is_either_a_time_or_a_duration() -> None:
    with pytest.raises(InvalidInputError, match="timeout_ms: give timeout_ms or timeout_at, not both"):
        suspend_args(timeout_ms=1, timeout_at=1)
    with pytest.raises(InvalidInputError, match=r"timeout_ms: .*, got -1"):
        suspend_args(timeout_ms=-1)


async def test_a_delay_counts_from_now(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed()
    now = await clock.advance(seconds=5)
    await engine.delay(handle, delay_ms=60_000)
    row = await rows.execution(handle.execution_id)
    assert (row["delay_until"], row["blocking_detail"]) == (now + 60_000, f"delayed until {now + 60_000}")


async def test_a_delay_is_either_a_time_or_a_duration_that_is_not_negative(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    wrong: list[dict[str, Any]] = [{}, {"delay_until": 1, "delay_ms": 1}, {"delay_ms": -1}, {"delay_ms": "soon"}]
    async with rows.unchanged():
        for times in wrong:
            await refused(engine.delay(handle, **times), "invalid_input", "delay_")

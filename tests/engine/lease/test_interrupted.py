"""Interrupted attempts: what the next claim reports, and how much of their timeout is left."""

from typing import Any

import pytest

from engine.cases import in_turn
from engine.waits import suspend_args
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.states import HandleKind

SHORT = {"timeout_policy": {"attempt_timeout_ms": 4_000}}
LONG = {"timeout_policy": {"attempt_timeout_ms": 60_000}}


async def claim(engine: Engine, limit: int = 100, **options: Any) -> list[ClaimedExecution]:
    return await engine.claim_many(
        lanes=("default",), worker_id="worker", worker_instance_id="worker-1", limit=limit, **options
    )


@in_turn("was_started, left_ms", [(True, 57_000), (False, 60_000)])
async def test_a_run_handed_back_has_not_waited_and_loses_time_only_if_it_was_started(
    engine: Engine, given: Given, clock: Clock, *, was_started: bool, left_ms: int
) -> None:
    handle = await given.claimed(policy=LONG)
    await clock.advance(seconds=3)
    await engine.hand_back(handle, was_started=was_started)
    await clock.advance(seconds=100)
    (run,) = await claim(engine)
    assert (run.handle.kind, run.has_waited, run.attempt_index) == (HandleKind.RESUMED, False, 0)
    assert run.attempt_timeout_ms == left_ms


async def test_an_attempt_that_has_waited_still_has_after_a_hand_back(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await engine.suspend(handle, suspend_args())
    await engine.resume_execution(execution_id=handle.execution_id)
    (run,) = await claim(engine)
    assert run.has_waited
    await engine.hand_back(run.handle)
    (run,) = await claim(engine)
    assert run.has_waited


async def test_the_next_attempt_has_not_waited(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(policy={"retry_policy": {"max_retries": 1}})
    await engine.suspend(handle, suspend_args())
    await engine.resume_execution(execution_id=handle.execution_id)
    (run,) = await claim(engine)
    await engine.fail(run.handle, reason="once")
    await clock.advance(seconds=60)
    (run,) = await claim(engine)
    assert (run.attempt_index, run.has_waited) == (1, False)
    await engine.hand_back(run.handle)
    (run,) = await claim(engine)
    assert (run.attempt_index, run.has_waited) == (1, False)


async def test_an_attempt_with_a_short_timeout_is_not_claimed_before_a_slot_is_free(
    engine: Engine, given: Given, rows: Rows, lasting_watermarks: None
) -> None:
    wrong: tuple[Any, ...] = (-1, 2**31, True, "1")
    for slots in wrong:
        with pytest.raises(EngineError, match="slots"):
            await claim(engine, slots=slots)
    ids = [await given.created(policy=policy) for policy in (SHORT, SHORT, LONG, SHORT, None)]
    first = await claim(engine, slots=1)
    assert [run.execution_id for run in first] == [ids[0], ids[2], ids[4]]
    assert len(await rows.of("ready")) == 2
    assert await claim(engine, slots=0) == []
    second = await claim(engine)
    assert [run.execution_id for run in second] == [ids[1], ids[3]]
    assert await engine.find_inconsistencies() == []

"""An attempt that is put aside: what its next claim tells of it, and how much of its time is left."""

from typing import Any

import pytest

from engine.cases import in_turn
from engine.waits import args
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


@in_turn("was_started", [True, False])
async def test_what_was_handed_back_goes_on_without_having_waited(
    engine: Engine, given: Any, *, was_started: bool
) -> None:
    await engine.hand_back(await given.claimed(), was_started=was_started)
    (run,) = await claim(engine)
    assert (run.handle.kind, run.has_waited, run.attempt_index) == (HandleKind.RESUMED, False, 0)


async def test_a_wait_that_is_over_stays_over_for_its_attempt(engine: Engine, given: Any) -> None:
    handle = await given.claimed()
    await engine.suspend(handle, args())
    await engine.resume_execution(execution_id=handle.execution_id)
    (run,) = await claim(engine)
    assert run.has_waited
    await engine.hand_back(run.handle)
    (run,) = await claim(engine)
    assert run.has_waited


async def test_the_wait_of_an_earlier_attempt_is_not_one_of_the_next(engine: Engine, given: Any, clock: Any) -> None:
    handle = await given.claimed(policy={"retry_policy": {"max_retries": 1}})
    await engine.suspend(handle, args())
    await engine.resume_execution(execution_id=handle.execution_id)
    (run,) = await claim(engine)
    await engine.fail(run.handle, reason="once")
    await clock.advance(seconds=60)
    (run,) = await claim(engine)
    assert (run.attempt_index, run.has_waited) == (1, False)
    await engine.hand_back(run.handle)
    (run,) = await claim(engine)
    assert (run.attempt_index, run.has_waited) == (1, False)


@in_turn("was_started, left_ms", [(True, 57_000), (False, 60_000)])
async def test_a_lease_that_did_not_start_an_attempt_takes_none_of_its_time(
    engine: Engine, given: Any, clock: Any, *, was_started: bool, left_ms: int
) -> None:
    handle = await given.claimed(policy=LONG)
    await clock.advance(seconds=3)
    await engine.hand_back(handle, was_started=was_started)
    await clock.advance(seconds=100)
    (run,) = await claim(engine)
    assert run.attempt_timeout_ms == left_ms


async def test_what_has_little_time_is_not_claimed_to_wait_for_a_slot(
    engine: Engine, given: Any, rows: Any, lasting_watermarks: None
) -> None:
    ids = [await given.created(policy=policy) for policy in (SHORT, SHORT, LONG, SHORT, None)]
    first = await claim(engine, slots=1)
    assert [run.execution_id for run in first] == [ids[0], ids[2], ids[4]]
    assert len(await rows.of("ready")) == 2
    assert await claim(engine, slots=0) == []
    second = await claim(engine)
    assert [run.execution_id for run in second] == [ids[1], ids[3]]
    assert await engine.find_inconsistencies() == []


@in_turn("slots", [-1, 2**31, True, "1"])
async def test_a_wrong_number_of_slots_is_refused(engine: Engine, slots: Any) -> None:
    with pytest.raises(EngineError, match="slots"):
        await claim(engine, slots=slots)

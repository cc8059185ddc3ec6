"""Reads of one execution: state, info, result, and the wait for its end."""

import asyncio
from typing import Any
from uuid import uuid4

from engine.state import claim, refused
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import ExecutionInfo
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    StateVector,
    TerminalOutcome,
)

ABSENT = f"{{fp:1}}:{uuid4()}"


async def test_the_state_is_the_public_one(engine: Engine, given: Given) -> None:
    states = {
        (await given.reclaimable(lane_id="lost")).execution_id: PublicState.ACTIVE,
        (await given.claimed()).execution_id: PublicState.ACTIVE,
        (await given.backing_off()).execution_id: PublicState.DELAYED,
        await given.completed(): PublicState.COMPLETED,
        await given.failed(): PublicState.FAILED,
        await given.cancelled(): PublicState.CANCELLED,
        await given.created(): PublicState.WAITING,
        await given.delayed(): PublicState.DELAYED,
    }
    for execution_id, state in states.items():
        assert await engine.read_execution_state(execution_id) is state


async def test_an_unknown_execution_reads_as_none(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        for absent in (ABSENT, f"{{fp:32767}}:{uuid4()}"):
            assert await engine.read_execution_state(absent) is None
            assert await engine.read_execution_info(absent) is None
            assert await engine.read_execution_status(absent) is None
            assert await engine.get_execution_result(absent) is None


async def test_every_read_refuses_a_malformed_id(engine: Engine) -> None:
    wrong: list[tuple[Any, str]] = [
        (str(uuid4()), "MissingTag"),
        (None, "MissingTag"),
        (f"{{fp:x}}:{uuid4()}", "InvalidPartitionIndex"),
        ("{fp:1}:x", "InvalidUuid"),
        (f"{{fp:32768}}:{uuid4()}", "exceeds i16 range"),
        (f"{{fp:65535}}:{uuid4()}", "exceeds i16 range"),
    ]
    for execution_id, detail in wrong:
        await refused(engine.read_execution_state(execution_id), "invalid_input", detail)
        await refused(engine.read_execution_info(execution_id), "invalid_input", detail)
        await refused(engine.read_execution_status(execution_id), "invalid_input", detail)
        await refused(engine.get_execution_result(execution_id), "invalid_input", detail)
        await refused(engine.wait_for_ending(execution_id), "invalid_input", detail)


async def test_the_info_of_a_new_execution(engine: Engine, given: Given, clock: Clock) -> None:
    execution_id = await given.created(priority=7, execution_kind="resize", namespace="tenant", lane_id="lane")
    assert await engine.read_execution_info(execution_id.upper().replace("{FP", "{fp")) == (
        ExecutionInfo(
            execution_id=execution_id,
            namespace="tenant",  # type: ignore[arg-type]
            lane_id="lane",  # type: ignore[arg-type]
            priority=7,
            execution_kind="resize",
            state_vector=StateVector(
                lifecycle_phase=LifecyclePhase.RUNNABLE,
                ownership_state=OwnershipState.UNOWNED,
                eligibility_state=EligibilityState.ELIGIBLE_NOW,
                blocking_reason=BlockingReason.WAITING_FOR_WORKER,
                terminal_outcome=TerminalOutcome.NONE,
                attempt_state=AttemptState.PENDING_FIRST_ATTEMPT,
                public_state=PublicState.WAITING,
            ),
            public_state=PublicState.WAITING,
            created_at=await clock.now(),
            started_at=None,
            completed_at=None,
            current_attempt_index=0,
            flow_id=None,
            blocking_detail="",
        )
    )


async def test_the_info_follows_the_execution(engine: Engine, given: Given, clock: Clock) -> None:
    created_at = await clock.now()
    execution_id = await given.created(policy={"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 10}}})
    started_at = await clock.advance(seconds=1)
    await engine.fail((await given.claim()).handle, reason="busy")
    info = await engine.read_execution_info(execution_id)
    assert info is not None
    assert info.blocking_detail == f"retry backoff until {started_at + 10} (attempt 0 failed: busy)"
    await clock.advance(seconds=1)
    (claimed,) = await claim(engine)
    completed_at = await clock.advance(seconds=1)
    await engine.complete(claimed.handle)
    info = await engine.read_execution_info(execution_id)
    assert info is not None
    assert (info.created_at, info.started_at, info.completed_at) == (created_at, started_at, completed_at)
    assert (info.current_attempt_index, info.blocking_detail) == (1, "")
    assert (info.public_state, info.state_vector.terminal_outcome) == (PublicState.COMPLETED, TerminalOutcome.SUCCESS)


async def test_only_a_completed_execution_has_a_result(engine: Engine, given: Given, clock: Clock) -> None:
    for handle in (await given.claimed(), await given.backing_off(), await given.reclaimable(lane_id="lost")):
        assert await engine.get_execution_result(handle.execution_id) is None
    for ended in (
        await given.failed(lane_id="a"),
        await given.cancelled(),
        await given.completed(result=None, lane_id="b"),
    ):
        assert await engine.get_execution_result(ended) is None
    policy = {"stream_policy": {"retention_ttl_ms": 1000}}
    kept = await given.completed(result=b"kept", policy=policy, lane_id="other")
    assert await engine.get_execution_result(kept) == b"kept"
    await clock.advance(seconds=1)
    await parts_of(engine).retention.trim_batch()
    assert await engine.get_execution_result(kept) is None


async def test_the_server_time_is_the_clock_of_the_store(engine: Engine, clock: Clock) -> None:
    assert await engine.server_time_ms() == await clock.now()
    later = await clock.advance(seconds=3600)
    assert await engine.server_time_ms() == later


async def test_a_ping_succeeds_and_the_backend_label_is_postgres(engine: Engine) -> None:
    await engine.ping()
    assert engine.backend_label() == "postgres"


async def test_wait_for_ending_returns_the_outcome(
    engines: Engines, engine: Engine, given: Given, eventually: Eventually
) -> None:
    other = await engines()
    completed, failed, cancelled = [await given.claimed() for _ in range(3)]
    waiting = [
        asyncio.create_task(engine.wait_for_ending(handle.execution_id, timeout=60))
        for handle in (completed, failed, cancelled, completed)
    ]
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    assert not any(task.done() for task in waiting)
    await other.complete(completed, b"done")
    await other.fail(failed, reason="broke")
    await other.cancel(cancelled, "no need")
    endings = await asyncio.gather(*waiting)
    assert [(ended.outcome, ended.result, ended.reason) for ended in endings] == [
        (TerminalOutcome.SUCCESS, b"done", None),
        (TerminalOutcome.FAILED, None, "broke"),
        (TerminalOutcome.CANCELLED, None, "no need"),
        (TerminalOutcome.SUCCESS, b"done", None),
    ]


async def test_wait_for_ending_returns_at_once_for_an_ended_or_unknown_execution(engine: Engine, given: Given) -> None:
    ended = await engine.wait_for_ending(await given.completed(result=b"x"), timeout=60)
    assert ended.result == b"x"
    await refused(engine.wait_for_ending(ABSENT, timeout=60), "execution_not_found")
    running = await given.claimed()
    await refused(engine.wait_for_ending(running.execution_id, timeout=0.05), "timeout")

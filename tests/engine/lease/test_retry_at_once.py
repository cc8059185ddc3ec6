"""A retry without backoff is claimable at once: no timer, no promotion, and waiting claims wake up."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.cases import in_turn
from engine.state import RETRYABLE, attempts, claim, event_texts, lease_fields, pending_fields, vector
from engine.waits import triple
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.handle import Handle
from flowfabric.model.lease import RetryScheduled
from flowfabric.reconcile.loop import Reconciler

FIXED = {"type": "fixed", "delay_ms": 0}
BACKOFFS: dict[str, dict[str, Any]] = {
    "fixed": FIXED,
    "exponential": {"type": "exponential", "initial_delay_ms": 0, "max_delay_ms": 1000, "multiplier": 2.0},
    "capped": {"type": "exponential", "initial_delay_ms": 1000, "max_delay_ms": 0, "multiplier": 2.0},
    "jittered": {
        "type": "exponential",
        "initial_delay_ms": 0,
        "max_delay_ms": 1000,
        "multiplier": 2.0,
        "jitter": True,
    },
}


def at_once(backoff: dict[str, Any] = FIXED, **others: Any) -> dict[str, Any]:
    """A policy that retries without a pause."""
    return {"retry_policy": {"max_retries": 3, "backoff": backoff}, **others}


async def _timed_out(engine: Engine, handle: Handle) -> object:
    return await engine.expire_execution(execution_id=handle.execution_id, phase="attempt_timeout")


async def _swept(engine: Engine, handle: Handle) -> object:
    assert await parts_of(engine).timeouts.expire_due() == 1
    return None


FAILING: dict[str, Callable[[Engine, Handle], Awaitable[object]]] = {
    "fail": lambda engine, handle: engine.fail(handle, reason="no luck"),
    "fail_execution": lambda engine, handle: engine.fail_execution(**triple(handle), failure_reason="no luck"),
    "attempt timeout": _timed_out,
    "attempt timeout, swept": _swept,
}


@in_turn("how", FAILING)
async def test_a_retry_without_a_pause_is_claimable_at_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock, how: str
) -> None:
    handle = await given.claimed(policy=at_once(timeout_policy={"attempt_timeout_ms": 1000}))
    now = await clock.advance(seconds=1)
    outcome = await FAILING[how](engine, handle)
    if outcome is not None:
        assert isinstance(outcome, RetryScheduled)
        assert outcome.delay_until == now
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["delay_until"], row["blocking_detail"]) == (RETRYABLE, None, None)
    assert (await rows.of("timer"), len(await rows.of("ready"))) == ([], 1)
    assert (row["retry_count"], row["attempt_id"]) == (1, None)
    reason = "no luck" if how.startswith("fail") else "attempt_timeout"
    assert (row["failure_reason"], lease_fields(row)) == (reason, {})
    assert await pending_fields(engine, handle.execution_id) == {"retry_reason": reason, "previous_attempt_index": "0"}
    assert row["last_transition_at"] == now
    released = "failed_retry_scheduled" if how.startswith("fail") else "expired:attempt_timeout"
    assert await event_texts(rows, handle.execution_id) == ["acquired", f"released {released}"]
    assert [one["attempt_state"] for one in await attempts(rows, handle.execution_id)] == ["ended_failure"]
    assert await engine.find_inconsistencies() == []
    (claimed,) = await claim(engine)
    assert (claimed.execution_id, claimed.attempt_index, claimed.attempt_type) == (handle.execution_id, 1, "retry")


async def test_every_backoff_of_zero_means_no_pause(engine: Engine, given: Given, rows: Rows) -> None:
    handles = {name: await given.claimed(policy=at_once(backoff)) for name, backoff in BACKOFFS.items()}
    for name, handle in handles.items():
        await engine.fail(handle, reason="no luck")
        assert vector(await rows.execution(handle.execution_id)) == RETRYABLE, name


async def test_a_repeated_failure_gets_the_same_answer_and_needs_no_promotion(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(policy=at_once())
    first = await engine.fail(handle, reason="no luck")
    await clock.advance(seconds=5)
    async with rows.unchanged():
        assert await engine.fail(handle, reason="no luck") == first
        await Reconciler(engine).catch_up()
    explained = await engine.explain(handle.execution_id)
    assert not any(reason.kind == "delayed" for reason in explained.reasons)


async def test_retries_without_a_pause_end_after_max_retries(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.created(policy=at_once())
    for _ in range(4):
        (claimed,) = await claim(engine)
        await engine.fail(claimed.handle, reason="no luck")
    assert await claim(engine) == []
    assert (await rows.execution(execution_id))["public_state"] == "failed"


@pytest.mark.usefixtures("hints_only")
@in_turn("how", FAILING)
async def test_the_retry_wakes_a_waiting_claim(
    engine: Engine, engines: Engines, given: Given, clock: Clock, eventually: Eventually, how: str
) -> None:
    other = await engines()
    for waiter in (engine, other):
        handle = await given.claimed(policy=at_once(timeout_policy={"attempt_timeout_ms": 1000}))
        await clock.advance(seconds=1)
        wakeups = parts_of(waiter).wakeups
        waiting = asyncio.create_task(claim(waiter, max_wait_ms=60_000))
        await eventually(lambda wakeups=wakeups: wakeups._waiting.get("default"))
        await FAILING[how](engine, handle)
        async with asyncio.timeout(20):
            (claimed,) = await waiting
        assert claimed.execution_id == handle.execution_id
        await engine.complete(claimed.handle)


async def test_failures_of_one_batch_each_wait_for_their_own_backoff(engine: Engine, given: Given, rows: Rows) -> None:
    paused = [await given.claimed(policy=at_once({"type": "fixed", "delay_ms": 1000})) for _ in range(3)]
    soon = [await given.claimed(policy=at_once()) for _ in range(3)]
    last = [await given.claimed() for _ in range(3)]
    handles = [handle for three in zip(paused, soon, last, strict=True) for handle in three]
    await asyncio.gather(*(engine.fail(handle, reason="no luck") for handle in handles))
    states = [(await rows.execution(handle.execution_id))["public_state"] for handle in handles]
    assert states == ["delayed", "waiting", "failed"] * 3
    assert {one.execution_id for one in await claim(engine)} == {handle.execution_id for handle in soon}


async def test_a_resumed_attempt_is_retried_at_once(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed(policy=at_once())
    await engine.wait_children(handle)
    (resumed,) = await claim(engine)
    await engine.fail(resumed.handle, reason="no luck")
    assert vector(await rows.execution(handle.execution_id)) == RETRYABLE
    assert await engine.find_inconsistencies() == []


async def test_the_next_attempt_keeps_the_policy_given_for_it(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed(policy=at_once())
    outcome = await engine.fail_execution(
        **triple(handle), failure_reason="no luck", next_attempt_policy_json='{"a": 1}'
    )
    assert isinstance(outcome, RetryScheduled)
    assert outcome.next_attempt_index == 1
    (known,) = await rows.of("attempt", attempt_state="created")
    assert (known["attempt_index"], known["policy"]) == (1, '{"a": 1}')
    await claim(engine)
    assert [attempt.policy for attempt in await engine.list_attempts(handle.execution_id)] == [None, '{"a": 1}']

"""The acceptance checks 10 to 14 of the specification: suspend, signal and resume from end to end."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from engine.state import rounds
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric import Engine
from flowfabric.conditions import OperatorOnly, all_of_waitpoints
from flowfabric.model.event import CompletionOutcome
from flowfabric.outcomes import AlreadySatisfied

from .waiting import (
    APPENDED,
    HOUR_MS,
    READY,
    RESUMABLE,
    SATISFIED,
    THREE,
    A,
    Waiting,
    completions,
    refused,
    suspended,
    vector,
    waitpoint_states,
)


@pytest.fixture
async def engine(keyless: Engine) -> Engine:
    """An engine whose store has a signing key, `a`."""
    await keyless.seed_waitpoint_hmac_secret(kid="a", secret_hex=A)
    return keyless


# 10


async def test_10_two_deliveries_with_one_idempotency_key_are_one_signal(
    engine: Engine, engines: Engines, given: Given, rows: Rows
) -> None:
    other = await engines()
    for nth in rounds(5, whole=20):
        wait = await suspended(engine, await given.claimed(), READY)
        rival = Waiting(other, wait.held, wait.details)
        answers = await asyncio.gather(
            wait.signal("ready", idempotency_key="once"), rival.signal("ready", idempotency_key="once")
        )
        kinds = Counter(type(answer).__name__ for answer in answers)
        assert kinds == {"Accepted": 1, "SignalDuplicate": 1}, nth
        (accepted,) = [answer.signal_id for answer in answers if hasattr(answer, "effect")]
        (existing,) = [answer.existing_signal_id for answer in answers if not hasattr(answer, "effect")]
        assert existing == accepted
        assert len(await rows.of("signal", execution_id=uuid_of(wait.execution_id))) == 1
        assert await completions(rows, wait.execution_id) == [CompletionOutcome.RESUMABLE]
        await engine.complete((await wait.claim()).handle, None)


# 11


async def test_11_the_fourth_signal_exceeds_a_limit_of_three(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await suspended(engine, await given.claimed(), READY)
    for _ in range(3):
        await wait.signal("other", max_signals_per_execution=3)
    async with rows.unchanged():
        await refused(wait.signal("other", max_signals_per_execution=3), "signal_limit_exceeded")


async def test_11_the_policy_of_the_execution_can_set_the_limit(engine: Engine, given: Given) -> None:
    wait = await suspended(engine, await given.claimed(policy={"max_signals_per_execution": 3}), READY)
    for _ in range(3):
        await wait.signal("other")
    await refused(wait.signal("other", max_signals_per_execution=10), "signal_limit_exceeded")


async def test_11_payloads_have_a_maximum_size_and_are_returned_unchanged(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await suspended(engine, await given.claimed(), READY)
    async with rows.unchanged():
        await refused(wait.signal("other", payload=b"x" * 65_537), "payload_too_large")
    payloads = [bytes(range(256)), b"x" * 65_536, b"", None]
    for payload in payloads:
        await wait.signal("other", payload=payload)
    assert wait.handle is not None
    assert [signal.payload for signal in await engine.observe_signals(wait.handle)] == payloads


# 12


async def test_12_the_signal_or_the_policy_can_delay_the_resume(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    by_signal = await suspended(engine, await given.claimed(), READY)
    await by_signal.signal("ready", resume_delay_ms=30_000)
    by_policy = await suspended(engine, await given.claimed(), READY, resume_policy={"resume_delay_ms": 30_000})
    await by_policy.signal("ready")
    at_once = await suspended(engine, await given.claimed(), READY, resume_policy={"resume_delay_ms": 30_000})
    await at_once.signal("ready", resume_delay_ms=0)
    assert await vector(rows, at_once.execution_id) == RESUMABLE
    for wait in (by_signal, by_policy):
        row = await rows.execution(wait.execution_id)
        assert (row["public_state"], row["blocking_reason"]) == ("delayed", "waiting_for_resume_delay")
        assert row["blocking_detail"] == "resume delay 30000ms after signal ready"
        await refused(wait.claim(), "execution_not_leaseable")
    await clock.advance(seconds=31)
    for wait in (by_signal, by_policy):
        await engine.promote_delayed(wait.execution_id)
        assert await vector(rows, wait.execution_id) == RESUMABLE
        assert (await wait.claim()).attempt_index == 0


async def test_12_an_operator_can_delay_the_resume(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    wait = await suspended(engine, await given.claimed(), OperatorOnly())
    (key,) = wait.points
    assert await wait.effect("ready", key) == (APPENDED, "no_op")
    resumed = await engine.resume_execution(
        execution_id=wait.execution_id, trigger_type="operator", resume_delay_ms=30_000
    )
    assert resumed.public_state == "delayed"
    row = await rows.execution(wait.execution_id)
    assert row["blocking_detail"] == "resume delay 30000ms"
    await refused(wait.claim(), "execution_not_leaseable")
    await refused(wait.signal("ready", key), "target_not_signalable")
    await clock.advance(seconds=31)
    await engine.promote_delayed(wait.execution_id)
    await wait.claim()
    assert await completions(rows, wait.execution_id) == []


# 13


async def time_out(engine: Engine, wait: Waiting) -> str:
    """Expire a wait; return the behaviour that was applied, or why none was."""
    outcome = await engine.expire_suspension(wait.execution_id)
    return outcome.reason if isinstance(outcome, AlreadySatisfied) else outcome.behavior_applied


def terminal(outcome: str) -> tuple[str, ...]:
    return ("terminal", "unowned", "not_applicable", "none", outcome, "attempt_terminal", outcome)


@pytest.mark.parametrize(
    ("behaviour", "outcome", "attempt", "completion"),
    [
        ("fail", "failed", "ended_failure", CompletionOutcome.FAILED),
        ("cancel", "cancelled", "ended_cancelled", CompletionOutcome.CANCELLED),
        ("expire", "expired", "ended_failure", CompletionOutcome.EXPIRED),
    ],
)
async def test_13_a_timeout_ends_the_execution(
    engine: Engine, given: Given, rows: Rows, clock: Clock, behaviour: str, outcome: str, attempt: str, completion: int
) -> None:
    retrying = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1}}}
    wait = await suspended(
        engine,
        await given.claimed(policy=retrying),
        READY,
        timeout_at=await clock.now() + 60_000,
        timeout_behavior=behaviour,
    )
    assert await time_out(engine, wait) == "not_yet_due"
    await clock.advance(seconds=61)
    assert await time_out(engine, wait) == behaviour
    assert await vector(rows, wait.execution_id) == terminal(outcome)
    row = await rows.execution(wait.execution_id)
    assert row["failure_reason"] == f"suspension_timeout:{behaviour}"
    assert row["completed_at"] is not None
    assert (row["suspension_timeout_at"], row["retry_count"]) == (None, 0)
    (tried,) = await engine.list_attempts(wait.execution_id)
    assert tried.attempt_state == attempt
    (suspension,) = await rows.of("suspension")
    assert suspension["close_reason"] == f"timed_out_{behaviour}"
    assert await waitpoint_states(rows, wait) == [("closed", f"timed_out_{behaviour}")]
    assert await completions(rows, wait.execution_id) == [completion]
    async with rows.unchanged():
        assert await time_out(engine, wait) == "not_suspended_cleaned"
        await refused(wait.signal("ready"), "target_not_signalable")
    assert await engine.find_inconsistencies() == []


@pytest.mark.parametrize("behaviour", ["auto_resume_with_timeout_signal", "auto_resume"])
async def test_13_a_timeout_can_resume_with_a_timeout_signal(
    engine: Engine, given: Given, rows: Rows, clock: Clock, behaviour: str
) -> None:
    wait = await suspended(
        engine, await given.claimed(), READY, timeout_at=await clock.now() + 60_000, timeout_behavior=behaviour
    )
    await wait.signal("other", max_signals_per_execution=1)
    await clock.advance(seconds=61)
    assert await time_out(engine, wait) == "auto_resume_with_timeout_signal"
    assert await vector(rows, wait.execution_id) == RESUMABLE
    (suspension,) = await rows.of("suspension")
    assert suspension["close_reason"] == "timed_out_auto_resume"
    assert await waitpoint_states(rows, wait) == [("closed", "timed_out_auto_resume")]
    assert await completions(rows, wait.execution_id) == []
    claimed = await wait.claim()
    other, last = await engine.observe_signals(claimed.handle)
    assert (other.signal_name, other.satisfier) == ("other", False)
    assert (last.signal_name, last.signal_category, last.source_type) == ("timeout", "timeout", "system")
    assert (last.source_identity, last.payload, last.satisfier) == ("suspension_timeout", None, True)


async def test_13_a_timeout_can_escalate_to_an_operator_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    at = await clock.now() + 60_000
    wait = await suspended(engine, await given.claimed(), READY, timeout_at=at, timeout_behavior="escalate")
    await clock.advance(seconds=61)
    assert await time_out(engine, wait) == "escalate"
    row = await rows.execution(wait.execution_id)
    assert (row["lifecycle_phase"], row["blocking_reason"]) == ("suspended", "paused_by_operator")
    assert row["blocking_detail"] == f"suspension escalated: timeout at {at}"
    (suspension,) = await rows.of("suspension")
    assert (suspension["reason_code"], suspension["timeout_at"]) == ("waiting_for_operator_review", None)
    assert (suspension["timeout_behavior"], suspension["closed_at"]) == (None, None)
    async with rows.unchanged():
        assert await time_out(engine, wait) == "not_yet_due"
    assert await wait.effect("ready") == (SATISFIED, SATISFIED)


async def test_13_of_a_timeout_and_a_satisfying_signal_exactly_one_wins(
    engine: Engine, engines: Engines, given: Given, rows: Rows, clock: Clock
) -> None:
    other = await engines()
    waits = [
        await suspended(engine, await given.claimed(), READY, timeout_at=await clock.now() + HOUR_MS)
        for _ in rounds(30, whole=100)
    ]
    await clock.advance(ms=HOUR_MS + 1)

    async def signal_and_expire(wait: Waiting) -> tuple[bool, bool]:
        expiry: Any = other.expire_suspension(wait.execution_id)
        answers = await asyncio.gather(wait.signal("ready"), expiry, return_exceptions=True)
        return hasattr(answers[0], "effect"), hasattr(answers[1], "behavior_applied")

    for wait, (has_signalled, has_timed_out) in zip(
        waits, await asyncio.gather(*map(signal_and_expire, waits)), strict=True
    ):
        assert has_signalled != has_timed_out
        expected = CompletionOutcome.RESUMABLE if has_signalled else CompletionOutcome.FAILED
        assert await completions(rows, wait.execution_id) == [expected]
    assert await engine.find_inconsistencies() == []


# 14


async def test_14_a_resumed_attempt_keeps_its_remaining_timeout(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    await clock.stop()
    run = await given.run(policy={"timeout_policy": {"attempt_timeout_ms": 10_000}}, lease_ttl_ms=60_000)
    await clock.advance(seconds=5)
    wait = await suspended(engine, run.handle, READY)
    await clock.advance(seconds=60)
    assert type(await engine.expire_execution(wait.execution_id, "attempt_timeout")).__name__ == "NotYetDue"
    await wait.signal("ready")
    claimed = await wait.claim()
    row = await rows.execution(wait.execution_id)
    remaining_ms = row["attempt_timeout_at"] - row["claimed_at"]
    assert remaining_ms == 5000
    await clock.advance(ms=remaining_ms)
    await engine.expire_execution(wait.execution_id, "attempt_timeout")
    await refused(engine.complete(claimed.handle, b"late"), "execution_not_active")


async def test_14_the_execution_deadline_passes_while_suspended(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(execution_deadline_at=await clock.now() + 10_000)
    wait = await suspended(engine, handle, all_of_waitpoints(THREE), keys=THREE)
    await clock.advance(seconds=11)
    await engine.expire_execution(wait.execution_id, "execution_deadline")
    assert await vector(rows, wait.execution_id) == terminal("expired")
    (suspension,) = await rows.of("suspension")
    assert suspension["close_reason"] == "expired:execution_deadline"
    assert await waitpoint_states(rows, wait) == [("closed", "expired:execution_deadline")] * 3
    (tried,) = await engine.list_attempts(wait.execution_id)
    assert tried.attempt_state == "ended_failure"
    assert await completions(rows, wait.execution_id) == [CompletionOutcome.EXPIRED]
    await refused(wait.signal("x", "a"), "target_not_signalable")

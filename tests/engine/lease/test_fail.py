"""Fail an attempt: when it is retried, how long the retry waits, and what a repeated call returns."""

from typing import Any

from engine.state import (
    BACKING_OFF,
    FAILED,
    RETRYABLE,
    attempts,
    claim,
    event_texts,
    lease_fields,
    pending_fields,
    refused,
    vector,
)
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import FailureClass, FailureReason
from flowfabric.model.lease import RetryScheduled, TerminalFailed


def retrying(max_retries: int = 3, **backoff: Any) -> dict[str, Any]:
    """A policy that retries with this backoff, by default a fixed one."""
    backoff = backoff or {"type": "fixed", "delay_ms": 1000}
    return {"retry_policy": {"max_retries": max_retries, "backoff": backoff}}


async def test_a_failure_with_no_retry_left_ends_the_execution(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    began = await clock.now()
    claimed = await given.run(tags={"ff.instance_id": "i-1"})
    worker_no = (await rows.execution(claimed.execution_id))["worker_no"]
    now = await clock.advance(seconds=1)
    assert await engine.fail(claimed.handle, reason="disk full") == TerminalFailed()
    row = await rows.execution(claimed.execution_id)
    assert vector(row) == FAILED
    assert {row[stamp] for stamp in ("completed_at", "last_transition_at", "last_mutation_at")} == {now}
    assert (row["failure_reason"], row["retry_count"], row["delay_until"]) == ("disk full", 0, None)
    assert (row["lease_epoch"], row["attempt_id"], lease_fields(row)) == (1, claimed.attempt_id, {})
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"], attempt["failure_category"]) == (
        "ended_failure",
        "disk full",
        "transient",
    )
    assert (attempt["attempt_id"], attempt["lease_id"]) == (claimed.attempt_id, claimed.lease_id)
    assert (attempt["started_at"], attempt["ended_at"], attempt["worker_no"]) == (began, now, worker_no)
    assert row["result_payload"] is None
    assert await event_texts(rows, claimed.execution_id) == [
        "tag_attached",
        "acquired",
        "released failed_terminal>failed",
    ]
    event = (await rows.events(claimed.execution_id))[2]
    assert (event["lease_id"], event["attempt_index"], event["instance_tag"]) == (claimed.lease_id, 0, "i-1")


async def test_a_failure_with_a_retry_left_waits_for_its_backoff(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    claimed = await given.run(policy=retrying())
    now = await clock.advance(seconds=1)
    assert await engine.fail(claimed.handle, reason="busy") == RetryScheduled(delay_until=now + 1000)
    row = await rows.execution(claimed.execution_id)
    assert vector(row) == BACKING_OFF
    assert row["blocking_detail"] == f"retry backoff until {now + 1000} (attempt 0 failed: busy)"
    assert (row["delay_until"], row["retry_count"], row["failure_reason"]) == (now + 1000, 1, "busy")
    assert (await rows.timers(claimed.execution_id), await rows.of("ready")) == ({"delay": now + 1000}, [])
    assert await pending_fields(engine, claimed.execution_id) == {"retry_reason": "busy", "previous_attempt_index": "0"}
    assert (row["attempt_id"], row["lease_epoch"], row["attempt_count"]) == (None, 1, 1)
    assert (row["completed_at"], row["last_transition_at"], row["last_mutation_at"]) == (None, now, now)
    assert lease_fields(row) == {}
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["attempt_id"]) == ("ended_failure", claimed.attempt_id)
    assert await event_texts(rows, claimed.execution_id) == ["acquired", "released failed_retry_scheduled"]
    assert await engine.get_execution_result(claimed.execution_id) is None


async def test_a_backoff_ends_exactly_at_its_time(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    failed = await given.backing_off(delay_ms=1000)
    await clock.advance(ms=999)
    assert await claim(engine) == []
    now = await clock.advance(ms=1)
    assert await parts_of(engine).delays.promote_due() == 1
    row = await rows.execution(failed.execution_id)
    assert (vector(row), row["delay_until"], row["blocking_detail"]) == (RETRYABLE, None, None)
    assert row["last_transition_at"] == now
    assert len(await claim(engine)) == 1


async def test_an_execution_is_retried_as_often_as_its_policy_says(engine: Engine, given: Given, clock: Clock) -> None:
    for most in (0, 1, 3):
        handle = await given.claimed(policy=retrying(most))
        for _ in range(most):
            assert isinstance(await engine.fail(handle, reason="again"), RetryScheduled)
            await clock.advance(seconds=1)
            (claimed,) = await claim(engine)
            handle = claimed.handle
        assert await engine.fail(handle, reason="enough") == TerminalFailed()
    for policy in (None, {}, {"max_reclaim_count": 5}):
        handle = await given.claimed(policy=policy)
        assert await engine.fail(handle, reason="x") == TerminalFailed(), policy
        assert await engine.get_execution_result(handle.execution_id) is None


async def test_an_empty_retry_policy_retries_three_times_from_a_second_on(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handle = await given.claimed(policy={"retry_policy": {}})
    for delay_ms in (1000, 2000, 4000):
        now = await clock.now()
        assert await engine.fail(handle, reason="x") == RetryScheduled(delay_until=now + delay_ms)
        await clock.advance(ms=delay_ms)
        (claimed,) = await claim(engine)
        handle = claimed.handle
    assert await engine.fail(handle, reason="x") == TerminalFailed()


CATEGORIES: list[tuple[str, Any, list[str], bool]] = [
    ("transient", None, [], True),
    ("infra_crash", None, [], True),
    ("timeout", None, [], True),
    (FailureClass.PERMANENT, None, [], False),
    ("cancelled", None, [], False),
    ("transient", None, ["timeout"], False),
    ("timeout", None, ["transient", "timeout"], True),
    ("transient", "rate_limit", ["rate_limit"], True),
    ("permanent", "rate_limit", ["rate_limit"], True),
    ("transient", b"rate_limit", ["rate_limit"], True),
    ("transient", "permanent", [], False),
    ("transient", "permanent", ["permanent"], False),
    ("transient", "cancelled", [], False),
    ("transient", "", ["transient"], True),
    ("transient", b"", ["transient"], True),
    ("transient", b"\xff", ["transient"], True),
    ("transient", "größe ✓", ["größe ✓"], True),
]


async def test_the_category_decides_whether_a_failure_is_retried(engine: Engine, given: Given, rows: Rows) -> None:
    for word, detail, retryable, is_retried in CATEGORIES:
        policy = retrying()
        policy["retry_policy"]["retryable_categories"] = retryable
        handle = await given.claimed(policy=policy)
        reason = FailureReason("broke", detail=detail)
        outcome = await engine.fail(handle, reason=reason, classification=word)
        assert isinstance(outcome, RetryScheduled if is_retried else TerminalFailed), (word, detail, retryable)
        (attempt,) = await attempts(rows, handle.execution_id)
        named = detail.decode("utf-8", "ignore") if isinstance(detail, bytes) else detail
        assert attempt["failure_category"] == (named or word)
        assert attempt["failure_reason"] == "broke"


BACKOFFS: list[tuple[dict[str, Any], list[int]]] = [
    ({"type": "fixed", "delay_ms": 700}, [700, 700, 700]),
    ({"type": "fixed", "delay_ms": 0}, [0, 0, 0]),
    ({"type": "fixed"}, [1000, 1000, 1000]),
    ({"type": "exponential", "initial_delay_ms": 10, "max_delay_ms": 80, "multiplier": 3}, [10, 30, 80, 80]),
    ({"type": "exponential", "initial_delay_ms": 10, "max_delay_ms": 999, "multiplier": 1.55}, [10, 15, 24, 37]),
    ({"type": "exponential", "initial_delay_ms": 50, "max_delay_ms": 5, "multiplier": 2}, [5, 5]),
    ({"type": "exponential", "initial_delay_ms": 8, "max_delay_ms": 999, "multiplier": 0.5}, [8, 4, 2]),
]


async def test_each_retry_waits_for_its_backoff(engine: Engine, given: Given, clock: Clock) -> None:
    for backoff, delays in BACKOFFS:
        handle = await given.claimed(policy=retrying(len(delays), **backoff))
        for delay_ms in delays:
            now = await clock.now()
            assert await engine.fail(handle, reason="x") == RetryScheduled(delay_until=now + delay_ms), backoff
            await clock.advance(ms=delay_ms)
            (claimed,) = await claim(engine)
            handle = claimed.handle
        await engine.complete(handle)


async def test_jitter_draws_from_the_upper_half_of_the_delay(engine: Engine, given: Given, clock: Clock) -> None:
    numbers = {"initial_delay_ms": 1000, "max_delay_ms": 9000, "multiplier": 2, "jitter": True}
    now = await clock.now()
    drawn = set()
    for _ in range(25):
        outcome = await engine.fail(await given.claimed(policy=retrying(1, type="exponential", **numbers)), reason="x")
        assert isinstance(outcome, RetryScheduled)
        drawn.add(outcome.delay_until - now)
    assert min(drawn) >= 500
    assert max(drawn) <= 1000
    assert len(drawn) > 10
    assert max(drawn) - min(drawn) > 250


async def test_a_failure_is_never_refused_for_its_message(engine: Engine, given: Given, rows: Rows) -> None:
    replaced = "\N{REPLACEMENT CHARACTER}"
    messages = [
        ("nul \0 byte", f"nul {replaced} byte"),
        ("half \ud800 a character", "half ? a character"),
        ("", ""),
        ("✓" * 400_000, FailureReason("✓" * 400_000).bounded().message),
    ]
    for policy in (None, retrying()):
        for message, stored in messages:
            handle = await given.claimed(policy=policy)
            wrong = "classification: expected one of"
            await refused(engine.fail(handle, reason="x", classification="odd"), "invalid_input", wrong)
            assert await engine.fail(handle, reason=FailureReason(message, detail=message[:50]))
            assert (await rows.execution(handle.execution_id))["failure_reason"] == stored
            (attempt,) = await attempts(rows, handle.execution_id)
            assert attempt["failure_reason"] == stored
            assert attempt["failure_category"] == (stored[:50] or "transient")


async def test_passing_the_claim_saves_reading_the_policy_and_decides_the_same(
    engine: Engine, given: Given, clock: Clock
) -> None:
    claimed = await given.run(policy=retrying(1))
    now = await clock.now()
    assert await engine.fail(claimed.handle, reason="x", claimed=claimed) == RetryScheduled(delay_until=now + 1000)
    await clock.advance(seconds=1)
    (again,) = await claim(engine)
    assert again.retry_count == 1
    assert await engine.fail(again.handle, reason="x", claimed=again) == TerminalFailed()


async def test_a_repeated_failure_gets_the_first_answer_and_writes_nothing(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    ended, retried = await given.claimed(), await given.claimed(policy=retrying())
    assert await engine.fail(ended, reason="x") == TerminalFailed()
    first = await engine.fail(retried, reason="x")
    await clock.advance(ms=500)
    async with rows.unchanged():
        assert await engine.fail(ended, reason="x") == TerminalFailed()
        assert await engine.fail(retried, reason="y") == first
        assert await engine.fail(retried, reason="y", classification="permanent") == first


async def test_a_failure_may_be_repeated_after_its_backoff(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.backing_off(delay_ms=1000)
    now = await clock.advance(seconds=2)
    await parts_of(engine).delays.promote_due()
    async with rows.unchanged():
        outcome = await engine.fail(handle, reason="x")
        assert isinstance(outcome, RetryScheduled)
        assert 0 < outcome.delay_until <= now


async def test_a_failure_cannot_be_repeated_once_the_retry_was_claimed(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.backing_off(delay_ms=1000)
    await clock.advance(seconds=1)
    (claimed,) = await claim(engine)
    async with rows.unchanged():
        await refused(engine.fail(handle, reason="x"), "lease_conflict")
    await engine.fail(claimed.handle, reason="x")
    async with rows.unchanged():
        await refused(engine.fail(handle, reason="x"), "lease_conflict")


async def test_a_failure_does_not_repeat_another_ending(engine: Engine, given: Given, rows: Rows) -> None:
    completed, cancelled, retried = [await given.claimed() for _ in range(3)]
    await engine.complete(completed)
    await engine.cancel(cancelled, "x")
    retried = await given.backing_off()
    await engine.cancel_execution(execution_id=retried.execution_id, reason="x")
    async with rows.unchanged():
        for handle, outcome in ((completed, "success"), (cancelled, "cancelled"), (retried, "cancelled")):
            refusal = await refused(engine.fail(handle, reason="x"), "execution_not_active")
            assert refusal.detail["terminal_outcome"] == outcome  # type: ignore[index]

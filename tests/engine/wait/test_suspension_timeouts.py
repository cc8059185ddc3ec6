"""Suspension timeouts: the effect of each behavior, the sweep, and the expiry of unused pending waitpoints."""

import asyncio
import logging
from typing import Any

import asyncpg
import pytest

from engine.sending import Waiting, signals, waiting
from engine.state import CANCELLED, FAILED, RESUMABLE, attempts, claim, event_texts, lease_fields, refused, vector
from engine.waits import EXPIRED, on_all, suspension, waitpoints
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.wait import timeout
from flowfabric.model.lease import AlreadySatisfied
from flowfabric.model.states import PublicState, TimeoutBehavior
from flowfabric.model.suspension import SuspensionExpired
from flowfabric.reconcile import due
from flowfabric.reconcile.due import read_due
from flowfabric.reconcile.loop import Reconciler

ESCALATED = "suspended/unowned/not_applicable/paused_by_operator/none/attempt_interrupted/suspended"
ABSENT = "{fp:3}:11111111-1111-4111-8111-111111111111"
MINUTE = 60_000
LIMIT = 10


async def timed(engine: Engine, given: Given, clock: Clock, behavior: str | None, **overrides: Any) -> Waiting:
    """An execution suspended on two waitpoints with a timeout of a minute."""
    request = on_all("a", "b", timeout_at=await clock.now() + MINUTE, timeout_behavior=behavior)
    return await waiting(engine, given, request, **overrides)


ENDS: list[tuple[str | None, str, str, str]] = [
    ("fail", FAILED, "ended_failure", "failed"),
    (None, FAILED, "ended_failure", "failed"),
    ("cancel", CANCELLED, "ended_cancelled", "cancelled"),
    ("expire", EXPIRED, "ended_failure", "expired"),
]
"""The behavior, the state vector it leads to, the state of the attempt, and the outcome of the event."""


async def test_a_timeout_ends_the_execution_as_its_behavior_says(
    engine: Engine, given: Given, rows: Rows, clock: Clock, subtests: pytest.Subtests
) -> None:
    for behavior, left, attempt, outcome in ENDS:
        with subtests.test(f"{behavior}"):
            await check_end(engine, given, rows, clock, behavior, left, attempt, outcome)


async def check_end(
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    behavior: str | None,
    left: str,
    attempt: str,
    outcome: str,
) -> None:
    """Assert what a timeout of this behavior leaves behind."""
    retries = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1}}}
    wait = await timed(engine, given, clock, behavior, policy=retries)
    await wait.send("x", "a")
    now = await clock.advance(ms=MINUTE)
    applied = behavior or "fail"
    reason = f"timed_out_{applied}"
    assert await engine.expire_suspension(wait.execution_id) == SuspensionExpired(
        behavior_applied=TimeoutBehavior(applied)
    )
    row = await rows.execution(wait.execution_id)
    assert (vector(row), lease_fields(row)) == (left, {})
    assert row["failure_reason"] == f"suspension_timeout:{applied}"
    assert row["cancelled_by"] == ("system_timeout" if applied == "cancel" else None)
    assert (row["suspension_timeout_at"], row["delay_until"], row["blocking_detail"]) == (None, None, None)
    assert await rows.timers(wait.execution_id) == {}
    assert {row[name] for name in ("completed_at", "last_transition_at", "last_mutation_at")} == {now}
    (ended,) = await attempts(rows, wait.execution_id)
    assert (ended["attempt_state"], ended["ended_at"]) == (attempt, now)
    closed = await suspension(rows, wait.execution_id)
    assert (closed["closed_at"], closed["close_reason"], closed["satisfied_at"]) == (now, reason, None)
    for point in await waitpoints(rows, wait.execution_id):
        assert (point["state"], point["closed_at"], point["close_reason"]) == ("closed", now, reason)
        assert point["satisfied_at"] is None
    assert (await event_texts(rows, wait.execution_id))[2:] == ["signal", f"ended {reason}>{outcome}"]
    assert len(await signals(rows, wait.execution_id)) == 1
    async with rows.unchanged():
        await refused(wait.send("x", "b"), "target_not_signalable")
        again = await engine.expire_suspension(wait.execution_id)
    assert again == AlreadySatisfied(reason="not_suspended_cleaned")


async def test_a_timeout_may_resume_with_a_timeout_signal(
    engine: Engine, given: Given, rows: Rows, clock: Clock, subtests: pytest.Subtests
) -> None:
    for behavior in ("auto_resume", "auto_resume_with_timeout_signal"):
        with subtests.test(behavior):
            await check_auto_resume(engine, given, rows, clock, behavior)


async def check_auto_resume(engine: Engine, given: Given, rows: Rows, clock: Clock, behavior: str) -> None:
    """Assert what a timeout that resumes leaves behind."""
    policy = {"max_signals_per_execution": 1}
    wait = await timed(engine, given, clock, behavior, policy=policy)
    first = await wait.send("x", "a", payload=b"1")
    now = await clock.advance(ms=MINUTE)
    (parked,) = await attempts(rows, wait.execution_id)
    outcome = await engine.expire_suspension(wait.execution_id)
    assert outcome == SuspensionExpired(behavior_applied=TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL)
    row = await rows.execution(wait.execution_id)
    assert vector(row) == RESUMABLE
    assert (row["suspension_timeout_at"], row["blocking_detail"]) == (None, None)
    assert await rows.timers(wait.execution_id) == {}
    assert await attempts(rows, wait.execution_id) == [parked]
    closed = await suspension(rows, wait.execution_id)
    assert (closed["closed_at"], closed["close_reason"]) == (now, "timed_out_auto_resume")
    assert {(point["state"], point["close_reason"]) for point in await waitpoints(rows, wait.execution_id)} == {
        ("closed", "timed_out_auto_resume")
    }
    assert [point["signal_count"] for point in await waitpoints(rows, wait.execution_id)] == [1, 0]
    assert await event_texts(rows, wait.execution_id) == ["acquired", "released suspend", "signal"]
    stored = (await signals(rows, wait.execution_id))[-1]
    assert (stored["waitpoint_id"], stored["waitpoint_key"], stored["payload"]) == (None, "__timeout__", None)
    (resumed,) = await claim(engine)
    assert resumed.attempt_id == wait.handle.attempt_id
    seen = await engine.observe_signals(resumed.handle)
    assert [(one.signal_id == first.signal_id, one.satisfier) for one in seen] == [(True, True), (False, True)]
    last = seen[-1]
    assert (last.signal_name, last.signal_category, last.source_type) == ("timeout", "timeout", "system")
    assert (last.source_identity, last.payload, last.accepted_at) == ("suspension_timeout", None, now)
    await refused(wait.send("x", "b"), "target_not_signalable")


async def test_a_timeout_may_escalate_to_an_operator_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await timed(engine, given, clock, "escalate")
    timeout_at = await clock.now() + MINUTE
    now = await clock.advance(ms=MINUTE + 5)
    points = await waitpoints(rows, wait.execution_id)
    assert {point["expires_at"] for point in points} == {timeout_at}
    (parked,) = await attempts(rows, wait.execution_id)
    assert (await engine.expire_suspension(wait.execution_id)) == SuspensionExpired(
        behavior_applied=TimeoutBehavior.ESCALATE
    )
    row = await rows.execution(wait.execution_id)
    assert (vector(row), row["suspension_timeout_at"]) == (ESCALATED, None)
    assert await rows.timers(wait.execution_id) == {}
    assert row["blocking_detail"] == f"suspension escalated: timeout at {timeout_at}"
    assert {row[name] for name in ("last_transition_at", "last_mutation_at")} == {now}
    still = await suspension(rows, wait.execution_id)
    assert (still["reason_code"], still["timeout_at"], still["timeout_behavior"]) == (
        "waiting_for_operator_review",
        None,
        None,
    )
    assert still["closed_at"] is None
    assert await waitpoints(rows, wait.execution_id) == [{**point, "expires_at": None} for point in points]
    listed = (await engine.list_pending_waitpoints(execution_id=wait.execution_id)).entries
    assert [(point.state, point.expires_at) for point in listed] == [("active", None)] * len(points)
    assert await attempts(rows, wait.execution_id) == [parked]
    assert await event_texts(rows, wait.execution_id) == ["acquired", "released suspend"]
    # The sweeps delete claims whose leases have ended.
    async with rows.unchanged(without=["claim"]):
        await clock.advance(seconds=3600)
        assert await engine.expire_suspension(wait.execution_id) == AlreadySatisfied(reason="not_yet_due")
        await Reconciler(engine).catch_up()
    (suspended,) = (await engine.list_suspended()).entries
    assert suspended.reason == "waiting_for_operator_review"
    await wait.send("x", "a")
    assert (await wait.send("x", "b")).effect == "resume_condition_satisfied"
    await claim(engine)
    other = await timed(engine, given, clock, "escalate")
    await clock.advance(ms=MINUTE)
    await engine.expire_suspension(other.execution_id)
    assert (await engine.resume_execution(execution_id=other.execution_id)).public_state == PublicState.RESUMABLE


async def test_a_suspension_that_is_not_due_is_not_changed_and_the_reason_is_returned(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    soon, never = await timed(engine, given, clock, "fail"), await waiting(engine, given)
    over, gone = await timed(engine, given, clock, "fail"), await timed(engine, given, clock, "fail")
    await engine.resume_execution(execution_id=over.execution_id)
    # No operation leaves a suspended execution without its suspension.
    await connection.execute("delete from suspension where execution_id = $1", uuid_of(gone.execution_id))
    await clock.advance(ms=MINUTE - 1)
    async with rows.unchanged():
        answers = [await engine.expire_suspension(one.execution_id) for one in (soon, never, over, gone)]
        answers.append(await engine.expire_suspension(ABSENT))
        await parts_of(engine).suspension_timeouts.expire_due()
    reasons = "not_yet_due not_yet_due not_suspended_cleaned no_active_suspension_cleaned not_found_cleaned"
    assert answers == [AlreadySatisfied(reason=reason) for reason in reasons.split()]
    await refused(engine.expire_suspension("nonsense"), "invalid_input")
    await clock.advance(ms=1)
    assert isinstance(await engine.expire_suspension(soon.execution_id), SuspensionExpired)


async def test_a_stale_timer_does_nothing(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    resumed, escalated = await timed(engine, given, clock, "fail"), await timed(engine, given, clock, "escalate")
    await engine.resume_execution(execution_id=resumed.execution_id)
    await clock.advance(ms=MINUTE)
    await engine.expire_suspension(escalated.execution_id)
    # No operation leaves such a timer, but a sweep may have read one before it was deleted.
    await connection.execute(
        "insert into timer select partition_key, execution_id, 'suspension_timeout', ff_now() from execution"
    )
    async with rows.unchanged():
        assert await parts_of(engine).suspension_timeouts.expire_due() == 0
    assert parts_of(engine).suspension_timeouts.quarantine.skipped() == []


async def test_the_default_timeout_of_the_policy_is_applied(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    policy = {"suspension_policy": {"default_timeout_ms": MINUTE, "timeout_behavior": "expire"}}
    wait = await waiting(engine, given, policy=policy)
    await clock.advance(ms=MINUTE)
    assert await parts_of(engine).suspension_timeouts.expire_due() == 1
    assert vector(await rows.execution(wait.execution_id)) == EXPIRED


# Sweeps.


async def test_the_sweep_applies_every_due_timeout_and_no_other(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waits = {each.value: await timed(engine, given, clock, each.value) for each in TimeoutBehavior}
    later = await waiting(engine, given, timeout_at=await clock.now() + 2 * MINUTE)
    await clock.advance(ms=MINUTE)
    assert (await read_due(parts_of(engine).store, [])).suspension_timeouts == len(TimeoutBehavior)
    reconciler = Reconciler(engine)
    await reconciler.catch_up()
    assert reconciler.stats["suspension_timeout"].processed == len(TimeoutBehavior)
    states = {name: (await rows.execution(wait.execution_id))["public_state"] for name, wait in waits.items()}
    assert states == {
        "fail": "failed",
        "cancel": "cancelled",
        "expire": "expired",
        "auto_resume_with_timeout_signal": "resumable",
        "escalate": "suspended",
    }
    assert (await rows.execution(later.execution_id))["public_state"] == "suspended"
    async with rows.unchanged():
        await reconciler.catch_up()


async def test_a_timeout_in_the_past_is_applied_by_the_next_sweep(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    await read_due(parts_of(engine).store, [])
    await clock.advance(seconds=3600)
    await read_due(parts_of(engine).store, [])
    wait = await waiting(engine, given, timeout_at=await clock.now() - 300_000, timeout_behavior="cancel")
    await Reconciler(engine).catch_up()
    assert vector(await rows.execution(wait.execution_id)) == CANCELLED


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of timeouts or waitpoints is ten."""
    monkeypatch.setattr(timeout, "TIMEOUT_LIMIT", LIMIT)
    monkeypatch.setattr(timeout, "WAITPOINT_LIMIT", LIMIT)


@pytest.mark.usefixtures("small_batches")
async def test_a_sweep_processes_one_batch_and_leaves_the_rest_for_the_next(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    for _ in range(LIMIT + 3):
        await timed(engine, given, clock, "auto_resume")
    await clock.advance(ms=MINUTE)
    assert [await parts_of(engine).suspension_timeouts.expire_due() for _ in range(3)] == [LIMIT, 3, 0]
    assert len(await rows.of("execution", public_state="resumable")) == LIMIT + 3


async def test_a_locked_execution_does_not_delay_the_sweep(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    held, free = await timed(engine, given, clock, "fail"), await timed(engine, given, clock, "fail")
    await clock.advance(ms=MINUTE)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(held.execution_id))
        assert await parts_of(engine).suspension_timeouts.expire_due() == 1
    assert (await rows.execution(free.execution_id))["public_state"] == "failed"
    assert await parts_of(engine).suspension_timeouts.expire_due() == 1


async def test_a_timeout_that_cannot_be_read_or_stored_does_not_delay_the_others(
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unread, unstored = await timed(engine, given, clock, "fail"), await timed(engine, given, clock, "cancel")
    good = [await timed(engine, given, clock, "auto_resume") for _ in range(3)]
    # A behavior of a newer version, and a constraint that rejects the write.
    await connection.execute(
        "update suspension set timeout_behavior = 'sleep_on_it' where execution_id = $1", uuid_of(unread.execution_id)
    )
    await connection.execute("alter table execution add constraint none check (terminal_outcome <> 'cancelled')")
    await clock.advance(ms=MINUTE)
    with caplog.at_level(logging.WARNING):
        assert await parts_of(engine).suspension_timeouts.expire_due() == len(good)
    assert {(await rows.execution(wait.execution_id))["public_state"] for wait in good} == {"resumable"}
    for wait in (unread, unstored):
        assert wait.execution_id in caplog.text
        assert (await rows.execution(wait.execution_id))["public_state"] == "suspended"
    await refused(engine.expire_suspension(unread.execution_id), "corruption")


async def spoil(connection: asyncpg.Connection, kind: str, waits: list[Waiting]) -> None:
    """Make timeouts fail: by an unknown behavior, a missing suspension, or a constraint that rejects the write."""
    ids = [uuid_of(wait.execution_id) for wait in waits]
    match kind:
        case "unread":
            await connection.execute(
                "update suspension set timeout_behavior = 'sleep_on_it' where execution_id = any($1::uuid[])", ids
            )
        case "gone":
            await connection.execute("delete from suspension where execution_id = any($1::uuid[])", ids)
        case "unstored":
            await connection.execute(
                "update suspension set timeout_behavior = 'cancel' where execution_id = any($1)", ids
            )
            await connection.execute(
                "alter table execution add constraint none check (terminal_outcome <> 'cancelled')"
            )


@pytest.mark.usefixtures("small_batches")
async def test_more_failing_timeouts_than_a_batch_do_not_block_the_others(
    engines: Engines,
    given: Given,
    rows: Rows,
    clock: Clock,
    connection: asyncpg.Connection,
    subtests: pytest.Subtests,
) -> None:
    # No failed timeout is retried within the test.
    engine = await engines(suspension_timeout_interval_s=3600)
    failed = 0
    for kind in ("unread", "gone", "unstored"):
        with subtests.test(kind):
            bad = [await timed(engine, given, clock, "fail") for _ in range(LIMIT + 3)]
            failed += len(bad)
            await clock.advance(ms=1)
            good = await timed(engine, given, clock, "fail")
            await spoil(connection, kind, bad)
            await clock.advance(ms=MINUTE)
            assert await parts_of(engine).suspension_timeouts.expire_due() == 1
            assert vector(await rows.execution(good.execution_id)) == FAILED
            assert len(parts_of(engine).suspension_timeouts.quarantine.skipped()) == failed
            async with rows.unchanged():
                assert await parts_of(engine).suspension_timeouts.expire_due() == 0


async def test_a_failed_timeout_is_retried_after_its_pause(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    now = 0.0
    parts_of(engine).suspension_timeouts.quarantine = Quarantine(2.0, clock=lambda: now)
    wait = await timed(engine, given, clock, "fail")
    await spoil(connection, "unread", [wait])
    await clock.advance(ms=MINUTE)
    assert await parts_of(engine).suspension_timeouts.expire_due() == 0
    await connection.execute("update suspension set timeout_behavior = 'expire'")
    assert await parts_of(engine).suspension_timeouts.expire_due() == 0
    now = 2.0
    assert await parts_of(engine).suspension_timeouts.expire_due() == 1
    assert vector(await rows.execution(wait.execution_id)) == EXPIRED


async def test_failing_timeouts_do_not_hide_other_due_work(
    engines: Engines,
    given: Given,
    rows: Rows,
    clock: Clock,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = await engines(suspension_timeout_interval_s=3600)
    monkeypatch.setattr(due, "SAMPLE", 5)
    bad = [await timed(engine, given, clock, "fail") for _ in range(8)]
    await clock.advance(ms=1)
    lost = await given.claimed(lease_ttl_ms=MINUTE)
    await spoil(connection, "unread", bad)
    await clock.advance(ms=MINUTE)
    reconciler = Reconciler(engine)
    for _ in range(2):
        await reconciler.catch_up()
    assert (await rows.execution(lost.execution_id))["ownership_state"] == "lease_expired_reclaimable"


async def test_a_resume_by_timeout_wakes_a_waiting_claim(engine: Engine, given: Given, clock: Clock) -> None:
    wait = await timed(engine, given, clock, "auto_resume")
    await clock.advance(ms=MINUTE)
    claiming = asyncio.create_task(
        engine.claim_many(lanes=("default",), worker_id="w", worker_instance_id="w-1", limit=1, max_wait_ms=30_000)
    )
    await asyncio.sleep(0)
    await engine.expire_suspension(wait.execution_id)
    (claimed,) = await claiming
    assert claimed.execution_id == wait.execution_id

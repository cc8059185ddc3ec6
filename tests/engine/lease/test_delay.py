"""Interrupt a run: what is kept while it waits, how it is resumed, and how it may end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from engine.cases import Cases, in_turn
from engine.state import (
    ACTIVE,
    BACKING_OFF,
    CANCELLED,
    COMPLETED,
    EXPIRED_LEASE,
    FAILED,
    PARKED,
    RESUMABLE,
    attempts,
    claim,
    event_texts,
    lease_fields,
    refused,
    vector,
)
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.handle import Handle
from flowfabric.model.lease import RetryScheduled
from flowfabric.model.states import AttemptType, HandleKind, PublicState

EXPIRED = "terminal/unowned/not_applicable/none/expired/attempt_terminal/expired"
RETRYING = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1000}}}
TIMED = {"timeout_policy": {"attempt_timeout_ms": 10_000}}

Interruption = Callable[[Engine, Handle], Awaitable[None]]

INTERRUPTIONS: dict[str, Interruption] = {
    "worker_delay": lambda engine, handle: engine.delay(handle, 0),
    "waiting_children": lambda engine, handle: engine.wait_children(handle),
    "handed_back": lambda engine, handle: engine.hand_back(handle),
}

each_interruption = in_turn("marker", INTERRUPTIONS)


async def resumed(engine: Engine, handle: Handle, marker: str = "worker_delay") -> Any:
    """Interrupt a run and return the claim that resumes it."""
    await INTERRUPTIONS[marker](engine, handle)
    (claimed,) = await claim(engine)
    assert claimed.execution_id == handle.execution_id
    return claimed


async def test_a_delay_gives_up_the_lease_and_keeps_the_attempt(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    began = await clock.now()
    claimed = await given.run(tags={"ff.instance_id": "i-1"}, execution_deadline_at=began + 3_600_000)
    worker_no = (await rows.execution(claimed.execution_id))["worker_no"]
    now = await clock.advance(seconds=1)
    await engine.delay(claimed.handle, now + 60_000)
    row = await rows.execution(claimed.execution_id)
    assert vector(row) == PARKED
    assert (row["delay_until"], row["blocking_detail"]) == (now + 60_000, f"delayed until {now + 60_000}")
    assert await rows.timers(claimed.execution_id) == {"delay": now + 60_000, "deadline": began + 3_600_000}
    assert (row["attempt_id"], row["attempt_count"], row["deadline_at"]) == (claimed.attempt_id, 1, began + 3_600_000)
    assert (row["lease_epoch"], row["retry_count"], row["completed_at"], lease_fields(row)) == (1, 0, None, {})
    assert {row[stamp] for stamp in ("last_transition_at", "last_mutation_at")} == {now}
    assert row["started_at"] == began
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["suspension_marker"]) == ("suspended", "worker_delay")
    assert (attempt["started_at"], attempt["suspended_at"], attempt["ended_at"]) == (began, now, None)
    assert (attempt["attempt_id"], attempt["attempt_index"], attempt["resumed_at"]) == (claimed.attempt_id, 0, None)
    assert (attempt["lease_id"], attempt["lease_epoch"], attempt["worker_no"]) == (claimed.lease_id, 1, worker_no)
    assert (attempt["failure_reason"], attempt["failure_category"], row["result_payload"]) == (None, None, None)
    assert await event_texts(rows, claimed.execution_id) == ["tag_attached", "acquired", "released worker_delay"]
    event = (await rows.events(claimed.execution_id))[2]
    assert (event["lease_id"], event["attempt_index"], event["instance_tag"]) == (claimed.lease_id, 0, "i-1")
    (shown,) = await rows.of("attempt_all", execution_id=uuid_of(claimed.execution_id))
    assert shown["attempt_state"] == "suspended"


async def test_wait_children_without_children_is_resumable_at_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    claimed = await given.run()
    now = await clock.advance(seconds=1)
    await engine.wait_children(claimed.handle)
    row = await rows.execution(claimed.execution_id)
    assert vector(row) == RESUMABLE
    assert (row["delay_until"], row["blocking_detail"], lease_fields(row)) == (None, None, {})
    assert (row["attempt_id"], row["attempt_count"]) == (claimed.attempt_id, 1)
    assert (await rows.of("timer"), len(await rows.of("ready"))) == ([], 1)
    (listed,) = await rows.of("listed")
    assert (listed["public_state"], listed["at"]) == ("resumable", now)
    assert {row[stamp] for stamp in ("last_transition_at", "last_mutation_at")} == {now}
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["suspension_marker"]) == ("suspended", "waiting_children")
    assert (attempt["suspended_at"], attempt["ended_at"]) == (now, None)
    assert await event_texts(rows, claimed.execution_id) == ["acquired", "released waiting_children"]
    assert await engine.read_execution_state(claimed.execution_id) == PublicState.RESUMABLE


async def test_a_run_handed_back_is_claimable_at_once(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    claimed = await given.run(policy={**RETRYING, **TIMED})
    now = await clock.advance(seconds=1)
    await engine.hand_back(claimed.handle)
    row = await rows.execution(claimed.execution_id)
    assert (vector(row), row["blocking_detail"], lease_fields(row)) == (RESUMABLE, None, {})
    assert (row["retry_count"], row["reclaim_count"], row["remaining_attempt_timeout_ms"]) == (0, 0, 9000)
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["suspension_marker"]) == ("suspended", "handed_back")
    assert (attempt["suspended_at"], attempt["ended_at"]) == (now, None)
    (again,) = await claim(engine)
    assert (again.attempt_id, again.attempt_index, again.attempt_type) == (claimed.attempt_id, 0, AttemptType.INITIAL)
    assert (again.handle.kind, again.retry_count, again.attempt_timeout_ms) == (HandleKind.RESUMED, 0, 9000)
    assert (await rows.execution(claimed.execution_id))["reclaim_count"] == 0
    assert await event_texts(rows, claimed.execution_id) == [
        "acquired",
        "released handed_back",
        "acquired claim_resumed",
    ]


async def test_a_delay_ends_exactly_at_its_time(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    now = await clock.now()
    handle = await given.claimed(execution_deadline_at=now + 60_000)
    await engine.delay(handle, now + 1000)
    await clock.advance(ms=999)
    assert await parts_of(engine).delays.promote_due() == 0
    assert await claim(engine) == []
    now = await clock.advance(ms=1)
    assert await parts_of(engine).delays.promote_due() == 1
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["delay_until"], row["blocking_detail"]) == (RESUMABLE, None, None)
    assert (row["last_transition_at"], row["deadline_at"]) == (now, now + 59_000)


async def test_a_delay_into_the_past_is_due_at_once(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    for ago_ms in (0, 1, 86_400_000):
        handle = await given.claimed(lane_id=f"lane-{ago_ms}")
        now = await clock.now()
        # The sweeps have processed all timers up to now and do not look back.
        parts_of(engine).lifecycle.store.due_watermark.move_to(now)
        await engine.delay(handle, now - ago_ms)
        row = await rows.execution(handle.execution_id)
        assert (vector(row), row["delay_until"]) == (PARKED, now - ago_ms)
        assert await rows.timers(handle.execution_id) == {"delay": now}
        assert await parts_of(engine).delays.promote_due() == 1
        assert vector(await rows.execution(handle.execution_id)) == RESUMABLE
    handle = await given.claimed()
    wrong: list[Any] = [-1, 2**62, 1.5, "1", None, True]
    with Cases() as cases:
        async with rows.unchanged():
            for value in wrong:
                with cases(value):
                    await refused(engine.delay(handle, value), "invalid_input", "delay_until")


@each_interruption
async def test_the_next_claim_resumes_the_same_attempt(
    engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str
) -> None:
    began = await clock.now()
    first = await given.run(policy=RETRYING)
    parked_at = await clock.advance(seconds=1)
    await INTERRUPTIONS[marker](engine, first.handle)
    assert (await rows.execution(first.execution_id))["remaining_attempt_timeout_ms"] is None
    now = await clock.advance(seconds=1)
    (again,) = await claim(engine)
    assert again.handle.kind is HandleKind.RESUMED
    assert (again.attempt_id, again.attempt_index, again.attempt_type) == (first.attempt_id, 0, AttemptType.INITIAL)
    assert (again.lease_epoch, again.lease_id != first.lease_id) == (2, True)
    row = await rows.execution(first.execution_id)
    assert (vector(row), row["attempt_count"], row["started_at"]) == (ACTIVE, 1, began)
    assert row["attempt_timeout_at"] is None
    assert (row["delay_until"], await rows.of("timer"), await rows.of("ready")) == (None, [], [])
    assert await rows.of("listed") == []
    assert (await event_texts(rows, first.execution_id))[2:] == ["acquired claim_resumed"]
    (shown,) = await rows.of("attempt_all", execution_id=uuid_of(first.execution_id))
    assert (shown["attempt_state"], shown["started_at"], shown["resumed_at"]) == ("started", began, now)
    assert (shown["suspended_at"], shown["suspension_marker"]) == (parked_at, None)
    assert (shown["lease_id"], shown["lease_epoch"]) == (again.lease_id, 2)


@each_interruption
async def test_the_remaining_timeout_is_kept_while_an_attempt_waits(
    engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str
) -> None:
    handle = await given.claimed(policy=TIMED)
    await clock.advance(ms=2_500)
    await INTERRUPTIONS[marker](engine, handle)
    row = await rows.execution(handle.execution_id)
    assert (row["attempt_timeout_at"], row["remaining_attempt_timeout_ms"]) == (None, 7_500)
    await clock.advance(seconds=3600)
    assert await parts_of(engine).timeouts.expire_due() == 0
    (again,) = await claim(engine)
    row = await rows.execution(handle.execution_id)
    assert (row["attempt_timeout_at"], row["remaining_attempt_timeout_ms"]) == (await clock.now() + 7_500, None)
    await clock.advance(ms=500)
    await INTERRUPTIONS[marker](engine, again.handle)
    assert (await rows.execution(handle.execution_id))["remaining_attempt_timeout_ms"] == 7_000


@each_interruption
async def test_an_attempt_past_its_timeout_is_resumed_with_one_millisecond_left(
    engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str
) -> None:
    handle = await given.claimed(policy=TIMED)
    await clock.advance(seconds=11)
    await INTERRUPTIONS[marker](engine, handle)
    assert (await rows.execution(handle.execution_id))["remaining_attempt_timeout_ms"] == 1
    await claim(engine)
    await clock.advance(ms=1)
    assert await parts_of(engine).timeouts.expire_due() == 1
    assert vector(await rows.execution(handle.execution_id)) == EXPIRED


@each_interruption
async def test_a_run_interrupted_twice_has_one_attempt(
    engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str
) -> None:
    began = await clock.now()
    first = await given.run()
    await clock.advance(seconds=1)
    await engine.delay(first.handle, 0)
    resumed_at = await clock.advance(seconds=1)
    (again,) = await claim(engine, worker_id="other", worker_instance_id="other-1")
    worker_no = (await rows.execution(first.execution_id))["worker_no"]
    now = await clock.advance(seconds=1)
    await INTERRUPTIONS[marker](engine, again.handle)
    (attempt,) = await attempts(rows, first.execution_id)
    assert (attempt["attempt_state"], attempt["suspension_marker"]) == ("suspended", marker)
    assert (attempt["started_at"], attempt["resumed_at"], attempt["suspended_at"]) == (began, resumed_at, now)
    assert (attempt["attempt_id"], attempt["ended_at"]) == (first.attempt_id, None)
    assert (attempt["lease_id"], attempt["lease_epoch"]) == (again.lease_id, 2)
    assert attempt["worker_no"] == worker_no
    row = await rows.execution(first.execution_id)
    assert (row["attempt_id"], row["attempt_count"], row["lease_epoch"]) == (first.attempt_id, 1, 2)


async def test_a_resumed_retry_keeps_its_retry_reason(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    failed = await given.backing_off(delay_ms=1000)
    await clock.advance(seconds=1)
    (retry,) = await claim(engine)
    again = await resumed(engine, retry.handle)
    assert (again.attempt_type, again.attempt_index) == (AttemptType.RETRY, 1)
    _, running = await engine.list_attempts(failed.execution_id)
    assert (running.previous_attempt_index, running.retry_reason, running.failure_reason) == (0, "no luck", None)
    await engine.complete(again.handle)
    _, attempt = await attempts(rows, failed.execution_id)
    assert (attempt["attempt_type"], attempt["previous_attempt_index"]) == ("retry", 0)
    assert (attempt["retry_reason"], attempt["failure_reason"]) == ("no luck", None)


@each_interruption
async def test_a_resumed_run_completes(engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str) -> None:
    began = await clock.now()
    handle = await given.claimed()
    again = await resumed(engine, handle, marker)
    now = await clock.advance(seconds=1)
    if marker == "worker_delay":
        await engine.complete_many([(again.handle, b"done")])
    else:
        await engine.complete(again.handle, b"done")
    row = await rows.execution(handle.execution_id)
    assert (vector(row), lease_fields(row)) == (COMPLETED, {})
    (attempt,) = await attempts(rows, handle.execution_id)
    assert (attempt["attempt_state"], row["result_payload"]) == ("ended_success", b"done")
    assert (attempt["started_at"], attempt["resumed_at"], attempt["ended_at"]) == (began, began, now)
    assert (attempt["suspended_at"], attempt["suspension_marker"]) == (began, None)
    assert (attempt["lease_epoch"], attempt["lease_id"]) == (2, again.lease_id)
    assert await engine.get_execution_result(handle.execution_id) == b"done"
    async with rows.unchanged():
        await engine.complete(again.handle, b"done")
        await refused(engine.complete(handle), "lease_conflict")
    assert await event_texts(rows, handle.execution_id) == [
        "acquired",
        f"released {marker}",
        "acquired claim_resumed",
        "released completed>success",
    ]


@each_interruption
async def test_a_resumed_run_fails(engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str) -> None:
    handle = await given.claimed(policy=RETRYING)
    again = await resumed(engine, handle, marker)
    now = await clock.advance(seconds=1)
    assert await engine.fail(again.handle, reason="busy") == RetryScheduled(delay_until=now + 1000)
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["attempt_id"]) == (BACKING_OFF, None)
    (attempt,) = await attempts(rows, handle.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"], attempt["failure_category"]) == (
        "ended_failure",
        "busy",
        "transient",
    )
    assert (attempt["ended_at"], attempt["suspension_marker"]) == (now, None)
    async with rows.unchanged():
        assert await engine.fail(again.handle, reason="busy") == RetryScheduled(delay_until=now + 1000)
    await clock.advance(seconds=1)
    (retry,) = await claim(engine)
    assert (retry.handle.kind, retry.attempt_index) == (HandleKind.FRESH, 1)
    states = [attempt.attempt_state for attempt in await engine.list_attempts(handle.execution_id)]
    assert states == ["ended_failure", "started"]
    last = await resumed(engine, retry.handle, marker)
    await engine.fail(last.handle, reason="busy again")
    assert vector(await rows.execution(handle.execution_id)) == FAILED
    assert [attempt["attempt_state"] for attempt in await attempts(rows, handle.execution_id)] == ["ended_failure"] * 2


@each_interruption
async def test_a_resumed_run_is_cancelled(engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str) -> None:
    by_holder, by_operator = await given.claimed(), await given.claimed()
    for handle in (by_holder, by_operator):
        again = await resumed(engine, handle, marker)
        now = await clock.advance(seconds=1)
        if handle is by_holder:
            await engine.cancel(again.handle, "not wanted")
        else:
            await engine.cancel_execution(execution_id=handle.execution_id, reason="not wanted")
        row = await rows.execution(handle.execution_id)
        assert vector(row) == CANCELLED
        (attempt,) = await attempts(rows, handle.execution_id)
        assert (attempt["attempt_state"], attempt["failure_reason"]) == ("ended_cancelled", "cancelled: not wanted")
        assert (attempt["ended_at"], attempt["suspension_marker"]) == (now, None)
        assert (await event_texts(rows, handle.execution_id))[3:] == ["released cancelled>cancelled"]


@each_interruption
async def test_an_interrupted_run_is_cancelled(
    engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str
) -> None:
    began = await clock.now()
    claimed = await given.run()
    await clock.advance(seconds=1)
    await INTERRUPTIONS[marker](engine, claimed.handle)
    now = await clock.advance(seconds=1)
    await engine.cancel_execution(execution_id=claimed.execution_id, reason="not wanted")
    row = await rows.execution(claimed.execution_id)
    assert (vector(row), row["delay_until"], await rows.of("timer")) == (CANCELLED, None, [])
    assert row["attempt_id"] == claimed.attempt_id
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"]) == ("ended_cancelled", "cancelled: not wanted")
    assert (attempt["started_at"], attempt["suspended_at"], attempt["ended_at"]) == (began, now - 1000, now)
    assert (attempt["resumed_at"], attempt["lease_id"], attempt["lease_epoch"]) == (None, claimed.lease_id, 1)
    assert (await event_texts(rows, claimed.execution_id))[2:] == ["ended cancelled>cancelled"]
    assert await claim(engine) == []


@each_interruption
async def test_an_interrupted_run_expires_at_its_deadline(
    engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str
) -> None:
    deadline = await clock.now() + 5_000
    handle = await given.claimed(execution_deadline_at=deadline)
    await INTERRUPTIONS[marker](engine, handle)
    now = await clock.advance(seconds=5)
    assert await parts_of(engine).timeouts.expire_due() == 1
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["failure_reason"]) == (EXPIRED, "execution_deadline")
    (attempt,) = await attempts(rows, handle.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"]) == ("ended_failure", "execution_deadline")
    assert (attempt["failure_category"], attempt["ended_at"]) == ("timeout", now)
    assert (await event_texts(rows, handle.execution_id))[2:] == ["ended expired:execution_deadline>expired"]


@each_interruption
@in_turn("policy", [TIMED, TIMED | RETRYING])
async def test_a_resumed_run_times_out(
    engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str, policy: Any
) -> None:
    handle = await given.claimed(policy=policy)
    await resumed(engine, handle, marker)
    now = await clock.advance(seconds=10)
    assert await parts_of(engine).timeouts.expire_due() == 1
    row = await rows.execution(handle.execution_id)
    assert vector(row) == (EXPIRED if policy is TIMED else BACKING_OFF)
    (attempt,) = await attempts(rows, handle.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"], attempt["failure_category"]) == (
        "ended_failure",
        "attempt_timeout",
        "timeout",
    )
    assert (attempt["ended_at"], attempt["suspension_marker"]) == (now, None)
    ending = "" if policy is not TIMED else ">expired"
    assert (await event_texts(rows, handle.execution_id))[3:] == [f"released expired:attempt_timeout{ending}"]


@each_interruption
async def test_a_resumed_run_that_loses_its_lease_is_reclaimed_as_a_new_attempt(
    engine: Engine, given: Given, rows: Rows, clock: Clock, marker: str
) -> None:
    handle = await given.claimed(policy=TIMED)
    again = await resumed(engine, handle, marker)
    now = await clock.advance(seconds=31)
    await parts_of(engine).lease_expiry.sweep()
    row = await rows.execution(handle.execution_id)
    assert vector(row) == EXPIRED_LEASE
    (taken,) = await claim(engine)
    assert (taken.handle.kind, taken.attempt_index, taken.attempt_type) == (
        HandleKind.RECLAIMED,
        1,
        AttemptType.RECLAIM,
    )
    row = await rows.execution(handle.execution_id)
    assert (row["attempt_timeout_at"], await rows.timers(handle.execution_id)) == (
        now + 10_000,
        {"attempt_timeout": now + 10_000},
    )
    attempt, running = await attempts(rows, handle.execution_id)
    assert (running["attempt_state"], running["suspended_at"], running["resumed_at"]) == ("started", None, None)
    assert (attempt["attempt_state"], attempt["failure_reason"]) == (
        "interrupted_reclaimed",
        "lease_lease_expired_reclaimable",
    )
    assert (attempt["attempt_id"], attempt["lease_id"], attempt["lease_epoch"]) == (
        handle.attempt_id,
        again.lease_id,
        2,
    )
    assert (attempt["ended_at"], attempt["suspension_marker"]) == (now, None)
    await engine.complete(taken.handle)
    assert len(await attempts(rows, handle.execution_id)) == 2


async def test_a_resumed_run_ends_at_its_reclaim_limit(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed(policy={"max_reclaim_count": 0})
    await resumed(engine, handle)
    await clock.advance(seconds=31)
    assert await claim(engine) == []
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["failure_reason"]) == (FAILED, "max_reclaims_exceeded")
    (attempt,) = await attempts(rows, handle.execution_id)
    assert (attempt["attempt_state"], attempt["suspension_marker"]) == ("interrupted_reclaimed", None)


@each_interruption
async def test_an_interrupted_run_has_no_lease(engine: Engine, given: Given, rows: Rows, marker: str) -> None:
    claimed = await given.run()
    await INTERRUPTIONS[marker](engine, claimed.handle)
    async with rows.unchanged():
        for parking in INTERRUPTIONS.values():
            refusal = await refused(parking(engine, claimed.handle), "execution_not_active")
            assert refusal.detail == {
                "terminal_outcome": "none",
                "lease_epoch": "1",
                "lifecycle_phase": "runnable",
                "attempt_id": str(claimed.attempt_id),
            }
        await refused(engine.complete(claimed.handle), "execution_not_active")
        await refused(engine.fail(claimed.handle, reason="x"), "execution_not_active")
        await refused(engine.cancel(claimed.handle, "x"), "execution_not_active")


async def test_runs_interrupted_and_ended_concurrently_each_reach_their_state(
    engine: Engine, given: Given, rows: Rows
) -> None:
    runs = [await given.claimed() for _ in range(8)]
    again = [await resumed(engine, handle) for handle in runs[:4]]
    handles = [claimed.handle for claimed in again] + runs[4:]
    await asyncio.gather(
        engine.complete(handles[0], b"0"),
        engine.delay(handles[1], 0),
        engine.wait_children(handles[2]),
        engine.fail(handles[3], reason="x"),
        engine.complete(handles[4], b"4"),
        engine.delay(handles[5], 0),
        engine.wait_children(handles[6]),
        engine.cancel(handles[7], "x"),
    )
    found = [vector(await rows.execution(handle.execution_id)) for handle in handles]
    assert found == [COMPLETED, PARKED, RESUMABLE, FAILED, COMPLETED, PARKED, RESUMABLE, CANCELLED]


async def test_a_delay_sets_the_next_timer_of_this_process(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    parts_of(engine).wakeups.next_timer = float("inf")
    before = time.monotonic()
    await engine.delay(handle, await clock.now() + 60_000)
    assert parts_of(engine).wakeups.timer_event.is_set()
    assert before + 60 <= parts_of(engine).wakeups.next_timer <= time.monotonic() + 60

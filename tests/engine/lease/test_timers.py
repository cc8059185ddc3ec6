"""Operations that process one due timer: promote a delayed execution, expire an execution, mark an expired lease."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.cases import Cases, in_turn
from engine.state import (
    BACKING_OFF,
    RESUMABLE,
    RETRYABLE,
    WAITING,
    attempts,
    claim,
    event_texts,
    lease_fields,
    pending_fields,
    refused,
    revoke,
    vector,
)
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.finish import WARN_EVERY_RECLAIMS
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import (
    AlreadySatisfied,
    AlreadyTerminal,
    Expired,
    Marked,
    NotYetDue,
    Promoted,
    RetryScheduled,
)
from flowfabric.model.states import PublicState

EXPIRED = "terminal/unowned/not_applicable/none/expired/attempt_terminal/expired"
EXPIRED_BEFORE_FIRST_ATTEMPT = "terminal/unowned/not_applicable/none/expired/pending_first_attempt/expired"
TIMEOUT_POLICY: dict[str, Any] = {"timeout_policy": {"attempt_timeout_ms": 10_000}}
TIMEOUT_AND_RETRY_POLICY: dict[str, Any] = {
    **TIMEOUT_POLICY,
    "retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1000}},
}

ABSENT = ExecutionId(f"{{fp:7}}:{uuid4()}")

OPERATIONS: dict[str, Callable[[Engine, Any], Awaitable[object]]] = {
    "promote_delayed": lambda engine, execution_id: engine.promote_delayed(execution_id),
    "expire_execution": lambda engine, execution_id: engine.expire_execution(execution_id, "execution_deadline"),
    "mark_lease_expired_if_due": lambda engine, execution_id: engine.mark_lease_expired_if_due(execution_id),
}


async def test_an_invalid_execution_id_is_refused(engine: Engine, rows: Rows) -> None:
    with Cases() as cases:
        async with rows.unchanged():
            for operation, call in OPERATIONS.items():
                for wrong in ("nonsense", None, 7, str(uuid4()), f"{{fp:32768}}:{uuid4()}"):
                    with cases((operation, wrong)):
                        await refused(call(engine, wrong), "invalid_input")


async def check_equal_rows(rows: Rows, first: str, second: str) -> None:
    """Assert that two executions that reached their state in different ways have equal rows."""
    unique = {"execution_id", "place", "lease_id", "attempt_id", "event_id", "xid", "claim_no"}

    def comparable(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in unique}

    assert comparable(await rows.execution(first)) == comparable(await rows.execution(second))
    for find in (attempts, lambda rows, execution_id: rows.events(execution_id)):
        assert [comparable(row) for row in await find(rows, first)] == [
            comparable(row) for row in await find(rows, second)
        ]
    for table in ("ready", "timer", "listed"):
        ones, twos = [await rows.of(table, execution_id=uuid_of(execution_id)) for execution_id in (first, second)]
        assert [comparable(row) for row in ones] == [comparable(row) for row in twos], table


# Promotion.


async def test_promote_delayed_returns_why_nothing_was_promoted(engine: Engine, given: Given, rows: Rows) -> None:
    waiting = await given.created(lane_id="elsewhere")
    delayed = await given.delayed(seconds=1)
    ended = await given.completed()
    running = await given.claimed()
    expected = {
        ABSENT: "execution_not_found",
        waiting: "not_delayed",
        ended: "not_delayed",
        running.execution_id: "not_delayed",
        delayed: "not_yet_due",
    }
    async with rows.unchanged():
        for execution_id, reason in expected.items():
            assert await engine.promote_delayed(execution_id) == AlreadySatisfied(reason=reason)


async def test_promote_delayed_promotes_exactly_at_the_due_time(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    delayed = await given.delayed(seconds=1)
    await clock.advance(ms=999)
    async with rows.unchanged():
        assert await engine.promote_delayed(delayed) == AlreadySatisfied(reason="not_yet_due")
    now = await clock.advance(ms=1)
    assert await engine.promote_delayed(delayed) == Promoted(public_state=PublicState.WAITING)
    row = await rows.execution(delayed)
    assert (vector(row), row["delay_until"], row["blocking_detail"]) == (WAITING, None, None)
    assert (await rows.of("timer"), len(await rows.of("ready"))) == ([], 1)
    assert (row["last_transition_at"], row["last_mutation_at"]) == (now, now)
    async with rows.unchanged():
        assert await engine.promote_delayed(delayed) == AlreadySatisfied(reason="not_delayed")


async def test_promotion_makes_a_retry_waiting_and_an_interrupted_attempt_resumable(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    failed = await given.backing_off(delay_ms=1000)
    delayed = await given.claimed()
    await engine.delay(delayed, await clock.now() + 1000)
    await clock.advance(seconds=1)
    assert await engine.promote_delayed(failed.execution_id) == Promoted(public_state=PublicState.WAITING)
    assert await engine.promote_delayed(delayed.execution_id) == Promoted(public_state=PublicState.RESUMABLE)
    assert vector(await rows.execution(failed.execution_id)) == RETRYABLE
    assert vector(await rows.execution(delayed.execution_id)) == RESUMABLE


@pytest.mark.usefixtures("hints_only")
async def test_promotion_wakes_a_waiting_claim(engine: Engine, given: Given, clock: Clock) -> None:
    delayed = await given.delayed(seconds=1, lane_id="busy")
    waiting = asyncio.create_task(claim(engine, "busy", max_wait_ms=60_000))
    # Until the claim waits.
    async with asyncio.timeout(30):
        while not parts_of(engine).wakeups._waiting.get("busy"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    await clock.advance(seconds=2)
    await engine.promote_delayed(delayed)
    (claimed,) = await asyncio.wait_for(waiting, 30)
    assert claimed.execution_id == delayed


# Expiry.


async def test_expire_execution_returns_why_nothing_was_expired(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    now = await clock.now()
    untimed, timed = (
        await given.claimed(),
        await given.claimed(policy=TIMEOUT_POLICY, execution_deadline_at=now + 60_000),
    )
    waiting = await given.created(lane_id="elsewhere", policy=TIMEOUT_POLICY)
    ended = await given.completed()
    async with rows.unchanged():
        for phase in ("attempt_timeout", "execution_deadline"):
            await refused(engine.expire_execution(ABSENT, phase), "execution_not_found")
            assert await engine.expire_execution(ended, phase) == AlreadyTerminal()
            for execution_id in (untimed.execution_id, timed.execution_id, waiting):
                assert await engine.expire_execution(execution_id, phase) == NotYetDue()
        for wrong in ("", "lease", None, 7):
            await refused(engine.expire_execution(waiting, wrong), "invalid_input", "phase")  # type: ignore[arg-type]


async def test_an_attempt_without_a_retry_left_expires_at_its_timeout(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(policy=TIMEOUT_POLICY)
    await clock.advance(ms=9_999)
    assert await engine.expire_execution(handle.execution_id, "attempt_timeout") == NotYetDue()
    now = await clock.advance(ms=1)
    expired = await engine.expire_execution(handle.execution_id, "attempt_timeout")
    assert expired == Expired(execution_id=handle.execution_id)
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["failure_reason"], lease_fields(row)) == (EXPIRED, "attempt_timeout", {})
    assert row["completed_at"] == now
    (attempt,) = await attempts(rows, handle.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"], attempt["failure_category"]) == (
        "ended_failure",
        "attempt_timeout",
        "timeout",
    )
    assert await event_texts(rows, handle.execution_id) == ["acquired", "released expired:attempt_timeout>expired"]
    async with rows.unchanged():
        assert await engine.expire_execution(handle.execution_id, "attempt_timeout") == AlreadyTerminal()
        await refused(engine.complete(handle), "execution_not_active")


async def test_an_attempt_with_a_retry_left_is_retried_after_its_timeout(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    claimed = await given.run(policy=TIMEOUT_AND_RETRY_POLICY)
    now = await clock.advance(seconds=10)
    scheduled = await engine.expire_execution(claimed.execution_id, "attempt_timeout")
    assert scheduled == RetryScheduled(delay_until=now + 1000)
    row = await rows.execution(claimed.execution_id)
    assert (vector(row), row["retry_count"], row["attempt_id"], lease_fields(row)) == (BACKING_OFF, 1, None, {})
    detail = f"retry backoff until {now + 1000} (attempt 0 failed: attempt_timeout)"
    assert (row["blocking_detail"], row["delay_until"]) == (detail, now + 1000)
    assert (row["failure_reason"], await rows.timers(claimed.execution_id)) == (
        "attempt_timeout",
        {"delay": now + 1000},
    )
    assert await pending_fields(engine, claimed.execution_id) == {
        "retry_reason": "attempt_timeout",
        "previous_attempt_index": "0",
    }
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["failure_category"], attempt["ended_at"]) == (
        "ended_failure",
        "timeout",
        now,
    )
    assert (attempt["attempt_id"], attempt["lease_id"]) == (claimed.attempt_id, claimed.lease_id)
    assert await event_texts(rows, claimed.execution_id) == ["acquired", "released expired:attempt_timeout"]
    async with rows.unchanged():
        assert await engine.expire_execution(claimed.execution_id, "attempt_timeout") == NotYetDue()
    await clock.advance(seconds=1)
    (again,) = await claim(engine)
    assert (again.attempt_index, again.attempt_type) == (1, "retry")
    await clock.advance(seconds=10)
    expired = await engine.expire_execution(claimed.execution_id, "attempt_timeout")
    assert expired == Expired(execution_id=claimed.execution_id)
    assert vector(await rows.execution(claimed.execution_id)) == EXPIRED


async def test_an_attempt_times_out_with_an_expired_or_revoked_lease(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    unmarked, marked, revoked = [await given.claimed(policy=TIMEOUT_POLICY, lease_ttl_ms=1000) for _ in range(3)]
    await revoke(engine, revoked.execution_id)
    await clock.advance(seconds=10)
    await engine.mark_lease_expired_if_due(marked.execution_id)
    for handle in (unmarked, marked, revoked):
        expired = await engine.expire_execution(handle.execution_id, "attempt_timeout")
        assert expired == Expired(execution_id=handle.execution_id)
        assert vector(await rows.execution(handle.execution_id)) == EXPIRED
    assert await event_texts(rows, unmarked.execution_id) == ["acquired", "released expired:attempt_timeout>expired"]
    assert await event_texts(rows, marked.execution_id) == [
        "acquired",
        "expired",
        "ended expired:attempt_timeout>expired",
    ]
    assert await event_texts(rows, revoked.execution_id) == [
        "acquired",
        "revoked test",
        "ended expired:attempt_timeout>expired",
    ]


async def test_a_deadline_ends_an_execution_in_any_phase(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    deadline = await clock.now() + 60_000
    running = await given.claimed(execution_deadline_at=deadline, policy=TIMEOUT_AND_RETRY_POLICY, lease_ttl_ms=600_000)
    interrupted = await given.claimed(execution_deadline_at=deadline)
    await engine.delay(interrupted, deadline + 60_000)
    failed = await given.backing_off(delay_ms=600_000, execution_deadline_at=deadline)
    delayed = await given.delayed(seconds=600, execution_deadline_at=deadline)
    waiting = await given.created(execution_deadline_at=deadline)
    everything = [running.execution_id, interrupted.execution_id, failed.execution_id, delayed, waiting]
    await clock.advance(ms=59_999)
    async with rows.unchanged():
        for execution_id in everything:
            assert await engine.expire_execution(execution_id, "execution_deadline") == NotYetDue()
    await clock.advance(ms=1)
    for execution_id in everything:
        expired = await engine.expire_execution(execution_id, "execution_deadline")
        assert expired == Expired(execution_id=execution_id)
        row = await rows.execution(execution_id)
        assert vector(row) == (EXPIRED_BEFORE_FIRST_ATTEMPT if execution_id in (delayed, waiting) else EXPIRED)
        assert (row["failure_reason"], row["delay_until"]) == ("execution_deadline", None)
        assert await rows.timers(execution_id) == {}
    assert (await event_texts(rows, running.execution_id))[1:] == ["released expired:execution_deadline>expired"]
    assert (await event_texts(rows, waiting)) == ["ended expired:execution_deadline>expired"]
    assert [row["attempt_state"] for row in await attempts(rows, running.execution_id)] == ["ended_failure"]
    assert [row["attempt_state"] for row in await attempts(rows, interrupted.execution_id)] == ["ended_failure"]
    assert [row["failure_reason"] for row in await attempts(rows, failed.execution_id)] == ["no luck"]
    assert await attempts(rows, waiting) == []


async def test_an_operation_on_one_execution_and_a_sweep_write_the_same_rows(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    promoted, swept = await given.delayed(seconds=1), await given.delayed(seconds=1)
    await clock.advance(seconds=2)
    assert isinstance(await engine.promote_delayed(promoted), Promoted)
    assert await parts_of(engine).delays.promote_due() == 1
    await check_equal_rows(rows, promoted, swept)
    for policy in (TIMEOUT_POLICY, TIMEOUT_AND_RETRY_POLICY):
        one, two = [await given.claimed(policy=policy, lane_id="timeout") for _ in range(2)]
        await clock.advance(seconds=10)
        await engine.expire_execution(one.execution_id, "attempt_timeout")
        assert await parts_of(engine).timeouts.expire_due() == 1
        await check_equal_rows(rows, one.execution_id, two.execution_id)
    deadline = await clock.now() + 1000
    one, two = [await given.claimed(execution_deadline_at=deadline, lane_id="deadline") for _ in range(2)]
    await clock.advance(seconds=10)
    await engine.expire_execution(one.execution_id, "execution_deadline")
    assert await parts_of(engine).timeouts.expire_due() == 1
    await check_equal_rows(rows, one.execution_id, two.execution_id)
    one, two = [await given.claimed(lease_ttl_ms=1000, lane_id="lease") for _ in range(2)]
    await clock.advance(seconds=1)
    assert await engine.mark_lease_expired_if_due(one.execution_id) == Marked()
    await parts_of(engine).lease_expiry.sweep()
    await check_equal_rows(rows, one.execution_id, two.execution_id)


async def test_a_retry_after_a_timeout_sets_the_next_timer_of_this_process(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handle = await given.claimed(policy=TIMEOUT_AND_RETRY_POLICY)
    await clock.advance(seconds=10)
    parts_of(engine).wakeups.next_timer = float("inf")
    await engine.expire_execution(handle.execution_id, "attempt_timeout")
    assert 0 < parts_of(engine).wakeups.next_timer - asyncio.get_running_loop().time() < 1.1


# Marking leases.


async def test_mark_lease_expired_returns_why_nothing_was_marked(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waiting = await given.created(lane_id="elsewhere")
    ended = await given.completed()
    resumed = await given.claimed()
    await engine.wait_children(resumed)
    assert len(await claim(engine)) == 1
    delayed = await given.claimed()
    await engine.delay(delayed, await clock.now() + 60_000)
    expired, revoked = await given.claimed(lease_ttl_ms=1000), await given.claimed(lease_ttl_ms=1000)
    await revoke(engine, revoked.execution_id)
    await clock.advance(seconds=1)
    assert await engine.mark_lease_expired_if_due(expired.execution_id) == Marked()
    running = await given.claimed(lane_id="apart", lease_ttl_ms=1000)
    await clock.advance(ms=999)
    await engine.renew(running)
    await clock.advance(ms=999)
    expected = {
        ABSENT: "execution_not_found",
        waiting: "not_active",
        ended: "not_active",
        delayed.execution_id: "not_active",
        expired.execution_id: "already_expired",
        revoked.execution_id: "already_revoked",
        resumed.execution_id: "not_yet_expired",
        running.execution_id: "not_yet_expired",
    }
    async with rows.unchanged():
        for execution_id, reason in expected.items():
            assert await engine.mark_lease_expired_if_due(execution_id) == AlreadySatisfied(reason=reason)
    await clock.advance(ms=1)
    assert await engine.mark_lease_expired_if_due(running.execution_id) == Marked()


@pytest.mark.usefixtures("altered_rows")
async def test_an_active_execution_without_an_owner_has_no_lease_to_mark(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, clock: Clock
) -> None:
    handle = await given.claimed(lease_ttl_ms=1000)
    await connection.execute("update execution set ownership_state = 'unowned'")
    await clock.advance(seconds=2)
    async with rows.unchanged():
        assert await engine.mark_lease_expired_if_due(handle.execution_id) == AlreadySatisfied(reason="unowned")


@pytest.mark.usefixtures("altered_rows")
async def test_every_hundredth_reclaim_logs_a_warning(
    engine: Engine, given: Given, connection: asyncpg.Connection, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    handle = await given.claimed(policy={"max_reclaim_count": 1000})
    other = await given.claimed(policy={"max_reclaim_count": 1000})
    set_count = "update execution set reclaim_count = $1 where execution_id = $2"
    warned = []
    for before in (0, 98, 99, 100, 199):
        await connection.execute(set_count, before, uuid_of(handle.execution_id))
        await connection.execute(set_count, 5, uuid_of(other.execution_id))
        await clock.advance(seconds=31)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(await claim(engine)) == 2
        if caplog.messages:
            (message,) = caplog.messages
            assert handle.execution_id in message
            assert f" {before + 1} " in message
            warned.append(before + 1)
    assert warned == [WARN_EVERY_RECLAIMS, 2 * WARN_EVERY_RECLAIMS]


@in_turn("ending", ["cancel", "expire"])
async def test_a_grant_is_deleted_when_its_execution_ends(
    engine: Engine, given: Given, rows: Rows, clock: Clock, ending: str
) -> None:
    deadline = await clock.now() + 1000
    waiting, other = [await given.created(execution_deadline_at=deadline) for _ in range(2)]
    worker: dict[str, Any] = {
        "lane_id": "default",
        "worker_id": "w",
        "worker_instance_id": "w-1",
        "grant_ttl_ms": 60_000,
    }
    for execution_id in (waiting, other):
        await engine.issue_claim_grant(execution_id=execution_id, **worker)
    await clock.advance(seconds=2)
    if ending == "cancel":
        await engine.cancel_execution(execution_id=waiting, reason="x")
    else:
        await engine.expire_execution(waiting, "execution_deadline")
    assert (await rows.execution(waiting))["granted_until"] is None
    (left,) = await rows.of("claim_grant")
    assert str(left["execution_id"]) == uuid_of(other)

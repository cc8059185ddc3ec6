"""The end of a suspended execution closes its suspension and all its waitpoints."""

from engine.state import CANCELLED, attempts, claim, event_texts, lease_fields, refused, vector
from engine.waits import EXPIRED, on_all, suspend_run, suspension, waitpoints
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.expire import ExpiryPhase
from flowfabric.engine.parts import parts_of
from flowfabric.model.lease import Expired


async def check_closed(rows: Rows, execution_id: str, reason: str, now: int, *, count: int = 3) -> None:
    """Assert that the suspension and its waitpoints are closed with this reason and not satisfied."""
    wait = await suspension(rows, execution_id)
    assert (wait["closed_at"], wait["close_reason"], wait["satisfied_at"]) == (now, reason, None)
    found = await waitpoints(rows, execution_id)
    assert [(row["state"], row["closed_at"], row["close_reason"]) for row in found] == [("closed", now, reason)] * count
    assert {row["satisfied_at"] for row in found} == {None}


async def test_cancelling_a_suspended_execution_closes_its_suspension_and_waitpoints(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    claimed = await given.run()
    await suspend_run(engine, claimed.handle, on_all("a", "b", "c", timeout_at=await clock.now() + 60_000))
    now = await clock.advance(seconds=1)
    await engine.cancel_execution(execution_id=claimed.execution_id, reason="not wanted", source="operator_override")
    row = await rows.execution(claimed.execution_id)
    assert (vector(row), row["suspension_timeout_at"], lease_fields(row)) == (CANCELLED, None, {})
    assert await rows.timers(claimed.execution_id) == {}
    assert (row["cancellation_reason"], row["cancelled_by"], row["failure_reason"]) == (
        "not wanted",
        "operator_override",
        None,
    )
    assert (row["completed_at"], row["lease_epoch"], row["blocking_detail"]) == (now, 2, None)
    await check_closed(rows, claimed.execution_id, "cancelled", now)
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["ended_at"]) == ("ended_cancelled", now)
    assert (attempt["failure_reason"], attempt["suspension_marker"]) == ("cancelled: not wanted", None)
    assert await event_texts(rows, claimed.execution_id) == [
        "acquired",
        "released suspend",
        "ended cancelled>cancelled",
    ]
    async with rows.unchanged():
        await engine.cancel_execution(execution_id=claimed.execution_id, reason="again")


async def test_a_deadline_ends_a_suspended_execution(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    deadline = await clock.now() + 10_000
    claimed = await given.run(execution_deadline_at=deadline)
    await suspend_run(engine, claimed.handle, on_all("a", "b", "c"))
    assert await rows.timers(claimed.execution_id) == {"deadline": deadline}
    await clock.advance(ms=9_999)
    assert await parts_of(engine).timeouts.expire_due() == 0
    now = await clock.advance(ms=1)
    assert await parts_of(engine).timeouts.expire_due() == 1
    row = await rows.execution(claimed.execution_id)
    assert (vector(row), row["failure_reason"]) == (EXPIRED, "execution_deadline")
    await check_closed(rows, claimed.execution_id, "expired:execution_deadline", now)
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["failure_category"]) == ("ended_failure", "timeout")
    assert (await event_texts(rows, claimed.execution_id))[2:] == ["ended expired:execution_deadline>expired"]


async def test_expire_execution_ends_a_suspended_execution_past_its_deadline(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    claimed = await given.run(execution_deadline_at=await clock.now() + 1000)
    await suspend_run(engine, claimed.handle, on_all("a", "b", "c"))
    now = await clock.advance(seconds=1)
    answer = await engine.expire_execution(claimed.execution_id, ExpiryPhase.EXECUTION_DEADLINE)
    assert answer == Expired(execution_id=claimed.execution_id)
    await check_closed(rows, claimed.execution_id, "expired:execution_deadline", now)


async def test_the_attempt_timeout_is_paused_while_suspended(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    claimed = await given.run(policy={"timeout_policy": {"attempt_timeout_ms": 5000}})
    await clock.advance(seconds=1)
    await suspend_run(engine, claimed.handle)
    row = await rows.execution(claimed.execution_id)
    assert (row["attempt_timeout_at"], row["remaining_attempt_timeout_ms"]) == (None, 4000)
    assert await rows.timers(claimed.execution_id) == {}
    await clock.advance(seconds=3600)
    assert await parts_of(engine).timeouts.expire_due() == 0


async def test_the_end_of_an_execution_closes_only_its_own_suspension(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handles = [await given.claimed() for _ in range(3)]
    for handle in handles:
        await suspend_run(engine, handle, on_all("a", "b"))
    running = await given.claimed()
    await engine.create_waitpoint(running, waitpoint_key="later", expires_in_ms=60_000)
    await engine.cancel_execution(execution_id=handles[1].execution_id, reason="not wanted")
    for handle in (handles[0], handles[2]):
        assert (await suspension(rows, handle.execution_id))["closed_at"] is None
        assert {row["state"] for row in await waitpoints(rows, handle.execution_id)} == {"active"}
    assert [row["state"] for row in await waitpoints(rows, running.execution_id)] == ["pending"]
    await check_closed(rows, handles[1].execution_id, "cancelled", await clock.now(), count=2)


async def test_many_suspended_executions_end_in_one_sweep(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    deadline = await clock.now() + 1000
    handles = [await given.claimed(execution_deadline_at=deadline) for _ in range(5)]
    for handle in handles[:4]:
        await suspend_run(engine, handle, on_all("a", "b", "c"))
    now = await clock.advance(seconds=1)
    assert await parts_of(engine).timeouts.expire_due() == 5
    for handle in handles[:4]:
        await check_closed(rows, handle.execution_id, "expired:execution_deadline", now)
    assert await rows.of("waitpoint", execution_id=uuid_of(handles[4].execution_id)) == []


async def test_a_waitpoint_that_is_already_closed_keeps_its_close_reason(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    outcome = await suspend_run(engine, handle, on_all("a", "b"))
    first = await clock.now()
    await engine.close_waitpoint(
        execution_id=handle.execution_id, waitpoint_id=outcome.details.waitpoint_id, reason="mine"
    )
    now = await clock.advance(seconds=1)
    await engine.cancel_execution(execution_id=handle.execution_id, reason="not wanted")
    one, other = await waitpoints(rows, handle.execution_id)
    assert (one["close_reason"], one["closed_at"]) == ("mine", first)
    assert (other["close_reason"], other["closed_at"]) == ("cancelled", now)


async def test_a_suspended_execution_cannot_be_claimed(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    await suspend_run(engine, handle)
    async with rows.unchanged():
        assert await claim(engine) == []
        await refused(
            engine.claim_resumed_execution(
                execution_id=handle.execution_id, worker_id="worker", worker_instance_id="worker-1", lane_id="default"
            ),
            "not_a_resumed_execution",
        )

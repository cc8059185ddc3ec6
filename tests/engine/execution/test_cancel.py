"""Cancelling: from every state, by every source, once."""

import itertools
from typing import Any
from uuid import uuid4

from engine.state import (
    CANCELLED,
    CANCELLED_BEFORE_FIRST_ATTEMPT,
    all_cases,
    attempts,
    claim,
    event_texts,
    kept_until,
    lease_fields,
    refused,
    revoke,
    vector,
)
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import NotFoundError
from flowfabric.model.execution import Cancelled
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState

EXEMPT = ("operator_override", "flow_cascade", "system_timeout")
BOUND = ("lease_holder", "a source of the caller's own")


async def in_state(state: str, given: Given) -> tuple[ExecutionId, Handle | None]:
    """An execution in a state on a lane of that name, with the handle of its run if there was one."""
    match state:
        case "waiting":
            return await given.created(lane_id=state), None
        case "delayed":
            return await given.delayed(lane_id=state), None
        case "active":
            handle = await given.claimed(lane_id=state)
        case "expired":
            handle = await given.expired_lease(lane_id=state)
        case "reclaimable":
            handle = await given.reclaimable(lane_id=state)
        case "revoked":
            handle = await given.claimed(lane_id=state)
            await revoke(given.engine, handle.execution_id)
        case "backing off":
            handle = await given.backing_off(lane_id=state)
        case _:
            raise AssertionError(state)
    return handle.execution_id, handle


EVENTS = {
    "waiting": ["ended cancelled>cancelled"],
    "delayed": ["ended cancelled>cancelled"],
    "active": ["acquired", "released cancelled>cancelled"],
    "expired": ["acquired", "released cancelled>cancelled"],
    "reclaimable": ["acquired", "expired", "ended cancelled>cancelled"],
    "revoked": ["acquired", "revoked test", "ended cancelled>cancelled"],
    "backing off": ["acquired", "released failed_retry_scheduled", "ended cancelled>cancelled"],
}


async def test_an_operator_cancels_from_every_state(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    with all_cases() as case:
        for state, events in EVENTS.items():
            with case(state):
                execution_id, handle = await in_state(state, given)
                now = await clock.advance(ms=5)
                cancelled = await engine.cancel_execution(execution_id=execution_id, reason="not wanted")
                assert cancelled == Cancelled(execution_id=execution_id, public_state=PublicState.CANCELLED)
                assert await event_texts(rows, execution_id) == events
                await check_cancelled(rows, execution_id, handle, now, has_failed=state == "backing off")
    await clock.advance(seconds=3600)
    assert await claim(engine, *EVENTS) == []


async def check_cancelled(
    rows: Rows, execution_id: ExecutionId, handle: Handle | None, now: int, *, has_failed: bool
) -> None:
    """Check what an operator's cancel has written of an execution and of its run."""
    row = await rows.execution(execution_id)
    assert vector(row) == (CANCELLED_BEFORE_FIRST_ATTEMPT if handle is None else CANCELLED)
    assert {row[stamp] for stamp in ("completed_at", "last_transition_at", "last_mutation_at")} == {now}
    assert (row["cancellation_reason"], row["cancelled_by"]) == ("not wanted", "operator_override")
    assert (row["failure_reason"], row["blocking_detail"]) == (None, None)
    assert (row["delay_until"], await rows.timers(execution_id), lease_fields(row)) == (None, {}, {})
    assert await kept_until(rows, execution_id) == now + 86_400_000
    assert await rows.of("ready") == []
    (listed,) = await rows.of("listed", execution_id=uuid_of(execution_id))
    assert (listed["public_state"], listed["at"]) == ("cancelled", now)
    ended = await attempts(rows, execution_id)
    if has_failed:
        assert [attempt["attempt_state"] for attempt in ended] == ["ended_failure"]
    elif handle is not None:
        (attempt,) = ended
        assert (attempt["attempt_state"], attempt["failure_reason"]) == ("ended_cancelled", "cancelled: not wanted")
        assert (attempt["attempt_id"], attempt["lease_id"]) == (handle.attempt_id, handle.lease_id)
        assert (attempt["ended_at"], attempt["lease_epoch"]) == (now, 1)
        assert row["attempt_id"] == handle.attempt_id
    else:
        assert ended == []


async def test_every_source_cancels_what_does_not_run(engine: Engine, given: Given, rows: Rows) -> None:
    for source in (*EXEMPT, *BOUND):
        failed = await given.backing_off()
        for execution_id in (failed.execution_id, await given.created(), await given.delayed()):
            await engine.cancel_execution(execution_id=execution_id, reason="x", source=source)
            row = await rows.execution(execution_id)
            assert (row["terminal_outcome"], row["cancelled_by"]) == ("cancelled", source)
            assert (await event_texts(rows, execution_id))[-1] == "ended cancelled>cancelled"


async def test_an_override_needs_no_fence_and_ignores_a_wrong_one(engine: Engine, given: Given, rows: Rows) -> None:
    fences: list[dict[str, Any]] = [{}, {"lease_id": uuid4(), "lease_epoch": 99, "attempt_id": uuid4()}]
    for source, fence in itertools.product(EXEMPT, fences):
        handle = await given.claimed()
        await engine.cancel_execution(execution_id=handle.execution_id, reason="x", source=source, **fence)
        assert (await rows.execution(handle.execution_id))["cancelled_by"] == source


async def test_any_other_source_must_give_the_current_lease(engine: Engine, given: Given, rows: Rows) -> None:
    for source in BOUND:
        await check_source_needs_lease(source, engine, given, rows)


async def check_source_needs_lease(source: str, engine: Engine, given: Given, rows: Rows) -> None:
    """Check that a source cannot cancel a run without its current lease."""
    handle = await given.claimed()
    fence: dict[str, Any] = {"lease_id": handle.lease_id, "lease_epoch": handle.lease_epoch}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({}, "invalid_input"),
        ({"lease_id": handle.lease_id}, "invalid_input"),
        ({"lease_epoch": 1}, "invalid_input"),
        ({"attempt_id": handle.attempt_id}, "invalid_input"),
        ({**fence, "lease_id": uuid4()}, "stale_lease"),
        ({**fence, "lease_epoch": 0}, "stale_lease"),
        ({**fence, "lease_epoch": 2}, "stale_lease"),
        ({**fence, "attempt_id": uuid4()}, "stale_lease"),
        ({**fence, "lease_id": "no uuid"}, "invalid_input"),
        ({**fence, "attempt_id": "no uuid"}, "invalid_input"),
        ({**fence, "lease_epoch": "1"}, "invalid_input"),
    ]
    named: dict[str, Any] = {"execution_id": handle.execution_id, "reason": "x", "source": source}
    async with rows.unchanged():
        for wrong, code in refusals:
            await refused(engine.cancel_execution(**named, **wrong), code)
        stale = {**fence, "lease_epoch": 2}
        await refused(engine.cancel_execution(**named, **stale), "stale_lease", "the current run has 1, got 2")
    await engine.cancel_execution(**named, **fence)
    assert (await rows.execution(handle.execution_id))["cancelled_by"] == source
    for fields in (["lease_id", "lease_epoch"], ["lease_id", "lease_epoch", "attempt_id"]):
        other = await given.claimed()
        texts: dict[str, Any] = {"lease_id": str(other.lease_id), "lease_epoch": 1, "attempt_id": str(other.attempt_id)}
        named["execution_id"] = other.execution_id
        await engine.cancel_execution(**named, **{field: texts[field] for field in fields})
    revoked = await given.claimed(lane_id=f"revoked {source[:20]}")
    await revoke(engine, revoked.execution_id)
    named["execution_id"] = revoked.execution_id
    async with rows.unchanged():
        await refused(engine.cancel_execution(**named), "lease_revoked")
        await refused(engine.cancel_execution(**named, lease_id=revoked.lease_id, lease_epoch=1), "lease_revoked")


async def test_cancelling_twice_succeeds_and_changes_nothing(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    execution_id = await given.cancelled()
    running = await given.claimed()
    await engine.cancel(running, "first")
    await clock.advance(seconds=1)
    async with rows.unchanged():
        for named in (execution_id, running.execution_id):
            for source in (*EXEMPT, *BOUND):
                again = await engine.cancel_execution(execution_id=named, reason="other", source=source)
                assert again.public_state is PublicState.CANCELLED


async def test_a_completed_or_failed_execution_cannot_be_cancelled(engine: Engine, given: Given, rows: Rows) -> None:
    completed, failed = await given.completed(), await given.failed()
    async with rows.unchanged():
        for execution_id, outcome in ((completed, "success"), (failed, "failed")):
            refusal = await refused(
                engine.cancel_execution(execution_id=execution_id, reason="x"), "execution_not_active"
            )
            assert refusal.detail == {
                "terminal_outcome": outcome,
                "lease_epoch": "1",
                "lifecycle_phase": "terminal",
                "attempt_id": str((await rows.execution(execution_id))["attempt_id"]),
            }


async def test_an_absent_execution_cannot_be_cancelled(engine: Engine, given: Given, rows: Rows) -> None:
    await given.created()
    async with rows.unchanged():
        refusal = await refused(
            engine.cancel_execution(execution_id=f"{{fp:1}}:{uuid4()}", reason="x"), "execution_not_found"
        )
        assert isinstance(refusal, NotFoundError)
        wrong = (("no id", "MissingTag"), (f"{{fp:32768}}:{uuid4()}", "exceeds i16 range"))
        for execution_id, detail in wrong:
            await refused(engine.cancel_execution(execution_id=execution_id, reason="x"), "invalid_input", detail)
        for field in ("reason", "source"):
            texts: dict[str, Any] = {"reason": "x", "source": "y", field: "\0"}
            await refused(engine.cancel_execution(execution_id=f"{{fp:1}}:{uuid4()}", **texts), "invalid_input", field)


async def test_a_worker_cancels_its_own_run_and_may_repeat_the_call(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    claimed = await given.run()
    now = await clock.advance(ms=5)
    await engine.cancel(claimed.handle, "asked to stop")
    row = await rows.execution(claimed.execution_id)
    assert vector(row) == CANCELLED
    assert (row["cancellation_reason"], row["cancelled_by"]) == ("asked to stop", "lease_holder")
    assert (row["completed_at"], lease_fields(row), row["attempt_id"]) == (now, {}, claimed.attempt_id)
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"]) == ("ended_cancelled", "cancelled: asked to stop")
    assert await event_texts(rows, claimed.execution_id) == ["acquired", "released cancelled>cancelled"]
    async with rows.unchanged():
        await engine.cancel(claimed.handle, "asked again")


async def test_a_worker_whose_run_was_cancelled_by_others_may_cancel_it(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    await engine.cancel_execution(execution_id=handle.execution_id, reason="by others")
    async with rows.unchanged():
        await engine.cancel(handle, "by me")
    untried = await given.backing_off()
    await engine.cancel_execution(execution_id=untried.execution_id, reason="by others")
    async with rows.unchanged():
        await refused(engine.cancel(untried, "its attempt had failed before"), "execution_not_active")

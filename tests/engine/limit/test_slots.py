"""Slots: every end of a lease returns them, whoever ends it."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flows import flow_of, stop_cascade
from engine.limit.limits import hold_slots, key_no, used
from engine.waits import suspend_args
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.stream import Frame

QUOTA, OTHER = uuid4(), uuid4()
RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1000}}}
AT_ONCE = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}}
TIMEOUT = {"timeout_policy": {"attempt_timeout_ms": 1000}}

End = Callable[[Engine, Handle, Clock], Awaitable[object]]


async def _expire(engine: Engine, handle: Handle, clock: Clock) -> None:
    await clock.advance(seconds=31)
    await engine.mark_lease_expired_if_due(handle.execution_id)


async def _time_out(engine: Engine, handle: Handle, clock: Clock) -> None:
    await clock.advance(seconds=1)
    await engine.expire_execution(handle.execution_id, "attempt_timeout")


async def _reach_deadline(engine: Engine, handle: Handle, clock: Clock) -> None:
    await clock.advance(seconds=2)
    await engine.expire_execution(handle.execution_id, "execution_deadline")


async def _stream_and_complete(engine: Engine, handle: Handle, _: Clock) -> None:
    await engine.append_frame(handle, Frame(bytes=b"frame"))
    await engine.complete(handle, b"x")


ENDS: dict[str, tuple[End, dict[str, Any]]] = {
    "complete": (lambda e, h, _: e.complete(h, b"x"), {}),
    "complete with a large result": (lambda e, h, _: e.complete(h, b"x" * 1500), {}),
    "complete with tags": (lambda e, h, _: e.complete(h, b"x"), {"tags": {"app.key": "value"}}),
    "complete with a stream": (_stream_and_complete, {}),
    "complete_many": (lambda e, h, _: e.complete_many([(h, b"x")]), {}),
    "fail": (lambda e, h, _: e.fail(h, reason="x"), {}),
    "retry": (lambda e, h, _: e.fail(h, reason="x"), {"policy": RETRIES}),
    "retry at once": (lambda e, h, _: e.fail(h, reason="x"), {"policy": AT_ONCE}),
    "cancel": (lambda e, h, _: e.cancel(h, "x"), {}),
    "cancel_execution": (lambda e, h, _: e.cancel_execution(execution_id=h.execution_id, reason="x"), {}),
    "timeout": (_time_out, {"policy": TIMEOUT}),
    "timeout with a retry": (_time_out, {"policy": {**TIMEOUT, **RETRIES}}),
    "deadline": (_reach_deadline, {"deadline": 2000}),
    "suspend": (lambda e, h, _: e.suspend(h, suspend_args()), {}),
    "delay": (lambda e, h, _: e.delay(h, delay_ms=1000), {}),
    "wait_children": (lambda e, h, _: e.wait_children(h), {}),
    "hand_back": (lambda e, h, _: e.hand_back(h), {}),
    "lease expiry": (_expire, {}),
    "revoke": (lambda e, h, _: e.revoke_lease(h.execution_id, reason="x"), {}),
}


@pytest.mark.parametrize("end", ENDS)
async def test_the_end_of_a_lease_returns_its_slots_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection, end: str
) -> None:
    await clock.stop()
    call, options = ENDS[end]
    options = dict(options)
    if deadline := options.pop("deadline", None):
        options["execution_deadline_at"] = await clock.now() + deadline
    nos = [await key_no(engine, rows, quota) for quota in (QUOTA, OTHER)]
    handle = await given.claimed(**options)
    other = await given.claimed(lane_id="other")
    await hold_slots(connection, handle.execution_id, *nos)
    await hold_slots(connection, other.execution_id, nos[0])
    wakeups = parts_of(engine).wakeups
    before = wakeups.wakes(["default"])
    await call(engine, handle, clock)
    assert [await used(rows, quota) for quota in (QUOTA, OTHER)] == [1, 0]
    (row,) = await rows.of("execution", execution_id=uuid_of(handle.execution_id))
    assert not row["slot_keys"]
    assert row["attached"] & 8 == 0
    assert wakeups.wakes(["default"]) > before
    # Nothing is returned twice.
    await engine.cancel_execution(execution_id=other.execution_id, reason="x")
    if row["lifecycle_phase"] != "terminal":
        await engine.cancel_execution(execution_id=handle.execution_id, reason="x")
    assert [await used(rows, quota) for quota in (QUOTA, OTHER)] == [0, 0]


async def test_one_statement_completes_leases_with_slots_and_without(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    no = await key_no(engine, rows, QUOTA)
    handles = [await given.claimed() for _ in range(4)]
    for handle in handles[:3]:
        await hold_slots(connection, handle.execution_id, no)

    async def unexpected(*_: object) -> None:
        raise AssertionError("the cheap statement serves all of them")

    monkeypatch.setattr(parts_of(engine).lease_expiry._lease_ends, "_end_each", unexpected)
    await engine.complete_many([(handle, b"x") for handle in handles])
    assert await used(rows, QUOTA) == 0
    (returned,) = await rows.of("slot_return")
    assert returned["returned"] == 3


async def test_a_refused_call_returns_no_slot(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    no = await key_no(engine, rows, QUOTA)
    handle = await given.claimed()
    await engine.revoke_lease(handle.execution_id, reason="x")
    again = await given.claim()
    await hold_slots(connection, again.execution_id, no)
    for end in (engine.complete(handle, b"x"), engine.fail(handle, reason="x"), engine.delay(handle, delay_ms=1)):
        with pytest.raises(Exception, match="lease_conflict"):
            await end
    assert await used(rows, QUOTA) == 1
    await engine.complete(again.handle, b"x")
    assert await used(rows, QUOTA) == 0


async def _granted(engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection) -> ExecutionId:
    """An execution with a grant that holds a slot."""
    execution_id = await given.created()
    await _grant(engine, given, rows, connection, execution_id)
    return execution_id


async def _grant(engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, execution_id: str) -> None:
    await given.registered()
    (row,) = await rows.of("execution", execution_id=uuid_of(execution_id))
    (lane,) = await rows.of("lane", lane_no=row["lane_no"])
    await engine.issue_claim_grant(
        execution_id=execution_id, lane_id=lane["lane_id"], worker_id="worker", worker_instance_id="worker-1"
    )
    await hold_slots(connection, execution_id, await key_no(engine, rows, QUOTA))


async def test_a_cancelled_or_blocked_execution_returns_the_slot_of_its_grant(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    cancelled = await _granted(engine, given, rows, connection)
    blocked = await _granted(engine, given, rows, connection)
    limited = await _granted(engine, given, rows, connection)
    dependent = await _granted(engine, given, rows, connection)
    assert await used(rows, QUOTA) == 4
    await engine.cancel_execution(execution_id=cancelled, reason="x")
    await engine.block_execution_for_admission(blocked, "paused_by_operator")
    await engine.block_execution_for_admission(limited, "waiting_for_budget")
    upstream = await given.created()
    await flow_of(engine, [upstream, dependent], [(upstream, dependent)])
    assert await used(rows, QUOTA) == 0
    assert await rows.of("claim_grant") == []


async def test_a_member_that_is_skipped_or_held_for_a_cancellation_returns_the_slot_of_its_grant(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    stop_cascade(engine)
    flow = await DrivenFlow.submit(engine, rows, "a b", "")
    await _grant(engine, given, rows, connection, flow.id("a"))
    assert await used(rows, QUOTA) == 1
    await engine.cancel_flow_header(flow.flow_id, reason="x", cancellation_policy="cancel_all")
    assert await used(rows, QUOTA) == 0


async def test_processes_count_the_slots_they_return_apart(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    no = await key_no(engine, rows, QUOTA)
    for shard in (3, 5, 3):
        monkeypatch.setattr(parts_of(engine).store, "slot_shard", shard)
        handle = await given.claimed()
        await hold_slots(connection, handle.execution_id, no)
        await engine.complete(handle, b"x")
    assert sorted((row["shard"], row["returned"]) for row in await rows.of("slot_return")) == [(3, 2), (5, 1)]

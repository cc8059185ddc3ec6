"""Slots: every end of a lease returns them, whoever ends it."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import pytest

from engine.flow.driving import DrivenFlow
from engine.flows import flow_of, stop_cascade
from engine.limit.limits import limited, quota, used
from engine.state import claim, refused
from engine.waits import suspend_args
from fixtures import Clock, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, FlowId, mint_for_flow
from flowfabric.model.stream import Frame
from flowfabric.reconcile.loop import Reconciler

RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1000}}}
AT_ONCE = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}}
TIMEOUT = {"timeout_policy": {"attempt_timeout_ms": 1000}}

End = Callable[[Engine, Handle, Clock], Awaitable[object]]


async def _expire(engine: Engine, handle: Handle, clock: Clock) -> None:
    await clock.advance(seconds=31)
    await engine.mark_lease_expired_if_due(handle.execution_id)


async def _expire_by_sweep(engine: Engine, handle: Handle, clock: Clock) -> None:
    await clock.advance(seconds=31)
    await Reconciler(engine).catch_up()


async def _time_out(engine: Engine, handle: Handle, clock: Clock) -> None:
    await clock.advance(seconds=1)
    await engine.expire_execution(handle.execution_id, "attempt_timeout")


async def _reach_deadline(engine: Engine, handle: Handle, clock: Clock) -> None:
    await clock.advance(seconds=2)
    await engine.expire_execution(handle.execution_id, "execution_deadline")


async def _stream_and_complete(engine: Engine, handle: Handle, _: Clock) -> None:
    await engine.append_frame(handle, Frame(bytes=b"frame"))
    await engine.complete(handle, b"x")


async def _cancel_many(engine: Engine, handle: Handle, _: Clock) -> None:
    await parts_of(engine).cancel_many.cancel([handle.execution_id], reason="x")


async def _reach_reclaim_limit(engine: Engine, handle: Handle, clock: Clock) -> None:
    await _expire(engine, handle, clock)
    assert await claim(engine, limit=1, kinds=("lost",)) == []


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
    "cancel_many": (_cancel_many, {}),
    "timeout": (_time_out, {"policy": TIMEOUT}),
    "timeout with a retry": (_time_out, {"policy": {**TIMEOUT, **RETRIES}}),
    "deadline": (_reach_deadline, {"deadline": 2000}),
    "suspend": (lambda e, h, _: e.suspend(h, suspend_args()), {}),
    "delay": (lambda e, h, _: e.delay(h, delay_ms=1000), {}),
    "wait_children": (lambda e, h, _: e.wait_children(h), {}),
    "hand_back": (lambda e, h, _: e.hand_back(h), {}),
    "lease expiry": (_expire, {}),
    "lease expiry by a sweep": (_expire_by_sweep, {}),
    "revoke": (lambda e, h, _: e.revoke_lease(h.execution_id, reason="x"), {}),
    "reclaim limit": (_reach_reclaim_limit, {"execution_kind": "lost", "policy": {"max_reclaim_count": 0}}),
}


@pytest.mark.parametrize("end", ENDS)
async def test_the_end_of_a_lease_returns_its_slots_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock, end: str
) -> None:
    await clock.stop()
    call, options = ENDS[end]
    options = dict(options)
    if deadline := options.pop("deadline", None):
        options["execution_deadline_at"] = await clock.now() + deadline
    own, shared = await quota(engine, running=1), await quota(engine, running=2)
    await engine.attach_quota("namespace", "limited", shared)
    policy = {**limited(own), **options.pop("policy", {})}
    handle = await given.claimed(namespace="limited", policy=policy, **options)
    other = await given.claimed(lane_id="other", namespace="limited", lease_ttl_ms=86_400_000)
    await given.created(namespace="limited", lane_id="blocked", priority=9)
    assert await claim(engine, "blocked") == []
    assert [await used(rows, each) for each in (own, shared)] == [1, 2]
    wakeups = parts_of(engine).wakeups
    before = wakeups.wakes(["blocked"])
    await call(engine, handle, clock)
    assert [await used(rows, each) for each in (own, shared)] == [0, 1]
    (row,) = await rows.of("execution", execution_id=uuid_of(handle.execution_id))
    assert not row["slot_keys"]
    assert row["attached"] & 8 == 0
    assert wakeups.wakes(["blocked"]) > before
    # Nothing is returned twice.
    await engine.cancel_execution(execution_id=other.execution_id, reason="x")
    if row["lifecycle_phase"] != "terminal":
        await engine.cancel_execution(execution_id=handle.execution_id, reason="x")
    assert [await used(rows, each) for each in (own, shared)] == [0, 0]
    assert len(await claim(engine, "blocked")) == 1


async def test_one_statement_completes_leases_with_slots_and_without(
    engine: Engine, given: Given, rows: Rows, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = await quota(engine, running=3)
    handles = [await given.claimed(**({"policy": limited(slots)} if nth < 3 else {})) for nth in range(4)]
    assert await used(rows, slots) == 3

    async def unexpected(*_: object) -> None:
        raise AssertionError("the cheap statement serves all of them")

    monkeypatch.setattr(parts_of(engine).lease_expiry._lease_ends, "_end_each", unexpected)
    await engine.complete_many([(handle, b"x") for handle in handles])
    assert await used(rows, slots) == 0
    (returned,) = await rows.of("slot_return")
    assert returned["returned"] == 3


async def test_a_refused_call_returns_no_slot(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    slots = await quota(engine, running=1)
    handle = await given.claimed(policy=limited(slots))
    await engine.revoke_lease(handle.execution_id, reason="x")
    again = await given.claim()
    for end in (engine.complete(handle, b"x"), engine.fail(handle, reason="x"), engine.delay(handle, delay_ms=1)):
        await refused(end, "lease_conflict")
    assert await used(rows, slots) == 1
    await engine.complete(again.handle, b"x")
    assert await used(rows, slots) == 0


async def test_a_reclaim_by_another_worker_holds_one_slot(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    slots = await quota(engine, running=1)
    handle = await given.claimed(policy=limited(slots))
    await clock.advance(seconds=31)
    again = await given.claim(worker="other")
    assert again.execution_id == handle.execution_id
    assert await used(rows, slots) == 1
    await refused(engine.complete(handle, b"x"), "lease_conflict")
    await engine.complete(again.handle, b"x")
    assert await used(rows, slots) == 0


async def test_retention_leaves_no_slot(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    slots = await quota(engine, running=2)
    handles = [await given.claimed(policy=limited(slots)) for _ in range(2)]
    await engine.complete(handles[0], b"x")
    await engine.fail(handles[1], reason="x")
    await clock.advance(seconds=100_000)
    await Reconciler(engine).catch_up()
    assert await rows.of("execution") == []
    assert await used(rows, slots) == 0


async def _granted(engine: Engine, given: Given, slots: UUID) -> ExecutionId:
    """An execution with a grant that holds a slot."""
    execution_id = await given.created(policy=limited(slots))
    await _grant(engine, execution_id)
    return execution_id


async def _grant(engine: Engine, execution_id: str, lane_id: str = "default") -> None:
    await engine.issue_claim_grant(
        execution_id=execution_id, lane_id=lane_id, worker_id="worker", worker_instance_id="worker-1"
    )


async def test_a_cancelled_or_blocked_execution_returns_the_slot_of_its_grant(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    slots = await quota(engine, running=4)
    cancelled, blocked, by_budget = [await _granted(engine, given, slots) for _ in range(3)]
    assert await used(rows, slots) == 3
    await engine.cancel_execution(execution_id=cancelled, reason="x")
    assert await used(rows, slots) == 2
    await engine.block_execution_for_admission(blocked, "paused_by_operator")
    assert await used(rows, slots) == 1
    await engine.block_execution_for_admission(by_budget, "waiting_for_budget")
    assert await used(rows, slots) == 0
    assert await rows.of("claim_grant") == []


async def test_every_end_of_a_grant_wakes_claims(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    slots = await quota(engine, running=1)
    wakeups = parts_of(engine).wakeups

    async def block(execution_id: ExecutionId) -> None:
        await engine.block_execution_for_admission(execution_id, "paused_by_operator")

    async def depend(execution_id: ExecutionId) -> None:
        upstream = await given.delayed()
        await flow_of(engine, [upstream, execution_id], [(upstream, execution_id)])

    for end in (block, depend):
        granted = await _granted(engine, given, slots)
        waiting = await given.created(policy=limited(slots))
        assert await claim(engine) == []
        before = wakeups.wakes(["default"])
        await end(granted)
        assert wakeups.wakes(["default"]) > before
        (run,) = await claim(engine)
        assert run.execution_id == waiting
        await engine.complete(run.handle, b"")


async def test_a_member_that_is_skipped_or_held_for_a_cancellation_returns_the_slot_of_its_grant(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    stop_cascade(engine)
    slots = await quota(engine, running=1)
    await engine.attach_quota("namespace", "tests", slots)
    flow = await DrivenFlow.submit(engine, rows, "a b", "")
    (row,) = await rows.of("execution", execution_id=uuid_of(flow.id("a")))
    (lane,) = await rows.of("lane", lane_no=row["lane_no"])
    await _grant(engine, flow.id("a"), lane["lane_id"])
    await given.created(lane_id="waiting")
    assert await claim(engine, "waiting") == []
    assert await used(rows, slots) == 1
    before = parts_of(engine).wakeups.wakes(["waiting"])
    await engine.cancel_flow_header(flow.flow_id, reason="x", cancellation_policy="cancel_all")
    assert await used(rows, slots) == 0
    assert parts_of(engine).wakeups.wakes(["waiting"]) > before


async def test_a_cancelled_flow_returns_the_slots_of_its_running_members(
    engine: Engine, given: Given, rows: Rows, clock: Clock, eventually: Eventually
) -> None:
    slots = await quota(engine, running=2)
    flow_id = FlowId(uuid4())
    await engine.create_flow(flow_id, flow_kind="dag", namespace="tests", quota_policy_id=slots)
    for _ in range(2):
        member = await given.created(execution_id=mint_for_flow(flow_id, parts_of(engine).store.rules.partitions))
        await engine.add_execution_to_flow(flow_id, member)
    assert len(await claim(engine)) == 2
    assert await used(rows, slots) == 2
    await engine.cancel_flow(flow_id, reason="x", cancellation_policy="cancel_all")

    async def are_free() -> bool:
        return await used(rows, slots) == 0

    await eventually(are_free)


async def test_processes_count_the_slots_they_return_apart(
    engine: Engine, given: Given, rows: Rows, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = await quota(engine, running=1)
    for shard in (3, 5, 3):
        monkeypatch.setattr(parts_of(engine).store, "slot_shard", shard)
        handle = await given.claimed(policy=limited(slots))
        await engine.complete(handle, b"x")
    assert sorted((row["shard"], row["returned"]) for row in await rows.of("slot_return")) == [(3, 2), (5, 1)]

"""Lost leases: marked, taken over by the next claim, counted, and ended at the reclaim limit."""

import asyncio
import logging
from typing import Any

import asyncpg
import pytest

from engine.cases import in_turn
from engine.state import (
    ACTIVE,
    EXPIRED_LEASE,
    FAILED,
    REVOKED,
    attempts,
    claim,
    event_texts,
    ids,
    lease_fields,
    refused,
    revoke,
    vector,
)
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.grant import Granted, NoWork, ReclaimCapExceeded
from flowfabric.model.states import AttemptType, HandleKind


async def test_marking_an_expired_lease_keeps_its_fields(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.claimed(lease_ttl_ms=1000)
    before = await rows.execution(lost.execution_id)
    now = await clock.advance(ms=1000)
    assert await parts_of(engine).lease_expiry.sweep() == 1
    assert await rows.of("claim") == []
    (entry,) = await rows.of("ready")
    assert (entry["execution_id"], entry["place"]) == (before["execution_id"], before["place"])
    (listed,) = await rows.of("listed")
    assert (listed["execution_id"], listed["public_state"], listed["at"]) == (before["execution_id"], "active", now)
    row = await rows.execution(lost.execution_id)
    assert vector(row) == EXPIRED_LEASE
    changed = {name: row[name] for name in row if row[name] != before[name]}
    assert changed == {
        "ownership_state": "lease_expired_reclaimable",
        "blocking_reason": "waiting_for_worker",
        "attempt_state": "attempt_interrupted",
        "blocking_detail": "lease expired, awaiting reclaim",
        "lease_expired_at": now,
        "last_mutation_at": now,
    }
    assert await event_texts(rows, lost.execution_id) == ["acquired", "expired"]
    event = (await rows.events(lost.execution_id))[1]
    assert (event["lease_epoch"], event["lease_id"], event["attempt_index"]) == (1, lost.lease_id, 0)
    assert (event["worker_no"], event["at"]) == (before["worker_no"], now)


async def test_a_lease_is_marked_at_its_expiry_and_not_before(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=999)
    async with rows.unchanged():
        assert await parts_of(engine).lease_expiry.sweep() == 0
    await clock.advance(ms=1)
    assert await parts_of(engine).lease_expiry.sweep() == 1
    async with rows.unchanged():
        assert await parts_of(engine).lease_expiry.sweep() == 0


@in_turn("is_marked", [True, False])
async def test_the_next_claim_takes_over_an_expired_lease_as_a_new_attempt(
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    is_marked: bool,  # noqa: FBT001
) -> None:
    began = await clock.now()
    lost = await given.claimed(lease_ttl_ms=1000, policy={"timeout_policy": {"attempt_timeout_ms": 50_000}})
    lost_worker = (await rows.execution(lost.execution_id))["worker_no"]
    now = await clock.advance(seconds=2)
    if is_marked:
        await parts_of(engine).lease_expiry.sweep()
    (taken,) = await claim(engine, worker_id="another", worker_instance_id="another-1", lease_ttl_ms=7000)
    assert (taken.execution_id, taken.handle.kind) == (lost.execution_id, HandleKind.RECLAIMED)
    assert (taken.attempt_type, taken.attempt_index, taken.lease_epoch) == (AttemptType.RECLAIM, 1, 2)
    assert taken.lease_id != lost.lease_id
    assert taken.attempt_id != lost.attempt_id
    row = await rows.execution(lost.execution_id)
    assert vector(row) == ACTIVE
    assert (row["reclaim_count"], row["attempt_count"], row["retry_count"]) == (1, 2, 0)
    assert (row["lease_id"], row["attempt_id"], row["lease_expires_at"]) == (
        taken.lease_id,
        taken.attempt_id,
        now + 7000,
    )
    assert (row["started_at"], row["claimed_at"], row["last_transition_at"]) == (began, now, now)
    assert (row["lease_expired_at"], row["blocking_detail"]) == (None, None)
    assert row["attempt_timeout_at"] == now + 50_000
    assert row["worker_no"] != lost_worker
    interrupted, running = await attempts(rows, lost.execution_id)
    assert (running["attempt_id"], running["attempt_state"]) == (taken.attempt_id, "started")
    assert (running["previous_attempt_index"], running["reclaim_reason"]) == (0, "lease_lease_expired_reclaimable")
    assert (interrupted["attempt_state"], interrupted["failure_reason"]) == (
        "interrupted_reclaimed",
        "lease_lease_expired_reclaimable",
    )
    assert (interrupted["attempt_index"], interrupted["attempt_id"]) == (0, lost.attempt_id)
    assert (interrupted["lease_id"], interrupted["lease_epoch"]) == (lost.lease_id, 1)
    assert (interrupted["started_at"], interrupted["ended_at"]) == (began, now)
    assert interrupted["worker_no"] == lost_worker
    assert await event_texts(rows, lost.execution_id) == ["acquired", "expired", "reclaimed"]
    event = (await rows.events(lost.execution_id))[2]
    assert (event["lease_epoch"], event["lease_id"], event["attempt_index"]) == (2, taken.lease_id, 1)
    assert event["worker_no"] == row["worker_no"]


async def test_a_reclaimed_run_completes(engine: Engine, given: Given, rows: Rows) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    lost = await given.reclaimable(policy=policy, capabilities=("gpu",))
    async with rows.unchanged(without=["claim"]):
        assert await claim(engine) == [], "the worker lacks a capability"
    (taken,) = await claim(engine, capabilities=("gpu",))
    await engine.complete(taken.handle, b"late but done")
    assert await engine.get_execution_result(lost.execution_id) == b"late but done"
    first, second = await attempts(rows, lost.execution_id)
    assert (first["attempt_state"], second["attempt_state"]) == ("interrupted_reclaimed", "ended_success")
    assert (second["attempt_type"], second["previous_attempt_index"]) == ("reclaim", 0)
    assert second["reclaim_reason"] == "lease_lease_expired_reclaimable"
    assert (await event_texts(rows, lost.execution_id))[2:] == ["reclaimed", "released completed>success"]


async def test_the_next_claim_takes_over_a_revoked_lease(engine: Engine, given: Given, rows: Rows) -> None:
    lost = await given.claimed()
    await revoke(engine, lost.execution_id)
    assert vector(await rows.execution(lost.execution_id)) == REVOKED
    (taken,) = await claim(engine)
    assert (taken.handle.kind, taken.attempt_type) == (HandleKind.RECLAIMED, AttemptType.RECLAIM)
    row = await rows.execution(lost.execution_id)
    assert (vector(row), row["lease_revoked_at"], row["lease_revoke_reason"]) == (ACTIVE, None, None)
    assert (await attempts(rows, lost.execution_id))[0]["failure_reason"] == "lease_lease_revoked"


async def test_the_epoch_rises_with_every_retry_and_reclaim(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.backing_off(delay_ms=1, max_retries=9)
    for epoch in range(2, 9):
        await clock.advance(seconds=40)
        (claimed,) = await claim(engine)
        assert (claimed.lease_epoch, claimed.attempt_index) == (epoch, epoch - 1)
        if epoch % 2:
            await engine.fail(claimed.handle, reason="again")
    await refused(engine.renew(handle), "lease_conflict")


async def test_a_reclaimed_retry_keeps_its_retry_count(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    failed = await given.backing_off(delay_ms=1)
    await clock.advance(seconds=1)
    (retried,) = await claim(engine)
    await clock.advance(seconds=40)
    (taken,) = await claim(engine)
    assert (taken.attempt_type, taken.retry_count, taken.attempt_index) == (AttemptType.RECLAIM, 1, 2)
    _, interrupted, running = await attempts(rows, failed.execution_id)
    assert (interrupted["attempt_type"], interrupted["retry_reason"]) == ("retry", "no luck")
    assert interrupted["attempt_id"] == retried.attempt_id
    assert (running["attempt_type"], running["retry_reason"], running["previous_attempt_index"]) == ("reclaim", None, 1)


@in_turn("cap", [0, 1, 3])
async def test_an_execution_at_its_reclaim_limit_fails(
    engine: Engine, given: Given, rows: Rows, clock: Clock, cap: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = await given.claimed(policy={"max_reclaim_count": cap})
    last = first
    for count in range(cap):
        await clock.advance(seconds=31)
        (taken,) = await claim(engine)
        assert (await rows.execution(first.execution_id))["reclaim_count"] == count + 1
        last = taken.handle
    now = await clock.advance(seconds=31)
    with caplog.at_level(logging.WARNING):
        assert await claim(engine) == []
    assert first.execution_id in caplog.text
    row = await rows.execution(first.execution_id)
    assert vector(row) == FAILED
    assert (row["failure_reason"], row["reclaim_count"]) == ("max_reclaims_exceeded", cap)
    assert (row["completed_at"], row["last_transition_at"], row["attempt_count"]) == (now, now, cap + 1)
    assert (row["lease_epoch"], row["attempt_id"], lease_fields(row)) == (cap + 1, last.attempt_id, {})
    ended = await attempts(rows, first.execution_id)
    assert [attempt["attempt_state"] for attempt in ended] == ["interrupted_reclaimed"] * (cap + 1)
    assert (ended[-1]["attempt_id"], ended[-1]["ended_at"]) == (last.attempt_id, now)
    lost = ["expired", "reclaimed"] * cap
    end = ["expired", "released max_reclaims_exceeded>failed"]
    assert await event_texts(rows, first.execution_id) == ["acquired", *lost, *end]
    event = (await rows.events(first.execution_id))[-1]
    assert (event["lease_id"], event["lease_epoch"], event["attempt_index"]) == (last.lease_id, cap + 1, cap)
    refusal = await refused(engine.complete(last), "execution_not_active")
    assert refusal.detail["terminal_outcome"] == "failed"  # type: ignore[index]


@pytest.mark.usefixtures("altered_rows")
@in_turn("policy, cap", [(None, 1000), ({}, 100)])
async def test_the_default_reclaim_limit_is_1000_without_a_policy_and_100_with_one(
    engine: Engine, given: Given, connection: asyncpg.Connection, policy: dict[str, Any] | None, cap: int
) -> None:
    below, at, granted = [await given.reclaimable(policy=policy, lane_id=lane) for lane in ("below", "at", "granted")]
    # Losing a real lease this often would take minutes.
    lost = "update execution set reclaim_count = $1 - (execution_id = $2)::int"
    await connection.execute(lost, cap, uuid_of(below.execution_id))
    assert ids(await claim(engine, "below")) == [below.execution_id]
    assert ids(await claim(engine, "at")) == []
    assert await engine.read_execution_state(at.execution_id) == "failed"
    refusal = await engine.issue_reclaim_grant(
        execution_id=granted.execution_id, lane_id="granted", worker_id="worker", worker_instance_id="worker-1"
    )
    assert refusal == ReclaimCapExceeded(execution_id=granted.execution_id, reclaim_count=cap)


async def test_a_claim_continues_past_executions_at_their_reclaim_limit(engine: Engine, given: Given) -> None:
    capped = [await given.expired_lease(policy={"max_reclaim_count": 0}, priority=5) for _ in range(3)]
    await parts_of(engine).lease_expiry.sweep()
    behind = await given.created()
    assert ids(await claim(engine, limit=1)) == [behind]
    states = [await engine.read_execution_state(handle.execution_id) for handle in capped]
    assert states == ["failed"] * 3


async def test_the_limit_of_the_policy_counts_and_not_that_of_its_timeout_policy(
    engine: Engine, given: Given, clock: Clock
) -> None:
    lost = await given.claimed(policy={"max_reclaim_count": 1, "timeout_policy": {"max_reclaim_count": 0}})
    await clock.advance(seconds=31)
    assert ids(await claim(engine)) == [lost.execution_id]
    await clock.advance(seconds=31)
    assert await claim(engine) == []


STAYS = {
    "refused": (
        "alter table execution add constraint none check (failure_reason <> 'max_reclaims_exceeded')",
        "alter table execution drop constraint none",
    ),
    "skipped": (
        """create function skip() returns trigger language plpgsql as 'begin return null; end';
           create trigger skip before update on execution for each row
           when (new.failure_reason = 'max_reclaims_exceeded') execute function skip()""",
        "drop function skip cascade",
    ),
}
"""Makes the update that ends an execution fail or skip its row, and the undoing of that."""
WORKER: dict[str, Any] = {"lane_id": "default", "worker_id": "worker", "worker_instance_id": "worker-1"}


@pytest.mark.usefixtures("altered_rows")
@in_turn("limit", [1, 10])
@in_turn("kind", STAYS)
async def test_an_execution_at_its_limit_that_cannot_be_ended_blocks_no_claim(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, kind: str, limit: int
) -> None:
    stuck = [await given.expired_lease(policy={"max_reclaim_count": 0}, priority=5) for _ in range(2)]
    await parts_of(engine).lease_expiry.sweep()
    block, unblock = STAYS[kind]
    await connection.execute(block)
    behind = [await given.created() for _ in range(2)]
    async with asyncio.timeout(30):
        assert ids([*await claim(engine, limit=limit), *await claim(engine, limit=limit)]) == behind
        async with rows.unchanged(without=["claim"]):
            assert await claim(engine, limit=limit) == []
            assert isinstance(await engine.claim_for_worker(**WORKER), NoWork)
        last = await given.created()
        granted = await engine.claim_for_worker(**WORKER)
    assert isinstance(granted, Granted)
    assert granted.execution_id == last
    assert {(await rows.execution(handle.execution_id))["public_state"] for handle in stuck} == {"active"}
    if kind == "refused":
        assert await engine.find_inconsistencies() == []
    await connection.execute(unblock)


async def test_a_claim_returns_its_leases_even_if_the_search_for_more_fails(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    await given.expired_lease(policy={"max_reclaim_count": 0}, priority=5)
    await parts_of(engine).lease_expiry.sweep()
    leased, poisoned = [await given.created() for _ in range(2)]
    constraint = f"check (execution_id <> '{uuid_of(poisoned)}' or lifecycle_phase <> 'active')"
    await connection.execute(f"alter table execution add constraint none {constraint}")
    # The first statement passes the execution at its limit and leases one; the next statement fails.
    assert ids(await claim(engine, limit=2)) == [leased]
    with pytest.raises(EngineError):
        await claim(engine, limit=2)


async def test_an_execution_that_cannot_be_ended_at_its_limit_does_not_block_the_others(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    capped = [await given.expired_lease(policy={"max_reclaim_count": 0}) for _ in range(3)]
    await parts_of(engine).lease_expiry.sweep()
    refused_one = f"(execution_id <> '{uuid_of(capped[1].execution_id)}' or terminal_outcome <> 'failed')"
    await connection.execute(f"alter table execution add constraint none check {refused_one}")
    assert await claim(engine) == []
    states = [await engine.read_execution_state(handle.execution_id) for handle in capped]
    assert states == ["failed", "active", "failed"]


async def test_an_execution_is_not_ended_for_a_lease_that_was_taken_over_since(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable(policy={"max_reclaim_count": 1})
    await claim(engine)
    await clock.advance(seconds=31)
    await parts_of(engine).lease_expiry.sweep()
    # A search saw the first lease at the limit; since then a claim took it over and lost its lease too.
    async with rows.unchanged():
        await engine._services[Finish].end_at_reclaim_limit([(lost.execution_id, lost.lease_epoch)])
    await engine._services[Finish].end_at_reclaim_limit([(lost.execution_id, lost.lease_epoch + 1)])
    assert await engine.read_execution_state(lost.execution_id) == "failed"

"""Supervised reclaim: a lost lease reserved for a worker, taken over, counted, and ended at the reclaim limit."""

import json
import logging
from typing import Any

import asyncpg
import pytest

from engine.cases import Cases, in_turn
from engine.grants import claim_named, grant, known, reclaim, reclaim_grant, worker
from engine.lease.test_grants import expected_key
from engine.state import (
    ACTIVE,
    EXPIRED_LEASE,
    FAILED,
    attempts,
    claim,
    event_texts,
    ids,
    lease_left,
    refused,
    revoke,
    vector,
)
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.grant import Granted, GrantNotFound, NotReclaimable, ReclaimCapExceeded, ReclaimGrant
from flowfabric.model.ids import LaneId, mint_uuid_texts
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.states import AttemptType, HandleKind

GPU = {"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}}
LEASE = "01a1def0-0000-7000-8000-000000000001"
ATTEMPT = "01a1def0-0000-7000-8000-000000000002"


@pytest.fixture
async def engine(engine: Engine) -> Engine:
    """An engine with a key to sign grants with, that knows the worker who searches."""
    await known(engine)
    return engine


# Issuing.


async def test_a_reclaim_grant_is_stored_and_keeps_the_state(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable()
    before = await rows.execution(lost.execution_id)
    now = await clock.advance(ms=10)
    answer = await reclaim_grant(engine, lost.execution_id, grant_ttl_ms=3000, worker_capabilities=("x",))
    key = expected_key(lost.execution_id, now + 3000, reclaim=True)
    assert answer == Granted(
        execution_id=lost.execution_id,
        grant=ReclaimGrant(
            execution_id=lost.execution_id,
            partition_key="{fp:86}",
            grant_key=key,
            expires_at_ms=now + 3000,
            lane_id=LaneId("default"),
        ),
    )
    (stored,) = await rows.of("claim_grant")
    assert (stored["kind"], stored["worker_id"], stored["worker_capabilities"]) == ("reclaim", "pool", ["x"])
    row = await rows.execution(lost.execution_id)
    assert vector(row) == EXPIRED_LEASE
    changed = {name for name in row if row[name] != before[name]}
    assert changed == {"granted_until", "last_mutation_at", "attached"}
    assert [entry["granted_until"] for entry in await rows.of("ready")] == [now + 3000]


async def test_an_unmarked_or_revoked_lease_is_granted(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    revoked = await given.claimed(lane_id="revoked")
    await revoke(connection, revoked.execution_id)
    assert isinstance(await reclaim_grant(engine, revoked.execution_id, lane_id="revoked"), Granted)
    lost = await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=999)
    async with rows.unchanged():
        assert isinstance(await reclaim_grant(engine, lost.execution_id), NotReclaimable)
    now = await clock.advance(ms=1)
    assert isinstance(await reclaim_grant(engine, lost.execution_id), Granted)
    row = await rows.execution(lost.execution_id)
    assert (vector(row), row["lease_expired_at"]) == (EXPIRED_LEASE, now)
    assert await event_texts(rows, lost.execution_id) == ["acquired", "expired"]


async def test_an_execution_that_lost_no_lease_is_not_reclaimable(engine: Engine, given: Given, rows: Rows) -> None:
    states = ("created", "delayed", "backing_off", "claimed", "completed", "cancelled")
    made = {state: await getattr(given, state)(lane_id=state) for state in states}
    absent = f"{{fp:86}}:{mint_uuid_texts(1)[0]}"
    with Cases() as cases:
        async with rows.unchanged():
            for state, one in made.items():
                for call in (reclaim_grant, reclaim):
                    with cases(state):
                        execution_id = getattr(one, "execution_id", one)
                        answer = await call(engine, execution_id, lane_id=state)
                        assert isinstance(answer, NotReclaimable)
                        assert answer.execution_id == execution_id
            await refused(reclaim_grant(engine, absent), "execution_not_found")
            await refused(reclaim(engine, absent), "execution_not_found")


async def test_a_live_reclaim_grant_keeps_others_out_until_it_expires(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable()
    await reclaim_grant(engine, lost.execution_id)
    async with rows.unchanged(without=["claim"]):
        await refused(reclaim_grant(engine, lost.execution_id, "other"), "grant_already_exists")
        assert await claim(engine) == []
        await refused(claim_named(engine, lost.execution_id, "other"), "execution_not_leaseable")
    await clock.advance(ms=5000)
    assert isinstance(await reclaim_grant(engine, lost.execution_id, "other"), Granted)
    await clock.advance(ms=5000)
    assert ids(await claim(engine)) == [lost.execution_id]


async def test_a_missing_capability_is_named_and_recorded(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable(policy=GPU, capabilities=("gpu", "cuda"))
    before = await rows.execution(lost.execution_id)
    now = await clock.advance(ms=10)
    answer = await reclaim_grant(engine, lost.execution_id, worker_capabilities=["gpu"])
    assert answer == NotReclaimable(execution_id=lost.execution_id, detail="capability_mismatch: cuda")
    row = await rows.execution(lost.execution_id)
    changed = {name: row[name] for name in row if row[name] != before[name]}
    assert changed == {"last_capability_mismatch_at": now, "last_mutation_at": now}
    assert isinstance(await reclaim_grant(engine, lost.execution_id, worker_capabilities=["gpu", "cuda"]), Granted)


async def test_a_request_at_the_reclaim_limit_ends_the_execution(
    engine: Engine, given: Given, rows: Rows, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lost = await given.expired_lease(policy={"max_reclaim_count": 0, **GPU}, capabilities=("gpu", "cuda"))
    now = await clock.now()
    with caplog.at_level(logging.WARNING):
        answer = await reclaim_grant(engine, lost.execution_id)
    assert lost.execution_id in caplog.text
    assert answer == ReclaimCapExceeded(execution_id=lost.execution_id, reclaim_count=0)
    row = await rows.execution(lost.execution_id)
    assert (vector(row), row["failure_reason"], row["completed_at"]) == (FAILED, "max_reclaims_exceeded", now)
    assert lease_left(row) == {}
    (attempt,) = await attempts(rows, lost.execution_id)
    assert attempt["attempt_state"] == "interrupted_reclaimed"
    assert await event_texts(rows, lost.execution_id) == [
        "acquired",
        "expired",
        "released max_reclaims_exceeded>failed",
    ]
    assert await rows.of("claim_grant") == []
    async with rows.unchanged():
        assert isinstance(await reclaim_grant(engine, lost.execution_id), NotReclaimable)


async def test_malformed_requests_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    lost = await given.expired_lease()
    malformed: list[dict[str, Any]] = [
        {"execution_id": "x"},
        {"execution_id": "{fp:256}:11111111-2222-4333-8444-555555555555"},
        {"lane_id": "mail"},
        {"worker_id": ""},
        {"worker_instance_id": "a b"},
        {"route_snapshot_json": "{"},
    ]
    with Cases() as cases:
        async with rows.unchanged():
            for wrong in malformed:
                with cases(wrong):
                    call = engine.issue_reclaim_grant(**{"execution_id": lost.execution_id, **worker(), **wrong})
                    await refused(call, "invalid_input")
            # An expired lease that is not marked yet has no grant.
            assert await reclaim(engine, lost.execution_id) == GrantNotFound(execution_id=lost.execution_id)


# Taking.


async def test_a_reclaim_grant_becomes_a_new_attempt(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    lost = await given.reclaimable(policy={"timeout_policy": {"attempt_timeout_ms": 10**6}})
    await reclaim_grant(engine, lost.execution_id)
    now = await clock.advance(ms=10)
    claimed = await reclaim(
        engine,
        lost.execution_id,
        lease_id=LEASE,
        attempt_id=ATTEMPT,
        lease_ttl_ms=9000,
        attempt_policy_json='{"a": 1}',
        capability_hash="x",
        old_worker_instance_id="worker-1",
        current_attempt_index=0,
        max_reclaim_count=0,
    )
    assert isinstance(claimed, ClaimedExecution)
    assert (claimed.handle.kind, claimed.attempt_type) == (HandleKind.RECLAIMED, AttemptType.RECLAIM)
    assert (str(claimed.lease_id), str(claimed.attempt_id)) == (LEASE, ATTEMPT)
    assert (claimed.lease_epoch, claimed.attempt_index, claimed.lease_expires_at) == (2, 1, now + 9000)
    row = await rows.execution(lost.execution_id)
    assert vector(row) == ACTIVE
    assert (row["reclaim_count"], row["granted_until"], row["lease_expired_at"]) == (1, None, None)
    assert (row["attempt_timeout_at"], await rows.timers(lost.execution_id)) == (
        now + 10**6,
        {"attempt_timeout": now + 10**6},
    )
    interrupted, running = await attempts(rows, lost.execution_id)
    assert (running["previous_attempt_index"], json.loads(running["policy"])) == (0, {"a": 1})
    assert (running["attempt_state"], running["reclaim_reason"]) == ("started", "lease_lease_expired_reclaimable")
    assert (interrupted["attempt_state"], interrupted["failure_reason"], interrupted["ended_at"]) == (
        "interrupted_reclaimed",
        "lease_lease_expired_reclaimable",
        now,
    )
    assert await event_texts(rows, lost.execution_id) == ["acquired", "expired", "reclaimed"]
    assert await rows.of("claim_grant") == []
    await refused(engine.complete(lost), "lease_conflict")
    await engine.complete(claimed.handle, b"done")


async def test_reclaim_execution_needs_a_live_reclaim_grant(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable()
    gone = GrantNotFound(execution_id=lost.execution_id)
    async with rows.unchanged():
        assert await reclaim(engine, lost.execution_id) == gone
    await reclaim_grant(engine, lost.execution_id)
    async with rows.unchanged():
        await refused(reclaim(engine, lost.execution_id, "other"), "invalid_claim_grant")
        await refused(reclaim(engine, lost.execution_id, lane_id="mail"), "invalid_input")
        await refused(reclaim(engine, lost.execution_id, lease_ttl_ms=0), "invalid_input")
        await refused(reclaim(engine, lost.execution_id, max_reclaim_count=-1), "invalid_input")
    await clock.advance(ms=5000)
    async with rows.unchanged():
        assert await reclaim(engine, lost.execution_id) == gone
        assert await reclaim(engine, lost.execution_id, "other") == gone


async def test_a_grant_is_used_once(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    lost = await given.reclaimable()
    await reclaim_grant(engine, lost.execution_id, grant_ttl_ms=60_000)
    await reclaim(engine, lost.execution_id, lease_ttl_ms=1000)
    async with rows.unchanged():
        assert isinstance(await reclaim(engine, lost.execution_id), NotReclaimable)
    await clock.advance(ms=1000)
    await parts_of(engine).lease_expiry.mark_expired([lost.execution_id])
    async with rows.unchanged():
        assert await reclaim(engine, lost.execution_id) == GrantNotFound(execution_id=lost.execution_id)


async def test_reclaim_execution_takes_the_reclaim_grant_of_a_search_but_no_claim_grant(
    engine: Engine, given: Given, rows: Rows
) -> None:
    lost = await given.reclaimable()
    await engine.claim_for_worker(**worker())
    assert isinstance(await reclaim(engine, lost.execution_id), ClaimedExecution)
    waiting = await given.created()
    await grant(engine, waiting)
    async with rows.unchanged():
        assert isinstance(await reclaim(engine, waiting), NotReclaimable)


@in_turn(
    "policy, argument, cap",
    [(None, 0, 0), (None, None, None), ({}, 0, None), ({"max_reclaim_count": 7}, 0, None)],
)
async def test_max_reclaim_count_counts_only_without_a_policy(
    engine: Engine, given: Given, rows: Rows, policy: Any, argument: int | None, cap: int | None
) -> None:
    lost = await given.reclaimable(policy=policy)
    await reclaim_grant(engine, lost.execution_id)
    answer = await reclaim(engine, lost.execution_id, max_reclaim_count=argument)
    if cap is None:
        assert isinstance(answer, ClaimedExecution)
        return
    assert answer == ReclaimCapExceeded(execution_id=lost.execution_id, reclaim_count=cap)
    row = await rows.execution(lost.execution_id)
    assert (vector(row), row["failure_reason"], row["reclaim_count"]) == (FAILED, "max_reclaims_exceeded", 0)
    assert await event_texts(rows, lost.execution_id) == [
        "acquired",
        "expired",
        "released max_reclaims_exceeded>failed",
    ]
    assert await rows.of("claim_grant") == []


@pytest.mark.usefixtures("altered_rows")
async def test_every_hundredth_reclaim_logs_a_warning(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    lost = await given.reclaimable()
    await connection.execute("update execution set reclaim_count = 98")
    warned_at = []
    with caplog.at_level(logging.WARNING):
        for count in (99, 100, 101):
            caplog.clear()
            await reclaim_grant(engine, lost.execution_id)
            assert isinstance(await reclaim(engine, lost.execution_id, lease_ttl_ms=10), ClaimedExecution)
            if "was reclaimed 100 times" in caplog.text:
                warned_at.append(count)
            await clock.advance(ms=10)
    assert warned_at == [100]

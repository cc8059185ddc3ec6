"""Reclaim grants: an execution that lost its lease is reserved for one worker, which reclaims it up to the limit."""

import json
import logging
from typing import Any

import asyncpg
import pytest

from engine.cases import Cases, in_turn
from engine.grants import claim_granted, issue_grant, issue_reclaim_grant, reclaim, register_workers, worker
from engine.lease.test_grants import expected_key
from engine.state import (
    ACTIVE,
    EXPIRED_LEASE,
    FAILED,
    attempts,
    claim,
    event_texts,
    ids,
    lease_fields,
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
    """An engine in which a claim that finds nothing writes nothing."""
    await register_workers(engine)
    return engine


# Issuing a grant.


async def test_a_reclaim_grant_is_stored_and_does_not_change_the_state(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable()
    before = await rows.execution(lost.execution_id)
    now = await clock.advance(ms=10)
    answer = await issue_reclaim_grant(engine, lost.execution_id, grant_ttl_ms=3000, worker_capabilities=("x",))
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


async def test_a_grant_is_issued_for_a_revoked_lease_and_for_an_expired_one_that_is_not_marked_yet(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    revoked = await given.claimed(lane_id="revoked")
    await revoke(engine, revoked.execution_id)
    assert isinstance(await issue_reclaim_grant(engine, revoked.execution_id, lane_id="revoked"), Granted)
    lost = await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=999)
    async with rows.unchanged():
        assert isinstance(await issue_reclaim_grant(engine, lost.execution_id), NotReclaimable)
    now = await clock.advance(ms=1)
    assert isinstance(await issue_reclaim_grant(engine, lost.execution_id), Granted)
    row = await rows.execution(lost.execution_id)
    assert (vector(row), row["lease_expired_at"]) == (EXPIRED_LEASE, now)
    assert await event_texts(rows, lost.execution_id) == ["acquired", "expired"]


async def test_an_execution_that_lost_no_lease_is_not_reclaimable(engine: Engine, given: Given, rows: Rows) -> None:
    states = ("created", "delayed", "backing_off", "claimed", "completed", "cancelled")
    by_state = {state: await getattr(given, state)(lane_id=state) for state in states}
    absent = f"{{fp:86}}:{mint_uuid_texts(1)[0]}"
    with Cases() as cases:
        async with rows.unchanged():
            for state, made in by_state.items():
                for call in (issue_reclaim_grant, reclaim):
                    with cases(state):
                        execution_id = getattr(made, "execution_id", made)
                        answer = await call(engine, execution_id, lane_id=state)
                        assert isinstance(answer, NotReclaimable)
                        assert answer.execution_id == execution_id
            await refused(issue_reclaim_grant(engine, absent), "execution_not_found")
            await refused(reclaim(engine, absent), "execution_not_found")


async def test_a_live_reclaim_grant_keeps_others_out_until_it_expires(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable()
    await issue_reclaim_grant(engine, lost.execution_id)
    # A claim also deletes the expired rows of the table `claim`.
    async with rows.unchanged(without=["claim"]):
        await refused(issue_reclaim_grant(engine, lost.execution_id, "other"), "grant_already_exists")
        assert await claim(engine) == []
        await refused(claim_granted(engine, lost.execution_id, "other"), "execution_not_leaseable")
    await clock.advance(ms=5000)
    assert isinstance(await issue_reclaim_grant(engine, lost.execution_id, "other"), Granted)
    await clock.advance(ms=5000)
    assert ids(await claim(engine)) == [lost.execution_id]


async def test_a_missing_capability_is_named_and_recorded(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable(policy=GPU, capabilities=("gpu", "cuda"))
    before = await rows.execution(lost.execution_id)
    now = await clock.advance(ms=10)
    answer = await issue_reclaim_grant(engine, lost.execution_id, worker_capabilities=["gpu"])
    assert answer == NotReclaimable(execution_id=lost.execution_id, detail="capability_mismatch: cuda")
    row = await rows.execution(lost.execution_id)
    changed = {name: row[name] for name in row if row[name] != before[name]}
    assert changed == {"last_capability_mismatch_at": now, "last_mutation_at": now}
    assert isinstance(
        await issue_reclaim_grant(engine, lost.execution_id, worker_capabilities=["gpu", "cuda"]), Granted
    )


async def test_a_request_at_the_reclaim_limit_ends_the_execution(
    engine: Engine, given: Given, rows: Rows, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lost = await given.expired_lease(policy={"max_reclaim_count": 0, **GPU}, capabilities=("gpu", "cuda"))
    now = await clock.now()
    with caplog.at_level(logging.WARNING):
        answer = await issue_reclaim_grant(engine, lost.execution_id)
    assert lost.execution_id in caplog.text
    assert answer == ReclaimCapExceeded(execution_id=lost.execution_id, reclaim_count=0)
    row = await rows.execution(lost.execution_id)
    assert (vector(row), row["failure_reason"], row["completed_at"]) == (FAILED, "max_reclaims_exceeded", now)
    assert lease_fields(row) == {}
    (attempt,) = await attempts(rows, lost.execution_id)
    assert attempt["attempt_state"] == "interrupted_reclaimed"
    assert await event_texts(rows, lost.execution_id) == [
        "acquired",
        "expired",
        "released max_reclaims_exceeded>failed",
    ]
    assert await rows.of("claim_grant") == []
    async with rows.unchanged():
        assert isinstance(await issue_reclaim_grant(engine, lost.execution_id), NotReclaimable)


async def test_malformed_requests_for_a_grant_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
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


# Reclaiming with a grant.


async def test_a_reclaim_starts_a_new_attempt_and_uses_up_the_grant(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable(policy={"timeout_policy": {"attempt_timeout_ms": 10**6}})
    await issue_reclaim_grant(engine, lost.execution_id)
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
    reason = "lease_" + EXPIRED_LEASE.split("/")[1]
    assert (running["previous_attempt_index"], json.loads(running["policy"])) == (0, {"a": 1})
    assert (running["attempt_state"], running["reclaim_reason"]) == ("started", reason)
    assert (interrupted["attempt_state"], interrupted["failure_reason"], interrupted["ended_at"]) == (
        "interrupted_reclaimed",
        reason,
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
    no_grant = GrantNotFound(execution_id=lost.execution_id)
    async with rows.unchanged():
        assert await reclaim(engine, lost.execution_id) == no_grant
    await issue_reclaim_grant(engine, lost.execution_id)
    async with rows.unchanged():
        await refused(reclaim(engine, lost.execution_id, "other"), "invalid_claim_grant")
        await refused(reclaim(engine, lost.execution_id, lane_id="mail"), "invalid_input")
        await refused(reclaim(engine, lost.execution_id, lease_ttl_ms=0), "invalid_input")
        await refused(reclaim(engine, lost.execution_id, max_reclaim_count=-1), "invalid_input")
    await clock.advance(ms=5000)
    async with rows.unchanged():
        assert await reclaim(engine, lost.execution_id) == no_grant
        assert await reclaim(engine, lost.execution_id, "other") == no_grant


async def test_an_expired_lease_that_is_not_marked_yet_has_no_grant(engine: Engine, given: Given, rows: Rows) -> None:
    lost = await given.expired_lease()
    async with rows.unchanged():
        assert await reclaim(engine, lost.execution_id) == GrantNotFound(execution_id=lost.execution_id)


async def test_a_grant_can_be_used_only_once(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    lost = await given.reclaimable()
    await issue_reclaim_grant(engine, lost.execution_id, grant_ttl_ms=60_000)
    await reclaim(engine, lost.execution_id, lease_ttl_ms=1000)
    async with rows.unchanged():
        assert isinstance(await reclaim(engine, lost.execution_id), NotReclaimable)
    await clock.advance(ms=1000)
    await parts_of(engine).lease_expiry.mark_expired([lost.execution_id])
    async with rows.unchanged():
        assert await reclaim(engine, lost.execution_id) == GrantNotFound(execution_id=lost.execution_id)


async def test_reclaim_execution_accepts_a_reclaim_grant_from_claim_for_worker_but_no_claim_grant(
    engine: Engine, given: Given, rows: Rows
) -> None:
    lost = await given.reclaimable()
    await engine.claim_for_worker(**worker())
    assert isinstance(await reclaim(engine, lost.execution_id), ClaimedExecution)
    waiting = await given.created()
    await issue_grant(engine, waiting)
    async with rows.unchanged():
        assert isinstance(await reclaim(engine, waiting), NotReclaimable)


@in_turn(
    "policy, max_reclaim_count, is_limited",
    [(None, 0, True), (None, None, False), ({}, 0, False), ({"max_reclaim_count": 7}, 0, False)],
)
async def test_the_argument_max_reclaim_count_applies_only_to_an_execution_without_a_policy(
    engine: Engine, given: Given, rows: Rows, policy: Any, max_reclaim_count: int | None, *, is_limited: bool
) -> None:
    lost = await given.reclaimable(policy=policy)
    await issue_reclaim_grant(engine, lost.execution_id)
    answer = await reclaim(engine, lost.execution_id, max_reclaim_count=max_reclaim_count)
    if not is_limited:
        assert isinstance(answer, ClaimedExecution)
        return
    assert answer == ReclaimCapExceeded(execution_id=lost.execution_id, reclaim_count=0)
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
            await issue_reclaim_grant(engine, lost.execution_id)
            assert isinstance(await reclaim(engine, lost.execution_id, lease_ttl_ms=10), ClaimedExecution)
            if "was reclaimed 100 times" in caplog.text:
                warned_at.append(count)
            await clock.advance(ms=10)
    assert warned_at == [100]

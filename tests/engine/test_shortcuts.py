"""What a durable engine must not save itself: submissions, states, claims and attempts done in full."""

import asyncio
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.ids import AttemptId, LeaseId
from flowfabric.model.lease import RetryScheduled
from flowfabric.model.states import AttemptType, HandleKind, PublicState

from .grants import claim_named, claim_resumed, grant, reclaim, reclaim_grant
from .state import (
    ACTIVE,
    COMPLETED,
    DELAYED,
    RESUMABLE,
    WAITING,
    attempts,
    claim,
    event_texts,
    ids,
    new,
    refused,
    vector,
)

GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}

LITERALS = {
    "lifecycle_phase": "submitted runnable active suspended terminal",
    "ownership_state": "unowned leased lease_expired_reclaimable lease_revoked",
    "eligibility_state": """eligible_now not_eligible_until_time blocked_by_dependencies blocked_by_budget
        blocked_by_quota blocked_by_route blocked_by_lane_state blocked_by_operator not_applicable""",
    "blocking_reason": """none waiting_for_worker waiting_for_retry_backoff waiting_for_resume_delay waiting_for_delay
        waiting_for_signal waiting_for_approval waiting_for_callback waiting_for_tool_result waiting_for_children
        waiting_for_budget waiting_for_quota waiting_for_capable_worker waiting_for_locality_match paused_by_operator
        paused_by_policy paused_by_flow_cancel""",
    "terminal_outcome": "none success failed cancelled expired skipped",
    "attempt_state": """none pending_first_attempt running_attempt attempt_interrupted pending_retry_attempt
        pending_replay_attempt attempt_terminal""",
    "public_state": """waiting delayed rate_limited waiting_children active suspended resumable completed failed
        cancelled expired skipped""",
    "attempt_lifecycle": """created started suspended ended_success ended_failure ended_cancelled
        interrupted_reclaimed""",
    "attempt_type": "initial retry reclaim replay fallback",
}


# Creation.


async def test_a_repeated_create_is_a_duplicate_and_a_first_one_says_its_real_state(engine: Engine, clock: Any) -> None:
    first = await engine.create_execution(**new(delay_until=await clock.now() + 1000))
    assert isinstance(first, Created)
    assert first.public_state is PublicState.DELAYED
    again = await engine.create_execution(**new(execution_id=first.execution_id))
    assert again == Duplicate(execution_id=first.execution_id)


async def test_an_idempotency_key_counts_for_its_window(engine: Engine, clock: Any) -> None:
    keyed = new(idempotency_key="order 1", policy={"dedup_window_ms": 5000})
    first = await engine.create_execution(**keyed)
    await clock.advance(ms=4999)
    assert await engine.create_execution(**keyed) == Duplicate(execution_id=first.execution_id)
    await clock.advance(ms=1)
    assert isinstance(await engine.create_execution(**keyed), Created)


async def test_a_new_execution_is_stored_as_claims_accept_it(engine: Engine, given: Any, rows: Any) -> None:
    created = await given.created()
    assert vector(await rows.execution(created)) == WAITING
    assert ids(await claim(engine)) == [created]


async def test_a_delay_at_create_is_kept(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    delayed = await given.delayed(seconds=5)
    assert vector(await rows.execution(delayed)) == DELAYED
    assert await claim(engine) == []
    await clock.advance(seconds=5)
    assert ids(await claim(engine)) == [delayed]


async def test_required_capabilities_are_checked_stored_and_matched(engine: Engine, given: Any, rows: Any) -> None:
    async with rows.unchanged(without=("lane", "namespace")):
        wrong = {"routing_requirements": {"required_capabilities": ["g,pu"]}}
        await refused(engine.create_execution(**new(policy=wrong)), "invalid_capabilities", "required:comma_in_token")
        await refused(engine.create_execution(**new(policy="{")), "invalid_policy_json", "malformed")
    created = await given.created(policy=GPU)
    assert await claim(engine) == []
    assert ids(await claim(engine, capabilities=("gpu",))) == [created]


async def test_priority_is_clamped_at_create(engine: Engine, given: Any) -> None:
    for given_priority, kept in ((-1, 0), (9001, 9000)):
        info = await engine.read_execution_info(await given.created(priority=given_priority))
        assert info is not None
        assert info.priority == kept


async def test_payload_and_result_are_kept_byte_for_byte(engine: Engine, given: Any) -> None:
    every_byte = bytes(range(256)) * 2
    claimed = await given.run(input_payload=every_byte)
    assert claimed.input_payload == every_byte
    assert (await engine.read_execution_context(claimed.execution_id)).input_payload == every_byte
    await engine.complete(claimed.handle, every_byte[::-1])
    assert await engine.get_execution_result(claimed.execution_id) == every_byte[::-1]


async def test_timeouts_retryable_categories_and_jitter_of_a_policy_are_applied(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    backoff = {"type": "exponential", "initial_delay_ms": 8000, "max_delay_ms": 8000, "multiplier": 2, "jitter": True}
    policy = {
        "retry_policy": {"max_retries": 9, "retryable_categories": ["transient"], "backoff": backoff},
        "timeout_policy": {"attempt_timeout_ms": 5000, "execution_deadline_ms": 60_000},
    }
    now = await clock.now()
    jittered = await given.claimed(policy=policy)
    row = await rows.execution(jittered.execution_id)
    assert (row["attempt_timeout_at"], row["deadline_at"]) == (now + 5000, now + 60_000)
    retried = await engine.fail(jittered, reason="x")
    assert isinstance(retried, RetryScheduled)
    assert now + 4000 <= retried.delay_until <= now + 8000
    other = await given.claimed(policy=policy)
    assert not isinstance(await engine.fail(other, reason="x", classification="infra_crash"), RetryScheduled)


# State literals and reads.


@pytest.mark.parametrize("dimension", LITERALS)
async def test_only_the_words_of_the_specification_can_be_stored(connection: Any, dimension: str) -> None:
    query = "select array_agg(enumlabel::text) from pg_enum where enumtypid = $1::text::regtype"
    assert sorted(await connection.fetchval(query, dimension)) == sorted(LITERALS[dimension].split())


async def test_an_ending_writes_every_dimension_counter_and_stamp(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    handle = await given.claimed()
    now = await clock.advance(ms=5)
    await engine.complete(handle)
    row = await rows.execution(handle.execution_id)
    assert vector(row) == COMPLETED
    assert (row["last_transition_at"], row["last_mutation_at"], row["completed_at"]) == (now, now, now)
    assert await engine.read_total_attempt_count(handle.execution_id) == 1


async def test_the_outcome_is_stored_alike_on_every_path(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    by_handle, by_service = await given.claimed(), await given.claimed()
    capped = await given.claimed(policy={"max_reclaim_count": 0})
    await engine.fail(by_handle, reason="x", classification="permanent")
    await engine.fail_execution(
        execution_id=by_service.execution_id,
        lease_id=by_service.lease_id,
        lease_epoch=by_service.lease_epoch,
        attempt_id=by_service.attempt_id,
        failure_reason="x",
        failure_category="permanent",
    )
    await clock.advance(seconds=31)
    assert await claim(engine) == []
    for handle in (by_handle, by_service, capped):
        row = await rows.execution(handle.execution_id)
        assert (row["lifecycle_phase"], row["terminal_outcome"]) == ("terminal", "failed")


async def test_a_snapshot_holds_the_lease_and_every_other_field(engine: Engine, given: Any, clock: Any) -> None:
    claimed = await given.run(tags={"app.key": "value"}, lease_ttl_ms=4000)
    now = await clock.now()
    snapshot = await engine.describe_execution(claimed.execution_id)
    assert snapshot is not None
    lease, attempt = snapshot.current_lease, snapshot.current_attempt
    assert lease is not None
    assert (lease.lease_id, lease.lease_epoch, lease.attempt_index) == (claimed.lease_id, 1, 0)
    assert (lease.worker_instance_id, lease.expires_at) == ("worker-1", now + 4000)
    assert attempt is not None
    assert (attempt.attempt_id, attempt.attempt_index) == (claimed.attempt_id, 0)
    assert (snapshot.created_at, snapshot.last_mutation_at, snapshot.total_attempt_count) == (now, now, 1)
    assert (snapshot.tags, snapshot.flow_id, snapshot.namespace) == ({"app.key": "value"}, None, "tests")


async def test_a_search_writes_nothing_to_what_a_worker_cannot_do(engine: Engine, given: Any, rows: Any) -> None:
    await given.created(policy=GPU)
    await claim(engine)
    async with rows.unchanged():
        assert await claim(engine) == []
        assert await engine.claim(lane_id="default", worker_id="worker", worker_instance_id="worker-1") is None
        await engine.claim_for_worker(lane_id="default", worker_id="worker", worker_instance_id="worker-1")


# Claims and attempts.


async def test_a_granted_execution_stays_eligible_and_is_claimed_by_its_grant(
    engine: Engine, given: Any, rows: Any
) -> None:
    created = await given.created()
    await grant(engine, created)
    assert vector(await rows.execution(created)) == WAITING
    assert await claim(engine) == []
    assert (await claim_named(engine, created)).execution_id == created


async def test_a_grant_that_ran_out_strands_nothing(engine: Engine, given: Any, clock: Any) -> None:
    created = await given.created()
    await grant(engine, created, grant_ttl_ms=1000)
    await clock.advance(ms=1000)
    await refused(claim_named(engine, created), "claim_grant_expired")
    await grant(engine, created, "other", grant_ttl_ms=1000)
    await clock.advance(ms=1000)
    assert ids(await claim(engine)) == [created]


async def test_a_claim_stores_its_whole_fence_and_all_of_it_is_compared(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    row = await rows.execution(handle.execution_id)
    assert (row["lease_id"], row["lease_epoch"], row["attempt_id"]) == (
        handle.lease_id,
        handle.lease_epoch,
        handle.attempt_id,
    )
    async with rows.unchanged():
        for change in ({"lease_id": LeaseId(uuid4())}, {"attempt_id": AttemptId(uuid4())}, {"lease_epoch": 2}):
            await refused(engine.complete(msgspec.structs.replace(handle, **change)), "lease_conflict")


async def test_the_epoch_rises_over_attempts_resumes_and_reclaims(engine: Engine, given: Any, clock: Any) -> None:
    first = await given.backing_off(delay_ms=1)
    epochs = [first.lease_epoch]
    await clock.advance(ms=1)
    (retry,) = await claim(engine)
    await engine.wait_children(retry.handle)
    (resumed,) = await claim(engine)
    await clock.advance(seconds=31)
    (reclaimed,) = await claim(engine)
    epochs += [one.lease_epoch for one in (retry, resumed, reclaimed)]
    assert epochs == [1, 2, 3, 4]


async def test_a_named_claim_points_at_the_attempt_it_began(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    created = await given.created()
    now = await clock.advance(ms=5)
    await grant(engine, created)
    claimed = await claim_named(engine, created)
    assert (claimed.attempt_index, await engine.read_current_attempt_index(created)) == (0, 0)
    assert await engine.read_total_attempt_count(created) == 1
    assert (await rows.execution(created))["started_at"] == now
    assert claimed.handle.kind is HandleKind.FRESH
    assert (claimed.handle.lane_id, claimed.handle.lease_id) == ("default", claimed.lease_id)
    await engine.complete(claimed.handle)


async def test_an_attempt_that_goes_on_keeps_its_row(engine: Engine, given: Any, clock: Any) -> None:
    handle = await given.backing_off(delay_ms=1)
    failed, *_ = await engine.list_attempts(handle.execution_id)
    await clock.advance(ms=10)
    (retry,) = await claim(engine)
    parked_at = await clock.advance(ms=10)
    await engine.wait_children(retry.handle)
    resumed_at = await clock.advance(ms=10)
    (resumed,) = await claim(engine)
    assert (resumed.attempt_id, resumed.attempt_index) == (retry.attempt_id, 1)
    before, now = await engine.list_attempts(handle.execution_id)
    assert before == failed
    assert (now.attempt_type, now.attempt_state) == (AttemptType.RETRY, "started")
    assert (now.started_at, now.suspended_at, now.resumed_at) == (parked_at - 10, parked_at, resumed_at)


async def test_an_interrupted_attempt_is_not_claimed_afresh(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    await engine.wait_children(handle)
    await grant(engine, handle.execution_id)
    await refused(claim_named(engine, handle.execution_id), "use_claim_resumed_execution")
    assert vector(await rows.execution(handle.execution_id)) == RESUMABLE
    assert (await claim_resumed(engine, handle.execution_id)).handle.kind is HandleKind.RESUMED


async def test_a_fused_claim_answers_the_lease_it_stored_and_resumes_from_the_queue_only(
    engine: Engine, given: Any, rows: Any
) -> None:
    fresh = await given.created()
    resumable = await given.claimed(priority=5)
    await engine.wait_children(resumable)
    for execution_id in (fresh, resumable.execution_id):
        named = {"execution_id": execution_id, "lane_id": "default", "lease_duration_ms": 1000}
        answer = await engine.issue_grant_and_claim(**named)
        row = await rows.execution(execution_id)
        assert (vector(row), row["lease_id"], row["lease_epoch"]) == (ACTIVE, answer.lease_id, answer.lease_epoch)
        async with rows.unchanged():
            await refused(engine.issue_grant_and_claim(**named), "execution_not_eligible")


async def test_what_cannot_be_taken_hides_nothing_behind_it_and_a_claim_waits_as_long_as_it_says(
    engine: Engine, given: Any
) -> None:
    await given.created(priority=9, policy=GPU)
    await grant(engine, await given.created(priority=8))
    behind = await given.created()
    assert ids(await claim(engine, limit=1)) == [behind]
    waiting = asyncio.create_task(claim(engine, max_wait_ms=30_000))
    await asyncio.sleep(0)
    later = await given.created()
    assert ids(await waiting) == [later]


async def test_what_is_granted_costs_the_best_of_another_queue_nothing(engine: Engine, given: Any) -> None:
    await grant(engine, await given.created(priority=9))
    worst = await given.created(priority=1)
    best = await given.created(priority=5, policy=GPU)
    assert ids(await claim(engine, capabilities=("gpu",), limit=1)) == [best]
    assert ids(await claim(engine, capabilities=("gpu",), limit=1)) == [worst]


async def test_a_grant_stores_lane_and_capabilities_and_a_reclaim_wants_its_own(
    engine: Engine, given: Any, rows: Any
) -> None:
    created = await given.created(policy=GPU)
    await grant(engine, created, worker_capabilities=("gpu", "avx"))
    (stored,) = await rows.of("claim_grant")
    assert sorted(stored["worker_capabilities"]) == ["avx", "gpu"]
    (lane,) = await rows.of("lane", lane_no=stored["lane_no"])
    assert lane["lane_id"] == "default"
    lost = await given.reclaimable(priority=1)
    await reclaim_grant(engine, lost.execution_id, "other")
    async with rows.unchanged(without=("worker_identity",)):
        await refused(reclaim(engine, lost.execution_id), "invalid_claim_grant")
        assert type(await reclaim(engine, created)).__name__ == "NotReclaimable"
    taken = await reclaim(engine, lost.execution_id, "other")
    assert taken.handle.kind is HandleKind.RECLAIMED
    assert (await event_texts(rows, lost.execution_id))[-1] == "reclaimed"
    states = [attempt["attempt_state"] for attempt in await attempts(rows, lost.execution_id)]
    assert states == ["interrupted_reclaimed", "started"]

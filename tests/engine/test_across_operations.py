"""Rules that span several operations: stored words, epochs, events, retention and concurrency."""

import asyncio
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created, Duplicate

from .grants import issue_grant, issue_reclaim_grant
from .state import ACTIVE, claim, ids, new, refused, rounds, vector

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


async def test_only_the_words_of_the_specification_can_be_stored(connection: asyncpg.Connection) -> None:
    query = "select array_agg(enumlabel::text) from pg_enum where enumtypid = $1::text::regtype"
    for dimension, words in LITERALS.items():
        assert sorted(await connection.fetchval(query, dimension)) == sorted(words.split()), dimension


async def test_a_claim_writes_nothing_to_executions_it_cannot_take(engine: Engine, given: Given, rows: Rows) -> None:
    await given.created(policy=GPU)
    await claim(engine)
    async with rows.unchanged():
        assert await claim(engine) == []
        assert await engine.claim(lane_id="default", worker_id="worker", worker_instance_id="worker-1") is None
        await engine.claim_for_worker(lane_id="default", worker_id="worker", worker_instance_id="worker-1")


async def test_the_epoch_rises_over_attempts_resumes_and_reclaims(engine: Engine, given: Given, clock: Clock) -> None:
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


async def test_a_grant_and_claim_in_one_call_returns_the_stored_lease(engine: Engine, given: Given, rows: Rows) -> None:
    fresh = await given.created()
    resumable = await given.claimed(priority=5)
    await engine.wait_children(resumable)
    for execution_id in (fresh, resumable.execution_id):
        named: dict[str, Any] = {"execution_id": execution_id, "lane_id": "default", "lease_duration_ms": 1000}
        answer = await engine.issue_grant_and_claim(**named)
        row = await rows.execution(execution_id)
        assert (vector(row), row["lease_id"], row["lease_epoch"]) == (ACTIVE, answer.lease_id, answer.lease_epoch)
        async with rows.unchanged():
            await refused(engine.issue_grant_and_claim(**named), "execution_not_eligible")


async def test_executions_that_cannot_be_claimed_do_not_hide_later_ones(engine: Engine, given: Given) -> None:
    await given.created(priority=9, policy=GPU)
    await issue_grant(engine, await given.created(priority=8))
    behind = await given.created()
    assert ids(await claim(engine, limit=1)) == [behind]
    waiting = asyncio.create_task(claim(engine, max_wait_ms=30_000))
    await asyncio.sleep(0)
    later = await given.created()
    assert ids(await waiting) == [later]


async def test_a_granted_execution_does_not_hide_the_best_of_another_queue(engine: Engine, given: Given) -> None:
    await issue_grant(engine, await given.created(priority=9))
    worst = await given.created(priority=1)
    best = await given.created(priority=5, policy=GPU)
    assert ids(await claim(engine, capabilities=("gpu",), limit=1)) == [best]
    assert ids(await claim(engine, capabilities=("gpu",), limit=1)) == [worst]


async def test_every_end_has_one_event_with_namespace_instance_tag_and_lease(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    tagged: dict[str, Any] = {"tags": {"ff.instance_id": "i1"}, "namespace": "tenant"}
    completed = await given.completed(**tagged)
    failed = await given.failed(**tagged)
    cancelled = await given.cancelled(**tagged)
    by_handle = await given.claimed(**tagged)
    await engine.cancel(by_handle, "x")
    deadline = await clock.now() + 1000
    expired = await given.created(**tagged, execution_deadline_at=deadline)
    await clock.advance(ms=1000)
    await engine.expire_execution(expired, "execution_deadline")
    at_limit = await given.reclaimable(**tagged, policy={"max_reclaim_count": 0})
    assert await claim(engine) == []
    (namespace,) = await rows.of("namespace", namespace="tenant")
    for execution_id in (completed, failed, cancelled, by_handle.execution_id, expired, at_limit.execution_id):
        endings = [event for event in await rows.events(execution_id) if event["outcome"] is not None]
        assert len(endings) == 1
        assert (endings[0]["namespace_no"], endings[0]["instance_tag"]) == (namespace["namespace_no"], "i1")
    # The end of a run names its lease and its worker.
    (worker,) = await rows.of("worker_identity")
    released = (await rows.events(by_handle.execution_id))[-1]
    lease = by_handle.lease_id, by_handle.lease_epoch, worker["worker_no"]
    assert (released["lease_id"], released["lease_epoch"], released["worker_no"]) == lease


async def test_a_persistent_serialization_failure_is_retryable_and_not_a_lost_lease(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    await connection.execute("create sequence tries")
    await connection.execute(
        """create or replace function ff_now() returns bigint language plpgsql volatile as $$
           begin perform nextval('tries'); raise serialization_failure; end $$"""
    )
    refusal = await refused(engine.complete(handle), "retry_exhausted")
    assert refusal.retryable
    assert await connection.fetchval("select last_value from tries") >= 3


async def test_of_two_concurrent_creates_of_one_id_one_is_a_duplicate(engines: Engines, given: Given) -> None:
    rivals = [await engines(), await engines()]
    for _ in rounds(5, whole=10):
        named = new(execution_id=f"{{fp:1}}:{uuid4()}")
        answers = await asyncio.gather(*(engine.create_execution(**named) for engine in rivals))
        assert sorted(type(answer).__name__ for answer in answers) == [Created.__name__, Duplicate.__name__]


@pytest.mark.usefixtures("fresh_database")
async def test_concurrent_operations_on_one_execution_do_not_deadlock(
    engines: Engines, given: Given, connection: asyncpg.Connection
) -> None:
    rivals = [await engines() for _ in range(3)]

    async def settled(call: Any) -> object:
        try:
            return await call
        except EngineError as refusal:
            return refusal.code

    for _ in rounds(5, whole=15):
        handle = await given.reclaimable()
        named = handle.execution_id
        answers = await asyncio.gather(
            settled(claim(rivals[0])),
            settled(issue_reclaim_grant(rivals[1], named)),
            settled(rivals[2].complete(handle)),
            settled(rivals[1].mark_lease_expired_if_due(named)),
            settled(rivals[2].set_execution_tag(named, "app.key", "value")),
            settled(rivals[0].cancel_execution(execution_id=named, reason="x")),
        )
        assert "retry_exhausted" not in answers
    query = "select deadlocks from pg_stat_database where datname = current_database()"
    assert await connection.fetchval(query) == 0


async def test_retention_deletes_an_execution_with_all_its_rows_after_its_own_time(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    short: dict[str, Any] = {"policy": {"stream_policy": {"retention_ttl_ms": 1000}}, "tags": {"app.key": "value"}}
    short |= {"input_payload": b"x" * 300}
    gone = [
        await given.completed(result=b"x" * 300, **short),
        await given.cancelled(**short),
        await given.failed(**short),
    ]
    kept = await given.completed()
    await clock.advance(ms=1000)
    assert (await parts_of(engine).retention.trim_batch()).done == len(gone)
    for table in ("execution", "execution_input", "execution_result", "execution_tag", "attempt", "listed"):
        left = {str(row["execution_id"]) for row in await rows.of(table)}
        assert left <= {uuid_of(kept)}
    assert await engine.read_execution_state(kept) == "completed"

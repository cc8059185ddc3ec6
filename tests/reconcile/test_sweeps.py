"""Each sweep processes what is due and nothing else."""

import logging

import asyncpg
import pytest

from creates import new
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.retention import SQL
from flowfabric.engine.lease.expire import MAX_LOGGED
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.states import AttemptType, PublicState
from flowfabric.model.worker import Refreshed
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS

DAY = 86_400
RETRIED_ONCE = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 5_000}}}


@pytest.fixture
def reconciler(engine: Engine) -> Reconciler:
    return Reconciler(engine)


async def test_an_expired_lease_is_marked_once_and_the_next_claim_takes_it(
    engine: Engine, reconciler: Reconciler, given: Given, rows: Rows
) -> None:
    lost = await given.expired_lease()
    await reconciler.catch_up()
    async with rows.unchanged():
        await reconciler.catch_up()
    assert reconciler.stats["lease_expiry"].processed == 1
    row = await rows.execution(lost.execution_id)
    assert (row["lifecycle_phase"], row["ownership_state"]) == ("active", "lease_expired_reclaimable")
    assert (row["attempt_state"], row["blocking_detail"]) == ("attempt_interrupted", "lease expired, awaiting reclaim")
    assert (row["lease_epoch"], row["lease_id"]) == (lost.lease_epoch, lost.lease_id)
    assert [event["kind"] for event in await rows.events(lost.execution_id)] == ["acquired", "expired"]
    parts_of(engine).catch_up.is_left_to_sweeps = True
    taken = await given.claim(worker="another")
    assert (taken.execution_id, taken.attempt_type) == (lost.execution_id, AttemptType.RECLAIM)
    assert taken.lease_epoch == lost.lease_epoch + 1


async def test_a_renewed_lease_is_not_marked(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    handle = await given.claimed(lease_ttl_ms=30_000)
    await clock.advance(seconds=20)
    await engine.renew(handle)
    await clock.advance(seconds=20)
    async with rows.unchanged(without=["event"]):
        await reconciler.catch_up()


async def test_delayed_work_becomes_claimable_when_it_is_due(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    early, late = await given.delayed(seconds=60), await given.delayed(seconds=120)
    await reconciler.catch_up()
    assert await engine.read_execution_state(early) is PublicState.DELAYED
    await clock.advance(seconds=61)
    await reconciler.catch_up()
    assert await engine.read_execution_state(early) is PublicState.WAITING
    assert await engine.read_execution_state(late) is PublicState.DELAYED
    row = await rows.execution(early)
    assert (row["delay_until"], row["attempt_state"]) == (None, "pending_first_attempt")
    assert (await given.claim()).execution_id == early


async def test_a_retry_becomes_claimable_after_its_backoff(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock
) -> None:
    failed = await given.backing_off(delay_ms=5_000)
    await clock.advance(seconds=6)
    await reconciler.catch_up()
    assert await engine.read_execution_state(failed.execution_id) is PublicState.WAITING
    retried = await given.claim()
    assert (retried.attempt_type, retried.attempt_index) == (AttemptType.RETRY, 1)


async def test_an_attempt_past_its_timeout_is_retried(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 10_000}, **RETRIED_ONCE}
    handle = await given.claimed(policy=policy)
    await clock.advance(seconds=11)
    await reconciler.catch_up()
    assert await engine.read_execution_state(handle.execution_id) is PublicState.DELAYED
    (attempt,) = await rows.of("attempt_all")
    assert (attempt["attempt_state"], attempt["failure_category"]) == ("ended_failure", "timeout")
    assert (await rows.events(handle.execution_id))[-1]["reason"] == "expired:attempt_timeout"
    with pytest.raises(EngineError, match="execution_not_active"):
        await engine.complete(handle, b"late")


async def test_an_attempt_past_its_timeout_without_retries_left_expires(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    handle = await given.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 10_000}})
    await clock.advance(seconds=11)
    await reconciler.catch_up()
    row = await rows.execution(handle.execution_id)
    assert (row["public_state"], row["failure_reason"]) == ("expired", "attempt_timeout")
    assert row["completed_at"] is not None


async def test_an_attempt_that_lost_its_lease_times_out_too(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 60_000}}
    lost = await given.reclaimable(policy=policy, lease_ttl_ms=10_000)
    await clock.advance(seconds=60)
    await reconciler.catch_up()
    assert await engine.read_execution_state(lost.execution_id) is PublicState.EXPIRED
    (attempt,) = await rows.of("attempt_all")
    assert attempt["attempt_state"] == "ended_failure"


async def test_a_deadline_ends_an_execution_in_any_phase(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, rows: Rows, subtests: pytest.Subtests
) -> None:
    deadline = {"execution_deadline_at": await clock.now() + 100_000}
    lost = await given.reclaimable(lane_id="lost", **deadline)
    held = await given.claimed(lane_id="held", lease_ttl_ms=DAY * 1000, **deadline)
    backing_off = await given.backing_off(lane_id="retry", delay_ms=DAY * 1000, **deadline)
    phases = {
        "waiting": await given.created(**deadline),
        "delayed": await given.delayed(seconds=DAY, **deadline),
        "active": held.execution_id,
        "lost": lost.execution_id,
        "backing_off": backing_off.execution_id,
    }
    await clock.advance(seconds=30)
    await reconciler.catch_up()
    for execution_id in phases.values():
        assert await engine.read_execution_state(execution_id) is not PublicState.EXPIRED
    await clock.advance(seconds=60)
    await reconciler.catch_up()
    for phase, execution_id in phases.items():
        with subtests.test(phase):
            row = await rows.execution(execution_id)
            assert (row["public_state"], row["failure_reason"]) == ("expired", "execution_deadline")
            assert (row["ownership_state"], row["lease_id"], row["lease_expires_at"]) == ("unowned", None, None)
            assert await rows.timers(execution_id) == {}
            endings = [event for event in await rows.events(execution_id) if event["outcome"] is not None]
            assert [event["kind"] for event in endings] == ["released" if phase == "active" else "ended"]


async def test_a_sweep_logs_which_executions_it_expired(
    reconciler: Reconciler, given: Given, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowfabric.engine.lease")
    unclaimed = await given.created(lane_id="unclaimed", execution_deadline_at=await clock.now() + 1000)
    retried = await given.claimed(
        policy={"timeout_policy": {"attempt_timeout_ms": 1000}, **RETRIED_ONCE}, lease_ttl_ms=DAY * 1000
    )
    await clock.advance(seconds=2)
    assert await reconciler.catch_up() >= 2
    assert caplog.messages == [f"expired past their timeout or deadline: {unclaimed}"]
    assert retried.execution_id not in caplog.text
    caplog.clear()
    deadline = await clock.now() + 1000
    for _ in range(MAX_LOGGED + 2):
        await given.created(execution_deadline_at=deadline)
    await clock.advance(seconds=2)
    await reconciler.catch_up()
    (line,) = caplog.messages
    assert line.endswith(" and 2 more")


async def test_a_deadline_is_not_retried(reconciler: Reconciler, engine: Engine, given: Given, clock: Clock) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 5_000, "execution_deadline_ms": 10_000}, **RETRIED_ONCE}
    handle = await given.claimed(policy=policy)
    await clock.advance(seconds=11)
    await reconciler.catch_up()
    assert await engine.read_execution_state(handle.execution_id) is PublicState.EXPIRED


async def test_a_policy_of_a_newer_version_applies_as_far_as_it_is_understood(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 10_000}}
    odd = await given.claimed(policy=policy, lease_ttl_ms=DAY * 1000)
    await connection.execute("update execution set policy = policy || '{\"from_the_future\": 1}'")
    plain = await given.claimed(policy=policy, lease_ttl_ms=DAY * 1000)
    await clock.advance(seconds=11)
    await reconciler.catch_up()
    assert await engine.read_execution_state(plain.execution_id) is PublicState.EXPIRED
    assert await engine.read_execution_state(odd.execution_id) is PublicState.EXPIRED


async def test_retention_deletes_all_rows_of_ended_executions_and_nothing_else(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    reconciler = Reconciler(engine, sweeps=[sweep for sweep in SWEEPS if sweep.name == "retention_trimmer"])
    belongings = ["execution", "execution_input", "execution_result", "execution_tag", "attempt", "listed", "retained"]
    retried = await given.backing_off(delay_ms=0)
    await engine.complete((await given.claim()).handle, b"done")
    ended = [
        retried.execution_id,
        await given.completed(tags={"app.team": "a"}, idempotency_key="k", result=b"x" * 1500),
        await given.failed(input_payload=b"x" * 1500),
        await given.cancelled(input_payload=b"x" * 100_000),
    ]
    waiting = await given.delayed(seconds=10 * DAY, tags={"app.team": "b"}, input_payload=b"y" * 1500)
    await clock.advance(seconds=DAY - 10)
    fresh = await given.completed(result=b"y" * 1500)
    held = await given.claimed(lease_ttl_ms=30 * DAY * 1000)
    await clock.advance(seconds=11)
    others = await rows.snapshot(without=belongings)
    await reconciler.catch_up()
    assert await rows.snapshot(without=belongings) == others
    kept = {execution_id[-36:] for execution_id in (waiting, fresh, held.execution_id)}
    assert {str(row["execution_id"]) for row in await rows.of("execution")} == kept
    assert [[str(one) for one in row["execution_ids"]] for row in await rows.of("retained")] == [[fresh[-36:]]]
    assert await rows.of("attempt") == await rows.of("listed") == []
    assert [row["value"] for row in await rows.of("execution_tag")] == ["b"]
    assert [row["input_payload"] for row in await rows.of("execution_input")] == [b"y" * 1500]
    assert [row["result_payload"] for row in await rows.of("execution_result")] == [b"y" * 1500]
    for execution_id in ended:
        assert await engine.read_execution_info(execution_id) is None
        assert await engine.get_execution_result(execution_id) is None
    assert reconciler.stats["retention_trimmer"].processed == len(ended)


async def test_an_execution_that_was_locked_during_a_trim_is_trimmed_by_a_later_full_look(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    seconds = 1000.0
    parts_of(engine).lifecycle.store.retained_watermark._clock = lambda: seconds
    locked = await given.completed()
    await clock.advance(seconds=1)
    await given.completed()
    await clock.advance(seconds=DAY + 1)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", locked[-36:])
        await reconciler.catch_up()
    await clock.advance(seconds=60)
    await reconciler.catch_up()
    assert [str(row["execution_id"]) for row in await rows.of("execution")] == [locked[-36:]]
    seconds += 600
    await reconciler.catch_up()
    assert await rows.of("execution") == []


async def test_a_trim_locks_only_the_batches_it_deletes(
    engine: Engine, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    for _ in range(6):
        await engine.create_many([new()] * 5)
        claimed = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=5)
        await engine.complete_many([(each.handle, b"done") for each in claimed])
    assert [len(row["execution_ids"]) for row in await rows.of("retained")] == [5] * 6
    await clock.advance(seconds=DAY + 1)
    async with connection.transaction():
        values: dict[str, object] = {"since": 0, "until": None, "only": None, "skipped": [], "limit": 6}
        values |= {"frames": 1, "bytes": 1, "retention_ms": 1, "recheck_ms": 1}
        (row,) = await connection.fetch(SQL.take_retained.sql, *SQL.take_retained.arguments(values))
        assert (row["trimmed"], (await parts_of(engine).retention.trim_batch()).done) == (10, 20)
    assert await rows.of("retained") == await rows.of("execution") == []


async def test_a_policy_decides_how_long_its_execution_is_kept(
    reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    await given.completed(policy={"stream_policy": {"retention_ttl_ms": 1_000}})
    long = await given.completed(policy={"stream_policy": {"retention_ttl_ms": 2 * DAY * 1000}})
    ordinary = await given.completed()
    await clock.advance(seconds=2)
    await reconciler.catch_up()
    assert {str(row["execution_id"]) for row in await rows.of("execution")} == {long[-36:], ordinary[-36:]}
    await clock.advance(seconds=DAY)
    await reconciler.catch_up()
    assert {str(row["execution_id"]) for row in await rows.of("execution")} == {long[-36:]}
    await clock.advance(seconds=DAY)
    await reconciler.catch_up()
    assert await rows.of("execution") == []


async def test_an_expired_idempotency_key_is_deleted(
    reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    await given.created(idempotency_key="short", policy={"dedup_window_ms": 1_000})
    await given.created(idempotency_key="long")
    await clock.advance(seconds=2)
    await reconciler.catch_up()
    assert [row["key"] for row in await rows.of("idempotency_key")] == ["long"]
    again = await given.created(idempotency_key="short")
    (entry,) = await rows.of("idempotency_key", key="short")
    assert str(entry["subject_id"]) == again[-36:]


async def test_an_expired_worker_is_removed_from_the_registry_with_one_event(
    engine: Engine, reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    await given.registered(worker_instance_id="silent", liveness_ttl_ms=10_000)
    await given.registered(worker_instance_id="alive", liveness_ttl_ms=60_000)
    await clock.advance(seconds=11)
    await reconciler.catch_up()
    assert [row["worker_instance_id"] for row in await rows.of("worker")] == ["alive"]
    (swept,) = await rows.of("worker_event", kind="ttl_swept")
    assert swept["worker_instance_id"] == "silent"
    assert isinstance(await engine.heartbeat_worker(worker_instance_id="alive", namespace="tests"), Refreshed)


async def test_worker_events_older_than_the_feed_are_deleted(
    reconciler: Reconciler, given: Given, clock: Clock, rows: Rows
) -> None:
    await given.registered(worker_instance_id="old", liveness_ttl_ms=1_000)
    await clock.advance(seconds=DAY + 1)
    await given.registered(worker_instance_id="new", liveness_ttl_ms=60_000)
    await reconciler.catch_up()
    kept = sorted((row["worker_instance_id"], row["kind"]) for row in await rows.of("worker_event"))
    assert kept == [("new", "registered"), ("old", "ttl_swept")]


async def test_a_sweep_without_due_work_changes_nothing(reconciler: Reconciler, given: Given, rows: Rows) -> None:
    await given.completed()
    await given.delayed()
    await given.created()
    await given.registered()
    async with rows.unchanged():
        assert await reconciler.catch_up() == 2
    assert {name: stats.processed for name, stats in reconciler.stats.items() if stats.processed} == {
        "event_partitions": 2
    }

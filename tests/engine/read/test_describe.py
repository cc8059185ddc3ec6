"""Reads of one execution: snapshot, context, counters, fields, attempts."""

from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.state import claim, refused
from engine.waits import suspend_args, suspend_run
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.read.view import CORE_FIELDS
from flowfabric.model.attempt import CurrentAttempt
from flowfabric.model.execution import ExecutionContext, ExecutionSnapshot
from flowfabric.model.lease import CurrentLease
from flowfabric.model.states import AttemptLifecycle, AttemptType, BlockingReason, PublicState

ABSENT = f"{{fp:1}}:{uuid4()}"


async def test_the_snapshot_of_a_new_execution(engine: Engine, given: Given, clock: Clock) -> None:
    now = await clock.now()
    execution_id = await given.created(namespace="tenant", lane_id="lane", tags={"a.b": "1"})
    assert await engine.describe_execution(execution_id) == ExecutionSnapshot(
        execution_id=execution_id,
        flow_id=None,
        lane_id="lane",  # type: ignore[arg-type]
        namespace="tenant",  # type: ignore[arg-type]
        public_state=PublicState.WAITING,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        blocking_detail=None,
        current_attempt=None,
        current_lease=None,
        current_waitpoint=None,
        created_at=now,
        last_mutation_at=now,
        total_attempt_count=0,
        tags={"a.b": "1"},
    )


async def test_a_running_execution_shows_its_attempt_and_its_lease(engine: Engine, given: Given, clock: Clock) -> None:
    run = await given.run(lease_ttl_ms=5_000)
    now = await clock.advance(seconds=1)
    lease = CurrentLease(
        lease_id=run.lease_id,
        lease_epoch=1,
        attempt_index=0,
        worker_instance_id="worker-1",  # type: ignore[arg-type]
        expires_at=now + 4_000,
        last_heartbeat_at=None,
    )
    found = await engine.describe_execution(run.execution_id)
    assert found is not None
    assert found.current_attempt == CurrentAttempt(attempt_id=run.attempt_id, attempt_index=0)
    assert (found.current_lease, found.blocking_reason, found.total_attempt_count) == (lease, None, 1)
    await engine.renew(run.handle)
    found = await engine.describe_execution(run.execution_id)
    assert found is not None
    assert found.current_lease is not None
    assert (found.current_lease.expires_at, found.current_lease.last_heartbeat_at) == (now + 5_000, now)
    assert found.last_mutation_at == now


async def test_a_lost_lease_is_shown_until_it_is_taken_over(engine: Engine, given: Given) -> None:
    handle = await given.reclaimable()
    found = await engine.describe_execution(handle.execution_id)
    assert found is not None
    assert found.current_lease is not None
    assert (found.current_lease.lease_id, found.public_state) == (handle.lease_id, PublicState.ACTIVE)
    assert found.blocking_reason is BlockingReason.WAITING_FOR_WORKER
    assert found.blocking_detail == "lease expired, awaiting reclaim"


async def test_an_ended_execution_keeps_its_attempt_and_has_no_lease(engine: Engine, given: Given) -> None:
    for ended in (await given.completed(), await given.failed()):
        found = await engine.describe_execution(ended)
        assert found is not None
        assert found.current_lease is None
        assert found.current_attempt is not None
        assert (found.current_attempt.attempt_index, found.total_attempt_count) == (0, 1)
    found = await engine.describe_execution((await given.backing_off()).execution_id)
    assert found is not None
    assert (found.current_attempt, found.current_lease, found.total_attempt_count) == (None, None, 1)
    assert found.blocking_detail is not None


async def test_an_unknown_execution_reads_as_none_or_is_refused(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        assert await engine.describe_execution(ABSENT) is None
        assert await engine.resolve_execution_flow_id(ABSENT) is None
        assert await engine.get_execution_namespace(ABSENT) is None
        assert await engine.list_attempts(ABSENT) == []
        assert await engine.read_exec_core_fields(ABSENT, ["namespace", "priority"]) == {
            "namespace": None,
            "priority": None,
        }
        for read in (engine.read_execution_context, engine.read_current_attempt_index, engine.read_total_attempt_count):
            await refused(read(ABSENT), "invalid_input", "does not exist")


async def test_every_read_refuses_a_malformed_id(engine: Engine) -> None:
    for wrong, detail in (
        (str(uuid4()), "MissingTag"),
        ("{fp:1}:x", "InvalidUuid"),
        (f"{{fp:32768}}:{uuid4()}", "i16"),
    ):
        for read in (
            engine.describe_execution,
            engine.resolve_execution_flow_id,
            engine.get_execution_namespace,
            engine.list_attempts,
            engine.read_execution_context,
            engine.read_current_attempt_index,
            engine.read_total_attempt_count,
        ):
            await refused(read(wrong), "invalid_input", detail)
        await refused(engine.read_exec_core_fields(wrong, ["namespace"]), "invalid_input", detail)


async def test_the_context_holds_what_was_submitted(engine: Engine, given: Given) -> None:
    execution_id = await given.created(input_payload=b"\0\xff", execution_kind="resize", tags={"a.b": "1"})
    assert await engine.read_execution_context(execution_id) == ExecutionContext(
        input_payload=b"\0\xff", execution_kind="resize", tags={"a.b": "1"}
    )
    assert (await engine.read_execution_context(await given.created())).tags == {}


async def test_the_index_and_the_count_of_attempts_differ(engine: Engine, given: Given, clock: Clock) -> None:
    execution_id = await given.created(policy={"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 10}}})

    async def counters() -> tuple[int, int]:
        return (
            await engine.read_current_attempt_index(execution_id),
            await engine.read_total_attempt_count(execution_id),
        )

    assert await counters() == (0, 0)
    run = await given.claim()
    assert await counters() == (0, 1)
    await engine.fail(run.handle, reason="x")
    assert await counters() == (0, 1)
    await clock.advance(seconds=1)
    await given.claim()
    assert await counters() == (1, 2)


async def test_the_namespace_and_the_flow_of_an_execution(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    execution_id = await given.created(namespace="tenant")
    assert await engine.get_execution_namespace(execution_id) == "tenant"
    assert await engine.resolve_execution_flow_id(execution_id) is None
    flow_id = uuid4()
    await connection.execute("update execution set flow_id = $1", flow_id)
    assert await engine.resolve_execution_flow_id(execution_id) == flow_id
    found = await engine.describe_execution(execution_id)
    assert found is not None
    assert found.flow_id == flow_id


async def test_fields_are_read_by_name_as_text(engine: Engine, given: Given, clock: Clock) -> None:
    now = await clock.now()
    run = await given.run(
        priority=7,
        capabilities=("gpu", "cpu"),
        policy={"routing_requirements": {"required_capabilities": ["gpu", "cpu"]}},
    )
    await engine.progress(run.handle, percent=5, message="go")
    names = sorted(CORE_FIELDS)
    found = await engine.read_exec_core_fields(run.execution_id, names)
    assert list(found) == names
    expected = {
        "namespace": "tests",
        "current_lane": "default",
        "execution_kind": "job",
        "priority": "7",
        "required_capabilities": "cpu,gpu",
        "lifecycle_phase": "active",
        "ownership_state": "leased",
        "public_state": "active",
        "created_at": str(now),
        "started_at": str(now),
        "completed_at": None,
        "current_attempt_index": "0",
        "current_attempt_id": str(run.attempt_id),
        "total_attempt_count": "1",
        "current_lease_id": str(run.lease_id),
        "current_lease_epoch": "1",
        "current_worker_id": "worker",
        "current_worker_instance_id": "worker-1",
        "lease_expires_at": str(now + 30_000),
        "progress_pct": "5",
        "progress_message": "go",
        "pending_retry_reason": None,
        "retry_count": "0",
    }
    assert {name: found[name] for name in expected} == expected
    assert await engine.read_exec_core_fields(run.execution_id, []) == {}


async def test_the_lineage_of_a_retry_is_pending_until_it_is_claimed(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handle = await given.backing_off(delay_ms=10)
    names = [
        "pending_retry_reason",
        "pending_previous_attempt_index",
        "current_attempt_id",
        "current_lease_id",
        "failure_reason",
    ]
    assert list((await engine.read_exec_core_fields(handle.execution_id, names)).values()) == [
        "no luck",
        "0",
        None,
        None,
        "no luck",
    ]
    await clock.advance(seconds=1)
    await given.claim()
    found = await engine.read_exec_core_fields(handle.execution_id, names)
    assert (found["pending_retry_reason"], found["failure_reason"]) == (None, None)


PROGRESS = ("progress_pct", "progress_message", "progress_updated_at", "failure_reason")


async def test_progress_and_failure_are_those_of_the_latest_attempt(engine: Engine, given: Given, clock: Clock) -> None:
    async def shown() -> list[str | None]:
        return list((await engine.read_exec_core_fields(execution_id, PROGRESS)).values())

    retry = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 10}}}
    execution_id = await given.created(policy=retry)
    first = await given.claim()
    at = await clock.advance(seconds=1)
    await engine.progress(first.handle, percent=80, message="nearly")
    assert await shown() == ["80", "nearly", str(at), None]
    await engine.fail(first.handle, reason="busy")
    assert await shown() == ["80", "nearly", str(at), "busy"]
    await clock.advance(seconds=1)
    second = await given.claim()
    assert await shown() == [None, None, None, None]
    # Delayed before it reported progress, it has none after it resumes.
    await engine.delay(second.handle, 0)
    assert await shown() == [None, None, None, None]
    await engine.promote_delayed(execution_id=execution_id)
    at = await clock.advance(seconds=1)
    second = await given.claim()
    await engine.progress(second.handle, message="again")
    assert await shown() == [None, "again", str(at), None]
    await engine.delay(second.handle, 0)
    await engine.promote_delayed(execution_id=execution_id)
    await clock.advance(seconds=1)
    second = await given.claim()
    assert await shown() == [None, "again", str(at), None]
    at = await clock.advance(seconds=1)
    await engine.progress(second.handle, percent=5)
    assert await shown() == ["5", "again", str(at), None]
    await clock.advance(seconds=31)
    third = await given.claim()
    assert (third.attempt_index, await shown()) == (2, [None, None, None, None])
    await engine.complete(third.handle)
    assert await shown() == [None, None, None, None]


async def test_the_continuation_pointer_is_shown_to_the_resumed_run_and_not_to_another_attempt(
    engine: Engine, given: Given, clock: Clock
) -> None:
    async def left() -> str | None:
        found = await engine.describe_execution(run.execution_id)
        assert found is not None
        return found.continuation_metadata_pointer

    run = await given.run()
    await suspend_run(engine, run.handle, suspend_args(continuation_metadata_pointer="s3://there"))
    await engine.resume_execution(execution_id=run.execution_id)
    assert await left() == "s3://there"
    resumed = await given.claim()
    assert await left() == "s3://there"
    await clock.advance(seconds=31)
    reclaimed = await given.claim()
    assert (resumed.attempt_index, reclaimed.attempt_index) == (0, 1)
    assert await left() is None


async def test_an_unknown_field_is_refused(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.created()
    wrong: list[Any] = ["place", "", "Namespace", 5]
    async with rows.unchanged():
        for name in wrong:
            call = engine.read_exec_core_fields(execution_id, ["namespace", name])
            await refused(call, "invalid_input", "unknown field")
        await refused(engine.read_exec_core_fields(execution_id, "namespace"), "invalid_input", "names")


async def test_attempts_are_listed_with_the_running_one(engine: Engine, given: Given, clock: Clock) -> None:
    retry = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 10}}}
    execution_id = await given.created(policy=retry)
    started = await clock.advance(seconds=1)
    first = await given.claim()
    failed = await clock.advance(seconds=1)
    await engine.fail(first.handle, reason="busy", classification="timeout")
    await clock.advance(seconds=1)
    second = await given.claim(lease_ttl_ms=1_000, worker="other")
    expired = await clock.advance(seconds=2)
    (third,) = await claim(engine)
    one, two, three = await engine.list_attempts(execution_id)
    assert (one.attempt_id, one.attempt_type, one.attempt_state) == (
        first.attempt_id,
        AttemptType.INITIAL,
        AttemptLifecycle.ENDED_FAILURE,
    )
    assert (one.created_at, one.started_at, one.ended_at, one.lease_epoch) == (started, started, failed, 1)
    assert (one.failure_reason, one.failure_category, one.worker_instance_id) == ("busy", "timeout", "worker-1")
    assert (two.attempt_type, two.attempt_state, two.ended_at) == (
        AttemptType.RETRY,
        AttemptLifecycle.INTERRUPTED_RECLAIMED,
        expired,
    )
    assert (two.retry_reason, two.previous_attempt_index, two.worker_id) == ("busy", 0, "other")
    assert (two.lease_id, two.failure_reason) == (second.lease_id, "lease_lease_expired_reclaimable")
    assert (three.attempt_id, three.attempt_type, three.attempt_state) == (
        third.attempt_id,
        AttemptType.RECLAIM,
        AttemptLifecycle.STARTED,
    )
    assert (three.previous_attempt_index, three.ended_at, three.lease_epoch) == (1, None, 3)
    assert [attempt.attempt_index for attempt in (one, two, three)] == [0, 1, 2]
    assert {attempt.execution_id for attempt in (one, two, three)} == {execution_id}
    assert (three.usage, three.replayed_from_attempt_index, three.suspension_id) == ({}, None, None)


async def test_a_delayed_and_resumed_attempt_is_one_attempt(engine: Engine, given: Given, clock: Clock) -> None:
    run = await given.run()
    parked = await clock.advance(seconds=1)
    await engine.delay(run.handle, parked + 10)
    (attempt,) = await engine.list_attempts(run.execution_id)
    assert (attempt.attempt_state, attempt.suspended_at, attempt.suspension_marker) == (
        AttemptLifecycle.SUSPENDED,
        parked,
        "worker_delay",
    )
    resumed = await clock.advance(seconds=1)
    await given.claim()
    (attempt,) = await engine.list_attempts(run.execution_id)
    assert (attempt.attempt_state, attempt.resumed_at, attempt.started_at) == (
        AttemptLifecycle.STARTED,
        resumed,
        parked - 1000,
    )
    assert attempt.attempt_id == run.attempt_id


# Corrupt rows are reported.

CORRUPT = {
    "attempt_index": "attempt_count = 0",
    "lease_epoch": "lease_epoch = 0",
    "lease_id": "lease_id = null",
    "created_at": "created_at = null",
    "namespace": "namespace_no = 99",
    "lane_id": "lane_no = 99",
}
INFO = ("created_at", "namespace", "lane_id")


async def test_a_missing_field_is_corruption(
    engine: Engine, given: Given, connection: asyncpg.Connection, subtests: pytest.Subtests
) -> None:
    await connection.execute("alter table execution alter created_at drop not null")

    async def corrupt(change: str) -> str:
        handle = await given.claimed()
        await connection.execute(f"update execution set {change} where execution_id = $1", uuid_of(handle.execution_id))
        return str(handle.execution_id)

    for field, change in CORRUPT.items():
        with subtests.test(field):
            execution_id = await corrupt(change)
            await refused(engine.describe_execution(execution_id), "corruption", f"{execution_id}: {field}: ")
            if field in INFO:
                await refused(engine.read_execution_info(execution_id), "corruption", f"read_execution_info: {field}: ")
            if field == "namespace":
                await refused(engine.get_execution_namespace(execution_id), "corruption", "namespace: is missing")
    execution_id = await corrupt("queue_no = 99")
    await refused(engine.read_execution_info(execution_id), "corruption", "execution_kind: is missing")
    await refused(engine.read_execution_context(execution_id), "corruption", "execution_kind: is missing")
    execution_id = await corrupt("input_payload = null")
    await refused(engine.read_execution_context(execution_id), "corruption", "input_payload: is missing")
    for change in ("worker_no = null", "lease_expires_at = null, claim_no = null"):
        found = await engine.describe_execution(await corrupt(change))
        assert found is not None
        assert found.current_lease is None


async def test_an_unknown_literal_is_corruption(engine: Engine, given: Given, connection: asyncpg.Connection) -> None:
    execution_id = await given.created()
    await connection.execute("alter type blocking_reason add value 'waiting_for_godot'")
    await connection.execute("update execution set blocking_reason = 'waiting_for_godot'")
    detail = "blocking_reason: unknown literal 'waiting_for_godot'"
    await refused(engine.describe_execution(execution_id), "corruption", detail)
    await refused(engine.read_execution_info(execution_id), "corruption", detail)
    await connection.execute("alter table execution alter column public_state drop expression")
    await connection.execute("alter type public_state add value 'lost'")
    await connection.execute("update execution set public_state = 'lost'")
    await refused(engine.read_execution_state(execution_id), "corruption", "public_state: unknown literal 'lost'")
    await refused(engine.list_executions(), "corruption", "public_state: unknown literal 'lost'")

"""What a durable engine must not save itself: endings, leases, errors and what it keeps, done in full."""

import asyncio
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, NotFoundError
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.grant import ResumeGrant, ResumeToken
from flowfabric.model.handle import Backend
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import RetryScheduled, TerminalFailed
from flowfabric.model.worker import Refreshed, Registered

from .grants import grant, reclaim, reclaim_grant
from .state import (
    ACTIVE,
    CANCELLED,
    FENCED,
    LAPSED,
    PARKED,
    RETRYABLE,
    claim,
    each_fenced,
    ids,
    lease_left,
    new,
    refused,
    told,
    vector,
)

GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}


def fence(handle: Any) -> dict[str, Any]:
    """A handle as the arguments of a service."""
    return {
        "execution_id": handle.execution_id,
        "lease_id": handle.lease_id,
        "lease_epoch": handle.lease_epoch,
        "attempt_id": handle.attempt_id,
    }


# Terminal operations.


async def test_a_lost_lease_cannot_complete_and_a_second_complete_tells_nothing(
    engine: Engine, given: Any, rows: Any
) -> None:
    late = await given.expired_lease()
    await refused(engine.complete(late), "lease_expired")
    handle = await given.claimed(priority=1)
    await engine.complete(handle, b"first")
    async with rows.unchanged():
        await engine.complete(handle, b"second")
    assert await told(rows, handle.execution_id) == ["acquired", "released completed>success"]


async def test_a_failure_obeys_policy_and_class_by_handle_and_by_service(
    engine: Engine, given: Any, clock: Any
) -> None:
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 700}}}
    for by_service in (False, True):
        for classification, expected in (("transient", RetryScheduled), ("permanent", TerminalFailed)):
            handle = await given.claimed(policy=policy)
            if by_service:
                named: dict[str, Any] = {"failure_reason": "x", "failure_category": classification}
                answer = await engine.fail_execution(**fence(handle), **named)
            else:
                answer = await engine.fail(handle, reason="x", classification=classification)
            assert type(answer) is expected
            if isinstance(answer, RetryScheduled):
                assert answer.delay_until == await clock.now() + 700
    without = await given.claimed(priority=1)
    assert isinstance(await engine.fail(without, reason="x"), TerminalFailed)


async def test_a_retry_stands_where_the_promoter_looks(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    handle = await given.backing_off(delay_ms=500)
    assert (await rows.execution(handle.execution_id))["delay_until"] == await clock.now() + 500
    await clock.advance(ms=500)
    assert await engine.delays.promote_due() == 1
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["delay_until"]) == (RETRYABLE, None)


async def test_a_delay_leaves_the_deadline_alone(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    deadline = await clock.now() + 90_000
    handle = await given.claimed(execution_deadline_at=deadline)
    await engine.delay(handle, await clock.now() + 1000)
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["deadline_at"]) == (PARKED, deadline)
    await clock.advance(ms=1000)
    await engine.promote_delayed(handle.execution_id)
    assert (await rows.execution(handle.execution_id))["deadline_at"] == deadline


async def test_a_repeated_failure_answers_the_stored_time_and_a_delay_is_no_retry(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 700}}}
    failed, parked = await given.claimed(policy=retry), await given.claimed(policy=retry)
    first = await engine.fail(failed, reason="x")
    await engine.delay(parked, await clock.now() + 700)
    await clock.advance(ms=10)
    async with rows.unchanged():
        assert await engine.fail(failed, reason="x") == first
        await refused(engine.fail(parked, reason="x"), "execution_not_active")


async def test_a_cancel_by_handle_is_fenced_told_and_lets_the_lease_go(engine: Engine, given: Any, rows: Any) -> None:
    stale = await given.reclaimable()
    (taken,) = await claim(engine)
    await refused(engine.cancel(stale, "mine"), "lease_conflict")
    await engine.cancel(taken.handle, "mine")
    row = await rows.execution(stale.execution_id)
    assert (vector(row), lease_left(row)) == (CANCELLED, {})
    assert (await told(rows, stale.execution_id))[-1] == "released cancelled>cancelled"


async def test_a_cancel_by_an_operator_is_told_and_a_given_lease_is_compared(
    engine: Engine, given: Any, rows: Any
) -> None:
    waiting, handle = await given.created(), await given.claimed(priority=1)
    await engine.cancel_execution(execution_id=waiting, reason="x")
    assert await told(rows, waiting) == ["ended cancelled>cancelled"]
    async with rows.unchanged():
        wrong = {**fence(handle), "lease_id": uuid4()}
        await refused(engine.cancel_execution(**wrong, reason="x", source="lease_holder"), "stale_lease")
    await engine.cancel_execution(**fence(handle), reason="x", source="lease_holder")
    assert (await told(rows, handle.execution_id))[-1] == "released cancelled>cancelled"


async def test_every_ending_is_told_with_namespace_and_instance_tag(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    tagged = {"tags": {"ff.instance_id": "i1"}, "namespace": "tenant"}
    completed = await given.completed(**tagged)
    failed = await given.failed(**tagged)
    cancelled = await given.cancelled(**tagged)
    by_handle = await given.claimed(**tagged)
    await engine.cancel(by_handle, "x")
    deadline = await clock.now() + 1000
    expired = await given.created(**tagged, execution_deadline_at=deadline)
    await clock.advance(ms=1000)
    await engine.expire_execution(expired, "execution_deadline")
    capped = await given.reclaimable(**tagged, policy={"max_reclaim_count": 0})
    assert await claim(engine) == []
    (namespace,) = await rows.of("namespace", namespace="tenant")
    for execution_id in (completed, failed, cancelled, by_handle.execution_id, expired, capped.execution_id):
        endings = [event for event in await rows.events(execution_id) if event["outcome"] is not None]
        assert len(endings) == 1
        assert (endings[0]["namespace_no"], endings[0]["instance_tag"]) == (namespace["namespace_no"], "i1")


async def test_an_attempts_timer_is_not_its_lease(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 5000}}
    lapsing = await given.claimed(policy=policy, lease_ttl_ms=1000)
    renewing = await given.claimed(policy=policy, lease_ttl_ms=60_000)
    await clock.advance(ms=1000)
    assert await engine.timeouts.expire_due() == 0
    assert await engine.lease_expiry.sweep() == 1
    await clock.advance(ms=4000)
    assert await engine.lease_expiry.sweep() == 0
    assert await engine.timeouts.expire_due() == 2
    for handle in (lapsing, renewing):
        assert (await rows.execution(handle.execution_id))["public_state"] == "expired"


async def test_a_deadline_ends_what_has_not_ended_in_any_state(engine: Engine, given: Any, clock: Any) -> None:
    until = {"execution_deadline_at": await clock.now() + 90_000}
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 900_000}}}
    lost = await given.reclaimable(**until)
    backing_off = await given.claimed(**until, policy=retry, priority=1)
    await engine.fail(backing_off, reason="x")
    parked = await given.claimed(**until, priority=1)
    await engine.delay(parked, await clock.now() + 900_000)
    active = await given.claimed(**until, priority=1, lease_ttl_ms=900_000)
    named = [handle.execution_id for handle in (lost, backing_off, parked, active)]
    named += [await given.created(**until), await given.delayed(**until, seconds=900)]
    await clock.advance(seconds=90)
    assert await engine.timeouts.expire_due() == len(named)
    assert {await engine.read_execution_state(execution_id) for execution_id in named} == {"expired"}


# Leases.


async def test_a_lost_lease_leaves_the_execution_active_and_is_counted(engine: Engine, given: Any, rows: Any) -> None:
    lost = await given.reclaimable()
    assert vector(await rows.execution(lost.execution_id)) == LAPSED
    await claim(engine)
    row = await rows.execution(lost.execution_id)
    assert (vector(row), row["reclaim_count"]) == (ACTIVE, 1)


async def test_the_list_of_expired_leases_names_real_leases_page_by_page(
    engine: Engine, given: Any, clock: Any
) -> None:
    await engine.issue_grant_and_claim(execution_id=await given.created(), lane_id="default", lease_duration_ms=1000)
    handles = [await given.claimed(lease_ttl_ms=1000) for _ in range(4)]
    await clock.advance(ms=1000)
    await engine.mark_lease_expired_if_due(handles[0].execution_id)
    found: list[Any] = []
    cursor = None
    while True:
        page = await engine.list_expired_leases(after=cursor, limit=2)
        found += page.entries
        if (cursor := page.cursor) is None:
            break
    assert sorted(ids(found)) == ids(found)
    assert {handle.lease_id for handle in handles} < {entry.lease_id for entry in found}
    assert len(found) == 5


async def test_a_lost_lease_is_recovered_by_the_next_claim(engine: Engine, given: Any) -> None:
    lost = await given.expired_lease()
    (taken,) = await claim(engine, worker_id="another")
    assert (taken.execution_id, taken.attempt_index) == (lost.execution_id, 1)


async def test_the_policys_cap_on_reclaims_ends_the_execution_when_a_grant_is_asked_for(
    engine: Engine, given: Any, rows: Any
) -> None:
    capped = await given.reclaimable(policy={"max_reclaim_count": 0})
    answer = await reclaim_grant(engine, capped.execution_id)
    assert (type(answer).__name__, answer.reclaim_count) == ("ReclaimCapExceeded", 0)
    row = await rows.execution(capped.execution_id)
    assert (row["public_state"], row["failure_reason"]) == ("failed", "max_reclaims_exceeded")


async def test_a_reclaim_grant_wants_the_capabilities_and_a_reclaim_the_state(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    lost = await given.reclaimable(policy=GPU, capabilities=("gpu",))
    answer = await reclaim_grant(engine, lost.execution_id)
    assert (type(answer).__name__, answer.detail) == ("NotReclaimable", "capability_mismatch: gpu")
    await reclaim_grant(engine, lost.execution_id, worker_capabilities=("gpu",), grant_ttl_ms=1000)
    await clock.advance(ms=1000)
    assert type(await reclaim(engine, lost.execution_id)).__name__ == "GrantNotFound"
    await reclaim_grant(engine, lost.execution_id, worker_capabilities=("gpu",))
    await engine.cancel_execution(execution_id=lost.execution_id, reason="x")
    async with rows.unchanged():
        assert type(await reclaim(engine, lost.execution_id)).__name__ == "NotReclaimable"


async def test_a_release_is_told_as_such_with_its_lease_and_owner(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    owner = (await rows.execution(handle.execution_id))["worker_no"]
    await engine.complete(handle)
    assert (await told(rows, handle.execution_id))[-1] == "released completed>success"
    event = (await rows.events(handle.execution_id))[-1]
    assert (event["lease_id"], event["lease_epoch"], event["worker_no"]) == (handle.lease_id, 1, owner)


@each_fenced
async def test_whoever_comes_too_late_marks_the_lease(engine: Engine, given: Any, rows: Any, operation: str) -> None:
    late = await given.expired_lease()
    await refused(FENCED[operation](engine, late), "lease_expired")
    assert vector(await rows.execution(late.execution_id)) == LAPSED


# Errors and concurrency.


async def test_a_conflict_that_persists_is_told_as_one_to_retry_and_never_as_a_lost_lease(
    engine: Engine, given: Any, connection: Any
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


async def test_two_creates_of_one_id_at_once_are_one_and_its_duplicate(engines: Any, given: Any) -> None:
    rivals = [await engines(), await engines()]
    for _ in range(10):
        named = new(execution_id=f"{{fp:1}}:{uuid4()}")
        answers = await asyncio.gather(*(engine.create_execution(**named) for engine in rivals))
        assert sorted(type(answer).__name__ for answer in answers) == [Created.__name__, Duplicate.__name__]


@each_fenced
async def test_a_handle_of_another_backend_is_called_that(
    engine: Engine, given: Any, rows: Any, operation: str
) -> None:
    foreign = msgspec.structs.replace(await given.claimed(), backend=Backend.VALKEY)
    async with rows.unchanged():
        await refused(
            FENCED[operation](engine, foreign), "handle_from_other_backend", "expected=Postgres actual=Valkey"
        )


async def test_a_cancel_by_handle_says_not_found_and_not_active(engine: Engine, given: Any) -> None:
    handle = await given.claimed()
    absent = msgspec.structs.replace(handle, execution_id=ExecutionId(f"{{fp:1}}:{uuid4()}"))
    assert isinstance(await refused(engine.cancel(absent, "x"), "execution_not_found"), NotFoundError)
    await engine.complete(handle)
    await refused(engine.cancel(handle, "x"), "execution_not_active")


@pytest.mark.usefixtures("fresh_database")
async def test_operations_of_all_kinds_on_one_execution_meet_no_deadlock(
    engines: Any, given: Any, connection: Any
) -> None:
    rivals = [await engines() for _ in range(3)]
    query = "select deadlocks from pg_stat_database where datname = current_database()"
    before = await connection.fetchval(query)

    async def settled(call: Any) -> object:
        try:
            return await call
        except EngineError as refusal:
            return refusal.code

    for _ in range(15):
        handle = await given.reclaimable()
        named = handle.execution_id
        answers = await asyncio.gather(
            settled(claim(rivals[0])),
            settled(reclaim_grant(rivals[1], named)),
            settled(rivals[2].complete(handle)),
            settled(rivals[1].mark_lease_expired_if_due(named)),
            settled(rivals[2].set_execution_tag(named, "app.key", "value")),
            settled(rivals[0].cancel_execution(execution_id=named, reason="x")),
        )
        assert "retry_exhausted" not in answers
    assert await connection.fetchval(query) == before


async def test_the_stores_clock_decides_leases_and_grants(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    await clock.set(5_000_000)
    claimed = await given.run(lease_ttl_ms=1000)
    assert claimed.lease_expires_at == 5_001_000
    granted = await grant(engine, await given.created(), grant_ttl_ms=1000)
    assert granted.grant.expires_at_ms == 5_001_000
    await clock.set(5_000_999)
    await engine.renew(claimed.handle)
    await clock.set(5_001_999)
    await refused(engine.renew(claimed.handle), "lease_expired")


# Other.


@pytest.mark.parametrize("is_in_grace", [True, False], ids=["in grace", "past it"])
async def test_a_retired_key_verifies_until_its_grace_ends(
    engine: Engine,
    given: Any,
    clock: Any,
    is_in_grace: bool,  # noqa: FBT001
) -> None:
    handle = await given.claimed()
    await engine.wait_children(handle)
    granted = (await grant(engine, handle.execution_id, grant_ttl_ms=60_000)).grant
    await engine.rotate_waitpoint_hmac_secret_all(new_kid="k2", new_secret_hex="cd" * 32, grace_ms=1000)
    await clock.advance(ms=1000 if is_in_grace else 1001)
    resume = ResumeGrant(
        execution_id=granted.execution_id,
        partition_key=granted.partition_key,
        grant_key=granted.grant_key,
        expires_at_ms=granted.expires_at_ms,
        lane_id=handle.lane_id,
    )
    calling = engine.claim_from_resume_grant(ResumeToken(grant=resume, worker_id="pool", worker_instance_id="pool-1"))
    if is_in_grace:
        assert await calling is not None
    else:
        await refused(calling, "invalid_claim_grant")


async def test_retention_is_each_executions_own_and_takes_all_that_depends_on_it(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    short = {"policy": {"stream_policy": {"retention_ttl_ms": 1000}}, "tags": {"app.key": "value"}}
    short |= {"input_payload": b"x" * 300}
    gone = [
        await given.completed(result=b"x" * 300, **short),
        await given.cancelled(**short),
        await given.failed(**short),
    ]
    kept = await given.completed()
    await clock.advance(ms=1000)
    assert await engine.retention.trim() == len(gone)
    for table in ("execution", "execution_input", "execution_result", "execution_tag", "attempt", "listed"):
        left = {str(row["execution_id"]) for row in await rows.of(table)}
        assert left <= {kept[-36:]}
    assert await engine.read_execution_state(kept) == "completed"


async def test_a_lapsed_registration_is_as_good_as_none(engine: Engine, given: Any, clock: Any) -> None:
    await given.registered(liveness_ttl_ms=1000)
    await given.registered(worker_instance_id="elsewhere-1", namespace="other", liveness_ttl_ms=60_000)
    assert [entry.namespace for entry in (await engine.list_workers()).entries] == ["other", "tests"]
    await clock.advance(ms=1000)
    assert [entry.namespace for entry in (await engine.list_workers()).entries] == ["other"]
    named: dict[str, Any] = {
        "worker_instance_id": "worker-1",
        "lanes": ("default",),
        "liveness_ttl_ms": 1000,
        "namespace": "tests",
    }
    assert await engine.register_worker(worker_id="another", **named) == Registered()


async def test_of_two_first_registrations_at_once_one_is_the_first(engines: Any) -> None:
    rivals = [await engines(), await engines()]
    for number in range(10):
        named: dict[str, Any] = {
            "worker_instance_id": f"w-{number}",
            "lanes": ("default",),
            "liveness_ttl_ms": 1000,
            "namespace": "n",
        }
        answers = await asyncio.gather(*(engine.register_worker(worker_id="w", **named) for engine in rivals))
        assert sorted(type(answer).__name__ for answer in answers) == [Refreshed.__name__, Registered.__name__]


async def test_expired_leases_are_listed_for_exactly_one_namespace(engine: Engine, given: Any, clock: Any) -> None:
    here = await given.claimed(namespace="a", lease_ttl_ms=1000)
    await given.claimed(namespace="ab", lease_ttl_ms=1000)
    await clock.advance(ms=1000)
    assert ids((await engine.list_expired_leases(namespace="a")).entries) == [here.execution_id]
    assert (await engine.list_expired_leases(namespace="absent")).entries == ()

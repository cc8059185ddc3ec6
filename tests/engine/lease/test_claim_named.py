"""Claims of one execution by its id: with a grant, and for an operator."""

import json
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from engine.cases import Cases, in_turn
from engine.grants import claim_granted, grant_for_worker, issue_grant, register_workers, resumable, worker
from engine.state import ACTIVE, attempts, event_texts, refused, vector
from fixtures import Clock, Engines, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.retention import GRANT_MEMORY_MS
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import BugError, ConflictError, EngineError
from flowfabric.model.grant import GrantedClaim, NotReclaimable, ResumeToken
from flowfabric.model.ids import mint_uuid_texts
from flowfabric.model.lease import ClaimedExecution, Completed, Renewed
from flowfabric.model.states import AttemptType, HandleKind
from flowfabric.reconcile.loop import Reconciler

LEASE = "01a1def0-0000-7000-8000-000000000001"
ATTEMPT = "01a1def0-0000-7000-8000-000000000002"
NEW: dict[str, Any] = {"worker_id": "unheard", "worker_instance_id": "unheard-of"}


@pytest.fixture
async def engine(engine: Engine) -> Engine:
    """An engine with a key to sign grants with, that knows the worker who searches."""
    await register_workers(engine)
    return engine


# By a grant.


async def test_a_claim_turns_a_grant_into_a_lease(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    waiting = await given.created(tags={"a.b": "c"}, payload_encoding="json", priority=7)
    await issue_grant(engine, waiting)
    now = await clock.advance(seconds=1)
    claimed = await claim_granted(
        engine,
        waiting,
        lease_ttl_ms=9000,
        lease_id=LEASE,
        attempt_id=ATTEMPT,
        expected_attempt_index=4,
        attempt_policy_json='{"model": "small"}',
        attempt_timeout_ms=3000,
        execution_deadline_at=now + 60_000,
    )
    assert isinstance(claimed, ClaimedExecution)
    assert (str(claimed.lease_id), str(claimed.attempt_id)) == (LEASE, ATTEMPT)
    assert (claimed.lease_epoch, claimed.attempt_index, claimed.attempt_type) == (1, 0, AttemptType.INITIAL)
    assert claimed.lease_expires_at == now + 9000
    assert (claimed.tags, claimed.payload_encoding, claimed.priority) == ({"a.b": "c"}, "json", 7)
    assert (claimed.execution_kind, claimed.input_payload, claimed.lane_id) == ("job", b'{"a": 1}', "default")
    handle = claimed.handle
    assert (handle.kind, handle.fence.lease_id, handle.lease_ttl_ms) == (HandleKind.FRESH, claimed.lease_id, 9000)
    assert handle.worker_instance_id == "pool-1"
    row = await rows.execution(waiting)
    assert vector(row) == ACTIVE
    assert (str(row["lease_id"]), str(row["attempt_id"]), row["lease_epoch"]) == (LEASE, ATTEMPT, 1)
    assert (row["lease_expires_at"], row["claimed_at"], row["started_at"]) == (now + 9000, now, now)
    assert (row["attempt_timeout_at"], row["deadline_at"]) == (now + 3000, now + 60_000)
    assert await rows.timers(waiting) == {"attempt_timeout": now + 3000, "deadline": now + 60_000}
    (running,) = await engine.list_attempts(waiting)
    assert (running.attempt_state, running.policy, row["granted_until"]) == ("started", '{"model": "small"}', None)
    assert (await rows.of("claim_grant"), await rows.of("ready")) == ([], [])
    assert await event_texts(rows, waiting) == ["acquired"]
    await engine.renew(handle)
    await engine.complete(handle, b"done")
    (attempt,) = await attempts(rows, waiting)
    assert (str(attempt["attempt_id"]), json.loads(attempt["policy"])) == (ATTEMPT, {"model": "small"})


async def test_omitted_arguments_are_minted_or_come_from_the_policy(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    now = await clock.now()
    policy = {"timeout_policy": {"attempt_timeout_ms": 4000, "execution_deadline_ms": 50_000}}
    waiting = await given.created(policy=policy)
    await issue_grant(engine, waiting)
    claimed = await claim_granted(engine, waiting, execution_deadline_at=0)
    row = await rows.execution(waiting)
    assert (row["attempt_timeout_at"], row["deadline_at"]) == (now + 4000, now + 50_000)
    assert (claimed.attempt_timeout_ms, claimed.execution_deadline_at) == (4000, now + 50_000)
    assert row["lease_expires_at"] == now + 30_000
    assert row["lease_id"] == row["attempt_id"] == claimed.attempt_id
    assert UUID(str(claimed.lease_id)).version == 7
    waiting = await given.created(policy={"timeout_policy": {"attempt_timeout_ms": 4000}})
    await issue_grant(engine, waiting)
    await claim_granted(engine, waiting, attempt_timeout_ms=0)
    assert (await rows.execution(waiting))["attempt_timeout_at"] is None, "0 means no timeout"


async def test_executions_may_share_ids_that_the_caller_chose(engine: Engine, given: Given) -> None:
    handles = []
    for _ in range(3):
        waiting = await given.created()
        await issue_grant(engine, waiting)
        handles.append((await claim_granted(engine, waiting, lease_id=LEASE, attempt_id=ATTEMPT)).handle)
    assert [type(one) for one in await engine.renew_many(handles)] == [Renewed] * 3
    completed = await engine.complete_many([(handle, None) for handle in handles])
    assert [type(one) for one in completed] == [Completed] * 3


async def test_a_retry_claimed_by_grant_is_a_retry(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    failed = await given.backing_off(delay_ms=10)
    await clock.advance(ms=10)
    await parts_of(engine).delays.promote_due()
    await issue_grant(engine, failed.execution_id)
    claimed = await claim_granted(engine, failed.execution_id)
    assert (claimed.attempt_type, claimed.attempt_index, claimed.retry_count) == (AttemptType.RETRY, 1, 1)
    _, running = await engine.list_attempts(failed.execution_id)
    assert (running.retry_reason, running.previous_attempt_index) == ("no luck", 0)


@in_turn(
    "stored, argument, kept",
    [('{"of": "failure"}', '{"of": "claim"}', "claim"), ('{"of": "failure"}', None, "failure"), (None, None, None)],
)
async def test_the_attempt_policy_is_that_of_the_claim_else_that_of_the_failure_before(
    engine: Engine, given: Given, rows: Rows, clock: Clock, stored: str | None, argument: str | None, kept: str | None
) -> None:
    handle = await given.claimed(policy={"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 10}}})
    await engine.fail_execution(
        execution_id=handle.execution_id,
        lease_id=handle.lease_id,
        lease_epoch=handle.lease_epoch,
        attempt_id=handle.attempt_id,
        failure_reason="x",
        next_attempt_policy_json=stored,
    )
    await clock.advance(ms=10)
    await parts_of(engine).delays.promote_due()
    await issue_grant(engine, handle.execution_id)
    claimed = await claim_granted(engine, handle.execution_id, attempt_policy_json=argument)
    await engine.complete(claimed.handle)
    policies = [attempt["policy"] for attempt in await attempts(rows, handle.execution_id)]
    assert [policy and json.loads(policy) for policy in policies] == [None, kept and {"of": kept}]


async def test_a_grant_for_a_lost_lease_becomes_a_reclaimed_lease(engine: Engine, given: Given, rows: Rows) -> None:
    lost = await given.reclaimable()
    await grant_for_worker(engine)
    claimed = await claim_granted(engine, lost.execution_id, lease_id=LEASE, attempt_id=ATTEMPT)
    assert (claimed.handle.kind, claimed.attempt_type) == (HandleKind.RECLAIMED, AttemptType.RECLAIM)
    assert (str(claimed.lease_id), str(claimed.attempt_id), claimed.lease_epoch) == (LEASE, ATTEMPT, 2)
    assert (await rows.execution(lost.execution_id))["reclaim_count"] == 1
    interrupted, running = await attempts(rows, lost.execution_id)
    assert (interrupted["attempt_state"], running["attempt_state"]) == ("interrupted_reclaimed", "started")
    assert await event_texts(rows, lost.execution_id) == ["acquired", "expired", "reclaimed"]
    assert await rows.of("claim_grant") == []


async def test_an_execution_that_is_not_claimable_is_not_leaseable(engine: Engine, given: Given, rows: Rows) -> None:
    states = ("reclaimable", "delayed", "backing_off", "claimed", "completed", "cancelled")
    made = {state: await getattr(given, state)(lane_id=state) for state in states}
    with Cases() as cases:
        async with rows.unchanged():
            for state, one in made.items():
                with cases(state):
                    call = claim_granted(engine, getattr(one, "execution_id", one), lane_id=state)
                    await refused(call, "execution_not_leaseable")


async def test_an_interrupted_attempt_must_use_claim_resumed_execution(
    engine: Engine, given: Given, rows: Rows
) -> None:
    parked = await resumable(given)
    await issue_grant(engine, parked)
    async with rows.unchanged():
        await refused(claim_granted(engine, parked), "use_claim_resumed_execution")
        await refused(claim_granted(engine, parked, "other"), "use_claim_resumed_execution")


async def test_only_the_worker_with_the_grant_may_claim_from_any_of_its_processes(
    engine: Engine, given: Given, rows: Rows
) -> None:
    waiting = await given.created()
    async with rows.unchanged():
        await refused(claim_granted(engine, waiting), "invalid_claim_grant")
    await issue_grant(engine, waiting)
    async with rows.unchanged():
        await refused(claim_granted(engine, waiting, "other"), "invalid_claim_grant")
    claimed = await claim_granted(engine, waiting, worker_instance_id="pool-2")
    assert claimed.handle.worker_instance_id == "pool-2"


async def test_only_the_granted_worker_learns_that_its_grant_expired_until_the_grant_is_purged(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waiting, ungranted = await given.created(), await given.created()
    await issue_grant(engine, waiting)
    await clock.advance(ms=5000)
    async with rows.unchanged():
        await refused(claim_granted(engine, waiting), "claim_grant_expired")
        await refused(claim_granted(engine, waiting, "other"), "invalid_claim_grant")
    await clock.advance(ms=GRANT_MEMORY_MS - 1)
    async with rows.unchanged():
        await Reconciler(engine).catch_up()
        await refused(claim_granted(engine, waiting), "claim_grant_expired")
        await refused(claim_granted(engine, waiting, "other"), "invalid_claim_grant")
        await refused(claim_granted(engine, ungranted), "invalid_claim_grant")
    await clock.advance(ms=1)
    await Reconciler(engine).catch_up()
    assert await rows.of("claim_grant") == []
    async with rows.unchanged():
        for worker_id in ("worker", "other"):
            await refused(claim_granted(engine, waiting, worker_id), "invalid_claim_grant")
    await issue_grant(engine, waiting, "other")
    async with rows.unchanged():
        await refused(claim_granted(engine, waiting), "invalid_claim_grant")


async def test_a_refused_claim_does_not_register_its_worker(engine: Engine, given: Given, rows: Rows) -> None:
    waiting, running = await given.created(lane_id="quiet"), await given.claimed()
    before = await rows.of("worker_identity")
    granted_to_another: Any = (await issue_grant(engine, await resumable(given), "worker")).grant
    token = ResumeToken(grant=granted_to_another.for_resume("default"), **NEW)
    for call in (
        engine.claim_execution(execution_id=waiting, lane_id="quiet", **NEW),
        engine.claim_resumed_execution(execution_id=waiting, lane_id="quiet", **NEW),
        engine.claim_from_resume_grant(token),
        operator_claim(engine, running.execution_id),
    ):
        with pytest.raises(EngineError):
            await call
    answer = await engine.reclaim_execution(execution_id=waiting, lane_id="quiet", **NEW)
    assert isinstance(answer, NotReclaimable)
    assert await rows.of("worker_identity") == before


async def test_a_worker_has_one_number_however_often_it_claims(
    engines: Engines, engine: Engine, given: Given, rows: Rows
) -> None:
    other = await engines()
    numbers = set()
    for one in (engine, engine, engine, other, other):
        waiting = await given.created()
        await issue_grant(one, waiting, "newcomer")
        await claim_granted(one, waiting, "newcomer")
        numbers.add((await rows.execution(waiting))["worker_no"])
    (identity,) = await rows.of("worker_identity", worker_id="newcomer")
    assert numbers == {identity["worker_no"]}


async def test_a_grant_is_used_once(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    waiting = await given.created(policy={"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 1}}})
    await issue_grant(engine, waiting, grant_ttl_ms=60_000)
    claimed = await claim_granted(engine, waiting)
    await engine.fail(claimed.handle, reason="again")
    await clock.advance(ms=1)
    await parts_of(engine).delays.promote_due()
    async with rows.unchanged():
        await refused(claim_granted(engine, waiting), "invalid_claim_grant")


async def test_a_reclaim_grant_of_another_worker_or_an_expired_one_does_not_count(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable()
    await grant_for_worker(engine, "other")
    async with rows.unchanged():
        await refused(claim_granted(engine, lost.execution_id), "execution_not_leaseable")
    await clock.advance(ms=5000)
    async with rows.unchanged():
        await refused(claim_granted(engine, lost.execution_id, "other"), "execution_not_leaseable")


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"execution_id": "x"}, "invalid_input"),
    ({"execution_id": "{fp:256}:11111111-2222-4333-8444-555555555555"}, "invalid_input"),
    ({"execution_id": "{fp:40000}:11111111-2222-4333-8444-555555555555"}, "invalid_input"),
    ({"lane_id": "mail"}, "invalid_input"),
    ({"lane_id": "ä"}, "invalid_input"),
    ({"worker_id": ""}, "invalid_input"),
    ({"worker_instance_id": "a b"}, "invalid_input"),
    ({"lease_ttl_ms": 0}, "invalid_input"),
    ({"lease_ttl_ms": 2**32}, "invalid_input"),
    ({"lease_id": "x"}, "invalid_input"),
    ({"attempt_id": 7}, "invalid_input"),
    ({"expected_attempt_index": -1}, "invalid_input"),
    ({"expected_attempt_index": 2**31}, "invalid_input"),
    ({"attempt_timeout_ms": -1}, "invalid_input"),
    ({"execution_deadline_at": 2**63}, "invalid_input"),
    ({"attempt_policy_json": "{"}, "invalid_policy_json"),
    ({"attempt_policy_json": "[]"}, "invalid_policy_json"),
    ({"attempt_policy_json": {}}, "invalid_policy_json"),
]


async def test_malformed_arguments_of_a_claim_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    waiting = await given.created()
    await issue_grant(engine, waiting)
    with Cases() as cases:
        async with rows.unchanged():
            for wrong, code in MALFORMED:
                with cases(wrong):
                    await refused(engine.claim_execution(**{"execution_id": waiting, **worker(), **wrong}), code)
    assert await claim_granted(engine, waiting)


@pytest.mark.usefixtures("altered_rows")
async def test_a_running_attempt_on_a_row_that_waits_is_a_bug(
    engine: Engine, given: Given, connection: asyncpg.Connection, rows: Rows
) -> None:
    waiting = await given.created()
    await connection.execute("update execution set attempt_state = 'running_attempt'")
    async with rows.unchanged():
        for call in (
            claim_granted(engine, waiting),
            engine.issue_grant_and_claim(execution_id=waiting, lane_id="default", lease_duration_ms=1000),
        ):
            refusal = await refused(call, "active_attempt_exists")
            assert isinstance(refusal, ConflictError)
            assert not isinstance(refusal, BugError)


# For an operator.


async def operator_claim(engine: Engine, execution_id: str, **overrides: Any) -> GrantedClaim:
    return await engine.issue_grant_and_claim(
        **{"execution_id": execution_id, "lane_id": "default", "lease_duration_ms": 9000, **overrides}
    )


async def test_an_operator_leases_a_waiting_execution(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    now = await clock.now()
    waiting = await given.created(policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    answer = await operator_claim(engine, waiting)
    row = await rows.execution(waiting)
    assert answer == GrantedClaim(lease_id=row["lease_id"], lease_epoch=1, attempt_index=0)
    assert (vector(row), row["lease_expires_at"]) == (ACTIVE, now + 9000)
    (identity,) = await rows.of("worker_identity", worker_no=row["worker_no"])
    assert (identity["worker_id"], identity["worker_instance_id"]) == ("operator", "operator")
    assert await event_texts(rows, waiting) == ["acquired issue_grant_and_claim"]
    assert await rows.of("claim_grant") == []


async def test_an_operator_resumes_an_interrupted_attempt(engine: Engine, given: Given, rows: Rows) -> None:
    parked = await resumable(given)
    answer = await operator_claim(engine, parked)
    row = await rows.execution(parked)
    assert answer == GrantedClaim(lease_id=row["lease_id"], lease_epoch=2, attempt_index=0)
    assert (await event_texts(rows, parked))[-1] == "acquired issue_grant_and_claim_resumed"


async def test_an_operator_needs_no_signing_key(engine: Engine, given: Given, connection: asyncpg.Connection) -> None:
    await connection.execute("delete from signing_key")
    assert await operator_claim(engine, await given.created())


async def test_an_operator_leases_only_claimable_executions(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    expected = {
        "reclaimable": "execution_not_eligible",
        "delayed": "execution_not_in_eligible_set",
        "backing_off": "execution_not_in_eligible_set",
        "claimed": "execution_not_eligible",
        "completed": "execution_not_eligible",
    }
    made = {state: await getattr(given, state)(lane_id=state) for state in expected}
    expected["a delayed run"] = "execution_not_eligible"
    made["a delayed run"] = delayed = await given.claimed(lane_id="a delayed run")
    await engine.delay(delayed, await clock.now() + 1000)
    with Cases() as cases:
        async with rows.unchanged():
            for state, code in expected.items():
                with cases(state):
                    execution_id = getattr(made[state], "execution_id", made[state])
                    await refused(operator_claim(engine, execution_id, lane_id=state), code)


async def test_an_operator_respects_grants_and_lanes(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    parked = await resumable(given)
    waiting = await given.created()
    await engine.set_lane_state("default", "paused")
    async with rows.unchanged():
        await refused(operator_claim(engine, waiting), "execution_not_in_eligible_set")
        await refused(operator_claim(engine, waiting, lane_id="mail"), "invalid_input")
        await refused(operator_claim(engine, waiting, lease_duration_ms=0), "invalid_input")
        await refused(operator_claim(engine, f"{{fp:86}}:{mint_uuid_texts(1)[0]}"), "execution_not_found")
    assert await operator_claim(engine, parked)
    await engine.set_lane_state("default", "active")
    await issue_grant(engine, waiting)
    await engine.set_lane_state("default", "paused")
    async with rows.unchanged():
        await refused(operator_claim(engine, waiting), "grant_already_exists")
    await engine.set_lane_state("default", "active")
    await clock.advance(ms=5000)
    assert await operator_claim(engine, waiting)
    assert await rows.of("claim_grant") == []

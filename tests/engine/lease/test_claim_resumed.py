"""Claims that resume an interrupted attempt: by id without a grant, or with a resume grant."""

from typing import Any

import asyncpg
import pytest

from engine.cases import Cases, in_turn
from engine.grants import claim_resumed, issue_grant, register_workers, resumable
from engine.state import ACTIVE, event_texts, refused, vector
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.retention import GRANT_MEMORY_MS
from flowfabric.engine.parts import parts_of
from flowfabric.model.grant import Granted, ResumeToken
from flowfabric.model.states import AttemptType, HandleKind

LEASE = "01a1def0-0000-7000-8000-000000000001"


@pytest.fixture
async def engine(engine: Engine) -> Engine:
    """An engine with a key to sign grants with, that knows the worker who searches."""
    await register_workers(engine)
    return engine


async def test_an_interrupted_attempt_is_resumed_without_a_grant(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    began = await clock.now()
    first = await given.run(policy={"timeout_policy": {"attempt_timeout_ms": 10_000}})
    await clock.advance(ms=4000)
    await engine.wait_children(first.handle)
    now = await clock.advance(seconds=60)
    claimed = await claim_resumed(
        engine, first.execution_id, lease_id=LEASE, lease_ttl_ms=9000, current_attempt_index=5
    )
    assert (claimed.handle.kind, claimed.attempt_type) == (HandleKind.RESUMED, AttemptType.INITIAL)
    assert (claimed.attempt_id, claimed.attempt_index) == (first.attempt_id, 0)
    assert (str(claimed.lease_id), claimed.lease_epoch, claimed.lease_expires_at) == (LEASE, 2, now + 9000)
    row = await rows.execution(first.execution_id)
    assert vector(row) == ACTIVE
    assert (row["attempt_timeout_at"], row["remaining_attempt_timeout_ms"]) == (now + 6000, None)
    assert (row["started_at"], row["attempt_count"], row["claimed_at"]) == (began, 1, now)
    assert await event_texts(rows, first.execution_id) == [
        "acquired",
        "released waiting_children",
        "acquired claim_resumed",
    ]
    (attempt,) = await rows.of("attempt_all")
    assert (attempt["attempt_state"], attempt["started_at"], attempt["resumed_at"]) == ("started", began, now)
    await engine.complete(claimed.handle, b"done")


@in_turn("given_ms, left", [(0, None), (2500, 2500), (None, 6000)])
async def test_a_resumed_attempt_gets_the_timeout_of_the_caller_else_the_saved_one(
    engine: Engine, given: Given, rows: Rows, clock: Clock, given_ms: int | None, left: int | None
) -> None:
    handle = await given.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 10_000}})
    now = await clock.advance(ms=4000)
    await engine.wait_children(handle)
    await claim_resumed(engine, handle.execution_id, remaining_attempt_timeout_ms=given_ms)
    row = await rows.execution(handle.execution_id)
    assert row["attempt_timeout_at"] == (None if left is None else now + left)


async def test_a_delayed_run_is_resumed_once_it_is_due(engine: Engine, given: Given, clock: Clock, rows: Rows) -> None:
    handle = await given.claimed()
    await engine.delay(handle, await clock.now() + 1000)
    async with rows.unchanged():
        await refused(claim_resumed(engine, handle.execution_id), "execution_not_leaseable")
    await clock.advance(ms=1000)
    await parts_of(engine).delays.promote_due()
    assert (await claim_resumed(engine, handle.execution_id)).attempt_id == handle.attempt_id


async def test_only_an_interrupted_attempt_can_be_resumed(engine: Engine, given: Given, rows: Rows) -> None:
    states = ("reclaimable", "delayed", "backing_off", "claimed", "completed", "created")
    made = {state: await getattr(given, state)(lane_id=state) for state in states}
    with Cases() as cases:
        async with rows.unchanged():
            for state, one in made.items():
                with cases(state):
                    call = claim_resumed(engine, getattr(one, "execution_id", one), lane_id=state)
                    code = "not_a_resumed_execution" if state == "created" else "execution_not_leaseable"
                    await refused(call, code)


@pytest.mark.usefixtures("altered_rows")
async def test_a_suspended_execution_is_not_resumed(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    parked = await resumable(given)
    await connection.execute(
        """update execution set lifecycle_phase = 'suspended', eligibility_state = 'not_applicable',
                  blocking_reason = 'waiting_for_signal'"""
    )
    async with rows.unchanged():
        await refused(claim_resumed(engine, parked), "not_a_resumed_execution")


async def test_a_grant_of_another_worker_blocks_the_claim_until_it_expires(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    parked = await resumable(given)
    await issue_grant(engine, parked, "other")
    async with rows.unchanged():
        await refused(claim_resumed(engine, parked), "invalid_claim_grant")
    await clock.advance(ms=5000)
    assert await claim_resumed(engine, parked)
    assert await rows.of("claim_grant") == []


async def test_a_resumed_claim_checks_its_arguments_and_consumes_a_matching_grant(
    engine: Engine, given: Given, rows: Rows
) -> None:
    parked = await resumable(given)
    await issue_grant(engine, parked)
    async with rows.unchanged():
        await refused(claim_resumed(engine, parked, lane_id="mail"), "invalid_input", "default")
        await refused(claim_resumed(engine, parked, remaining_attempt_timeout_ms=-1), "invalid_input")
        await refused(claim_resumed(engine, parked, lease_ttl_ms=0), "invalid_input")
        await refused(claim_resumed(engine, "{fp:999}:" + uuid_of(parked)), "invalid_input")
    assert await claim_resumed(engine, parked)
    assert await rows.of("claim_grant") == []
    assert (await rows.execution(parked))["granted_until"] is None


# By the token of a resume grant.


def token(answer: Granted, name: str = "pool", **overrides: Any) -> ResumeToken:
    """The token of a worker for a grant."""
    changed = {key: overrides.pop(key) for key in list(overrides) if key in ("grant_key", "lane_id", "execution_id")}
    grant_of_it: Any = answer.grant
    resume = grant_of_it.for_resume("default")
    for key, value in changed.items():
        object.__setattr__(resume, key, value)
    return ResumeToken(
        **{"grant": resume, "worker_id": name, "worker_instance_id": f"{name}-1", "lease_ttl_ms": 9000, **overrides}
    )


async def test_a_resume_grant_returns_the_handle_of_the_attempt(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    parked = await resumable(given)
    answer = await issue_grant(engine, parked)
    now = await clock.advance(ms=100)
    # Any process of the worker may present the grant.
    handle = await engine.claim_from_resume_grant(token(answer, worker_instance_id="pool-9"))
    assert handle is not None
    assert handle.worker_instance_id == "pool-9"
    assert (handle.kind, handle.execution_id, handle.lease_ttl_ms) == (HandleKind.RESUMED, parked, 9000)
    assert (handle.lease_epoch, handle.attempt_index) == (2, 0)
    assert (await rows.execution(parked))["lease_expires_at"] == now + 9000
    assert (await event_texts(rows, parked))[-1] == "acquired claim_resumed"
    assert await rows.of("claim_grant") == []


async def test_an_invalid_resume_grant_is_refused(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    parked = await resumable(given)
    answer = await issue_grant(engine, parked)
    other = await issue_grant(engine, await resumable(given))
    key = answer.grant.grant_key
    cases = {
        "Malformed": token(answer, grant_key=key[:-1]),
        "UnknownGrant": token(answer, grant_key=other.grant.grant_key),
    }
    async with rows.unchanged():
        for detail, presented in cases.items():
            await refused(engine.claim_from_resume_grant(presented), "invalid_claim_grant", detail)
        forged = key[:-1] + ("0" if key[-1] != "0" else "1")
        await refused(engine.claim_from_resume_grant(token(answer, grant_key=forged)), "invalid_claim_grant")
        await refused(engine.claim_from_resume_grant(token(answer, "other")), "invalid_claim_grant", "UnknownGrant")
        await refused(engine.claim_from_resume_grant(token(answer, lane_id="mail")), "invalid_input")
        await refused(engine.claim_from_resume_grant(token(answer, execution_id="x")), "invalid_input")
        await refused(engine.claim_from_resume_grant("token"), "invalid_input")  # type: ignore[arg-type]
    await clock.advance(ms=5000)
    async with rows.unchanged():
        await refused(engine.claim_from_resume_grant(token(answer)), "claim_grant_expired")


async def test_a_purged_resume_grant_is_reported_as_expired_until_the_next_is_issued(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    parked = await resumable(given)
    first = await issue_grant(engine, parked, grant_ttl_ms=1000)
    await clock.advance(ms=1000 + GRANT_MEMORY_MS)
    assert await parts_of(engine).retention.purge_grants() == 1
    async with rows.unchanged():
        for instance in ("pool-1", "pool-2"):
            presented = token(first, worker_instance_id=instance)
            await refused(engine.claim_from_resume_grant(presented), "claim_grant_expired", "Expired")
    second = await issue_grant(engine, parked, grant_ttl_ms=1000)
    await clock.advance(ms=1000 + GRANT_MEMORY_MS)
    assert await parts_of(engine).retention.purge_grants() == 1
    async with rows.unchanged():
        await refused(engine.claim_from_resume_grant(token(first)), "invalid_claim_grant", "UnknownGrant")
        await refused(engine.claim_from_resume_grant(token(second)), "claim_grant_expired")


async def test_a_resume_grant_counts_only_while_its_key_verifies(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    answer = await issue_grant(engine, await resumable(given))
    await engine.rotate_waitpoint_hmac_secret_all(new_kid="k2", new_secret_hex="cd" * 32, grace_ms=1000)
    await clock.advance(ms=1001)
    async with rows.unchanged():
        await refused(engine.claim_from_resume_grant(token(answer)), "invalid_claim_grant", "UnknownKid")


async def test_a_signature_of_another_secret_is_refused(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    answer = await issue_grant(engine, await resumable(given))
    await connection.execute("update signing_key set secret = sha256('another'), installed_at = installed_at + 1")
    async with rows.unchanged():
        await refused(engine.claim_from_resume_grant(token(answer)), "invalid_claim_grant", "SignatureMismatch")


@in_turn("after", ["claimed", "cancelled", "completed", "waiting"])
async def test_a_resume_grant_returns_nothing_once_the_attempt_cannot_be_resumed(
    engine: Engine, given: Given, rows: Rows, after: str
) -> None:
    parked = await resumable(given)
    answer = await issue_grant(engine, parked)
    if after == "cancelled":
        await engine.cancel_execution(execution_id=parked, reason="x")
    elif after == "waiting":
        answer = await issue_grant(engine, await given.created())
    else:
        claimed = await claim_resumed(engine, parked)
        if after == "completed":
            await engine.complete(claimed.handle)
    async with rows.unchanged():
        assert await engine.claim_from_resume_grant(token(answer)) is None


async def test_a_claim_returns_the_attempt_timeout(engine: Engine, given: Given) -> None:
    assert (await given.run(policy={"timeout_policy": {"attempt_timeout_ms": 10_000}})).attempt_timeout_ms == 10_000
    assert (await given.run()).attempt_timeout_ms is None
    assert (await given.run(policy={"timeout_policy": {"attempt_timeout_ms": 0}})).attempt_timeout_ms is None

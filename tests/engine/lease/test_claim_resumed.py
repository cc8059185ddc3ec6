"""Attempts that go on: claimed by name without a grant, or by the token of a resume grant."""

from typing import Any

import pytest

from engine.cases import in_turn
from engine.grants import claim_resumed, grant, known, resumable
from engine.state import ACTIVE, refused, told, vector
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.retention import GRANT_MEMORY_MS
from flowfabric.engine.parts import parts_of
from flowfabric.model.grant import Granted, ResumeToken
from flowfabric.model.states import AttemptType, HandleKind

LEASE = "01a1def0-0000-7000-8000-000000000001"


@pytest.fixture
async def engine(engine: Engine) -> Engine:
    """An engine with a key to sign grants with, that knows the worker who searches."""
    await known(engine)
    return engine


async def test_an_attempt_goes_on_without_a_grant(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
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
    assert await told(rows, first.execution_id) == ["acquired", "released waiting_children", "acquired claim_resumed"]
    (attempt,) = await rows.of("attempt_all")
    assert (attempt["attempt_state"], attempt["started_at"], attempt["resumed_at"]) == ("started", began, now)
    await engine.complete(claimed.handle, b"done")


@in_turn("given_ms, left", [(0, None), (2500, 2500), (None, 6000)])
async def test_the_time_left_of_an_attempt_is_the_callers_or_the_saved_one(
    engine: Engine, given: Any, rows: Any, clock: Any, given_ms: int | None, left: int | None
) -> None:
    handle = await given.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 10_000}})
    now = await clock.advance(ms=4000)
    await engine.wait_children(handle)
    await claim_resumed(engine, handle.execution_id, remaining_attempt_timeout_ms=given_ms)
    row = await rows.execution(handle.execution_id)
    assert row["attempt_timeout_at"] == (None if left is None else now + left)


async def test_an_elapsed_delay_goes_on_too(engine: Engine, given: Any, clock: Any, rows: Any) -> None:
    handle = await given.claimed()
    await engine.delay(handle, await clock.now() + 1000)
    async with rows.unchanged():
        await refused(claim_resumed(engine, handle.execution_id), "execution_not_leaseable")
    await clock.advance(ms=1000)
    await parts_of(engine).delays.promote_due()
    assert (await claim_resumed(engine, handle.execution_id)).attempt_id == handle.attempt_id


@in_turn(
    "state, code",
    [
        ("delayed", "execution_not_leaseable"),
        ("backing_off", "execution_not_leaseable"),
        ("claimed", "execution_not_leaseable"),
        ("reclaimable", "execution_not_leaseable"),
        ("completed", "execution_not_leaseable"),
        ("created", "not_a_resumed_execution"),
    ],
)
async def test_only_an_attempt_that_was_put_aside_goes_on(
    engine: Engine, given: Any, rows: Any, state: str, code: str
) -> None:
    made = await getattr(given, state)()
    execution_id = getattr(made, "execution_id", made)
    async with rows.unchanged():
        await refused(claim_resumed(engine, execution_id), code)


@pytest.mark.usefixtures("altered_rows")
async def test_a_suspended_execution_is_not_resumed(engine: Engine, given: Any, rows: Any, connection: Any) -> None:
    parked = await resumable(given)
    await connection.execute(
        """update execution set lifecycle_phase = 'suspended', eligibility_state = 'not_applicable',
                  blocking_reason = 'waiting_for_signal'"""
    )
    async with rows.unchanged():
        await refused(claim_resumed(engine, parked), "not_a_resumed_execution")


async def test_a_grant_of_another_worker_keeps_an_attempt_for_it(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    parked = await resumable(given)
    await grant(engine, parked, "other")
    async with rows.unchanged():
        await refused(claim_resumed(engine, parked), "invalid_claim_grant")
    await clock.advance(ms=5000)
    assert await claim_resumed(engine, parked)
    assert await rows.of("claim_grant") == []


async def test_a_matching_grant_is_consumed(engine: Engine, given: Any, rows: Any) -> None:
    parked = await resumable(given)
    await grant(engine, parked)
    assert await claim_resumed(engine, parked)
    assert await rows.of("claim_grant") == []
    assert (await rows.execution(parked))["granted_until"] is None


async def test_a_resumed_claim_judges_its_arguments(engine: Engine, given: Any, rows: Any) -> None:
    parked = await resumable(given)
    async with rows.unchanged():
        await refused(claim_resumed(engine, parked, lane_id="mail"), "invalid_input", "default")
        await refused(claim_resumed(engine, parked, remaining_attempt_timeout_ms=-1), "invalid_input")
        await refused(claim_resumed(engine, parked, lease_ttl_ms=0), "invalid_input")
        await refused(claim_resumed(engine, "{fp:999}:" + parked[-36:]), "invalid_input")


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


async def test_a_resume_grant_gives_the_handle_of_the_attempt(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    parked = await resumable(given)
    answer = await grant(engine, parked)
    now = await clock.advance(ms=100)
    handle = await engine.claim_from_resume_grant(token(answer))
    assert handle is not None
    assert (handle.kind, handle.execution_id, handle.lease_ttl_ms) == (HandleKind.RESUMED, parked, 9000)
    assert (handle.lease_epoch, handle.attempt_index) == (2, 0)
    assert (await rows.execution(parked))["lease_expires_at"] == now + 9000
    assert (await told(rows, parked))[-1] == "acquired claim_resumed"
    assert await rows.of("claim_grant") == []


async def test_another_process_of_the_pool_may_present_a_resume_grant(engine: Engine, given: Any) -> None:
    answer = await grant(engine, await resumable(given))
    handle = await engine.claim_from_resume_grant(token(answer, worker_instance_id="pool-9"))
    assert handle is not None
    assert handle.worker_instance_id == "pool-9"


async def test_a_resume_grant_that_does_not_count_is_refused(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    parked = await resumable(given)
    answer = await grant(engine, parked)
    other = await grant(engine, await resumable(given))
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


async def test_a_lapsed_resume_grant_is_told_from_an_unknown_one_when_it_is_forgotten(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    parked = await resumable(given)
    first = await grant(engine, parked, grant_ttl_ms=1000)
    await clock.advance(ms=1000 + GRANT_MEMORY_MS)
    assert await parts_of(engine).retention.purge_grants() == 1
    async with rows.unchanged():
        for instance in ("pool-1", "pool-2"):
            presented = token(first, worker_instance_id=instance)
            await refused(engine.claim_from_resume_grant(presented), "claim_grant_expired", "Expired")
    second = await grant(engine, parked, grant_ttl_ms=1000)
    await clock.advance(ms=1000 + GRANT_MEMORY_MS)
    assert await parts_of(engine).retention.purge_grants() == 1
    async with rows.unchanged():
        await refused(engine.claim_from_resume_grant(token(first)), "invalid_claim_grant", "UnknownGrant")
        await refused(engine.claim_from_resume_grant(token(second)), "claim_grant_expired")


async def test_a_resume_grant_counts_only_while_its_key_verifies(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    answer = await grant(engine, await resumable(given))
    await engine.rotate_waitpoint_hmac_secret_all(new_kid="k2", new_secret_hex="cd" * 32, grace_ms=1000)
    await clock.advance(ms=1001)
    async with rows.unchanged():
        await refused(engine.claim_from_resume_grant(token(answer)), "invalid_claim_grant", "UnknownKid")


async def test_a_signature_of_another_secret_is_refused(engine: Engine, given: Any, rows: Any, connection: Any) -> None:
    answer = await grant(engine, await resumable(given))
    await connection.execute("update signing_key set secret = sha256('another'), installed_at = installed_at + 1")
    async with rows.unchanged():
        await refused(engine.claim_from_resume_grant(token(answer)), "invalid_claim_grant", "SignatureMismatch")


@in_turn("after", ["claimed", "cancelled", "completed", "waiting"])
async def test_what_cannot_go_on_any_more_gives_nothing(engine: Engine, given: Any, rows: Any, after: str) -> None:
    parked = await resumable(given)
    answer = await grant(engine, parked)
    if after == "cancelled":
        await engine.cancel_execution(execution_id=parked, reason="x")
    elif after == "waiting":
        answer = await grant(engine, await given.created())
    else:
        claimed = await claim_resumed(engine, parked)
        if after == "completed":
            await engine.complete(claimed.handle)
    async with rows.unchanged():
        assert await engine.claim_from_resume_grant(token(answer)) is None


async def test_a_claim_tells_how_long_its_attempt_may_take(engine: Engine, given: Any) -> None:
    assert (await given.run(policy={"timeout_policy": {"attempt_timeout_ms": 10_000}})).attempt_timeout_ms == 10_000
    assert (await given.run()).attempt_timeout_ms is None
    assert (await given.run(policy={"timeout_policy": {"attempt_timeout_ms": 0}})).attempt_timeout_ms is None

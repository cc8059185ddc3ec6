"""Revoked leases: taken from their holder at once, and taken over by the next claim."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from engine.event.following import take
from engine.state import FENCED_OPERATIONS, REVOKED, claim, event_texts, refused, rounds, vector
from engine.stream.writing import append, read
from fixtures import Clock, Engines, Eventually, Given, Rows
from flowfabric.engine.core.wakeups import LostLease, LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import LeaseRevoked
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.lease import AlreadySatisfied, Completed, Renewed, Revoked
from flowfabric.model.states import HandleKind
from flowfabric.model.stream import ClosedReason

ABSENT = "{fp:3}:11111111-1111-4111-8111-111111111111"
TTL_MS = 30_000


def revoked(handle: Handle) -> Revoked:
    """The answer to the revoke of a run's lease."""
    return Revoked(lease_id=handle.lease_id, lease_epoch=handle.lease_epoch)


def already(reason: str) -> AlreadySatisfied:
    """The answer to a revoke without effect."""
    return AlreadySatisfied(reason=reason)


async def test_a_revoke_takes_the_lease_and_leaves_the_execution_active(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 600_000}})
    before, timers = await rows.execution(handle.execution_id), await rows.timers(handle.execution_id)
    now = await clock.advance(seconds=1)
    assert await engine.revoke_lease(handle.execution_id, reason="host is drained") == revoked(handle)
    row = await rows.execution(handle.execution_id)
    assert vector(row) == REVOKED
    assert {name: row[name] for name in row if row[name] != before[name]} == {
        "ownership_state": "lease_revoked",
        "blocking_reason": "waiting_for_worker",
        "attempt_state": "attempt_interrupted",
        "blocking_detail": "lease revoked: host is drained",
        "lease_revoked_at": now,
        "lease_revoke_reason": "host is drained",
        "last_mutation_at": now,
    }
    # The time limit of the attempt stays.
    assert await rows.timers(handle.execution_id) == timers
    assert [(each["execution_id"], each["place"]) for each in await rows.of("ready")] == [
        (row["execution_id"], row["place"])
    ]
    assert [each["public_state"] for each in await rows.of("listed")] == ["active"]
    assert await event_texts(rows, handle.execution_id) == ["acquired", "revoked host is drained"]
    assert (await engine.list_expired_leases(as_of=now + 600_000)).entries == ()
    await clock.advance(seconds=600)
    assert await parts_of(engine).lease_expiry.sweep() == 0


async def test_every_case_without_a_lease_to_revoke_is_answered_and_changes_nothing(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.reclaimable(lane_id="lost")
    again = await given.claimed(lane_id="revoked")
    await engine.revoke_lease(again.execution_id)
    ended = await given.completed(lane_id="ended")
    held = await given.claimed(lane_id="held", worker="owner")
    cases: list[tuple[str, dict[str, Any], str]] = [
        (await given.created(lane_id="waiting"), {}, "no_active_lease"),
        (await given.delayed(lane_id="delayed"), {}, "no_active_lease"),
        (ended, {}, "no_active_lease"),
        (again.execution_id, {}, "already_revoked"),
        # Whether there is a lease is checked first, then the worker, then the lease.
        (again.execution_id, {"expected_lease_id": uuid4(), "worker_instance_id": "other-1"}, "already_revoked"),
        (lost.execution_id, {"worker_instance_id": "other-1"}, "already_expired"),
        (held.execution_id, {"worker_instance_id": "other-1"}, "different_worker_instance_id"),
        (
            held.execution_id,
            {"worker_instance_id": "other-1", "expected_lease_id": uuid4()},
            "different_worker_instance_id",
        ),
    ]
    async with rows.unchanged():
        for execution_id, arguments, reason in cases:
            assert await engine.revoke_lease(execution_id, **arguments) == already(reason), (execution_id, reason)
        stale = await refused(engine.revoke_lease(held.execution_id, expected_lease_id=uuid4()), "stale_lease")
        assert str(held.lease_id) in str(stale)
        await refused(engine.revoke_lease(ABSENT), "execution_not_found")
    named = {"worker_instance_id": "owner-1", "expected_lease_id": str(held.lease_id)}
    assert await engine.revoke_lease(held.execution_id, **named) == revoked(held)


async def test_empty_arguments_are_not_compared_and_the_reason_has_a_default(
    engine: Engine, given: Given, rows: Rows
) -> None:
    for reason in (None, ""):
        handle = await given.claimed()
        answer = await engine.revoke_lease(
            handle.execution_id, expected_lease_id="", worker_instance_id="", reason=reason
        )
        assert answer == revoked(handle)
        assert (await rows.execution(handle.execution_id))["lease_revoke_reason"] == "operator_revoke"
        await engine.cancel_execution(execution_id=handle.execution_id, reason="the next case follows")


async def test_a_revoke_with_invalid_arguments_is_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    wrong: list[dict[str, Any]] = [
        {"execution_id": "nonsense"},
        {"expected_lease_id": "nonsense"},
        {"worker_instance_id": 3},
        {"reason": "a\0b"},
        {"reason": 3},
    ]
    async with rows.unchanged():
        for arguments in wrong:
            with pytest.raises(EngineError) as refusal:
                await engine.revoke_lease(**{"execution_id": handle.execution_id, **arguments})
            assert refusal.value.category == "validation", arguments


async def test_the_previous_owner_is_refused_and_the_next_claim_takes_over(
    engine: Engine, given: Given, rows: Rows
) -> None:
    for name, operation in FENCED_OPERATIONS.items():
        handle = await given.claimed()
        await engine.revoke_lease(handle.execution_id)
        async with rows.unchanged():
            await refused(operation(engine, handle), "lease_revoked")
        (taken,) = await claim(engine)
        assert (taken.execution_id, taken.handle.kind) == (handle.execution_id, HandleKind.RECLAIMED), name
        assert (taken.lease_epoch, taken.attempt_index) == (2, 1)
        await refused(operation(engine, handle), "lease_conflict")
        await engine.complete(taken.handle)


async def test_an_expired_lease_is_marked_instead(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=TTL_MS)
    await clock.advance(ms=TTL_MS)
    named: dict[str, Any] = {"expected_lease_id": uuid4(), "worker_instance_id": "other-1"}
    assert await engine.revoke_lease(handle.execution_id, **named) == already("already_expired")
    assert await event_texts(rows, handle.execution_id) == ["acquired", "expired"]
    (taken,) = await claim(engine)
    assert taken.execution_id == handle.execution_id


async def test_a_renewed_lease_is_revoked_and_keeps_the_expiry_of_its_renewal(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    # Before and after the expiry that the claim has set.
    for ms in (1_000, 15_000):
        handle = await given.claimed(lease_ttl_ms=TTL_MS)
        await clock.advance(ms=20_000)
        renewed = await engine.renew(handle)
        await clock.advance(ms=ms)
        assert await engine.revoke_lease(handle.execution_id) == revoked(handle)
        row = await rows.execution(handle.execution_id)
        assert row["lease_expires_at"] == renewed.expires_at_ms
        # The claim is deleted once it has expired.
        await clock.advance(ms=10 * TTL_MS)
        await parts_of(engine).lease_expiry.sweep()
        assert await rows.of("claim") == []
        assert (await rows.execution(handle.execution_id))["lease_expires_at"] == renewed.expires_at_ms
        await engine.cancel_execution(execution_id=handle.execution_id, reason="the next case follows")


async def test_the_stream_is_closed_and_its_tails_return(
    engine: Engine, given: Given, eventually: Eventually, clock: Clock
) -> None:
    handle = await given.claimed(policy={"stream_policy": {"retention_ttl_ms": 5_000}})
    outcome = await append(engine, handle)
    waiting = asyncio.create_task(engine.tail_stream(handle.execution_id, 0, after=outcome.stream_id, block_ms=30_000))
    await eventually(lambda: parts_of(engine).tails._parked._tails)
    now = await clock.advance(ms=10)
    await engine.revoke_lease(handle.execution_id)
    async with asyncio.timeout(10):
        found = await waiting
    assert (found.frames, found.closed_at, found.closed_reason) == ([], now, ClosedReason.ATTEMPT_INTERRUPTED)
    await refused(append(engine, handle), "stale_owner_cannot_append")
    (taken,) = await claim(engine)
    assert (await read(engine, handle)).closed_reason is ClosedReason.RECLAIMED
    assert (await append(engine, taken.handle)).frame_count == 1


async def test_the_holder_waiting_claims_and_feeds_are_told(
    engines: Engines, given: Given, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.lease.claim.POLL_SECONDS", 600.0)
    other = await engines()
    told: list[LostLease] = []
    for each in (given.engine, other):
        parts_of(each).wakeups.on_lost(lambda leases: told.extend(leases or ()))
    handle = await given.claimed()
    async with other.subscribe_lease_history() as events:
        searching = asyncio.create_task(
            other.claim(lane_id="default", worker_id="w", worker_instance_id="w-1", max_wait_ms=60_000)
        )
        await eventually(lambda: parts_of(other).wakeups._waiting.get("default"))
        await eventually(lambda: parts_of(other).wakeups.hints.is_listening)
        await given.engine.revoke_lease(handle.execution_id)
        taken = await asyncio.wait_for(searching, 30)
        assert taken is not None
        assert taken.execution_id == handle.execution_id
        event = (await take(events, 1))[0]
        assert isinstance(event, LeaseRevoked)
        assert (event.lease_id, event.lease_epoch, event.revoked_by) == (handle.lease_id, 1, "operator")
    lost = LostLease(handle.execution_id, 1, LostReason.LEASE_REVOKED)
    await eventually(lambda: told.count(lost) == 2)


@pytest.mark.parametrize("rival", ["revoke", "complete", "renew", "cancel", "claim"])
async def test_exactly_one_of_a_revoke_and_its_rival_wins(engines: Engines, given: Given, rival: str) -> None:
    first, second = given.engine, await engines()
    for nth in rounds(15, whole=100):
        lane = f"lane {nth}"
        handle = await given.claimed(lane_id=lane)

        async def compete(handle: Handle = handle, lane: str = lane) -> object:
            match rival:
                case "revoke":
                    return await second.revoke_lease(handle.execution_id)
                case "complete":
                    return (await second.complete_many([(handle, b"done")]))[0]
                case "renew":
                    return (await second.renew_many([handle]))[0]
                case "cancel":
                    return await second.cancel_execution(execution_id=handle.execution_id, reason="x")
            return await claim(second, lane)

        calls = [first.revoke_lease(handle.execution_id), compete()]
        answers = await asyncio.gather(*(calls if nth % 2 else calls[::-1]))
        own, theirs = answers if nth % 2 else answers[::-1]
        match rival:
            case "revoke":
                assert {own, theirs} == {revoked(handle), already("already_revoked")}
            case "complete":
                assert (own == revoked(handle)) is not isinstance(theirs, Completed)
                assert own in (revoked(handle), already("no_active_lease"))
            case "renew":
                assert own == revoked(handle)
                assert isinstance(theirs, Renewed) or getattr(theirs, "code", None) == "lease_revoked"
                await refused(second.renew(handle), "lease_revoked")
            case "cancel":
                assert own in (revoked(handle), already("no_active_lease"))
            case "claim":
                assert own == revoked(handle)
    assert await first.find_inconsistencies() == []

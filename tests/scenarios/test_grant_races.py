"""Several engines compete for grants, claims by id, signing keys and worker numbers: one wins, the others lose."""

from collections import Counter
from typing import Any

import asyncpg
import pytest

from engine.state import IS_WHOLE, items, new
from fixtures import Clock, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.grant import Granted, GrantedClaim, NotReclaimable, NoWork
from flowfabric.model.handle import Handle
from flowfabric.model.key import AlreadyRotated, AlreadySeeded, Rotated, Seeded
from flowfabric.model.lease import ClaimedExecution, Renewed

from .races import HOUR_MS, ROUNDS, Rivals, cancel_all, check_winners, claim, claimed, race, rivals

__all__ = ["rivals"]

SECRET = "ab" * 32
MINUTE_MS = 60_000


def worker(name: str = "pool", instance: int = 1) -> dict[str, Any]:
    """The arguments that name a worker and its lane."""
    return {"worker_id": name, "worker_instance_id": f"{name}-{instance}", "lane_id": "default"}


async def created(engine: Engine) -> str:
    """A new execution."""
    made = await engine.create_execution(**new())
    return str(made.execution_id)


async def lost(engine: Engine, clock: Clock) -> str:
    """An execution whose lease is marked as expired."""
    (handle,) = await claimed(engine, lease_ttl_ms=1)
    await clock.advance(ms=2)
    await parts_of(engine).lease_expiry.mark_expired([handle.execution_id])
    return str(handle.execution_id)


async def resumable(engine: Engine) -> str:
    """An execution whose attempt can be resumed."""
    (handle,) = await claimed(engine)
    await engine.wait_children(handle)
    return str(handle.execution_id)


def kinds(answers: list[Any]) -> list[str]:
    """The sorted types of answers and codes of refusals."""
    return sorted(answer if isinstance(answer, str) else type(answer).__name__ for answer in answers)


async def lease_count(rows: Rows, execution_id: str) -> int:
    """How often an execution was leased."""
    return sum(event["kind"] in ("acquired", "reclaimed") for event in await rows.events(execution_id))


async def test_of_three_claims_with_one_grant_one_wins(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(3)
    for nth in range(ROUNDS):
        execution_id = await created(engines[0])
        await engines[0].issue_claim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=MINUTE_MS)
        answers = await race(
            nth,
            *(
                engine.claim_execution(execution_id=execution_id, **worker(instance=at))
                for at, engine in enumerate(engines)
            ),
        )
        assert kinds(answers) == ["ClaimedExecution", "execution_not_leaseable", "execution_not_leaseable"]
        assert await lease_count(rows, execution_id) == 1
    assert await rows.of("claim_grant") == []


async def test_of_three_grants_for_one_execution_one_is_issued(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(3)
    for nth in range(ROUNDS):
        execution_id = await created(engines[0])
        answers = await race(
            nth,
            *(
                engine.issue_claim_grant(execution_id=execution_id, **worker(f"pool{at}"), grant_ttl_ms=MINUTE_MS)
                for at, engine in enumerate(engines)
            ),
        )
        assert kinds(answers) == ["Granted", "grant_already_exists", "grant_already_exists"]
        (winner,) = [at for at, answer in enumerate(answers) if isinstance(answer, Granted)]
        (stored,) = await rows.of("claim_grant", execution_id=uuid_of(execution_id))
        assert stored["worker_id"] == f"pool{winner}"
        await engines[winner].claim_execution(execution_id=execution_id, **worker(f"pool{winner}"))


async def test_a_search_for_a_grant_and_a_claim_never_take_the_same_execution(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    won: Counter[str] = Counter()
    for nth in range(ROUNDS):
        execution_id = await created(one)
        granted, claimed = await race(
            nth, one.claim_for_worker(**worker(), grant_ttl_ms=MINUTE_MS), claim(other, lease_ttl_ms=HOUR_MS)
        )
        won["grant" if isinstance(granted, Granted) else "claim"] += 1
        if isinstance(granted, Granted):
            assert claimed == []
            assert granted.execution_id == execution_id
            named = await one.claim_execution(execution_id=execution_id, **worker(), lease_ttl_ms=HOUR_MS)
            assert isinstance(named, ClaimedExecution)
        else:
            assert granted == NoWork()
            # Both find nothing if each skips the row because the other has locked it.
            claimed = claimed or await claim(other, lease_ttl_ms=HOUR_MS)
            assert [each.execution_id for each in claimed] == [execution_id]
        assert await lease_count(rows, execution_id) == 1
    check_winners(won, "grant", "claim")


async def test_concurrent_searches_grant_every_execution_once(rivals: Rivals) -> None:
    engines = await rivals(4)
    for nth in range(25 if IS_WHOLE else 3):
        made = await engines[0].create_many(items(*(new(priority=at % 3) for at in range(40))))
        found: Counter[str] = Counter()
        while True:
            answers = await race(
                nth,
                *(
                    engine.claim_for_worker(**worker(f"pool{at}"), grant_ttl_ms=MINUTE_MS)
                    for at, engine in enumerate(engines)
                ),
            )
            granted = [answer for answer in answers if isinstance(answer, Granted)]
            assert len(granted) + sum(answer == NoWork() for answer in answers) == len(engines)
            found.update(answer.execution_id for answer in granted)
            if not granted:
                break
        assert found == Counter(one.execution_id for one in made if not isinstance(one, Exception))


async def test_an_execution_with_an_expired_lease_is_granted_or_claimed_once(rivals: Rivals, clock: Clock) -> None:
    one, other, third = await rivals(3)
    won: Counter[str] = Counter()
    for nth in range(ROUNDS):
        execution_id = await lost(one, clock)
        granted, claimed, searched = await race(
            nth,
            one.issue_reclaim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=MINUTE_MS),
            claim(other),
            third.claim_for_worker(**worker("searcher"), grant_ttl_ms=MINUTE_MS),
        )
        if granted == "grant_already_exists":
            assert isinstance(searched, Granted)
        elif isinstance(granted, Granted):
            assert searched == NoWork()
        else:
            assert isinstance(granted, NotReclaimable)
        winners = ["grant"] * isinstance(granted, Granted) + ["search"] * isinstance(searched, Granted)
        (winner,) = winners + ["claim"] * len(claimed)
        won[winner] += 1
        await cancel_all(one, execution_id)
    check_winners(won, "grant", "search", "claim")


async def test_of_two_reclaims_with_one_grant_one_wins(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    engines = await rivals(2)
    won: Counter[bool] = Counter()
    for nth in range(ROUNDS):
        execution_id = await lost(engines[0], clock)
        await engines[0].issue_reclaim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=MINUTE_MS)
        reclaimed = await race(
            nth,
            engines[0].reclaim_execution(execution_id=execution_id, **worker()),
            engines[1].claim_execution(execution_id=execution_id, **worker()),
        )
        won[isinstance(reclaimed[0], ClaimedExecution)] += 1
        assert sum(isinstance(answer, ClaimedExecution) for answer in reclaimed) == 1
        assert kinds(reclaimed)[1] in ("NotReclaimable", "execution_not_leaseable")
        assert (await rows.execution(execution_id))["reclaim_count"] == 1
        assert await lease_count(rows, execution_id) == 2
        await cancel_all(engines[0], execution_id)
    check_winners(won, True, False)


async def test_of_three_ways_to_resume_an_attempt_one_wins(rivals: Rivals, rows: Rows) -> None:
    one, other, third = await rivals(3)
    won: Counter[int] = Counter()
    for nth in range(ROUNDS):
        execution_id = await resumable(one)
        resumed, fused, claimed = await race(
            nth,
            one.claim_resumed_execution(execution_id=execution_id, **worker()),
            other.issue_grant_and_claim(execution_id=execution_id, lane_id="default", lease_duration_ms=30_000),
            claim(third),
        )
        assert isinstance(resumed, ClaimedExecution) or resumed == "execution_not_leaseable"
        assert isinstance(fused, GrantedClaim) or fused == "execution_not_eligible"
        winners = [isinstance(resumed, ClaimedExecution), isinstance(fused, GrantedClaim), bool(claimed)]
        assert sum(winners) == 1
        won[winners.index(True)] += 1
        row = await rows.execution(execution_id)
        assert (row["lease_epoch"], row["attempt_count"]) == (2, 1)
        await cancel_all(one, execution_id)
    check_winners(won, 0, 1, 2)


async def test_an_expiring_grant_is_used_or_no_longer_reserves_its_execution(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    for nth in range(ROUNDS):
        execution_id = await created(one)
        await one.issue_claim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=2)
        named, claimed = await race(nth, one.claim_execution(execution_id=execution_id, **worker()), claim(other))
        assert isinstance(named, ClaimedExecution) + len(claimed) <= 1
        if isinstance(named, str):
            assert named in ("claim_grant_expired", "execution_not_leaseable")
        await cancel_all(one, execution_id)
        assert await lease_count(rows, execution_id) == isinstance(named, ClaimedExecution) + len(claimed)


async def test_a_cancel_succeeds_before_or_after_a_claim_by_grant(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    claims: Counter[bool] = Counter()
    for nth in range(ROUNDS):
        execution_id = await created(one)
        await one.issue_claim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=MINUTE_MS)
        claimed, _ = await race(
            nth,
            one.claim_execution(execution_id=execution_id, **worker()),
            other.cancel_execution(execution_id=execution_id, reason="x"),
        )
        claims[isinstance(claimed, ClaimedExecution)] += 1
        row = await rows.execution(execution_id)
        assert row["public_state"] == "cancelled"
        assert row["lease_epoch"] == isinstance(claimed, ClaimedExecution)
        assert isinstance(claimed, ClaimedExecution) or claimed == "execution_not_leaseable"
    check_winners(claims, True, False)


# Signing keys.


async def test_of_three_seeds_one_installs_the_key(rivals: Rivals, connection: asyncpg.Connection) -> None:
    engines = await rivals(3)
    for nth in range(ROUNDS):
        # No operation leaves a store without a key.
        await connection.execute("delete from signing_key")
        answers = await race(
            nth, *(engine.seed_waitpoint_hmac_secret(kid=f"k{nth}", secret_hex=SECRET) for engine in engines)
        )
        assert kinds(answers) == ["AlreadySeeded", "AlreadySeeded", "Seeded"]
        assert {answer.same_secret for answer in answers if isinstance(answer, AlreadySeeded)} == {True}
        assert Seeded(kid=f"k{nth}") in answers


@pytest.mark.parametrize("kid", ["same kid", "different kids"])
async def test_concurrent_rotations_follow_each_other(rivals: Rivals, rows: Rows, kid: str) -> None:
    engines = await rivals(3)
    current: str | None = "k1"
    for nth in range(ROUNDS):
        names = [f"r{nth}" if kid == "same kid" else f"r{nth}-{at}" for at in range(len(engines))]
        entries = await race(
            nth,
            *(
                engine.rotate_waitpoint_hmac_secret_all(new_kid=name, new_secret_hex=SECRET, grace_ms=0)
                for engine, name in zip(engines, names, strict=True)
            ),
        )
        results = [entry.result for (entry,) in entries]
        rotated = [result for result in results if isinstance(result, Rotated)]
        if kid == "same kid":
            assert kinds(results) == ["AlreadyRotated", "AlreadyRotated", "Rotated"]
            assert AlreadyRotated(kid=names[0]) in results
        else:
            assert len(rotated) == len(engines)
        # Every rotation replaced another key.
        successors = {result.previous_kid: result.new_kid for result in rotated}
        assert len(successors) == len(rotated)
        for _ in rotated:
            current = successors[current]
        (signing,) = await rows.of("signing_key", is_current=True)
        assert signing["kid"] == current


# Leases and workers.


async def test_an_expiring_lease_is_renewed_or_granted_to_another_worker(
    rivals: Rivals, rows: Rows, clock: Clock
) -> None:
    one, other = await rivals(2)

    async def grant_after_expiry(handle: Handle) -> Any:
        await clock.advance(ms=5000)
        return await other.issue_reclaim_grant(execution_id=handle.execution_id, **worker(), grant_ttl_ms=MINUTE_MS)

    renewals: Counter[bool] = Counter()
    leases: Counter[str] = Counter()
    for nth in range(ROUNDS):
        (handle,) = await claimed(one, lease_ttl_ms=MINUTE_MS)
        await clock.advance(ms=57_000)
        renewed, granted = await race(nth, one.renew(handle), grant_after_expiry(handle))
        renewals[isinstance(renewed, Renewed)] += 1
        if isinstance(renewed, Renewed):
            assert isinstance(granted, NotReclaimable)
        else:
            assert renewed == "lease_expired"
            assert isinstance(granted, Granted)
            late, reclaimed = await race(
                nth, one.renew(handle), other.reclaim_execution(execution_id=handle.execution_id, **worker())
            )
            assert isinstance(reclaimed, ClaimedExecution)
            assert late in ("lease_expired", "lease_conflict")
        leases[uuid_of(handle.execution_id)] = 1 + isinstance(granted, Granted)
        await cancel_all(one, handle.execution_id)
    check_winners(renewals, True, False)
    assert leases == Counter(
        str(event["execution_id"])
        for event in await rows.of("event_each")
        if event["kind"] in ("acquired", "reclaimed")
    )
    assert await rows.of("claim_grant") == []


async def test_a_new_worker_that_claims_twice_at_once_is_stored_once(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(2)
    count = 100 if IS_WHOLE else 20
    for nth in range(count):
        names = [await created(engine) for engine in engines]
        for engine, execution_id in zip(engines, names, strict=True):
            await engine.issue_claim_grant(execution_id=execution_id, **worker(f"new{nth}"), grant_ttl_ms=MINUTE_MS)
        answers = await race(
            nth,
            *(
                engine.claim_execution(execution_id=execution_id, **worker(f"new{nth}"))
                for engine, execution_id in zip(engines, names, strict=True)
            ),
        )
        assert kinds(answers) == ["ClaimedExecution", "ClaimedExecution"]
    identities = [row for row in await rows.of("worker_identity") if row["worker_id"].startswith("new")]
    assert len(identities) == count
    numbers = Counter(row["worker_no"] for row in await rows.of("execution"))
    assert numbers == {row["worker_no"]: 2 for row in identities}

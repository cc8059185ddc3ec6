"""Grants, named claims and keys against each other, on connections of their own: one wins, and every loser is told."""

from collections import Counter
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import NewExecution
from flowfabric.model.grant import Granted, GrantedClaim, NotReclaimable, NoWork
from flowfabric.model.handle import Handle
from flowfabric.model.key import AlreadyRotated, AlreadySeeded, Rotated, Seeded
from flowfabric.model.lease import ClaimedExecution, Renewed

from .test_races import HOUR_MS, ROUNDS, Rivals, a_moment, at_once, check_both_won, claim, claimed, new, rivals

__all__ = ["rivals"]

SECRET = "ab" * 32


def worker(name: str = "pool", instance: int = 1) -> dict[str, Any]:
    return {"worker_id": name, "worker_instance_id": f"{name}-{instance}", "lane_id": "default"}


async def created(engine: Engine) -> str:
    made = await engine.create_execution(**new())
    return str(made.execution_id)


async def lost(engine: Engine, clock: Clock) -> str:
    """An execution whose lease has lapsed and is marked."""
    await engine.create_execution(**new())
    (held,) = await claim(engine, lease_ttl_ms=1)
    await clock.advance(ms=2)
    await parts_of(engine).lease_expiry.mark_expired([held.execution_id])
    return str(held.execution_id)


async def resumable(engine: Engine) -> str:
    await engine.create_execution(**new())
    (held,) = await claim(engine)
    await engine.wait_children(held.handle)
    return str(held.execution_id)


async def ended(engine: Engine, execution_id: str) -> None:
    """Leave the lane empty for the next round."""
    await engine.cancel_execution(execution_id=execution_id, reason="round over")


def kinds(answers: list[Any]) -> list[str]:
    """The answers by their type, refusals by their code."""
    return sorted(answer if isinstance(answer, str) else type(answer).__name__ for answer in answers)


async def leases(rows: Rows, execution_id: str) -> int:
    """How often an execution was leased."""
    return sum(event["kind"] in ("acquired", "reclaimed") for event in await rows.events(execution_id))


async def test_of_two_claims_with_one_grant_one_wins(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(3)
    for _ in range(ROUNDS):
        execution_id = await created(engines[0])
        await engines[0].issue_claim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=60_000)
        answers = await at_once(
            *(
                engine.claim_execution(execution_id=execution_id, **worker(instance=at))
                for at, engine in enumerate(engines)
            )
        )
        assert kinds(answers) == ["ClaimedExecution", "execution_not_leaseable", "execution_not_leaseable"]
        assert await leases(rows, execution_id) == 1
    assert await rows.of("claim_grant") == []


async def test_of_two_grants_one_is_issued(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(3)
    for _ in range(ROUNDS):
        execution_id = await created(engines[0])
        answers = await at_once(
            *(
                engine.issue_claim_grant(execution_id=execution_id, **worker(f"pool{at}"), grant_ttl_ms=60_000)
                for at, engine in enumerate(engines)
            )
        )
        assert kinds(answers) == ["Granted", "grant_already_exists", "grant_already_exists"]
        (winner,) = [at for at, answer in enumerate(answers) if isinstance(answer, Granted)]
        (stored,) = await rows.of("claim_grant", execution_id=execution_id[-36:])
        assert stored["worker_id"] == f"pool{winner}"
        await engines[winner].claim_execution(execution_id=execution_id, **worker(f"pool{winner}"))


async def test_a_search_for_a_grant_and_a_claim_never_take_the_same(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    for _ in range(ROUNDS):
        execution_id = await created(one)
        granted, claimed = await at_once(
            one.claim_for_worker(**worker(), grant_ttl_ms=60_000), claim(other, lease_ttl_ms=HOUR_MS)
        )
        if isinstance(granted, Granted):
            assert claimed == []
            assert granted.execution_id == execution_id
            assert isinstance(
                await one.claim_execution(execution_id=execution_id, **worker(), lease_ttl_ms=HOUR_MS), ClaimedExecution
            )
        else:
            assert granted == NoWork()
            # Both may have met the row while the other held it, and found nothing.
            claimed = claimed or await claim(other, lease_ttl_ms=HOUR_MS)
            assert [each.execution_id for each in claimed] == [execution_id]
        assert await leases(rows, execution_id) == 1


async def test_searches_grant_every_execution_once(rivals: Rivals) -> None:
    engines = await rivals(4)
    for _ in range(ROUNDS // 20):
        made = await engines[0].create_many([NewExecution(**new(priority=at % 3)) for at in range(40)])
        found: Counter[str] = Counter()
        while True:
            answers = await at_once(
                *(
                    engine.claim_for_worker(**worker(f"pool{at}"), grant_ttl_ms=60_000)
                    for at, engine in enumerate(engines)
                )
            )
            granted = [answer for answer in answers if isinstance(answer, Granted)]
            assert len(granted) + sum(answer == NoWork() for answer in answers) == len(engines)
            found.update(answer.execution_id for answer in granted)
            if not granted:
                break
        assert found == Counter(one.execution_id for one in made if not isinstance(one, Exception))


async def test_a_lost_lease_goes_to_one(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    one, other, third = await rivals(3)
    for _ in range(ROUNDS):
        execution_id = await lost(one, clock)
        granted, claimed, searched = await at_once(
            one.issue_reclaim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=60_000),
            claim(other),
            third.claim_for_worker(**worker("searcher"), grant_ttl_ms=60_000),
        )
        if granted == "grant_already_exists":
            assert isinstance(searched, Granted)
        elif isinstance(granted, Granted):
            assert searched == NoWork()
        else:
            assert isinstance(granted, NotReclaimable)
        winners = isinstance(granted, Granted) + isinstance(searched, Granted) + len(claimed)
        assert winners == 1, (granted, claimed, searched)
        await ended(one, execution_id)


async def test_of_two_reclaims_with_one_grant_one_wins(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    engines = await rivals(2)
    for _ in range(ROUNDS):
        execution_id = await lost(engines[0], clock)
        await engines[0].issue_reclaim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=60_000)
        reclaimed = await at_once(
            engines[0].reclaim_execution(execution_id=execution_id, **worker()),
            engines[1].claim_execution(execution_id=execution_id, **worker()),
        )
        assert sum(isinstance(answer, ClaimedExecution) for answer in reclaimed) == 1
        assert kinds(reclaimed)[1] in ("NotReclaimable", "execution_not_leaseable")
        assert (await rows.execution(execution_id))["reclaim_count"] == 1
        assert await leases(rows, execution_id) == 2
        await ended(engines[0], execution_id)


async def test_of_all_who_would_go_on_with_an_attempt_one_does(rivals: Rivals, rows: Rows) -> None:
    one, other, third = await rivals(3)
    for _ in range(ROUNDS):
        execution_id = await resumable(one)
        resumed, fused, claimed = await at_once(
            one.claim_resumed_execution(execution_id=execution_id, **worker()),
            other.issue_grant_and_claim(execution_id=execution_id, lane_id="default", lease_duration_ms=30_000),
            claim(third),
        )
        assert isinstance(resumed, ClaimedExecution) or resumed == "execution_not_leaseable"
        assert isinstance(fused, GrantedClaim) or fused == "execution_not_eligible"
        winners = [isinstance(resumed, ClaimedExecution), isinstance(fused, GrantedClaim), bool(claimed)]
        assert sum(winners) == 1
        row = await rows.execution(execution_id)
        assert (row["lease_epoch"], row["attempt_count"]) == (2, 1)
        await ended(one, execution_id)


async def test_a_grant_at_its_end_leases_once_or_lets_go(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    told: Counter[str] = Counter()
    for _ in range(ROUNDS):
        execution_id = await created(one)
        await one.issue_claim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=2)
        named, claimed = await at_once(one.claim_execution(execution_id=execution_id, **worker()), claim(other))
        told[named if isinstance(named, str) else "claimed"] += 1
        assert isinstance(named, ClaimedExecution) + len(claimed) <= 1
        if isinstance(named, str):
            assert named in ("claim_grant_expired", "execution_not_leaseable")
        await ended(one, execution_id)
        assert await leases(rows, execution_id) == isinstance(named, ClaimedExecution) + len(claimed)


async def test_a_cancel_and_a_claim_by_grant_leave_one_story(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    for _ in range(ROUNDS):
        execution_id = await created(one)
        await one.issue_claim_grant(execution_id=execution_id, **worker(), grant_ttl_ms=60_000)
        claimed, _ = await at_once(
            one.claim_execution(execution_id=execution_id, **worker()),
            other.cancel_execution(execution_id=execution_id, reason="x"),
        )
        row = await rows.execution(execution_id)
        assert row["public_state"] == "cancelled"
        assert row["lease_epoch"] == isinstance(claimed, ClaimedExecution)
        assert isinstance(claimed, ClaimedExecution) or claimed == "execution_not_leaseable"


# Keys.


async def test_of_two_seeds_one_installs(rivals: Rivals, connection: asyncpg.Connection) -> None:
    engines = await rivals(3)
    for at in range(ROUNDS):
        # No operation leaves a store without a key.
        await connection.execute("delete from signing_key")
        answers = await at_once(
            *(engine.seed_waitpoint_hmac_secret(kid=f"k{at}", secret_hex=SECRET) for engine in engines)
        )
        assert kinds(answers) == ["AlreadySeeded", "AlreadySeeded", "Seeded"]
        assert {answer.same_secret for answer in answers if isinstance(answer, AlreadySeeded)} == {True}
        assert Seeded(kid=f"k{at}") in answers


@pytest.mark.parametrize("kid", ["one", "each its own"])
async def test_rotations_come_one_after_the_other(rivals: Rivals, rows: Rows, kid: str) -> None:
    engines = await rivals(3)
    current: str | None = "k1"
    for at in range(ROUNDS):
        names = [f"r{at}" if kid == "one" else f"r{at}-{nth}" for nth in range(len(engines))]
        entries = await at_once(
            *(
                engine.rotate_waitpoint_hmac_secret_all(new_kid=name, new_secret_hex=SECRET, grace_ms=0)
                for engine, name in zip(engines, names, strict=True)
            )
        )
        results = [entry.result for (entry,) in entries]
        rotated = [result for result in results if isinstance(result, Rotated)]
        if kid == "one":
            assert sorted(type(result).__name__ for result in results) == [
                "AlreadyRotated",
                "AlreadyRotated",
                "Rotated",
            ]
            assert AlreadyRotated(kid=names[0]) in results
        else:
            assert len(rotated) == len(engines)
        # Each took over from one other, and from nobody twice.
        follows = {result.previous_kid: result.new_kid for result in rotated}
        assert len(follows) == len(rotated)
        for _ in rotated:
            current = follows[current]
        (signing,) = await rows.of("signing_key", is_current=True)
        assert signing["kid"] == current


# Workers and leases.


async def test_a_lapsing_lease_is_renewed_or_granted_to_another(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    one, other = await rivals(2)

    async def hand_over(handle: Handle) -> Any:
        await a_moment()
        await clock.advance(ms=5000)
        return await other.issue_reclaim_grant(execution_id=handle.execution_id, **worker(), grant_ttl_ms=60_000)

    won: Counter[bool] = Counter()
    leased: Counter[str] = Counter()
    for _ in range(ROUNDS):
        (handle,) = await claimed(one, lease_ttl_ms=60_000)
        await clock.advance(ms=57_000)
        renewed, granted = await at_once(one.renew(handle), hand_over(handle))
        won[isinstance(renewed, Renewed)] += 1
        if isinstance(renewed, Renewed):
            assert isinstance(granted, NotReclaimable)
        else:
            assert renewed == "lease_expired"
            assert isinstance(granted, Granted)
            taken = await at_once(
                one.renew(handle), other.reclaim_execution(execution_id=handle.execution_id, **worker())
            )
            assert kinds(taken)[0] == "ClaimedExecution"
            assert taken[0] in ("lease_expired", "lease_conflict")
        leased[handle.execution_id[-36:]] = 1 + isinstance(granted, Granted)
        await ended(one, handle.execution_id)
    check_both_won(won)
    assert leased == Counter(
        str(event["execution_id"])
        for event in await rows.of("event_each")
        if event["kind"] in ("acquired", "reclaimed")
    )
    assert await rows.of("claim_grant") == []


async def test_a_new_worker_that_claims_twice_at_once_is_one(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(2)
    for at in range(ROUNDS // 5):
        names = [await created(engine) for engine in engines]
        for engine, execution_id in zip(engines, names, strict=True):
            await engine.issue_claim_grant(execution_id=execution_id, **worker(f"new{at}"), grant_ttl_ms=60_000)
        answers = await at_once(
            *(
                engine.claim_execution(execution_id=execution_id, **worker(f"new{at}"))
                for engine, execution_id in zip(engines, names, strict=True)
            )
        )
        assert kinds(answers) == ["ClaimedExecution", "ClaimedExecution"]
    identities = [row for row in await rows.of("worker_identity") if row["worker_id"].startswith("new")]
    assert len(identities) == ROUNDS // 5
    numbers = Counter(row["worker_no"] for row in await rows.of("execution"))
    assert numbers == {row["worker_no"]: 2 for row in identities}

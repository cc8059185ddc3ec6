"""Grants and claims by id take the slots of quotas, and an admission that was checked before is not counted twice."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from engine.limit.limits import limited, quota, used, window
from engine.state import claim
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.db.database import Transaction
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.catch_up import CatchUp
from flowfabric.engine.lease.round import Round
from flowfabric.engine.parts import parts_of
from flowfabric.engine.store import Store
from flowfabric.model.grant import Granted, NoWork
from flowfabric.model.quota import Admitted as QuotaAdmitted
from flowfabric.model.quota import AlreadyAdmitted
from flowfabric.reconcile.loop import Reconciler

WORKER: dict[str, Any] = {"worker_id": "worker", "worker_instance_id": "worker-1"}
LANE: dict[str, Any] = {"lane_id": "default"}


async def grant(engine: Engine, execution_id: str, **more: Any) -> Granted:
    """A grant of one execution."""
    return await engine.issue_claim_grant(execution_id=execution_id, **LANE, **WORKER, **more)


async def search(engine: Engine) -> Granted | NoWork:
    """A grant of the best execution."""
    return await engine.claim_for_worker(**LANE, **WORKER)


async def check(engine: Engine, quota_id: UUID, execution_id: str, *, rate: int = 0, cap: int = 0) -> object:
    """Check an admission before a claim."""
    return await engine.check_admission(
        quota_id, execution_id=execution_id, window_seconds=60, rate_limit=rate, concurrency_cap=cap
    )


async def test_a_search_for_a_grant_is_admitted_and_takes_the_slot(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    slots = await quota(engine, running=1)
    first, second = [await given.created(policy=limited(slots)) for _ in range(2)]
    granted = await search(engine)
    assert isinstance(granted, Granted)
    assert granted.execution_id == first
    assert await used(rows, slots) == 1
    assert await search(engine) == NoWork()
    assert (await rows.execution(second))["public_state"] == "rate_limited"
    run = await engine.claim_execution(execution_id=first, **LANE, **WORKER)
    assert await used(rows, slots) == 1
    await engine.complete(run.handle, b"")
    assert await used(rows, slots) == 0
    again = await search(engine)
    assert isinstance(again, Granted)
    assert again.execution_id == second
    assert (await rows.execution(second))["public_state"] == "waiting"
    assert await rows.of("listed", execution_id=uuid_of(second)) == []


Named = Callable[[Engine, str], Awaitable[object]]


async def _claim_granted(engine: Engine, execution_id: str) -> object:
    await grant(engine, execution_id)
    return await engine.claim_execution(execution_id=execution_id, **LANE, **WORKER)


NAMED: dict[str, Named] = {
    "grant": lambda engine, execution_id: grant(engine, execution_id),
    "claim_execution": _claim_granted,
    "issue_grant_and_claim": lambda engine, execution_id: engine.issue_grant_and_claim(
        execution_id=execution_id, **LANE, lease_duration_ms=30_000
    ),
}


@pytest.mark.parametrize("named", NAMED)
async def test_a_claim_by_id_takes_the_slot_without_being_refused(
    engine: Engine, given: Given, rows: Rows, clock: Clock, named: str
) -> None:
    slots = await quota(engine, running=1)
    first, second, third = [await given.created(policy=limited(slots)) for _ in range(3)]
    (run,) = await claim(engine)
    assert run.execution_id == first
    await NAMED[named](engine, third)
    assert await used(rows, slots) == 2
    await engine.complete(run.handle, b"")
    assert await used(rows, slots) == 1
    assert await claim(engine) == []
    await engine.cancel_execution(execution_id=third, reason="x")
    assert await used(rows, slots) == 0
    assert [each.execution_id for each in await claim(engine)] == [second]


async def test_a_reclaim_by_id_takes_the_slot(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    slots = await quota(engine, running=1)
    lost = await given.created(policy=limited(slots))
    for by_claim in (False, True):
        assert len(await claim(engine)) == 1
        await engine.revoke_lease(lost, reason="x")
        assert await used(rows, slots) == 0
        assert isinstance(await engine.issue_reclaim_grant(execution_id=lost, **LANE, **WORKER), Granted)
        assert await used(rows, slots) == 1
        call = engine.claim_execution if by_claim else engine.reclaim_execution
        await call(execution_id=lost, **LANE, **WORKER)
        assert await used(rows, slots) == 1
        await engine.revoke_lease(lost, reason="x")
        assert await used(rows, slots) == 0


async def test_a_resume_by_id_takes_the_slot(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    slots = await quota(engine, running=1)
    resumed = await given.created(policy=limited(slots))
    other = await given.created(policy=limited(slots))
    (run,) = await claim(engine)
    await engine.hand_back(run.handle)
    assert await used(rows, slots) == 0
    await engine.issue_grant_and_claim(execution_id=other, **LANE, lease_duration_ms=30_000)
    assert await claim(engine) == []
    assert (await rows.execution(resumed))["eligibility_state"] == "blocked_by_quota"
    again = await engine.claim_resumed_execution(execution_id=resumed, **LANE, **WORKER)
    assert await used(rows, slots) == 2
    await engine.complete(again.handle, b"")
    assert await used(rows, slots) == 1


@pytest.mark.parametrize("named", NAMED)
async def test_an_execution_that_a_limit_blocks_can_be_claimed_by_id(
    engine: Engine, given: Given, rows: Rows, clock: Clock, named: str
) -> None:
    slots = await quota(engine, running=1)
    await given.created(policy=limited(slots))
    blocked = await given.created(policy=limited(slots))
    await claim(engine)
    await claim(engine)
    assert (await rows.execution(blocked))["eligibility_state"] == "blocked_by_quota"
    await NAMED[named](engine, blocked)
    assert await used(rows, slots) == 2
    assert await rows.of("listed", execution_id=uuid_of(blocked)) == []


@pytest.mark.parametrize("by", ["sweep", "claim"])
async def test_a_grant_that_expires_gives_its_slot_back(
    engine: Engine, given: Given, rows: Rows, clock: Clock, by: str
) -> None:
    slots = await quota(engine, running=1)
    first = await given.created(policy=limited(slots), priority=1)
    blocked = await given.created(policy=limited(slots), priority=9)
    await grant(engine, first, grant_ttl_ms=1000)
    assert await claim(engine) == []
    await clock.advance(seconds=1)
    if by == "sweep":
        await Reconciler(engine).catch_up()
        assert await used(rows, slots) == 0
        assert (await rows.of("claim_grant"))[0]["has_slots"] is False
    (run,) = await claim(engine)
    assert run.execution_id == blocked
    assert await used(rows, slots) == 1
    # Nothing is returned twice.
    await Reconciler(engine).catch_up()
    await engine.complete(run.handle, b"")
    assert [each.execution_id for each in await claim(engine)] == [first]
    assert await used(rows, slots) == 1


async def test_an_execution_whose_grant_has_expired_keeps_its_slot_when_it_is_claimed(
    engine: Engine, given: Given, rows: Rows, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = await quota(engine, running=1)
    first, other = [await given.created(policy=limited(slots)) for _ in range(2)]
    await grant(engine, first, grant_ttl_ms=1000)
    await clock.advance(seconds=1)

    async def nothing(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(CatchUp, "run", nothing)
    assert [each.execution_id for each in await claim(engine)] == [first]
    assert await used(rows, slots) == 1
    await engine.cancel_execution(execution_id=first, reason="x")
    assert [each.execution_id for each in await claim(engine)] == [other]


async def test_a_grant_that_is_given_again_takes_no_second_slot(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    slots = await quota(engine, running=5)
    execution_id = await given.created(policy=limited(slots))
    for _ in range(3):
        await grant(engine, execution_id, grant_ttl_ms=1000)
        await clock.advance(seconds=1)
    await engine.issue_grant_and_claim(execution_id=execution_id, **LANE, lease_duration_ms=30_000)
    assert await used(rows, slots) == 1
    assert (await engine.reconcile_quota_counters()).errors == 0
    assert await used(rows, slots) == 1


async def test_the_recount_and_the_sweep_do_not_both_free_a_slot(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    slots = await quota(engine, running=1)
    await grant(engine, await given.created(policy=limited(slots)), grant_ttl_ms=1000)
    await clock.advance(seconds=1)
    await engine.reconcile_quota_counters()
    assert await used(rows, slots) == 0
    await parts_of(engine).admission.return_expired()
    assert await used(rows, slots) == 0


async def test_a_grant_that_fails_takes_nothing(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    slots = await quota(engine, running=1, rate=5)
    execution_id = await given.created(policy=limited(slots))
    await connection.execute(
        """create function refuse() returns trigger language plpgsql as
           $$begin raise check_violation using message = 'refused'; end$$;
           create trigger refuse before insert on claim_grant for each row execute function refuse()"""
    )
    for refused in (search(engine), grant(engine, execution_id)):
        async with rows.unchanged(without=("worker_identity",)):
            with pytest.raises(Exception, match="refused"):
                await refused
    await connection.execute("drop trigger refuse on claim_grant")
    assert isinstance(await search(engine), Granted)
    assert (await used(rows, slots), sum(tokens for _, tokens in await window(rows, slots))) == (1, 1)


@pytest.mark.parametrize("way", ["claim", "search", "grant", "operator"])
async def test_a_claim_after_a_check_takes_no_second_slot_or_token(
    engine: Engine, given: Given, rows: Rows, clock: Clock, way: str
) -> None:
    both = await quota(engine, running=1, rate=1)
    await given.created(policy=limited(both), priority=9)
    checked = await given.created(policy=limited(both))
    assert await check(engine, both, checked, rate=1, cap=1) == QuotaAdmitted()
    assert await check(engine, both, checked, rate=1, cap=1) == AlreadyAdmitted()
    if way == "claim":
        assert [each.execution_id for each in await claim(engine)] == [checked]
    elif way == "search":
        granted = await search(engine)
        assert isinstance(granted, Granted)
        assert granted.execution_id == checked
    elif way == "grant":
        await grant(engine, checked)
    else:
        await engine.issue_grant_and_claim(execution_id=checked, **LANE, lease_duration_ms=30_000)
    assert (await used(rows, both), sum(tokens for _, tokens in await window(rows, both))) == (1, 1)
    (guard,) = await rows.of("quota_admission")
    assert guard["has_slot"] is False
    assert await check(engine, both, checked, rate=1, cap=1) == AlreadyAdmitted()
    await engine.cancel_execution(execution_id=checked, reason="x")
    assert await used(rows, both) == 0
    await engine.reconcile_quota_counters()
    assert await used(rows, both) == 0


@pytest.mark.parametrize("running", [0, 1])
async def test_the_slot_of_an_expired_guard_does_not_leak(
    engine: Engine, given: Given, rows: Rows, clock: Clock, running: int
) -> None:
    both = await quota(engine, running=running, rate=9)
    checked = await given.created(policy=limited(both))
    await check(engine, both, checked, cap=1)
    await clock.advance(seconds=60)
    (run,) = await claim(engine)
    await engine.complete(run.handle, b"")
    await engine.reconcile_quota_counters()
    assert await used(rows, both) == 0
    other = await given.created(policy=limited(both))
    await check(engine, both, other, cap=1)
    await engine.issue_grant_and_claim(execution_id=other, **LANE, lease_duration_ms=30_000)
    await clock.advance(seconds=60)
    await engine.cancel_execution(execution_id=other, reason="x")
    await engine.reconcile_quota_counters()
    assert await used(rows, both) == 0


async def test_a_released_admission_moves_its_token_to_the_claim(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    rate = await quota(engine, rate=2)
    released = await given.created(policy=limited(rate))
    await check(engine, rate, released, rate=2)
    await engine.release_admission(rate, released)
    await clock.advance(seconds=10)
    assert [each.execution_id for each in await claim(engine)] == [released]
    assert [tokens for _, tokens in await window(rows, rate)] == [1]


@pytest.mark.parametrize("again", ["claim", "check"])
async def test_all_tokens_of_a_heavy_execution_move_with_its_next_admission(
    engine: Engine, given: Given, rows: Rows, clock: Clock, again: str
) -> None:
    await engine.create_quota_policy(rate := uuid4(), 60, 10, 0, weight_from="payload:/tokens")
    heavy, light = [
        await given.created(policy=limited(rate), input_payload=b'{"tokens": %d}' % tokens) for tokens in (4, 1)
    ]
    runs = await claim(engine)
    assert [each.execution_id for each in runs] == [heavy, light]
    await engine.hand_back(runs[0].handle)
    await engine.release_admission(rate, heavy)
    now = await clock.advance(seconds=10)
    if again == "claim":
        assert [each.execution_id for each in await claim(engine)] == [heavy]
    else:
        assert await check(engine, rate, heavy, rate=10) == QuotaAdmitted()
    assert await window(rows, rate) == [(now - 10_000, 1), (now, 4 if again == "claim" else 1)]


async def test_a_retry_in_the_window_takes_no_second_token(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    rate = await quota(engine, rate=2)
    retries = {"retry_policy": {"max_retries": 9, "backoff": {"type": "fixed", "delay_ms": 0}}}
    first, second, third = [await given.created(policy=limited(rate, **retries)) for _ in range(3)]
    a, b = await claim(engine)
    assert (a.execution_id, b.execution_id) == (first, second)
    for _ in range(3):
        await engine.fail(b.handle, reason="x")
        (b,) = await claim(engine)
        assert b.execution_id == second
        assert [tokens for _, tokens in await window(rows, rate)] == [2]
    await engine.delay(a.handle, 0)
    (a,) = await claim(engine)
    assert a.execution_id == first
    for run in (a, b):
        await engine.fail(run.handle, reason="x")
    await clock.advance(seconds=60)
    assert [each.execution_id for each in await claim(engine)] == [first, second]
    assert [tokens for _, tokens in await window(rows, rate)] == [2]
    assert (await rows.execution(third))["public_state"] in ("rate_limited", "waiting")


async def test_a_blocked_execution_that_is_granted_is_claimable(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    slots = await quota(engine, running=1)
    await given.created(policy=limited(slots))
    head = await given.created(policy=limited(slots))
    (run,) = await claim(engine)
    assert await claim(engine) == []
    assert (await rows.execution(head))["eligibility_state"] == "blocked_by_quota"
    await engine.complete(run.handle, b"")
    assert isinstance(await search(engine), Granted)
    assert (await rows.execution(head))["eligibility_state"] == "eligible_now"
    await engine.claim_execution(execution_id=head, **LANE, **WORKER)


async def test_a_grant_of_a_transaction_that_was_rolled_back_is_not_answered(
    engine: Engine, given: Given, rows: Rows, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = await quota(engine, running=1)
    execution_id = await given.created(policy=limited(slots))
    transact = Store.transact
    is_first = True

    async def repeated(store: Store, work: Callable[[Transaction], Awaitable[Any]], **options: Any) -> Any:
        nonlocal is_first
        found = None

        async def undone(transaction: Transaction) -> None:
            nonlocal found
            found = await work(transaction)
            if is_first and isinstance(found, Round) and found.taken:
                raise Undone

        try:
            await transact(store, undone, **options)
        except Undone:
            is_first = False
            await engine.cancel_execution(execution_id=execution_id, reason="x")
            return await transact(store, work, **options)
        return found

    monkeypatch.setattr(Store, "transact", repeated)
    assert await search(engine) == NoWork()
    assert not is_first
    assert await used(rows, slots) == 0


class Undone(Exception):
    """Rolls a transaction back."""

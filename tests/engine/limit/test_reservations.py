"""Reservations: within the limits and a lease, settled at their true cost once, and returned when the lease ends."""

from typing import Any
from uuid import UUID

import pytest

from engine.state import all_cases, claim, refused, revoke
from engine.waits import suspend_run
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.budget import AlreadyReserved, AlreadySettled, Ok, Reserved, Settled
from flowfabric.model.handle import Handle
from flowfabric.reconcile.loop import Reconciler

from .budgets import account, budget, counted, hard, report


async def reserve(engine: Engine, handle: Handle, budget_id: UUID, key: str = "k", **amounts: int) -> Any:
    return await engine.reserve(handle, budget_id, amounts=amounts, reservation_key=key)


async def settle(engine: Engine, handle: Handle, budget_id: UUID, key: str = "k", **amounts: int) -> Any:
    return await engine.settle(handle, budget_id, reservation_key=key, amounts=amounts)


async def attached(rows: Rows, handle: Handle) -> int:
    bits: int = (await rows.execution(handle.execution_id))["attached"]
    return bits


async def test_a_reservation_takes_part_in_the_hard_limit_without_being_used(
    engine: Engine, given: Given, rows: Rows
) -> None:
    budget_id = await budget(engine, hard={"usd": 100})
    handle = await given.claimed()
    assert await reserve(engine, handle, budget_id, usd=60, calls=1) == Reserved(remaining={"usd": 40})
    assert await counted(rows, budget_id) == {"usd": (0, 60), "calls": (0, 1)}
    assert await attached(rows, handle) == 16
    other = await given.claimed()
    assert await reserve(engine, other, budget_id, usd=41) == hard("usd", 60, 100)
    assert await attached(rows, other) == 0
    assert await report(engine, budget_id, usd=41) == hard("usd", 60, 100)
    assert (await account(rows, budget_id))["breach_count"] == 2
    assert await report(engine, budget_id, usd=40) == Ok()
    assert (await engine.get_budget_status(budget_id)).reserved == {"usd": 60, "calls": 1}


async def test_a_refused_reservation_reserves_no_dimension(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"b": 1})
    assert await reserve(engine, await given.claimed(), budget_id, a=1, b=2) == hard("b", 0, 1)
    assert await counted(rows, budget_id) == {}
    assert await rows.of("budget_reservation") == []


async def test_a_key_reserves_once_within_a_lease(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine)
    handle = await given.claimed()
    await reserve(engine, handle, budget_id, usd=5)
    async with rows.unchanged():
        assert await reserve(engine, handle, budget_id, usd=7) == AlreadyReserved()
    await reserve(engine, handle, budget_id, "l", usd=1)
    assert await counted(rows, budget_id) == {"usd": (0, 6)}
    await settle(engine, handle, budget_id, usd=5)
    async with rows.unchanged():
        assert await reserve(engine, handle, budget_id, usd=5) == AlreadySettled()


async def test_settling_books_the_true_cost_once_and_returns_the_whole_reservation(
    engine: Engine, given: Given, rows: Rows
) -> None:
    budget_id = await budget(engine, hard={"usd": 100})
    handle = await given.claimed()
    await reserve(engine, handle, budget_id, usd=60, calls=3)
    assert await settle(engine, handle, budget_id, usd=20, tokens=7) == Settled()
    assert await counted(rows, budget_id) == {"usd": (20, 0), "calls": (0, 0), "tokens": (7, 0)}
    assert {row["dimension"]: row["spent"] for row in await rows.of("budget_spend")} == {"usd": 20, "tokens": 7}
    async with rows.unchanged():
        assert await settle(engine, handle, budget_id, usd=20) == AlreadySettled()
    # The cost is in the ledger of the execution.
    await engine.release_budget(budget_id, handle.execution_id)
    assert (await counted(rows, budget_id))["usd"] == (0, 0)


async def test_a_cost_above_the_hard_limit_is_booked_and_reported(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"usd": 100})
    handle, other = await given.claimed(), await given.claimed()
    await reserve(engine, other, budget_id, usd=50)
    await reserve(engine, handle, budget_id, usd=50)
    settled = await settle(engine, handle, budget_id, usd=51)
    assert settled == Settled(breach=hard("usd", 101, 100))
    assert settled.is_over
    assert await counted(rows, budget_id) == {"usd": (51, 50)}
    assert (await account(rows, budget_id))["breach_count"] == 1
    # The other one spends what it has reserved: the limit was passed before.
    assert await settle(engine, other, budget_id, usd=50) == Settled()
    assert (await account(rows, budget_id))["breach_count"] == 1


async def test_settling_without_a_reservation_books_the_cost(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"usd": 5})
    handle = await given.claimed()
    assert await settle(engine, handle, budget_id, usd=6) == Settled(breach=hard("usd", 6, 5))
    assert await settle(engine, handle, budget_id, usd=6) == AlreadySettled()
    assert await counted(rows, budget_id) == {"usd": (6, 0)}


async def test_a_released_reservation_can_be_made_again(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"usd": 10})
    handle = await given.claimed()
    await reserve(engine, handle, budget_id, usd=10)
    await engine.release_reservation(handle, budget_id, reservation_key="k")
    assert await counted(rows, budget_id) == {"usd": (0, 0)}
    async with rows.unchanged():
        await engine.release_reservation(handle, budget_id, reservation_key="k")
    assert await reserve(engine, handle, budget_id, usd=10) == Reserved(remaining={"usd": 0})


async def test_malformed_reservations_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    budget_id = await budget(engine)
    anything: Any = None
    cases: dict[str, Any] = {
        "amounts: must have at least one dimension": lambda: reserve(engine, handle, budget_id),
        "amounts['usd']: must be a whole number from 1": lambda: reserve(engine, handle, budget_id, usd=0),
        "reservation_key: must not be empty": lambda: reserve(engine, handle, budget_id, "", usd=1),
        "handle: must be a Handle": lambda: reserve(engine, anything, budget_id, usd=1),
        "handle: must be a Handle, got None": lambda: settle(engine, anything, budget_id, usd=1),
        "amounts['usd']: must be a whole number from 0": lambda: settle(engine, handle, budget_id, usd=-1),
        "reservation_key: must be text": lambda: settle(engine, handle, budget_id, anything, usd=1),
        "reservation_key: must be text, got None": lambda: engine.release_reservation(
            handle, budget_id, reservation_key=anything
        ),
    }
    with all_cases() as case:
        for detail, call in cases.items():
            with case(detail):
                async with rows.unchanged():
                    await refused(call(), "invalid_input", detail)


async def test_only_the_holder_of_the_lease_can_reserve(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    budget_id = await budget(engine)
    completed, revoked, expired = await given.claimed(), await given.claimed(), await given.claimed()
    await engine.complete(completed, b"")
    await revoke(engine, revoked.execution_id)
    await clock.advance(seconds=31)
    expected = {"execution_not_active": completed, "lease_revoked": revoked, "lease_expired": expired}
    for code, handle in expected.items():
        async with rows.unchanged():
            await refused(reserve(engine, handle, budget_id, usd=1), code)


# The end of the lease.


async def _complete(engine: Engine, handle: Handle, clock: Clock) -> None:
    await engine.complete(handle, b"")


async def _complete_many(engine: Engine, handle: Handle, clock: Clock) -> None:
    await engine.complete_many([(handle, b"")])


async def _fail(engine: Engine, handle: Handle, clock: Clock) -> None:
    await engine.fail(handle, reason="x")


async def _delay(engine: Engine, handle: Handle, clock: Clock) -> None:
    await engine.delay(handle, 0)


async def _hand_back(engine: Engine, handle: Handle, clock: Clock) -> None:
    await engine.hand_back(handle)


async def _suspend(engine: Engine, handle: Handle, clock: Clock) -> None:
    await suspend_run(engine, handle)


async def _cancel(engine: Engine, handle: Handle, clock: Clock) -> None:
    await engine.cancel_execution(execution_id=handle.execution_id, reason="x")


async def _revoke(engine: Engine, handle: Handle, clock: Clock) -> None:
    await revoke(engine, handle.execution_id)


async def _expire(engine: Engine, handle: Handle, clock: Clock) -> None:
    await clock.advance(seconds=31)
    await Reconciler(engine).catch_up()


@pytest.mark.parametrize(
    "end", [_complete, _complete_many, _fail, _delay, _hand_back, _suspend, _cancel, _revoke, _expire]
)
async def test_every_end_of_a_lease_returns_its_reservations(
    engine: Engine, given: Given, rows: Rows, clock: Clock, end: Any
) -> None:
    first, second = await budget(engine, hard={"usd": 10}), await budget(engine)
    retry = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1}}}
    handle = await given.claimed(policy=retry)
    await reserve(engine, handle, first, usd=6, calls=1)
    await reserve(engine, handle, first, "l", usd=3)
    await reserve(engine, handle, second, usd=5)
    await report(engine, first, usd=1)
    await end(engine, handle, clock)
    assert await counted(rows, first) == {"usd": (1, 0), "calls": (0, 0)}
    assert await counted(rows, second) == {"usd": (0, 0)}
    assert await rows.of("budget_reservation") == []
    assert await attached(rows, handle) & 16 == 0


async def test_the_end_of_a_lease_returns_nothing_of_others(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine)
    handle, other = await given.claimed(), await given.claimed()
    for each, amount in ((handle, 6), (other, 3)):
        await reserve(engine, each, budget_id, usd=amount)
    await engine.complete(handle, b"")
    assert await counted(rows, budget_id) == {"usd": (0, 3)}


async def test_a_reservation_of_a_dead_worker_returns_and_its_late_settlement_counts_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    budget_id = await budget(engine, hard={"usd": 10})
    dead = await given.claimed()
    await reserve(engine, dead, budget_id, usd=10)
    await clock.advance(seconds=31)
    await Reconciler(engine).catch_up()
    assert await counted(rows, budget_id) == {"usd": (0, 0)}
    # The next attempt uses the same key under its own lease.
    (run,) = await claim(engine)
    assert run.execution_id == dead.execution_id
    assert await reserve(engine, run.handle, budget_id, usd=8) == Reserved(remaining={"usd": 2})
    assert await settle(engine, dead, budget_id, usd=2) == Settled()
    assert await settle(engine, dead, budget_id, usd=2) == AlreadySettled()
    assert await counted(rows, budget_id) == {"usd": (2, 8)}
    assert await settle(engine, run.handle, budget_id, usd=8) == Settled()
    assert await counted(rows, budget_id) == {"usd": (10, 0)}


async def test_a_late_settlement_of_a_deleted_execution_is_booked(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    budget_id = await budget(engine)
    handle = await given.claimed()
    await engine.complete(handle, b"")
    await clock.advance(seconds=2 * 86_400)
    await Reconciler(engine).catch_up()
    assert await rows.of("execution") == []
    assert await settle(engine, handle, budget_id, usd=2) == Settled()
    assert await counted(rows, budget_id) == {"usd": (2, 0)}


async def test_a_run_that_has_settled_everything_ends_as_others_do(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine)
    handle = await given.claimed()
    await reserve(engine, handle, budget_id, usd=2)
    await settle(engine, handle, budget_id, usd=2)
    await engine.complete(handle, b"done")
    assert (await rows.execution(handle.execution_id))["public_state"] == "completed"
    assert await attached(rows, handle) == 0


async def test_a_reset_keeps_what_is_reserved(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"usd": 10})
    handle = await given.claimed()
    await report(engine, budget_id, usd=5)
    await reserve(engine, handle, budget_id, usd=4)
    await engine.reset_budget(budget_id)
    assert await counted(rows, budget_id) == {"usd": (0, 4)}
    assert await report(engine, budget_id, usd=7) == hard("usd", 4, 10)

"""Concurrent usage of one budget: nothing above its limit is counted, and nothing below it is lost."""

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID, uuid4

from engine.state import claim, made, new, rounds
from fixtures import Engines, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.budget import HardBreach, Ok, Reserved, Settled
from flowfabric.model.edge import AlreadyApplied
from flowfabric.model.handle import Handle

from .budgets import account, budget, counted, report


def kinds(answers: list[Any]) -> dict[str, int]:
    """How many answers there are of each type."""
    return dict(Counter(type(answer).__name__ for answer in answers))


async def test_concurrent_reports_count_exactly_up_to_the_limit(engine: Engine, engines: Engines, rows: Rows) -> None:
    second = await engines()
    for _ in rounds(3, whole=20):
        budget_id = await budget(engine, hard={"usd": 100})
        answers = await asyncio.gather(
            *(report((engine, second)[nth % 2], budget_id, f"key {nth}", usd=10) for nth in range(50))
        )
        assert kinds(answers) == {"Ok": 10, "HardBreach": 40}
        assert await counted(rows, budget_id) == {"usd": (100, 0)}
        assert (await account(rows, budget_id))["breach_count"] == 40


async def test_sixteen_writers_of_two_processes_never_overshoot(engine: Engine, engines: Engines, rows: Rows) -> None:
    second = await engines()
    budget_id = await budget(engine, hard={"a": 700, "b": 500})
    applied: Counter[str] = Counter()
    breaches = 0

    async def write(nth: int) -> None:
        nonlocal breaches
        for step in range(20):
            amounts = {"a": 1 + nth % 7, "b": 1 + step % 5}
            execution_id = f"{{fp:1}}:{UUID(int=nth)}"
            answer = await (engine, second)[nth % 2].record_spend(budget_id, execution_id, deltas=amounts)
            if isinstance(answer, HardBreach):
                breaches += 1
            else:
                applied.update(amounts)

    await asyncio.gather(*(write(nth) for nth in range(16)))
    assert breaches > 0
    found = await counted(rows, budget_id)
    assert found == {name: (amount, 0) for name, amount in applied.items()}
    assert applied["a"] <= 700
    assert applied["b"] <= 500
    assert (await account(rows, budget_id))["breach_count"] == breaches
    ledger: Counter[str] = Counter()
    for row in await rows.of("budget_spend"):
        ledger[row["dimension"]] += row["spent"]
    assert ledger == applied


async def test_a_key_counts_once_however_many_use_it_at_once(engine: Engine, engines: Engines, rows: Rows) -> None:
    second = await engines()
    for _ in rounds(3, whole=20):
        budget_id = uuid4()
        answers = await asyncio.gather(
            *(report((engine, second)[nth % 2], budget_id, "same", usd=1) for nth in range(16))
        )
        assert answers.count(Ok()) == 1
        assert answers.count(AlreadyApplied()) == 15
        assert await counted(rows, budget_id) == {"usd": (1, 0)}


async def test_many_budgets_are_used_at_once_in_any_order(engine: Engine, engines: Engines, rows: Rows) -> None:
    second = await engines()
    budgets = [uuid4() for _ in range(10)]
    reports = [
        report((engine, second)[nth % 2], budgets[(nth * step) % 10], usd=1) for step in (1, 3, 7) for nth in range(100)
    ]
    assert set(await asyncio.gather(*reports)) == {Ok()}
    assert sum([(await counted(rows, each))["usd"][0] for each in budgets]) == 300


async def test_a_report_waits_for_a_reset_that_is_under_way(engine: Engine, rows: Rows, connection: Any) -> None:
    budget_id = await budget(engine, hard={"usd": 10})
    await report(engine, budget_id, usd=10)
    async with connection.transaction():
        await connection.execute("select from budget_account for update")
        reporting = asyncio.ensure_future(report(engine, budget_id, usd=10))
        others = [report(engine, await budget(engine), usd=1) for _ in range(3)]
        # It does not keep those of other budgets waiting for long.
        assert await asyncio.gather(*others) == [Ok()] * 3
        assert not reporting.done()
        await connection.execute("update budget_usage set used = 0")
    assert await reporting == Ok()
    assert await counted(rows, budget_id) == {"usd": (10, 0)}


async def reserve_and_settle(engine: Engine, handle: Handle, budgets: list[UUID], *, cost: int) -> list[Any]:
    """Reserve 5 of each budget, settle what was reserved unless the cost is 0, and complete the run."""
    answers: list[Any] = []
    for budget_id in budgets:
        answer = await engine.reserve(handle, budget_id, amounts={"usd": 5}, reservation_key="k")
        answers.append((budget_id, answer))
        if isinstance(answer, Reserved) and cost:
            settled = await engine.settle(handle, budget_id, reservation_key="k", amounts={"usd": cost})
            assert settled == Settled()
            answers.append((budget_id, settled))
    await engine.complete(handle, b"")
    return answers


async def test_reservations_compete_for_what_is_left_and_return_while_leases_end(
    engine: Engine, engines: Engines, rows: Rows
) -> None:
    second = await engines()
    for _ in rounds(2, whole=20):
        budgets = [await budget(engine, hard={"usd": 40}) for _ in range(2)]
        await made(engine, *[new() for _ in range(16)])
        calls = [
            reserve_and_settle(
                (engine, second)[nth % 2], one.handle, budgets[:: 1 if nth % 2 else -1], cost=4 if nth % 3 else 0
            )
            for nth, one in enumerate(await claim(engine, limit=16))
        ]
        found = [pair for answers in await asyncio.gather(*calls) for pair in answers]
        seen = kinds([answer for _, answer in found])
        assert seen["Reserved"] + seen["HardBreach"] == 32
        for budget_id in budgets:
            spent = 4 * found.count((budget_id, Settled()))
            assert 0 < spent <= 40
            assert await counted(rows, budget_id) == {"usd": (spent, 0)}
        assert await rows.of("budget_reservation") == []
        assert {row["public_state"] for row in await rows.of("execution_detail")} == {"completed"}

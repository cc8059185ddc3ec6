"""Usage of budgets: counted within the limits, once per key, and taken back by execution."""

from typing import Any
from uuid import uuid4

import pytest

from engine.state import all_cases, refused
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.budget import Ok, SoftBreach, UsageDimensions
from flowfabric.model.edge import AlreadyApplied
from flowfabric.model.ids import Partitions, mint_solo

from .budgets import DAY_MS, account, budget, counted, hard, report

TOP = 2**63 - 1


async def test_usage_above_the_soft_limit_is_counted_and_above_the_hard_limit_is_not(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    budget_id = await budget(engine, hard={"usd": 100}, soft=80)
    assert await report(engine, budget_id, usd=60) == Ok()
    assert await report(engine, budget_id, usd=25) == SoftBreach(dimension="usd", current_usage=85, soft_limit=80)
    now = await clock.advance(seconds=1)
    assert await report(engine, budget_id, usd=50) == hard("usd", 85, 100)
    assert await counted(rows, budget_id) == {"usd": (85, 0)}
    found = await account(rows, budget_id)
    assert (found["breach_count"], found["soft_breach_count"]) == (1, 1)
    assert (found["last_breach_at"], found["last_breach_dim"]) == (now, "usd")


async def test_reaching_a_limit_exactly_is_no_breach(engine: Engine) -> None:
    budget_id = await budget(engine, hard={"usd": 100}, soft=80)
    assert await report(engine, budget_id, usd=80) == Ok()
    assert await report(engine, budget_id, usd=20) == SoftBreach(dimension="usd", current_usage=100, soft_limit=80)
    assert await report(engine, budget_id, usd=0) == SoftBreach(dimension="usd", current_usage=100, soft_limit=80)


async def test_a_breach_of_one_dimension_keeps_all_from_being_counted(engine: Engine, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"a": 10, "b": 10, "c": 10})
    await report(engine, budget_id, a=5, b=5, c=5)
    assert await report(engine, budget_id, c=6, b=6, a=1, free=1) == hard("b", 5, 10)
    assert await counted(rows, budget_id) == {"a": (5, 0), "b": (5, 0), "c": (5, 0)}
    assert (await account(rows, budget_id))["last_breach_dim"] == "b"


async def test_the_first_dimension_above_its_soft_limit_is_named(engine: Engine) -> None:
    budget_id = await budget(engine, hard={"b": 0, "a": 0, "c": 0}, soft=5)
    assert await report(engine, budget_id, c=9, b=9, a=1) == SoftBreach(dimension="b", current_usage=9, soft_limit=5)


async def test_totals_stop_at_the_largest_number(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"capped": 2**64 - 1})
    execution_id = await given.created()
    for _ in range(2):
        spent = await engine.record_spend(budget_id, execution_id, deltas={"usd": 2**64 - 1, "capped": TOP})
        assert spent == Ok()
    assert await counted(rows, budget_id) == {"usd": (TOP, 0), "capped": (TOP, 0)}
    assert {row["spent"] for row in await rows.of("budget_spend")} == {TOP}
    await engine.release_budget(budget_id, execution_id)
    assert await counted(rows, budget_id) == {"usd": (0, 0), "capped": (0, 0)}


async def test_a_worker_reports_tokens_time_and_dimensions_of_its_own(engine: Engine, given: Given, rows: Rows) -> None:
    budget_id = await budget(engine)
    handle = await given.claimed()
    await engine.complete(handle, b"")
    # The lease has ended: what was spent is counted all the same.
    used = UsageDimensions(input_tokens=3, output_tokens=4, wall_ms=0, custom={"usd": 5})
    assert await engine.report_usage(handle, budget_id, used) == Ok()
    assert await engine.report_usage(handle, budget_id, UsageDimensions(wall_ms=9)) == Ok()
    assert {name: used for name, (used, _) in (await counted(rows, budget_id)).items()} == {
        "input_tokens": 3,
        "output_tokens": 4,
        "wall_ms": 9,
        "usd": 5,
    }


async def test_malformed_reports_are_refused_and_change_nothing(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    budget_id = await budget(engine)
    execution_id = handle.execution_id

    def admin(**fields: Any) -> Any:
        return engine.report_usage_admin(budget_id, **{"dimensions": ["a"], "deltas": [1], **fields})

    def usage(**fields: Any) -> Any:
        return engine.report_usage(handle, budget_id, UsageDimensions(**fields))

    anything: Any = None
    cases: dict[str, Any] = {
        "deltas: must be as long as dimensions": lambda: admin(deltas=[1, 2]),
        "dimensions: 'a' is given twice": lambda: admin(dimensions=["a", "a"], deltas=[1, 2]),
        "deltas of 'a': must be a whole number": lambda: admin(deltas=[-1]),
        "deltas of 'a': must be a whole number from 0": lambda: admin(deltas=[2**64]),
        "dedup_key: must be at most 1024 bytes": lambda: admin(dedup_key="x" * 1025),
        "custom: 'wall_ms' has a field of its own": lambda: usage(custom={"wall_ms": 1}),
        "input_tokens: must be": lambda: usage(input_tokens=-1),
        "wall_ms: must be": lambda: usage(wall_ms=1.5),
        "custom: expected a mapping": lambda: usage(custom=[]),
        "custom['usd']: must be": lambda: usage(custom={"usd": "1"}),
        "custom: the name of a dimension: must not be empty": lambda: usage(custom={"": 1}),
        "handle: must be a Handle": lambda: engine.report_usage(anything, budget_id, UsageDimensions()),
        "dimensions: expected UsageDimensions": lambda: engine.report_usage(handle, budget_id, anything),
        "budget_id: must be a UUID": lambda: engine.report_usage(handle, "x", UsageDimensions()),
        "is not an execution id": lambda: engine.record_spend(budget_id, "x", deltas={}),
        "deltas: expected a mapping": lambda: engine.record_spend(budget_id, execution_id, deltas=anything),
        "idempotency_key: must be text": lambda: engine.record_spend(
            budget_id,
            execution_id,
            deltas={},
            idempotency_key=1,  # type: ignore[arg-type]
        ),
        "is not an execution id; write": lambda: engine.release_budget(budget_id, "x"),
    }
    with all_cases() as case:
        for detail, call in cases.items():
            with case(detail):
                async with rows.unchanged():
                    await refused(call(), "invalid_input", detail)


# Keys.


async def test_a_key_counts_once_and_a_refused_report_can_be_repeated(engine: Engine, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"usd": 10})
    assert await report(engine, budget_id, "one", usd=7) == Ok()
    assert await report(engine, budget_id, "two", usd=7) == hard("usd", 7, 10)
    async with rows.unchanged():
        assert await report(engine, budget_id, "one", usd=7) == AlreadyApplied()
    await engine.reset_budget(budget_id)
    assert await report(engine, budget_id, "two", usd=7) == Ok()
    # A reset does not forget the keys.
    assert await report(engine, budget_id, "one", usd=1) == AlreadyApplied()
    assert await counted(rows, budget_id) == {"usd": (7, 0)}


async def test_a_key_belongs_to_one_budget_and_to_all_ways_of_reporting(engine: Engine, given: Given) -> None:
    first, second = await budget(engine), await budget(engine)
    handle = await given.claimed()
    assert await report(engine, first, "k", usd=1) == Ok()
    assert await report(engine, second, "k", usd=1) == Ok()
    used = UsageDimensions(custom={"usd": 1}, dedup_key="k")
    assert await engine.report_usage(handle, first, used) == AlreadyApplied()
    spent = await engine.record_spend(first, handle.execution_id, deltas={"usd": 1}, idempotency_key="k")
    assert spent == AlreadyApplied()


async def test_a_key_is_remembered_for_a_day_whether_or_not_it_is_deleted(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    budget_id = await budget(engine)
    await report(engine, budget_id, "k", usd=1)
    await clock.advance(ms=DAY_MS - 1)
    assert await report(engine, budget_id, "k", usd=1) == AlreadyApplied()
    await clock.advance(ms=1)
    assert await report(engine, budget_id, "k", usd=1) == Ok()
    assert await report(engine, budget_id, "k", usd=1) == AlreadyApplied()
    (key,) = await rows.of("idempotency_key")
    assert key["expires_at"] == await clock.now() + DAY_MS


@pytest.mark.parametrize("key", [None, ""])
async def test_without_a_key_every_report_counts(engine: Engine, rows: Rows, key: str | None) -> None:
    budget_id = await budget(engine)
    for _ in range(2):
        assert await report(engine, budget_id, key, usd=1) == Ok()
    assert await counted(rows, budget_id) == {"usd": (2, 0)}
    assert await rows.of("idempotency_key") == []


# Ledgers.


async def test_only_what_an_execution_has_spent_is_released_and_only_once(
    engine: Engine, given: Given, rows: Rows
) -> None:
    budget_id = await budget(engine, hard={"usd": 100})
    first = await given.created()
    absent = mint_solo("default", Partitions())
    for execution_id, amount in ((first, 10), (absent, 20), (first, 5)):
        assert await engine.record_spend(budget_id, execution_id, deltas={"usd": amount, "calls": 1}) == Ok()
    assert await engine.record_spend(budget_id, first, deltas={"usd": 90}) == hard("usd", 35, 100)
    await report(engine, budget_id, usd=1)
    ledger = {(str(row["execution_id"]), row["dimension"]): row["spent"] for row in await rows.of("budget_spend")}
    assert ledger == {
        (uuid_of(first), "usd"): 15,
        (uuid_of(first), "calls"): 2,
        (uuid_of(absent), "usd"): 20,
        (uuid_of(absent), "calls"): 1,
    }
    await engine.release_budget(budget_id, first)
    assert await counted(rows, budget_id) == {"usd": (21, 0), "calls": (1, 0)}
    async with rows.unchanged():
        await engine.release_budget(budget_id, first)
        await engine.release_budget(uuid4(), first)
    assert (await account(rows, budget_id))["breach_count"] == 1


async def test_a_release_never_goes_below_zero(engine: Engine, given: Given, rows: Rows, connection: Any) -> None:
    budget_id = await budget(engine)
    execution_id = await given.created()
    await engine.record_spend(budget_id, execution_id, deltas={"usd": 10})
    await connection.execute("update budget_usage set used = 4")
    await engine.release_budget(budget_id, execution_id)
    assert await counted(rows, budget_id) == {"usd": (0, 0)}


async def test_a_ledger_is_deleted_with_its_execution_and_its_spending_stays_counted(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    budget_id = await budget(engine)
    ended, waiting = await given.completed(), await given.created()
    for execution_id in (ended, waiting):
        await engine.record_spend(budget_id, execution_id, deltas={"usd": 10})
    await clock.advance(ms=DAY_MS + 1)
    assert await engine.trim_retention() == 1
    assert [str(row["execution_id"]) for row in await rows.of("budget_spend")] == [uuid_of(waiting)]
    assert await counted(rows, budget_id) == {"usd": (20, 0)}

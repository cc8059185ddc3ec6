"""Budgets: created once, reset by hand and on time, changed while they are used, read, and recounted."""

from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.state import all_cases, refused
from fixtures import Clock, Given, Rows
from flowfabric.engine.core.wakeups import Wakeups
from flowfabric.engine.engine import Engine
from flowfabric.engine.limit import budget as budget_module
from flowfabric.engine.parts import parts_of
from flowfabric.model.budget import (
    BudgetAlreadySatisfied,
    BudgetCreated,
    BudgetLimit,
    BudgetLimitsChanged,
    BudgetReset,
    BudgetStatus,
    BudgetUsageAndLimits,
    CountersReconciled,
    Ok,
)
from flowfabric.reconcile.loop import Reconciler

from .budgets import account, budget, counted, definition, hard, report

HOUR_MS = 3_600_000


# Creating and reading.


async def test_a_budget_is_created_once_and_a_second_call_changes_nothing(engine: Engine, rows: Rows) -> None:
    budget_id = uuid4()
    first = definition(dimensions=["usd"], hard_limits=[100], soft_limits=[80])
    assert await engine.create_budget(budget_id, **first) == BudgetCreated(budget_id=budget_id)
    async with rows.unchanged():
        again = definition(dimensions=["usd"], hard_limits=[7], soft_limits=[0], scope_id="other", reset_interval_ms=5)
        assert await engine.create_budget(str(budget_id), **again) == BudgetAlreadySatisfied(budget_id=budget_id)


async def test_a_malformed_budget_is_refused(engine: Engine, rows: Rows) -> None:
    cases: dict[str, dict[str, Any]] = {
        "hard_limits: must be as long as dimensions": {"dimensions": ["a"], "hard_limits": [], "soft_limits": [0]},
        "soft_limits: must be as long as dimensions": {"dimensions": ["a"], "hard_limits": [1], "soft_limits": []},
        "is given twice": {"dimensions": ["a", "a"], "hard_limits": [1, 1], "soft_limits": [1, 1]},
        "must be a whole number from 0": {"dimensions": ["a"], "hard_limits": [-1], "soft_limits": [0]},
        "must not be empty": {"dimensions": [""], "hard_limits": [1], "soft_limits": [0]},
        "at most 1000 dimensions": {
            "dimensions": [str(nth) for nth in range(1001)],
            "hard_limits": [0] * 1001,
            "soft_limits": [0] * 1001,
        },
        "scope_type: must be text": {"scope_type": 1},
        "on_hard_limit: must not contain NUL": {"on_hard_limit": "\0"},
        "reset_interval_ms: must be": {"reset_interval_ms": -1},
        "dimensions: expected a list": {"dimensions": "usd"},
    }
    with all_cases() as case:
        for detail, fields in cases.items():
            with case(detail):
                async with rows.unchanged():
                    await refused(engine.create_budget(uuid4(), **definition(**fields)), "invalid_input", detail)
    await refused(engine.create_budget("x", **definition()), "invalid_input", "budget_id: must be a UUID")


async def test_the_status_shows_the_definition_and_the_counters(engine: Engine, clock: Clock) -> None:
    now = await clock.now()
    budget_id = await budget(engine, hard={"usd": 100, "tokens": 0}, soft=50, reset_interval_ms=HOUR_MS)
    assert await report(engine, budget_id, usd=10) == Ok()
    await report(engine, budget_id, usd=60)
    await report(engine, budget_id, usd=31)
    assert await engine.get_budget_status(budget_id) == BudgetStatus(
        budget_id=budget_id,
        scope_type="lane",
        scope_id="default",
        enforcement_mode="strict",
        on_hard_limit="fail",
        on_soft_limit="warn",
        reset_interval_ms=HOUR_MS,
        usage={"usd": 70},
        reserved={},
        hard_limits={"usd": 100, "tokens": 0},
        soft_limits={"usd": 50, "tokens": 50},
        breach_count=1,
        soft_breach_count=1,
        reset_count=0,
        last_breach_at=now,
        last_breach_dim="usd",
        last_reset_at=None,
        next_reset_at=now + HOUR_MS,
        created_at=now,
    )
    assert await engine.read_budget_usage_and_limits(budget_id) == BudgetUsageAndLimits(
        limits={"hard:tokens": "0", "soft:tokens": "50", "hard:usd": "100", "soft:usd": "50"}, usage={"usd": 70}
    )


async def test_an_unknown_budget_has_no_status_and_no_limits(engine: Engine) -> None:
    budget_id = uuid4()
    await refused(engine.get_budget_status(budget_id), "budget_not_found", str(budget_id))
    nothing = BudgetUsageAndLimits(limits={}, usage={})
    assert await engine.read_budget_usage_and_limits(budget_id) == nothing


async def test_usage_before_the_creation_counts_without_limits_and_is_kept(engine: Engine) -> None:
    budget_id = uuid4()
    assert await report(engine, budget_id, usd=10**6) == Ok()
    await refused(engine.get_budget_status(budget_id), "budget_not_found")
    limits = definition(dimensions=["usd"], hard_limits=[5], soft_limits=[0], reset_interval_ms=1000)
    assert await engine.create_budget(budget_id, **limits) == BudgetCreated(budget_id=budget_id)
    assert await report(engine, budget_id, usd=1) == hard("usd", 10**6, 5)
    status = await engine.get_budget_status(budget_id)
    assert status.usage == {"usd": 10**6}
    assert status.next_reset_at == status.created_at + 1000


# Resetting.


async def test_a_reset_zeroes_usage_and_ledgers_and_keeps_the_breaches(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    budget_id = await budget(engine, hard={"usd": 100}, soft=50, reset_interval_ms=HOUR_MS)
    execution_id = await given.created()
    await engine.record_spend(budget_id, execution_id, deltas={"usd": 60}, idempotency_key="k")
    await report(engine, budget_id, usd=50)
    now = await clock.advance(seconds=10)
    assert await engine.reset_budget(budget_id) == BudgetReset(next_reset_at=now + HOUR_MS)
    status = await engine.get_budget_status(budget_id)
    assert (status.usage, status.breach_count, status.soft_breach_count, status.reset_count) == ({"usd": 0}, 1, 1, 1)
    assert (status.last_breach_at, status.last_breach_dim, status.last_reset_at) == (None, None, now)
    assert await rows.of("budget_spend") == []
    # A release after the reset must not subtract what was spent before.
    await report(engine, budget_id, usd=5)
    await engine.release_budget(budget_id, execution_id)
    assert await counted(rows, budget_id) == {"usd": (5, 0)}


async def test_a_budget_without_interval_is_not_scheduled_by_a_reset(engine: Engine) -> None:
    assert await engine.reset_budget(await budget(engine)) == BudgetReset(next_reset_at=0)


async def test_a_reset_of_an_unknown_budget_is_refused_and_changes_nothing(engine: Engine, rows: Rows) -> None:
    unknown, only_counted = uuid4(), uuid4()
    await report(engine, only_counted, usd=1)
    for budget_id in (unknown, only_counted):
        async with rows.unchanged():
            await refused(engine.reset_budget(budget_id), "budget_not_found", str(budget_id))


async def test_budgets_are_reset_on_time_and_the_next_reset_counts_from_the_actual_one(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    due = await budget(engine, reset_interval_ms=1000)
    never = await budget(engine)
    reconciler = Reconciler(engine)
    for each in (due, never):
        await report(engine, each, usd=7)
    await clock.advance(ms=999)
    async with rows.unchanged():
        await reconciler.catch_up()
    now = await clock.advance(ms=2501)
    await reconciler.catch_up()
    assert await counted(rows, due) == {"usd": (0, 0)}
    assert await counted(rows, never) == {"usd": (7, 0)}
    found = await account(rows, due)
    assert (found["reset_count"], found["next_reset_at"], found["last_reset_at"]) == (1, now + 1000, now)
    assert reconciler.stats["budget_reset"].processed == 1


async def test_a_budget_that_cannot_be_reset_does_not_block_the_others(
    engine: Engine, rows: Rows, clock: Clock, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    poisoned, other = await budget(engine, reset_interval_ms=1000), await budget(engine, reset_interval_ms=2000)
    for each in (poisoned, other):
        await report(engine, each, usd=7)
    await clock.advance(seconds=10)
    await connection.execute(
        f"""create function refuse() returns trigger language plpgsql as
              $$begin raise check_violation using message = 'poisoned'; end$$;
            create trigger poison before update on budget_usage for each row
              when (old.budget_id = '{poisoned}') execute function refuse()"""
    )
    budgets = parts_of(engine).budgets
    assert await budgets.reset_due() == 1
    assert await counted(rows, other) == {"usd": (0, 0)}
    assert await counted(rows, poisoned) == {"usd": (7, 0)}
    assert str(poisoned) in caplog.text
    # It is skipped for a while.
    caplog.clear()
    assert await budgets.reset_due() == 0
    assert caplog.text == ""


async def test_a_budget_that_is_locked_is_reset_by_the_next_batch(
    engine: Engine, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    budget_id = await budget(engine, reset_interval_ms=1000)
    await clock.advance(seconds=1)
    budgets = parts_of(engine).budgets
    async with connection.transaction():
        await connection.execute("select from budget_account for update")
        assert await budgets.reset_due() == 0
    assert await budgets.reset_due() == 1
    assert (await account(rows, budget_id))["reset_count"] == 1


# Changing limits.


async def test_limits_can_be_changed_while_a_budget_is_used(engine: Engine) -> None:
    budget_id = await budget(engine, hard={"usd": 10}, soft=8)
    await report(engine, budget_id, usd=10)
    assert await report(engine, budget_id, usd=1) == hard("usd", 10, 10)
    changed = await engine.change_budget_limits(
        budget_id, limits={"usd": BudgetLimit(hard=20), "tokens": {"soft": 5}, "calls": {"hard": 0}}
    )
    assert changed == BudgetLimitsChanged(
        previous={"usd": BudgetLimit(hard=10, soft=8), "tokens": BudgetLimit(hard=0, soft=0)},
        current={"usd": BudgetLimit(hard=20, soft=8), "tokens": BudgetLimit(hard=0, soft=5)},
    )
    status = await engine.get_budget_status(budget_id)
    assert (status.hard_limits, status.soft_limits) == ({"usd": 20, "tokens": 0}, {"usd": 8, "tokens": 5})
    assert await report(engine, budget_id, usd=11) == hard("usd", 10, 20)
    await engine.change_budget_limits(budget_id, limits={"usd": {"hard": 0, "soft": 0}})
    assert await report(engine, budget_id, usd=10**9) == Ok()


async def test_a_malformed_change_of_limits_is_refused(engine: Engine, rows: Rows) -> None:
    budget_id = await budget(engine, hard={"usd": 10})
    async with rows.unchanged():
        await refused(engine.change_budget_limits(uuid4(), limits={"usd": BudgetLimit(hard=1)}), "budget_not_found")
        wrong: dict[str, Any] = {
            "limits: expected a mapping": {},
            "limits['usd']: expected": {"usd": {}},
            "limits['usd']: expected {": {"usd": 5},
            "limits['usd'].hard: must be": {"usd": {"hard": -1}},
            "must not be empty": {"": {"hard": 1}},
        }
        for detail, limits in wrong.items():
            await refused(engine.change_budget_limits(budget_id, limits=limits), "invalid_input", detail)


# Waking who waits.


async def test_a_change_that_frees_something_wakes_the_lanes_that_use_the_budget(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_id = await budget(engine, hard={"usd": 10})
    execution_id = await given.created(lane_id="limited")
    handle = await given.claimed(lane_id="other")
    await engine.attach_budget("lane", "limited", budget_id)
    woken: list[str] = []
    monkeypatch.setattr(Wakeups, "lane", lambda _, lane_id: woken.append(lane_id))

    async def wakes(call: Any) -> list[str]:
        woken.clear()
        await call
        return [*woken]

    limited = ["limited"]
    await engine.record_spend(budget_id, execution_id, deltas={"usd": 2})
    assert await wakes(engine.release_budget(budget_id, execution_id)) == limited
    assert await wakes(engine.release_budget(budget_id, execution_id)) == []
    assert await wakes(engine.reset_budget(budget_id)) == limited
    assert await wakes(engine.change_budget_limits(budget_id, limits={"usd": {"hard": 12}})) == limited
    assert await wakes(engine.change_budget_limits(budget_id, limits={"usd": {"hard": 12}})) == []

    async def reserved(amount: int) -> None:
        await engine.reserve(handle, budget_id, amounts={"usd": amount}, reservation_key="k")

    await reserved(11)
    assert await wakes(engine.release_reservation(handle, budget_id, reservation_key="k")) == []
    await reserved(12)
    assert await wakes(engine.release_reservation(handle, budget_id, reservation_key="k")) == limited
    await reserved(12)
    assert await wakes(engine.settle(handle, budget_id, reservation_key="k", amounts={"usd": 1})) == limited
    await engine.reserve(handle, budget_id, amounts={"usd": 11}, reservation_key="l")
    assert await wakes(engine.complete(handle, b"")) == limited


# Recounting.


async def test_wrong_counters_are_corrected_and_right_ones_left(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    low, high, kept = [await budget(engine, hard={"usd": 100}) for _ in range(3)]
    handle = await given.claimed()
    for each in (low, high):
        await engine.record_spend(each, handle.execution_id, deltas={"usd": 5})
        await engine.record_spend(each, await given.created(), deltas={"usd": 6})
    await engine.reserve(handle, kept, amounts={"usd": 9}, reservation_key="k")
    async with rows.unchanged():
        assert await engine.reconcile_budget_counters() == CountersReconciled(processed=0, errors=0)
    await connection.execute("update budget_usage set used = 3 where budget_id = $1", low)
    await connection.execute("update budget_usage set used = 30 where budget_id = $1", high)
    await connection.execute("update budget_usage set reserved = 70 where budget_id = $1", kept)
    assert await engine.reconcile_budget_counters() == CountersReconciled(processed=2, errors=0)
    assert str(low) in caplog.text
    assert await counted(rows, low) == {"usd": (11, 0)}
    # What was reported has no ledger.
    assert await counted(rows, high) == {"usd": (30, 0)}
    assert await counted(rows, kept) == {"usd": (0, 9)}


@pytest.mark.usefixtures("altered_rows")
async def test_a_budget_that_cannot_be_corrected_is_left_alone_and_counted_as_an_error(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    first, second = sorted([await budget(engine) for _ in range(2)])
    for each in (first, second):
        await engine.record_spend(each, await given.created(), deltas={"usd": 5})
    await connection.execute(
        f"""update budget_usage set used = 1;
            create function refuse() returns trigger language plpgsql as
              $$begin raise check_violation using message = 'poisoned'; end$$;
            create trigger poison before insert on budget_usage for each row
              when (new.budget_id = '{first}') execute function refuse()"""
    )
    assert await engine.reconcile_budget_counters() == CountersReconciled(processed=1, errors=1)
    assert await counted(rows, first) == {"usd": (1, 0)}
    assert await counted(rows, second) == {"usd": (5, 0)}


async def test_the_recount_goes_through_all_budgets_page_by_page(
    engine: Engine, given: Given, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "RECOUNT_LIMIT", 2)
    execution_id = await given.created()
    for _ in range(5):
        await engine.record_spend(await budget(engine), execution_id, deltas={"usd": 5})
    await connection.execute("update budget_usage set used = 1")
    assert (await engine.reconcile_budget_counters()).processed == 5
    await connection.execute("update budget_usage set used = 1")
    reconciler = Reconciler(engine)
    await reconciler.catch_up()
    assert reconciler.stats["budget_reconciler"].processed == 5
    assert await connection.fetchval("select min(used) from budget_usage") == 5

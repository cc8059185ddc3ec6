"""The operations on budgets for the fault sweeps; the budget of a subject is its first id."""

from typing import Any

from flowfabric.model.budget import UsageDimensions

from .operation import Call, Operation, Prepare
from .preparations import claimed, nothing
from .scene import MINUTE, Subject

DEFINITION: dict[str, Any] = {
    "scope_type": "lane",
    "scope_id": "default",
    "enforcement_mode": "strict",
    "on_hard_limit": "fail",
    "on_soft_limit": "warn",
    "reset_interval_ms": 60 * MINUTE,
    "dimensions": ["usd", "calls"],
    "hard_limits": [100, 0],
    "soft_limits": [50, 10],
}


async def with_budget(subject: Subject) -> None:
    """A budget of which something is used."""
    budget_id = subject.ids[0]
    await subject.engine.create_budget(budget_id, **DEFINITION)
    await subject.engine.report_usage_admin(budget_id, dimensions=["usd"], deltas=[20])


async def running_with_budget(subject: Subject) -> None:
    """A run and a budget."""
    await claimed(subject)
    await with_budget(subject)


async def with_spend(subject: Subject) -> None:
    """A run that has spent something of a budget."""
    await running_with_budget(subject)
    await subject.engine.record_spend(subject.ids[0], subject.execution_id, deltas={"usd": 5})


async def with_reservation(subject: Subject) -> None:
    """A run that has reserved something of a budget."""
    await running_with_budget(subject)
    await subject.engine.reserve(subject.handle, subject.ids[0], amounts={"usd": 40, "calls": 1}, reservation_key="k")


def budget_operations() -> list[Operation]:
    """The operations that define, use and reserve budgets."""
    found: list[Operation] = []

    def add(name: str, prepare: Prepare, call: Call, variant: str = "", *, is_idempotent: bool = True) -> None:
        found.append(Operation(name=name, variant=variant, prepare=prepare, call=call, is_idempotent=is_idempotent))

    add("create_budget", nothing, lambda e, s: e.create_budget(s.ids[0], **DEFINITION))
    add("reset_budget", with_spend, lambda e, s: e.reset_budget(s.ids[0]), is_idempotent=False)
    add(
        "change_budget_limits",
        with_budget,
        lambda e, s: e.change_budget_limits(s.ids[0], limits={"usd": {"hard": 200}, "tokens": {"soft": 7}}),
    )
    add(
        "report_usage",
        running_with_budget,
        lambda e, s: e.report_usage(s.handle, s.ids[0], UsageDimensions(input_tokens=3, dedup_key="k")),
    )
    add(
        "report_usage_admin",
        with_budget,
        lambda e, s: e.report_usage_admin(s.ids[0], dimensions=["usd"], deltas=[3]),
        is_idempotent=False,
    )
    add(
        "report_usage_admin",
        with_budget,
        lambda e, s: e.report_usage_admin(s.ids[0], dimensions=["usd"], deltas=[81]),
        "above the limit",
        is_idempotent=False,
    )
    add(
        "record_spend",
        running_with_budget,
        lambda e, s: e.record_spend(s.ids[0], s.execution_id, deltas={"usd": 3, "calls": 20}, idempotency_key="k"),
    )
    add("release_budget", with_spend, lambda e, s: e.release_budget(s.ids[0], s.execution_id))
    add(
        "reserve",
        running_with_budget,
        lambda e, s: e.reserve(s.handle, s.ids[0], amounts={"usd": 30, "calls": 1}, reservation_key="k"),
    )
    add(
        "settle",
        with_reservation,
        lambda e, s: e.settle(s.handle, s.ids[0], reservation_key="k", amounts={"usd": 25}),
    )
    add(
        "release_reservation",
        with_reservation,
        lambda e, s: e.release_reservation(s.handle, s.ids[0], reservation_key="k"),
    )
    add("complete", with_reservation, lambda e, s: e.complete(s.handle, b"x"), "with a reservation")
    return found


def budget_reads() -> list[Operation]:
    """The operations that read budgets, and the recount, which finds nothing to correct."""
    calls: dict[str, Call] = {
        "get_budget_status": lambda e, s: e.get_budget_status(s.ids[0]),
        "read_budget_usage_and_limits": lambda e, s: e.read_budget_usage_and_limits(s.ids[0]),
        "reconcile_budget_counters": lambda e, _: e.reconcile_budget_counters(),
    }
    return [Operation(name=name, prepare=with_spend, call=call, is_read=True) for name, call in calls.items()]

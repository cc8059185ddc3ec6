"""Budgets for tests: created with defaults, and read in short forms."""

from typing import Any
from uuid import UUID, uuid4

from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.budget import BudgetCreated, HardBreach

DAY_MS = 86_400_000


def definition(**overrides: Any) -> dict[str, Any]:
    """The arguments of create_budget."""
    return {
        "scope_type": "lane",
        "scope_id": "default",
        "enforcement_mode": "strict",
        "on_hard_limit": "fail",
        "on_soft_limit": "warn",
        **overrides,
    }


async def budget(engine: Engine, *, hard: dict[str, int] | None = None, soft: int = 0, **overrides: Any) -> UUID:
    """A new budget with these hard limits; the soft limit is one for all dimensions."""
    hard = hard or {}
    lists = {"dimensions": list(hard), "hard_limits": list(hard.values()), "soft_limits": [soft] * len(hard)}
    created = await engine.create_budget(uuid4(), **definition(**lists, **overrides))
    assert isinstance(created, BudgetCreated)
    return created.budget_id


async def report(engine: Engine, budget_id: UUID, key: str | None = None, **amounts: int) -> Any:
    """Report usage of a budget."""
    return await engine.report_usage_admin(
        budget_id, dimensions=list(amounts), deltas=list(amounts.values()), dedup_key=key
    )


async def counted(rows: Rows, budget_id: UUID) -> dict[str, tuple[int, int]]:
    """What is used and reserved of a budget, by dimension."""
    return {
        row["dimension"]: (row["used"], row["reserved"]) for row in await rows.of("budget_usage", budget_id=budget_id)
    }


async def account(rows: Rows, budget_id: UUID) -> dict[str, Any]:
    """The account of a budget."""
    (row,) = await rows.of("budget_account", budget_id=budget_id)
    return row


def hard(dimension: str, current: int, limit: int) -> HardBreach:
    """The refusal of a budget of `budget`."""
    return HardBreach(dimension=dimension, current_usage=current, hard_limit=limit, on_hard_limit="fail")

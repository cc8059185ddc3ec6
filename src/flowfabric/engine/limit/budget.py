"""Budgets: creating, reading and resetting them, changing their limits, and the sweeps that reset and recount them."""

import logging
from collections.abc import Mapping, Sequence
from uuid import UUID

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import Quarantine, is_connection_fault
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.limit.account import (
    BudgetKey,
    after_change,
    budget_keys,
    check_budget_id,
    lock_account_if_exists,
)
from flowfabric.engine.store import Store
from flowfabric.model.budget import (
    MAX_TOTAL,
    BudgetAlreadySatisfied,
    BudgetCreated,
    BudgetLimit,
    BudgetLimitsChanged,
    BudgetReset,
    BudgetStatus,
    BudgetUsageAndLimits,
    CountersReconciled,
    check_definition,
    check_limits,
    pair_amounts,
    storable_limits,
)
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import format_execution_id

SQL = statements_beside(__file__)

RESET_LIMIT = 100
"""The most budgets that one batch of the sweep resets."""
RECOUNT_LIMIT = 100
"""The most budgets that one page of the recount reads."""
_FIRST = BudgetKey(-1, UUID(int=0))

logger = logging.getLogger(__name__)


class Budgets:
    """The operations on budgets, except those that count usage."""

    def __init__(self, store: Store, quarantine: Quarantine) -> None:
        self._store = store
        self._quarantine = quarantine
        self._recounted = _FIRST

    async def create_budget(
        self,
        budget_id: UUID | str,
        *,
        scope_type: str,
        scope_id: str,
        enforcement_mode: str,
        on_hard_limit: str,
        on_soft_limit: str,
        reset_interval_ms: int = 0,
        dimensions: Sequence[str] = (),
        hard_limits: Sequence[int] = (),
        soft_limits: Sequence[int] = (),
    ) -> BudgetCreated | BudgetAlreadySatisfied:
        """Define a budget, once for each id; what was counted under this id before is kept.

        A limit of 0 is no limit. With an interval its counters are set to zero again and again.
        """
        budget = check_budget_id(self._store, budget_id)
        texts = {
            "scope_type": scope_type,
            "scope_id": scope_id,
            "enforcement_mode": enforcement_mode,
            "on_hard_limit": on_hard_limit,
            "on_soft_limit": on_soft_limit,
        }
        check_definition(texts, reset_interval_ms)
        hard = pair_amounts(dimensions, hard_limits, ("dimensions", "hard_limits"))
        soft = pair_amounts(dimensions, soft_limits, ("dimensions", "soft_limits"))
        created = await self._store.fetch(
            SQL.insert_budget,
            partition_key=budget.partition_key,
            budget_id=budget.budget_id,
            **texts,
            reset_interval_ms=reset_interval_ms,
            dimensions=list(hard),
            hard_limits=storable_limits(hard.values()),
            soft_limits=storable_limits(soft.values()),
        )
        if not created:
            return BudgetAlreadySatisfied(budget_id=budget.budget_id)
        return BudgetCreated(budget_id=budget.budget_id)

    async def reset_budget(self, budget_id: UUID | str) -> BudgetReset:
        """Set the counters of a budget to zero and forget the ledgers of executions; what is reserved stays reserved.

        The breaches so far stay counted. The next scheduled reset is one interval from now.
        """
        budget = check_budget_id(self._store, budget_id)

        async def reset(transaction: Transaction) -> list[Record]:
            await lock_account_if_exists(transaction, budget)
            return await transaction.fetch(SQL.reset_accounts, **budget_keys([budget]))

        rows = await self._store.transact(reset)
        if not rows:
            raise error("budget_not_found", str(budget.budget_id))
        await after_change(self._store, [budget.budget_id])
        return BudgetReset(next_reset_at=rows[0]["next_reset_at"] or 0)

    async def change_budget_limits(
        self, budget_id: UUID | str, *, limits: Mapping[str, BudgetLimit | Mapping[str, int]]
    ) -> BudgetLimitsChanged:
        """Change the limits of dimensions of a budget; what is not given stays as it is."""
        budget = check_budget_id(self._store, budget_id)
        wanted = check_limits(limits)

        async def change(transaction: Transaction) -> BudgetLimitsChanged:
            await lock_account_if_exists(transaction, budget)
            keys = {"partition_key": budget.partition_key, "budget_id": budget.budget_id}
            rows = await transaction.fetch(SQL.list_limits, **keys, dimensions=list(wanted))
            if not rows:
                raise error("budget_not_found", str(budget.budget_id))
            stored = {row["dimension"]: BudgetLimit(hard=row["hard_limit"], soft=row["soft_limit"]) for row in rows}
            changed = _changed(stored, wanted)
            if changed.current:
                await transaction.fetch(
                    SQL.set_limits,
                    **keys,
                    dimensions=list(changed.current),
                    hard_limits=[limit.hard for limit in changed.current.values()],
                    soft_limits=[limit.soft for limit in changed.current.values()],
                )
            return changed

        changed = await self._store.transact(change)
        if changed.current:
            await after_change(self._store, [budget.budget_id])
        return changed

    async def get_budget_status(self, budget_id: UUID | str) -> BudgetStatus:
        """A budget with its limits and counters."""
        budget = check_budget_id(self._store, budget_id)
        rows = await self._store.fetch(SQL.read_budget, partition_key=budget.partition_key, budget_id=budget.budget_id)
        if not rows:
            raise error("budget_not_found", str(budget.budget_id))
        fields = dict(rows[0])
        del fields["partition_key"]
        limits, counters = _pairs(fields.pop("limits")), _pairs(fields.pop("counters"))
        return BudgetStatus(
            **fields,
            hard_limits={name: hard for name, (hard, _) in limits.items()},
            soft_limits={name: soft for name, (_, soft) in limits.items()},
            usage={name: used for name, (used, _) in counters.items()},
            reserved={name: reserved for name, (_, reserved) in counters.items() if reserved},
        )

    async def read_budget_usage_and_limits(self, budget_id: UUID | str) -> BudgetUsageAndLimits:
        """The limits and the usage of a budget, as admission reads them; both are empty if it is unknown."""
        budget = check_budget_id(self._store, budget_id)
        rows = await self._store.fetch(
            SQL.list_limits_and_usage, partition_key=budget.partition_key, budget_id=budget.budget_id
        )
        limits: dict[str, str] = {}
        for row in rows:
            if row["hard_limit"] is not None:
                limits[f"hard:{row['dimension']}"] = str(row["hard_limit"])
                limits[f"soft:{row['dimension']}"] = str(row["soft_limit"])
        return BudgetUsageAndLimits(
            limits=limits, usage={row["dimension"]: row["used"] for row in rows if row["used"] is not None}
        )

    async def reconcile_budget_counters(self) -> CountersReconciled:
        """Look at the counters of all budgets and correct wrong ones: lower than their ledgers, or reserved by nobody.

        One that cannot be read or written is left as it is and counted as an error.
        """
        corrected, errors, after = 0, 0, _FIRST
        while True:
            page, wrong = await self._list_counted(after)
            done, failed = await self._correct_each(wrong)
            corrected, errors = corrected + done, errors + failed
            if len(page) < RECOUNT_LIMIT:
                return CountersReconciled(processed=corrected, errors=errors)
            after = page[-1]

    async def recount_next(self) -> SweepResult:
        """Correct the counters of the next page of budgets; the pages of all budgets follow each other."""
        page, wrong = await self._list_counted(self._recounted)
        corrected, _ = await self._correct_each(wrong)
        is_full = len(page) == RECOUNT_LIMIT
        self._recounted = page[-1] if is_full else _FIRST
        return SweepResult(corrected, is_full=is_full)

    async def reset_due(self) -> int:
        """Reset a batch of budgets whose next reset is due; those locked elsewhere are left for the next batch."""
        try:
            reset = await self._reset_due(self._quarantine.skipped(), limit=RESET_LIMIT)
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
            return await self._reset_one_by_one()
        await after_change(self._store, [budget.budget_id for budget in reset])
        return len(reset)

    async def _reset_one_by_one(self) -> int:
        done = 0
        for _ in range(RESET_LIMIT):
            found: list[BudgetKey] = []
            try:
                reset = await self._reset_due(self._quarantine.skipped(), limit=1, found=found)
            except EngineError as fault:
                if is_connection_fault(fault) or not found:
                    raise
                self._quarantine.failed(format_execution_id(*found[0]), fault)
                continue
            if not reset:
                break
            await after_change(self._store, [budget.budget_id for budget in reset])
            done += 1
        return done

    async def _reset_due(
        self, skipped: Sequence[UUID], *, limit: int, found: list[BudgetKey] | None = None
    ) -> list[BudgetKey]:
        async def reset(transaction: Transaction) -> list[BudgetKey]:
            rows = await transaction.fetch(SQL.lock_due_accounts, skipped=skipped, limit=limit)
            due = [BudgetKey(row["partition_key"], row["budget_id"]) for row in rows]
            if found is not None:
                found[:] = due
            if due:
                await transaction.fetch(SQL.reset_accounts, **budget_keys(due))
            return due

        return await self._store.transact(reset)

    async def _list_counted(self, after: BudgetKey) -> tuple[list[BudgetKey], list[BudgetKey]]:
        rows = await self._store.fetch(
            SQL.list_counted,
            after_partition=after.partition_key,
            after_budget=after.budget_id,
            limit=RECOUNT_LIMIT,
            max_total=MAX_TOTAL,
        )
        page = [BudgetKey(row["partition_key"], row["budget_id"]) for row in rows]
        return page, [budget for budget, row in zip(page, rows, strict=True) if row["is_wrong"]]

    async def _correct_each(self, budgets: Sequence[BudgetKey]) -> tuple[int, int]:
        """Correct the counters of budgets; return how many were wrong, and how many could not be corrected."""
        corrected = errors = 0
        for budget in budgets:
            try:
                corrected += await self._correct(budget)
            except EngineError as fault:
                if is_connection_fault(fault):
                    raise
                errors += 1
                logger.warning("the counters of budget %s could not be corrected: %s", budget.budget_id, fault)
        return corrected, errors

    async def _correct(self, budget: BudgetKey) -> bool:
        async def correct(transaction: Transaction) -> list[Record]:
            await lock_account_if_exists(transaction, budget)
            return await transaction.fetch(
                SQL.correct_counters,
                partition_key=budget.partition_key,
                budget_id=budget.budget_id,
                max_total=MAX_TOTAL,
            )

        rows = await self._store.transact(correct)
        for row in rows:
            logger.warning(
                "corrected %r of budget %s: used %d instead of %d, reserved %d instead of %d",
                row["dimension"],
                budget.budget_id,
                row["now_used"],
                row["used"],
                row["now_reserved"],
                row["reserved"],
            )
        return bool(rows)


def _changed(stored: Mapping[str | None, BudgetLimit], wanted: Mapping[str, BudgetLimit]) -> BudgetLimitsChanged:
    previous: dict[str, BudgetLimit] = {}
    current: dict[str, BudgetLimit] = {}
    for dimension, limit in wanted.items():
        old = stored.get(dimension, BudgetLimit(hard=0, soft=0))
        hard = old.hard if limit.hard is None else min(limit.hard, MAX_TOTAL)
        soft = old.soft if limit.soft is None else min(limit.soft, MAX_TOTAL)
        new = BudgetLimit(hard=hard, soft=soft)
        if new != old:
            previous[dimension], current[dimension] = old, new
    return BudgetLimitsChanged(previous=previous, current=current)


def _pairs(text: str | None) -> dict[str, tuple[int, int]]:
    return {} if text is None else msgspec.json.decode(text, type=dict[str, tuple[int, int]])

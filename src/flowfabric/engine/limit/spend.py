"""Usage of budgets: reported, booked to the ledger of an execution, settled, and released."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.limit.account import (
    BudgetKey,
    CallKey,
    ExecutionKey,
    after_change,
    check_budget_id,
    execution_key,
    lock_account_if_exists,
)
from flowfabric.engine.limit.booking import Bookings, Report
from flowfabric.engine.store import Store
from flowfabric.model.budget import (
    HardBreach,
    Ok,
    SoftBreach,
    UsageDimensions,
    UsageOutcome,
    check_amounts,
    check_key,
    pair_amounts,
)
from flowfabric.model.edge import AlreadyApplied
from flowfabric.model.errors import error
from flowfabric.model.handle import Handle, check_handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.text import shown

SQL = statements_beside(__file__)


class Spending:
    """The operations that count usage."""

    def __init__(self, store: Store, bookings: Bookings) -> None:
        self._store = store
        self._bookings = bookings

    async def report_usage(self, handle: Handle, budget_id: UUID | str, dimensions: UsageDimensions) -> UsageOutcome:
        """Count what a run has used of a budget, in every dimension or in none; the lease need not be valid."""
        check_handle(handle)
        if not isinstance(dimensions, UsageDimensions):
            raise error("invalid_input", f"dimensions: expected UsageDimensions(...), got {shown(dimensions)}")
        budget = check_budget_id(self._store, budget_id)
        return await self._report(budget, dimensions.deltas, check_key(dimensions.dedup_key, "dedup_key"))

    async def report_usage_admin(
        self,
        budget_id: UUID | str,
        *,
        dimensions: Sequence[str],
        deltas: Sequence[int],
        dedup_key: str | None = None,
    ) -> UsageOutcome:
        """Count usage of a budget on behalf of somebody else; the dimensions and their amounts are two lists."""
        budget = check_budget_id(self._store, budget_id)
        amounts = pair_amounts(dimensions, deltas, ("dimensions", "deltas"))
        return await self._report(budget, amounts, check_key(dedup_key, "dedup_key"))

    async def record_spend(
        self,
        budget_id: UUID | str,
        execution_id: ExecutionId | str,
        *,
        deltas: Mapping[str, int],
        idempotency_key: str = "",
    ) -> UsageOutcome:
        """Count what an execution has spent, so that `release_budget` can take it back; it need not exist any more."""
        budget = check_budget_id(self._store, budget_id)
        execution = execution_key(execution_id)
        amounts = check_amounts(deltas, "deltas", is_empty_allowed=True)
        return await self._report(budget, amounts, check_key(idempotency_key, "idempotency_key"), execution)

    async def release_budget(self, budget_id: UUID | str, execution_id: ExecutionId | str) -> None:
        """Take back what an execution has spent according to its ledger; nothing happens if it has none."""
        budget = check_budget_id(self._store, budget_id)
        execution = execution_key(execution_id)

        async def release(transaction: Transaction) -> list[Record]:
            if not await lock_account_if_exists(transaction, budget):
                return []
            return await transaction.fetch(
                SQL.take_spend,
                partition_key=budget.partition_key,
                budget_id=budget.budget_id,
                execution_partition=execution.partition_key,
                execution_id=execution.execution_id,
            )

        if await self._store.transact(release):
            await after_change(self._store, [budget.budget_id])

    async def _report(
        self, budget: BudgetKey, amounts: Mapping[str, int], key: str, execution: ExecutionKey | None = None
    ) -> UsageOutcome:
        call_key = CallKey.of_report(budget, key) if key else None
        report = Report(budget=budget, amounts=amounts, key=call_key, execution=execution)
        answer = await self._bookings.book(report)
        assert isinstance(answer, Ok | SoftBreach | HardBreach | AlreadyApplied)
        return answer

"""Usage of budgets: reported, booked to the ledger of an execution, settled, and released."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias
from uuid import UUID

from flowfabric.db.batch import Batch
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import full_columns, statements_beside
from flowfabric.engine.limit.account import (
    Accounts,
    BudgetKey,
    CallKey,
    ExecutionKey,
    Reservation,
    after_change,
    check_budget_id,
    lock_account_if_exists,
    lock_accounts,
    read_accounts,
)
from flowfabric.engine.store import Store
from flowfabric.model.budget import (
    AlreadySettled,
    HardBreach,
    Ok,
    Settled,
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
from flowfabric.model.ids import ExecutionId, parse_execution_id, row_key
from flowfabric.model.text import shown

SQL = statements_beside(__file__)

Booked: TypeAlias = Ok | SoftBreach | HardBreach | AlreadyApplied | Settled | AlreadySettled


@dataclass(kw_only=True, slots=True)
class Booking:
    """What one call counts; with a reservation it is a settlement, which no limit refuses."""

    budget: BudgetKey
    amounts: Mapping[str, int]
    key: CallKey | None = None
    execution: ExecutionKey | None = None
    """Whose ledger it is added to."""
    reservation: Reservation | None = None
    reserved: dict[str, int] = field(default_factory=dict)
    """What was reserved for it, read in the transaction."""


def execution_key(execution_id: ExecutionId | str) -> ExecutionKey:
    """Return the key of an execution whose id a caller gave; its row need not exist."""
    partition, uuid = row_key(parse_execution_id(execution_id))
    return ExecutionKey(partition, UUID(uuid))


class Spending:
    """The operations that count usage.

    Concurrent calls of the process share transactions, also those about one budget: each is judged by the counters
    that the calls before it have left.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch: Batch[Booking, Booked] = Batch(self._book_together, self._book_alone, keys=lambda _: ())

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

    async def book(self, booking: Booking) -> Booked:
        """Count what was spent; concurrent callers share a transaction."""
        return await self._store.answer(self._batch.put(booking))

    async def drain(self) -> None:
        """Wait until every call in progress is answered."""
        await self._batch.drain()

    async def _report(
        self, budget: BudgetKey, amounts: Mapping[str, int], key: str, execution: ExecutionKey | None = None
    ) -> UsageOutcome:
        call_key = CallKey.of_report(budget, key) if key else None
        answer = await self.book(Booking(budget=budget, amounts=amounts, key=call_key, execution=execution))
        assert not isinstance(answer, Settled | AlreadySettled)
        return answer

    async def _book_together(self, bookings: Sequence[Booking]) -> list[Booked]:
        answers, freed = await self._store.database.transact(partial(_book, bookings, waits_briefly=True))
        await after_change(self._store, freed)
        return answers

    async def _book_alone(self, booking: Booking) -> Booked:
        answers, freed = await self._store.transact(partial(_book, [booking], waits_briefly=False))
        await after_change(self._store, freed)
        return answers[0]


async def _book(
    bookings: Sequence[Booking], transaction: Transaction, *, waits_briefly: bool
) -> tuple[list[Booked], list[UUID]]:
    """Book in one transaction; return the answers, and the budgets of which something is left again."""
    await lock_accounts(transaction, (booking.budget for booking in bookings), waits_briefly=waits_briefly)
    await read_reserved(transaction, bookings)
    accounts = await read_accounts(
        transaction,
        ((booking.budget, name) for booking in bookings for name in (*booking.amounts, *booking.reserved)),
        list({booking.key: None for booking in bookings if booking.key is not None}),
    )
    answers = [_judge(accounts, booking) for booking in bookings]
    await accounts.write(transaction)
    return answers, accounts.freed


async def read_reserved(transaction: Transaction, bookings: Iterable[Booking]) -> None:
    """Read what was reserved for settlements; the transaction has locked the accounts."""
    settling = [(booking, booking.reservation) for booking in bookings if booking.reservation is not None]
    if not settling:
        return
    names = ("partition_keys", "execution_ids", "budget_ids", "reservation_keys", "lease_epochs")
    keys = [(*of.execution, of.budget.budget_id, of.reservation_key, of.lease_epoch) for _, of in settling]
    # A transaction that is repeated reads them again.
    for booking, _ in settling:
        booking.reserved = {}
    for row in await transaction.fetch(SQL.list_reservations, **full_columns(names, keys)):
        settling[row["nth"] - 1][0].reserved[row["dimension"]] = row["amount"]


def _judge(accounts: Accounts, booking: Booking) -> Booked:
    answer: Booked
    if booking.key is not None and booking.key in accounts.used_keys:
        return AlreadyApplied() if booking.reservation is None else AlreadySettled()
    account = accounts.account(booking.budget)
    if booking.reservation is None:
        answer = account.report(booking.amounts)
        if isinstance(answer, HardBreach):
            return answer
    else:
        answer = account.settle(booking.amounts, booking.reserved)
        accounts.settled.append(booking.reservation)
    if booking.execution is not None:
        accounts.spend(booking.budget, booking.execution, booking.amounts)
    if booking.key is not None:
        accounts.use_key(booking.key, booking.execution or booking.budget)
    return answer

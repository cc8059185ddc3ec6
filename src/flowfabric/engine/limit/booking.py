"""What calls count on budgets and reserve of them: concurrent calls of the process share a transaction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from uuid import UUID

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Transaction
from flowfabric.engine.core.row import check_fence, lock_execution, lock_executions
from flowfabric.engine.limit.account import (
    Accounts,
    BudgetKey,
    CallKey,
    ExecutionKey,
    Reservation,
    after_change,
    lock_accounts,
    read_accounts,
)
from flowfabric.engine.store import Store
from flowfabric.model.budget import AlreadyReserved, AlreadySettled, HardBreach, Ok, Reserved, Settled, SoftBreach
from flowfabric.model.edge import AlreadyApplied
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle

Booked: TypeAlias = (
    Ok | SoftBreach | HardBreach | AlreadyApplied | Reserved | AlreadyReserved | Settled | AlreadySettled
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Usage to count, also in the ledger of an execution if there is one."""

    budget: BudgetKey
    amounts: Mapping[str, int]
    key: CallKey | None = None
    execution: ExecutionKey | None = None

    def judge(self, accounts: Accounts) -> Booked:
        """Count it within the limits, once."""
        if self.key in accounts.used_keys:
            return AlreadyApplied()
        answer = accounts.account(self.budget).report(self.amounts)
        if not isinstance(answer, HardBreach):
            if self.execution is not None:
                accounts.spend(self.budget, self.execution, self.amounts)
            if self.key is not None:
                accounts.use_key(self.key, self.execution or self.budget)
        return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfReservation:
    reservation: Reservation
    amounts: Mapping[str, int]

    @property
    def budget(self) -> BudgetKey:
        """The budget."""
        return self.reservation.budget

    @property
    def key(self) -> CallKey:
        """The key of the settlement."""
        return self.reservation.call_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve(_OfReservation):
    """Amounts to reserve under the lease of a handle."""

    handle: Handle

    def judge(self, accounts: Accounts) -> Booked:
        """Reserve it within the limits, once."""
        if self.reservation in accounts.reserved:
            return AlreadyReserved()
        if self.key in accounts.used_keys:
            return AlreadySettled()
        return accounts.reserve(self.reservation, self.amounts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement(_OfReservation):
    """What was spent of a reservation."""

    def judge(self, accounts: Accounts) -> Booked:
        """Count it whatever the limits are, once, and return what was reserved."""
        if self.key in accounts.used_keys:
            return AlreadySettled()
        answer = accounts.account(self.budget).settle(self.amounts, accounts.take(self.reservation))
        accounts.spend(self.budget, self.reservation.execution, self.amounts)
        accounts.use_key(self.key, self.reservation.execution)
        return answer


Booking: TypeAlias = Report | Reserve | Settlement


class Bookings:
    """Books concurrent calls together, each judged by the counters that those before it have left."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch: Batch[Booking, Booked] = Batch(self._book_together, self._book_alone, keys=lambda _: ())

    async def book(self, booking: Booking) -> Booked:
        """Carry out one call; concurrent callers share a transaction."""
        return await self._store.answer(self._batch.put(booking))

    async def drain(self) -> None:
        """Wait until every call in progress is answered."""
        await self._batch.drain()

    async def _book_together(self, bookings: Sequence[Booking]) -> Sequence[Booked | Locked | Exception]:
        answers, freed = await self._store.database.transact(partial(_book_together, bookings))
        await after_change(self._store, freed)
        return answers

    async def _book_alone(self, booking: Booking) -> Booked:
        execution_id = booking.handle.execution_id if isinstance(booking, Reserve) else None
        answer, freed = await self._store.transact(partial(_book_alone, booking), execution_id=execution_id)
        await after_change(self._store, freed)
        return answer


async def _book_together(
    bookings: Sequence[Booking], transaction: Transaction
) -> tuple[list[Booked | Locked | Exception], list[UUID]]:
    """Book calls whose executions are not locked elsewhere; return also the budgets of which something is left."""
    refusals = await _check_fences(transaction, bookings)
    booked, freed = await _book(
        [each for at, each in enumerate(bookings) if at not in refusals], transaction, waits_briefly=True
    )
    answers = iter(booked)
    return [refusals[at] if at in refusals else next(answers) for at in range(len(bookings))], freed


async def _check_fences(transaction: Transaction, bookings: Sequence[Booking]) -> dict[int, Locked | EngineError]:
    """Lock the executions whose runs reserve something; return the positions of refused calls, and why."""
    reserving = [(at, each) for at, each in enumerate(bookings) if isinstance(each, Reserve)]
    if not reserving:
        return {}
    execution_ids = sorted({each.handle.execution_id for _, each in reserving})
    _, rows = await lock_executions(transaction, execution_ids, waits=False)
    locked = dict(zip(execution_ids, rows, strict=True))
    refusals: dict[int, Locked | EngineError] = {}
    for at, each in reserving:
        row = locked[each.handle.execution_id]
        try:
            if row is None:
                refusals[at] = LOCKED
            else:
                check_fence(row, each.handle)
        except EngineError as refusal:
            refusals[at] = refusal
    return refusals


async def _book_alone(booking: Booking, transaction: Transaction) -> tuple[Booked, list[UUID]]:
    if isinstance(booking, Reserve):
        check_fence(await lock_execution(transaction, booking.handle.execution_id), booking.handle)
    (answer,), freed = await _book([booking], transaction)
    return answer, freed


async def _book(
    bookings: Sequence[Booking], transaction: Transaction, *, waits_briefly: bool = False
) -> tuple[list[Booked], list[UUID]]:
    if not bookings:
        return [], []
    await lock_accounts(transaction, (each.budget for each in bookings), waits_briefly=waits_briefly)
    accounts = await read_accounts(
        transaction,
        ((each.budget, name) for each in bookings for name in each.amounts),
        keys=list({each.key: None for each in bookings if each.key is not None}),
        reservations=list({each.reservation: None for each in bookings if not isinstance(each, Report)}),
    )
    answers = [each.judge(accounts) for each in bookings]
    await accounts.write(transaction)
    return answers, accounts.freed

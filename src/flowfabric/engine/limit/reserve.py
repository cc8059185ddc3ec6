"""Reservations: what a run sets aside of a budget before it spends it, until it settles or its lease ends."""

from collections.abc import Mapping, Sequence
from functools import partial
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.db.statements import full_columns, statements_beside
from flowfabric.engine.core.consequence import EndedLease
from flowfabric.engine.core.row import check_fence, check_lease_handle, lock_execution
from flowfabric.engine.limit.account import (
    Reservation,
    after_change,
    check_budget_id,
    lock_account_if_exists,
    lock_accounts,
    read_accounts,
)
from flowfabric.engine.limit.spend import Booking, Spending, execution_key, read_reserved
from flowfabric.engine.store import Store
from flowfabric.model.budget import (
    MAX_TOTAL,
    AlreadyReserved,
    AlreadySettled,
    HardBreach,
    Reserved,
    Settled,
    check_amounts,
)
from flowfabric.model.handle import Handle, check_handle
from flowfabric.model.ids import split_execution_id
from flowfabric.model.text import check_short

SQL = statements_beside(__file__)


class Reservations:
    """The operations on reservations."""

    def __init__(self, store: Store, spending: Spending) -> None:
        self._store = store
        self._spending = spending

    async def reserve(
        self, handle: Handle, budget_id: UUID | str, *, amounts: Mapping[str, int], reservation_key: str
    ) -> Reserved | AlreadyReserved | AlreadySettled | HardBreach:
        """Set amounts of a budget aside for a run, in every dimension or in none, until it settles or its lease ends.

        The key names the reservation within the lease: a repeated call reserves nothing more.
        """
        check_lease_handle(handle)
        reservation = self._reservation(handle, budget_id, reservation_key)
        wanted = check_amounts(amounts, "amounts", least=1, most=MAX_TOTAL)
        work = partial(self._reserve, handle, reservation, wanted)
        return await self._store.transact(work, execution_id=handle.execution_id)

    async def settle(
        self, handle: Handle, budget_id: UUID | str, *, reservation_key: str, amounts: Mapping[str, int]
    ) -> Settled | AlreadySettled:
        """Book what was really spent, also to the ledger of the execution, and return the whole reservation.

        It was spent, so it is booked even if it is above a hard limit or above what was reserved, and after the end of
        the lease, which has returned the reservation. The key lets a repeated call of the same lease book it once.
        """
        check_handle(handle)
        reservation = self._reservation(handle, budget_id, reservation_key)
        booking = Booking(
            budget=reservation.budget,
            amounts=check_amounts(amounts, "amounts", is_empty_allowed=True),
            key=reservation.call_key,
            execution=reservation.execution,
            reservation=reservation,
        )
        answer = await self._spending.book(booking)
        assert isinstance(answer, Settled | AlreadySettled)
        return answer

    async def release_reservation(self, handle: Handle, budget_id: UUID | str, *, reservation_key: str) -> None:
        """Return what a run has reserved under a key and will not spend; nothing happens if there is nothing."""
        check_handle(handle)
        reservation = self._reservation(handle, budget_id, reservation_key)
        work = partial(self._release, reservation)
        await after_change(self._store, await self._store.transact(work))

    async def return_reservations(self, transaction: Transaction, ended: Sequence[EndedLease]) -> None:
        """Return everything that runs have reserved whose leases the transaction has just ended."""
        keys = full_columns(
            ("partition_keys", "execution_ids"), [split_execution_id(each.execution_id) for each in ended]
        )
        if await transaction.fetch(SQL.lock_reserved_accounts, **keys):
            for row in await transaction.fetch(SQL.take_reservations, **keys):
                transaction.on_commit(partial(self._store.wakeups.lane, row["lane_id"]))

    def _reservation(self, handle: Handle, budget_id: UUID | str, reservation_key: str) -> Reservation:
        return Reservation(
            budget=check_budget_id(self._store, budget_id),
            execution=execution_key(handle.execution_id),
            lease_epoch=handle.lease_epoch,
            reservation_key=check_short(reservation_key, "reservation_key"),
        )

    @staticmethod
    async def _reserve(
        handle: Handle, reservation: Reservation, wanted: Mapping[str, int], transaction: Transaction
    ) -> Reserved | AlreadyReserved | AlreadySettled | HardBreach:
        check_fence(await lock_execution(transaction, handle.execution_id), handle)
        budget = reservation.budget
        await lock_accounts(transaction, [budget])
        if await _read(transaction, reservation):
            return AlreadyReserved()
        accounts = await read_accounts(transaction, ((budget, name) for name in wanted), [reservation.call_key])
        if accounts.used_keys:
            return AlreadySettled()
        answer = accounts.account(budget).reserve(wanted)
        await accounts.write(transaction)
        if isinstance(answer, Reserved):
            await transaction.fetch(
                SQL.insert_reservation,
                partition_key=reservation.execution.partition_key,
                execution_id=reservation.execution.execution_id,
                budget_partition=budget.partition_key,
                budget_id=budget.budget_id,
                reservation_key=reservation.reservation_key,
                lease_epoch=reservation.lease_epoch,
                dimensions=list(wanted),
                amounts=list(wanted.values()),
            )
        return answer

    @staticmethod
    async def _release(reservation: Reservation, transaction: Transaction) -> list[UUID]:
        budget = reservation.budget
        if not await lock_account_if_exists(transaction, budget):
            return []
        reserved = await _read(transaction, reservation)
        if not reserved:
            return []
        accounts = await read_accounts(transaction, ((budget, name) for name in reserved))
        accounts.account(budget).release(reserved)
        accounts.settled.append(reservation)
        await accounts.write(transaction)
        return accounts.freed


async def _read(transaction: Transaction, reservation: Reservation) -> Mapping[str, int]:
    booking = Booking(budget=reservation.budget, amounts={}, reservation=reservation)
    await read_reserved(transaction, [booking])
    return booking.reserved

"""Reservations: what a run sets aside of a budget before it spends it, until it settles or its lease ends."""

from collections.abc import Mapping, Sequence
from functools import partial
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.db.statements import full_columns, statements_beside
from flowfabric.engine.core.consequence import EndedLease
from flowfabric.engine.core.row import check_lease_handle
from flowfabric.engine.limit.account import (
    Reservation,
    after_change,
    check_budget_id,
    execution_key,
    lock_account_if_exists,
    read_accounts,
)
from flowfabric.engine.limit.booking import Bookings, Reserve, Settlement
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

    def __init__(self, store: Store, bookings: Bookings) -> None:
        self._store = store
        self._bookings = bookings

    async def reserve(
        self, handle: Handle, budget_id: UUID | str, *, amounts: Mapping[str, int], reservation_key: str
    ) -> Reserved | AlreadyReserved | AlreadySettled | HardBreach:
        """Set amounts of a budget aside for a run, in every dimension or in none, until it settles or its lease ends.

        The key names the reservation within the lease: a repeated call reserves nothing more.
        """
        check_lease_handle(handle)
        reservation = self._reservation(handle, budget_id, reservation_key)
        wanted = check_amounts(amounts, "amounts", least=1, most=MAX_TOTAL)
        answer = await self._bookings.book(Reserve(handle=handle, reservation=reservation, amounts=wanted))
        assert isinstance(answer, Reserved | AlreadyReserved | AlreadySettled | HardBreach)
        return answer

    async def settle(
        self, handle: Handle, budget_id: UUID | str, *, reservation_key: str, amounts: Mapping[str, int]
    ) -> Settled | AlreadySettled:
        """Book what was really spent, also to the ledger of the execution, and return the whole reservation.

        It was spent, so it is booked even if it is above a hard limit or above what was reserved, and after the end of
        the lease, which has returned the reservation. The key lets a repeated call of the same lease book it once.
        """
        check_handle(handle)
        reservation = self._reservation(handle, budget_id, reservation_key)
        costs = check_amounts(amounts, "amounts", is_empty_allowed=True)
        answer = await self._bookings.book(Settlement(reservation=reservation, amounts=costs))
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
    async def _release(reservation: Reservation, transaction: Transaction) -> list[UUID]:
        if not await lock_account_if_exists(transaction, reservation.budget):
            return []
        accounts = await read_accounts(transaction, (), reservations=[reservation])
        if reservation not in accounts.reserved:
            return []
        accounts.account(reservation.budget).release(accounts.take(reservation))
        await accounts.write(transaction)
        return accounts.freed

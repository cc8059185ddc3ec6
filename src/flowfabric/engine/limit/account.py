"""The accounts of budgets: locked in one order, read, and written in one statement each."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.db.statements import full_columns, statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.budget import KEY_TTL_MS, MAX_TOTAL, Account, Counter, HardBreach, Reserved
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import BudgetId, ExecutionId, budget_partition, parse_execution_id, parse_uuid, row_key

SQL = statements_beside(__file__)


class BudgetKey(NamedTuple):
    """The partition and the id of a budget; accounts are locked in this order."""

    partition_key: int
    budget_id: UUID


class ExecutionKey(NamedTuple):
    """The partition and the UUID of an execution."""

    partition_key: int
    execution_id: UUID


class CallKey(NamedTuple):
    """The key by which a call is carried out once."""

    partition_key: int
    operation: str
    scope: UUID
    key: str

    @classmethod
    def of_report(cls, budget: BudgetKey, key: str) -> "CallKey":
        """The key of a report of usage."""
        return cls(budget.partition_key, "spend", budget.budget_id, key)


class Reservation(NamedTuple):
    """What a lease has reserved of a budget under one key."""

    budget: BudgetKey
    execution: ExecutionKey
    lease_epoch: int
    reservation_key: str

    @property
    def call_key(self) -> CallKey:
        """The key of its settlement: each lease settles its own reservations."""
        text = f"{self.execution.execution_id}:{self.lease_epoch}:{self.reservation_key}"
        return CallKey(self.budget.partition_key, "settle", self.budget.budget_id, text)


def check_budget_id(store: Store, value: object) -> BudgetKey:
    """Return the key of a budget whose id a caller gave."""
    budget_id = BudgetId(parse_uuid(value, "budget_id"))
    return BudgetKey(budget_partition(budget_id, store.rules.partitions.budget), budget_id)


def execution_key(execution_id: ExecutionId | str) -> ExecutionKey:
    """Return the key of an execution whose id a caller gave; its row need not exist."""
    partition, uuid = row_key(parse_execution_id(execution_id))
    return ExecutionKey(partition, UUID(uuid))


def budget_keys(budgets: Iterable[BudgetKey]) -> dict[str, object]:
    """The keys of budgets as parameters of a statement."""
    return dict(full_columns(("partition_keys", "budget_ids"), list(budgets)))


@dataclass(slots=True)
class Accounts:
    """The locked accounts of budgets in one transaction, and what is to be written to them."""

    of: dict[BudgetKey, Account]
    used_keys: set[CallKey]
    new_keys: dict[CallKey, ExecutionKey | BudgetKey] = field(default_factory=dict)
    spent: dict[tuple[BudgetKey, ExecutionKey, str], int] = field(default_factory=dict)
    reserved: dict[Reservation, Mapping[str, int]] = field(default_factory=dict)
    """What is reserved under the keys that the calls name."""
    settled: list[Reservation] = field(default_factory=list)
    new: dict[Reservation, Mapping[str, int]] = field(default_factory=dict)

    def account(self, budget: BudgetKey) -> Account:
        """The account of a budget; empty if no dimension of it was read."""
        return self.of.setdefault(budget, Account())

    def spend(self, budget: BudgetKey, execution: ExecutionKey, amounts: Mapping[str, int]) -> None:
        """Add to the ledger of an execution."""
        for dimension, amount in amounts.items():
            if amount:
                row = budget, execution, dimension
                self.spent[row] = min(self.spent.get(row, 0) + amount, MAX_TOTAL)

    def use_key(self, key: CallKey, subject: ExecutionKey | BudgetKey) -> None:
        """Remember the key of a call."""
        self.used_keys.add(key)
        self.new_keys[key] = subject

    def reserve(self, reservation: Reservation, amounts: Mapping[str, int]) -> Reserved | HardBreach:
        """Reserve amounts of a budget, or nothing."""
        answer = self.account(reservation.budget).reserve(amounts)
        if isinstance(answer, Reserved):
            self.reserved[reservation] = self.new[reservation] = amounts
        return answer

    def take(self, reservation: Reservation) -> Mapping[str, int]:
        """Delete a reservation; return what it has reserved."""
        if self.new.pop(reservation, None) is None:
            self.settled.append(reservation)
        return self.reserved.pop(reservation, {})

    @property
    def freed(self) -> list[UUID]:
        """The budgets of which something is left again."""
        return [budget.budget_id for budget, account in self.of.items() if account.is_freed]

    async def write(self, transaction: Transaction) -> None:
        """Store what has changed."""
        counters = [
            (*budget, dimension, account.counters[dimension].used, account.counters[dimension].reserved)
            for budget, account in self.of.items()
            for dimension in sorted(account.changed)
        ]
        breaches = [
            (*budget, account.breach_count, account.soft_breach_count, account.breach)
            for budget, account in self.of.items()
            if account.breach_count or account.soft_breach_count
        ]
        if not (counters or breaches or self.new_keys):
            return
        spent = [(*budget, *execution, name, amount) for (budget, execution, name), amount in self.spent.items()]
        settled = [
            (*each.execution, each.budget.budget_id, each.reservation_key, each.lease_epoch) for each in self.settled
        ]
        new = [
            (*each.execution, *each.budget, each.reservation_key, each.lease_epoch, name, amount)
            for each, amounts in self.new.items()
            for name, amount in amounts.items()
        ]
        await transaction.fetch(
            SQL.write_counters,
            **full_columns(("partition_keys", "budget_ids", "dimensions", "used", "reserved"), counters),
            **full_columns(_SPENT, spent),
            **full_columns(_KEYS, list(self.new_keys)),
            **full_columns(("subject_partitions", "subject_ids"), list(self.new_keys.values())),
            **full_columns(_SETTLED, settled),
            **full_columns(_NEW, new),
            **full_columns(("breach_partitions", "breach_budgets", "breaches", "soft_breaches", "breached"), breaches),
            max_total=MAX_TOTAL,
            key_ttl_ms=KEY_TTL_MS,
        )


_KEYS = ("key_partitions", "operations", "scopes", "keys")
_SETTLED = ("settled_partitions", "settled_executions", "settled_budgets", "settled_keys", "settled_epochs")
_NEW = (
    "new_partitions",
    "new_executions",
    "new_budget_partitions",
    "new_budgets",
    "new_keys",
    "new_epochs",
    "new_dimensions",
    "new_amounts",
)
_SPENT = (
    "spend_partitions",
    "spend_budgets",
    "spend_execution_partitions",
    "spend_executions",
    "spend_dimensions",
    "spend_amounts",
)


async def lock_accounts(transaction: Transaction, budgets: Iterable[BudgetKey], *, waits_briefly: bool = False) -> None:
    """Lock the accounts of budgets in order until the transaction ends, waiting for each; the first use creates one."""
    keys = budget_keys(ordered := sorted(set(budgets)))
    if len(await transaction.fetch(SQL.lock_accounts, **keys, waits_briefly=waits_briefly)) < len(ordered):
        await transaction.fetch(SQL.insert_accounts, **keys)
        await transaction.fetch(SQL.lock_accounts, **keys, waits_briefly=waits_briefly)


async def lock_account_if_exists(transaction: Transaction, budget: BudgetKey) -> bool:
    """Lock the account of a budget, waiting for it; return False if nothing was ever counted or defined."""
    return bool(await transaction.fetch(SQL.lock_accounts, **budget_keys([budget]), waits_briefly=False))


async def read_accounts(
    transaction: Transaction,
    dimensions: Iterable[tuple[BudgetKey, str]],
    *,
    keys: Sequence[CallKey] = (),
    reservations: Sequence[Reservation] = (),
) -> Accounts:
    """Read dimensions of budgets whose accounts the transaction has locked, with those of the reservations.

    Of the keys of calls, it reads which were used before.
    """
    reserved = await _read_reservations(transaction, reservations)
    wanted = sorted({*dimensions, *((each.budget, name) for each, amounts in reserved.items() for name in amounts)})
    rows = await transaction.fetch(
        SQL.read_counters,
        **full_columns(("partition_keys", "budget_ids", "dimensions"), [(*budget, name) for budget, name in wanted]),
        **full_columns(_KEYS, keys),
    )
    key_of = {budget.budget_id: budget for budget, _ in wanted}
    found = Accounts(of={}, used_keys=set(), reserved=reserved)
    for row in rows:
        if row["nth"] is not None:
            found.used_keys.add(keys[row["nth"] - 1])
            continue
        account = found.of.setdefault(key_of[row["budget_id"]], Account(on_hard_limit=row["on_hard_limit"]))
        account.counters[row["dimension"]] = Counter(
            hard_limit=row["hard_limit"], soft_limit=row["soft_limit"], used=row["used"], reserved=row["reserved"]
        )
    return found


async def _read_reservations(
    transaction: Transaction, reservations: Sequence[Reservation]
) -> dict[Reservation, Mapping[str, int]]:
    found: dict[Reservation, dict[str, int]] = {}
    if reservations:
        names = ("partition_keys", "execution_ids", "budget_ids", "reservation_keys", "lease_epochs")
        keys = [(*of.execution, of.budget.budget_id, of.reservation_key, of.lease_epoch) for of in reservations]
        for row in await transaction.fetch(SQL.list_reservations, **full_columns(names, keys)):
            found.setdefault(reservations[row["nth"] - 1], {})[row["dimension"]] = row["amount"]
    return {**found}


async def after_change(store: Store, budget_ids: Sequence[UUID]) -> None:
    """Wake the claims that these budgets may have kept from leasing; call it after the commit that freed something.

    The change is committed, so a fault of the store is ignored: waiting claims look again by themselves.
    """
    if not budget_ids:
        return
    with contextlib.suppress(EngineError):
        for row in await store.fetch(SQL.list_lanes_of_budgets, budget_ids=budget_ids):
            store.wakeups.lane(row["lane_id"])

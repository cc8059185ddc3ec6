"""Group commit: many callers share a statement, and a batch survives its worst member."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Database, Transaction
from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import Statement

ADD = Statement(
    "add",
    """with held as materialized (
         select i.nth, i.amount, s.id
           from unnest(:ids::int[], :amounts::int[]) with ordinality as i(id, amount, nth)
           left join lateral (select s.id from shelf s where s.id = i.id for update skip locked) s on true),
       added as (
         update shelf s set value = s.value + h.amount from held h where s.id = h.id returning s.id, s.value)
       select h.nth, a.value from held h left join added a using (id)""",
)
LOCK = Statement("lock", "select 1 from shelf where id = :id for update")
POISON = 1_000_000


@dataclass(frozen=True)
class Item:
    """So much is to be added to a row; a poisoned amount breaks the table's rule."""

    id: int
    amount: int = 1


class Shelf:
    """Adds to the rows of a table through a batch, and remembers which statements it took."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.together: list[list[int]] = []
        self.alone: list[int] = []
        self.fault: StoreFault | None = None
        self.patience = "100s"
        self.batch: Batch[Item, int] = Batch(self._add_together, self._add_alone, keys=lambda item: (item.id,))

    async def _add_together(self, items: Sequence[Item]) -> Sequence[int | Locked | Exception]:
        self.together.append([item.id for item in items])
        if self.fault is not None:
            raise self.fault
        rows = await self.database.fetch(ADD, self._columns(items))
        answers: list[int | Locked | Exception] = [LOCKED] * len(items)
        for row in rows:
            if row["value"] is not None:
                answers[row["nth"] - 1] = row["value"]
        return answers

    async def _add_alone(self, item: Item) -> int:
        self.alone.append(item.id)

        async def add(transaction: Transaction) -> int:
            await transaction.connection.execute(f"set local lock_timeout = '{self.patience}'")
            if not await transaction.fetch(LOCK, id=item.id):
                raise LookupError(item.id)
            (row,) = await transaction.fetch(ADD, **self._columns([item]))
            return int(row["value"])

        return await self.database.transact(add)

    @staticmethod
    def _columns(items: Sequence[Item]) -> dict[str, object]:
        return {"ids": [item.id for item in items], "amounts": [item.amount for item in items]}


@pytest.fixture
async def other(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session beside the batch, with a table of 200 rows that hold nothing yet."""
    connection = await asyncpg.connect(url, server_settings={"search_path": "flowfabric"})
    await connection.execute("create table shelf (id int primary key, value int not null check (value < 1000))")
    await connection.execute("insert into shelf select n, 0 from generate_series(1, 200) n")
    yield connection
    await connection.close()


@pytest.fixture
async def shelf(url: str, other: asyncpg.Connection) -> AsyncIterator[Shelf]:
    database = await Database.open(url, schema="flowfabric", pool_size=6)
    shelf = Shelf(database)
    yield shelf
    await shelf.batch.drain()
    await database.close()


async def total(other: asyncpg.Connection) -> int:
    found: int = await other.fetchval("select sum(value) from shelf")
    return found


async def test_callers_of_one_instant_share_a_statement(shelf: Shelf, other: asyncpg.Connection) -> None:
    assert await asyncio.gather(*(shelf.batch.put(Item(n)) for n in range(1, 101))) == [1] * 100
    assert ([len(ids) for ids in shelf.together], shelf.alone) == ([100], [])
    assert await total(other) == 100


async def test_a_statement_holds_no_more_than_its_size(shelf: Shelf) -> None:
    await asyncio.gather(*(shelf.batch.put(Item(n)) for n in range(1, 201)))
    assert sorted(len(ids) for ids in shelf.together) == [72, 128]


async def test_each_caller_gets_its_own_answer(shelf: Shelf) -> None:
    assert await asyncio.gather(*(shelf.batch.put(Item(n, amount=n)) for n in range(1, 51))) == list(range(1, 51))


async def test_items_of_one_key_are_answered_in_their_order(shelf: Shelf) -> None:
    answers = await asyncio.gather(*(shelf.batch.put(Item(n)) for n in (1, 1, 2, 1)))
    assert answers == [1, 2, 1, 3]
    assert all(len(ids) == len(set(ids)) for ids in shelf.together)


async def test_items_of_one_key_within_a_call_are_answered_in_their_order(shelf: Shelf) -> None:
    assert await shelf.batch.run([Item(n) for n in (1, 1, 2, 1)]) == [1, 2, 1, 3]
    assert [sorted(ids) for ids in shelf.together] == [[1, 2], [1], [1]]


async def test_a_locked_row_holds_up_nobody_else(shelf: Shelf, other: asyncpg.Connection) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        locked, *free = [shelf.batch.put(Item(n)) for n in range(1, 101)]
        assert await asyncio.wait_for(asyncio.gather(*free), 30) == [1] * 99
        assert not locked.done()
    assert await locked == 1


async def test_callers_who_come_later_do_not_wait_for_a_locked_row(
    shelf: Shelf, other: asyncpg.Connection, eventually: Any
) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id <= 4 for update")
        locked = [shelf.batch.put(Item(n)) for n in range(1, 5)]
        await asyncio.wait_for(shelf.batch.put(Item(100)), 30)
        await eventually(lambda: len(shelf.alone) == 4)
        assert await asyncio.wait_for(shelf.batch.put(Item(101)), 30) == 1
        assert not any(answer.done() for answer in locked)
    assert await asyncio.gather(*locked) == [1] * 4


async def test_a_locked_row_within_a_call_is_waited_for_and_the_rest_is_done(
    shelf: Shelf, other: asyncpg.Connection, eventually: Any
) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        call = asyncio.create_task(shelf.batch.run([Item(n) for n in range(1, 6)]))
        await eventually(lambda: other.fetchval("select count(*) from pg_locks where not granted"))
    assert await call == [1] * 5


async def test_a_row_that_stays_locked_is_a_fault_of_its_caller_only(shelf: Shelf, other: asyncpg.Connection) -> None:
    shelf.patience = "20ms"
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        locked, free = shelf.batch.put(Item(1)), shelf.batch.put(Item(2))
        assert await free == 1
        with pytest.raises(StoreFault) as raised:
            await locked
    assert raised.value.kind == "contention"


async def test_an_item_behind_a_locked_one_of_its_key_follows_it(shelf: Shelf, other: asyncpg.Connection) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        first, second = shelf.batch.put(Item(1)), shelf.batch.put(Item(1))
        await shelf.batch.put(Item(2))
    assert sorted(await asyncio.gather(first, second)) == [1, 2]


async def test_a_poisoned_item_fails_alone(shelf: Shelf, other: asyncpg.Connection) -> None:
    items = [Item(n, amount=POISON if n == 50 else 1) for n in range(1, 101)]
    answers = await asyncio.gather(*map(shelf.batch.put, items), return_exceptions=True)
    refused = answers.pop(49)
    assert isinstance(refused, StoreFault)
    assert refused.kind == "other"
    assert answers == [1] * 99
    assert await total(other) == 99


async def test_a_poisoned_item_of_a_call_fails_alone(shelf: Shelf) -> None:
    answers = await shelf.batch.run([Item(1), Item(2, amount=POISON), Item(3)])
    assert (answers[0], answers[2]) == (1, 1)
    assert isinstance(answers[1], StoreFault)


async def test_an_item_that_is_not_there_is_answered_for_itself(shelf: Shelf) -> None:
    absent, present = shelf.batch.put(Item(999)), shelf.batch.put(Item(1))
    assert await present == 1
    with pytest.raises(LookupError):
        await absent


async def test_a_cancelled_caller_takes_nothing_back_and_nobody_with_it(
    shelf: Shelf, other: asyncpg.Connection
) -> None:
    calls = [asyncio.ensure_future(shelf.batch.put(Item(n))) for n in range(1, 11)]
    await asyncio.sleep(0)
    calls[4].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers.pop(4), asyncio.CancelledError)
    assert answers == [1] * 9
    assert await total(other) == 10


async def test_a_cancelled_caller_of_a_locked_row_is_forgotten(shelf: Shelf, other: asyncpg.Connection) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        locked = shelf.batch.put(Item(1))
        await shelf.batch.put(Item(2))
        locked.cancel()
    await shelf.batch.drain()
    assert await total(other) == 2


@pytest.mark.parametrize("kind", ["transport", "timeout", "auth"])
async def test_a_fault_of_the_connection_meets_everybody_at_once(shelf: Shelf, kind: str) -> None:
    shelf.fault = StoreFault(kind, "gone")
    answers = await asyncio.gather(*(shelf.batch.put(Item(n)) for n in range(1, 11)), return_exceptions=True)
    assert {answer.kind for answer in answers if isinstance(answer, StoreFault)} == {kind}
    assert len({id(answer) for answer in answers}) == len(answers)
    assert shelf.alone == []


async def test_a_batch_goes_on_after_a_fault_of_the_connection(shelf: Shelf, other: asyncpg.Connection) -> None:
    await shelf.batch.put(Item(1))
    await other.fetch(
        """select pg_terminate_backend(pid) from pg_stat_activity
            where datname = current_database() and application_name = 'flowfabric'"""
    )
    answers = await asyncio.gather(*(shelf.batch.put(Item(n)) for n in range(2, 5)), return_exceptions=True)
    assert all(answer == 1 or isinstance(answer, StoreFault) for answer in answers)
    for _ in range(20):
        last: Any = (await asyncio.gather(shelf.batch.put(Item(9)), return_exceptions=True))[0]
        if not isinstance(last, StoreFault):
            break
    assert last == 1


async def test_draining_waits_for_what_is_under_way(shelf: Shelf, other: asyncpg.Connection) -> None:
    answers = [shelf.batch.put(Item(n)) for n in range(1, 201)]
    await shelf.batch.drain()
    assert all(answer.done() for answer in answers)
    assert await total(other) == 200


async def test_an_answer_that_is_an_error_meets_its_caller_only() -> None:
    async def together(items: Sequence[int]) -> Sequence[int | Locked | Exception]:
        return [ValueError(item) if item % 2 else item for item in items]

    async def alone(item: int) -> int:
        return item

    batch: Batch[int, int] = Batch(together, alone, keys=lambda item: (item,))
    even, odd = batch.put(2), batch.put(3)
    assert await even == 2
    with pytest.raises(ValueError, match="3"):
        await odd
    assert [str(answer) for answer in await batch.run([1, 2, 3])] == ["1", "2", "3"]


async def test_a_statement_that_breaks_over_its_items_is_repeated_item_by_item() -> None:
    async def together(items: Sequence[int]) -> Sequence[int | Locked | Exception]:
        raise TypeError("cannot")

    async def alone(item: int) -> int:
        if item == 2:
            raise LookupError(item)
        return item

    batch: Batch[int, int] = Batch(together, alone, keys=lambda item: (item,))
    answers = await asyncio.gather(*map(batch.put, (1, 2, 3)), return_exceptions=True)
    assert (answers[0], answers[2]) == (1, 3)
    assert isinstance(answers[1], LookupError)


async def test_no_item_is_left_behind_when_streams_end_and_begin() -> None:
    async def together(items: Sequence[int]) -> Sequence[int | Locked | Exception]:
        await asyncio.sleep(0)
        return items

    async def alone(item: int) -> int:
        return item

    batch: Batch[int, int] = Batch(together, alone, keys=lambda item: (item,), size=3)

    async def call(first: int) -> None:
        for n in range(first, first + 100):
            assert await batch.put(n) == n
            for _ in range(n % 5):
                await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(*(call(first) for first in range(0, 2000, 100))), 30)

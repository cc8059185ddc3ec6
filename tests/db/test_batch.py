"""Group commit: many callers share a statement, and a bad item affects only its own caller."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

from fixtures import Eventually
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
    """An amount to add to a row; the POISON amount violates the check of the table."""

    id: int
    amount: int = 1


class Shelf:
    """Adds to the rows of a table through a batch, and records the statements it used."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.together: list[list[int]] = []
        self.alone: list[int] = []
        self.fault: StoreFault | None = None
        self.lock_timeout = "100s"
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
            await transaction.connection.execute(f"set local lock_timeout = '{self.lock_timeout}'")
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
    """A session outside the batch, with a table of 200 rows of value 0."""
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


async def test_concurrent_callers_share_a_statement_and_each_gets_its_own_answer(
    shelf: Shelf, other: asyncpg.Connection
) -> None:
    answers = await asyncio.gather(*(shelf.batch.put(Item(n, amount=n)) for n in range(1, 101)))
    assert answers == list(range(1, 101))
    assert ([len(ids) for ids in shelf.together], shelf.alone) == ([100], [])
    assert await total(other) == sum(range(1, 101))


async def test_a_statement_takes_at_most_its_size_and_draining_waits_for_all(
    shelf: Shelf, other: asyncpg.Connection
) -> None:
    answers = [shelf.batch.put(Item(n)) for n in range(1, 201)]
    await shelf.batch.drain()
    assert all(answer.done() for answer in answers)
    assert await total(other) == 200
    assert sorted(len(ids) for ids in shelf.together) == [72, 128]


async def test_items_with_the_same_key_are_answered_in_order(shelf: Shelf) -> None:
    answers = await asyncio.gather(*(shelf.batch.put(Item(n)) for n in (1, 1, 2, 1)))
    assert answers == [1, 2, 1, 3]
    assert all(len(ids) == len(set(ids)) for ids in shelf.together)


async def test_items_with_the_same_key_in_one_call_are_answered_in_order(shelf: Shelf) -> None:
    assert await shelf.batch.run([Item(n) for n in (1, 1, 2, 1)]) == [1, 2, 1, 3]
    assert [sorted(ids) for ids in shelf.together] == [[1, 2], [1], [1]]


async def test_a_locked_row_does_not_delay_other_callers(shelf: Shelf, other: asyncpg.Connection) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        locked, *free = [shelf.batch.put(Item(n)) for n in range(1, 101)]
        assert await asyncio.wait_for(asyncio.gather(*free), 30) == [1] * 99
        assert not locked.done()
    assert await locked == 1


async def test_later_callers_do_not_wait_for_a_locked_row(
    shelf: Shelf, other: asyncpg.Connection, eventually: Eventually
) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id <= 4 for update")
        locked = [shelf.batch.put(Item(n)) for n in range(1, 5)]
        await asyncio.wait_for(shelf.batch.put(Item(100)), 30)
        await eventually(lambda: len(shelf.alone) == 4)
        assert await asyncio.wait_for(shelf.batch.put(Item(101)), 30) == 1
        assert not any(answer.done() for answer in locked)
    assert await asyncio.gather(*locked) == [1] * 4


async def test_a_call_waits_for_a_locked_row_after_its_other_items(
    shelf: Shelf, other: asyncpg.Connection, eventually: Eventually
) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        call = asyncio.create_task(shelf.batch.run([Item(n) for n in range(1, 6)]))
        await eventually(lambda: other.fetchval("select count(*) from pg_locks where not granted"))
    assert await call == [1] * 5


async def test_a_row_that_stays_locked_fails_only_its_own_caller(shelf: Shelf, other: asyncpg.Connection) -> None:
    shelf.lock_timeout = "20ms"
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        locked, free = shelf.batch.put(Item(1)), shelf.batch.put(Item(2))
        assert await free == 1
        with pytest.raises(StoreFault) as raised:
            await locked
    assert raised.value.kind == "contention"


async def test_an_item_waits_for_a_locked_item_with_the_same_key(shelf: Shelf, other: asyncpg.Connection) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        first, second = shelf.batch.put(Item(1)), shelf.batch.put(Item(1))
        await shelf.batch.put(Item(2))
    assert sorted(await asyncio.gather(first, second)) == [1, 2]


async def test_an_item_that_fails_fails_only_its_own_caller(shelf: Shelf, other: asyncpg.Connection) -> None:
    items = [Item(999), *(Item(n, amount=POISON if n == 10 else 1) for n in range(1, 21))]
    missing, *answers = await asyncio.gather(*map(shelf.batch.put, items), return_exceptions=True)
    refused = answers.pop(9)
    assert isinstance(missing, LookupError)
    assert isinstance(refused, StoreFault)
    assert refused.kind == "other"
    assert answers == [1] * 19
    assert await total(other) == 19


async def test_an_item_of_a_call_that_fails_does_not_fail_the_others(shelf: Shelf) -> None:
    answers = await shelf.batch.run([Item(1), Item(2, amount=POISON), Item(3)])
    assert (answers[0], answers[2]) == (1, 1)
    assert isinstance(answers[1], StoreFault)


async def test_cancelling_a_caller_withdraws_no_item_and_cancels_nobody_else(
    shelf: Shelf, other: asyncpg.Connection
) -> None:
    calls = [asyncio.ensure_future(shelf.batch.put(Item(n))) for n in range(1, 11)]
    await asyncio.sleep(0)
    calls[4].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers.pop(4), asyncio.CancelledError)
    assert answers == [1] * 9
    assert await total(other) == 10


async def test_a_batch_drains_after_the_caller_of_a_locked_row_is_cancelled(
    shelf: Shelf, other: asyncpg.Connection
) -> None:
    async with other.transaction():
        await other.execute("select 1 from shelf where id = 1 for update")
        locked = shelf.batch.put(Item(1))
        await shelf.batch.put(Item(2))
        locked.cancel()
    await shelf.batch.drain()
    assert await total(other) == 2


async def test_a_failure_of_the_store_fails_every_caller_of_the_statement(shelf: Shelf) -> None:
    for kind in ("transport", "timeout", "auth"):
        shelf.fault = StoreFault(kind, "gone")
        answers = await asyncio.gather(*(shelf.batch.put(Item(n)) for n in range(1, 11)), return_exceptions=True)
        assert [answer.kind for answer in answers if isinstance(answer, StoreFault)] == [kind] * 10
        assert len({id(answer) for answer in answers}) == len(answers)
        assert shelf.alone == []


async def test_a_batch_works_again_after_a_lost_connection(shelf: Shelf, other: asyncpg.Connection) -> None:
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


async def test_an_error_as_an_answer_is_raised_only_to_its_caller() -> None:
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


async def test_a_statement_that_fails_because_of_an_item_is_repeated_item_by_item() -> None:
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


async def test_no_item_is_forgotten_while_streams_start_and_stop() -> None:
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


async def test_a_call_in_another_event_loop_is_refused_and_the_batch_goes_on() -> None:
    async def together(items: Sequence[int]) -> Sequence[int]:
        return items

    async def alone(item: int) -> int:
        return item

    batch: Batch[int, int] = Batch(together, alone, keys=lambda item: (item,), streams=2)

    async def put(item: int) -> int:
        return await batch.put(item)

    def call_elsewhere() -> None:
        for call in (put(1), put(2), batch.run([3])):
            with pytest.raises(RuntimeError, match="the engine is connected in another event loop"):
                asyncio.run(call)

    await asyncio.to_thread(call_elsewhere)
    async with asyncio.timeout(30):
        assert [*await asyncio.gather(put(4), put(5))] == [4, 5]


async def test_a_statement_takes_no_more_items_once_their_weights_reach_the_size() -> None:
    taken: list[list[int]] = []

    async def together(items: Sequence[int]) -> Sequence[int]:
        taken.append(list(items))
        return items

    async def alone(item: int) -> int:
        return item

    batch: Batch[int, int] = Batch(
        together, alone, keys=lambda item: (item,), size=10, streams=1, weigh=lambda item: item
    )
    items = [4, 5, 1, 20, 3, 6, 2]
    assert await asyncio.gather(*(batch.put(item) for item in items)) == items
    assert taken == [[4, 5, 1], [20], [3, 6, 2]]

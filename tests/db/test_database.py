"""Calls to Postgres: retried if Postgres asks for it, otherwise failed with a fault of a known kind."""

import asyncio
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from fixtures import Eventually
from flowfabric.db.database import ATTEMPTS, Database, Transaction
from flowfabric.db.faults import StoreFault, fault_of
from flowfabric.db.session import Limits
from flowfabric.db.statements import Statement

ADD = Statement("add", "select :a::int + :b::int as sum")
SLEEP = Statement("sleep", "select pg_sleep(:seconds)")
WAIT = Statement("wait", "select pg_advisory_xact_lock(:lock::bigint)")
READ = Statement("read", "select value from shelf where id = :id")
WRITE = Statement("write", "update shelf set value = value + 1 where id = :id")
OWN_SESSIONS = """select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
                     and application_name = 'flowfabric'"""
IS_WHOLE = os.environ.get("FF_TEST_SWEEP") == "whole"
END_SESSIONS = OWN_SESSIONS.replace("count(*)", "pg_terminate_backend(pid)")


@pytest.fixture
async def other(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session outside the pool, with a table of two rows."""
    connection = await asyncpg.connect(url, server_settings={"search_path": "flowfabric"})
    await connection.execute("create table shelf (id int primary key, value int not null check (value < 1000000))")
    await connection.execute("insert into shelf values (1, 0), (2, 0)")
    yield connection
    await connection.close()


@pytest.fixture
async def database(url: str, other: asyncpg.Connection) -> AsyncIterator[Database]:
    database = await Database.open(url, schema="flowfabric", pool_size=3)
    yield database
    await database.close()


@pytest.fixture
def turns() -> Callable[[Awaitable[Any], int], Awaitable[bool]]:
    """Run a call and cancel it at its n-th turn of the event loop; return whether it ended before that."""

    async def run(call: Awaitable[Any], turn: int) -> bool:
        task = asyncio.ensure_future(call)
        for _ in range(turn):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        return not task.cancelled()

    return run


async def value(connection: asyncpg.Connection, number: int) -> int:
    found: int = await connection.fetchval("select value from shelf where id = $1", number)
    return found


async def test_a_statement_takes_its_values_by_name(database: Database) -> None:
    (row,) = await database.fetch(ADD, {"b": 1, "a": 2})
    assert row["sum"] == 3


async def test_a_connection_discards_its_plans_after_a_slow_statement_or_transaction(
    url: str, other: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = "select query from pg_stat_activity where datname = current_database() and application_name = 'flowfabric'"
    database = await Database.open(url, schema="flowfabric", pool_size=1)
    try:
        for slow, said in ((60.0, READ.sql), (0.0, "discard plans"), (60.0, READ.sql)):
            monkeypatch.setattr("flowfabric.db.database.SLOW_SECONDS", slow)
            assert [row["value"] for row in await database.fetch(READ, {"id": 1})] == [0]
            assert await other.fetchval(last) == said
        for slow, said in ((60.0, "COMMIT;"), (0.0, "discard plans"), (60.0, "COMMIT;")):
            monkeypatch.setattr("flowfabric.db.database.SLOW_SECONDS", slow)
            assert await database.transact(lambda transaction: transaction.fetch(READ, id=1))
            assert await other.fetchval(last) == said
    finally:
        await database.close()


async def test_a_transaction_that_fails_changes_nothing(database: Database, other: asyncpg.Connection) -> None:
    async def write(transaction: Transaction) -> None:
        await transaction.fetch(WRITE, id=1)
        await transaction.fetch(WRITE, id=2)
        raise LookupError

    with pytest.raises(LookupError):
        await database.transact(write)
    assert (await value(other, 1), await value(other, 2)) == (0, 0)


async def test_a_deadlock_is_retried(database: Database, other: asyncpg.Connection) -> None:
    runs = 0
    both_hold, one_is_through = asyncio.Barrier(2), asyncio.Event()

    def write(first: int, second: int) -> Callable[[Transaction], Awaitable[None]]:
        async def work(transaction: Transaction) -> None:
            nonlocal runs
            runs += 1
            if runs > 2:
                # Otherwise it could take a row before the other transaction, which waits for it, wakes up.
                await one_is_through.wait()
            await transaction.connection.execute("set local lock_timeout = 0; set local deadlock_timeout = '10ms'")
            await transaction.fetch(WRITE, id=first)
            if runs <= 2:
                await both_hold.wait()
            await transaction.fetch(WRITE, id=second)

        return work

    async def transact(first: int, second: int) -> None:
        await database.transact(write(first, second))
        one_is_through.set()

    await asyncio.gather(transact(1, 2), transact(2, 1))
    assert runs == 3
    assert (await value(other, 1), await value(other, 2)) == (2, 2)


async def test_a_serialization_failure_is_retried(database: Database, other: asyncpg.Connection) -> None:
    runs = 0

    async def work(transaction: Transaction) -> int:
        nonlocal runs
        runs += 1
        await transaction.connection.execute("set transaction isolation level repeatable read")
        (row,) = await transaction.fetch(READ, id=1)
        if runs == 1:
            await other.execute("update shelf set value = 10 where id = 1")
        await transaction.fetch(WRITE, id=1)
        return int(row["value"])

    assert await database.transact(work) == 10
    assert (runs, await value(other, 1)) == (2, 11)


async def test_a_row_that_stays_locked_fails_after_three_attempts(
    database: Database, other: asyncpg.Connection
) -> None:
    runs = 0

    async def work(transaction: Transaction) -> None:
        nonlocal runs
        runs += 1
        await transaction.connection.execute("set local lock_timeout = '10ms'")
        await transaction.fetch(WRITE, id=1)

    async with other.transaction():
        await other.execute("update shelf set value = 5 where id = 1")
        with pytest.raises(StoreFault) as raised:
            await database.transact(work)
    assert (raised.value.kind, runs) == ("contention", ATTEMPTS)


async def test_the_server_ends_an_idle_transaction_and_releases_its_rows(url: str, other: asyncpg.Connection) -> None:
    database = await Database.open(url, schema="flowfabric", limits=Limits(idle_in_transaction_ms=50))

    async def work(transaction: Transaction) -> None:
        await transaction.fetch(WRITE, id=1)
        # Waits until the server has ended the session that locks the row.
        await other.execute("update shelf set value = 7 where id = 1")
        await transaction.fetch(WRITE, id=1)

    try:
        with pytest.raises(StoreFault) as raised:
            await database.transact(work)
        assert (raised.value.kind, raised.value.outcome_unknown) == ("transport", False)
        assert await value(other, 1) == 7
        assert (await database.fetch(READ, {"id": 1}))[0]["value"] == 7
    finally:
        await database.close()


async def test_the_server_cancels_a_statement_after_its_timeout(url: str) -> None:
    database = await Database.open(url, schema="flowfabric", limits=Limits(statement_ms=50))
    try:
        with pytest.raises(StoreFault) as raised:
            await database.fetch(SLEEP, {"seconds": 60})
        assert (raised.value.kind, raised.value.outcome_unknown) == ("timeout", False)
    finally:
        await database.close()


async def test_an_error_of_the_statement_itself_is_not_retried(database: Database) -> None:
    runs = 0

    async def work(transaction: Transaction) -> None:
        nonlocal runs
        runs += 1
        await transaction.connection.execute("update shelf set value = 1000000")

    with pytest.raises(StoreFault, match="CheckViolation") as raised:
        await database.transact(work)
    assert (raised.value.kind, runs) == ("other", 1)


async def test_a_connection_lost_during_a_statement_is_a_transport_fault_and_the_next_call_works(
    database: Database, other: asyncpg.Connection, eventually: Eventually
) -> None:
    sleeping = asyncio.create_task(database.fetch(SLEEP, {"seconds": 60}))
    query = OWN_SESSIONS + " and query like '/* sleep */%' and state = 'active'"
    await eventually(lambda: other.fetchval(query))
    await other.fetch(END_SESSIONS)
    with pytest.raises(StoreFault) as raised:
        await sleeping
    assert (raised.value.kind, raised.value.outcome_unknown) == ("transport", True)
    assert (await database.fetch(ADD, {"a": 1, "b": 1}))[0]["sum"] == 2


async def test_lost_idle_connections_are_replaced(
    database: Database, other: asyncpg.Connection, eventually: Eventually
) -> None:
    await asyncio.gather(*(database.fetch(SLEEP, {"seconds": 0.01}) for _ in range(3)))
    await other.fetch(END_SESSIONS)
    kinds: set[str] = set()

    async def works() -> bool:
        try:
            await database.fetch(ADD, {"a": 1, "b": 1})
        except StoreFault as fault:
            kinds.add(fault.kind)
            return False
        return True

    await eventually(works)
    for _ in range(5):
        assert await works()
    assert kinds <= {"transport"}


async def test_a_connection_lost_in_a_transaction_rolls_it_back(database: Database, other: asyncpg.Connection) -> None:
    async def work(transaction: Transaction) -> None:
        await transaction.fetch(WRITE, id=1)
        await other.fetch(END_SESSIONS)
        await transaction.fetch(WRITE, id=2)

    with pytest.raises(StoreFault) as raised:
        await database.transact(work)
    assert (raised.value.kind, raised.value.outcome_unknown) == ("transport", False)
    assert (await value(other, 1), await value(other, 2)) == (0, 0)


async def test_a_cancelled_caller_leaves_a_usable_connection(
    url: str, other: asyncpg.Connection, eventually: Eventually
) -> None:
    async def has_one_session() -> bool:
        return bool(await other.fetchval(OWN_SESSIONS) <= 1)

    database = await Database.open(url, schema="flowfabric", pool_size=1)
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(database.fetch(SLEEP, {"seconds": 60}), 0.05)
            assert (await database.fetch(ADD, {"a": 1, "b": 1}))[0]["sum"] == 2
        # A closed session stays in pg_stat_activity for a short time.
        await eventually(has_one_session)
    finally:
        await database.close()


async def test_a_caller_cancelled_at_any_turn_does_not_affect_the_next_one(
    url: str, other: asyncpg.Connection, turns: Callable[[Awaitable[Any], int], Awaitable[bool]]
) -> None:
    """A connection left with an open transaction would later roll back the write of the next caller."""
    database = await Database.open(url, schema="flowfabric", pool_size=1)

    async def work(transaction: Transaction) -> None:
        await transaction.fetch(WRITE, id=1)

    try:
        turn, ended, writes = 0, False, 0
        while not ended:
            ended = await turns(database.transact(work), turn)
            # While the server is slow, many turns find the call in the same state.
            turn += 1 if IS_WHOLE or turn < 20 else turn // 2
            await database.fetch(WRITE, {"id": 2})
            writes += 1
            assert await value(other, 2) == writes
        assert turn > 3
    finally:
        await database.close()


async def test_a_caller_cancelled_in_a_transaction_rolls_it_back(url: str, other: asyncpg.Connection) -> None:
    database = await Database.open(url, schema="flowfabric", pool_size=1)

    async def work(transaction: Transaction) -> None:
        await transaction.fetch(WRITE, id=1)
        await transaction.fetch(SLEEP, seconds=60)

    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(database.transact(work), 0.1)
        assert (await database.fetch(READ, {"id": 1}))[0]["value"] == 0
        await other.execute("update shelf set value = 1 where id = 1")
    finally:
        await database.close()


async def test_callers_wait_if_all_connections_are_in_use(database: Database, other: asyncpg.Connection) -> None:
    calls = [asyncio.create_task(database.fetch(SLEEP, {"seconds": 0.05})) for _ in range(9)]
    most = 0
    while not all(call.done() for call in calls):
        most = max(most, await other.fetchval(OWN_SESSIONS))
    await asyncio.gather(*calls)
    assert 0 < most <= 3


@pytest.mark.usefixtures("patient_with_locks")
async def test_closing_waits_for_running_calls(
    url: str, other: asyncpg.Connection, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.db.database.DRAIN_SECONDS", 60)
    database = await Database.open(url, schema="flowfabric")
    waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
    async with other.transaction():
        await other.execute("select pg_advisory_xact_lock(42)")
        running = asyncio.create_task(database.fetch(WAIT, {"lock": 42}))
        await eventually(lambda: other.fetchval(waiting))
        closing = asyncio.create_task(database.close())
        await asyncio.wait((closing,), timeout=0.1)
        assert (closing.done(), running.done()) == (False, False)
    await closing
    assert running.done()
    assert len(running.result()) == 1


async def test_a_wrong_address_fails_when_the_database_is_opened(server: str) -> None:
    for change, kind in (
        ({"path": "/there_is_no_such_database"}, "protocol"),
        ({"query": "host=/nowhere"}, "transport"),
        ({"netloc": "nobody_of_that_name@"}, "auth"),
    ):
        address = urlunsplit(urlsplit(server)._replace(**change))
        with pytest.raises(StoreFault) as raised:
            await Database.open(address, schema="flowfabric")
        assert (raised.value.kind, raised.value.outcome_unknown) == (kind, False), change


async def test_a_value_postgres_cannot_store_is_not_a_transport_fault(database: Database) -> None:
    echo = Statement("echo", "select :text::text")
    with pytest.raises(StoreFault) as raised:
        await database.fetch(echo, {"text": "\0"})
    assert raised.value.kind == "other"


async def test_every_session_has_the_same_settings(database: Database) -> None:
    settings = Statement(
        "settings",
        """select current_schema() as schema, current_setting('plan_cache_mode') as plans,
                  current_setting('lock_timeout') as patience, current_setting('application_name') as name""",
    )
    for _ in range(2):
        (row,) = await database.fetch(settings, {})
        assert tuple(row) == ("flowfabric", "force_generic_plan", "2s", "flowfabric")
    own = await database.connect(application_name="own")
    try:
        assert tuple(await own.fetchrow(settings.sql))[3] == "own"
    finally:
        await own.close()


def test_an_error_that_is_not_the_drivers_is_not_a_fault() -> None:
    assert fault_of(LookupError()) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncpg.SerializationError("no"), "contention"),
        (asyncpg.DeadlockDetectedError("no"), "contention"),
        (asyncpg.LockNotAvailableError("no"), "contention"),
        (asyncpg.QueryCanceledError("no"), "timeout"),
        (TimeoutError(), "timeout"),
        (asyncpg.AdminShutdownError("no"), "transport"),
        (asyncpg.ConnectionDoesNotExistError("no"), "transport"),
        (asyncpg.TooManyConnectionsError("no"), "busy_loading"),
        (asyncpg.CannotConnectNowError("no"), "busy_loading"),
        (asyncpg.ReadOnlySQLTransactionError("no"), "busy_loading"),
        (asyncpg.DiskFullError("no"), "busy_loading"),
        (asyncpg.OutOfMemoryError("no"), "busy_loading"),
        (asyncpg.ObjectInUseError("no"), "busy_loading"),
        (asyncpg.PostgresIOError("no"), "busy_loading"),
        (asyncpg.IdleInTransactionSessionTimeoutError("no"), "transport"),
        (asyncpg.UndefinedTableError("no"), "protocol"),
        (asyncpg.ProgramLimitExceededError("no"), "other"),
        (ConnectionResetError(), "transport"),
        (asyncpg.InvalidPasswordError("no"), "auth"),
        (asyncpg.UniqueViolationError("no"), "other"),
    ],
)
def test_each_error_of_the_driver_has_its_kind_of_fault(error: BaseException, kind: str) -> None:
    fault = fault_of(error)
    assert fault is not None
    assert fault.kind == kind


REFUSED = {
    "a row": ("insert into vault values (:id::int, :token)", 'violates check constraint "never"'),
    "a key": ("insert into keyed select :token where :id::int = 7", 'violates unique constraint "keyed_pkey"'),
    "an argument": ("select :token::uuid where :id::int = 7", "a value is refused (22"),
    "a cast": ("select :token::text::uuid where :id::int = 7", "a value is refused (22P02)"),
    "a document": ("select :token::text::jsonb where :id::int = 7", "a value is refused (22P02)"),
}


async def test_a_fault_does_not_contain_the_values_of_the_statement(
    database: Database, other: asyncpg.Connection
) -> None:
    token = "k1:5ec4e7"
    await other.execute("create table vault (id int, token text, constraint never check (id < 0))")
    await other.execute(f"create table keyed (token text primary key); insert into keyed values ('{token}')")
    wrong = []
    for case, (sql, expected) in REFUSED.items():
        statement = Statement("store", sql)

        async def in_transaction(transaction: Transaction, statement: Statement = statement) -> None:
            await transaction.fetch(statement, id=7, token=token)

        for call in (database.transact(in_transaction), database.fetch(statement, {"id": 7, "token": token})):
            with pytest.raises(StoreFault) as caught:
                await call
            fault = caught.value
            printed = "".join(traceback.format_exception(fault))
            if "test_a_fault_does_not_contain" not in printed or expected not in str(fault):
                wrong.append((case, str(fault)))
            if token in f"{fault} {fault!r} {printed}":
                wrong.append((case, "contains the value"))
    assert wrong == []


async def test_a_call_in_another_event_loop_is_refused_and_takes_no_connection(database: Database) -> None:
    def call_elsewhere() -> None:
        for _ in range(4):
            with pytest.raises(RuntimeError, match="the engine is connected in another event loop"):
                asyncio.run(database.fetch(ADD, {"a": 1, "b": 2}))

    await database.fetch(ADD, {"a": 1, "b": 2})
    await asyncio.to_thread(call_elsewhere)
    async with asyncio.timeout(30):
        for _ in range(4):
            assert (await database.fetch(ADD, {"a": 1, "b": 2}))[0]["sum"] == 3

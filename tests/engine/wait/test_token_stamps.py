"""A refused token is recorded after the reply: neither the response time nor a lock reveals which waitpoints exist."""

import asyncio
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.sending import Waiting, signals, stamps_written, waiting
from engine.state import claim, refused
from engine.waits import on_all
from fixtures import Clock, Eventually, Given, Rows, uuid_of
from flowfabric.db.database import Transaction
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.wait.token_stamps import TokenStamps
from flowfabric.model.signal import Accepted
from flowfabric.settings import Settings

WRONG = "k1:" + "0" * 64


async def stamp(rows: Rows, wait: Waiting) -> int | None:
    """The time of the last refused token of the execution."""
    found: int | None = (await rows.execution(wait.execution_id))["last_hmac_validation_failed_at"]
    return found


async def hold(connection: asyncpg.Connection, wait: Waiting) -> None:
    """Lock the row of an execution."""
    await connection.execute("select from execution where execution_id = $1 for update", uuid_of(wait.execution_id))


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_bad_token_is_refused_at_once_while_the_execution_is_locked(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    wait = await waiting(engine, given)
    now: int = await clock.advance(seconds=1)
    async with connection.transaction():
        await hold(connection, wait)
        async with asyncio.timeout(20):
            for token, code in ((WRONG, "invalid_token"), (None, "missing_token"), ("k9:" + "0" * 64, "invalid_token")):
                await refused(wait.send(waitpoint_token=token), code)
                await refused(wait.send(waitpoint_token=token, waitpoint_id=uuid4()), code)
        assert await stamp(rows, wait) is None
    await clock.advance(seconds=60)

    async def is_stamped() -> bool:
        return (await stamp(rows, wait)) == now

    await eventually(is_stamped)


@pytest.mark.usefixtures("patient_with_locks")
async def test_bad_tokens_and_unknown_executions_are_refused_while_good_signals_wait_for_a_lock(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, subtests: pytest.Subtests
) -> None:
    for table in ("execution", "suspension", "waitpoint"):
        with subtests.test(table):
            wait = await waiting(engine, given, on_all("a", "b"))
            async with connection.transaction():
                await connection.execute(
                    f"select from {table} where execution_id = $1 for update", uuid_of(wait.execution_id)
                )
                calls = [
                    wait.send("x", "a"),
                    wait.send("forged", "a", waitpoint_token=WRONG),
                    wait.send("y", "b"),
                    wait.send("forged", "b", waitpoint_id=uuid4()),
                ]
                tasks = [asyncio.ensure_future(call) for call in calls]
                async with asyncio.timeout(20):
                    await refused(wait.send(key="a", execution_id=f"{{fp:1}}:{uuid4()}"), "execution_not_found")
                    for task in (tasks[1], tasks[3]):
                        await refused(task, "invalid_token")
                assert not tasks[0].done()
                assert not tasks[2].done()
            assert all(isinstance(answer, Accepted) for answer in await asyncio.gather(tasks[0], tasks[2]))
            assert [row["signal_name"] for row in await signals(rows, wait.execution_id)] == ["x", "y"]
            await claim(engine)


async def test_nothing_is_written_before_the_reply(
    engine: Engine, given: Given, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = await waiting(engine, given)
    ran: list[str] = []
    fetch = Transaction.fetch

    async def noting(transaction: Transaction, statement: Statement, **values: object) -> Any:
        ran.append(statement.name)
        return await fetch(transaction, statement, **values)

    monkeypatch.setattr(Transaction, "fetch", noting)
    monkeypatch.setattr(TokenStamps, "PAUSE_SECONDS", 600.0)
    seen = []
    overridden: list[dict[str, Any]] = [{}, {"waitpoint_id": uuid4()}]
    for overrides in overridden:
        ran.clear()
        async with rows.unchanged():
            await refused(wait.send(waitpoint_token=WRONG, **overrides), "invalid_token")
        seen.append(list(ran))
    assert seen[0] == seen[1] == ["lock_targets", "read_deliveries"]
    assert await stamp(rows, wait) is None
    await stamps_written(engine)
    assert await stamp(rows, wait) is not None


async def test_the_time_of_the_latest_refusal_is_recorded(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given, on_all("a", "b"))
    for key in ("a", "b", "a"):
        now = await clock.advance(seconds=1)
        await refused(wait.send(key=key, waitpoint_token=WRONG), "invalid_token")
    await stamps_written(engine)
    assert await stamp(rows, wait) == now
    await clock.set(now - 60_000)
    await refused(wait.send(key="a", waitpoint_token=WRONG), "invalid_token")
    await stamps_written(engine)
    assert await stamp(rows, wait) == now


async def test_a_closing_engine_writes_its_stamps_and_waits_for_no_lock(
    url: str, engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    free, locked = await waiting(engine, given), await waiting(engine, given)
    async with connection.transaction():
        await hold(connection, locked)
        async with asyncio.timeout(20):
            async with Engine.connect(settings=Settings(database_url=url)) as closing:
                for wait in (free, locked):
                    wait.engine = closing
                    await refused(wait.send(waitpoint_token=WRONG), "invalid_token")
    assert await stamp(rows, free) is not None
    assert await stamp(rows, locked) is None


async def test_more_waiting_stamps_than_the_maximum_are_dropped(
    engine: Engine, given: Given, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenStamps, "MAX_WAITING", 3)
    monkeypatch.setattr(TokenStamps, "PAUSE_SECONDS", 600.0)
    waits = [await waiting(engine, given) for _ in range(5)]
    for wait in (*waits, waits[0]):
        await refused(wait.send(waitpoint_token=WRONG), "invalid_token")
    await stamps_written(engine)
    assert [await stamp(rows, wait) is not None for wait in waits] == [True, True, True, False, False]


async def test_a_stamp_that_the_store_rejects_is_logged_and_dropped(
    engine: Engine, given: Given, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    wait = await waiting(engine, given)
    await connection.execute("alter table execution add check (last_hmac_validation_failed_at is null)")
    await refused(wait.send(waitpoint_token=WRONG), "invalid_token")
    await stamps_written(engine)
    assert "1 refused tokens could not be recorded on their executions" in caplog.text
    assert isinstance(await wait.send(), Accepted)

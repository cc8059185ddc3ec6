"""Concurrent suspends share a transaction; each has its own outcome."""

import asyncio
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from engine.state import ACTIVE, EXPIRED_LEASE, vector
from engine.waits import SUSPENDED, on_all, suspend_args, suspend_keys, suspend_run, suspension, token_of, waitpoints
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.db.database import Database
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import WaitpointId
from flowfabric.model.suspension import Suspended
from flowfabric.model.waitpoint import Fresh


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the transactions begun so far."""
    begun: list[str] = []
    transact = Database.transact

    async def counted(database: Database, work: Any, **options: Any) -> Any:
        begun.append(work.__name__)
        return await transact(database, work, **options)

    monkeypatch.setattr(Database, "transact", counted)
    return begun


async def at_once(engine: Engine, *calls: Any) -> list[Any]:
    return list(await asyncio.gather(*(engine.suspend(*call) for call in calls), return_exceptions=True))


def codes(answers: list[Any]) -> list[str]:
    return [each.code if isinstance(each, EngineError) else type(each).__name__ for each in answers]


async def test_concurrent_suspends_share_one_transaction(
    engine: Engine, given: Given, rows: Rows, clock: Clock, transactions: list[str]
) -> None:
    handles = [await given.claimed() for _ in range(20)]
    now = await clock.advance(seconds=1)
    asked = [
        on_all("a", "b", timeout_at=now + at)
        if at % 2
        else suspend_args(reason_code="manual_pause", idempotency_key=f"{at}")
        for at in range(20)
    ]
    transactions.clear()
    answers = await at_once(engine, *zip(handles, asked, strict=True))
    assert len(transactions) == 1
    for at, (handle, ask, answer) in enumerate(zip(handles, asked, answers, strict=True)):
        assert isinstance(answer, Suspended)
        assert answer.details.suspension_id == ask.suspension_id
        assert answer.handle.opaque == handle.opaque
        row = await rows.execution(handle.execution_id)
        assert (row["lifecycle_phase"], row["lease_epoch"]) == ("suspended", 2)
        assert row["blocking_reason"] == ("waiting_for_signal" if at % 2 else "paused_by_operator")
        assert row["suspension_timeout_at"] == (now + at if at % 2 else None)
        wait = await suspension(rows, handle.execution_id)
        assert wait["suspension_id"] == ask.suspension_id
        assert wait["waitpoint_ids"] == [binding.waitpoint_id for binding in ask.waitpoints]
        points = await waitpoints(rows, handle.execution_id)
        assert len(points) == len(ask.waitpoints)
        assert {point["token"] for point in points} == {
            token_of(handle.execution_id, binding.waitpoint_id) for binding in ask.waitpoints
        }
    assert len(await suspend_keys(rows)) == 10
    assert await engine.find_inconsistencies() == []


async def test_a_refused_suspend_does_not_affect_the_others(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    good, stale, mended = [await given.claimed() for _ in range(3)]
    expired = await given.claimed(lease_ttl_ms=1000)
    await clock.advance(seconds=1)
    absent = msgspec.structs.replace(good, execution_id=good.execution_id[:-36] + str(uuid4()))
    other = msgspec.structs.replace(stale, lease_epoch=9)
    answers = await at_once(
        engine,
        (expired, suspend_args()),
        (good, suspend_args()),
        (other, suspend_args()),
        (absent, suspend_args()),
        (mended, suspend_args(timeout_at=0)),
    )
    assert codes(answers) == [
        "lease_expired",
        "Suspended",
        "lease_conflict",
        "execution_not_found",
        "invalid_input",
    ]
    states = [vector(await rows.execution(each.execution_id)) for each in (expired, good, stale, mended)]
    assert states == [EXPIRED_LEASE, SUSPENDED, ACTIVE, ACTIVE]
    assert len(await rows.of("suspension")) == len(await rows.of("waitpoint")) == 1


async def test_a_waitpoint_id_in_use_fails_only_its_own_suspend(engine: Engine, given: Given, rows: Rows) -> None:
    holder, *handles = [await given.claimed() for _ in range(4)]
    taken = (await suspend_run(engine, holder)).details.waitpoint_id
    binding = Fresh(waitpoint_id=taken, waitpoint_key="wait")
    answers = await at_once(
        engine,
        (handles[0], suspend_args()),
        (handles[1], suspend_args(waitpoints=(binding,))),
        (handles[2], suspend_args()),
    )
    assert codes(answers) == ["Suspended", "waitpoint_already_exists", "Suspended"]
    assert vector(await rows.execution(handles[1].execution_id)) == ACTIVE
    assert len(await rows.of("waitpoint")) == 3


async def test_of_two_suspends_with_one_waitpoint_id_one_succeeds(engine: Engine, given: Given, rows: Rows) -> None:
    handles = [await given.claimed() for _ in range(3)]
    binding = Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key="wait")
    same = suspend_args(waitpoints=(binding,))
    answers = await at_once(engine, (handles[0], same), (handles[1], same), (handles[2], suspend_args()))
    assert sorted(codes(answers)) == ["Suspended", "Suspended", "waitpoint_already_exists"]
    assert isinstance(answers[2], Suspended)
    assert len(await rows.of("waitpoint")) == 2
    assert await engine.find_inconsistencies() == []


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_locked_row_does_not_delay_the_other_suspends(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    held, free = await given.claimed(), await given.claimed()
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("select from execution where execution_id = $1 for update", uuid_of(held.execution_id))
    waiting = asyncio.ensure_future(engine.suspend(held, suspend_args()))
    await suspend_run(engine, free)
    assert not waiting.done()
    await transaction.rollback()
    assert isinstance(await waiting, Suspended)


async def test_a_closing_engine_finishes_running_suspends(engines: Engines, engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    async with second_engine(engine) as other:
        asked = asyncio.ensure_future(other.suspend(handle, suspend_args()))
        await asyncio.sleep(0)
    assert isinstance(await asked, Suspended)

"""Replays of many executions while other sessions have locked some of the rows that they need."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from engine.counts import miscounts
from engine.flow.driving import DrivenFlow
from engine.flow.submitting import is_awaited
from engine.flows import stop_cascade
from fixtures import Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.bulk import replays
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import cascade, replay
from flowfabric.engine.flow.replay import Replays
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import BulkResult
from flowfabric.model.states import PublicState
from sessions import session

Lock = Callable[[str, UUID | str], AbstractAsyncContextManager[asyncpg.Connection]]

A_DAY = 86_400.0
CHAIN = ("a b c", "a>b b>c")


@pytest.fixture
def lock(url: str) -> Lock:
    """Lock the row of a table with an id in another session, until the block ends or the session is closed."""

    @asynccontextmanager
    async def lock_row(table: str, row_id: UUID | str) -> AsyncIterator[asyncpg.Connection]:
        holder = await session(url, "holder")
        try:
            await holder.execute("begin")
            assert await holder.fetch(f"select from {table} where {table}_id = $1 for update", row_id)
            yield holder
        finally:
            await holder.close()

    return lock_row


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try everything once."""
    monkeypatch.setattr(replays, "PATIENCE_SECONDS", 0.0)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try until everything has a verdict, however slow the machine is."""
    monkeypatch.setattr(replays, "PATIENCE_SECONDS", A_DAY)


def result(matched: int, changed: int, **refused: int) -> BulkResult:
    """The result of a call."""
    return BulkResult(matched=matched, changed=changed, refused=refused, is_dry_run=False)


def after_transactions(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, call: Callable[[int], Awaitable[None]] | None = None
) -> list[int]:
    """Call a function with the number of each transaction that has replayed; return the list of the sizes of all."""
    service = parts_of(engine).services[Replays]
    transact = service._transact
    sizes: list[int] = []

    async def counted(execution_ids: Any, *arguments: Any, **named: Any) -> Any:
        sizes.append(len(execution_ids))
        written = await transact(execution_ids, *arguments, **named)
        if call is not None:
            await call(len(sizes))
        return written

    monkeypatch.setattr(service, "_transact", counted)
    return sizes


async def failed_chain(engine: Engine, rows: Rows) -> DrivenFlow:
    """A flow whose first member has failed, so that the two behind it were skipped."""
    flow = await DrivenFlow.submit(engine, rows, *CHAIN)
    await flow.fail("a")
    flow.handles.clear()
    assert await flow.states() == {"a": "failed", "b": "skipped", "c": "skipped"}
    return flow


async def reconcile(engine: Engine) -> None:
    """Let the safety net of dependencies look at everything."""
    parts = parts_of(engine)
    await parts.blocked.reconcile()
    await parts.cascade.drain()


RUNS_AGAIN = {"a": "waiting", "b": "waiting_children", "c": "waiting_children"}


@pytest.mark.parametrize("limit", [1, 500])
async def test_members_are_left_with_their_locked_upstream(
    engine: Engine,
    given: Given,
    rows: Rows,
    connection: asyncpg.Connection,
    lock: Lock,
    no_patience: None,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
) -> None:
    monkeypatch.setattr(replays, "REPLAY_LIMIT", limit)
    flow, other = await failed_chain(engine, rows), await failed_chain(engine, rows)
    alone = await given.failed()
    async with lock("execution", uuid_of(flow.id("a"))):
        async with rows.unchanged():
            assert await engine.replay_matching(flow_id=flow.flow_id) == result(3, 0, retry_exhausted=3)
        assert await engine.replay_matching(all_executions=True) == result(7, 4, retry_exhausted=3)
    assert await other.states() == RUNS_AGAIN
    assert await engine.read_execution_state(alone) is PublicState.WAITING
    await reconcile(engine)
    assert await engine.replay_matching(flow_id=flow.flow_id) == result(3, 3)
    await reconcile(engine)
    for each in (flow, other):
        assert await each.states() == RUNS_AGAIN
        for name in "abc":
            await each.succeed(name)
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []


@pytest.mark.parametrize("limit", [1, 500])
async def test_members_are_replayed_as_soon_as_their_upstream_is_free(
    engine: Engine, rows: Rows, lock: Lock, patience: None, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(replays, "REPLAY_LIMIT", limit)
    flow = await failed_chain(engine, rows)
    async with lock("execution", uuid_of(flow.id("a"))) as holder:

        async def release(transactions: int) -> None:
            await reconcile(engine)
            if transactions == 2:
                await holder.execute("rollback")

        sizes = after_transactions(engine, monkeypatch, release)
        assert await engine.replay_matching(flow_id=flow.flow_id) == result(3, 3)
    # What is behind the locked member takes no transaction.
    assert sizes == ([1, 1, 1, 1, 1] if limit == 1 else [3, 3, 3])
    await reconcile(engine)
    assert await flow.states() == RUNS_AGAIN


async def test_members_wait_for_an_upstream_whose_end_is_not_settled(
    engine: Engine, rows: Rows, lock: Lock, no_patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "REPLAY_LIMIT", 1)
    flow = await DrivenFlow.submit(engine, rows, "a b locked", "a>b a>locked")
    await flow.cancel("b")
    stop_cascade(engine)
    await flow.cancel("a")
    async with lock("execution", uuid_of(flow.id("locked"))):
        assert await engine.replay_matching(flow_id=flow.flow_id) == result(2, 0, retry_exhausted=2)
        assert (await flow.states())["b"] == "cancelled"


async def test_a_replay_waits_for_a_locked_flow(
    engine: Engine, rows: Rows, lock: Lock, patience: None, eventually: Eventually
) -> None:
    flow = await failed_chain(engine, rows)
    async with lock("flow", flow.flow_id) as holder:
        replaying = asyncio.create_task(engine.replay_matching(flow_id=flow.flow_id))
        await eventually(lambda: is_awaited(rows, holder))
        await holder.execute("rollback")
        assert await replaying == result(3, 3)
    assert await flow.states() == RUNS_AGAIN


# With sessions that wait for long, a replay that did not limit its wait would not end.
@pytest.mark.usefixtures("patient_with_locks")
async def test_a_flow_that_stays_locked_does_not_stop_others(
    engine: Engine,
    given: Given,
    rows: Rows,
    lock: Lock,
    patience: None,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flows = [await failed_chain(engine, rows) for _ in range(3)]
    alone = await given.failed()
    async with lock("flow", flows[0].flow_id) as first, lock("flow", flows[1].flow_id) as second:
        sizes = after_transactions(engine, monkeypatch)
        replaying = asyncio.create_task(engine.replay_matching(all_executions=True))
        for holder in (first, second):
            await eventually(lambda holder=holder: is_awaited(rows, holder))
        assert await flows[2].states() == RUNS_AGAIN
        assert await engine.read_execution_state(alone) is PublicState.WAITING
        # The success with the second flow is the last one that is waited for.
        monkeypatch.setattr(replays, "PATIENCE_SECONDS", 0.0)
        await second.execute("rollback")
        assert await replaying == result(10, 7, retry_exhausted=3)
    # All together, then the members of each flow, never fewer.
    assert sizes[0] == 10
    assert set(sizes[1:]) == {3}
    assert await flows[1].states() == RUNS_AGAIN
    assert await flows[0].states() == {"a": "failed", "b": "skipped", "c": "skipped"}


async def test_a_locked_flow_is_refused_alone_if_statements_may_not_wait_that_long(
    engines: Engines, rows: Rows, lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engines(statement_timeout_ms=1000)
    monkeypatch.setattr(replay, "FLOW_LOCK_TIMEOUT", "100s")
    monkeypatch.setattr(replays, "PATIENCE_SECONDS", 0.5)
    locked, other = await failed_chain(engine, rows), await failed_chain(engine, rows)
    async with lock("flow", locked.flow_id):
        assert await engine.replay_matching(all_executions=True) == result(6, 3, retry_exhausted=3)
    assert await other.states() == RUNS_AGAIN


async def test_a_locked_child_of_queued_ends_stops_no_other_flow(
    engine: Engine, rows: Rows, lock: Lock, patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A replay that waited for the locked child would not end.
    monkeypatch.setattr(cascade, "PATIENCE_SECONDS", A_DAY)
    stop_cascade(engine)
    pairs = "a>child b>child c>child d>child"
    flow, other = [await DrivenFlow.submit(engine, rows, "a b c d child", pairs) for _ in range(2)]
    for each in (flow, other):
        for name in "abcd":
            await each.cancel(name)

    async def stop_after_the_next_success(transactions: int) -> None:
        if transactions == 2:
            monkeypatch.setattr(replays, "PATIENCE_SECONDS", 0.0)

    sizes = after_transactions(engine, monkeypatch, stop_after_the_next_success)
    async with lock("execution", uuid_of(flow.id("child"))):
        answer = await engine.replay_matching(public_state="cancelled", all_executions=True)
        assert answer == result(8, 4, retry_exhausted=4)
    # All together, then those of each flow.
    assert sizes == [8, 4, 4]
    assert (await other.states())["a"] == "waiting"
    monkeypatch.setattr(replays, "PATIENCE_SECONDS", A_DAY)
    assert await engine.replay_matching(public_state="cancelled", all_executions=True) == result(4, 4)
    assert await engine.find_inconsistencies() == []

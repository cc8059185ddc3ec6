"""A row changes after a statement has read it and before the statement locks it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from engine.state import refused
from engine.waits import suspend_args
from fixtures import Clock, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.lease import Renewed
from flowfabric.model.stream import Frame
from sessions import session

WORKER: dict[str, Any] = {"worker_id": "worker", "worker_instance_id": "worker-1"}
GATE = 7
DAY = 86_400


class Gate:
    """Stops one call where it reads the clock, so that a test can change rows meanwhile."""

    def __init__(self, connection: asyncpg.Connection, eventually: Eventually) -> None:
        self._connection = connection
        self._eventually = eventually

    @asynccontextmanager
    async def closed(self, call: Any, *, at: str = "%") -> AsyncIterator[asyncio.Task[Any]]:
        """Start a call that stops at the gate, or at that statement, until the block ends; other calls pass."""
        await self._connection.execute("select pg_advisory_lock($1)", GATE)
        await self._connection.execute("update gate set is_closed = true, statement = $1", at)
        task = asyncio.create_task(call)
        query = """select exists (select from pg_locks join pg_database d on d.oid = database
                                   where datname = current_database() and objid = $1 and not granted)"""
        await self._eventually(lambda: self._connection.fetchval(query, GATE))
        await self._connection.execute("update gate set is_closed = false")
        try:
            yield task
        finally:
            await self._connection.execute("select pg_advisory_unlock($1)", GATE)


@pytest.fixture
async def gate(url: str, eventually: Eventually, patient_with_locks: None) -> AsyncIterator[Gate]:
    """A gate in the function that reads the clock."""
    connection = await session(url, "test gate")
    clock: str = await connection.fetchval("select pg_get_functiondef('ff_now'::regproc)")
    await connection.execute(clock.replace("ff_now()", "ff_ungated_now()"))
    await connection.execute("create table gate as select false as is_closed, '%' as statement")
    await connection.execute(
        f"""create or replace function ff_now() returns bigint language plpgsql volatile as $$
            begin
              if (select is_closed and current_query() like '/* ' || statement || ' */%' from gate) then
                perform pg_advisory_lock_shared({GATE}), pg_advisory_unlock_shared({GATE});
              end if;
              return ff_ungated_now();
            end $$"""
    )
    yield Gate(connection, eventually)
    await connection.close()


async def touch(connection: asyncpg.Connection, execution_id: str) -> None:
    """Update a row as a tag or a progress report does."""
    changed = "update execution set last_mutation_at = ff_now() where execution_id = $1"
    assert await connection.execute(changed, uuid_of(execution_id)) == "UPDATE 1"


async def test_an_execution_that_changes_during_a_claim_is_claimed_by_it_or_the_next(
    gate: Gate, engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    await given.claimed()
    execution_id = await given.created()
    # A claim reads the clock before it locks an execution that had a grant.
    await engine.issue_claim_grant(execution_id=execution_id, lane_id="default", **WORKER, grant_ttl_ms=1000)
    await clock.advance(seconds=2)

    async with gate.closed(engine.claim_many(lanes=("default",), **WORKER, limit=5)) as claim:
        await touch(connection, execution_id)
    found = await claim or await engine.claim_many(lanes=("default",), **WORKER, limit=5)

    assert [one.execution_id for one in found] == [execution_id]
    assert await engine.find_inconsistencies() == []


async def test_a_claim_does_not_lock_executions_that_another_claim_has_taken(
    gate: Gate, engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    await given.claimed()
    granted = await given.created()
    taken = {granted, await given.created(), await given.created()}
    await engine.issue_claim_grant(execution_id=granted, lane_id="default", **WORKER, grant_ttl_ms=1000)
    await clock.advance(seconds=2)

    async with gate.closed(engine.claim_many(lanes=("default",), **WORKER, limit=5)) as late:
        first = await engine.claim_many(lanes=("default",), **WORKER, limit=5)

    assert {one.execution_id for one in first} == taken
    assert await late == []
    # Without a later lock, xmax is 0 or the transaction that wrote the row.
    assert await connection.fetchval("select count(*) from execution where xmax not in (xmin, 0::text::xid)") == 0


async def test_a_renewal_of_a_row_that_changes_meanwhile_is_stored(
    gate: Gate, engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    await given.created()
    await given.created()
    handle, _ = [one.handle for one in await engine.claim_many(lanes=("default",), **WORKER, limit=2)]

    async with gate.closed(engine.renew(handle)) as renewal:
        await touch(connection, handle.execution_id)
    renewed = await renewal

    assert isinstance(renewed, Renewed)
    assert (await rows.execution(handle.execution_id))["lease_expires_at"] == renewed.expires_at_ms
    assert await engine.find_inconsistencies() == []


async def test_a_lease_that_expires_while_its_renewal_waits_is_not_renewed(
    gate: Gate, engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    handle = await given.claimed(lease_ttl_ms=30_000)
    async with connection.transaction():
        await connection.execute("select from claim for share")
        renewal = asyncio.create_task(engine.renew(handle))
        query = "select exists (select from pg_locks where not granted)"
        await eventually(lambda: connection.fetchval(query))
        await clock.advance(seconds=31)
    with pytest.raises(EngineError, match="lease_expired"):
        await renewal


async def test_an_execution_that_is_tagged_during_a_trim_is_deleted_by_the_next_trim(
    gate: Gate, engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    tagged, _ = await given.completed(), await given.completed()
    await clock.advance(seconds=DAY + 1)

    async with gate.closed(parts_of(engine).retention.trim_batch()) as trim:
        await engine.set_execution_tag(tagged, "app.team", "a")

    assert (await trim).done == 1
    assert [str(row["execution_id"]) for row in await rows.of("execution")] == [uuid_of(tagged)]
    assert await engine.find_inconsistencies() == []
    assert (await parts_of(engine).retention.trim_batch()).done == 1
    for table in ("execution", "execution_tag", "retained"):
        assert await rows.of(table) == []


Ending = Callable[[Engine, Handle], Awaitable[object]]


@pytest.mark.parametrize(
    "end",
    [
        lambda engine, handle: engine.hand_back(handle),
        lambda engine, handle: engine.suspend(handle, suspend_args()),
        lambda engine, handle: engine.complete(handle, b""),
    ],
    ids=["hand_back", "suspend", "complete"],
)
async def test_no_frame_is_stored_under_a_lease_that_ends_before_the_stream_is_locked(
    gate: Gate, engine: Engine, given: Given, rows: Rows, end: Ending
) -> None:
    handle = await given.claimed()
    await engine.append_frame(handle, Frame(bytes=b"first"))

    async with gate.closed(engine.append_frame(handle, Frame(bytes=b"late"))) as appending:
        await end(engine, handle)

    await refused(appending, "stream_closed", "the execution is ")
    assert [row["payload"] for row in await rows.of("stream_frame")] == [b"first"]


async def test_no_stream_is_created_under_a_lease_that_expires_after_it_was_read(
    gate: Gate,
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    connection: asyncpg.Connection,
    eventually: Eventually,
) -> None:
    handle = await given.claimed(lease_ttl_ms=30_000)
    held = connection.transaction()
    await held.start()
    await connection.execute("select from execution for update")
    appending = asyncio.create_task(engine.append_frame(handle, Frame(bytes=b"late")))
    await eventually(lambda: connection.fetchval("select exists (select from pg_locks where not granted)"))

    async def release() -> object:
        await held.rollback()
        return await appending

    # The transaction has locked the execution and read its lease; then it creates the stream.
    async with gate.closed(release(), at="open_streams") as released:
        await clock.advance(seconds=30)

    await refused(released, "stale_owner_cannot_append", "the lease has expired; renew it in time")
    assert await rows.of("stream") == []
    assert (await rows.execution(handle.execution_id))["attached"] == 0

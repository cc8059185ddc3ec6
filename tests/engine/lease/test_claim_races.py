"""Concurrent claims, and rows that change while a claim runs."""

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from engine.cases import SWEEPS_WHOLE, in_turn
from engine.state import attempts, claim, ids, made, new
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.states import HandleKind

GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}

# A session with test.waits waits for an advisory lock while it chooses queues: it has its snapshot but has read no row.
_SLOW_CHOICE = """
create function test_waits() returns boolean language plpgsql volatile as $$
begin
  if current_setting('test.waits', true) = 'yes' then
    perform pg_advisory_xact_lock_shared(42);
  end if;
  return true;
end $$;
alter table capability_set rename to capability_set_itself;
create view capability_set as select * from capability_set_itself where test_waits();
"""
_IS_WAITING = "select count(*) > 0 from pg_locks where locktype = 'advisory' and not granted"


@in_turn(
    "held, free, search",
    [
        ({"lane_id": "a"}, {"lane_id": "b"}, lambda engine: claim(engine, "a", "b", limit=1)),
        ({"policy": GPU}, {}, lambda engine: claim(engine, capabilities=("gpu",), limit=1)),
    ],
)
async def test_a_locked_row_does_not_hide_those_of_other_queues(
    engine: Engine, connection: asyncpg.Connection, held: Any, free: Any, search: Callable[[Engine], Any]
) -> None:
    held_id, free_id = await made(engine, new(**held), new(**free))
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(held_id))
        assert ids(await search(engine)) == [free_id]
    assert ids(await search(engine)) == [held_id]


async def test_concurrent_claims_for_as_many_rows_each_get_one(engines: Engines) -> None:
    rivals = [await engines() for _ in range(3)]
    lanes = ("a", "b", "c")
    for _ in range(100 if SWEEPS_WHOLE else 30):
        created = await made(rivals[0], *(new(lane_id=lane) for lane in lanes))
        taken = await asyncio.gather(*(claim(rival, *lanes, limit=1) for rival in rivals))
        assert sorted(ids([one for some in taken for one in some])) == sorted(created)


async def slow_claim(
    slow: Engine, connection: asyncpg.Connection, eventually: Eventually, **wanted: Any
) -> asyncio.Task[list[Any]]:
    """Start a claim that stops after its snapshot and before it reads rows, until the advisory lock is released."""
    await claim(slow, "nothing")
    await connection.execute(_SLOW_CHOICE)
    async with parts_of(slow).lifecycle.store.database.acquire() as session:
        await session.execute("set test.waits = 'yes'")
    await connection.execute("select pg_advisory_lock(42)")
    searching = asyncio.create_task(claim(slow, **wanted))
    await eventually(lambda: connection.fetchval(_IS_WAITING))
    return searching


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_claim_with_an_old_snapshot_does_not_damage_a_row_that_was_claimed_and_lost(
    engines: Engines, connection: asyncpg.Connection, given: Given, rows: Rows, clock: Clock, eventually: Eventually
) -> None:
    slow, quick = await engines(), await engines()
    execution_id = await given.created()
    searching = await slow_claim(slow, connection, eventually)
    (lost,) = await claim(quick, lease_ttl_ms=1000)
    await clock.advance(seconds=2)
    assert await parts_of(quick).lease_expiry.sweep() == 1
    await connection.execute("select pg_advisory_unlock(42)")
    await searching
    if not searching.result():
        assert [row["attempt_state"] for row in await attempts(rows, execution_id)] == ["started"]
        searching = asyncio.create_task(claim(quick))
    (taken,) = await searching
    assert (taken.execution_id, taken.handle.kind) == (lost.execution_id, HandleKind.RECLAIMED)
    assert [(row["attempt_index"], row["attempt_state"]) for row in await attempts(rows, execution_id)] == [
        (0, "interrupted_reclaimed"),
        (1, "started"),
    ]
    assert await rows.of("ready") == []


CHANGES: dict[str, Callable[[Engine, str], Any]] = {
    "a tag": lambda engine, execution_id: engine.set_execution_tag(execution_id, "a.b", "c"),
    "an expired grant": lambda engine, execution_id: engine.issue_claim_grant(
        execution_id=execution_id, lane_id="default", worker_id="pool", worker_instance_id="pool-1", grant_ttl_ms=1000
    ),
}


@pytest.mark.usefixtures("patient_with_locks")
@pytest.mark.parametrize("change", CHANGES)
async def test_an_execution_that_changes_during_a_claim_can_still_be_claimed(
    engines: Engines,
    engine: Engine,
    connection: asyncpg.Connection,
    given: Given,
    rows: Rows,
    clock: Clock,
    eventually: Eventually,
    change: str,
) -> None:
    slow = await engines()
    changed, other = await given.created(), await given.created()
    searching = await slow_claim(slow, connection, eventually)
    await CHANGES[change](engine, changed)
    await clock.advance(seconds=2)
    await connection.execute("select pg_advisory_unlock(42)")
    taken = ids(await searching)
    assert other in taken
    assert await engine.find_inconsistencies() == []
    taken += ids(await claim(engine))
    assert sorted(taken) == sorted([changed, other])
    assert await rows.of("ready") == []


@pytest.mark.usefixtures("patient_with_locks")
async def test_an_execution_queued_again_during_a_claim_is_leased_once(
    engines: Engines, engine: Engine, connection: asyncpg.Connection, given: Given, rows: Rows, eventually: Eventually
) -> None:
    slow = await engines()
    requeued = await given.created()
    searching = await slow_claim(slow, connection, eventually)
    (first,) = await claim(engine)
    await engine.hand_back(first.handle)
    await connection.execute("select pg_advisory_unlock(42)")
    taken = [*await searching, *await claim(engine)]
    assert ids(taken) == [requeued]
    row = await rows.execution(requeued)
    assert (row["lease_epoch"], row["lease_id"]) == (2, taken[0].lease_id)
    assert (await rows.of("ready"), len(await rows.events(requeued))) == ([], 3)

"""Claims that meet other claims, and rows that move while a claim is under way."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine.state import attempts, claim, ids, made, new
from flowfabric.engine.engine import Engine
from flowfabric.model.states import HandleKind

GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}

# A session that says so waits for an advisory lock while it chooses queues: its snapshot is taken by then, no row yet.
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


@pytest.mark.parametrize(
    ("held", "free", "search"),
    [
        ({"lane_id": "a"}, {"lane_id": "b"}, lambda engine: claim(engine, "a", "b", limit=1)),
        ({"policy": GPU}, {}, lambda engine: claim(engine, capabilities=("gpu",), limit=1)),
    ],
    ids=["another lane", "another set of capabilities"],
)
async def test_a_row_somebody_holds_does_not_hide_those_of_other_queues(
    engine: Engine, connection: Any, held: Any, free: Any, search: Callable[[Engine], Any]
) -> None:
    held_id, free_id = await made(engine, new(**held), new(**free))
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", held_id[-36:])
        assert ids(await search(engine)) == [free_id]
    assert ids(await search(engine)) == [held_id]


async def test_as_many_claims_as_rows_each_find_one(engines: Any) -> None:
    rivals = [await engines() for _ in range(3)]
    lanes = ("a", "b", "c")
    for _ in range(100):
        created = await made(rivals[0], *(new(lane_id=lane) for lane in lanes))
        taken = await asyncio.gather(*(claim(rival, *lanes, limit=1) for rival in rivals))
        assert sorted(ids([one for some in taken for one in some])) == sorted(created)


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_claim_that_saw_a_row_before_it_was_taken_and_lost_leaves_it_whole(
    engines: Any, connection: Any, given: Any, rows: Any, clock: Any, eventually: Any
) -> None:
    slow, quick = await engines(), await engines()
    execution_id = await given.created()
    await claim(slow, "nothing")
    await connection.execute(_SLOW_CHOICE)
    async with slow._lifecycle.store.database.acquire() as session:
        await session.execute("set test.waits = 'yes'")
    await connection.execute("select pg_advisory_lock(42)")
    searching = asyncio.create_task(claim(slow))
    await eventually(lambda: connection.fetchval(_IS_WAITING))
    (lost,) = await claim(quick, lease_ttl_ms=1000)
    await clock.advance(seconds=2)
    assert await quick.lease_expiry.mark_expired() == 1
    await connection.execute("select pg_advisory_unlock(42)")
    await searching
    if not searching.result():
        assert await attempts(rows, execution_id) == []
        searching = asyncio.create_task(claim(quick))
    (taken,) = await searching
    assert (taken.execution_id, taken.handle.kind) == (lost.execution_id, HandleKind.RECLAIMED)
    assert [(row["attempt_index"], row["attempt_state"]) for row in await attempts(rows, execution_id)] == [
        (0, "interrupted_reclaimed")
    ]

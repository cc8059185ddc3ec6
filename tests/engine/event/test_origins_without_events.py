"""A failover or restore while no event is stored: all were deleted, and what is known about them stays true."""

import asyncpg
import pytest

from fixtures import Clock, Given
from flowfabric.engine.engine import Engine

from .following import DAY, expired, ids, is_quiet, take, trim
from .test_origins import come_from_another_server, foreign

pytestmark = pytest.mark.usefixtures("patient_with_locks", "fast_polls")
__all__ = ["foreign"]

LATE = """
insert into event (at, partition_key, kind, namespace_no, execution_id, outcome)
values (ff_now(), 1, 'ended', 1, gen_random_uuid(), 1)
"""


async def delete_all(engine: Engine, clock: Clock, connection: asyncpg.Connection) -> None:
    """Let every event pass its retention and delete it."""
    await clock.advance(seconds=2 * DAY)
    assert await trim(engine) > 0
    assert await connection.fetchval("select count(*) from event") == 0


async def fail_over(engine: Engine, connection: asyncpg.Connection, earlier: str) -> None:
    """Let the last origin be a server of this name, and record the present one as the next."""
    await connection.execute(
        "update feed_origin set origin = $1 where generation = (select max(generation) from feed_origin)", earlier
    )
    await engine.prepare()


async def test_a_cursor_that_has_read_all_deleted_events_stays_valid(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    async with engine.subscribe_completion() as events:
        await given.completed()
        await take(events, 1)
        assert await is_quiet(events)
        saved = events.cursor
    await delete_all(engine, clock, connection)
    (cursor,) = await come_from_another_server(connection, [saved], 0)
    await engine.prepare()
    later = await given.completed()
    async with engine.subscribe_completion(cursor) as resumed:
        assert ids(await take(resumed, 1)) == [later]


async def test_a_late_event_that_was_deleted_after_a_second_failover_is_missed_by_no_cursor(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, foreign: asyncpg.Connection
) -> None:
    await given.completed()
    await foreign.execute("rollback")
    await fail_over(engine, connection, "first")
    await delete_all(engine, clock, connection)
    await fail_over(engine, connection, "second")
    await foreign.execute("begin")
    await foreign.execute(LATE)
    async with engine.subscribe_completion() as events:
        await given.completed()
        await take(events, 1)
        assert await is_quiet(events)
        saved = events.cursor
    await foreign.execute("commit")
    await foreign.execute("begin")
    await delete_all(engine, clock, connection)
    await given.completed()
    await expired(engine.subscribe_completion(saved))

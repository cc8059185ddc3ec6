"""For tests of feeds: taking events, the events that the tables hold, and commits that a test delays."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg
import pytest

from engine.state import items, new
from fixtures import Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.errors import InvalidInputError
from flowfabric.feeds import FeedEvent, Subscription
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import LaneId, Partitions
from sessions import session

Event = TypeVar("Event", bound=FeedEvent)

HOLDS = """
create function test_hold() returns trigger language plpgsql as $$
begin
  perform set_config('lock_timeout', '100s', true);
  perform pg_advisory_xact_lock_shared(7, new.partition_key);
  return null;
end $$;
create constraint trigger test_hold after insert on event_default deferrable initially deferred
  for each row execute function test_hold();
"""
"""Lets a test delay the commit of every transaction that has written an event of one partition."""

SLOW = "slow"
"""The lane whose commits are delayed."""


DAY = 86_400


async def trim(engine: Engine) -> int:
    """Delete the events past their retention, by both ways; return how many rows and partitions."""
    partitions = parts_of(engine).event_partitions
    changed = await partitions.keep_partitions()
    while deleted := await partitions.trim_events():
        changed += deleted
    return changed


async def expired(subscription: Subscription[Any]) -> bytes:
    """The oldest cursor that a subscription names when it is refused or ends as too old."""
    with pytest.raises(InvalidInputError) as caught:
        await take(subscription, 1, seconds=10)
    assert isinstance(caught.value.detail, dict)
    assert caught.value.code == "invalid_input"
    assert caught.value.detail["reason"] == "cursor_expired"
    assert str(caught.value).startswith(
        "invalid_input: events after this cursor were deleted, see FF_FEED_RETENTION_MS;"
    )
    oldest = caught.value.detail["oldest_cursor"]
    assert isinstance(oldest, bytes)
    return oldest


async def take(subscription: Subscription[Event], count: int, *, seconds: float = 30) -> list[Event]:
    """The next events of a subscription."""
    async with asyncio.timeout(seconds):
        return [await anext(subscription) for _ in range(count)]


async def is_quiet(subscription: Subscription[Event], *, seconds: float = 0.1) -> bool:
    """Whether no event arrives for a while."""
    try:
        async with asyncio.timeout(seconds):
            await anext(subscription)
    except TimeoutError:
        return True
    return False


def ids(events: Iterable[FeedEvent]) -> list[str]:
    """The execution ids of events."""
    return [event.execution_id for event in events]


async def stored(rows: Rows, *kinds: str) -> list[tuple[str, str]]:
    """The execution and the kind of every stored event of these kinds, in the order of their ids."""
    found = [row for row in await rows.of("event_each") if row["kind"] in kinds]
    found.sort(key=lambda row: (row["event_id"], row["nth"] or 0))
    return [(f"{{fp:{row['partition_key']}}}:{row['execution_id']}", row["kind"]) for row in found]


async def complete_together(engine: Engine, count: int, **overrides: object) -> list[str]:
    """Complete new executions in one statement, so that they share an event; return their ids in its order."""
    arguments = new(**overrides)
    made = await engine.create_many(items(*[arguments] * count))
    lane = str(arguments["lane_id"])
    claimed = await engine.claim_many(lanes=(lane,), worker_id="w", worker_instance_id="w-1", limit=count)
    assert len(claimed) == len(made) == count
    for verdict in await engine.complete_many([(one.handle, b"") for one in claimed]):
        assert not isinstance(verdict, EngineError), verdict
    return [one.execution_id for one in claimed]


@asynccontextmanager
async def held_commits(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Delay commits of events of the lane SLOW until the block ends; needs the alteration HOLDS."""
    connection = await session(url, "test hold")
    try:
        await connection.execute("select pg_advisory_lock(7, $1)", Partitions().of_lane(LaneId(SLOW)))
        yield connection
    finally:
        await connection.close()


async def waits_for_commit(connection: asyncpg.Connection) -> bool:
    """Whether a commit is being delayed."""
    query = "select exists (select from pg_locks where locktype = 'advisory' and classid = 7 and not granted)"
    return bool(await connection.fetchval(query))

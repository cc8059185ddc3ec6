"""No committed event is skipped, although events are not committed in the order of their ids."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from engine.sending import waiting
from engine.state import items, new
from fixtures import Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import OLDEST, FeedEvent, Subscription
from flowfabric.model.cursor import decode_cursor
from flowfabric.model.event import EventFamily
from sessions import session

from .following import HOLDS, SLOW, held_commits, ids, is_quiet, stored, take, waits_for_commit

Call = Callable[[Engine], Coroutine[Any, Any, object]]
Prepare = Callable[[Engine, Given, str], Awaitable[tuple[str, Call]]]
"""Prepares an execution on a lane; returns its id and the call that writes an event of it."""

pytestmark = pytest.mark.usefixtures("patient_with_locks", "fast_polls")


@pytest.fixture
def alteration() -> str:
    """Lets a test delay commits."""
    return HOLDS


@pytest.fixture
async def foreign(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Another session on the database."""
    connection = await session(url, "test foreign")
    yield connection
    await connection.close()


async def test_an_event_that_is_committed_late_is_delivered_late(
    engine: Engine, given: Given, url: str, eventually: Eventually, rows: Rows
) -> None:
    slow, fast = await given.claimed(lane_id=SLOW), await given.claimed()
    async with engine.subscribe_completion() as events, engine.subscribe_completion() as resumed:
        start = events.cursor
        async with held_commits(url) as holder:
            completing = asyncio.create_task(engine.complete(slow))
            await eventually(lambda: waits_for_commit(holder))
            await engine.complete(fast)
            (first,) = await take(events, 1)
            assert first.execution_id == fast.execution_id
            assert await is_quiet(events)
        await completing
        assert ids(await take(events, 1)) == [slow.execution_id]
        assert ids(await take(resumed, 2)) == [fast.execution_id, slow.execution_id]
    # The event that was committed last has the lower id.
    assert [one for one, _ in await stored(rows, "released")] == [slow.execution_id, fast.execution_id]
    async with engine.subscribe_completion(first.cursor) as after_fast, engine.subscribe_completion(start) as whole:
        assert ids(await take(after_fast, 1)) == [slow.execution_id]
        assert ids(await take(whole, 2)) == [slow.execution_id, fast.execution_id]


async def _completing(engine: Engine, given: Given, lane: str) -> tuple[str, Call]:
    handle = await given.claimed(lane_id=lane)
    return handle.execution_id, lambda engine: engine.complete(handle)


async def _delaying(engine: Engine, given: Given, lane: str) -> tuple[str, Call]:
    handle = await given.claimed(lane_id=lane)
    return handle.execution_id, lambda engine: engine.delay(handle, 60_000)


async def _signalling(engine: Engine, given: Given, lane: str) -> tuple[str, Call]:
    wait = await waiting(engine, given, lane_id=lane)
    signal = wait.signal("other")
    return wait.execution_id, lambda engine: engine.deliver_signal(**signal)


async def _resuming(engine: Engine, given: Given, lane: str) -> tuple[str, Call]:
    wait = await waiting(engine, given, lane_id=lane)
    return wait.execution_id, lambda engine: engine.resume_execution(execution_id=wait.execution_id)


async def _tagging(engine: Engine, given: Given, lane: str) -> tuple[str, Call]:
    made = await given.created(lane_id=lane)
    return made, lambda engine: engine.set_execution_tag(made, "ff.instance_id", "a")


@pytest.mark.parametrize(
    ("subscribe", "prepare"),
    [
        (Engine.subscribe_completion, _completing),
        (Engine.subscribe_lease_history, _delaying),
        (Engine.subscribe_signal_delivery, _signalling),
        (Engine.subscribe_operator_events, _resuming),
        (Engine.subscribe_instance_tags, _tagging),
    ],
    ids=list(EventFamily),
)
async def test_an_event_of_any_feed_that_is_committed_late_is_delivered_late(
    engine: Engine,
    engines: Engines,
    given: Given,
    url: str,
    eventually: Eventually,
    subscribe: Callable[[Engine, bytes], Subscription[FeedEvent]],
    prepare: Prepare,
) -> None:
    other = await engines()
    slow, write_slow = await prepare(engine, given, SLOW)
    fast, write_fast = await prepare(engine, given, "fast")
    async with subscribe(engine, b"") as events:
        async with held_commits(url) as holder:
            writing = asyncio.create_task(write_slow(engine))
            await eventually(lambda: waits_for_commit(holder))
            await write_fast(other)
            (first,) = await take(events, 1)
            assert first.execution_id == fast
            await eventually(lambda: events.cursor != first.cursor)
            cursors = [first.cursor, events.cursor]
            assert await is_quiet(events)
        await writing
        assert ids(await take(events, 1)) == [slow]
    for cursor in cursors:
        async with subscribe(engine, cursor) as resumed:
            assert ids(await take(resumed, 1)) == [slow]


async def test_an_event_in_flight_when_a_subscription_starts_is_delivered(
    engine: Engine, given: Given, url: str, eventually: Eventually
) -> None:
    slow = await given.claimed(lane_id=SLOW)
    await given.completed()
    async with held_commits(url) as holder:
        completing = asyncio.create_task(engine.complete(slow))
        await eventually(lambda: waits_for_commit(holder))
        events = await engine.subscribe_completion()
        oldest = await engine.subscribe_completion(OLDEST)
        await take(oldest, 1)
    await completing
    assert ids(await take(events, 1)) == [slow.execution_id]
    assert ids(await take(oldest, 1)) == [slow.execution_id]
    await events.aclose()
    await oldest.aclose()


async def test_a_transaction_that_the_snapshot_does_not_list_is_not_forgotten(
    engine: Engine, given: Given, url: str, foreign: asyncpg.Connection, eventually: Eventually
) -> None:
    """A snapshot lists the transactions in progress only up to the last one that has ended."""
    slow = await given.claimed(lane_id=SLOW)
    parts_of(engine).wakeups.hints.start_listening()
    await eventually(lambda: _sends_nothing(engine))
    async with engine.subscribe_completion() as events:
        async with held_commits(url) as holder:
            # The transaction of another writer, without its hints: each hint is a transaction that ends.
            await foreign.execute("begin")
            early = await foreign.fetchval("select pg_current_xact_id()")
            completing = asyncio.create_task(engine.complete(slow))
            await eventually(lambda: waits_for_commit(holder))
            other = await foreign.fetchval(
                """insert into event (at, partition_key, kind, namespace_no, execution_id, outcome)
                   values (ff_now(), 1, 'ended', 1, gen_random_uuid(), 1) returning execution_id"""
            )
            await foreign.execute("commit")
            (first,) = await take(events, 1)
            assert uuid_of(first.execution_id) == str(other)
            position = decode_cursor(first.cursor, EventFamily.COMPLETION)
            assert position is not None
            assert position.window is not None
            assert (position.window.xmax, position.window.in_progress) == (early + 1, ())
        await completing
        assert ids(await take(events, 1)) == [slow.execution_id]
    async with engine.subscribe_completion(first.cursor) as resumed:
        assert ids(await take(resumed, 1)) == [slow.execution_id]


async def test_a_long_transaction_of_someone_else_delays_nothing(
    engine: Engine, given: Given, foreign: asyncpg.Connection
) -> None:
    await foreign.execute("begin")
    await foreign.fetchval("select pg_current_xact_id()")
    async with engine.subscribe_completion() as events:
        for _ in range(3):
            one = await given.completed()
            (event,) = await take(events, 1, seconds=2)
            assert event.execution_id == one
        async with engine.subscribe_completion(event.cursor) as resumed:
            two = await given.completed()
            assert ids(await take(resumed, 1, seconds=2)) == [two]
        await foreign.execute("commit")
        assert ids(await take(events, 1)) == [two]
        assert await is_quiet(events)


async def test_a_shared_event_that_is_committed_late_can_be_resumed_in_its_middle(
    engine: Engine, given: Given, url: str, eventually: Eventually, rows: Rows
) -> None:
    await engine.create_many(items(*[new(lane_id=SLOW)] * 20))
    claimed = await engine.claim_many(lanes=(SLOW,), worker_id="w", worker_instance_id="w-1", limit=20)
    async with engine.subscribe_completion() as events:
        async with held_commits(url) as holder:
            completing = asyncio.create_task(engine.complete_many([(one.handle, b"") for one in claimed]))
            await eventually(lambda: waits_for_commit(holder))
            fast = await given.completed()
            assert ids(await take(events, 1)) == [fast]
        assert len(await completing) == 20
        found = await take(events, 20)
    assert ids(found) == [one.execution_id for one in claimed]
    assert len(await rows.of("event", kind="released", partition_key=int(found[0].execution_id[4:-38]))) == 1
    later = await given.completed()
    for nth in (0, 7, 18, 19):
        async with engine.subscribe_completion(found[nth].cursor) as resumed:
            assert ids(await take(resumed, 20 - nth)) == [*ids(found[nth + 1 :]), later]


def _sends_nothing(engine: Engine) -> bool:
    hints = parts_of(engine).wakeups.hints
    return hints.is_listening and not hints._is_sending and not hints._pending

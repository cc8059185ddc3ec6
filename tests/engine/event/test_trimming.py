"""A cursor that may need deleted events is refused, and names one that continues; other cursors stay valid."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from engine.sending import waiting
from fixtures import Clock, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.event.reader import Reader
from flowfabric.engine.parts import parts_of
from flowfabric.errors import InvalidInputError
from flowfabric.feeds import OLDEST
from sessions import session

from .following import DAY, HOLDS, SLOW, complete_together, expired, held_commits, ids, take, trim, waits_for_commit


@pytest.fixture(params=["partitions", "rows"])
async def kept(request: pytest.FixtureRequest, engine: Engine, clock: Clock) -> Engine:
    """An engine whose events are in daily partitions, which are dropped, or in one that is trimmed row by row."""
    if request.param == "partitions":
        assert await parts_of(engine).event_partitions.keep_partitions() == 3
    return engine


async def test_a_cursor_before_deleted_events_is_refused_when_the_subscription_starts(
    kept: Engine, given: Given, clock: Clock
) -> None:
    async with kept.subscribe_completion() as events:
        await given.completed()
        (first,) = await take(events, 1)
        await given.completed()
    await clock.advance(seconds=2 * DAY)
    fresh = await given.completed()
    assert await trim(kept) > 0
    with pytest.raises(InvalidInputError, match="events after this cursor were deleted"):
        await kept.subscribe_completion(first.cursor)
    with pytest.raises(InvalidInputError, match="events after this cursor were deleted"):
        async with kept.subscribe_completion(first.cursor):
            pass
    oldest = await expired(kept.subscribe_completion(first.cursor))
    async with kept.subscribe_completion(oldest) as resumed:
        (event,) = await take(resumed, 1)
        assert event.execution_id == fresh
    async with kept.subscribe_completion(event.cursor) as resumed:
        later = await given.completed()
        assert ids(await take(resumed, 1)) == [later]


async def test_a_cursor_in_the_middle_of_a_deleted_event_is_refused(kept: Engine, clock: Clock, given: Given) -> None:
    async with kept.subscribe_completion() as events:
        await complete_together(kept, 5)
        found = await take(events, 5)
    await clock.advance(seconds=2 * DAY)
    assert await trim(kept) > 0
    await expired(kept.subscribe_completion(found[3].cursor))
    async with kept.subscribe_completion(found[4].cursor) as resumed:
        later = await given.completed()
        assert ids(await take(resumed, 1)) == [later]


async def test_a_cursor_after_all_deleted_events_stays_valid(kept: Engine, clock: Clock, given: Given) -> None:
    async with kept.subscribe_completion() as events, kept.subscribe_lease_history() as leases:
        await given.completed()
        (last,) = await take(events, 1)
        await take(leases, 2)
        saved, saved_lease = events.cursor, leases.cursor
    for _ in range(4):
        await clock.advance(seconds=DAY)
        await trim(kept)
    later = await given.completed()
    for cursor in (last.cursor, saved):
        async with kept.subscribe_completion(cursor) as resumed:
            assert ids(await take(resumed, 1)) == [later]
    async with kept.subscribe_lease_history(saved_lease) as resumed_leases:
        assert ids(await take(resumed_leases, 2)) == [later, later]


async def test_a_rare_feed_is_not_affected_by_deleted_events_of_others(
    kept: Engine, clock: Clock, given: Given
) -> None:
    wait = await waiting(kept, given)
    async with kept.subscribe_signal_delivery() as signals, kept.subscribe_completion() as completions:
        await wait.send("other")
        (signal,) = await take(signals, 1)
        start = completions.cursor
    await clock.advance(seconds=1)
    for _ in range(3):
        await given.completed()
    await clock.advance(seconds=2 * DAY)
    await trim(kept)
    await expired(kept.subscribe_completion(start))
    again = await waiting(kept, given)
    await again.send("other")
    async with kept.subscribe_signal_delivery(signal.cursor) as resumed:
        assert ids(await take(resumed, 1)) == [again.execution_id]
    await clock.advance(seconds=2 * DAY)
    await trim(kept)
    await expired(kept.subscribe_signal_delivery(signal.cursor))


async def test_a_subscription_that_is_too_slow_ends_as_expired(
    engine: Engine, clock: Clock, given: Given, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "PAGE", 1)
    made = [one for _ in range(3) for one in await complete_together(engine, 1000)]
    async with engine.subscribe_completion(OLDEST) as events:
        await eventually(lambda: len(events._buffer.events) == 1024)
        await clock.advance(seconds=2 * DAY)
        fresh = await given.completed()
        while await trim(engine):
            pass
        # What was read before is still delivered.
        assert ids(await take(events, 2000)) == made[:2000]
        last = events.cursor
        assert await expired(events) == OLDEST
        with pytest.raises(StopAsyncIteration):
            await anext(events)
    await expired(engine.subscribe_completion(last))
    async with engine.subscribe_completion(OLDEST) as resumed:
        assert ids(await take(resumed, 1)) == [fresh]


async def test_the_oldest_cursor_reads_what_is_left_with_cursors_that_stay_valid(
    engine: Engine, clock: Clock, given: Given, connection: asyncpg.Connection
) -> None:
    made = [await given.completed() for _ in range(4)]
    # Ages and ids need not agree: the last event of the first day has the highest id of that day.
    await connection.execute(
        "update event set at = at + $1 where kind = 'released' and event_id < (select max(event_id) from event)",
        3 * DAY * 1000,
    )
    await clock.advance(seconds=2 * DAY)
    assert await trim(engine) > 0
    async with engine.subscribe_completion(OLDEST) as events:
        found = await take(events, 3)
        assert ids(found) == made[:3]
    for nth, event in enumerate(found[:2]):
        async with engine.subscribe_completion(event.cursor) as resumed:
            assert ids(await take(resumed, 2 - nth)) == made[nth + 1 : 3]


class TestLateEvents:
    """Deleted events of transactions that were in progress when the cursor was saved."""

    @pytest.fixture
    def alteration(self) -> str:
        """Lets a test delay commits."""
        return HOLDS

    @pytest.fixture
    async def foreign(self, url: str) -> AsyncIterator[asyncpg.Connection]:
        """Another session on the database."""
        connection = await session(url, "test foreign")
        yield connection
        await connection.close()

    @pytest.mark.usefixtures("patient_with_locks", "fast_polls")
    async def test_a_cursor_is_refused_if_an_event_that_was_committed_late_is_deleted(
        self, engine: Engine, given: Given, clock: Clock, url: str, eventually: Eventually
    ) -> None:
        slow, fast = await given.claimed(lane_id=SLOW), await given.claimed()
        async with engine.subscribe_completion() as events:
            async with held_commits(url) as holder:
                completing = asyncio.create_task(engine.complete(slow))
                await eventually(lambda: waits_for_commit(holder))
                await engine.complete(fast)
                (event,) = await take(events, 1)
                await eventually(lambda: events.cursor != event.cursor)
                cursors = [event.cursor, events.cursor]
            await completing
        for cursor in cursors:
            async with engine.subscribe_completion(cursor) as resumed:
                assert ids(await take(resumed, 1)) == [slow.execution_id]
        await clock.advance(seconds=2 * DAY)
        assert await trim(engine) > 0
        for cursor in cursors:
            await expired(engine.subscribe_completion(cursor))

    async def test_a_transaction_that_is_still_in_progress_has_no_deleted_events(
        self, engine: Engine, given: Given, clock: Clock, foreign: asyncpg.Connection
    ) -> None:
        await foreign.execute("begin")
        await foreign.fetchval("select pg_current_xact_id()")
        async with engine.subscribe_completion() as events:
            await given.completed()
            (event,) = await take(events, 1)
            await clock.advance(seconds=2 * DAY)
            assert await trim(engine) > 0
            later = await given.completed()
            assert ids(await take(events, 1)) == [later]
        async with engine.subscribe_completion(event.cursor) as resumed:
            assert ids(await take(resumed, 1)) == [later]
        await foreign.execute("commit")


async def test_the_newest_deleted_event_of_each_family_is_recorded(
    kept: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    wait = await waiting(kept, given)
    await wait.send("other")
    (signal,) = await rows.of("event", kind="signal")
    await given.completed()
    newest = max(rows_of["event_id"] for rows_of in await rows.of("event"))
    await clock.advance(seconds=2 * DAY)
    assert await trim(kept) > 0
    marks = {row["family"]: (row["event_id"], row["trims"]) for row in await rows.of("feed_trim")}
    assert marks == {"completion": (newest, 1), "lease_event": (newest, 1), "signal_event": (signal["event_id"], 1)}
    assert await trim(kept) == 0
    assert {row["trims"] for row in await rows.of("feed_trim")} == {1}


async def test_a_deleted_event_of_an_unknown_kind_is_of_the_history_of_leases(
    kept: Engine, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    # A newer version writes kinds that this one does not know.
    await connection.execute("alter type event_kind add value 'teleported'")
    await connection.execute(
        """insert into event (at, partition_key, kind, namespace_no, execution_id)
           values (ff_now(), 1, 'teleported', 1, gen_random_uuid())"""
    )
    await clock.advance(seconds=2 * DAY)
    assert await trim(kept) > 0
    assert [row["family"] for row in await rows.of("feed_trim")] == ["lease_event"]

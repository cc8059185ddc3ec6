"""Transaction ids of another server are never compared with those of this one."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import asyncpg
import pytest

from faults.cluster import Cluster
from fixtures import Clock, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.event.reader import Reader
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import OLDEST
from flowfabric.model.cursor import decode_cursor, encode_cursor
from flowfabric.model.event import EventFamily
from flowfabric.model.position import Position, Snapshot
from flowfabric.settings import Settings
from sessions import session

from .following import (
    DAY,
    HOLDS,
    SLOW,
    complete_together,
    expired,
    held_commits,
    ids,
    is_quiet,
    take,
    trim,
    waits_for_commit,
)

SECRET = "ab" * 32


@pytest.fixture
async def foreign(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session with a transaction in progress."""
    connection = await session(url, "test foreign")
    await connection.execute("begin")
    yield connection
    await connection.execute("rollback")
    await connection.close()


async def come_from_another_server(connection: asyncpg.Connection, cursors: list[bytes], shift: int) -> list[bytes]:
    """Give the events transaction ids of another server, as after a restore; return the cursors of that server."""
    await connection.execute("update event set xid = (xid::text::bigint + $1)::text::xid8", shift)
    await connection.execute(
        "update feed_trim set xids = array(select (xid::text::bigint + $1)::text::xid8 from unnest(xids) as x(xid))",
        shift,
    )
    await connection.execute("update feed_origin set origin = 'another server'")
    return [encode_cursor(_shifted(decode_cursor(cursor, EventFamily.COMPLETION), shift)) for cursor in cursors]


def _shifted(position: Position | None, shift: int) -> Position:
    assert position is not None

    def shifted(snapshot: Snapshot) -> Snapshot:
        return replace(
            snapshot,
            xmax=snapshot.xmax + shift,
            next_xid=snapshot.next_xid + shift,
            in_progress=tuple(xid + shift for xid in snapshot.in_progress),
        )

    window = None if position.window is None else shifted(position.window)
    return replace(position, before=shifted(position.before), window=window, origin=zlib.crc32(b"another server"))


class TestLateEvents:
    """An event was in flight when the cursor was saved, and was committed before the dump."""

    @pytest.fixture
    def alteration(self) -> str:
        """Lets a test delay commits."""
        return HOLDS

    @pytest.mark.usefixtures("patient_with_locks", "fast_polls")
    @pytest.mark.parametrize("ids_here", ["higher", "lower", "same and in progress"])
    @pytest.mark.parametrize("writes", [True, False])
    async def test_an_event_in_flight_at_the_cursor_is_delivered_after_a_restore(
        self,
        engine: Engine,
        given: Given,
        url: str,
        eventually: Eventually,
        connection: asyncpg.Connection,
        foreign: asyncpg.Connection,
        rows: Rows,
        monkeypatch: pytest.MonkeyPatch,
        ids_here: str,
        writes: bool,  # noqa: FBT001
    ) -> None:
        monkeypatch.setattr(Reader, "PAGE", 1)
        slow, fast = await given.claimed(lane_id=SLOW), [await given.claimed() for _ in range(3)]
        async with engine.subscribe_completion() as events:
            async with held_commits(url) as holder:
                completing = asyncio.create_task(engine.complete(slow))
                await eventually(lambda: waits_for_commit(holder))
                await asyncio.gather(*(engine.complete(one) for one in fast))
                found = await take(events, 3)
                await eventually(lambda: events.cursor != found[-1].cursor)
                saved = [*(event.cursor for event in found), events.cursor]
            await completing
        (late,) = (row for row in await rows.of("event_each", kind="released") if _is_of(row, slow.execution_id))
        used = int(await foreign.fetchval("select pg_current_xact_id()::text"))
        shift = {"higher": -100, "lower": 10_000, "same and in progress": used - late["xid"]}[ids_here]
        cursors = await come_from_another_server(connection, saved, shift)
        later = [await given.completed()] if writes else []
        for nth, cursor in enumerate(cursors, 1):
            expected = [*ids(found[nth:]), slow.execution_id, *later]
            async with engine.subscribe_completion(cursor) as resumed:
                assert sorted(ids(await take(resumed, len(expected), seconds=10))) == sorted(expected)
                assert await is_quiet(resumed)


@pytest.mark.usefixtures("fast_polls")
@pytest.mark.parametrize("deleted", ["before the dump", "after the restore", "on the other server"])
async def test_a_late_event_that_was_deleted_is_missed_by_a_cursor_of_another_server(
    engine: Engine,
    given: Given,
    clock: Clock,
    connection: asyncpg.Connection,
    foreign: asyncpg.Connection,
    eventually: Eventually,
    deleted: str,
) -> None:
    if deleted == "on the other server":
        await given.completed()
        await come_from_another_server(connection, [], 10_000)
        await engine.prepare()
    await foreign.execute(
        """insert into event (at, partition_key, kind, namespace_no, execution_id, outcome)
           values (ff_now(), 1, 'ended', 1, gen_random_uuid(), 1)"""
    )
    async with engine.subscribe_completion() as events:
        await given.completed()
        (event,) = await take(events, 1)
        await eventually(lambda: events.cursor != event.cursor)
        saved = events.cursor
    await foreign.execute("commit")
    await clock.advance(seconds=2 * DAY)
    if deleted == "before the dump":
        assert await trim(engine) > 0
    if deleted == "on the other server":
        assert await trim(engine) > 0
        await expired(engine.subscribe_completion(saved))
        return
    (cursor,) = await come_from_another_server(connection, [saved], 10_000)
    await engine.prepare()
    if deleted == "after the restore":
        assert await trim(engine) > 0
    await expired(engine.subscribe_completion(cursor))


def _is_of(row: asyncpg.Record, execution_id: str) -> bool:
    return execution_id.endswith(str(row["execution_id"]))


async def test_restored_events_are_trimmed_before_newer_ones(
    engine: Engine,
    given: Given,
    clock: Clock,
    connection: asyncpg.Connection,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowfabric.engine.event.partitions.TRIM_LIMIT", 2)
    await given.completed()
    await come_from_another_server(connection, [], 10_000)
    await engine.prepare()
    old = {row["event_id"] for row in await rows.of("event")}
    await clock.advance(seconds=2 * DAY)
    await complete_together(engine, 3)
    assert await parts_of(engine).event_partitions.trim_events() == len(old) == 2
    assert old.isdisjoint(row["event_id"] for row in await rows.of("event"))


@pytest.mark.usefixtures("fast_polls")
@pytest.mark.parametrize("storage", ["partitions", "rows"])
async def test_a_cursor_does_not_expire_because_events_of_another_server_are_deleted(
    engine: Engine,
    given: Given,
    clock: Clock,
    connection: asyncpg.Connection,
    foreign: asyncpg.Connection,
    rows: Rows,
    storage: str,
) -> None:
    partitions = parts_of(engine).event_partitions
    if storage == "partitions":
        assert await partitions.keep_partitions() == 3
    await given.completed()
    await clock.advance(seconds=2 * DAY)
    await partitions.keep_partitions()
    await partitions.trim_events()
    assert all(row["xids"] for row in await rows.of("feed_trim"))
    await given.completed()
    await come_from_another_server(connection, [], 1_000_000)
    await engine.prepare()
    await clock.advance(seconds=2 * DAY)
    await foreign.fetchval("select pg_current_xact_id()")
    async with engine.subscribe_completion() as events:
        start = events.cursor
    await foreign.execute("rollback")
    await foreign.execute("begin")
    assert await partitions.keep_partitions() + await partitions.trim_events() > 0
    later = await given.completed()
    async with engine.subscribe_completion(start) as resumed:
        assert ids(await take(resumed, 1)) == [later]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A server with a standby."""
    made = await asyncio.to_thread(Cluster, standby=True, small_disk=False)
    try:
        await made.start()
        yield made
    finally:
        await asyncio.to_thread(made.discard)


def connected(cluster: Cluster) -> AbstractAsyncContextManager[Engine]:
    """An engine on the primary."""
    return Engine.connect(
        settings=Settings(database_url=cluster.primary.url, migrate_on_start=True, waitpoint_hmac_secret=SECRET)
    )


async def completed(engine: Engine, count: int) -> list[str]:
    """Complete executions one by one."""
    return [one for _ in range(count) for one in await complete_together(engine, 1)]


async def cursors_of(engine: Engine, count: int) -> list[bytes]:
    """The cursors of the stored completions, and of this moment."""
    async with engine.subscribe_completion(OLDEST) as events:
        found = [event.cursor for event in await take(events, count)]
    async with engine.subscribe_completion() as events:
        return [*found, events.cursor]


class TestFailover:
    """A standby is promoted: it has the identity of the old primary, and another timeline."""

    async def test_a_promotion_without_a_loss_repeats_and_skips_nothing(self, cluster: Cluster) -> None:
        async with connected(cluster) as before:
            made = await completed(before, 5)
            cursors = await cursors_of(before, 5)
        await cluster.failover()
        async with connected(cluster) as after:
            later = await completed(after, 2)
            for nth, cursor in enumerate(cursors, 1):
                async with after.subscribe_completion(cursor) as resumed:
                    expected = [*made[nth:], *later]
                    assert ids(await take(resumed, len(expected), seconds=10)) == expected
                    assert await is_quiet(resumed)

    async def test_a_promotion_that_lost_commits_skips_no_event_after_it(self, cluster: Cluster) -> None:
        async with connected(cluster) as before:
            await completed(before, 5)
            standby = cluster.standby
            assert standby is not None
            await cluster.execute("alter system set synchronous_standby_names = ''", "select pg_reload_conf()")
            await asyncio.to_thread(standby.stop, "immediate")
            # More than the numbers that a sequence skips after a crash.
            await completed(before, 40)
            cursors = (await cursors_of(before, 45))[5:]
        await asyncio.to_thread(cluster.primary.stop, "immediate")
        await asyncio.to_thread(standby.start)
        await cluster.failover()
        async with connected(cluster) as after:
            later = await completed(after, 60)
            for cursor in (cursors[0], cursors[20], cursors[-2], cursors[-1]):
                async with after.subscribe_completion(cursor) as resumed:
                    assert ids(await take(resumed, 60, seconds=10)) == later

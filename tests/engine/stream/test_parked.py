"""Waiting tails query only when there may be something to find, and one statement looks for all of them."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from engine.state import refused
from fixtures import Clock, Engines, Eventually, Given, uuid_of
from flowfabric.db.database import Database
from flowfabric.db.faults import StoreFault
from flowfabric.db.notify import EVERYTHING
from flowfabric.db.statements import Statement
from flowfabric.engine.core.wakeups import Wakeups
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.results import Results
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream.parked import ParkedTails
from flowfabric.engine.stream.tail import FollowedFrames
from flowfabric.model.event import EventFamily
from flowfabric.model.handle import Handle
from flowfabric.model.ids import format_execution_id
from flowfabric.model.stream import FIRST, ClosedReason, StreamFrames, TailVisibility

from .writing import append_each, live, parked, texts

BACKOFF = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 600_000}}}


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each statement has run outside of transactions."""
    counts: Counter[str] = Counter()
    fetch = Database.fetch

    async def counted(database: Database, statement: Statement, *arguments: Any, **options: Any) -> Any:
        found = await fetch(database, statement, *arguments, **options)
        counts[statement.name] += 1
        return found

    monkeypatch.setattr(Database, "fetch", counted)
    return counts


@pytest.fixture
async def silent(engines: Engines) -> Engine:
    """An engine whose hints are lost."""
    engine = await engines()
    parts_of(engine).wakeups.hints._closed = True
    return engine


def wakeups_of(engine: Engine) -> Wakeups:
    """The wakeups of an engine."""
    wakeups: Wakeups = parts_of(engine).wakeups
    return wakeups


def tail(engine: Engine, handle: Handle, **arguments: Any) -> "asyncio.Task[StreamFrames]":
    """Start a tail of the attempt of a handle."""
    return asyncio.create_task(
        engine.tail_stream(handle.execution_id, handle.attempt_index, **{"block_ms": 30_000, **arguments})
    )


def follow(engine: Engine, handle: Handle, **arguments: Any) -> "asyncio.Task[FollowedFrames]":
    """Start to follow the execution of a handle."""
    return asyncio.create_task(
        parts_of(engine).tails.follow(
            handle.execution_id, **{"attempt_index": 0, "after": FIRST, "block_ms": 30_000, **arguments}
        )
    )


@pytest.mark.parametrize("found_by", ["hints", "polling"])
async def test_idle_tails_do_not_query(
    engines: Engines,
    silent: Engine,
    given: Given,
    eventually: Eventually,
    queries: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    found_by: str,
) -> None:
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 0.02)
    monkeypatch.setattr(ParkedTails, "UNHINTED_SECONDS", (0.02, 0.02))
    monkeypatch.setattr(ParkedTails, "MAX_WAITS", 3)
    handles = [await given.claimed() for _ in range(4)]
    lasts = [(await append_each(silent, handle, "a"))[-1] for handle in handles]
    reader = await engines(listen=found_by == "hints")
    waiting = [tail(reader, handle, after=last) for handle, last in zip(handles, lasts, strict=True) for _ in range(50)]
    await parked(reader, 200, eventually)
    assert queries["list_frames"] == 200
    before = queries["list_changed"]
    await eventually(lambda: queries["list_changed"] >= before + 10)
    assert queries["list_frames"] == 200
    # Only those of the stream that grows.
    await append_each(silent, handles[0], "b")
    assert [texts(each) for each in await asyncio.gather(*waiting[:50])] == [["b"]] * 50
    assert queries["list_frames"] == 250
    assert not any(each.done() for each in waiting[50:])
    await append_each(silent, handles[3], "c")
    assert [texts(each) for each in await asyncio.gather(*waiting[150:])] == [["c"]] * 50
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    # Nothing runs without waiting tails.
    looking = parts_of(reader).tails._parked._task
    assert looking is not None
    await eventually(looking.done)


@pytest.mark.usefixtures("hints_only")
async def test_a_hint_that_may_concern_any_stream_leads_to_one_query(
    engine: Engine, silent: Engine, given: Given, eventually: Eventually, queries: Counter[str]
) -> None:
    handles = [await given.claimed() for _ in range(3)]
    waiting = [tail(engine, handle) for handle in handles]
    await parked(engine, 3, eventually)
    before = queries.copy()
    await append_each(silent, handles[1], "a")
    wakeups_of(engine)._stream_heard([EVERYTHING])
    async with asyncio.timeout(10):
        assert texts(await waiting[1]) == ["a"]
    await parked(engine, 2, eventually)
    assert {name: queries[name] - before[name] for name in ("list_frames", "list_changed")} == {
        "list_frames": 1,
        "list_changed": 1,
    }
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("kind", ["transport", "protocol"])
async def test_what_was_missed_is_found_although_the_first_query_for_it_fails(
    engine: Engine,
    silent: Engine,
    given: Given,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 600.0)
    monkeypatch.setattr(ParkedTails, "UNHINTED_SECONDS", (0.05, 0.05))
    handle = await given.claimed()
    waiting = tail(engine, handle)
    await parked(engine, 1, eventually)
    fetch, faults = Database.fetch, [StoreFault(kind, "lost")]

    async def failing(database: Database, statement: Statement, *arguments: Any, **options: Any) -> Any:
        if statement.name == "list_changed" and faults:
            raise faults.pop()
        return await fetch(database, statement, *arguments, **options)

    monkeypatch.setattr(Database, "fetch", failing)
    await append_each(silent, handle, "a")
    wakeups_of(engine)._stream_heard([EVERYTHING])
    async with asyncio.timeout(10):
        assert texts(await waiting) == ["a"]


async def test_the_hint_of_thousands_of_streams_names_them(
    engines: Engines, engine: Engine, eventually: Eventually
) -> None:
    reader = wakeups_of(await engines())
    await reader.hints.listen()
    heard: list[str] = []
    reader.hints.subscribe("stream", heard.extend)
    ids = [format_execution_id(at % 256, str(UUID(int=at))) for at in range(3_000)]
    with reader.watch_stream(ids[7]) as changed:
        wakeups_of(engine).stream(ids)
        await eventually(lambda: len(heard) >= len(ids))
        assert EVERYTHING not in heard
        assert changed.is_set()


@pytest.mark.usefixtures("hints_only")
async def test_a_tail_is_woken_for_a_frame_that_comes_after_its_query_although_it_parks_while_all_are_looked_at(
    engine: Engine, silent: Engine, given: Given, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, other = await given.claimed(), await given.claimed()
    await append_each(silent, handle, "live", mode=live())
    # The other one keeps the loop running.
    idle = tail(engine, other)
    await parked(engine, 1, eventually)
    fetch, parks, has_looked = Database.fetch, asyncio.Event(), asyncio.Event()
    is_woken_within = ParkedTails.is_woken_within

    async def parking(tails: ParkedTails, *arguments: Any) -> bool:
        parks.set()
        return await is_woken_within(tails, *arguments)

    async def ordered(
        database: Database, statement: Statement, values: Mapping[str, object], **options: Any
    ) -> list[asyncpg.Record]:
        found: list[asyncpg.Record] = await fetch(database, statement, values, **options)
        if statement.name == "list_changed" and not has_looked.is_set():
            has_looked.set()
            await parks.wait()
        if statement.name == "list_frames" and not parks.is_set():
            await append_each(silent, handle, "late")
            wakeups_of(engine)._stream_heard([EVERYTHING])
            await has_looked.wait()
        return found

    monkeypatch.setattr(Database, "fetch", ordered)
    monkeypatch.setattr(ParkedTails, "is_woken_within", parking)
    async with asyncio.timeout(10):
        found = await tail(engine, handle, visibility=TailVisibility.EXCLUDE_BEST_EFFORT)
    assert texts(found) == ["late"]
    idle.cancel()
    await asyncio.gather(idle, return_exceptions=True)


@pytest.mark.usefixtures("hints_only")
async def test_the_first_query_of_a_call_goes_before_those_of_woken_tails(
    engines: Engines, given: Given, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = await engines(database_pool_size=2)
    handle, other = await given.claimed(), await given.claimed()
    waiting = [tail(small, handle) for _ in range(20)]
    await parked(small, 20, eventually)
    fetch, order, goes_on = Database.fetch, list[Any](), asyncio.Event()

    async def recorded(
        database: Database, statement: Statement, values: Mapping[str, object], **options: Any
    ) -> list[asyncpg.Record]:
        order.append(values.get("execution_id"))
        await goes_on.wait()
        found: list[asyncpg.Record] = await fetch(database, statement, values, **options)
        return found

    monkeypatch.setattr(Database, "fetch", recorded)
    parts_of(small).tails._parked.wake_all()
    await eventually(lambda: bool(order))
    waiting.append(tail(small, other))
    await eventually(lambda: parts_of(small).tails._operations == 21)
    # One of them queries, and the others wait.
    assert order == [uuid_of(handle.execution_id)]
    goes_on.set()
    await eventually(lambda: len(order) == 21)
    assert order.index(uuid_of(other.execution_id)) <= 2
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_tail_whose_stream_was_closed_without_a_hint_returns(
    engine: Engine,
    silent: Engine,
    given: Given,
    eventually: Eventually,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 0.05)
    closed, ended, retried = [await given.claimed(policy=BACKOFF) for _ in range(3)]
    handles = [closed, ended, retried]
    lasts = [(await append_each(silent, handle, "a"))[-1] for handle in handles]
    waiting = [tail(engine, handle, after=last) for handle, last in zip(handles, lasts, strict=True)]
    await parked(engine, 3, eventually)
    await silent.complete(closed, b"")
    async with connection.transaction():
        # The previous version leaves the streams of attempts that it ends open.
        await connection.execute("update execution set attached = 0")
    await silent.complete(ended, b"")
    await silent.fail(retried, reason="x")
    async with asyncio.timeout(10):
        found = await asyncio.gather(*waiting)
    assert [each.closed_reason for each in found] == [
        ClosedReason.ATTEMPT_SUCCESS,
        ClosedReason.ATTEMPT_SUCCESS,
        ClosedReason.ATTEMPT_FAILURE,
    ]
    assert await connection.fetchval("select count(*) from stream where closed_at is null") == 2


async def test_a_follower_returns_when_its_attempt_ended_without_a_hint(
    engine: Engine,
    silent: Engine,
    given: Given,
    eventually: Eventually,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 0.05)
    monkeypatch.setattr(Results, "POLL_SECONDS", (600.0, 600.0))
    failed, continued, deleted = [await given.claimed(policy=BACKOFF) for _ in range(3)]
    has_failed, continues, is_deleted = (
        follow(engine, failed, last_attempt_index=0),
        follow(engine, continued),
        follow(engine, deleted, last_attempt_index=0),
    )
    reading = tail(engine, failed)
    # From then on, only the query for all of them can find what has changed.
    await eventually(lambda: len(wakeups_of(engine).feeds._events.get(EventFamily.LEASE, ())) == 2)
    await parked(engine, 4, eventually)
    await silent.fail(failed, reason="x")
    await append_each(silent, continued, "a")
    await connection.execute("delete from execution where execution_id = $1", uuid_of(deleted.execution_id))
    async with asyncio.timeout(10):
        assert await has_failed == FollowedFrames(frames=[], is_ended=True)
        assert [frame.text for _, frame in (await continues).frames] == ["a"]
        await refused(is_deleted, "execution_not_found")
    # An end without a stream does not end a tail.
    assert not reading.done()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_frames_that_are_hidden_do_not_wake_a_reader_again(
    engine: Engine,
    silent: Engine,
    given: Given,
    eventually: Eventually,
    queries: Counter[str],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 0.02)
    handle = await given.claimed(lease_ttl_ms=600_000)
    await append_each(silent, handle, "live", mode=live(ttl_ms=1_000))
    await clock.advance(ms=2_000)
    reading, following = tail(engine, handle), follow(engine, handle)
    # The follower queries again when it begins to wait for the end of the execution too.
    await eventually(lambda: parts_of(engine).services[Results]._waiting)
    await parked(engine, 2, eventually)
    before = queries.copy()
    await eventually(lambda: queries["list_changed"] >= before["list_changed"] + 5)
    assert [queries[name] - before[name] for name in ("list_frames", "list_followed_frames")] == [0, 0]
    await append_each(silent, handle, "live again", mode=live())
    async with asyncio.timeout(10):
        assert texts(await reading) == ["live again"]
        assert [frame.text for _, frame in (await following).frames] == ["live again"]

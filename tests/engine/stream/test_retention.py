"""Frames are deleted with their execution, and when their stream has expired, in batches of bounded size."""

import asyncio
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.stream.writing import STREAM_TABLES, append, live, patch, payloads, read, stored, stored_frames
from engine.waits import rewriting
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import retention
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream import expire
from flowfabric.model import open_stream
from flowfabric.model.handle import Handle
from flowfabric.model.stream import StreamFrames
from flowfabric.reconcile.due import read_due
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS

pytestmark = pytest.mark.usefixtures("consistent_rows")

DAY_MS = 86_400_000


async def ended(engine: Engine, given: Given, frames: int = 1, **overrides: Any) -> Handle:
    """The handle of a completed run with a stream and a summary."""
    handle = await given.claimed(lease_ttl_ms=600_000, **overrides)
    await patch(engine, handle, "{}")
    await asyncio.gather(*(append(engine, handle) for _ in range(frames)))
    await engine.complete(handle, b"")
    return handle


async def counts(rows: Rows) -> list[int]:
    """The numbers of streams, frames and summaries."""
    return [len(await rows.of(table)) for table in STREAM_TABLES]


# With the execution.


async def test_streams_are_deleted_with_their_execution(engine: Engine, given: Given, clock: Clock, rows: Rows) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    first = await given.claimed(policy=retry)
    await patch(engine, first, "{}")
    await engine.fail(first, reason="no luck")
    second = (await given.claim()).handle
    await append(engine, second)
    await engine.complete(second, b"")
    kept = await given.claimed(lane_id="kept", lease_ttl_ms=10 * DAY_MS)
    await patch(engine, kept, "{}")
    assert await counts(rows) == [3, 3, 2]
    await clock.advance(ms=DAY_MS)
    assert (await parts_of(engine).retention.trim_batch()).done == 1
    assert await counts(rows) == [1, 1, 1]
    assert await payloads(engine, kept) == [b"{}"]
    assert (await payloads(engine, first), await engine.read_summary(first.execution_id, 0)) == ([], None)


async def test_executions_are_deleted_with_as_many_frames_as_fit_in_a_batch(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FRAME_LIMIT", 100)
    plain = [await given.completed() for _ in range(2)]
    for frames in (39, 59, 0, 60, 99, 0):
        await ended(engine, given, frames)
        # More than the margin of the watermark, so that one that is moved too far hides the executions that are left.
        await clock.advance(seconds=1)
    await clock.advance(ms=DAY_MS)
    trims = [await parts_of(engine).retention.trim_batch() for _ in range(5)]
    assert [(trim.done, trim.is_full) for trim in trims] == [
        # Those without frames, and two with 100 frames together.
        (len(plain) + 2, True),
        (2, True),
        (1, True),
        (1, False),
        (0, False),
    ]
    assert await counts(rows) == [0, 0, 0]
    assert await rows.of("retained") == []


async def test_the_frames_of_a_long_stream_are_hidden_and_deleted_before_its_execution(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (retention, expire):
        monkeypatch.setattr(module, "FRAME_LIMIT", 100)
    long = await ended(engine, given, 300)
    short = await ended(engine, given)
    await clock.advance(ms=DAY_MS)
    trims = [await parts_of(engine).retention.trim_batch() for _ in range(2)]
    assert [(trim.done, trim.is_full) for trim in trims] == [(1, True), (0, False)]
    assert await rows.of("execution", execution_id=uuid_of(short.execution_id)) == []
    assert (len(await stored_frames(rows, long)), await payloads(engine, long)) == (301, [])
    assert await has_due_streams(engine)
    sweeps = [await parts_of(engine).stream_expiry.sweep_batch() for _ in range(4)]
    assert [(sweep.done, sweep.is_full) for sweep in sweeps] == [(0, True), (0, True), (0, True), (1, False)]
    assert await counts(rows) == [1, 0, 1]
    assert (await parts_of(engine).retention.trim_batch()).done == 1
    assert await counts(rows) == [0, 0, 0]
    assert not await has_due_streams(engine)


async def test_executions_that_wait_for_the_deletion_of_their_frames_are_still_counted_by_queue(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FRAME_LIMIT", 1)
    handles = [
        await given.claimed(lane_id=lane, lease_ttl_ms=600_000, execution_id=f"{{fp:1}}:{uuid4()}")
        for lane in ("one", "other")
    ]
    for handle in handles:
        await asyncio.gather(*(append(engine, handle) for _ in range(2)))
    await engine.complete_many([(handle, b"") for handle in handles])
    await clock.advance(ms=DAY_MS)
    before = await rows.of("retained")
    assert [len(row["queue_nos"]) for row in before] == [2]
    assert (await parts_of(engine).retention.trim_batch()).done == 0
    assert await rows.of("retained") == before


async def test_several_long_streams_of_an_execution_are_deleted(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (retention, expire):
        monkeypatch.setattr(module, "FRAME_LIMIT", 100)
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    handle = await given.claimed(policy=retry)
    await asyncio.gather(*(append(engine, handle) for _ in range(60)))
    await engine.fail(handle, reason="no luck")
    handle = (await given.claim()).handle
    await asyncio.gather(*(append(engine, handle) for _ in range(60)))
    await engine.complete(handle, b"")
    await clock.advance(ms=DAY_MS)
    await Reconciler(engine).catch_up()
    assert await counts(rows) == [0, 0, 0]
    assert await rows.of("execution") == []


async def test_an_id_whose_execution_is_deleted_can_be_used_again_with_an_empty_stream(
    engine: Engine, given: Given, clock: Clock
) -> None:
    old = await ended(engine, given, 3)
    await clock.advance(ms=DAY_MS)
    assert (await parts_of(engine).retention.trim_batch()).done == 1
    new = await given.claimed(execution_id=old.execution_id)
    assert (await append(engine, new, b"new")).frame_count == 1
    assert await payloads(engine, new) == [b"new"]
    assert await engine.read_summary(new.execution_id, 0) is None


async def test_a_locked_execution_with_many_frames_does_not_stop_the_retention_of_others(
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "FRAME_LIMIT", 100)
    held = await ended(engine, given, 300)
    for _ in range(2):
        await ended(engine, given, 60)
    await clock.advance(ms=DAY_MS)
    async with rewriting(connection, "execution", held.execution_id):
        trims = [await parts_of(engine).retention.trim_batch() for _ in range(3)]
        assert [(trim.done, trim.is_full) for trim in trims] == [(1, True), (1, False), (0, False)]
    assert [str(row["execution_id"]) for row in await rows.of("execution")] == [uuid_of(held.execution_id)]
    assert await counts(rows) == [1, 301, 1]
    assert len(await payloads(engine, held)) == 301


async def test_frames_of_executions_that_are_kept_are_not_deleted(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FRAME_LIMIT", 3)
    old = await ended(engine, given)
    await clock.advance(ms=DAY_MS // 2)
    young = await ended(engine, given)
    await clock.advance(ms=DAY_MS // 2)
    while (await parts_of(engine).retention.trim_batch()).is_full:
        pass
    assert await rows.of("execution", execution_id=uuid_of(old.execution_id)) == []
    assert await counts(rows) == [1, 2, 1]
    assert len(await payloads(engine, young)) == 2


async def test_frames_that_cannot_be_deleted_do_not_stop_the_retention_of_others(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    poisoned, *others = [await ended(engine, given) for _ in range(4)]
    await connection.execute(
        """create function refuse() returns trigger language plpgsql as
           $$begin raise check_violation using message = 'poisoned'; end$$"""
    )
    await connection.execute(
        f"""create trigger poison before delete on stream_frame for each row
            when (old.execution_id = '{uuid_of(poisoned.execution_id)}') execute function refuse()"""
    )
    await clock.advance(ms=DAY_MS)
    assert (await parts_of(engine).retention.trim_batch()).done == len(others)
    assert [str(row["execution_id"]) for row in await rows.of("execution")] == [uuid_of(poisoned.execution_id)]
    assert len(await stored_frames(rows, poisoned)) == 2
    assert await counts(rows) == [1, 2, 1]


# Expired streams.


def stream_expiry(engine: Engine) -> Reconciler:
    """A reconciler that runs only the sweep of expired streams."""
    return Reconciler(engine, sweeps=[sweep for sweep in SWEEPS if sweep.name == "stream_expiry"])


async def has_due_streams(engine: Engine) -> bool:
    """Whether the sweep of expired streams is due."""
    return (await read_due(parts_of(engine).store, ())).has_due_streams


async def test_the_frames_of_an_expired_stream_are_deleted(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    closed = await ended(engine, given, 5, policy={"stream_policy": {"retention_ttl_ms": 5_000}})
    lasting = await ended(engine, given)
    live_only = await given.claimed(lease_ttl_ms=600_000)
    await append(engine, live_only, mode=live(ttl_ms=2_000))
    await clock.advance(ms=3_999)
    assert not await has_due_streams(engine)
    await stream_expiry(engine).catch_up()
    assert await counts(rows) == [3, 9, 2]
    await clock.advance(ms=1)
    assert await has_due_streams(engine)
    await stream_expiry(engine).catch_up()
    assert (len(await stored_frames(rows, live_only)), len(await stored_frames(rows, closed))) == (0, 6)
    await clock.advance(ms=1_000)
    await stream_expiry(engine).catch_up()
    assert not await has_due_streams(engine)
    # Streams and summaries stay.
    assert await counts(rows) == [3, 2, 2]
    assert len(await payloads(engine, lasting)) == 2
    row = await stored(rows, closed)
    assert (row["expires_at"], row["first_frame_no"], row["closed_reason"]) == (None, 7, "attempt_success")
    # The stream of best-effort frames goes on.
    assert (await append(engine, live_only, b"again", mode=live(ttl_ms=2_000))).frame_count == 2
    assert await payloads(engine, live_only) == [b"again"]


async def trim_as_the_previous_version(engine: Engine, connection: asyncpg.Connection) -> None:
    """Delete the executions past their retention, but not their streams."""
    for table in STREAM_TABLES:
        await connection.execute(f"create temp table kept_{table} as select * from {table}")
    assert (await parts_of(engine).retention.trim_batch()).done
    for table in STREAM_TABLES:
        await connection.execute(f"insert into {table} select * from kept_{table} on conflict do nothing")


async def test_streams_of_executions_that_the_previous_version_deleted_are_deleted(
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expire, "FRAME_LIMIT", 4)
    deleted = [await ended(engine, given, 5) for _ in range(2)]
    running = await given.claimed(lease_ttl_ms=10 * DAY_MS)
    await patch(engine, running, "{}")
    await clock.advance(ms=DAY_MS)
    await trim_as_the_previous_version(engine, connection)
    assert await counts(rows) == [3, 13, 3]
    for handle in deleted:
        assert await read(engine, handle) == StreamFrames(frames=[])
        assert await engine.read_summary(handle.execution_id, 0) is None
    assert not await has_due_streams(engine)
    await clock.advance(ms=DAY_MS // 24)
    assert await has_due_streams(engine)
    assert await engine.find_inconsistencies() == []
    await clock.advance(ms=DAY_MS // 24)
    found = {(one.execution_id, one.problem) for one in await engine.find_inconsistencies()}
    assert found == {(handle.execution_id, "stream: its execution does not exist") for handle in deleted}
    await stream_expiry(engine).catch_up()
    # A stream of an execution that exists stays as it is.
    assert await counts(rows) == [1, 1, 1]
    assert await payloads(engine, running) == [b"{}"]
    assert not await has_due_streams(engine)
    await clock.advance(ms=DAY_MS + DAY_MS // 24)
    assert await has_due_streams(engine)


async def test_frames_that_appends_have_left_hidden_are_deleted(
    engine: Engine, given: Given, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_stream, "MAX_TRIMMED", 300)
    monkeypatch.setattr(expire, "FRAME_LIMIT", 200)
    handle = await given.claimed()
    for _ in range(2):
        await asyncio.gather(*(append(engine, handle) for _ in range(500)))
    assert not await has_due_streams(engine)
    await patch(engine, handle, "{}")
    assert (len(await payloads(engine, handle)), len(await stored_frames(rows, handle))) == (64, 701)
    assert await has_due_streams(engine)
    await stream_expiry(engine).catch_up()
    assert len(await stored_frames(rows, handle)) == 64
    assert not await has_due_streams(engine)
    assert (await append(engine, handle)).frame_count == 1_002


async def test_an_append_of_a_live_frame_changes_no_indexed_column(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    await append(engine, handle, mode=live(ttl_ms=10_000))
    before = await stored(rows, handle)
    await clock.advance(ms=2_499)
    await append(engine, handle, mode=live(ttl_ms=10_000))
    after = await stored(rows, handle)
    indexed = await connection.fetch(
        """select a.attname from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any(i.indkey)
            where i.indrelid = 'stream'::regclass"""
    )
    assert {row["attname"] for row in indexed} >= {"execution_id", "sweep_at"}
    changed = {name for name in before if before[name] != after[name]}
    assert "expires_at" in changed
    assert not changed & {row["attname"] for row in indexed}


async def test_the_sweep_waits_for_the_exact_expiry(engine: Engine, given: Given, clock: Clock, rows: Rows) -> None:
    handle = await given.claimed(lease_ttl_ms=600_000)
    await append(engine, handle, mode=live(ttl_ms=10_000))
    await clock.advance(ms=1_000)
    await append(engine, handle, mode=live(ttl_ms=10_000))
    await clock.advance(ms=19_000)
    assert await has_due_streams(engine)
    sweep = await parts_of(engine).stream_expiry.sweep_batch()
    assert (sweep.done, len(await payloads(engine, handle))) == (0, 2)
    await clock.advance(ms=999)
    assert not await has_due_streams(engine)
    await clock.advance(ms=1)
    assert (await parts_of(engine).stream_expiry.sweep_batch()).done == 1
    assert await stored_frames(rows, handle) == []


async def test_expired_frames_are_deleted_in_batches(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expire, "FRAME_LIMIT", 50)
    for _ in range(3):
        await ended(engine, given, 40, policy={"stream_policy": {"retention_ttl_ms": 5_000}})
    await clock.advance(ms=5_000)
    sweeps = [await parts_of(engine).stream_expiry.sweep_batch() for _ in range(4)]
    assert [(sweep.done, sweep.is_full) for sweep in sweeps] == [(1, True), (1, True), (1, False), (0, False)]
    assert await counts(rows) == [3, 0, 3]


async def test_as_many_streams_as_allowed_are_read_in_one_batch(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expire, "STREAM_LIMIT", 2)
    for _ in range(3):
        await ended(engine, given, policy={"stream_policy": {"retention_ttl_ms": 5_000}})
    await clock.advance(ms=5_000)
    sweeps = [await parts_of(engine).stream_expiry.sweep_batch() for _ in range(2)]
    assert [(sweep.done, sweep.is_full) for sweep in sweeps] == [(2, True), (1, False)]
    assert await counts(rows) == [3, 0, 3]


async def test_the_sweep_skips_a_locked_stream(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    handles = [await ended(engine, given, policy={"stream_policy": {"retention_ttl_ms": 5_000}}) for _ in range(2)]
    await clock.advance(ms=5_000)
    async with rewriting(connection, "stream", handles[0].execution_id):
        assert (await parts_of(engine).stream_expiry.sweep_batch()).done == 1
    assert (await parts_of(engine).stream_expiry.sweep_batch()).done == 1
    assert await counts(rows) == [2, 0, 2]


async def test_a_stream_that_is_written_again_is_not_swept(
    engines: Engines, given: Given, clock: Clock, rows: Rows
) -> None:
    other = await engines()
    handle = await given.claimed(lease_ttl_ms=600_000)
    for nth in range(20):
        await append(given.engine, handle, b"%d" % nth, mode=live(ttl_ms=1_000))
        await clock.advance(ms=2_000)
        outcome, _ = await asyncio.gather(
            append(given.engine, handle, b"new %d" % nth, mode=live(ttl_ms=1_000)),
            parts_of(other).stream_expiry.sweep_batch(),
        )
        assert outcome.frame_count == 2 * nth + 2
        assert await payloads(given.engine, handle) == [b"new %d" % nth]
        await clock.advance(ms=2_000)

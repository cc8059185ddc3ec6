"""Frames are deleted in batches of bounded bytes and time, and those that cannot be deleted stop no others."""

import asyncio
from uuid import UUID

import asyncpg
import pytest

from engine.stream.writing import append, payloads, stored_frames
from engine.waits import rewriting
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import retention
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream import expire
from flowfabric.model.handle import Handle
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS

pytestmark = pytest.mark.usefixtures("consistent_rows")

DAY_MS = 86_400_000
EXPIRING = {"stream_policy": {"retention_ttl_ms": 5_000}}
GATE = 7


async def ended(engine: Engine, given: Given, frames: int, *, size: int = 1, policy: object = None) -> Handle:
    """The handle of a completed run with a stream of frames of this size."""
    handle = await given.claimed(lease_ttl_ms=600_000, **({} if policy is None else {"policy": policy}))
    await asyncio.gather(*(append(engine, handle, b"x" * size) for _ in range(frames)))
    await engine.complete(handle, b"")
    return handle


def sweeps_of(engine: Engine, *names: str) -> Reconciler:
    """A reconciler that runs only these sweeps."""
    return Reconciler(engine, sweeps=[sweep for sweep in SWEEPS if sweep.name in names])


async def before_delete(connection: asyncpg.Connection, table: str, body: str, *, only: Handle | None = None) -> None:
    """Run a statement before each row of a table is deleted, or only before those of an execution."""
    condition = "" if only is None else f"when (old.execution_id = '{uuid_of(only.execution_id)}')"
    await connection.execute(
        f"create function before_delete() returns trigger language plpgsql as $$begin {body}; return old; end$$"
    )
    await connection.execute(
        f"create trigger before_delete before delete on {table} for each row {condition} "
        "execute function before_delete()"
    )


# Locks.


async def test_retention_leaves_an_execution_with_a_locked_stream(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    held, *others = [await ended(engine, given, 3) for _ in range(3)]
    await clock.advance(ms=DAY_MS)
    async with rewriting(connection, "stream", held.execution_id):
        trims = [await parts_of(engine).retention.trim_batch() for _ in range(2)]
        assert [(trim.done, trim.is_full) for trim in trims] == [(len(others), True), (0, False)]
    assert parts_of(engine).retention.quarantine.skipped() == []
    assert len(await payloads(engine, held)) == 3
    assert (await parts_of(engine).retention.trim_batch()).done == 1
    assert await rows.of("stream_frame") == []


async def test_a_sweep_of_streams_skips_those_whose_frames_retention_deletes(
    patient_with_locks: None,
    engines: Engines,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    eventually: Eventually,
) -> None:
    other = await engines()
    await ended(given.engine, given, 3, policy=EXPIRING)
    await clock.advance(ms=5_000)
    # The trigger fires when the frame is locked.
    await before_delete(connection, "stream_frame", f"perform pg_advisory_xact_lock_shared({GATE})")
    await connection.execute("select pg_advisory_lock($1)", GATE)
    trim = asyncio.create_task(parts_of(given.engine).retention.trim_batch())
    is_waiting = "select exists (select from pg_locks where locktype = 'advisory' and objid = $1 and not granted)"
    await eventually(lambda: connection.fetchval(is_waiting, GATE))
    sweep = asyncio.create_task(parts_of(other).stream_expiry.sweep_batch())
    is_blocked = "select count(*) > 1 from pg_locks where not granted"

    async def has_stopped() -> bool:
        return sweep.done() or await connection.fetchval(is_blocked)

    await eventually(has_stopped)
    was_blocked = not sweep.done()
    await connection.execute("select pg_advisory_unlock($1)", GATE)
    assert ((await sweep).done, (await trim).done) == (0, 1)
    assert not was_blocked
    assert await rows.of("stream") == await rows.of("stream_frame") == []


# Bytes.


async def test_executions_are_deleted_whose_frames_have_as_many_bytes_as_fit_in_a_batch(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (retention, expire):
        monkeypatch.setattr(module, "BYTE_LIMIT", 1_000)
    for frames in (5, 5, 5):
        await ended(engine, given, frames, size=100)
    long = await ended(engine, given, 11, size=100)
    await clock.advance(ms=DAY_MS)
    trims = [await parts_of(engine).retention.trim_batch() for _ in range(3)]
    assert [(trim.done, trim.is_full) for trim in trims] == [(2, True), (1, True), (0, False)]
    assert (len(await stored_frames(rows, long)), await payloads(engine, long)) == (11, [])
    await sweeps_of(engine, "retention_trimmer", "stream_expiry").catch_up()
    assert await rows.of("execution") == await rows.of("stream_frame") == []


async def test_the_sweep_of_streams_deletes_frames_up_to_a_number_of_bytes(
    engine: Engine, given: Given, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expire, "BYTE_LIMIT", 1_000)
    for frames, size in ((15, 100), (2, 3_000), (3, 100)):
        await ended(engine, given, frames, size=size, policy=EXPIRING)
    await clock.advance(ms=5_000)
    found = []
    for _ in range(5):
        sweep = await parts_of(engine).stream_expiry.sweep_batch()
        found.append((sweep.done, sweep.is_full, len(await rows.of("stream_frame"))))
    # The last frame of a batch may go over the limit, and a larger frame is deleted too.
    assert found == [(0, True, 10), (1, True, 4), (0, True, 3), (2, False, 0), (0, False, 0)]


# Rows that cannot be deleted.


async def test_a_stream_whose_frames_cannot_be_deleted_does_not_stop_the_sweep_of_others(
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expire, "FRAME_LIMIT", 4)
    poisoned, *_ = [await ended(engine, given, 6, policy=EXPIRING) for _ in range(4)]
    await before_delete(connection, "stream_frame", "raise check_violation using message = 'poisoned'", only=poisoned)
    await clock.advance(ms=5_000)
    await sweeps_of(engine, "stream_expiry").catch_up()
    assert len(await stored_frames(rows, poisoned)) == 6
    assert len(await rows.of("stream_frame")) == 6
    quarantine = parts_of(engine).stream_expiry.quarantine
    assert quarantine.skipped() == [UUID(uuid_of(poisoned.execution_id))]
    # While it is skipped, others are swept as they become due.
    await ended(engine, given, 6, policy=EXPIRING)
    await clock.advance(ms=5_000)
    await sweeps_of(engine, "stream_expiry").catch_up()
    assert len(await rows.of("stream_frame")) == 6
    await connection.execute("drop trigger before_delete on stream_frame")
    quarantine._failures.clear()
    await sweeps_of(engine, "stream_expiry").catch_up()
    assert await rows.of("stream_frame") == []


# Batches that are not in time.


async def test_frames_are_deleted_in_smaller_batches_after_a_timeout(
    engines: Engines,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (retention, expire):
        monkeypatch.setattr(module, "FRAME_LIMIT", 40)
    engine = await engines(statement_timeout_ms=500)
    for frames in (30, 40, 41, 1, 0):
        await ended(engine, given, frames)
    await clock.advance(ms=DAY_MS)
    # Thirty frames take longer than a statement may take, ten do not.
    await before_delete(connection, "stream_frame", "perform pg_sleep(0.02)")
    reconciler = sweeps_of(engine, "retention_trimmer", "stream_expiry")
    assert await reconciler.catch_up() >= 5
    assert {name: stats.errors for name, stats in reconciler.stats.items()} == {
        "retention_trimmer": 0,
        "stream_expiry": 0,
    }
    assert await rows.of("execution") == await rows.of("stream_frame") == []


async def test_an_execution_that_is_never_deleted_in_time_does_not_stop_the_retention_of_others(
    engines: Engines, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    engine = await engines(statement_timeout_ms=200)
    slow, *others = [await ended(engine, given, 2) for _ in range(6)]
    await before_delete(connection, "execution", "perform pg_sleep(1)", only=slow)
    await clock.advance(ms=DAY_MS)
    assert await sweeps_of(engine, "retention_trimmer", "stream_expiry").catch_up() >= len(others)
    assert [str(row["execution_id"]) for row in await rows.of("execution")] == [uuid_of(slow.execution_id)]
    assert parts_of(engine).retention.quarantine.skipped() == [UUID(uuid_of(slow.execution_id))]


async def test_a_stream_that_is_never_deleted_in_time_does_not_stop_the_sweep_of_others(
    engines: Engines, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    engine = await engines(statement_timeout_ms=200)
    slow, *_ = [await ended(engine, given, 2, policy=EXPIRING) for _ in range(6)]
    await before_delete(connection, "stream_frame", "perform pg_sleep(1)", only=slow)
    await clock.advance(ms=5_000)
    await sweeps_of(engine, "stream_expiry").catch_up()
    assert {str(row["execution_id"]) for row in await rows.of("stream_frame")} == {uuid_of(slow.execution_id)}
    assert parts_of(engine).stream_expiry.quarantine.skipped() == [UUID(uuid_of(slow.execution_id))]


async def test_an_execution_whose_frames_are_never_deleted_in_time_does_not_stop_the_retention_of_others(
    engines: Engines, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    engine = await engines(statement_timeout_ms=200)
    slow, *_ = [await ended(engine, given, 3) for _ in range(3)]
    await before_delete(connection, "stream_frame", "perform pg_sleep(1)", only=slow)
    await clock.advance(ms=DAY_MS)
    retention, streams = parts_of(engine).retention, parts_of(engine).stream_expiry
    # Six batches of the first sweep are too slow, and two of the others delete one execution each.
    trims = [await retention.trim_batch() for _ in range(9)]
    assert [trim.done for trim in trims] == [0] * 6 + [1, 1, 0]
    assert [trim.is_full for trim in trims] == [True] * 8 + [False]
    assert (len(await stored_frames(rows, slow)), await payloads(engine, slow)) == (3, [])
    # Its frames are left to the sweep of streams, which skips it after a while.
    assert [(trim.done, trim.is_full) for trim in [await retention.trim_batch()]] == [(0, False)]
    sweeps = 1
    while (await streams.sweep_batch()).is_full:
        sweeps += 1
    assert sweeps <= 12
    assert streams.quarantine.skipped() == [UUID(uuid_of(slow.execution_id))]
    assert retention.quarantine.skipped() == []
    assert (await retention.trim_batch()).is_full is False
    await connection.execute("drop trigger before_delete on stream_frame")
    streams.quarantine._failures.clear()
    await sweeps_of(engine, "retention_trimmer", "stream_expiry").catch_up()
    assert await rows.of("execution") == await rows.of("stream_frame") == []

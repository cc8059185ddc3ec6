"""Whoever deletes frames locks their streams first, and skips streams that are locked."""

import asyncio

import asyncpg
import pytest

from engine.stream.writing import append, payloads
from engine.waits import rewriting
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
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

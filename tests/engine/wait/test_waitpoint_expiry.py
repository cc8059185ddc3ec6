"""The expiry of pending waitpoints and of idempotency keys of suspends and signals."""

import asyncpg
import pytest

from engine.sending import running, signal_keys, waiting
from engine.state import refused
from engine.waits import suspend_args, suspend_keys, suspend_run, using, waitpoints
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.signal import Accepted
from flowfabric.reconcile.due import read_due
from flowfabric.reconcile.loop import Reconciler

from .test_suspension_timeouts import LIMIT, small_batches  # noqa: F401

MINUTE = 60_000


async def test_an_unused_pending_waitpoint_is_closed_when_it_expires(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    expiring, lasting = await running(engine, given, expires_in_ms=1_000), await running(engine, given)
    used = await given.claimed()
    pending = await engine.create_waitpoint(used, waitpoint_key="wait", expires_in_ms=1_000)
    await suspend_run(engine, used, using(pending, timeout_at=await clock.now() + 1))
    now = await clock.advance(ms=1_000)
    assert (await read_due(parts_of(engine).store, [])).has_expired_waitpoints
    async with rows.unchanged(without=["waitpoint"]):
        assert await parts_of(engine).suspension_timeouts.close_pending() == 1
        assert await parts_of(engine).suspension_timeouts.close_pending() == 0
    (closed,) = await waitpoints(rows, expiring.execution_id)
    assert (closed["state"], closed["closed_at"], closed["close_reason"]) == ("closed", now, "never_committed")
    assert [row["state"] for row in await waitpoints(rows, lasting.execution_id)] == ["pending"]
    assert [row["state"] for row in await waitpoints(rows, used.execution_id)] == ["active"]
    assert isinstance(await lasting.send(), Accepted)
    bound = {"UsePending": {"waitpoint_id": expiring.points["wait"].waitpoint_id}}
    await refused(engine.suspend(expiring.handle, suspend_args(waitpoints=(bound,))), "waitpoint_not_pending")


@pytest.mark.usefixtures("small_batches")
async def test_waitpoints_are_closed_in_batches_that_skip_locked_executions(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    handle, held = await given.claimed(), await running(engine, given, expires_in_ms=1)
    for _ in range(LIMIT + 1):
        await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=2)
    await clock.advance(ms=2)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(held.execution_id))
        assert await parts_of(engine).suspension_timeouts.close_pending() == LIMIT - 1
        assert await parts_of(engine).suspension_timeouts.close_pending() == 2
    reconciler = Reconciler(engine)
    await reconciler.catch_up()
    assert reconciler.stats["pending_wp_expiry"].processed == 1
    assert {row["close_reason"] for row in await rows.of("waitpoint")} == {"never_committed"}


async def test_a_waitpoint_without_its_execution_is_closed_too(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    await running(engine, given, expires_in_ms=1)
    # No operation deletes an execution without its waitpoints.
    await connection.execute("delete from execution")
    await clock.advance(ms=1)
    assert await parts_of(engine).suspension_timeouts.close_pending() == 1


async def test_expired_idempotency_keys_of_suspends_and_signals_are_deleted(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given, suspend_args(idempotency_key="s", timeout_at=await clock.now() + MINUTE))
    await wait.send("other", idempotency_key="k", dedup_ttl_ms=MINUTE)
    await wait.send("other", idempotency_key="l", dedup_ttl_ms=10 * MINUTE)
    reconciler = Reconciler(engine)
    await reconciler.catch_up()
    assert (len(await suspend_keys(rows)), len(await signal_keys(rows))) == (1, 2)
    await clock.advance(ms=MINUTE)
    assert (await read_due(parts_of(engine).store, [])).has_expired_keys
    await reconciler.catch_up()
    assert (len(await suspend_keys(rows)), len(await signal_keys(rows))) == (1, 1)
    await clock.advance(ms=MINUTE)
    await reconciler.catch_up()
    assert await suspend_keys(rows) == []
    assert [row["key"] for row in await signal_keys(rows)] == ["l"]


@pytest.mark.usefixtures("small_batches")
async def test_expired_waitpoints_of_another_version_do_not_block_pending_ones(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    first = await running(engine, given, expires_in_ms=1_000)
    for _ in range(LIMIT):
        await engine.create_waitpoint(first.handle, waitpoint_key="wait", expires_in_ms=1_000)
    # Another version may set this state without closed_at.
    await connection.execute("update waitpoint set state = 'expired'")
    await clock.advance(ms=1)
    last = await running(engine, given, expires_in_ms=1_000)
    await clock.advance(ms=1_000)
    assert await parts_of(engine).suspension_timeouts.close_pending() == 1
    assert [row["state"] for row in await waitpoints(rows, last.execution_id)] == ["closed"]

"""Identities of worker processes are deleted when nothing refers to them any longer."""

import asyncpg
import pytest

from engine.state import revoke
from fixtures import Clock, Engines, Given, Rows
from flowfabric.engine import store
from flowfabric.engine.engine import Engine
from flowfabric.engine.fleet.identities import DAY_MS, memory_ms
from flowfabric.engine.parts import parts_of
from flowfabric.reconcile.due import read_due

HOUR_MS = 60 * 60 * 1000


async def identities(rows: Rows) -> set[str]:
    """The instance ids of the stored identities."""
    return {row["worker_instance_id"] for row in await rows.of("worker_identity")}


@pytest.fixture
async def brief(engines: Engines) -> Engine:
    """An engine that keeps executions and events for an hour."""
    engine = await engines(retention_ms=HOUR_MS, feed_retention_ms=HOUR_MS)
    assert memory_ms(parts_of(engine).store.rules) == HOUR_MS + DAY_MS
    return engine


async def test_an_unused_identity_is_deleted_a_day_after_the_retention(
    brief: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    await given.completed(worker="gone")
    await parts_of(brief).lease_expiry.sweep()
    await clock.advance(ms=HOUR_MS + DAY_MS)
    assert await parts_of(brief).identities.purge() == 0
    await clock.advance(ms=1)
    # The sweep of leases deletes its expired claim.
    await parts_of(brief).lease_expiry.sweep()
    assert await parts_of(brief).identities.purge() == 1
    assert await identities(rows) == set()


async def test_an_identity_with_a_live_claim_is_kept(brief: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    await given.claimed(worker="long", lease_ttl_ms=10 * DAY_MS)
    await clock.advance(ms=HOUR_MS + DAY_MS + 1)
    assert await parts_of(brief).identities.purge() == 0
    assert await identities(rows) == {"long-1"}


async def test_a_claim_marks_the_identity_of_its_process_as_used(
    brief: Engine, given: Given, rows: Rows, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WORKER_SECONDS", 0.0)
    for _ in range(2):
        await given.completed(worker="alive")
        await clock.advance(ms=DAY_MS)
    await parts_of(brief).lease_expiry.sweep()
    assert await parts_of(brief).identities.purge() == 0
    assert await identities(rows) == {"alive-1"}


async def test_the_number_of_a_process_is_cached(given: Given, rows: Rows, connection: asyncpg.Connection) -> None:
    first = await given.run(worker="one")
    await connection.execute("delete from worker_identity")
    again = await given.run(worker="one")
    first_row, again_row = [await rows.execution(run.execution_id) for run in (first, again)]
    # The second claim uses the cached number: no identity is inserted.
    assert first_row["claim_no"] != again_row["claim_no"]
    assert first_row["worker_no"] == again_row["worker_no"]
    assert await identities(rows) == set()


@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_the_identity_of_a_lost_lease_is_kept_until_it_is_reclaimed(
    engine: Engine,
    brief: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    connection: asyncpg.Connection,
    how: str,
) -> None:
    lost = await given.claimed(worker="lost", lease_ttl_ms=1000)
    await given.completed(worker="gone", lease_ttl_ms=1000)
    if how == "revoked":
        await revoke(engine, lost.execution_id)
    await clock.advance(ms=1000)
    await parts_of(brief).lease_expiry.sweep()
    for _ in range(3):
        await clock.advance(ms=HOUR_MS + DAY_MS + 1)
        await parts_of(brief).identities.purge()
        assert await rows.of("claim") == []
        assert await identities(rows) == {"lost-1"}
    if how == "expired":
        (entry,) = (await engine.list_expired_leases()).entries
        assert (entry.execution_id, entry.worker_instance_id) == (lost.execution_id, "lost-1")
        assert await engine.find_inconsistencies() == []
        # With a wait, as the hint of the other engine may not have arrived.
        taken = await engine.claim(
            lane_id="default",
            worker_id="next",
            worker_instance_id="next-1",
            lease_ttl_ms=10 * DAY_MS,
            max_wait_ms=30_000,
        )
        assert taken is not None
        await clock.advance(ms=HOUR_MS + DAY_MS + 1)
        assert await parts_of(brief).identities.purge() == 1
        assert await identities(rows) == {"next-1"}
    snapshot = await engine.describe_execution(lost.execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is not None
    assert snapshot.current_lease.worker_instance_id == ("next-1" if how == "expired" else "lost-1")


async def test_an_identity_in_use_is_not_due_again_at_once(
    brief: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    await given.reclaimable(worker="lost")
    now = await clock.advance(ms=HOUR_MS + DAY_MS + 1)
    assert (await read_due(parts_of(brief).store, ())).has_old_identities
    assert await parts_of(brief).identities.purge() == 0
    assert not (await read_due(parts_of(brief).store, ())).has_old_identities
    assert [row["seen_at"] for row in await rows.of("worker_identity")] == [now]


async def test_a_lease_whose_identity_is_deleted_is_shown_without_its_worker(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    lost, live = await given.reclaimable(), await given.claimed(lane_id="another")
    await connection.execute("delete from worker_identity")
    (entry,) = (await engine.list_expired_leases()).entries
    assert (entry.execution_id, entry.lease_epoch, entry.worker_instance_id) == (lost.execution_id, 1, None)
    for handle in (lost, live):
        snapshot = await engine.describe_execution(handle.execution_id)
        assert snapshot is not None
        assert snapshot.current_lease is not None
        assert (snapshot.current_lease.lease_id, snapshot.current_lease.worker_instance_id) == (handle.lease_id, None)


async def test_an_execution_that_outlives_its_identity_is_shown_without_its_worker(
    engine: Engine, brief: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    execution_id = await given.completed(worker="gone", policy={"stream_policy": {"retention_ttl_ms": 30 * DAY_MS}})
    await clock.advance(ms=2 * DAY_MS)
    await parts_of(brief).lease_expiry.sweep()
    assert await parts_of(brief).identities.purge() == 1
    assert await identities(rows) == set()
    (attempt,) = await engine.list_attempts(execution_id)
    assert (attempt.worker_id, attempt.worker_instance_id) == (None, None)
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot is not None
    assert (str(snapshot.public_state), snapshot.current_lease) == ("completed", None)
    assert await engine.find_inconsistencies() == []

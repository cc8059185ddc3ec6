"""Identities of worker processes are kept for as long as anything may show them."""

from typing import Any

import pytest

from flowfabric.engine import store
from flowfabric.engine.engine import Engine
from flowfabric.engine.fleet.identities import DAY_MS, memory_ms

HOUR_MS = 60 * 60 * 1000


async def identities(rows: Any) -> set[str]:
    """The worker processes that the store knows."""
    return {row["worker_instance_id"] for row in await rows.of("worker_identity")}


@pytest.fixture
async def brief(engines: Any) -> Engine:
    """An engine that keeps executions and events for an hour."""
    engine: Engine = await engines(retention_ms=HOUR_MS, feed_retention_ms=HOUR_MS)
    assert memory_ms(engine.store.rules) == HOUR_MS + DAY_MS
    return engine


async def test_an_identity_is_deleted_when_nothing_shows_it_any_more(
    brief: Engine, given: Any, rows: Any, clock: Any
) -> None:
    await given.completed(worker="gone")
    await brief.lease_expiry.sweep()
    await clock.advance(ms=HOUR_MS + DAY_MS)
    assert await brief.identities.purge() == 0
    await clock.advance(ms=1)
    # Its claim has expired as well, and is deleted by the sweep of leases.
    await brief.lease_expiry.sweep()
    assert await brief.identities.purge() == 1
    assert await identities(rows) == set()


async def test_an_identity_that_holds_a_claim_stays(brief: Engine, given: Any, rows: Any, clock: Any) -> None:
    await given.claimed(worker="long", lease_ttl_ms=10 * DAY_MS)
    await clock.advance(ms=HOUR_MS + DAY_MS + 1)
    assert await brief.identities.purge() == 0
    assert await identities(rows) == {"long-1"}


async def test_a_process_that_lives_is_seen_again(
    brief: Engine, given: Any, rows: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WORKER_SECONDS", 0.0)
    for _ in range(2):
        await given.completed(worker="alive")
        await clock.advance(ms=DAY_MS)
    await brief.lease_expiry.sweep()
    assert await brief.identities.purge() == 0
    assert await identities(rows) == {"alive-1"}


async def test_the_number_of_a_process_is_asked_for_once(given: Any, rows: Any, connection: Any) -> None:
    first = await given.run(worker="one")
    await connection.execute("delete from worker_identity")
    again = await given.run(worker="one")
    numbers = {row["worker_no"] for row in await rows.of("claim")}
    assert len(numbers) == 1
    assert first.lease_epoch == again.lease_epoch
    # What it did without one is shown without one.
    assert await identities(rows) == set()


async def test_what_nobody_has_an_identity_for_is_shown_without(
    engine: Engine, brief: Engine, given: Any, clock: Any
) -> None:
    execution_id = await given.completed(worker="gone", policy={"stream_policy": {"retention_ttl_ms": 30 * DAY_MS}})
    await clock.advance(ms=2 * DAY_MS)
    await brief.lease_expiry.sweep()
    await brief.identities.purge()
    (attempt,) = await engine.list_attempts(execution_id)
    assert (attempt.worker_id, attempt.worker_instance_id) == (None, None)

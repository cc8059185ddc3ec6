"""A claim by search and a claim by id write the same rows."""

from typing import Any

import pytest

from engine.cases import in_turn
from engine.grants import claim_granted, claim_resumed, register_workers, worker
from engine.state import attempts, claim, claim_rows, ids, revoke
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.grant import Granted


@pytest.fixture
async def engine(engine: Engine) -> Engine:
    """An engine that knows the worker who searches."""
    await register_workers(engine)
    return engine


_OWN = {
    *("execution_id", "partition_key", "place", "queue_no", "route_no", "lane_no", "lease_id", "attempt_id"),
    *("event_id", "xid", "claim_no"),
}


async def _fresh(given: Given, lane: str) -> str:
    return str(
        await given.created(
            lane_id=lane,
            tags={"ff.instance_id": "one"},
            policy={"timeout_policy": {"attempt_timeout_ms": 4000, "execution_deadline_ms": 10**9}},
        )
    )


async def _retry(given: Given, lane: str) -> str:
    handle = await given.backing_off(lane_id=lane, delay_ms=1)
    await given.clock.advance(ms=1)
    await parts_of(given.engine).delays.promote_due()
    return str(handle.execution_id)


async def _resumed(given: Given, lane: str) -> str:
    policy = {"timeout_policy": {"attempt_timeout_ms": 4000}}
    handle = await given.claimed(lane_id=lane, policy=policy)
    await given.clock.advance(ms=1000)
    await given.engine.wait_children(handle)
    return str(handle.execution_id)


async def _expired(given: Given, lane: str) -> str:
    handle = await given.reclaimable(lane_id=lane, policy={"timeout_policy": {"attempt_timeout_ms": 10**6}})
    return str(handle.execution_id)


async def _expired_retry(given: Given, lane: str) -> str:
    await _retry(given, lane)
    handle = (await given.claim(lane_id=lane)).handle
    await given.clock.advance(seconds=31)
    await parts_of(given.engine).lease_expiry.mark_expired([handle.execution_id])
    return str(handle.execution_id)


async def _expired_resumed(given: Given, lane: str) -> str:
    await _resumed(given, lane)
    handle = (await given.claim(lane_id=lane, lease_ttl_ms=10)).handle
    await given.clock.advance(ms=11)
    await parts_of(given.engine).lease_expiry.mark_expired([handle.execution_id])
    return str(handle.execution_id)


async def _revoked(given: Given, lane: str) -> str:
    handle = await given.claimed(lane_id=lane)
    await revoke(given.engine, handle.execution_id)
    return str(handle.execution_id)


@in_turn("state", [_fresh, _retry, _resumed, _expired, _expired_retry, _expired_resumed, _revoked])
async def test_a_named_claim_writes_the_same_rows_as_a_search(
    engine: Engine, given: Given, rows: Rows, clock: Clock, state: Any
) -> None:
    # Both run at the same times of a stopped clock.
    began = await clock.now()
    searched = await state(given, "one")
    later = await clock.advance(ms=100)
    (by_search,) = await claim(engine, "one", worker_id="pool", worker_instance_id="pool-1", lease_ttl_ms=7000)
    await clock.set(began)
    named = await state(given, "two")
    await clock.set(later)
    if state is _resumed:
        by_name = await claim_resumed(engine, named, lane_id="two", lease_ttl_ms=7000)
    else:
        assert isinstance(await engine.claim_for_worker(**worker(lane_id="two")), Granted)
        by_name = await claim_granted(engine, named, lane_id="two", lease_ttl_ms=7000)
    assert ids([by_search, by_name]) == [searched, named]

    def shared(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in _OWN}

    one, two = await rows.execution(searched), await rows.execution(named)
    assert shared(one) == shared(two)
    assert (one["attempt_id"] == one["lease_id"]) == (two["attempt_id"] == two["lease_id"])
    for find in (attempts, lambda rows, found: rows.events(found)):
        ones, twos = await find(rows, searched), await find(rows, named)
        assert [shared(row) for row in ones] == [shared(row) for row in twos]
    for table in ("attempt", "ready", "timer", "listed", "claim_grant"):
        ones, twos = [await rows.of(table, execution_id=uuid_of(found)) for found in (searched, named)]
        assert sorted(map(str, map(shared, ones))) == sorted(map(str, map(shared, twos))), table
    held_one, held_two = [await claim_rows(rows, [found]) for found in (searched, named)]
    assert [each["expires_at"] for each in held_one.values()] == [each["expires_at"] for each in held_two.values()]
    for field in ("attempt_type", "attempt_index", "lease_epoch", "lease_expires_at", "policy", "tags", "retry_count"):
        assert getattr(by_search, field) == getattr(by_name, field), field
    assert by_search.handle.kind == by_name.handle.kind

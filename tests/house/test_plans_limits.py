"""Claims on lanes with limits read what they take, and do not walk a backlog without room again and again."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from creates import new
from databases import Databases
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.limited import MAX_REACH, REACH
from flowfabric.engine.parts import parts_of
from house.filled import STATISTICS, copied, filled
from house.test_plans_claims import SPANS, WORKER
from house.touched import Touched, touched

__all__ = ["touched"]

TENANTS = 20
WIDE, NOISY = uuid4(), uuid4()


async def claim(engine: Engine, limit: int, *lanes: str, **overrides: Any) -> list[Any]:
    return await engine.claim_many(lanes=lanes or ("default",), limit=limit, **{**WORKER, **overrides})


def limited(lane_id: str, tenant: str, quota: object) -> Any:
    """An execution of a tenant on a lane with limits."""
    return new(lane_id=lane_id, tags={"app.tenant": tenant}, policy={"quota_policy_id": str(quota)})


async def fill(engine: Engine) -> None:
    """Create 4,000 executions of 20 tenants with room, and behind 10,000 without room one that has some."""
    for quota, slots in ((WIDE, 1_000_000), (NOISY, 1)):
        await engine.create_quota_policy(quota, 60, 0, slots, key_from="tag:app.tenant")
    for _ in range(4):
        await engine.create_many([limited("default", f"t{n % TENANTS}", WIDE) for n in range(1000)])
    for _ in range(10):
        await engine.create_many([limited("saturated", "noisy", NOISY) for _ in range(1000)])
    await engine.create_many([limited("saturated", "quiet", NOISY)])


@pytest.fixture(scope="module")
async def store(databases: Databases) -> AsyncIterator[str]:
    """The address of a database with the backlogs."""
    async with filled(databases, fill) as url:
        yield url


@pytest.fixture(scope="module", params=STATISTICS)
async def original(request: pytest.FixtureRequest, store: str, databases: Databases) -> AsyncIterator[str]:
    """The address of a database with the backlogs, with and without statistics."""
    async with copied(databases, store, *(["vacuum analyze"] if request.param == "statistics" else [])) as url:
        yield url


@pytest.fixture
def backlog(original: str, lasting_watermarks: None, engine: Engine) -> Engine:
    """An engine on a store with backlogs of limited executions."""
    return engine


async def test_a_claim_with_limits_reads_little_more_than_it_takes(backlog: Engine, touched: Touched) -> None:
    for limit in (1, 10, 100, 500):
        touched.clear()
        assert len(await claim(backlog, limit)) == limit
        assert touched.of("pick_candidates", "ready") <= limit + REACH + SPANS
        assert touched.of("pick_candidates", "execution") == limit
        assert touched.of("lease_admitted", "execution") <= 2 * limit
        assert touched.of("lease_admitted", "ready") == 0


async def test_a_backlog_without_room_is_walked_once_and_then_read_by_queue(backlog: Engine, touched: Touched) -> None:
    runs = await claim(backlog, 10, "saturated")
    assert sorted(run.tags["app.tenant"] for run in runs) == ["noisy", "quiet"]
    assert touched.of("pick_candidates", "ready") <= MAX_REACH + SPANS
    for _ in range(3):
        touched.clear()
        assert await claim(backlog, 10, "saturated") == []
        assert "list_heads" not in touched or touched.of("list_heads", "ready") <= 4
        assert "pick_candidates" not in touched or touched.of("pick_candidates", "ready") <= 20 + SPANS
    touched.clear()
    await backlog.complete_many([(run.handle, b"") for run in runs])
    assert len(await claim(backlog, 10, "saturated")) == 1
    assert touched.of("pick_candidates", "ready") <= 20 + SPANS


async def test_the_heads_of_queues_are_read_without_their_backlog(backlog: Engine, touched: Touched) -> None:
    await backlog.set_lane_fairness(lane_id="default", fair_by="namespace")
    parts_of(backlog).wakeups.watermarks.clear()
    touched.clear()
    assert len(await claim(backlog, 10)) == 10
    # One entry of each queue, and none of a worse priority.
    assert touched.of("list_heads", "ready") <= TENANTS + SPANS
    assert touched.of("pick_candidates", "ready") <= 2 * 10 + SPANS

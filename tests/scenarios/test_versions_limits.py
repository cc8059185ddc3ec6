"""Limits while processes of the previous version, which know none, run beside this one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.limit.limits import limited, quota, used
from engine.state import claim, new
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from scenarios.previous import PreviousVersion, started
from scenarios.test_versions import DAY_MS, source

__all__ = ["source"]

OLD = {"worker_id": "old", "worker_instance_id": "old-1"}
RETRIES = {"retry_policy": {"max_retries": 9, "backoff": {"type": "fixed", "delay_ms": 0}}}


@pytest.fixture
async def previous(engine: Engine, url: str, source: Path, tmp_path: Path) -> AsyncIterator[PreviousVersion]:
    """An engine of the previous version beside this one."""
    async with started(source, url, tmp_path / "log") as previous:
        yield previous


async def old_claim(previous: PreviousVersion, *lanes: str) -> list[str]:
    """The executions that a worker of the previous version claims."""
    found = await previous("claim_many", lanes=lanes or ("default",), limit=10, lease_ttl_ms=60_000, **OLD)
    return [each.execution_id for each in found]


async def test_a_worker_of_the_previous_version_claims_no_limited_work(
    engine: Engine, given: Given, clock: Clock, previous: PreviousVersion
) -> None:
    await clock.stop()
    slots = await quota(engine, running=1)
    first, second = [await given.created(policy=limited(slots)) for _ in range(2)]
    free = await given.created()
    assert await old_claim(previous) == [free]
    assert type(await previous("claim_for_worker", lane_id="default", **OLD)).__name__ == "NoWork"
    # What it creates with limits is limited, too.
    await previous("create_execution", **new(policy=limited(slots), lane_id="new"))
    await previous("create_execution", **new())
    # A limit that is attached to its lane keeps it away from there.
    await engine.attach_quota("lane", "attached", slots)
    await given.created(lane_id="attached")
    assert await old_claim(previous, "attached") == []
    runs = await claim(engine)
    assert runs[0].execution_id == first
    assert second not in [each.execution_id for each in runs]
    await engine.complete_many([(each.handle, b"") for each in runs])
    assert await engine.find_inconsistencies() == []


async def test_what_the_previous_version_creates_without_limits_works(
    engine: Engine, clock: Clock, previous: PreviousVersion
) -> None:
    await clock.stop()
    slots = await quota(engine, running=1)
    await engine.attach_quota("lane", "default", slots)
    made = [(await previous("create_execution", **new())).execution_id for _ in range(2)]
    plain = (await previous("create_execution", **new(lane_id="plain"))).execution_id
    assert await old_claim(previous, "plain") == [plain]
    found = [each.execution_id for each in await claim(engine)]
    assert found
    assert set(found) <= set(made)


ENDS = ("complete", "complete_many", "cancel", "retry", "expire", "timeout")


@pytest.mark.parametrize("end", ENDS)
async def test_a_lease_that_the_previous_version_ends_leaves_a_slot_for_the_recount(
    engine: Engine, given: Given, rows: Rows, clock: Clock, previous: PreviousVersion, end: str
) -> None:
    await clock.stop()
    slots = await quota(engine, running=1)
    timeout = {"timeout_policy": {"attempt_timeout_ms": 10_000}} if end == "timeout" else {}
    first, second = [await given.created(policy={**limited(slots), **RETRIES, **timeout}) for _ in range(2)]
    (run,) = await claim(engine)
    assert run.execution_id == first
    match end:
        case "complete":
            await previous("complete", run.handle, b"x")
        case "complete_many":
            await previous("complete_many", [(run.handle, b"x")])
        case "cancel":
            await previous("cancel_execution", execution_id=first, reason="x")
        case "retry":
            await previous("fail", run.handle, reason="x")
        case _:
            await clock.advance(seconds=31)
            await previous("catch_up")
    assert await used(rows, slots) == 1
    assert await claim(engine) == []
    await engine.reconcile_quota_counters()
    assert await used(rows, slots) == 0
    assert await engine.find_inconsistencies() == []
    for _ in range(3):
        # An execution that has lost its slot has none any more.
        (run,) = await claim(engine)
        assert await used(rows, slots) == 1
        assert await claim(engine) == []
        await engine.hand_back(run.handle)
        assert await used(rows, slots) == 0
    for execution_id in (first, second):
        if end not in ("complete", "complete_many", "cancel") or execution_id == second:
            await engine.cancel_execution(execution_id=execution_id, reason="x")
    assert await used(rows, slots) == 0
    await engine.reconcile_quota_counters()
    assert await used(rows, slots) == 0


async def test_a_waiting_execution_whose_slot_was_recounted_returns_none(
    engine: Engine, given: Given, rows: Rows, clock: Clock, previous: PreviousVersion
) -> None:
    await clock.stop()
    slots = await quota(engine, running=5)
    ids = [await given.created(policy={**limited(slots), **RETRIES}) for _ in range(3)]
    runs = await claim(engine)
    for run in runs:
        await previous("fail", run.handle, reason="x")
    await engine.reconcile_quota_counters()
    await engine.cancel_execution(execution_id=ids[0], reason="x")
    await engine.block_execution_for_admission(ids[1], "paused_by_operator")
    await engine.release_admission(slots, ids[2])
    assert await used(rows, slots) == 0
    await clock.advance(ms=DAY_MS)
    await previous("catch_up")

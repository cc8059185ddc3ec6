"""Sweeps of flows read few entries while an open transaction keeps those of the flows before them."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from engine.flows import flow_of, settle
from fixtures import Clock, Given, Rows
from flowfabric.engine.core.watermark import TimerWatermark
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.reconcile.due import read_due
from house.touched import Touched, touched

__all__ = ["touched"]

FLOWS = 60
DAY = 86_400


@pytest.fixture
async def pinned(engine: Engine, url: str) -> AsyncIterator[Engine]:
    """An engine on a database on which a transaction stays open."""
    other = await asyncpg.connect(url)
    await other.execute("begin isolation level repeatable read; select 1 from flowfabric.flow")
    yield engine
    await other.close()


async def test_a_projected_flow_is_not_read_again(pinned: Engine, given: Given, clock: Clock, touched: Touched) -> None:
    parts = parts_of(pinned)
    await clock.stop()
    for _ in range(FLOWS):
        await flow_of(pinned, [await given.created()])
    await read_due(parts.store, [])
    while (await parts.flow_summaries.project_due()).done:
        pass
    await clock.advance(seconds=5)
    await read_due(parts.store, [])
    touched.clear()
    await flow_of(pinned, [await given.created()])
    assert (await read_due(parts.store, [])).has_due_flows
    assert touched.of("read_due", "flow") <= 4
    assert (await parts.flow_summaries.project_due()).done == 1
    assert touched.of("list_due_flows", "flow") <= 4
    # The end of the member is not queued, so the entries of the cascade are not read.
    assert touched.of("count_members", "cascade_entry") == 0


async def test_a_deleted_flow_is_not_read_again(
    pinned: Engine, clock: Clock, touched: Touched, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = parts_of(pinned).flow_retention
    monkeypatch.setattr(sweep, "watermark", TimerWatermark(full_scan_seconds=DAY, margin_ms=100))
    await clock.stop()
    for _ in range(FLOWS):
        await flow_of(pinned)
    await clock.advance(seconds=5)
    late = await flow_of(pinned)
    touched.clear()
    assert (await sweep.trim_batch()).done == 0
    # A new flow is looked at when its retention is over.
    assert touched.of("take_flows", "flow") == 0
    await clock.advance(seconds=DAY - 4)
    assert (await sweep.trim_batch()).done == FLOWS
    await clock.advance(seconds=4)
    touched.clear()
    assert (await sweep.trim_batch()).done == 1
    assert touched.of("take_flows", "flow") <= 4
    assert await pinned.describe_flow(late) is None


async def test_an_execution_that_waited_is_not_read_again(
    pinned: Engine, given: Given, rows: Rows, clock: Clock, touched: Touched
) -> None:
    parts = parts_of(pinned)
    await clock.stop()
    first, *others = [await given.created() for _ in range(FLOWS)]
    flow_id = await flow_of(pinned, [first, *others], [(first, other) for other in others])
    await pinned.cancel_execution(execution_id=first, reason="x")
    await settle(pinned, flow_id)
    await clock.advance(seconds=5)
    await read_due(parts.store, [])
    await parts.blocked.reconcile()
    touched.clear()
    later = [await given.created() for _ in range(2)]
    await flow_of(pinned, later, [(later[0], later[1])])
    for _ in range(2):
        await parts.blocked.reconcile()
        # The other end of each scan is an entry too.
        assert touched.of("list_stuck", "listed") <= 6
        assert touched.of("list_old_entries", "cascade_entry") <= 2

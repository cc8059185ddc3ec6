"""Waits for the ends of flows: when they return, what wakes them, and how few queries many of them need."""

import asyncio
from collections import Counter
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.flow.graphs import BuiltFlow
from engine.flows import stop_cascade
from engine.state import refused
from fixtures import Engines, Eventually, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow.ending import FlowEndings
from flowfabric.engine.parts import parts_of
from flowfabric.model.flow import FlowEnded, FlowStatus
from flowfabric.settings import Settings

QUERY = "list_ended_flows"


@pytest.fixture
async def flow(given: Given, rows: Rows) -> BuiltFlow:
    """An empty flow."""
    return await BuiltFlow.create(given, rows)


def ended(flow: BuiltFlow, status: FlowStatus) -> FlowEnded:
    """The answer to a wait."""
    return FlowEnded(flow_id=flow.flow_id, status=status)


async def test_a_wait_returns_when_every_member_has_ended(
    engine: Engine, flow: BuiltFlow, given: Given, rows: Rows
) -> None:
    # An open flow without members may still get some.
    assert await engine.wait_for_flow(flow.flow_id, 0) is None
    await flow.member()
    run = await given.claim(worker="w")
    assert await engine.wait_for_flow(flow.flow_id, timeout_ms=0) is None
    waiting = asyncio.create_task(engine.wait_for_flow(str(flow.flow_id)))
    await engine.complete(run.handle)
    assert await asyncio.wait_for(waiting, 30) == ended(flow, FlowStatus.COMPLETED)
    async with rows.unchanged():
        assert await engine.wait_for_flow(flow.flow_id, 0) == ended(flow, FlowStatus.COMPLETED)
    # A member that is added later is waited for too.
    member = await flow.member()
    assert await engine.wait_for_flow(flow.flow_id, 0) is None
    await engine.cancel_execution(execution_id=member, reason="not wanted")
    assert await engine.wait_for_flow(flow.flow_id, 30_000) == ended(flow, FlowStatus.FAILED)


async def test_a_cancelled_flow_has_ended_when_its_members_have(engine: Engine, given: Given, rows: Rows) -> None:
    empty, full = [await BuiltFlow.create(given, rows) for _ in range(2)]
    await full.members(3)
    for flow in (empty, full):
        waiting = asyncio.create_task(engine.wait_for_flow(flow.flow_id))
        await engine.cancel_flow(flow_id=flow.flow_id, reason="not wanted", cancellation_policy="cancel_all")
        assert await asyncio.wait_for(waiting, 30) == ended(flow, FlowStatus.CANCELLED)


async def test_wrong_arguments_and_absent_flows_are_refused(engine: Engine, flow: BuiltFlow, rows: Rows) -> None:
    await flow.member()
    async with rows.unchanged():
        for absent in (uuid4(), str(uuid4())):
            await refused(engine.wait_for_flow(absent), "flow_not_found", str(absent))
        malformed: list[Any] = ["nonsense", "", 5, None, str(flow.flow_id)[:-1]]
        for flow_id in malformed:
            await refused(engine.wait_for_flow(flow_id), "invalid_input", "flow_id: must be a UUID")
        wrong: list[Any] = [-1, 1.5, "1", True]
        for timeout_ms in wrong:
            await refused(engine.wait_for_flow(flow.flow_id, timeout_ms), "invalid_input")


async def test_a_hint_wakes_the_waits_of_other_processes(
    engines: Engines,
    given: Given,
    flow: BuiltFlow,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    statements: Counter[str],
) -> None:
    monkeypatch.setattr(FlowEndings, "POLL_SECONDS", (600.0, 600.0))
    other = await engines()
    member = await flow.member()
    waits = [asyncio.create_task(each.wait_for_flow(flow.flow_id)) for each in (given.engine, other)]
    await eventually(lambda: statements[QUERY] == 2)
    for each in (given.engine, other):
        await eventually(lambda each=each: parts_of(each).wakeups.hints.is_listening)
    await given.engine.cancel_execution(execution_id=member, reason="not wanted")
    assert await asyncio.wait_for(asyncio.gather(*waits), 30) == [ended(flow, FlowStatus.FAILED)] * 2


async def test_without_hints_a_wait_polls(url: str, given: Given, flow: BuiltFlow) -> None:
    member = await flow.member()
    async with Engine.connect(settings=Settings(database_url=url, listen=False)) as deaf:
        waiting = asyncio.create_task(deaf.wait_for_flow(flow.flow_id))
        await given.engine.cancel_execution(execution_id=member, reason="not wanted")
        assert await asyncio.wait_for(waiting, 30) == ended(flow, FlowStatus.FAILED)


async def test_many_waits_share_a_query_and_hold_no_connection(
    url: str,
    given: Given,
    rows: Rows,
    eventually: Eventually,
    statements: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FlowEndings, "POLL_SECONDS", (600.0, 600.0))
    flows = [await BuiltFlow.create(given, rows) for _ in range(20)]
    members = [await flow.member() for flow in flows]
    async with Engine.connect(settings=Settings(database_url=url, database_pool_size=1)) as small:
        waits = [asyncio.create_task(small.wait_for_flow(flow.flow_id)) for flow in flows for _ in range(10)]
        await eventually(lambda: statements[QUERY] > 0)
        await eventually(lambda: parts_of(small).wakeups.hints.is_listening)
        assert statements[QUERY] <= 2
        await small.ping()
        for member in members:
            await given.engine.cancel_execution(execution_id=member, reason="not wanted")
        answers = await asyncio.wait_for(asyncio.gather(*waits), 60)
    assert answers == [ended(flow, FlowStatus.FAILED) for flow in flows for _ in range(10)]
    assert statements[QUERY] <= 2 + 2 * len(flows)


async def test_a_cancelled_wait_leaves_the_others_waiting(engine: Engine, flow: BuiltFlow) -> None:
    member = await flow.member()
    first, second = [asyncio.create_task(engine.wait_for_flow(flow.flow_id)) for _ in range(2)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    await engine.cancel_execution(execution_id=member, reason="not wanted")
    assert await asyncio.wait_for(second, 30) == ended(flow, FlowStatus.FAILED)


@pytest.mark.parametrize("how", ["shutdown", "close"])
async def test_a_closing_engine_fails_its_waits(
    url: str, flow: BuiltFlow, eventually: Eventually, statements: Counter[str], how: str
) -> None:
    await flow.member()
    async with Engine.connect(url) as engine:
        waiting = asyncio.create_task(engine.wait_for_flow(flow.flow_id))
        await eventually(lambda: statements[QUERY] > 0)
        if how == "shutdown":
            await engine.shutdown_prepare(5_000)
            await refused(engine.wait_for_flow(flow.flow_id), "unavailable")
    refusal = await refused(waiting, "unavailable")
    assert "wait_for_flow" in str(refusal)


async def test_a_projection_that_corrects_the_counts_wakes_the_waits(
    engine: Engine,
    flow: BuiltFlow,
    connection: asyncpg.Connection,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    statements: Counter[str],
) -> None:
    monkeypatch.setattr(FlowEndings, "POLL_SECONDS", (600.0, 600.0))
    member = await flow.member()
    waiting = asyncio.create_task(engine.wait_for_flow(flow.flow_id))
    await eventually(lambda: statements[QUERY] > 0)
    # As a version without flows ends a member.
    stop_cascade(engine)
    await engine.cancel_execution(execution_id=member, reason="not wanted")
    await connection.execute("delete from cascade_entry")
    assert await engine.project_flow_summary(flow.flow_id)
    assert await asyncio.wait_for(waiting, 30) == ended(flow, FlowStatus.FAILED)

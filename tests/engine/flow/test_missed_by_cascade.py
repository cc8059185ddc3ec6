"""Executions that the cascade has missed: their edges are resolved, and they are promoted, by calls and by a sweep."""

import asyncio

import asyncpg
import pytest

from engine.flow.driving import DrivenFlow
from engine.flow.graphs import BuiltFlow
from engine.flow.submitting import are_waiting, node
from engine.flows import stop_cascade
from engine.state import all_cases, claim, ids, refused
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import DependenciesPromoted, DependencyResolved, Resolution
from flowfabric.model.flow import FlowEdge
from flowfabric.model.states import PublicState
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS

pytestmark = pytest.mark.usefixtures("consistent_rows")


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """An engine that does not settle the ends of members."""
    stop_cascade(engine)
    return engine


async def satisfy(connection: asyncpg.Connection) -> None:
    """Satisfy every dependency without a promotion, which no operation does."""
    await connection.execute("update edge set state = 'satisfied', last_resolved_at = 1")
    await connection.execute(
        "update edge_group set succeeded_count = applied_count, group_state = 'satisfied', satisfied_at = 1"
    )


async def sweep(engine: Engine) -> None:
    """Run the safety net."""
    await Reconciler(engine, sweeps=[sweep for sweep in SWEEPS if sweep.name == "dependency_reconciler"]).catch_up()


@pytest.mark.parametrize("by", ["a call", "the sweep"])
async def test_a_promoted_execution_continues_where_it_began_to_wait(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, clock: Clock, by: str
) -> None:
    nodes = [node("a"), node("fresh"), node("delayed", delay_ms=60_000), node("parked")]
    edges = [FlowEdge(upstream="a", downstream=name) for name in ("fresh", "delayed")]
    flow = await DrivenFlow.submit(engine, rows, nodes, edges)
    handle = await flow.claim("parked")
    await flow.connect("a>parked")
    await engine.wait_children(handle)
    await flow.succeed("a")
    await satisfy(connection)
    await connection.execute("delete from cascade_entry; update flow set live_count = 3")
    expected = {"fresh": PublicState.WAITING, "delayed": PublicState.DELAYED, "parked": PublicState.RESUMABLE}
    if by == "the sweep":
        await sweep(engine)
    else:
        for name, state in expected.items():
            answer = await engine.promote_blocked_to_eligible(flow.id(name))
            assert answer == DependenciesPromoted(execution_id=flow.id(name), public_state=state)
            async with rows.unchanged():
                await refused(engine.promote_blocked_to_eligible(flow.id(name)), "not_blocked_by_deps")
    assert await flow.states() == {"a": "completed", **expected}
    runs = await claim(engine, lease_ttl_ms=3_600_000)
    assert sorted(ids(runs)) == sorted([flow.id("fresh"), flow.id("parked")])
    await clock.advance(ms=60_000)
    assert ids(await claim(engine)) == [flow.id("delayed")]


async def test_an_execution_that_another_session_has_locked_is_left_and_the_others_are_promoted(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c d", "a>b a>c a>d")
    await satisfy(connection)
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(flow.id("c")))
        await sweep(engine)
        assert await flow.states() == {"a": "waiting", "b": "waiting", "c": "waiting_children", "d": "waiting"}
    await sweep(engine)
    assert (await flow.states())["c"] == "waiting"


@pytest.mark.usefixtures("hints_only")
@pytest.mark.parametrize("by", ["a call", "the sweep"])
async def test_a_promotion_wakes_a_waiting_claim(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, eventually: Eventually, by: str
) -> None:
    flow = await DrivenFlow.submit(
        engine, rows, [node("a"), node("b", lane_id="later")], [FlowEdge(upstream="a", downstream="b")]
    )
    await satisfy(connection)
    waiting = asyncio.create_task(
        engine.claim(lane_id="later", worker_id="w", worker_instance_id="w-1", max_wait_ms=60_000)
    )
    await eventually(lambda: parts_of(engine).wakeups._waiting.get("later"))
    await (sweep(engine) if by == "the sweep" else engine.promote_blocked_to_eligible(flow.id("b")))
    async with asyncio.timeout(30):
        run = await waiting
    assert run is not None
    assert run.execution_id == flow.id("b")


async def test_a_staged_edge_keeps_an_execution_waiting_and_cannot_be_resolved(
    engine: Engine, given: Given, rows: Rows
) -> None:
    flow = await BuiltFlow.create(given, rows)
    done = await given.claimed(execution_id=flow.mint(), lane_id="upstream")
    await flow.add(done.execution_id)
    other, child = await flow.members(2)
    await flow.connect(done.execution_id, child)
    staged = await flow.stage(other, child)
    await engine.complete(done, b"done")
    await parts_of(engine).cascade.settle_flow((await flow.row())["partition_key"], flow.flow_id)
    with all_cases() as case:
        with case("promote"):
            async with rows.unchanged():
                refusal = await refused(engine.promote_blocked_to_eligible(child), "deps_not_satisfied")
            assert refusal.detail == {"unsatisfied_count": "0", "unresolved_count": "1"}
        with case("the sweep"):
            async with rows.unchanged():
                await sweep(engine)
        with case("resolve"):
            async with rows.unchanged():
                await refused(engine.resolve_dependency(flow.flow_id, staged, "success"), "invalid_dependency")


@pytest.mark.usefixtures("patient_with_locks")
async def test_an_edge_is_resolved_by_what_has_become_of_its_locked_child(
    engine: Engine, engines: Engines, rows: Rows, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    other = await engines()
    flow = await DrivenFlow.submit(engine, rows, "a b", "a>b")
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(flow.id("b")))
        cancelled = asyncio.create_task(other.cancel_execution(execution_id=flow.id("b"), reason="not wanted"))
        await eventually(lambda: are_waiting(rows, 1))
        # It waits behind the cancellation.
        resolved = asyncio.create_task(engine.resolve_dependency(flow.flow_id, flow.edge("a>b"), "success"))
        await eventually(lambda: are_waiting(rows, 2))
    await cancelled
    assert await resolved == DependencyResolved(resolution=Resolution.SATISFIED)
    assert await flow.states() == {"a": "waiting", "b": "cancelled"}
    assert await flow.counts("b") == ("satisfied", 1, 0, 0)
    await flow.succeed("a")


async def test_the_safety_net_settles_entries_that_are_left(engine: Engine, rows: Rows, clock: Clock) -> None:
    flow = await DrivenFlow.submit(engine, rows, "a b c", "a>b")
    await flow.succeed("a")
    await flow.succeed("c")
    await clock.advance(ms=1_001)
    await sweep(engine)
    assert (await flow.states())["b"] == "waiting"
    assert await rows.of("cascade_entry") == []
    (stored,) = await rows.of("flow", flow_id=flow.flow_id)
    assert stored["live_count"] == 1

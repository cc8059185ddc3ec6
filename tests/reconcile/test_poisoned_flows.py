"""A member, child or group whose rows cannot be written blocks none of the others that the sweeps of flows process."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import asyncpg
import pytest

from engine.flow.graphs import BuiltFlow
from engine.flows import stop_cascade
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.core.quarantine import Quarantine
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow import cascade
from flowfabric.engine.parts import parts_of
from flowfabric.model.edge import AnyOfEdges, OnSatisfied
from flowfabric.model.ids import ExecutionId, format_execution_id
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS

MINUTE, DAY = 60_000, 86_400_000


@dataclass
class Scene:
    """The fixtures of a case."""

    engine: Engine
    given: Given
    rows: Rows
    connection: asyncpg.Connection

    async def flow(self) -> BuiltFlow:
        """An empty flow."""
        return await BuiltFlow.create(self.given, self.rows)

    async def children(self, flow: BuiltFlow, count: int) -> list[ExecutionId]:
        """Executions that wait for one upstream execution, which has succeeded; nobody settles its end."""
        upstream = await self.given.claimed(execution_id=flow.mint(), lane_id="upstream")
        await flow.add(upstream.execution_id)
        children = await flow.members(count, lane_id="children")
        for child in children:
            await flow.connect(upstream.execution_id, child)
        stop_cascade(self.engine)
        await self.engine.complete(upstream, b"done")
        return children

    async def sibling(self) -> tuple[ExecutionId, ExecutionId]:
        """A sibling that a decided group cancels, and the downstream execution of the group; nobody cancels it."""
        flow = await self.flow()
        parts_of(self.engine).wakeups.on_siblings = None
        upstream = await self.given.claimed(execution_id=flow.mint(), lane_id="upstream")
        await flow.add(upstream.execution_id)
        sibling, child = await flow.member(lane_id="siblings"), await flow.member(lane_id="children")
        await flow.policy(child, AnyOfEdges(OnSatisfied.CANCEL_REMAINING))
        for each in (upstream.execution_id, sibling):
            await flow.connect(each, child)
        await self.engine.complete(upstream, b"done")
        await flow.settle()
        return sibling, child


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sweep of flows."""

    sweep: str
    make: Callable[[Scene], Awaitable[list[ExecutionId]]]
    """Makes three executions that are due for the sweep."""
    is_done: Callable[[Scene, ExecutionId], Awaitable[bool]]
    table: str = "execution"
    """The table whose rows cannot be written."""
    key: str = "execution_id"


def _shows(state: str) -> Callable[[Scene, ExecutionId], Awaitable[bool]]:
    async def is_done(scene: Scene, execution_id: ExecutionId) -> bool:
        return await scene.engine.read_execution_state(execution_id) == state

    return is_done


async def _waiting(scene: Scene) -> list[ExecutionId]:
    return [(await scene.children(await scene.flow(), 1))[0] for _ in range(3)]


async def _stuck(scene: Scene) -> list[ExecutionId]:
    """The children of three flows whose entries are lost, which only rows written by the test can show."""
    children = await _waiting(scene)
    await scene.connection.execute("delete from cascade_entry")
    return children


async def _waiting_together(scene: Scene) -> list[ExecutionId]:
    return await scene.children(await scene.flow(), 3)


async def _siblings(scene: Scene) -> list[ExecutionId]:
    return [(await scene.sibling())[0] for _ in range(3)]


async def _finished_groups(scene: Scene) -> list[ExecutionId]:
    """The downstream executions of groups whose siblings have ended before they could be cancelled."""
    children = []
    for _ in range(3):
        sibling, child = await scene.sibling()
        await scene.engine.cancel_execution(execution_id=sibling, reason="not wanted")
        children.append(child)
    return children


async def _has_no_group_entry(scene: Scene, child: ExecutionId) -> bool:
    return await scene.rows.of("pending_cancel_group", downstream_id=uuid_of(child)) == []


async def _empty_flows(scene: Scene) -> list[ExecutionId]:
    """Flows past their retention, written like the ids of executions."""
    flows = [await scene.flow() for _ in range(3)]
    await scene.given.clock.advance(ms=DAY)
    return [format_execution_id((await flow.row())["partition_key"], flow.flow_id) for flow in flows]


async def _is_deleted(scene: Scene, flow: ExecutionId) -> bool:
    return await scene.rows.of("flow", flow_id=uuid_of(flow)) == []


CASES = {
    "cascade": Case(sweep="cascade", make=_waiting, is_done=_shows("waiting")),
    "dependency_reconciler": Case(sweep="dependency_reconciler", make=_stuck, is_done=_shows("waiting")),
    "children of one entry": Case(sweep="dependency_reconciler", make=_waiting_together, is_done=_shows("waiting")),
    "edge_cancel_dispatcher": Case(sweep="edge_cancel_dispatcher", make=_siblings, is_done=_shows("cancelled")),
    "groups that cannot be written": Case(
        sweep="edge_cancel_dispatcher",
        make=_finished_groups,
        is_done=_has_no_group_entry,
        table="edge_group",
        key="downstream_id",
    ),
    "edge_cancel_reconciler": Case(
        sweep="edge_cancel_reconciler",
        make=_finished_groups,
        is_done=_has_no_group_entry,
        table="edge_group",
        key="downstream_id",
    ),
    "flow_retention": Case(sweep="flow_retention", make=_empty_flows, is_done=_is_deleted, table="flow", key="flow_id"),
}


async def poison(connection: asyncpg.Connection, case: Case, execution_id: ExecutionId) -> None:
    """Make the store reject every change of a row."""
    await connection.execute(
        """create or replace function refuse() returns trigger language plpgsql as
           $$begin raise check_violation using message = 'poisoned'; end$$"""
    )
    await connection.execute(
        f"create or replace trigger poison before update or delete on {case.table} for each row "
        f"when (old.{case.key} = '{uuid_of(execution_id)}') execute function refuse()"
    )


@pytest.mark.parametrize("bad_at", [0, 2])
@pytest.mark.parametrize("name", CASES)
async def test_what_cannot_be_written_does_not_block_the_others(
    engine: Engine,
    given: Given,
    clock: Clock,
    rows: Rows,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    bad_at: int,
) -> None:
    monkeypatch.setattr(cascade, "SKIPPED_SECONDS", 3600.0)
    parts_of(engine).siblings.quarantine = Quarantine(3600.0)
    # Otherwise a scan of all flows would find again what the watermark has passed.
    monkeypatch.setattr(parts_of(engine).flow_retention.watermark, "_full_scan_seconds", 3600.0)
    scene, case = Scene(engine, given, rows, connection), CASES[name]
    made = await case.make(scene)
    bad = made[bad_at]
    await poison(connection, case, bad)
    reconciler = Reconciler(engine, sweeps=[sweep for sweep in SWEEPS if sweep.name == case.sweep])
    for _ in range(2):
        await clock.advance(ms=MINUTE)
        await reconciler.catch_up()
        assert [await case.is_done(scene, each) for each in made] == [each != bad for each in made]

    # Later ones are not blocked either.
    later = await case.make(scene)
    await clock.advance(ms=MINUTE)
    await reconciler.catch_up()
    assert [await case.is_done(scene, each) for each in later] == [True] * 3
    assert not await case.is_done(scene, bad)

    await connection.execute(f"alter table {case.table} disable trigger poison")
    parts_of(engine).cascade._set_aside.clear()
    for sweep in (parts_of(engine).siblings, parts_of(engine).flow_retention):
        sweep.quarantine._failures.clear()
    await clock.advance(ms=MINUTE)
    await reconciler.catch_up()
    assert await case.is_done(scene, bad)
    assert await engine.find_inconsistencies() == [] or name == "dependency_reconciler"

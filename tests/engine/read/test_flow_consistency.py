"""find_inconsistencies reports what no operation can have written about flows, and nothing else."""

import re
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import asyncpg
import pytest

from engine.flows import flow_of, settle, stop_cascade
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.retention import RECHECK_MS
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read import flow_consistency
from flowfabric.model.ids import ExecutionId, FlowId

Made: TypeAlias = tuple[FlowId, ExecutionId, ExecutionId]
"""A flow, its first member and its last one."""

DAY = 86_400
_DROP_CHECKS = """
alter table edge_group drop constraint edge_group_has_no_more_results_than_edges,
                       drop constraint edge_group_has_no_more_applied_than_staged
"""


class Flows:
    """Flows in the states that are corrupted."""

    def __init__(self, engine: Engine, given: Given) -> None:
        self.engine, self.given = engine, given

    async def make(self, state: str) -> Made:
        """A new flow in a state."""
        made: Callable[[], Awaitable[Made]] = getattr(self, state)
        return await made()

    async def waiting(self) -> Made:
        """An execution that ended, one that waits for a worker, and one that waits for both."""
        first, second, child = [await self.given.created(lane_id="waiting") for _ in range(3)]
        flow_id = await flow_of(self.engine, [first, second, child], [(first, child), (second, child)])
        await self.engine.complete((await self.given.claim(lane_id="waiting")).handle)
        await settle(self.engine, flow_id)
        # Out of the way of the next flow.
        await self.given.claim(lane_id="waiting", lease_ttl_ms=10**7)
        return flow_id, first, child

    async def promoted(self) -> Made:
        """An execution that ended, and one that has waited for it and can be claimed."""
        first = await self.given.created(lane_id="promoted", priority=1)
        child = await self.given.created(lane_id="promoted")
        flow_id = await flow_of(self.engine, [first, child], [(first, child)])
        await self.engine.complete((await self.given.claim(lane_id="promoted")).handle)
        await settle(self.engine, flow_id)
        return flow_id, first, child

    async def running(self) -> Made:
        """An execution that ended, and one that has waited for it and is running."""
        first, child = [await self.given.created(lane_id="running") for _ in range(2)]
        flow_id = await flow_of(self.engine, [first, child], [(first, child)])
        await self.engine.complete((await self.given.claim(lane_id="running")).handle)
        await settle(self.engine, flow_id)
        await self.given.claim(lane_id="running", lease_ttl_ms=10**7)
        return flow_id, first, child

    async def queued(self) -> Made:
        """An execution whose end is queued, and one that waits for it."""
        first, child = [await self.given.created(lane_id="queued") for _ in range(2)]
        flow_id = await flow_of(self.engine, [first, child], [(first, child)])
        await self.engine.complete((await self.given.claim(lane_id="queued")).handle)
        return flow_id, first, child

    async def ended(self) -> Made:
        """Executions that ended, one of them skipped."""
        first, child = [await self.given.created(lane_id="ended") for _ in range(2)]
        flow_id = await flow_of(self.engine, [first, child], [(first, child)])
        await self.engine.cancel_execution(execution_id=first, reason="x")
        await settle(self.engine, flow_id)
        await parts_of(self.engine).flow_summaries.project_due()
        return flow_id, first, child

    async def cancelled(self) -> Made:
        """A cancelled flow that owes two members."""
        members = [await self.given.created(lane_id="cancelled") for _ in range(2)]
        flow_id = await flow_of(self.engine, members)
        await self.engine.cancel_flow_header(flow_id=flow_id, reason="x", cancellation_policy="cancel_all")
        return flow_id, members[0], members[1]


BROKEN: dict[str, list[tuple[str, str]]] = {
    "flow_id: the flow does not exist in the partition of the execution": [
        ("waiting", "update execution set flow_id = gen_random_uuid() where execution_id = {last}"),
        ("waiting", "delete from flow where {mine}"),
    ],
    "eligibility_state: blocked_by_dependencies without a pending group": [
        ("waiting", "update edge_group set group_state = 'satisfied' where {mine}"),
        ("waiting", "delete from edge_group where {mine}"),
    ],
    "lifecycle_phase: not terminal though its group is impossible": [
        (state, "update edge_group set group_state = 'impossible' where {mine}")
        for state in ("waiting", "promoted", "running")
    ],
    "eligibility_state: blocked_by_dependencies though every edge is resolved": [
        ("waiting", "update edge set state = 'satisfied' where {mine}"),
        ("waiting", "delete from edge where {mine}"),
    ],
    "flow: live_count is not the number of its live members and queued ends": [
        ("waiting", "update flow set live_count = live_count + 1 where {mine}"),
        ("ended", "update flow set live_count = -1 where {mine}"),
        ("queued", "delete from cascade_entry where {mine}"),
        ("queued", "update flow set live_count = live_count - 1 where {mine}"),
    ],
    "flow: failed_count is not the number of its failed members": [
        ("ended", "update flow set failed_count = 0 where {mine}"),
        ("ended", "update flow set failed_count = 0, node_count = 9 where {mine}"),
        ("waiting", "update flow set failed_count = 1 where {mine}"),
    ],
    "flow: node_count is lower than the number of its members": [
        ("waiting", "update flow set node_count = node_count - 1 where {mine}"),
    ],
    "flow: edge_count is lower than the number of its edges": [
        ("waiting", "update flow set edge_count = edge_count - 1 where {mine}"),
    ],
    "flow: derived_state contradicts the counts": [
        ("waiting", "update flow set derived_state = 'completed' where {mine}"),
        ("ended", "update flow set derived_state = 'completed' where {mine}"),
        ("ended", "update flow set derived_state = 'open' where {mine}"),
    ],
    "flow: ended_at is missing though its members have ended": [
        ("ended", "update flow set ended_at = null where {mine}"),
    ],
    "flow: its summary is never projected": [
        ("waiting", "update flow set project_at = null where {mine}"),
    ],
    "flow: cancelled_at contradicts public_flow_state": [
        ("waiting", "update flow set cancelled_at = 5 where {mine}"),
        ("cancelled", "update flow set cancelled_at = null where {mine}"),
    ],
    "edge_group: staged_count is not the number of its edges": [
        ("waiting", "update edge_group set staged_count = staged_count + 1 where {mine}"),
        ("waiting", "delete from edge where upstream_id = {first}"),
    ],
    "edge_group: applied_count is not the number of its applied edges": [
        ("waiting", "update edge_group set applied_count = applied_count - 1 where {mine}"),
        ("waiting", "update edge set state = 'staged', applied_at = null where {mine}"),
    ],
    "edge_group: succeeded_count is not the number of its satisfied edges": [
        ("waiting", "update edge_group set succeeded_count = 2 where {mine}"),
        ("waiting", "update edge set state = 'impossible' where upstream_id = {first}"),
    ],
    "edge_group: failed_count and skipped_count are not the number of its impossible edges": [
        ("ended", "update edge_group set failed_count = 0 where {mine}"),
        ("ended", "update edge_group set skipped_count = 1 where {mine}"),
    ],
    "edge_group: k contradicts the policy": [
        ("waiting", "update edge_group set k = 1 where {mine}"),
        ("waiting", "update edge_group set policy = 'quorum' where {mine}"),
    ],
    "edge_group: flagged for its siblings without an entry of pending_cancel_group": [
        ("ended", "update edge_group set cancel_siblings_pending_flag = true where {mine}"),
    ],
    "edge: its group does not exist": [
        ("ended", "delete from edge_group where {mine}"),
    ],
    "edge: unsatisfied though its upstream execution has ended and its end is not queued": [
        ("waiting", "update edge set state = 'unsatisfied' where upstream_id = {first}"),
        ("waiting", "update edge set state = 'unsatisfied', upstream_id = gen_random_uuid() where {mine}"),
        ("queued", "delete from cascade_entry where {mine}"),
        ("queued", "update cascade_entry set execution_ids = array[{last}] where {mine}"),
    ],
    "edge: its flow does not exist": [
        ("ended", "delete from flow where {mine}"),
    ],
    "edge_group: its flow does not exist": [
        ("ended", "delete from flow where {mine}"),
    ],
    "flow_tag: its flow does not exist": [
        ("ended", "insert into flow_tag values (1, gen_random_uuid(), 'a.b', 'x')"),
    ],
    "flow_summary: its flow does not exist": [
        ("ended", "delete from flow where {mine}"),
    ],
    "pending_cancel_group: its group is not flagged": [
        (
            "ended",
            "insert into pending_cancel_group select partition_key, flow_id, {last}, 5 from flow where {mine}",
        ),
        (
            "ended",
            "insert into pending_cancel_group select partition_key, flow_id, {first}, 5 from flow where {mine}",
        ),
    ],
    "cancel_backlog: its flow is not cancelled": [
        (
            "ended",
            "insert into cancel_backlog select partition_key, flow_id, 5, 'x', 'x', 'cancel_all', 5 "
            "from flow where {mine}",
        ),
        ("cancelled", "delete from flow where {mine}"),
    ],
    "cancel_backlog_member: not a member of the flow": [
        ("cancelled", "update cancel_backlog_member set execution_id = gen_random_uuid() where execution_id = {first}"),
    ],
    "cancel_backlog_member: its flow has no entry of cancel_backlog": [
        ("cancelled", "delete from cancel_backlog where {mine}"),
    ],
    "cascade_entry: not a member of the flow": [
        ("queued", "update cascade_entry set execution_ids = execution_ids || gen_random_uuid() where {mine}"),
    ],
}
"""For each problem: the state of a flow, and what is done to the rows that belong to it."""


async def test_every_corrupt_row_of_a_flow_is_found_and_no_sound_one(
    engine: Engine, given: Given, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_cascade(engine)
    flows = Flows(engine, given)
    cases = [(state, command, problem) for problem, all_ in BROKEN.items() for state, command in all_]
    made = [(await flows.make(state), command, problem) for state, command, problem in cases]
    sound = [await flows.make(state) for state in ("waiting", "promoted", "running", "queued", "ended", "cancelled")]
    sound.append((await flow_of(engine), *sound[0][1:]))
    for size in (1, 10_000):
        monkeypatch.setattr(flow_consistency, "RANGE_SIZE", size)
        assert await engine.find_inconsistencies() == []
    await connection.execute(_DROP_CHECKS)
    for (flow_id, first, last), command, _ in made:
        for name, value in (("mine", f"flow_id = '{flow_id}'"), ("first", uuid_of(first)), ("last", uuid_of(last))):
            command = command.replace(f"{{{name}}}", value if name == "mine" else f"'{value}'::uuid")
        await connection.execute(command)
    for size in (1, 10_000):
        monkeypatch.setattr(flow_consistency, "RANGE_SIZE", size)
        found: dict[FlowId | None, list[str]] = {}
        for one in await engine.find_inconsistencies(limit=10_000):
            found.setdefault(one.flow_id, []).append(one.problem)
        everywhere = {problem for problems in found.values() for problem in problems}
        missed = [
            (command, problem, found.get(flow_id))
            for (flow_id, _, _), command, problem in made
            if problem not in found.get(flow_id, ()) and not ("gen_random" in command and problem in everywhere)
        ]
        assert missed == []
        assert [found[flow_id] for flow_id, _, _ in sound if flow_id in found] == []


def test_every_rule_of_flows_is_broken_by_a_test() -> None:
    statements = flow_consistency.SQL
    text = "".join(
        each.sql
        for each in (statements.list_broken_members, statements.list_broken_flows, statements.list_flow_orphans)
    )
    rules = set(re.findall(r"'([a-z_]+: [^']+)'", text))
    assert len(rules) > 20
    assert rules == BROKEN.keys()


async def test_a_flow_without_its_deleted_members_is_sound(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    stop_cascade(engine)
    flows = Flows(engine, given)
    flow_id, _, _ = await flows.ended()
    await flows.ended()
    await clock.advance(seconds=DAY + 1)
    # One by one, so that members of a flow are missing.
    for left in (3, 2, 1, 0):
        assert await engine.trim_retention(batch_size=1) == 1
        assert len(await rows.of("execution")) == left
        assert await engine.find_inconsistencies() == []
    assert await rows.of("flow", flow_id=flow_id)
    await parts_of(engine).flow_retention.trim_batch(rows=1)
    assert await engine.find_inconsistencies() == []
    await clock.advance(ms=RECHECK_MS)
    await parts_of(engine).flow_retention.trim_batch()
    assert await rows.of("edge_group") == await rows.of("edge") == await rows.of("flow") == []
    assert await engine.find_inconsistencies() == []


async def test_a_limit_applies_to_inconsistencies_of_flows(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    flows = [await flow_of(engine) for _ in range(5)]
    await connection.execute("update flow set live_count = 1, cancelled_at = 5")
    found = await engine.find_inconsistencies()
    assert {one.flow_id for one in found} == set(flows)
    assert {one.execution_id for one in found} == {None}
    assert len(found) >= 10
    for limit in (0, 1, 7):
        limited = await engine.find_inconsistencies(limit=limit)
        assert len(limited) == limit
        assert all(one in found for one in limited)

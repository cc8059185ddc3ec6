"""Members of flows that end and are replayed."""

from typing import Any

import asyncpg

from engine.counts import miscounts
from fixtures import Clock, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState

from .graphs import BuiltFlow

BLOCKED = "runnable/unowned/blocked_by_dependencies/waiting_for_children/none/pending_replay_attempt/waiting_children"
SHORT: dict[str, object] = {"stream_policy": {"retention_ttl_ms": 1000}}


async def end(flow: BuiltFlow, execution_id: ExecutionId, outcome: str) -> None:
    """Run a waiting member to its end, and settle it."""
    engine = flow.engine
    if outcome == "cancelled":
        await engine.cancel_execution(execution_id=execution_id, reason="not wanted")
    else:
        row = await engine.read_execution_info(execution_id)
        assert row is not None
        await engine.issue_grant_and_claim(execution_id=execution_id, lane_id=row.lane_id, lease_duration_ms=30_000)
        named: dict[str, Any] = {"execution_id": execution_id, "source": "operator_override"}
        if outcome == "failed":
            await engine.fail_execution(**named, failure_reason="no luck", failure_category="permanent")
        else:
            await engine.complete_execution(**named, payload=b'"done"')
    await flow.settle()


async def states(flow: BuiltFlow) -> tuple[int, int, str]:
    """How many members are live and ended badly, and the derived state."""
    row = await flow.row()
    return row["live_count"], row["failed_count"], row["derived_state"]


async def edges(rows: Rows, child: ExecutionId) -> dict[str, tuple[str, bool]]:
    """The state of each edge to a member, and whether it has a time of its resolution, by upstream."""
    found = await rows.of("edge", downstream_id=uuid_of(child))
    return {str(row["upstream_id"]): (row["state"], row["last_resolved_at"] is not None) for row in found}


async def group(rows: Rows, child: ExecutionId) -> tuple[str, int, int, int]:
    """The state of a member's group, and how many edges succeeded, failed and were skipped."""
    (row,) = await rows.of("edge_group", downstream_id=uuid_of(child))
    assert not row["cancel_siblings_pending_flag"]
    assert (row["cancel_siblings_pending_members"], row["cancel_siblings_reason"]) == (None, None)
    return row["group_state"], row["succeeded_count"], row["failed_count"], row["skipped_count"]


async def state(engine: Engine, execution_id: ExecutionId) -> PublicState | None:
    """The public state of an execution."""
    return await engine.read_execution_state(execution_id)


async def check(engine: Engine, connection: asyncpg.Connection) -> None:
    """Nothing contradicts anything, and the counts are right."""
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []


async def delete(flow: BuiltFlow, clock: Clock) -> None:
    """Delete the ended members with a retention of a second."""
    await clock.advance(seconds=2)
    assert (await parts_of(flow.engine).retention.trim_batch()).done == 1

"""Members of a flow are kept until it is settled, and the flow until its members are deleted."""

import asyncio
from collections.abc import Awaitable
from uuid import uuid4

import asyncpg
import pytest

from engine.flows import connect, flow_of, partition_of, settle, stop_cascade
from engine.state import refused
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution.retention import RECHECK_MS
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.flow import Added

DAY = 86_400
MINUTE = 60
RECHECK = RECHECK_MS / 1000

pytestmark = pytest.mark.usefixtures("consistent_rows")


async def trim(engine: Engine) -> int:
    """Delete the executions past their retention, batch by batch; return how many."""
    trimmed, is_full = 0, True
    while is_full:
        done, is_full, _ = await parts_of(engine).retention.trim_batch()
        trimmed += done
    return trimmed


async def stored(rows: Rows) -> set[str]:
    """The UUIDs of the stored executions."""
    return {str(row["execution_id"]) for row in await rows.of("execution")}


async def test_members_are_kept_while_a_member_of_their_flow_is_live(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    stop_cascade(engine)
    members = [await given.completed(), await given.failed(), await given.cancelled(), await given.created()]
    flow_id = await flow_of(engine, members)
    alone = await given.completed(lane_id="alone")
    await clock.advance(seconds=DAY + 1)
    assert await trim(engine) == 1
    assert await stored(rows) == {uuid_of(each) for each in members}
    assert await engine.read_execution_info(alone) is None
    await engine.cancel_execution(execution_id=members[3], reason="x")
    await clock.advance(seconds=RECHECK + 1)
    # The last end is still queued for the cascade.
    assert await trim(engine) == 0
    await settle(engine, flow_id)
    await clock.advance(seconds=RECHECK + 1)
    assert await trim(engine) == 0
    await clock.advance(seconds=DAY)
    assert await trim(engine) == 4
    assert await stored(rows) == set()


async def test_an_upstream_execution_is_kept_while_its_downstream_execution_waits(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    stop_cascade(engine)
    first, second, child = [await given.created() for _ in range(3)]
    flow_id = await flow_of(engine, [first, second, child], [(first, child), (second, child)])
    await engine.complete((await given.claim()).handle, b"1")
    await clock.advance(seconds=3 * DAY)
    # First because its end is queued, then because its child waits for the other one, then because the skip is queued.
    for step in (None, settle(engine, flow_id), engine.cancel_execution(execution_id=second, reason="x")):
        if step is not None:
            await step
        async with rows.unchanged(without=["retained"]):
            assert await trim(engine) == await engine.trim_retention(retention_ms=0) == 0
    await settle(engine, flow_id)
    assert {row["public_state"] for row in await rows.of("execution")} == {"completed", "cancelled", "skipped"}
    assert await engine.trim_retention(retention_ms=0) == 3


_OWE = "insert into cancel_backlog select partition_key, flow_id, 1, 'x', 'x', 'cancel_all', 1 from flow"


@pytest.mark.parametrize("table", ["cancel_backlog", "pending_cancel_group"])
async def test_members_are_kept_while_their_flow_owes_a_cancellation(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, table: str
) -> None:
    first, second = await given.completed(), await given.cancelled()
    await flow_of(engine, [first, second], [(first, second)])
    owed = {
        "cancel_backlog": _OWE,
        "pending_cancel_group": "insert into pending_cancel_group select partition_key, flow_id, downstream_id, 1 "
        "from edge_group; update edge_group set cancel_siblings_pending_flag = true",
    }
    await connection.execute(owed[table])
    await clock.advance(seconds=DAY + 1)
    assert await trim(engine) == 0
    await connection.execute(
        "delete from cancel_backlog; delete from pending_cancel_group; "
        "update edge_group set cancel_siblings_pending_flag = false"
    )
    assert await trim(engine) == 0
    await clock.advance(seconds=RECHECK + 1)
    assert await trim(engine) == 2


async def test_members_of_a_locked_flow_are_kept(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    await flow_of(engine, [await given.completed()])
    await clock.advance(seconds=DAY + 1)
    async with connection.transaction():
        await connection.execute("select from flow for update")
        assert await trim(engine) == 0
    await clock.advance(seconds=RECHECK + 1)
    assert await trim(engine) == 1


async def test_held_members_do_not_delay_others(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    retention = parts_of(engine).retention
    held = [await given.completed() for _ in range(6)]
    live = await given.created()
    flow_id = await flow_of(engine, [*held, live])
    alone = [await given.completed(lane_id="alone") for _ in range(2)]
    await clock.advance(seconds=DAY + 1)
    # A batch of held members is full: the next one follows at once.
    assert [(await retention.trim_batch(limit=3))[:2] for _ in range(4)] == [
        (0, True),
        (0, True),
        (2, False),
        (0, False),
    ]
    assert await stored(rows) == {uuid_of(each) for each in (*held, live)}
    async with rows.unchanged():
        assert await trim(engine) == 0
    kept = await rows.of("retained")
    assert {row["retain_until"] for row in kept} == {await clock.now() + RECHECK_MS}
    assert sum(len(row["execution_ids"]) for row in kept) == len(held)
    await clock.advance(seconds=RECHECK + 1)
    assert await trim(engine) == 0
    assert await engine.count_executions(by="state", public_state="completed") == await engine.count_executions(
        by="state", public_state="completed", flow_id=flow_id
    )
    assert alone


async def test_an_entry_of_several_flows_and_queues_is_split(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    for kind in ("a", "b", "a", "b", "a", "b"):
        await given.created(execution_kind=kind)
    runs = await engine.claim_many(lanes=["default"], worker_id="w", worker_instance_id="w-1", limit=6)
    await engine.complete_many([(run.handle, b"1") for run in runs])
    ended = [run.execution_id for run in runs]
    assert [len(row["execution_ids"]) for row in await rows.of("retained")] == [6]
    flows = [await flow_of(engine, [*ended[:2], await given.created()])]
    flows.append(await flow_of(engine, ended[2:4]))
    await clock.advance(seconds=DAY + 1)
    assert await trim(engine) == 4
    (entry,) = await rows.of("retained")
    assert {str(each) for each in entry["execution_ids"]} == {uuid_of(each) for each in ended[:2]}
    assert len(entry["queue_nos"]) == 2
    counts = await engine.count_executions(by="kind", public_state="completed")
    assert [(one.execution_kind, one.count) for one in counts] == [("a", 1), ("b", 1)]


async def test_a_held_member_can_be_replayed(engine: Engine, given: Given, clock: Clock, rows: Rows) -> None:
    ended = [await given.completed(), await given.failed()]
    live = await given.created()
    flow_id = await flow_of(engine, [*ended, live])
    await clock.advance(seconds=DAY + 1)
    assert await trim(engine) == 0
    await engine.replay_execution(execution_id=ended[0])
    assert [len(row["execution_ids"]) for row in await rows.of("retained")] == [1]
    for member in (live, ended[0]):
        await engine.cancel_execution(execution_id=member, reason="x")
    await settle(engine, flow_id)
    await clock.advance(seconds=RECHECK + 1)
    assert await trim(engine) == 0
    await clock.advance(seconds=DAY)
    assert await trim(engine) == 3


async def test_a_replay_and_a_trim_of_one_member_leave_it_deleted_or_live(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    for nth in range(10):
        member, other = await given.completed(), await given.completed()
        flow_id = await flow_of(engine, [member, other])
        await clock.advance(seconds=DAY + 1)
        steps = [trim(engine), _code(engine.replay_execution(execution_id=member))]
        found = await asyncio.gather(*(steps if nth % 2 else reversed(steps)))
        code = next(each for each in found if isinstance(each, str))
        state = await engine.read_execution_state(member)
        assert (code, state) in {("done", "waiting"), ("execution_not_found", None)}
        if code == "done":
            await engine.cancel_execution(execution_id=member, reason="x")
            await settle(engine, flow_id)
        await clock.advance(seconds=DAY + RECHECK + 1)
        # A row that the replay had locked during the first trim is found by the next full scan.
        parts_of(engine).store.retained_watermark.move_to(0)
        await trim(engine)
        assert await rows.of("execution") == await rows.of("retained") == []


async def sweep(engine: Engine, **limits: int) -> int:
    """Delete flows, batch by batch; return how many batches deleted something or were full."""
    deleted, is_full = 0, True
    while is_full:
        done, is_full, _ = await parts_of(engine).flow_retention.trim_batch(**limits)
        deleted += done
    return deleted


FLOW_TABLES = ("flow", "flow_tag", "flow_summary", "edge", "edge_group")


async def flows_in(rows: Rows) -> dict[str, int]:
    """How many rows of each table about flows are stored."""
    return {table: len(await rows.of(table)) for table in FLOW_TABLES}


_DESCRIBE = """
insert into flow_tag select partition_key, flow_id, 'a.b', 'x' from flow;
insert into flow_summary select partition_key, flow_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 'open', 0 from flow
"""


async def test_a_flow_is_deleted_with_everything_of_it_after_its_members(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    first, second, third = [await given.completed() for _ in range(3)]
    flow_id = await flow_of(engine, [first, second, third], [(first, second), (first, third)])
    await settle(engine, flow_id)
    await connection.execute(_DESCRIBE)
    assert await sweep(engine) == 0
    await clock.advance(seconds=DAY + 1)
    # Its members are still stored.
    assert await sweep(engine) == 0
    assert await trim(engine) == 3
    assert await sweep(engine) == 0
    assert await flows_in(rows) == {"flow": 1, "flow_tag": 1, "flow_summary": 1, "edge": 2, "edge_group": 2}
    await clock.advance(seconds=RECHECK + 1)
    assert await sweep(engine) == 1
    assert set((await flows_in(rows)).values()) == {0}


async def test_a_flow_whose_members_are_still_stored_is_looked_at_after_a_minute_and_then_less_often(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    await clock.stop()
    flow_id = await flow_of(engine, [await given.completed()])
    await settle(engine, flow_id)
    (row,) = await rows.of("flow")
    assert row["retain_until"] == row["created_at"] + DAY * 1000
    await clock.advance(seconds=DAY)
    waits = []
    for _ in range(7):
        assert await sweep(engine) == 0
        (row,) = await rows.of("flow")
        waits.append((row["retain_until"] - await clock.now()) / 1000 / MINUTE)
        await clock.advance(ms=row["retain_until"] - await clock.now())
    assert waits == [1, 1, 2, 4, 8, 15, 15]
    assert await trim(engine) == 1
    assert await sweep(engine) == 1


async def test_a_flow_that_changed_within_the_retention_is_kept(
    engine: Engine, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    early, late = [await flow_of(engine) for _ in range(2)]
    await clock.advance(seconds=DAY - 1)
    await sweep(engine)
    await connection.execute("update flow set last_mutation_at = ff_now() where flow_id = $1", late)
    await clock.advance(seconds=2)
    assert await sweep(engine) == 1
    assert {row["flow_id"] for row in await rows.of("flow")} == {late}
    assert early != late
    await clock.advance(seconds=DAY - 3)
    assert await sweep(engine) == 0
    await clock.advance(seconds=3 + MINUTE)
    assert await sweep(engine) == 1


@pytest.mark.parametrize("owed", ["cancel_backlog", "pending_cancel_group", "queued end", "live member"])
async def test_a_flow_that_owes_something_is_kept(
    engine: Engine, clock: Clock, rows: Rows, connection: asyncpg.Connection, owed: str
) -> None:
    await flow_of(engine)
    owes = {
        "cancel_backlog": _OWE,
        "pending_cancel_group": "insert into pending_cancel_group select partition_key, flow_id, flow_id, 1 from flow",
        "queued end": "insert into cascade_entry select 1, partition_key, flow_id, 1, 1, '{}' from flow",
        "live member": "update flow set live_count = 1",
    }
    await connection.execute(owes[owed])
    await clock.advance(seconds=DAY + 1)
    assert await sweep(engine) == 0
    async with rows.unchanged():
        assert await sweep(engine) == 0
    await connection.execute(
        "delete from cancel_backlog; delete from pending_cancel_group; delete from cascade_entry; "
        "update flow set live_count = 0"
    )
    await clock.advance(seconds=RECHECK + 1)
    assert await sweep(engine) == 1


async def test_the_edges_of_a_flow_are_deleted_in_steps(
    engine: Engine, given: Given, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    members = [await given.completed() for _ in range(6)]
    edges = [(upstream, downstream) for at, upstream in enumerate(members) for downstream in members[at + 1 :]]
    await settle(engine, await flow_of(engine, members, edges))
    await flow_of(engine)
    await clock.advance(seconds=DAY + 1)
    assert await trim(engine) == 6
    left = []
    batch = parts_of(engine).flow_retention.trim_batch
    while (await batch(rows=4)).is_full:
        left.append(tuple((await flows_in(rows)).values()))
    assert left == [(2, 0, 0, 11, 1), (2, 0, 0, 7, 0), (2, 0, 0, 3, 0)]
    assert set((await flows_in(rows)).values()) == {0}


async def test_a_locked_flow_is_left_for_later(
    engine: Engine, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    locked = await flow_of(engine)
    await flow_of(engine)
    await clock.advance(seconds=DAY + 1)
    async with connection.transaction():
        await connection.execute("select from flow where flow_id = $1 for update", locked)
        assert await sweep(engine) == 1
    assert {row["flow_id"] for row in await rows.of("flow")} == {locked}
    # It is found by the next full scan.
    parts_of(engine).flow_retention.watermark.move_to(0)
    assert await sweep(engine) == 1


async def test_kept_flows_do_not_delay_others(
    engine: Engine, clock: Clock, rows: Rows, connection: asyncpg.Connection
) -> None:
    live = [await flow_of(engine) for _ in range(5)]
    await connection.execute("update flow set live_count = 1")
    spent = await flow_of(engine)
    await clock.advance(seconds=DAY + 1)
    assert await sweep(engine, limit=2) == 1
    assert {row["flow_id"] for row in await rows.of("flow")} == set(live)
    assert spent not in live
    await connection.execute("update flow set live_count = 0")


async def test_a_new_execution_with_the_id_of_a_deleted_member_does_not_inherit_its_edges(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    first, second, third = [await given.created() for _ in range(3)]
    flow_id = await flow_of(engine, [first, second, third], [(first, second)])
    for _ in range(3):
        await engine.complete((await given.claim()).handle)
        await settle(engine, flow_id)
    assert await engine.trim_retention(retention_ms=0) == 3
    edges = await rows.of("edge")
    for nth, execution_id in enumerate((first, second, third)):
        assert await given.completed(execution_id=execution_id) == execution_id
        if nth < 2:
            async with rows.unchanged():
                await refused(engine.add_execution_to_flow(flow_id, execution_id), "execution_already_in_flow", "id")
    # Without edges there is nothing to inherit, and edges of another flow do not matter.
    assert isinstance(await engine.add_execution_to_flow(flow_id, third), Added)
    other = await flow_of(engine, [first, second])
    await connect(engine, other, second, first)
    assert await rows.of("edge", flow_id=flow_id) == edges
    await clock.advance(seconds=DAY + 1)
    assert await trim(engine) == 3
    await clock.advance(seconds=RECHECK + 1)
    assert await sweep(engine) == 2
    again = await given.completed(execution_id=first)
    await engine.create_flow(flow_id, flow_kind="dag", namespace="tests")
    assert isinstance(await engine.add_execution_to_flow(flow_id, again), Added)


async def test_a_flow_that_changes_while_it_is_trimmed_is_kept_or_refuses_the_change(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    outcomes = set()
    for nth in range(10):
        flow_id = await flow_of(engine)
        await clock.advance(seconds=DAY + 1)
        execution_id = await given.created(execution_id=f"{{fp:{partition_of(engine, flow_id)}}}:{uuid4()}")
        await asyncio.gather(
            *([sweep(engine)] if nth % 2 else []),
            added := asyncio.ensure_future(_code(engine.add_execution_to_flow(flow_id, execution_id))),
            *([] if nth % 2 else [sweep(engine)]),
        )
        outcomes.add(added.result())
        is_kept = await rows.of("flow", flow_id=flow_id) != []
        assert is_kept == (added.result() == "done")
        await engine.cancel_execution(execution_id=execution_id, reason="x")
        if is_kept:
            await settle(engine, flow_id)
    assert outcomes <= {"done", "flow_not_found"}


async def _code(call: Awaitable[object]) -> str:
    try:
        await call
    except EngineError as refusal:
        return refusal.code
    return "done"

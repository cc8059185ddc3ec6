"""The checker finds rows that belong to no execution."""

from typing import Any

import asyncpg

from engine.grants import grant
from engine.waits import args
from flowfabric.engine.engine import Engine


async def test_entries_that_count_wrongly_are_found(engine: Engine, given: Any, connection: asyncpg.Connection) -> None:
    one, two = [await given.claimed(execution_kind=kind) for kind in ("k1", "k2")]
    await engine.complete_many([(one, b"x"), (two, b"x")])
    assert await engine.find_inconsistencies() == []
    await connection.execute("update retained set queue_nos = array[queue_nos[2], queue_nos[1]]")
    problem = "retained: the entry of its ending is of another queue or outcome"
    assert {(each.execution_id, each.problem) for each in await engine.find_inconsistencies()} == {
        (one.execution_id, problem),
        (two.execution_id, problem),
    }
    # What an older version writes says nothing of queues.
    await connection.execute("update retained set queue_nos = null")
    assert await engine.find_inconsistencies() == []


async def test_orphans_are_found(engine: Engine, given: Any, clock: Any, connection: asyncpg.Connection) -> None:
    waiting = await given.created(tags={"a.b": "1"}, execution_deadline_at=await clock.now() + 60_000)
    large = await given.created(input_payload=b"x" * 300)
    failed = await given.failed(lane_id="other")
    completed = await given.completed(lane_id="completed", result=b"x" * 300)
    await grant(engine, await given.created())
    handle = await given.claimed(lane_id="suspended")
    await engine.suspend(handle, args(idempotency_key="key", timeout_at=await clock.now() + 60_000))
    retried = await given.backing_off(lane_id="backing_off")
    assert await engine.find_inconsistencies() == []
    await connection.execute("delete from execution")
    found = [(one.execution_id, one.problem.partition(":")[0]) for one in await engine.find_inconsistencies()]
    assert {problem for _, problem in found} == {
        "attempt",
        "claim_grant",
        "execution_input",
        "execution_result",
        "execution_tag",
        "idempotency_key",
        "listed",
        "ready",
        "retained",
        "suspension",
        "timer",
        "waitpoint",
    }
    assert {(waiting, "ready"), (waiting, "timer"), (waiting, "execution_tag")} <= set(found)
    assert {(large, "execution_input"), (completed, "execution_result")} <= set(found)
    assert {(failed, "listed"), (failed, "retained")} <= set(found)
    assert {(handle.execution_id, "suspension"), (handle.execution_id, "idempotency_key")} <= set(found)
    assert {(retried.execution_id, "attempt"), (retried.execution_id, "timer")} <= set(found)

"""Cancelling many executions at once: each gets its own verdict, and none delays the others."""

import asyncio
import contextlib
import time
from uuid import uuid4

import asyncpg
import pytest

from engine.state import (
    CANCELLED,
    CANCELLED_BEFORE_FIRST_ATTEMPT,
    attempts,
    claim,
    event_texts,
    made,
    new,
    rounds,
    vector,
)
from engine.waits import suspend_args
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.engine.core.wakeups import LostLease, LostReason
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import cancel_many
from flowfabric.engine.execution.cancel_many import CancelDisposition, CancelMany, CancelResult
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId, format_execution_id
from flowfabric.model.stream import Frame

pytestmark = pytest.mark.usefixtures("consistent_rows")

DONE, TERMINAL, ABSENT = CancelDisposition.CANCELLED, CancelDisposition.ALREADY_TERMINAL, CancelDisposition.NOT_FOUND


@pytest.fixture
def cancels(engine: Engine) -> CancelMany:
    """Cancels many executions."""
    return parts_of(engine).cancel_many


def codes(results: list[CancelResult]) -> list[str]:
    """The dispositions, and the codes of the errors."""
    return [result.code if isinstance(result, EngineError) else result.value for result in results]


async def test_each_gets_its_verdict_in_the_order_given(
    cancels: CancelMany, engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waiting = await given.created()
    delayed = await given.delayed(lane_id="other")
    held = await given.claimed(lane_id="active")
    await engine.append_frame(held, Frame(bytes=b"x"))
    lost = await given.reclaimable(lane_id="lost")
    suspended = await given.claimed(lane_id="active")
    await engine.suspend(suspended, suspend_args())
    completed = await given.completed(lane_id="active")
    cancelled = await given.cancelled(lane_id="other")
    absent = format_execution_id(3, uuid4())
    granted = await given.created(lane_id="granted")
    await engine.issue_claim_grant(
        execution_id=granted, lane_id="granted", worker_id="worker", worker_instance_id="worker-1"
    )
    told: list[LostLease] = []
    remove = parts_of(engine).wakeups.on_lost(lambda leases: told.extend(leases or ()))
    now = await clock.advance(ms=5)
    live = [waiting, delayed, held.execution_id, lost.execution_id, suspended.execution_id, granted]
    given_ids = [absent, *live, completed, cancelled, waiting]
    results = await cancels.cancel(given_ids, reason="sibling_quorum_satisfied")
    remove()
    assert results == [ABSENT, *[DONE] * 6, TERMINAL, TERMINAL, DONE]
    for execution_id in live:
        row = await rows.execution(execution_id)
        had_attempt = execution_id in (held.execution_id, lost.execution_id, suspended.execution_id)
        assert vector(row) == (CANCELLED if had_attempt else CANCELLED_BEFORE_FIRST_ATTEMPT)
        assert (row["cancellation_reason"], row["cancelled_by"]) == ("sibling_quorum_satisfied", "operator_override")
        assert row["completed_at"] == now
        assert (await event_texts(rows, execution_id))[-1].endswith("cancelled>cancelled")
        assert await rows.timers(execution_id) == {}
    (attempt,) = await attempts(rows, held.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"]) == (
        "ended_cancelled",
        "cancelled: sibling_quorum_satisfied",
    )
    (stream,) = await rows.of("stream")
    assert stream["closed_reason"] == "attempt_cancelled"
    (waitpoint,) = await rows.of("waitpoint")
    assert (waitpoint["state"], waitpoint["close_reason"]) == ("closed", "cancelled")
    assert await rows.of("claim_grant") == []
    # The holders of leases, lost or not, are told.
    assert sorted(told) == sorted(
        LostLease(handle.execution_id, handle.lease_epoch, LostReason.CANCELLED) for handle in (held, lost)
    )
    async with rows.unchanged():
        assert await cancels.cancel(live, reason="another") == [TERMINAL] * 6
        assert await cancels.cancel([], reason="another") == []


async def test_locked_rows_delay_no_other_and_are_tried_again(
    cancels: CancelMany, engine: Engine, given: Given, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_many, "BATCH", 4)
    execution_ids = [ExecutionId(each) for each in await made(engine, *[new() for _ in range(10)])]
    locked = execution_ids[::3]
    async with connection.transaction():
        await connection.execute(
            "select from execution where execution_id = any($1::uuid[]) for update", [uuid_of(each) for each in locked]
        )
        began = time.monotonic()
        results = await cancels.cancel(execution_ids, reason="x", patience_seconds=0.1)
        assert time.monotonic() - began < 2
        assert codes(results) == ["retry_exhausted" if each in locked else "cancelled" for each in execution_ids]
        waiting = asyncio.create_task(cancels.cancel(locked, reason="x"))
        while not parts_of(engine).store.database._used:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert await waiting == [DONE] * len(locked)


async def test_a_locked_row_is_tried_again_however_long_the_others_take(
    cancels: CancelMany, engine: Engine, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    locked, slow = [ExecutionId(each) for each in await made(engine, new(), new())]
    await connection.execute(
        "create function wait() returns trigger language plpgsql as $$begin perform pg_sleep(1); return new; end$$"
    )
    await connection.execute(
        "create trigger wait before update on execution for each row "
        f"when (old.execution_id = '{uuid_of(slow)}') execute function wait()"
    )

    async def is_cancelled() -> bool:
        return await engine.read_execution_state(slow) == "cancelled"

    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(locked))
        call = asyncio.create_task(cancels.cancel([locked, slow], reason="x", patience_seconds=0.9))
        await eventually(is_cancelled)
    assert await call == [DONE, DONE]


async def test_an_item_that_makes_its_batch_fail_does_not_fail_the_others(
    cancels: CancelMany, engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed(lane_id="suspended")
    await engine.suspend(handle, suspend_args())
    others = [ExecutionId(each) for each in await made(engine, *[new() for _ in range(20)])]
    async with connection.transaction():
        await connection.execute("select from suspension for update")
        results = await cancels.cancel([handle.execution_id, *others], reason="x", patience_seconds=0)
        assert codes(results) == ["retry_exhausted", *["cancelled"] * 20]
    assert await cancels.cancel([handle.execution_id], reason="x") == [DONE]


@pytest.mark.usefixtures("altered_rows")
async def test_a_row_that_the_store_refuses_gets_its_error_and_the_others_are_cancelled(
    cancels: CancelMany, engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    bad, *others = [ExecutionId(each) for each in await made(engine, *[new() for _ in range(6)])]
    # No operation leaves a timer and a retention that overflow.
    await connection.execute(
        "update execution set retention_ms = 9223372036854775807 where execution_id = $1", uuid_of(bad)
    )
    results = await cancels.cancel([*others, bad], reason="x")
    assert codes(results) == [*["cancelled"] * 5, "other"]
    await connection.execute("update execution set retention_ms = null where execution_id = $1", uuid_of(bad))


async def test_concurrent_cancels_of_the_same_executions_end_each_once(
    engine: Engine, engines: Engines, rows: Rows
) -> None:
    other = await engines()
    for _ in rounds(3, whole=20):
        execution_ids = [ExecutionId(each) for each in await made(engine, *[new() for _ in range(600)])]
        held = await claim(engine, limit=100)

        async def complete(held: list[object] = held) -> None:
            for run in held:
                with contextlib.suppress(EngineError):
                    await engine.complete(run.handle, b"done")  # type: ignore[attr-defined]

        first, second, _ = await asyncio.gather(
            parts_of(engine).cancel_many.cancel(execution_ids, reason="first"),
            parts_of(other).cancel_many.cancel(execution_ids[::-1], reason="second"),
            complete(),
        )
        both = list(zip(first, second[::-1], strict=True))
        assert set(both) <= {(DONE, TERMINAL), (TERMINAL, DONE), (TERMINAL, TERMINAL)}, set(both)
        ended = [row["public_state"] for row in await rows.of("execution")]
        assert set(ended) <= {"cancelled", "completed"}
        ends = [event for event in await rows.of("event_each") if event["outcome"] is not None]
        assert len(ends) == len({event["execution_id"] for event in ends}) == len(ended)


async def test_a_thousand_executions_are_cancelled_in_seconds(cancels: CancelMany, engine: Engine) -> None:
    execution_ids = [ExecutionId(each) for each in await made(engine, *[new() for _ in range(1000)])]
    began = time.monotonic()
    assert set(await cancels.cancel(execution_ids, reason="x")) == {DONE}
    # Half a second on an idle machine.
    assert time.monotonic() - began < 5

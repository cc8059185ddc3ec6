"""The status of an execution for its submitter, read in one statement."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from engine.state import claim, refused
from engine.waits import suspend_run
from fixtures import Clock, Given
from flowfabric.db.database import Database
from flowfabric.db.statements import Statement
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import Failure, FailureReason
from flowfabric.model.execution import ExecutionStatus
from flowfabric.model.states import PublicState

RETRIED = {"retry_policy": {"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 1000}}}
RAISED = FailureReason("Declined: no", detail="declined", error_type="app.Declined", traceback="Traceback\n")
FAILURE = Failure(message="Declined: no", category="declined", error_type="app.Declined", traceback="Traceback\n")


async def status(engine: Engine, execution_id: str) -> ExecutionStatus:
    """The status of an existing execution."""
    found = await engine.read_execution_status(execution_id)
    assert found is not None
    return found


async def test_the_status_of_a_new_execution(engine: Engine, given: Given, clock: Clock) -> None:
    execution_id = await given.created(execution_kind="resize", namespace="tenant", lane_id="lane")
    assert await engine.read_execution_status(execution_id.upper().replace("{FP", "{fp")) == ExecutionStatus(
        execution_id=execution_id,
        execution_kind="resize",
        lane_id="lane",  # type: ignore[arg-type]
        namespace="tenant",  # type: ignore[arg-type]
        public_state=PublicState.WAITING,
        attempt_index=0,
        attempt_count=0,
        progress_percent=None,
        progress_message=None,
        result=None,
        result_encoding=None,
        failure=None,
        cancellation_reason=None,
        retry_at=None,
        delay_until=None,
        created_at=await clock.now(),
        started_at=None,
        ended_at=None,
    )


async def test_the_status_follows_an_execution_through_its_attempts(engine: Engine, given: Given, clock: Clock) -> None:
    execution_id = await given.created(policy=RETRIED)
    new = await status(engine, execution_id)
    started_at = await clock.advance(seconds=1)
    first = await given.claim()
    running = replace(new, public_state=PublicState.ACTIVE, attempt_count=1, started_at=started_at)
    assert await status(engine, execution_id) == running
    await engine.progress(first.handle, percent=40, message="half")
    running = replace(running, progress_percent=40, progress_message="half")
    assert await status(engine, execution_id) == running
    await engine.fail(first.handle, reason=RAISED)
    backing_off = replace(
        running,
        public_state=PublicState.DELAYED,
        failure=FAILURE,
        retry_at=started_at + 1000,
        delay_until=started_at + 1000,
    )
    assert await status(engine, execution_id) == backing_off
    await clock.advance(seconds=1)
    await engine.promote_delayed(execution_id)
    waiting = replace(backing_off, public_state=PublicState.WAITING, retry_at=None, delay_until=None)
    assert await status(engine, execution_id) == waiting
    second = await given.claim()
    # The failure is that of the previous attempt; its progress is gone.
    retrying = replace(
        waiting,
        public_state=PublicState.ACTIVE,
        attempt_index=1,
        attempt_count=2,
        progress_percent=None,
        progress_message=None,
    )
    assert await status(engine, execution_id) == retrying
    ended_at = await clock.advance(seconds=1)
    await engine.complete(second.handle, b"done")
    assert await status(engine, execution_id) == replace(
        retrying, public_state=PublicState.COMPLETED, result=b"done", failure=None, ended_at=ended_at
    )


async def test_a_failed_execution_shows_its_last_failure(engine: Engine, given: Given, clock: Clock) -> None:
    execution_id = (await given.claimed(policy=RETRIED)).execution_id
    (run,) = await engine.list_attempts(execution_id)
    assert run.error_type is None
    handle = await given.claimed(policy=RETRIED)
    await engine.fail(handle, reason=FailureReason("busy", error_type="Busy", traceback="Busy\n"))
    await clock.advance(seconds=1)
    (again,) = await claim(engine)
    await engine.fail(again.handle, reason=RAISED, classification="permanent")
    await clock.advance(seconds=1)
    (last,) = await claim(engine)
    await engine.fail(last.handle, reason=replace(RAISED, message="for good", detail="permanent"))
    found = await status(engine, handle.execution_id)
    assert (found.public_state, found.attempt_index, found.result) == (PublicState.FAILED, 2, None)
    assert found.failure == replace(FAILURE, message="for good", category="permanent")


async def test_a_failure_given_as_text_has_no_exception(engine: Engine, given: Given) -> None:
    for handle in (await given.claimed(), await given.claimed(policy=RETRIED)):
        await engine.fail(handle, reason="")
        failure = (await status(engine, handle.execution_id)).failure
        assert failure == Failure(message="", category="transient", error_type=None, traceback=None)


async def test_a_cancelled_execution_shows_the_reason_and_its_earlier_failure(engine: Engine, given: Given) -> None:
    found = await status(engine, await given.cancelled())
    assert (found.public_state, found.cancellation_reason) == (PublicState.CANCELLED, "not wanted")
    assert (found.failure, found.retry_at, found.delay_until) == (None, None, None)
    handle = await given.claimed(policy=RETRIED)
    await engine.fail(handle, reason=RAISED)
    await engine.cancel_execution(execution_id=handle.execution_id, reason="enough")
    found = await status(engine, handle.execution_id)
    assert (found.public_state, found.cancellation_reason, found.failure) == (PublicState.CANCELLED, "enough", FAILURE)
    assert (found.retry_at, found.delay_until) == (None, None)


async def test_an_execution_past_its_deadline_shows_that_and_not_an_earlier_exception(
    engine: Engine, given: Given, clock: Clock
) -> None:
    deadline = await clock.now() + 60_000
    untried = await given.created(lane_id="untried", execution_deadline_at=deadline)
    handle = await given.claimed(policy=RETRIED, execution_deadline_at=deadline)
    await engine.fail(handle, reason=RAISED)
    await clock.advance(seconds=60)
    await parts_of(engine).timeouts.expire_due()
    for execution_id in (untried, handle.execution_id):
        found = await status(engine, execution_id)
        assert found.public_state is PublicState.EXPIRED
        assert found.failure == Failure(
            message="execution_deadline", category="timeout", error_type=None, traceback=None
        )


async def test_an_execution_past_its_reclaim_limit_shows_that(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(policy={**RETRIED, "max_reclaim_count": 0})
    await engine.fail(handle, reason=RAISED)
    await clock.advance(seconds=1)
    await given.claim(lease_ttl_ms=1000)
    lost = await clock.advance(seconds=1)
    assert lost
    assert await claim(engine) == []
    found = await status(engine, handle.execution_id)
    assert found.public_state is PublicState.FAILED
    assert found.failure == Failure(message="max_reclaims_exceeded", category=None, error_type=None, traceback=None)


async def test_a_reclaimed_retry_shows_the_failure_before_it(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(policy=RETRIED)
    await engine.fail(handle, reason=RAISED)
    await clock.advance(seconds=1)
    for _ in range(3):
        await given.claim(lease_ttl_ms=1000)
        await clock.advance(seconds=2)
    found = await status(engine, handle.execution_id)
    assert (found.public_state, found.attempt_count, found.failure) == (PublicState.ACTIVE, 4, FAILURE)


async def test_a_delay_is_not_a_retry(engine: Engine, given: Given, clock: Clock) -> None:
    delayed = await status(engine, await given.delayed(seconds=5))
    assert (delayed.public_state, delayed.retry_at) == (PublicState.DELAYED, None)
    assert delayed.delay_until == await clock.now() + 5000
    handle = await given.claimed(lane_id="put off")
    await engine.progress(handle, percent=7)
    await engine.delay(handle, await clock.now() + 9000)
    put_off = await status(engine, handle.execution_id)
    assert (put_off.public_state, put_off.retry_at) == (PublicState.DELAYED, None)
    assert (put_off.delay_until, put_off.progress_percent) == (await clock.now() + 9000, 7)


async def test_a_suspended_execution_has_a_status(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await suspend_run(engine, handle)
    found = await status(engine, handle.execution_id)
    assert (found.public_state, found.attempt_count, found.failure) == (PublicState.SUSPENDED, 1, None)


async def test_a_result_of_any_size_is_part_of_the_status(engine: Engine, given: Given) -> None:
    for size in (0, 1, INLINE_PAYLOAD_BYTES, INLINE_PAYLOAD_BYTES + 1, 100_000):
        run = await given.run()
        await engine.complete_execution(
            execution_id=run.execution_id, payload=b"x" * size, result_encoding="text", source="operator_override"
        )
        found = await status(engine, run.execution_id)
        assert (found.result, found.result_encoding) == (b"x" * size, "text")


async def test_a_status_is_one_statement(engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [await given.completed(), await given.failed(), (await given.backing_off()).execution_id]
    sent: Counter[str] = Counter()
    fetch = Database.fetch

    async def counted(database: Database, statement: Statement, values: Mapping[str, object], **options: Any) -> Any:
        sent[statement.name] += 1
        return await fetch(database, statement, values, **options)

    monkeypatch.setattr(Database, "fetch", counted)
    for run in runs:
        sent.clear()
        await status(engine, run)
        assert sent == {"read_status": 1}


@pytest.mark.usefixtures("altered_rows")
async def test_an_unknown_namespace_is_corruption(engine: Engine, given: Given, connection: asyncpg.Connection) -> None:
    execution_id = await given.created()
    await connection.execute("update execution set namespace_no = 99")
    await refused(engine.read_execution_status(execution_id), "corruption", "namespace: is missing")

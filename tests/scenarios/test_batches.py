"""One bad item of a batch under leases never fails the others: every good one is done and answered."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from creates import new
from engine.state import all_cases
from fixtures import Clock, Engines, Eventually, Rows, uuid_of
from flowfabric.db import session as sessions
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Backend, Handle
from flowfabric.model.lease import Completed, Renewed, RetryScheduled, TerminalFailed
from flowfabric.model.states import HandleKind

from .batches import GOOD, LOCKED_TEXT, MIDDLE, Batched, code, gathered, locked

RETRIED = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 1000}}}


async def claimed(engine: Engine, count: int, *, lane_id: str = "default", **overrides: Any) -> list[Handle]:
    """The handles of new executions; the one in the middle was claimed alone, the others together."""
    await engine.create_many([new(lane_id=lane_id, **overrides) for _ in range(count)])
    found: list[Handle] = []
    for limit in (MIDDLE, 1, count):
        claims = await engine.claim_many(
            lanes=(lane_id,), worker_id="worker-1", worker_instance_id="worker-1", limit=limit
        )
        found += [one.handle for one in claims]
    assert len(found) == count
    return found


def altered(handle: Handle, **changes: Any) -> Handle:
    """A copy of a handle with some fields changed."""
    return msgspec.structs.replace(handle, **changes)


async def renew_each(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Renew by single calls that share statements."""
    return await gathered([engine.renew(handle) for handle in handles])


async def complete_each(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Complete by single calls that share statements; a success is answered with "completed"."""
    answers = await gathered([engine.complete(handle, handle.execution_id.encode()) for handle in handles])
    return ["completed" if answer is None else answer for answer in answers]


async def fail_each(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Fail by single calls that share statements."""
    return await gathered([engine.fail(handle, reason="no luck") for handle in handles])


async def renew_many(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Renew by the batch form."""
    return list(await engine.renew_many(handles))


async def complete_many(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Complete by the batch form; a success is answered with "completed"."""
    answers = await engine.complete_many([(handle, handle.execution_id.encode()) for handle in handles])
    named = [
        getattr(answer, "execution_id", handle.execution_id) for answer, handle in zip(answers, handles, strict=True)
    ]
    assert named == [handle.execution_id for handle in handles]
    return ["completed" if isinstance(answer, Completed) else answer for answer in answers]


UNDER_LEASE: dict[str, Batched] = {
    "renew each": renew_each,
    "renew many": renew_many,
    "complete each": complete_each,
    "complete many": complete_many,
    "fail each": fail_each,
}
"""The operations of a worker under its lease, by single calls and in the batch form."""
EACH = ("renew each", "complete each", "fail each")
MANY = ("renew many", "complete many")


def is_good(operation: str, answer: object) -> bool:
    """Whether this is the answer of the operation on success."""
    if operation.startswith("complete"):
        return answer == "completed"
    return isinstance(answer, Renewed if operation.startswith("renew") else TerminalFailed)


def lane_of(operation: str) -> str:
    """A lane for the executions of one case."""
    return operation.replace(" ", "-")


async def test_invalid_handles_are_refused_and_the_others_succeed(engine: Engine, rows: Rows, clock: Clock) -> None:
    with all_cases() as case:
        for operation, call in UNDER_LEASE.items():
            with case(operation):
                handles = await claimed(engine, GOOD + 3, lane_id=lane_of(operation))
                expired, other, third = handles[GOOD:]
                await clock.advance(seconds=20)
                await engine.renew_many([*handles[:GOOD], other, third])
                await clock.advance(seconds=20)
                bad = {
                    2: (altered(other, lease_epoch=other.lease_epoch + 1), "lease_conflict"),
                    6: (altered(other, lease_id=uuid4()), "lease_conflict"),
                    10: (expired, "lease_expired"),
                    14: (altered(third, execution_id=f"{{fp:1}}:{uuid4()}"), "execution_not_found"),
                    18: (altered(third, backend=Backend.SQLITE), "handle_from_other_backend"),
                    22: (altered(third, kind=HandleKind.SUSPENDED), "lease_conflict"),
                    26: (altered(other, lease_epoch=2**63), "invalid_input"),
                }
                items = list(handles[:GOOD])
                for at, (handle, _) in bad.items():
                    items.insert(at, handle)
                answers = await call(engine, items)
                assert {at: code(answer) for at, answer in enumerate(answers) if not is_good(operation, answer)} == {
                    at: expected for at, (_, expected) in bad.items()
                }
                row = await rows.execution(expired.execution_id)
                assert row["ownership_state"] == "lease_expired_reclaimable"
                await check_done(engine, rows, handles[:GOOD], operation)


async def check_done(engine: Engine, rows: Rows, handles: Sequence[Handle], operation: str) -> None:
    """Every execution is renewed or ended as answered, with its own result and one completion event."""
    stored = {str(row["execution_id"]): row for row in await rows.of("execution_detail")}
    events = [str(event["execution_id"]) for event in await rows.of("event_each") if event["outcome"] is not None]
    completions = Counter(events)
    for handle in handles:
        row = stored[uuid_of(handle.execution_id)]
        if operation.startswith("renew"):
            assert row["ownership_state"] == "leased"
            continue
        assert row["terminal_outcome"] == ("success" if operation.startswith("complete") else "failed")
        assert completions[uuid_of(handle.execution_id)] == 1
        if operation.startswith("complete"):
            assert await engine.get_execution_result(handle.execution_id) == handle.execution_id.encode()


REJECTING = {
    "renew": "alter table event add check (kind <> 'renewed' or '{id}'::uuid <> all(execution_ids))",
    "complete": "alter table execution add check (result_payload is null or execution_id <> '{id}')",
    "fail": "alter table execution add check (failure_reason is null or execution_id <> '{id}')",
}
"""The constraint that makes the database reject an operation on one execution."""


async def test_a_run_that_the_database_rejects_is_refused_and_the_others_succeed(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    with all_cases() as case:
        for operation, call in UNDER_LEASE.items():
            with case(operation):
                handles = await claimed(engine, GOOD + 1, lane_id=lane_of(operation))
                rejected = handles[MIDDLE]
                await connection.execute(REJECTING[operation.split()[0]].format(id=uuid_of(rejected.execution_id)))
                answers = await call(engine, handles)
                assert [at for at, answer in enumerate(answers) if not is_good(operation, answer)] == [MIDDLE]
                assert code(answers[MIDDLE]) == "other"
                row = await rows.execution(rejected.execution_id)
                assert (row["public_state"], row["lease_renewed_at"]) == ("active", None)
                await check_done(engine, rows, [*handles[:MIDDLE], *handles[MIDDLE + 1 :]], operation)


async def test_a_run_named_more_than_once_succeeds_each_time(engine: Engine, rows: Rows) -> None:
    with all_cases() as case:
        for operation, call in UNDER_LEASE.items():
            with case(operation):
                handles = await claimed(engine, GOOD, lane_id=lane_of(operation))
                answers = await call(engine, [*handles, handles[0], handles[MIDDLE], handles[0]])
                assert len(answers) == GOOD + 3
                assert all(is_good(operation, answer) for answer in answers)
                await check_done(engine, rows, handles, operation)


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_locked_row_delays_only_its_own_caller(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    with all_cases() as case:
        for operation in EACH:
            with case(operation):
                handles = await claimed(engine, GOOD + 1, lane_id=lane_of(operation))
                async with locked(connection, handles[MIDDLE].execution_id):
                    tasks = [asyncio.create_task(UNDER_LEASE[operation](engine, [handle])) for handle in handles]
                    waiting = tasks.pop(MIDDLE)
                    async with asyncio.timeout(30):
                        answers = await asyncio.gather(*tasks)
                    assert not waiting.done()
                assert all(is_good(operation, answer) for (answer,) in (*answers, await waiting))
                await check_done(engine, rows, handles, operation)


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_batch_waits_for_its_locked_row_and_answers_all(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with all_cases() as case:
        for operation in MANY:
            with case(operation):
                handles = await claimed(engine, GOOD + 1, lane_id=lane_of(operation))
                async with locked(connection, handles[MIDDLE].execution_id):
                    task = asyncio.create_task(UNDER_LEASE[operation](engine, handles))
                    await eventually(lambda: connection.fetchval(waiting))
                    assert not task.done()
                assert all(is_good(operation, answer) for answer in await task)
                await check_done(engine, rows, handles, operation)


async def test_a_run_whose_row_is_locked_too_long_is_refused_and_the_others_succeed(
    engines: Engines, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "15ms")
    engine = await engines()
    with all_cases() as case:
        for operation, call in UNDER_LEASE.items():
            with case(operation):
                handles = await claimed(engine, GOOD + 1, lane_id=lane_of(operation))
                async with locked(connection, handles[MIDDLE].execution_id):
                    answers = await call(engine, handles)
                assert [at for at, answer in enumerate(answers) if not is_good(operation, answer)] == [MIDDLE]
                refusal = answers[MIDDLE]
                assert (code(refusal), refusal.retryable) == ("retry_exhausted", True)
                assert refusal.detail == LOCKED_TEXT.format(f"execution {handles[MIDDLE].execution_id}")
                (again,) = await call(engine, [handles[MIDDLE]])
                assert is_good(operation, again)
                await check_done(engine, rows, handles, operation)


async def test_a_cancelled_caller_does_not_affect_the_others(engine: Engine, rows: Rows) -> None:
    with all_cases() as case:
        for operation in EACH:
            with case(operation):
                handles = await claimed(engine, GOOD + 1, lane_id=lane_of(operation))
                tasks = [asyncio.create_task(UNDER_LEASE[operation](engine, [handle])) for handle in handles]
                for _ in range(3):
                    await asyncio.sleep(0)
                tasks[MIDDLE].cancel()
                answers: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
                assert isinstance(answers.pop(MIDDLE), asyncio.CancelledError)
                assert all(is_good(operation, answer) for (answer,) in answers)
                cancelled = handles.pop(MIDDLE)
                await check_done(engine, rows, handles, operation)
                # The call of the cancelled caller can be repeated.
                (again,) = await UNDER_LEASE[operation](engine, [cancelled])
                assert is_good(operation, again)


async def test_failures_with_and_without_a_retry_succeed_in_one_batch(engine: Engine, rows: Rows) -> None:
    retried = await claimed(engine, GOOD, policy=RETRIED)
    ended = await claimed(engine, GOOD)
    mixed = [handle for pair in zip(retried, ended, strict=True) for handle in pair]
    answers = await fail_each(engine, mixed)
    assert [type(answer) for answer in answers] == [RetryScheduled, TerminalFailed] * GOOD
    states = Counter(row["public_state"] for row in await rows.of("execution"))
    assert states == {"delayed": GOOD, "failed": GOOD}


async def test_completions_failures_and_cancels_succeed_in_one_batch(engine: Engine, rows: Rows) -> None:
    completed, failed, cancelled = [await claimed(engine, GOOD) for _ in range(3)]
    calls: list[Coroutine[Any, Any, Any]] = []
    for one, two, three in zip(completed, failed, cancelled, strict=True):
        calls += [
            engine.complete(one, one.execution_id.encode()),
            engine.fail(two, reason="x"),
            engine.cancel(three, "x"),
        ]
    assert [type(answer) for answer in await gathered(calls)] == [type(None), TerminalFailed, type(None)] * GOOD
    await check_done(engine, rows, completed, "complete each")
    await check_done(engine, rows, failed, "fail each")
    states = Counter(row["public_state"] for row in await rows.of("execution"))
    assert states == {"completed": GOOD, "failed": GOOD, "cancelled": GOOD}


async def test_a_batch_has_one_to_a_thousand_items(engine: Engine) -> None:
    handles = await claimed(engine, 1000)
    assert all(isinstance(answer, Renewed) for answer in await engine.renew_many(handles))
    for items in ([], [*handles, handles[0]]):
        for call in (engine.renew_many(items), engine.complete_many([(handle, b"") for handle in items])):
            with pytest.raises(EngineError, match="invalid_input"):
                await call
    assert await complete_many(engine, handles) == ["completed"] * 1000

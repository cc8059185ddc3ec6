"""A failed attempt stores its exception: the type, the message and the traceback."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import asyncpg
import pytest

from creates import new
from engine.cases import in_turn
from engine.state import claim
from engine.waits import suspend_run, triple
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.db.database import Database
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import MAX_ERROR_TYPE_CHARACTERS, MAX_MESSAGE_BYTES, MAX_TRACEBACK_BYTES, FailureReason
from flowfabric.model.errors import EngineError
from flowfabric.model.lease import RetryScheduled, TerminalFailed

RETRIED = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1000}}}
REPLACED = "\N{REPLACEMENT CHARACTER}"


def raised(nth: int = 0) -> FailureReason:
    """A failure as a worker reports it."""
    trace = f'Traceback (most recent call last):\n  File "app.py", line {nth}, in charge\napp.Declined: no {nth}\n'
    return FailureReason(f"Declined: no {nth}", detail="declined", error_type="app.Declined", traceback=trace)


def shown(reason: FailureReason) -> tuple[str | None, ...]:
    """A failure as reads show it."""
    return reason.message, reason.error_type, reason.traceback


async def errors(engine: Engine, execution_id: str) -> list[tuple[str | None, ...]]:
    """The failures of the attempts of an execution as reads show them."""
    listed = await engine.list_attempts(execution_id)
    return [(attempt.failure_reason, attempt.error_type, attempt.traceback) for attempt in listed]


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each statement was sent."""
    sent: Counter[str] = Counter()
    fetch = Database.fetch

    async def counted(database: Database, statement: Statement, values: Mapping[str, object], **options: Any) -> Any:
        sent[statement.name] += 1
        return await fetch(database, statement, values, **options)

    monkeypatch.setattr(Database, "fetch", counted)
    return sent


async def test_every_failed_attempt_stores_its_exception(
    engine: Engine, given: Given, clock: Clock, statements: Counter[str]
) -> None:
    run = await given.run(policy=RETRIED)
    statements.clear()
    assert isinstance(await engine.fail(run.handle, reason=raised(0), claimed=run), RetryScheduled)
    assert statements == {"end_leases": 1}
    assert await errors(engine, run.execution_id) == [shown(raised(0))]
    await clock.advance(seconds=1)
    (again,) = await claim(engine)
    assert await errors(engine, run.execution_id) == [shown(raised(0)), (None, None, None)]
    statements.clear()
    assert await engine.fail(again.handle, reason=raised(1), claimed=again) == TerminalFailed()
    assert statements == {"end_leases": 1}
    assert await errors(engine, run.execution_id) == [shown(raised(0)), shown(raised(1))]
    ended = await engine.wait_for_ending(run.execution_id, timeout=60)
    assert (ended.reason, ended.error_type, ended.traceback) == shown(raised(1))
    assert await engine.find_inconsistencies() == []


async def test_a_failure_without_an_exception_stores_what_it_was_given(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    handle = await given.claimed(policy=RETRIED)
    await engine.fail(handle, reason="busy")
    await clock.advance(seconds=1)
    (again,) = await claim(engine)
    await engine.fail(again.handle, reason="broken")
    assert await errors(engine, handle.execution_id) == [("busy", None, None), ("broken", None, None)]
    ended = await engine.wait_for_ending(handle.execution_id, timeout=60)
    assert (ended.reason, ended.error_type, ended.traceback) == ("broken", None, None)
    once = await given.failed()
    assert await rows.of("attempt", execution_id=uuid_of(once)) == []
    for reason in (FailureReason("x", error_type="KeyError"), FailureReason("x", traceback="Traceback\n")):
        handle = await given.claimed()
        await engine.fail(handle, reason=reason)
        assert await errors(engine, handle.execution_id) == [shown(reason)]


async def test_fail_execution_stores_the_exception(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(policy=RETRIED)
    await engine.fail_execution(
        **triple(handle), failure_reason="Declined: no 0", error_type="app.Declined", traceback=raised(0).traceback
    )
    await clock.advance(seconds=1)
    (again,) = await claim(engine)
    long = "x" * 100_000
    await engine.fail_execution(**triple(again.handle), failure_reason=long, error_type=long, traceback=f"{long}\0")
    cut = FailureReason(long, error_type=long, traceback=f"{long}\0").bounded()
    assert await errors(engine, handle.execution_id) == [shown(raised(0)), shown(cut)]


async def test_an_expired_execution_has_no_exception(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed(policy=RETRIED, execution_deadline_at=await clock.now() + 60_000)
    await engine.fail(handle, reason=raised())
    await clock.advance(seconds=60)
    await parts_of(engine).timeouts.expire_due()
    ended = await engine.wait_for_ending(handle.execution_id, timeout=60)
    assert (ended.outcome, ended.reason, ended.error_type) == ("expired", "execution_deadline", None)
    assert await errors(engine, handle.execution_id) == [shown(raised())]


async def test_a_reclaim_and_a_success_keep_the_exceptions_of_earlier_attempts(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handle = await given.claimed(policy=RETRIED)
    await engine.fail(handle, reason=raised())
    await clock.advance(seconds=1)
    await given.claim(lease_ttl_ms=1000)
    await clock.advance(seconds=2)
    last = await given.claim()
    assert last.attempt_index == 2
    await engine.complete(last.handle, b"1")
    assert [error[1] for error in await errors(engine, handle.execution_id)] == ["app.Declined", None, None]
    ended = await engine.wait_for_ending(handle.execution_id, timeout=60)
    assert (ended.outcome, ended.error_type, ended.traceback) == ("success", None, None)
    assert await engine.find_inconsistencies() == []


@in_turn("policy", [None, RETRIED])
async def test_a_resumed_attempt_stores_its_exception_and_keeps_its_history(
    engine: Engine, given: Given, policy: Any
) -> None:
    handle = await given.claimed(policy=policy)
    await suspend_run(engine, handle)
    await engine.resume_execution(execution_id=handle.execution_id)
    resumed = await given.claim()
    (before,) = await engine.list_attempts(handle.execution_id)
    await engine.fail(resumed.handle, reason=raised())
    (after,) = await engine.list_attempts(handle.execution_id)
    assert (after.failure_reason, after.error_type, after.traceback) == shown(raised())
    kept = ("attempt_id", "attempt_type", "started_at", "suspended_at", "resumed_at", "lease_id", "worker_id")
    assert [getattr(after, field) for field in kept] == [getattr(before, field) for field in kept]
    assert (after.attempt_state, after.suspended_at is None) == ("ended_failure", False)
    assert await engine.find_inconsistencies() == []


async def test_a_repeated_failure_does_not_replace_the_exception(engine: Engine, given: Given, rows: Rows) -> None:
    for policy in (None, RETRIED):
        handle = await given.claimed(policy=policy)
        await engine.fail(handle, reason=raised(0))
        async with rows.unchanged():
            await engine.fail(handle, reason=raised(1))


async def test_retention_deletes_the_exception_with_its_execution(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    handle = await given.claimed(policy={**RETRIED, "stream_policy": {"retention_ttl_ms": 1000}})
    await engine.fail(handle, reason=raised(0))
    await clock.advance(seconds=1)
    await engine.fail((await given.claim()).handle, reason=raised(1))
    assert len(await rows.of("attempt")) == 2
    await clock.advance(seconds=2)
    assert (await parts_of(engine).retention.trim_batch()).done == 1
    assert await rows.of("attempt") == []


BOUNDS = {
    "message": MAX_MESSAGE_BYTES,
    "error_type": MAX_ERROR_TYPE_CHARACTERS,
    "traceback": MAX_TRACEBACK_BYTES,
}


@in_turn("field", BOUNDS)
@in_turn("policy", [None, RETRIED])
async def test_a_long_failure_is_cut_and_not_refused(engine: Engine, given: Given, policy: Any, field: str) -> None:
    for size in (BOUNDS[field], BOUNDS[field] + 1, 1_000_000):
        handle = await given.claimed(policy=policy)
        reason: Any = {"message": "m", "error_type": "t", "traceback": "t", field: "x" * size}
        await engine.fail(handle, reason=FailureReason(**reason))
        (attempt,) = await engine.list_attempts(handle.execution_id)
        found = attempt.failure_reason if field == "message" else getattr(attempt, field)
        assert found is not None
        assert BOUNDS[field] - 8 <= len(found) <= BOUNDS[field]
        assert (found == "x" * size) == (size == BOUNDS[field])


async def test_an_unstorable_traceback_is_sanitized_and_shares_a_statement_with_99_others(
    engine: Engine, statements: Counter[str]
) -> None:
    await engine.create_many([new(policy=RETRIED if nth % 2 else None) for nth in range(100)])
    runs = await claim(engine, limit=100)
    poison = FailureReason("a\0\ud800", detail="\0", error_type="\udfff\0", traceback="\0" * 20_000 + "\ud800" * 20_000)
    reasons = [poison if nth == 50 else raised(nth) for nth in range(100)]
    statements.clear()
    answers = await asyncio.gather(
        *(engine.fail(run.handle, reason=reason, claimed=run) for run, reason in zip(runs, reasons, strict=True))
    )
    assert statements == {"end_leases": 1}
    assert Counter(map(type, answers)) == {RetryScheduled: 50, TerminalFailed: 50}
    for run, reason in zip(runs, reasons, strict=True):
        assert await errors(engine, run.execution_id) == [shown(reason.bounded())]
    (message, error_type, trace) = (await errors(engine, runs[50].execution_id))[0]
    assert (message, error_type) == (f"a{REPLACED}?", f"?{REPLACED}")
    assert trace is not None
    assert (trace[0], trace[-1]) == (REPLACED, "?")
    assert await engine.find_inconsistencies() == []


async def test_a_traceback_that_postgres_refuses_does_not_affect_99_others(
    engine: Engine, connection: asyncpg.Connection, rows: Rows
) -> None:
    await connection.execute("alter table attempt add constraint no_poison check (traceback not like '%poison%')")
    await engine.create_many([new(policy=RETRIED if nth % 2 else None) for nth in range(100)])
    runs = await claim(engine, limit=100)
    poison = FailureReason("x", traceback="poison")
    answers = await asyncio.gather(
        *(
            engine.fail(run.handle, reason=poison if nth == 50 else raised(nth), claimed=run)
            for nth, run in enumerate(runs)
        ),
        return_exceptions=True,
    )
    refusal = answers.pop(50)
    assert isinstance(refusal, EngineError)
    assert (refusal.code, refusal.retryable) == ("other", False)
    assert {type(answer) for answer in answers} == {RetryScheduled, TerminalFailed}
    for nth, run in enumerate(runs):
        if nth != 50:
            assert await errors(engine, run.execution_id) == [shown(raised(nth))]
    assert (await rows.execution(runs[50].execution_id))["public_state"] == "active"

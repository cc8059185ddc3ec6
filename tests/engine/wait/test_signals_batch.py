"""Signals that share a transaction: one bad signal does not affect the others, and the order is kept."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.sending import Waiting, signals, stamps_written, waiting
from engine.state import claim, refused
from engine.waits import rewriting, suspend_args, suspend_run, suspension, waitpoint, waitpoints
from fixtures import Clock, Engines, Eventually, Given, Rows, uuid_of
from flowfabric.db import session as sessions
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import Count, CountKind, OperatorOnly
from flowfabric.model.errors import EngineError
from flowfabric.model.signal import Accepted, SignalDuplicate
from flowfabric.reconcile.loop import Reconciler

GOOD = 99 if os.environ.get("FF_TEST_SWEEP") == "whole" else 15
BAD = GOOD // 2
APPENDED = "appended_to_waitpoint"
SATISFIED = "resume_condition_satisfied"


async def many(engine: Engine, given: Given, count: int = GOOD + 1) -> list[Waiting]:
    """Suspended executions."""
    return [await waiting(engine, given) for _ in range(count)]


async def sent(engine: Engine, deliveries: Sequence[dict[str, Any]]) -> list[Any]:
    """The outcomes of concurrent deliveries; a refusal is given as its code."""
    answers = await asyncio.gather(*(engine.deliver_signal(**each) for each in deliveries), return_exceptions=True)
    return [answer.code if isinstance(answer, EngineError) else answer for answer in answers]


async def check_resumed(rows: Rows, waits: Sequence[Waiting]) -> None:
    """Assert that each of them was resumed by its own signal, with one event."""
    events = Counter(str(event["execution_id"]) for event in await rows.of("event_each") if event["outcome"] == 6)
    for wait in waits:
        (stored,) = await signals(rows, wait.execution_id)
        assert stored["payload"] == wait.execution_id.encode()
        closed = await suspension(rows, wait.execution_id)
        assert (closed["close_reason"], closed["satisfier_ids"]) == ("resumed", [stored["signal_id"]])
        (point,) = await waitpoints(rows, wait.execution_id)
        assert (point["state"], point["close_reason"], point["signal_count"]) == ("closed", "resumed", 1)
        assert (await rows.execution(wait.execution_id))["public_state"] == "resumable"
        assert events[uuid_of(wait.execution_id)] == 1


def own(wait: Waiting, **overrides: Any) -> dict[str, Any]:
    """A signal that resumes the execution, with its id as payload."""
    return wait.signal(**{"payload": wait.execution_id.encode(), **overrides})


async def test_bad_signals_do_not_affect_the_good_ones_of_a_batch(engine: Engine, given: Given, rows: Rows) -> None:
    waits = await many(engine, given, GOOD + 4)
    wrong, repeated, spent, over = waits[GOOD:]
    await repeated.send("other", idempotency_key="k")
    await spent.send("ready")
    await engine.cancel_execution(execution_id=over.execution_id, reason="not wanted")
    absent = f"{{fp:1}}:{uuid4()}"
    bad = {
        1: (own(wrong, waitpoint_token="k1:" + "0" * 64), "invalid_token"),
        2: (own(wrong, waitpoint_id=uuid4()), "invalid_token"),
        4: (own(wrong, payload=b"x" * 65_537), "payload_too_large"),
        5: (own(wrong, execution_id=absent), "execution_not_found"),
        7: (own(spent), "target_not_signalable"),
        8: (own(over), "target_not_signalable"),
        10: (own(wrong, signal_name="nul \0"), "invalid_input"),
        11: (own(wrong, idempotency_key="k" * 1025), "invalid_input"),
        13: (own(wrong, waitpoint_token=None), "missing_token"),
    }
    items = [own(wait) for wait in waits[:GOOD]]
    for at, (signal, _) in bad.items():
        items.insert(at, signal)
    items.append(own(repeated, idempotency_key="k"))
    answers = await sent(engine, items)
    assert isinstance(answers.pop(), SignalDuplicate)
    refusals = {at: answer for at, answer in enumerate(answers) if not isinstance(answer, Accepted)}
    assert refusals == {at: code for at, (_, code) in bad.items()}
    await check_resumed(rows, waits[:GOOD])
    assert (await rows.execution(wrong.execution_id))["public_state"] == "suspended"
    await stamps_written(engine)
    assert (await rows.execution(wrong.execution_id))["last_hmac_validation_failed_at"] is not None
    assert await signals(rows, wrong.execution_id) == []


async def test_a_signal_that_the_store_rejects_fails_alone(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    waits = await many(engine, given)
    await connection.execute("alter table signal add check (signal_name <> 'poison')")
    poisoned = waits.pop(BAD)
    items = [own(wait) for wait in waits]
    items[BAD:BAD] = [poisoned.signal("poison"), poisoned.signal("other"), poisoned.signal("poison")]
    answers = await sent(engine, items)
    assert {at: answer for at, answer in enumerate(answers) if not isinstance(answer, Accepted)} == {
        BAD: "other",
        BAD + 2: "other",
    }
    await check_resumed(rows, waits)
    assert [row["signal_name"] for row in await signals(rows, poisoned.execution_id)] == ["other"]


TABLES = ("execution", "suspension", "waitpoint")


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_locked_row_delays_only_its_own_callers(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, subtests: pytest.Subtests
) -> None:
    for table in TABLES:
        with subtests.test(table):
            waits = await many(engine, given)
            async with rewriting(connection, table, waits[BAD].execution_id):
                tasks = [asyncio.create_task(engine.deliver_signal(**own(wait))) for wait in waits]
                async with asyncio.timeout(30):
                    answers = await asyncio.gather(*(task for at, task in enumerate(tasks) if at != BAD))
                assert not tasks[BAD].done()
            assert {answer.effect for answer in (*answers, await tasks[BAD])} == {SATISFIED}  # type: ignore[union-attr]
            await check_resumed(rows, waits)
            await claim(engine, limit=len(waits))


async def test_a_row_locked_for_too_long_fails_only_its_own_callers(
    engines: Engines,
    given: Given,
    rows: Rows,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "60ms")
    engine = await engines()
    for table in TABLES:
        with subtests.test(table):
            waits = await many(engine, given, 5)
            async with rewriting(connection, table, waits[2].execution_id):
                async with rows.unchanged():
                    await refused(engine.deliver_signal(**own(waits[2])), "retry_exhausted")
                answers = await sent(engine, [own(wait) for wait in waits])
            assert [at for at, answer in enumerate(answers) if not isinstance(answer, Accepted)] == [2]
            assert answers[2] == "retry_exhausted"
            assert isinstance(await engine.deliver_signal(**own(waits[2])), Accepted)
            await check_resumed(rows, waits)
            await claim(engine, limit=len(waits))


async def test_a_cancelled_caller_does_not_cancel_the_others(
    engine: Engine, given: Given, rows: Rows, eventually: Eventually
) -> None:
    waits = await many(engine, given)
    shared = await waiting(engine, given, resume_condition=OperatorOnly())
    items = [own(wait) for wait in waits] + [shared.signal(f"s{at}") for at in range(10)]
    tasks = [asyncio.create_task(engine.deliver_signal(**item)) for item in items]
    for _ in range(3):
        await asyncio.sleep(0)
    cancelled = [BAD, len(waits) + 5]
    for at in cancelled:
        tasks[at].cancel()
    answers: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, Accepted)] == cancelled

    async def is_delivered() -> bool:
        return bool(await rows.of("signal", execution_id=uuid_of(waits[BAD].execution_id)))

    await eventually(is_delivered)
    await check_resumed(rows, waits)
    assert [row["signal_name"] for row in await signals(rows, shared.execution_id)] == [f"s{at}" for at in range(10)]


async def test_signals_of_one_execution_are_delivered_in_order_across_batches(
    engine: Engine, given: Given, rows: Rows
) -> None:
    condition = Count(n=120, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints=("wait",))
    wait = await waiting(engine, given, resume_condition=condition)
    items = [wait.signal(f"s{at}", idempotency_key=f"k{at % 140}") for at in range(150)]
    answers = await sent(engine, items)
    assert [answer.effect for answer in answers[:119]] == [APPENDED] * 119
    assert answers[119].effect == SATISFIED
    assert answers[120:140] == ["target_not_signalable"] * 20
    assert answers[140:] == [SignalDuplicate(existing_signal_id=answers[at].signal_id) for at in range(10)]
    assert [row["signal_name"] for row in await signals(rows, wait.execution_id)] == [f"s{at}" for at in range(120)]
    closed = await suspension(rows, wait.execution_id)
    assert closed["satisfier_ids"] == [answer.signal_id for answer in answers[:120]]
    point = await waitpoint(rows, wait.points["wait"].waitpoint_id)
    assert (point["signal_count"], point["matched_signal_count"]) == (120, 120)


async def test_large_signals_of_one_execution_keep_their_order_and_payload(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await waiting(engine, given, resume_condition=OperatorOnly())
    payloads = [bytes([at]) * 65_536 for at in range(20)]
    answers = await sent(engine, [wait.signal(f"s{at}", payload=payload) for at, payload in enumerate(payloads)])
    assert {type(answer) for answer in answers} == {Accepted}
    assert [row["payload"] for row in await signals(rows, wait.execution_id)] == payloads


async def test_the_signal_limit_and_the_log_length_hold_within_a_transaction(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await waiting(engine, given, suspend_args(resume_condition=OperatorOnly()))
    items = [wait.signal(f"s{at}", max_signals_per_execution=30, signal_maxlen=5) for at in range(50)]
    answers = await sent(engine, items)
    assert Counter(answer if isinstance(answer, str) else "accepted" for answer in answers) == {
        "accepted": 30,
        "signal_limit_exceeded": 20,
    }
    assert [row["signal_name"] for row in await signals(rows, wait.execution_id)] == [f"s{at}" for at in range(25, 30)]


async def test_signals_with_different_resume_delays_share_a_transaction(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    waits = await many(engine, given, 12)
    now = await clock.now()
    await sent(engine, [wait.signal(resume_delay_ms=at * 1_000) for at, wait in enumerate(waits)])
    for at, wait in enumerate(waits):
        assert (await rows.execution(wait.execution_id))["delay_until"] == (now + at * 1_000 if at else None)
    await clock.advance(seconds=10)
    await Reconciler(engine).catch_up()
    assert len(await rows.of("execution", public_state="resumable")) == 11


async def test_a_closing_engine_finishes_running_deliveries(engines: Engines, given: Given, rows: Rows) -> None:
    waits = await many(given.engine, given, 5)
    engine = await engines()
    tasks = [asyncio.create_task(engine.deliver_signal(**own(wait))) for wait in waits]
    await asyncio.sleep(0)
    await engine.shutdown_prepare(5_000)
    answers = await asyncio.gather(*tasks)
    assert [isinstance(answer, Accepted) and answer.effect for answer in answers] == [SATISFIED] * len(waits)
    await check_resumed(rows, waits)


async def test_two_executions_may_use_one_key_and_one_signal_id(engine: Engine, given: Given) -> None:
    one = Waiting(engine, (first := await suspend_run(engine, await given.claimed())).handle).on(first.details)
    two = Waiting(engine, (second := await suspend_run(engine, await given.claimed())).handle).on(second.details)
    both: dict[str, Any] = {"idempotency_key": "k", "signal_id": uuid4()}
    answers = await sent(engine, [one.signal(**both), two.signal(**both)])
    assert [type(answer) for answer in answers] == [Accepted, Accepted]


async def test_one_signal_id_may_be_delivered_to_many_executions(engine: Engine, given: Given, rows: Rows) -> None:
    waits = await many(engine, given, 5)
    broadcast = uuid4()
    answers = await sent(engine, [wait.signal(signal_id=broadcast) for wait in waits])
    assert [answer.effect for answer in answers] == [SATISFIED] * len(waits)
    for wait in waits:
        (stored,) = await signals(rows, wait.execution_id)
        assert stored["signal_id"] == broadcast

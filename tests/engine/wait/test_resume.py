"""Resume by an operator: what it closes, when the execution is claimable, and what is refused."""

import json
from typing import Any

import asyncpg
import pytest

from engine.sending import waiting
from engine.state import RESUMABLE, claim, event_texts, refused, vector
from engine.waits import on_all, suspend_args, suspend_run, suspension, waitpoint, waitpoints
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.db.database import Database, Transaction
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import OperatorOnly, TimeoutOnly
from flowfabric.model.resume import Resumed, ResumePolicy
from flowfabric.model.states import PublicState
from flowfabric.reconcile.loop import Reconciler

RESUME_DELAYED = "runnable/unowned/not_eligible_until_time/waiting_for_resume_delay/none/attempt_interrupted/delayed"
ABSENT = "{fp:3}:11111111-1111-4111-8111-111111111111"


async def test_a_resume_closes_the_suspension_and_all_waitpoints(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given, on_all("a", "b", "c", timeout_at=await clock.now() + 60_000))
    await wait.send("x", "a")
    now = await clock.advance(seconds=1)
    outcome = await engine.resume_execution(execution_id=wait.execution_id, trigger_type="operator")
    assert outcome == Resumed(public_state=PublicState.RESUMABLE)
    row = await rows.execution(wait.execution_id)
    assert vector(row) == RESUMABLE
    assert (row["blocking_detail"], row["suspension_timeout_at"]) == (None, None)
    assert await rows.timers(wait.execution_id) == {}
    assert {row[stamp] for stamp in ("last_transition_at", "last_mutation_at")} == {now}
    closed = await suspension(rows, wait.execution_id)
    assert (closed["closed_at"], closed["close_reason"]) == (now, "resumed")
    assert (closed["satisfied_at"], closed["satisfier_ids"]) == (None, [])
    assert closed["last_signal_at"] == now - 1_000
    for point in await waitpoints(rows, wait.execution_id):
        assert (point["state"], point["closed_at"], point["close_reason"]) == ("closed", now, "resumed")
        assert point["satisfied_at"] is None
    assert await event_texts(rows, wait.execution_id) == ["acquired", "released suspend", "signal", "operator_resumed"]
    event = (await rows.events(wait.execution_id))[-1]
    assert json.loads(event["details"]) == {"trigger_type": "operator", "resume_delay_ms": 0}
    assert (event["outcome"], event["attempt_index"]) == (None, 0)
    await refused(wait.send("x", "b"), "target_not_signalable")
    assert [one.satisfier for one in await engine.observe_signals(wait.handle)] == [False]
    (claimed,) = await claim(engine)
    assert (claimed.attempt_id, claimed.attempt_index) == (wait.handle.attempt_id, 0)


async def test_a_resumed_execution_is_in_ready_and_listed_until_it_is_claimed(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    now, later = await waiting(engine, given), await waiting(engine, given)
    assert await rows.of("ready") == await rows.of("listed") == []
    at = await clock.advance(seconds=1)
    await engine.resume_execution(execution_id=now.execution_id)
    await engine.resume_execution(execution_id=later.execution_id, resume_delay_ms=5_000)
    row = await rows.execution(now.execution_id)
    (queue,) = await rows.of("queue", queue_no=row["queue_no"])
    key = {"partition_key": row["partition_key"], "execution_id": row["execution_id"]}
    place = {name: row[name] for name in ("place", "queue_no")}
    entry = {**key, **place, "route_no": queue["route_no"], "granted_until": None}
    assert await rows.of("ready") == [entry]
    assert await rows.of("listed") == [{**key, "public_state": "resumable", "at": at}]
    assert {(await rows.execution(wait.execution_id))["attached"] for wait in (now, later)} == {0}
    assert [one.execution_id for one in await claim(engine)] == [now.execution_id]
    assert await rows.of("ready") == await rows.of("listed") == []
    await clock.advance(ms=5_000)
    await Reconciler(engine).catch_up()
    assert [one["public_state"] for one in await rows.of("listed")] == ["resumable"]
    assert [one.execution_id for one in await claim(engine)] == [later.execution_id]


async def test_a_resume_ends_every_kind_of_wait(engine: Engine, given: Given, clock: Clock) -> None:
    for condition in (OperatorOnly(), TimeoutOnly()):
        wait = await waiting(engine, given, resume_condition=condition, timeout_at=await clock.now() + 60_000)
        assert (await engine.resume_execution(execution_id=wait.execution_id)).public_state == PublicState.RESUMABLE
        assert [one.execution_id for one in await claim(engine)] == [wait.execution_id]


async def test_a_resume_may_be_delayed(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    wait = await waiting(engine, given, resume_policy=ResumePolicy(resume_delay_ms=99_000))
    now = await clock.advance(seconds=1)
    outcome = await engine.resume_execution(execution_id=wait.execution_id, resume_delay_ms=5_000)
    assert outcome == Resumed(public_state=PublicState.DELAYED)
    row = await rows.execution(wait.execution_id)
    assert vector(row) == RESUME_DELAYED
    assert (row["blocking_detail"], row["delay_until"]) == ("resume delay 5000ms", now + 5_000)
    assert await rows.timers(wait.execution_id) == {"delay": now + 5_000}
    assert await claim(engine) == []
    await clock.advance(ms=4_999)
    await Reconciler(engine).catch_up()
    assert await claim(engine) == []
    await clock.advance(ms=1)
    await Reconciler(engine).catch_up()
    assert [one.attempt_id for one in await claim(engine)] == [wait.handle.attempt_id]


async def test_a_waitpoint_closed_before_the_resume_keeps_its_reason(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given, on_all("a", "b"))
    await engine.close_waitpoint(
        execution_id=wait.execution_id, waitpoint_id=wait.points["a"].waitpoint_id, reason="enough"
    )
    await engine.resume_execution(execution_id=wait.execution_id)
    assert [(await waitpoint(rows, wait.points[key].waitpoint_id))["close_reason"] for key in "ab"] == [
        "enough",
        "resumed",
    ]


async def test_the_attempt_timeout_continues_after_the_resume(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(policy={"timeout_policy": {"attempt_timeout_ms": 8_000}})
    await clock.advance(seconds=3)
    await suspend_run(engine, handle, suspend_args())
    await clock.advance(seconds=60)
    await engine.resume_execution(execution_id=handle.execution_id)
    now = await clock.advance(seconds=60)
    await claim(engine)
    assert (await rows.execution(handle.execution_id))["attempt_timeout_at"] == now + 5_000


async def test_only_a_suspended_execution_can_be_resumed_and_only_with_valid_arguments(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    wait, broken = await waiting(engine, given), await waiting(engine, given)
    await engine.resume_execution(execution_id=wait.execution_id)
    others = [await given.created(), await given.cancelled(), wait.execution_id, broken.execution_id]
    # No operation leaves a suspended execution without its suspension.
    await connection.execute("delete from suspension where execution_id = $1", uuid_of(broken.execution_id))
    async with rows.unchanged():
        for execution_id in others:
            refusal = await refused(engine.resume_execution(execution_id=execution_id), "execution_not_suspended")
            phase = (await rows.execution(execution_id))["lifecycle_phase"]
            assert str(refusal.detail).startswith(f"execution {execution_id} is {phase}")
        await refused(engine.resume_execution(execution_id=ABSENT), "execution_not_found")
    suspended = await waiting(engine, given, lane_id="other")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"execution_id": "x"}, "MissingTag"),
        ({"trigger_type": "whim"}, "trigger_type"),
        ({"resume_delay_ms": -1}, "resume_delay_ms"),
        ({"resume_delay_ms": None}, "resume_delay_ms"),
    ]
    async with rows.unchanged():
        for overrides, detail in wrong:
            call = engine.resume_execution(**{"execution_id": suspended.execution_id, **overrides})
            await refused(call, "invalid_input", detail)


async def test_a_signal_takes_four_statements_and_the_end_of_the_resumed_run_one(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, fetched, fetched_within = await waiting(engine, given), Database.fetch, Transaction.fetch
    names: list[str] = []

    async def fetch(database: Database, statement: Statement, values: Any, **options: Any) -> Any:
        names.append(statement.name)
        return await fetched(database, statement, values, **options)

    async def fetch_within(transaction: Transaction, statement: Statement, **values: Any) -> Any:
        names.append(statement.name)
        return await fetched_within(transaction, statement, **values)

    monkeypatch.setattr(Database, "fetch", fetch)
    monkeypatch.setattr(Transaction, "fetch", fetch_within)
    await wait.send()
    assert names == ["lock_targets", "read_deliveries", "insert_deliveries", "resume_locked"]
    (resumed,) = await claim(engine)
    names.clear()
    await engine.complete(resumed.handle, b"done")
    assert names == ["complete_leases"]

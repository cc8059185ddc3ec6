"""Signals: what a delivery stores, when a condition is satisfied, and what a resumed run reads."""

from typing import Any
from uuid import UUID, uuid4

import asyncpg

from engine.sending import running, signal_keys, signals, waiting
from engine.state import RESUMABLE, claim, event_texts, refused, vector
from engine.waits import fresh, on_all, suspend_args, suspension, waitpoint, waitpoints
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import (
    OPERATOR_ONLY_NAME,
    ByName,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    Wildcard,
)
from flowfabric.model.resume import ResumePolicy
from flowfabric.model.signal import Accepted, SignalDuplicate
from flowfabric.reconcile.loop import Reconciler

APPENDED = "appended_to_waitpoint"
SATISFIED = "resume_condition_satisfied"
BUFFERED = "buffered_for_pending_waitpoint"
RESUME_DELAYED = "runnable/unowned/not_eligible_until_time/waiting_for_resume_delay/none/attempt_interrupted/delayed"


async def test_a_signal_that_satisfies_the_condition_makes_the_execution_claimable_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given, timeout_at=await clock.now() + 60_000)
    now = await clock.advance(seconds=1)
    assert await wait.effect_of("other") == f"{APPENDED} no_op"
    answer = await wait.send("ready")
    assert isinstance(answer, Accepted)
    assert (answer.effect, answer.disposition) == (SATISFIED, SATISFIED)
    row = await rows.execution(wait.execution_id)
    assert vector(row) == RESUMABLE
    assert (row["blocking_detail"], row["delay_until"]) == (None, None)
    assert row["suspension_timeout_at"] is None
    assert await rows.timers(wait.execution_id) == {}
    assert {row[stamp] for stamp in ("last_transition_at", "last_mutation_at")} == {now}
    closed = await suspension(rows, wait.execution_id)
    assert {closed[stamp] for stamp in ("satisfied_at", "closed_at", "last_signal_at")} == {now}
    assert (closed["close_reason"], closed["satisfier_ids"]) == ("resumed", [answer.signal_id])
    point = await waitpoint(rows, wait.points["wait"].waitpoint_id)
    assert {point[stamp] for stamp in ("satisfied_at", "closed_at", "last_signal_at")} == {now}
    assert (point["state"], point["close_reason"]) == ("closed", "resumed")
    assert (point["signal_count"], point["matched_signal_count"]) == (2, 1)
    assert await event_texts(rows, wait.execution_id) == [
        "acquired",
        "released suspend",
        "signal",
        "signal",
        "ended>resumable",
    ]
    (claimed,) = await claim(engine)
    assert (claimed.execution_id, claimed.attempt_id) == (wait.execution_id, wait.handle.attempt_id)
    assert claimed.lease_epoch > wait.handle.lease_epoch


async def test_a_signal_row_holds_the_arguments(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    wait = await waiting(engine, given, resume_condition=OperatorOnly())
    now = await clock.advance(seconds=1)
    payload = bytes(range(256)) * 256
    answer = await wait.send(
        "went",
        signal_id=str(uuid4()),
        signal_category="decision",
        source_type="user",
        source_identity="ana",
        payload=payload,
        payload_encoding="raw",
        correlation_id="c-1",
        idempotency_key="once",
        target_scope="execution",
        created_at=now - 5_000,
    )
    (row,) = await signals(rows, wait.execution_id)
    assert {name: row[name] for name in row if name not in ("partition_key", "sequence")} == {
        "execution_id": UUID(uuid_of(wait.execution_id)),
        "signal_id": answer.signal_id,
        "suspension_id": (await suspension(rows, wait.execution_id))["suspension_id"],
        "waitpoint_id": wait.points["wait"].waitpoint_id,
        "waitpoint_key": "wait",
        "signal_name": "went",
        "signal_category": "decision",
        "source_type": "user",
        "source_identity": "ana",
        "correlation_id": "c-1",
        "idempotency_key": "once",
        "target_scope": "execution",
        "created_at": now - 5_000,
        "accepted_at": now,
        "effect": APPENDED,
        "disposition": "no_op",
        "payload": payload,
        "payload_encoding": "raw",
    }


async def test_omitted_arguments_of_a_signal_have_defaults(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given)
    now = await clock.advance(seconds=1)
    await wait.send("other")
    (row,) = await signals(rows, wait.execution_id)
    assert (row["signal_category"], row["source_type"], row["source_identity"]) == ("external", "external", "")
    assert (row["payload"], row["payload_encoding"], row["target_scope"]) == (None, "json", "waitpoint")
    assert (row["created_at"], row["correlation_id"], row["idempotency_key"]) == (now, None, None)
    assert await signal_keys(rows) == []


async def test_a_signal_that_does_not_resume_changes_only_the_rows_of_the_wait(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given)
    await clock.advance(seconds=1)
    async with rows.unchanged(without=["signal", "waitpoint", "suspension", "event"]):
        await wait.send("other", idempotency_key="")


async def test_no_signal_satisfies_an_operator_only_or_timeout_only_wait(
    engine: Engine, given: Given, clock: Clock
) -> None:
    for condition in (OperatorOnly(), TimeoutOnly()):
        wait = await waiting(engine, given, resume_condition=condition, timeout_at=await clock.now() + 60_000)
        for name in ("ready", OPERATOR_ONLY_NAME, "__timeout_only__"):
            assert await wait.effect_of(name) == f"{APPENDED} no_op"
        assert await claim(engine) == []


async def test_a_wildcard_does_not_match_reserved_names(engine: Engine, given: Given) -> None:
    wait = await waiting(engine, given, resume_condition=Single(waitpoint_key="wait", matcher=Wildcard()))
    assert await wait.effect_of(OPERATOR_ONLY_NAME) == f"{APPENDED} no_op"
    assert await wait.effect_of("x") == SATISFIED


async def test_all_of_requires_a_signal_at_every_waitpoint_and_closes_them_together(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await waiting(engine, given, on_all("a", "b", "c"))
    assert await wait.effect_of("x", "a") == APPENDED
    assert await wait.effect_of("x", "a") == f"{APPENDED} appended_to_waitpoint_duplicate"
    assert await wait.effect_of("x", "b") == APPENDED
    open_one = await suspension(rows, wait.execution_id)
    assert len(open_one["satisfier_ids"]) == 2
    assert (open_one["closed_at"], open_one["satisfied_at"]) == (None, None)
    assert await wait.effect_of("x", "c") == SATISFIED
    found = await waitpoints(rows, wait.execution_id)
    assert [(row["state"], row["close_reason"], row["signal_count"]) for row in found] == [
        ("closed", "resumed", 2),
        ("closed", "resumed", 1),
        ("closed", "resumed", 1),
    ]
    assert {row["satisfied_at"] for row in found} == {(await suspension(rows, wait.execution_id))["satisfied_at"]}
    stored = await signals(rows, wait.execution_id)
    assert (await suspension(rows, wait.execution_id))["satisfier_ids"] == [stored[at]["signal_id"] for at in (0, 2, 3)]


async def test_distinct_sources_are_counted_once_each(engine: Engine, given: Given) -> None:
    condition = Count(
        n=2, count_kind=CountKind.DISTINCT_SOURCES, matcher=ByName("approve"), waitpoints=("wait", "other")
    )
    request = suspend_args(waitpoints=(fresh("wait"), fresh("other")), resume_condition=condition)
    wait = await waiting(engine, given, request)
    assert await wait.effect_of("approve", source_identity="ana") == APPENDED
    assert (
        await wait.effect_of("approve", "other", source_identity="ana") == f"{APPENDED} appended_to_waitpoint_duplicate"
    )
    assert await wait.effect_of("reject", source_identity="bob") == f"{APPENDED} signal_ignored_matcher_failed"
    assert await wait.effect_of("approve", source_identity="bob") == SATISFIED


async def test_distinct_signals_of_one_source_are_counted(engine: Engine, given: Given) -> None:
    condition = Count(n=2, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints=("wait",))
    wait = await waiting(engine, given, resume_condition=condition)
    assert [await wait.effect_of("x"), await wait.effect_of("x")] == [APPENDED, SATISFIED]


async def test_a_signal_to_a_waitpoint_that_the_condition_does_not_name_is_ignored(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given, on_all("a", "b"))
    # Written directly: suspend rejects a waitpoint that the condition does not name.
    await connection.execute(
        "update suspension set condition = $1",
        '{"Composite": {"kind": "AllOf", "members": [{"Single": {"waitpoint_key": "a", "matcher": "Wildcard"}}]}}',
    )
    assert await wait.effect_of("x", "b") == f"{APPENDED} signal_ignored_not_in_condition"
    assert await wait.effect_of("x", "a") == SATISFIED


async def test_a_condition_of_a_newer_version_is_never_satisfied(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given)
    await connection.execute("update suspension set condition = $1", '{"Sometime": {}}')
    assert await wait.effect_of("ready") == f"{APPENDED} no_op"


async def test_a_signal_to_an_execution_that_is_not_suspended_does_not_resume_it(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given)
    # Written directly: no operation leaves a suspension open on an execution that is not suspended.
    await connection.execute(
        """update execution set lifecycle_phase = 'runnable', eligibility_state = 'eligible_now',
                  blocking_reason = 'waiting_for_worker'"""
    )
    async with rows.unchanged(without=["signal", "waitpoint", "suspension", "event"]):
        assert await wait.effect_of("ready") == SATISFIED
    left = await suspension(rows, wait.execution_id)
    assert (left["closed_at"], len(left["satisfier_ids"])) == (None, 1)
    assert (await waitpoint(rows, wait.points["wait"].waitpoint_id))["state"] == "active"


async def test_a_repeated_signal_returns_the_first_and_writes_only_an_event(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await waiting(engine, given)
    first = await wait.send("other", idempotency_key="k")
    again = SignalDuplicate(existing_signal_id=first.signal_id)
    async with rows.unchanged(without=["event"]):
        assert await wait.send("ready", idempotency_key="k") == again
        assert await wait.send("ready", signal_id=first.signal_id) == again


async def test_a_repeat_of_the_satisfying_signal_is_a_duplicate_before_and_after_the_execution_ends(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await waiting(engine, given)
    first = await wait.send("ready", idempotency_key="k")
    again = SignalDuplicate(existing_signal_id=first.signal_id)
    assert await wait.send("ready", idempotency_key="k") == again
    (resumed,) = await claim(engine)
    assert await wait.send("ready", idempotency_key="k") == again
    await engine.complete(resumed.handle, b"done")
    async with rows.unchanged(without=["event"]):
        assert await wait.send("ready", idempotency_key="k", max_signals_per_execution=1) == again
        assert await wait.send("ready", signal_id=first.signal_id) == again
    async with rows.unchanged():
        await refused(wait.send("ready"), "target_not_signalable")


async def test_an_idempotency_key_belongs_to_its_waitpoint_and_expires(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given, on_all("a", "b", "c"))
    now = await clock.now()
    first = await wait.send("x", "a", idempotency_key="k", dedup_ttl_ms=1_000)
    (key,) = await signal_keys(rows)
    assert (key["subject_id"], key["expires_at"]) == (first.signal_id, now + 1_000)
    assert isinstance(await wait.send("x", "b", idempotency_key="k"), Accepted)
    await clock.advance(ms=999)
    assert await wait.send("x", "a", idempotency_key="k") == SignalDuplicate(existing_signal_id=first.signal_id)
    await clock.advance(ms=1)
    second = await wait.send("x", "a", idempotency_key="k")
    assert await wait.send("x", "a", idempotency_key="k") == SignalDuplicate(existing_signal_id=second.signal_id)


async def test_without_a_key_or_with_a_ttl_of_zero_nothing_is_a_duplicate(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await waiting(engine, given)
    for overrides in ({}, {"idempotency_key": ""}, {"idempotency_key": "k", "dedup_ttl_ms": 0}):
        for _ in range(2):
            assert isinstance(await wait.send("other", **overrides), Accepted)
    assert await signal_keys(rows) == []


async def test_the_log_of_a_waitpoint_keeps_the_newest_and_the_counted_signals(
    engine: Engine, given: Given, rows: Rows
) -> None:
    condition = Count(
        n=3, count_kind=CountKind.DISTINCT_SOURCES, matcher=ByName("approve"), waitpoints=("wait", "other")
    )
    request = suspend_args(waitpoints=(fresh("wait"), fresh("other")), resume_condition=condition)
    wait = await waiting(engine, given, request)
    await wait.send("approve", source_identity="ana")
    for at in range(5):
        await wait.send(f"noise{at}", signal_maxlen=2)
        await wait.send(f"apart{at}", "other")
    kept = [row["signal_name"] for row in await signals(rows, wait.execution_id) if row["waitpoint_key"] == "wait"]
    assert kept == ["approve", "noise3", "noise4"]
    assert len(await signals(rows, wait.execution_id)) == 3 + 5
    assert (await waitpoint(rows, wait.points["wait"].waitpoint_id))["signal_count"] == 6
    await wait.send("approve", source_identity="bob", signal_maxlen=1)
    assert await wait.effect_of("approve", source_identity="cid", signal_maxlen=1) == SATISFIED
    seen = [(one.signal_name, one.satisfier) for one in await engine.observe_signals(wait.handle)]
    assert [one for one in seen if not one[0].startswith("apart")] == [("approve", True)] * 3


async def test_the_resume_delay_of_a_signal_delays_the_resume(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given, resume_policy=ResumePolicy(resume_delay_ms=60_000))
    now = await clock.advance(seconds=1)
    assert await wait.effect_of("ready", resume_delay_ms=5_000) == SATISFIED
    row = await rows.execution(wait.execution_id)
    assert vector(row) == RESUME_DELAYED
    assert row["delay_until"] == now + 5_000
    assert await rows.timers(wait.execution_id) == {"delay": now + 5_000}
    assert row["blocking_detail"] == "resume delay 5000ms after signal ready"
    worker = {"worker_id": "worker", "worker_instance_id": "worker-1", "lane_id": "default"}
    arguments: dict[str, Any] = {"execution_id": wait.execution_id, **worker}
    async with rows.unchanged():
        assert await claim(engine) == []
        await refused(engine.claim_resumed_execution(**arguments), "execution_not_leaseable")
    await clock.advance(ms=5_000)
    await Reconciler(engine).catch_up()
    assert vector(await rows.execution(wait.execution_id)) == RESUMABLE
    claimed = await engine.claim_resumed_execution(**arguments)
    assert claimed.attempt_id == wait.handle.attempt_id


async def test_the_resume_delay_of_the_policy_applies_if_the_signal_has_none(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    for of_signal, delay_ms in ((None, 60_000), (0, None)):
        wait = await waiting(engine, given, resume_policy=ResumePolicy(resume_delay_ms=60_000))
        now = await clock.now()
        await wait.send("ready", resume_delay_ms=of_signal)
        row = await rows.execution(wait.execution_id)
        assert row["delay_until"] == (None if delay_ms is None else now + delay_ms)


async def test_a_pending_waitpoint_buffers_signals_without_evaluating_them(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await running(engine, given)
    now = await clock.advance(seconds=1)
    async with rows.unchanged(without=["signal", "waitpoint", "event"]):
        assert await wait.effect_of("ready", payload=b"early") == BUFFERED
    (row,) = await signals(rows, wait.execution_id)
    assert (row["suspension_id"], row["effect"], row["disposition"]) == (None, BUFFERED, BUFFERED)
    point = await waitpoint(rows, wait.points["wait"].waitpoint_id)
    assert (point["state"], point["signal_count"], point["matched_signal_count"]) == ("pending", 1, 0)
    assert point["last_signal_at"] == now

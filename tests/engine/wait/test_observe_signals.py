"""The signals that a run reads: those of its suspension, buffered ones included."""

from typing import Any
from uuid import UUID, uuid4

from engine.sending import Waiting, running, waiting
from engine.state import claim, refused, vector
from engine.waits import SUSPENDED, fresh, on_all, suspend_args, suspend_run, using
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import (
    AllOf,
    ByName,
    Count,
    CountKind,
    Single,
)
from flowfabric.model.lease import AlreadySatisfied
from flowfabric.reconcile.loop import Reconciler

APPENDED = "appended_to_waitpoint"
SATISFIED = "resume_condition_satisfied"
BUFFERED = "buffered_for_pending_waitpoint"


async def test_a_suspend_whose_signal_was_buffered_is_already_satisfied(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await running(engine, given)
    early = await wait.send("ready", payload=b"early")
    pending = await engine.read_waitpoint_token(
        execution_id=wait.execution_id, waitpoint_id=wait.points["wait"].waitpoint_id
    )
    assert pending is not None
    bound = {"waitpoint_id": wait.points["wait"].waitpoint_id}
    outcome = await engine.suspend(wait.handle, suspend_args(waitpoints=({"UsePending": bound},)))
    assert isinstance(outcome, AlreadySatisfied)
    (seen,) = await engine.observe_signals(wait.handle)
    assert (seen.signal_id, seen.payload, seen.satisfier) == (early.signal_id, b"early", True)
    await refused(wait.send("ready"), "waitpoint_closed")
    await engine.complete(wait.handle, b"done")
    assert [row["outcome"] for row in await rows.events(wait.execution_id) if row["outcome"]] == [1]


async def test_buffered_signals_count_together_with_later_ones(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    pending = await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=60_000)
    wait = Waiting(engine, handle).with_pending("wait", pending)
    await wait.send("x", source_identity="ana")
    condition = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("wait",))
    outcome = await suspend_run(engine, handle, using(pending, resume_condition=condition))
    assert await wait.effect_of("x", source_identity="ana") == f"{APPENDED} appended_to_waitpoint_duplicate"
    assert await wait.effect_of("x", source_identity="bob") == SATISFIED
    seen = await engine.observe_signals(outcome.handle)
    assert [(one.source_identity, one.satisfier) for one in seen] == [("ana", True), ("ana", False), ("bob", True)]


async def test_a_suspended_execution_buffers_signals_for_a_pending_waitpoint(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await running(engine, given)
    outcome = await suspend_run(engine, wait.handle, on_all("a", "b"))
    wait.on(outcome.details)
    assert await wait.effect_of("ready") == BUFFERED
    assert vector(await rows.execution(wait.execution_id)) == SUSPENDED
    assert await engine.observe_signals(outcome.handle) == []


async def test_a_run_reads_every_signal_of_its_suspension_before_and_after_the_resume(
    engine: Engine, given: Given, clock: Clock
) -> None:
    condition = AllOf(tuple(Single(waitpoint_key=key, matcher=ByName("ready")) for key in ("a", "b")))
    request = suspend_args(waitpoints=(fresh("a"), fresh("b")), resume_condition=condition)
    wait = await waiting(engine, given, request)
    now = await clock.advance(seconds=1)
    for name, key in (("first", "b"), ("ready", "b"), ("second", "a")):
        await wait.send(name, key, payload=name.encode(), correlation_id=name if key == "a" else None)
    before = await engine.observe_signals(wait.handle)
    last = await wait.send("ready", "a")
    after = await engine.observe_signals(wait.handle)
    assert after[:3] == before
    assert [(one.signal_name, one.payload, one.satisfier) for one in after] == [
        ("first", b"first", False),
        ("ready", b"ready", True),
        ("second", b"second", False),
        ("ready", None, True),
    ]
    assert [one.correlation_id for one in after] == ["", "", "second", ""]
    assert (after[3].signal_id, after[3].disposition, after[3].accepted_at) == (last.signal_id, SATISFIED, now)
    (resumed,) = await claim(engine)
    assert await engine.observe_signals(resumed.handle) == after


async def test_signals_of_one_suspension_do_not_count_for_the_next(engine: Engine, given: Given) -> None:
    wait = await waiting(engine, given, on_all("a", "b"))
    await wait.send("x", "a")
    await wait.send("x", "b")
    (resumed,) = await claim(engine)
    again = await suspend_run(engine, resumed.handle, on_all("a", "b"))
    assert await engine.observe_signals(again.handle) == []
    second = Waiting(engine, again.handle).on(again.details)
    assert await second.effect_of("x", "a") == APPENDED
    await refused(wait.send("x", "b"), "waitpoint_closed")
    assert await second.effect_of("x", "b") == SATISFIED


async def test_an_attempt_that_never_suspended_reads_no_signal(engine: Engine, given: Given) -> None:
    assert await engine.observe_signals(await given.claimed()) == []


async def test_a_retry_does_not_read_the_signals_of_the_previous_attempt(
    engine: Engine, given: Given, clock: Clock
) -> None:
    policy = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1}}}
    wait = await waiting(engine, given, policy=policy)
    await wait.send("ready")
    (resumed,) = await claim(engine)
    await engine.fail(resumed.handle, reason="no luck")
    await clock.advance(seconds=1)
    await Reconciler(engine).catch_up()
    (retried,) = await claim(engine)
    assert await engine.observe_signals(retried.handle) == []
    assert len(await engine.observe_signals(resumed.handle)) == 1


async def test_the_signals_of_an_earlier_suspension_are_read_by_its_id(
    engine: Engine, given: Given, clock: Clock
) -> None:
    async def read(suspension_id: UUID) -> list[Any]:
        return await engine.observe_signals(handle, suspension_id=suspension_id)

    handle = await given.claimed()
    by_signals = await suspend_run(engine, handle, on_all("a", "b"))
    wait = Waiting(engine, by_signals.handle).on(by_signals.details)
    for name, key in (("one", "a"), ("again", "a"), ("two", "b")):
        await wait.send(name, key)
    seen = {by_signals.details.suspension_id: await engine.observe_signals(handle)}
    (resumed,) = await claim(engine)
    deadline = await clock.now() + 1
    by_deadline = await suspend_run(
        engine, resumed.handle, on_all("a", timeout_at=deadline, timeout_behavior="auto_resume")
    )
    await clock.advance(ms=1)
    await engine.expire_suspension(wait.execution_id)
    seen[by_deadline.details.suspension_id] = await engine.observe_signals(handle)
    (resumed,) = await claim(engine)
    by_operator = await suspend_run(engine, resumed.handle, on_all("a", "b"))
    await wait.on(by_operator.details).send("half", "a")
    await engine.resume_execution(execution_id=wait.execution_id)
    seen[by_operator.details.suspension_id] = await engine.observe_signals(handle)
    (resumed,) = await claim(engine)
    latest = await suspend_run(engine, resumed.handle)
    await wait.on(latest.details).send("other")
    seen[latest.details.suspension_id] = await engine.observe_signals(handle)
    assert {suspension_id: await read(suspension_id) for suspension_id in seen} == seen
    assert [[(one.signal_name, one.satisfier) for one in each] for each in seen.values()] == [
        [("one", True), ("again", False), ("two", True)],
        [("timeout", True)],
        [("half", False)],
        [("other", False)],
    ]
    assert await read(uuid4()) == []

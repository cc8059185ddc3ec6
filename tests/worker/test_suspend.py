"""Handlers that wait for signals: they end, hold nothing, and run again from their start."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.condition import ByName, Single, all_of_waitpoints
from flowfabric.model.errors import InvalidInputError, TransportError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, SuspensionId, WaitpointId
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.suspension import SuspendArgs, SuspensionReason
from flowfabric.model.waitpoint import Fresh, UsePending
from flowfabric.worker.context import Context
from flowfabric.worker.worker import Worker

from .waits import signal

READY = Single(waitpoint_key="answer", matcher=ByName("ready"))


async def wait_for_answer(ctx: Context) -> list[Any]:
    """Wait once; the second run tells what it was resumed by."""
    if not ctx.resumed_signals():
        await ctx.suspend(condition=READY)
    return [
        [[one.signal_name, (one.payload or b"").decode(), one.satisfier] for one in ctx.resumed_signals()],
        ctx.attempt_index,
        ctx.is_resumed,
    ]


async def test_a_handler_that_suspends_runs_again_with_the_signals(
    engine: Engine, start_worker: Any, submit: Any, attempts: Any, is_suspended: Any, eventually: Any
) -> None:
    worker = await start_worker({"job": wait_for_answer})
    run = await submit()
    await is_suspended(run)
    await eventually(lambda: worker.running == 0)
    await signal(engine, run, "other", payload=b"1")
    await signal(engine, run, "ready", payload=b"2")
    ended = await engine.wait_for_ending(run, timeout=60)
    assert (ended.outcome, ended.result) == (
        TerminalOutcome.SUCCESS,
        b'[[["other","1",false],["ready","2",true]],0,true]',
    )
    (attempt,) = await attempts(run)
    assert attempt["attempt_state"] == "ended_success"


async def test_a_suspended_run_holds_no_slot_and_no_lease(
    engine: Engine, start_worker: Any, submit: Any, rows: Any, is_suspended: Any
) -> None:
    worker = await start_worker({"job": wait_for_answer}, concurrency=1)
    runs = [await submit() for _ in range(5)]
    for run in runs:
        await is_suspended(run)
    assert await rows.of("execution", ownership_state="leased") == []
    for run in runs:
        await signal(engine, run)
        await engine.wait_for_ending(run, timeout=60)
    assert worker.running == 0


async def test_a_handler_cannot_catch_its_end_by_the_way(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any
) -> None:
    cleaned: list[str] = []

    async def careless(ctx: Context) -> str:
        if not ctx.resumed_signals():
            try:
                await ctx.suspend(condition=READY)
            except Exception:
                return "swallowed"
            finally:
                cleaned.append("up")
        return "resumed"

    await start_worker({"job": careless})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"resumed"'
    assert cleaned == ["up"]


async def test_what_a_suspended_handler_returns_is_not_written(
    engine: Engine, start_worker: Any, submit: Any, eventually: Any, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    returned = asyncio.Event()

    async def stubborn(ctx: Context) -> str:
        if ctx.resumed_signals():
            return "resumed"
        with contextlib.suppress(BaseException):
            await ctx.suspend(condition=READY)
        assert not ctx.is_lease_healthy()
        returned.set()
        return "swallowed"

    worker = await start_worker({"job": stubborn})
    run = await submit()
    await returned.wait()
    await eventually(lambda: worker.running == 0)
    async with rows.unchanged(without=["worker"]):
        assert await engine.read_execution_state(run) == "suspended"
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"resumed"'
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_the_lease_of_a_suspended_run_is_neither_renewed_nor_missed(
    engine: Engine,
    start_worker: Any,
    submit: Any,
    clock: Any,
    eventually: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await clock.stop()
    renew_many = Engine.renew_many
    asked: list[set[ExecutionId]] = []

    async def noting(engine: Engine, handles: Sequence[Handle]) -> Any:
        asked.append({handle.execution_id for handle in handles})
        return await renew_many(engine, handles)

    monkeypatch.setattr(Engine, "renew_many", noting)
    leaving, may_leave, is_over = (asyncio.Event() for _ in range(3))

    async def slow_to_leave(ctx: Context) -> str:
        if not ctx.resumed_signals():
            try:
                await ctx.suspend(condition=READY)
            finally:
                leaving.set()
                await may_leave.wait()
        return "resumed"

    await start_worker({"job": slow_to_leave, "steady": is_over.wait}, lease_ttl=3)
    steady, run = await submit(kind="steady"), await submit()
    await asyncio.wait_for(leaving.wait(), 60)

    # One more may have been on its way. Then longer than the lease would have lasted: each renewal of the other run
    # comes after a third of that.
    before = len(asked) + 1
    await eventually(lambda: len(asked) >= before + 4)
    assert set().union(*asked[before:]) == {steady}
    may_leave.set()
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    is_over.set()
    assert (await engine.wait_for_ending(steady, timeout=60)).outcome is TerminalOutcome.SUCCESS
    # What a heartbeat says on a busy machine is no news of this run.
    heard = [record for record in caplog.records if record.name != "flowfabric.worker.heartbeat"]
    assert [record.getMessage() for record in heard if record.levelno >= logging.WARNING] == []


async def test_a_plain_function_suspends_from_its_thread(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any
) -> None:
    def wait(ctx: Context) -> str:
        if not ctx.resumed_signals():
            try:
                ctx.from_thread(ctx.suspend(keys=["answer"]))
            except Exception:
                return "swallowed"
        return "resumed"

    await start_worker({"job": wait})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"resumed"'


async def test_a_handler_goes_on_when_the_signal_came_before_the_wait(
    engine: Engine, start_worker: Any, submit: Any
) -> None:
    async def early(ctx: Context) -> list[str]:
        point = await ctx.create_waitpoint("answer", expires_in=60)
        await engine.deliver_signal(
            execution_id=ctx.execution_id,
            waitpoint_id=point.waitpoint_id,
            waitpoint_token=point.hmac_token,
            signal_name="ready",
        )
        details = await ctx.suspend(condition=READY, waitpoints=[point])
        assert details.waitpoint_id == point.waitpoint_id
        assert ctx.is_lease_healthy()
        assert not ctx.is_resumed
        assert list(ctx.resumed_signals()) == await ctx.observe_signals()
        return [one.signal_name for one in ctx.resumed_signals()]

    await start_worker({"job": early})
    ended = await engine.wait_for_ending(await submit(), timeout=60)
    assert ended.result == b'["ready"]'


async def test_a_wait_under_a_key_that_is_over_is_not_repeated(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any
) -> None:
    runs = 0

    async def keyed(ctx: Context) -> list[str]:
        nonlocal runs
        runs += 1
        await ctx.suspend(condition=READY, idempotency_key="the-answer")
        return [one.signal_name for one in await ctx.observe_signals()]

    await start_worker({"job": keyed})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'["ready"]'
    assert runs == 2


async def test_a_new_attempt_waits_anew_under_the_same_key(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any
) -> None:
    async def keyed(ctx: Context) -> list[Any]:
        await ctx.suspend(condition=READY, idempotency_key="the-answer")
        if ctx.attempt_index == 0:
            raise ValueError("try again")
        return [ctx.attempt_index, [(one.payload or b"").decode() for one in ctx.resumed_signals()]]

    await start_worker({"job": keyed})
    run = await submit(policy={"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}})
    for payload in (b"first", b"second"):
        await is_suspended(run)
        await signal(engine, run, payload=payload)
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'[1,["second"]]'


async def test_a_key_of_an_earlier_attempt_is_refused(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any
) -> None:
    async def keyed(ctx: Context) -> None:
        await ctx.suspend(
            SuspendArgs(
                suspension_id=SuspensionId(uuid4()),
                waitpoints=(Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key="answer"),),
                resume_condition=READY,
                reason_code=SuspensionReason.WAITING_FOR_SIGNAL,
                idempotency_key="the-answer",
            )
        )
        raise ValueError("try again")

    await start_worker({"job": keyed})
    run = await submit(policy={"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}})
    await is_suspended(run)
    await signal(engine, run)
    ended = await engine.wait_for_ending(run, timeout=60)
    assert "idempotency_key: an earlier attempt has waited under it" in (ended.reason or "")


async def test_a_wait_that_an_earlier_attempt_need_not_begin_is_not_over_for_the_next(
    engine: Engine, start_worker: Any, submit: Any
) -> None:
    went_on = []

    async def early(ctx: Context) -> None:
        point = await ctx.create_waitpoint("answer", expires_in=60)
        if ctx.attempt_index == 0:
            await engine.deliver_signal(
                execution_id=ctx.execution_id,
                waitpoint_id=point.waitpoint_id,
                waitpoint_token=point.hmac_token,
                signal_name="ready",
            )
        for _ in range(2):
            # A repeat within the attempt is told the same.
            await ctx.suspend(
                SuspendArgs(
                    suspension_id=SuspensionId(uuid4()),
                    waitpoints=(UsePending(waitpoint_id=point.waitpoint_id),),
                    resume_condition=READY,
                    reason_code=SuspensionReason.WAITING_FOR_SIGNAL,
                    idempotency_key="the-answer",
                )
            )
            went_on.append(ctx.attempt_index)
        raise ValueError("try again")

    await start_worker({"job": early})
    run = await submit(policy={"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}})
    ended = await engine.wait_for_ending(run, timeout=60)
    assert "idempotency_key: an earlier attempt has waited under it" in (ended.reason or "")
    assert went_on == [0, 0]


async def test_a_wait_whose_keys_or_depth_are_refused_leaves_the_run_its_lease(
    engine: Engine, start_worker: Any, submit: Any
) -> None:
    deep: Any = "OperatorOnly"
    for _ in range(5_000):
        deep = {"Composite": {"kind": "AllOf", "members": [deep]}}

    async def wrong(ctx: Context) -> list[str]:
        point = await ctx.create_waitpoint("answer", expires_in=60)
        pending = [UsePending(waitpoint_id=point.waitpoint_id)]
        told = []
        for condition, bindings in (
            (all_of_waitpoints(("answer", "other")), pending),
            (Single(waitpoint_key="other"), pending),
            (deep, pending),
            (deep, []),
        ):
            try:
                await ctx.suspend(condition=condition, waitpoints=bindings)
            except InvalidInputError as refused:
                told.append(str(refused.detail))
        return told

    await start_worker({"job": wrong})
    run = await submit()
    ended = await engine.wait_for_ending(run, timeout=60)
    too_deep = "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]"
    missing = "referenced_waitpoint_key_missing_binding: other"
    assert json.loads(ended.result or b"") == [missing, missing, too_deep, too_deep]


async def test_an_operators_resume_brings_no_signal(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any
) -> None:
    async def stop(ctx: Context) -> list[str]:
        if not ctx.is_resumed:
            await ctx.suspend(condition="OperatorOnly", reason_code="manual_pause")
        return [one.signal_name for one in ctx.resumed_signals()]

    await start_worker({"job": stop})
    run = await submit()
    await is_suspended(run)
    await engine.resume_execution(execution_id=run, trigger_type="operator")
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"[]"


async def test_a_wait_may_end_by_itself(engine: Engine, start_worker: Any, submit: Any) -> None:
    async def impatient(ctx: Context) -> list[str]:
        if not ctx.resumed_signals():
            await ctx.suspend(
                keys=["a", "b"], timeout=0.05, timeout_behavior="auto_resume", reason_code="waiting_for_callback"
            )
        return [one.signal_name for one in ctx.resumed_signals()]

    await start_worker({"job": impatient})
    ended = await engine.wait_for_ending(await submit(), timeout=60)
    assert ended.result == b'["timeout"]'


async def test_a_suspend_whose_answer_is_lost_still_ends_the_run(
    engine: Engine,
    start_worker: Any,
    submit: Any,
    is_suspended: Any,
    eventually: Any,
    lose_an_answer: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = await start_worker({"job": wait_for_answer})
    run = await submit()
    await is_suspended(run)
    await eventually(lambda: worker.running == 0)
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_resumed_handler_does_not_begin_before_its_signals_are_known(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe, faults = engine.observe_signals, iter([TransportError(), TransportError()])

    async def fails_at_first(*arguments: Any, **named: Any) -> Any:
        if fault := next(faults, None):
            raise fault
        return await observe(*arguments, **named)

    monkeypatch.setattr(engine, "observe_signals", fails_at_first)
    await start_worker({"job": wait_for_answer})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run)
    ended = await engine.wait_for_ending(run, timeout=60)
    assert ended.result == b'[[["ready","",true]],0,true]'


async def test_a_worker_without_a_key_to_sign_with_fails_the_handler(
    engine: Engine, start_worker: Any, submit: Any, connection: Any
) -> None:
    # No operation removes a key: this is a store that never had one.
    await connection.execute("delete from signing_key")
    await start_worker({"job": wait_for_answer})
    ended = await engine.wait_for_ending(await submit(), timeout=60)
    assert ended.outcome is TerminalOutcome.FAILED
    assert "hmac_secret_not_initialized" in (ended.reason or "")


async def test_another_worker_goes_on_with_the_attempt(engine: Engine, submit: Any, is_suspended: Any) -> None:
    def worker(name: str) -> Worker:
        return Worker(
            engine, lanes=["default"], namespace="tests", handlers={"job": wait_for_answer}, worker_instance_id=name
        )

    run = await submit()
    async with worker("first"):
        await is_suspended(run)
    await signal(engine, run)
    async with worker("second"):
        ended = await engine.wait_for_ending(run, timeout=60)
    assert ended.result == b'[[["ready","",true]],0,true]'
    (attempt,) = await engine.list_attempts(run)
    assert (attempt.worker_instance_id, attempt.attempt_index) == ("second", 0)


async def test_many_waits_end_each_with_its_own_signal(engine: Engine, start_worker: Any, submit: Any) -> None:
    waiting: asyncio.Queue[tuple[Context, Any]] = asyncio.Queue()

    async def ask(ctx: Context, nth: int) -> list[Any]:
        if not ctx.is_resumed:
            point = await ctx.create_waitpoint("answer", expires_in=60)
            waiting.put_nowait((ctx, point))
            await ctx.suspend(condition=READY, waitpoints=[point])
        (answer,) = ctx.resumed_signals()
        return [nth, (answer.payload or b"").decode()]

    for _ in range(2):
        await start_worker({"job": ask}, concurrency=8)
    runs = {await submit(nth=nth): nth for nth in range(100)}

    async def answer() -> None:
        # Some come before the wait has begun and some after it.
        ctx, point = await waiting.get()
        await engine.deliver_signal(
            execution_id=ctx.execution_id,
            waitpoint_id=point.waitpoint_id,
            waitpoint_token=point.hmac_token,
            signal_name="ready",
            payload=b"%d" % runs[ctx.execution_id],
        )

    await asyncio.gather(*(answer() for _ in runs))
    for run, nth in runs.items():
        ended = await engine.wait_for_ending(run, timeout=30)
        assert ended.result == b'[%d,"%d"]' % (nth, nth)
        assert len(await engine.list_attempts(run)) == 1
    assert await engine.find_inconsistencies() == []

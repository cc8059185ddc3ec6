"""Handlers that suspend: they end, hold nothing while they wait, and run again from their start."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from fixtures import Attempts, Eventually, IsSuspended, Rows, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import ByName, Single, all_of_waitpoints
from flowfabric.model.errors import EngineError, InvalidInputError, TransportError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, SuspensionId, WaitpointId
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.suspend_outcome import SuspendOutcome
from flowfabric.model.suspension import SuspendArgs, SuspensionReason
from flowfabric.model.waitpoint import Binding, Fresh, PendingWaitpoint, UsePending
from flowfabric.worker.context import Context
from flowfabric.worker.heartbeat import Heartbeat
from flowfabric.worker.worker import Worker

from .waits import signal

READY = Single(waitpoint_key="answer", matcher=ByName("ready"))
RETRIED = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}
MANY = 100 if os.environ.get("FF_TEST_SWEEP") == "whole" else 20


async def wait_for_answer(ctx: Context) -> list[Any]:
    """Wait once; the second run returns what it was resumed by."""
    if not ctx.resumed_signals():
        await ctx.suspend(condition=READY)
    return [
        [[one.signal_name, (one.payload or b"").decode(), one.satisfier] for one in ctx.resumed_signals()],
        ctx.attempt_index,
        ctx.is_resumed,
    ]


async def catch_exceptions(ctx: Context) -> str:
    if not ctx.resumed_signals():
        try:
            await ctx.suspend(condition=READY)
        except Exception:
            return "swallowed"
    return "resumed"


async def return_after_suspend(ctx: Context) -> str:
    if ctx.resumed_signals():
        return "resumed"
    with contextlib.suppress(BaseException):
        await ctx.suspend(condition=READY)
    assert not ctx.is_lease_healthy()
    return "swallowed"


def wait_in_a_thread(ctx: Context) -> str:
    if not ctx.resumed_signals():
        try:
            ctx.from_thread(ctx.suspend(keys=["answer"]))
        except Exception:
            return "swallowed"
    return "resumed"


async def wait_under_a_key(ctx: Context) -> list[str]:
    await ctx.suspend(condition=READY, idempotency_key="the-answer")
    return [one.signal_name for one in await ctx.observe_signals()]


async def wait_for_an_operator(ctx: Context) -> list[str]:
    if not ctx.is_resumed:
        await ctx.suspend(condition="OperatorOnly", reason_code="manual_pause")
    return [one.signal_name for one in ctx.resumed_signals()]


RESUMED: dict[Any, Any] = {
    wait_for_answer: [[["other", "1", False], ["ready", "2", True]], 0, True],
    catch_exceptions: "resumed",
    return_after_suspend: "resumed",
    wait_in_a_thread: "resumed",
    wait_under_a_key: ["other", "ready"],
    wait_for_an_operator: [],
}
"""The result of each handler after its signals, or after an operator has resumed it."""


async def test_a_suspended_handler_holds_nothing_and_runs_again_with_its_signals(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    attempts: Attempts,
    rows: Rows,
    is_suspended: IsSuspended,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # One slot: a handler that held it while it waits would keep the others from their start.
    worker = await start_worker({handler.__name__: handler for handler in RESUMED}, concurrency=1, reconcile=False)
    runs = {handler: await submit(kind=handler.__name__) for handler in RESUMED}
    for run in runs.values():
        await is_suspended(run)
    await eventually(lambda: worker.running == 0)
    assert await rows.of("execution", ownership_state="leased") == []
    for handler, run in runs.items():
        if handler is wait_for_an_operator:
            await engine.resume_execution(execution_id=run, trigger_type="operator")
            continue
        if handler is not wait_in_a_thread:
            await signal(engine, run, "other", payload=b"1")
        await signal(engine, run, "ready", payload=b"2")
    ended = {handler: await engine.wait_for_ending(run, timeout=60) for handler, run in runs.items()}
    results = {handler: json.loads(one.result or b"null") for handler, one in ended.items()}
    assert results == RESUMED
    assert {len(await attempts(run)) for run in runs.values()} == {1}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class Renewals:
    """Has a worker renew its leases at once, and records which ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, eventually: Eventually) -> None:
        monkeypatch.setattr(Heartbeat, "CHECK_SECONDS", 0.0)
        monkeypatch.setattr(Engine, "renew_many", self._recording(Engine.renew_many))
        self.of: list[set[ExecutionId]] = []
        """The executions whose leases each call has renewed."""
        self._eventually = eventually

    def _recording(self, renew_many: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def recording(engine: Engine, handles: Sequence[Handle]) -> Any:
            self.of.append({handle.execution_id for handle in handles})
            return await renew_many(engine, handles)

        return recording

    async def renew_all(self, worker: Worker) -> None:
        """Renew every lease of the worker, and wait until it has recorded the answer."""
        beat = worker._heartbeat
        assert beat is not None
        beat.check_all()
        await self._eventually(lambda: beat._checks_done == beat._checks_wanted)


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch, eventually: Eventually) -> Renewals:
    """The renewals of the leases of a worker."""
    return Renewals(monkeypatch, eventually)


async def test_the_lease_of_a_suspended_run_is_neither_renewed_nor_missed(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    renewals: Renewals,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suspend = engine.suspend
    leaving, may_leave, is_over = (asyncio.Event() for _ in range(3))
    contexts: list[Context] = []

    async def suspend_and_renew(handle: Handle, args: SuspendArgs) -> SuspendOutcome:
        outcome = await suspend(handle, args)
        await renewals.renew_all(worker)
        return outcome

    async def slow_to_leave(ctx: Context) -> str:
        contexts.append(ctx)
        if not ctx.resumed_signals():
            try:
                await ctx.suspend(condition=READY)
            finally:
                leaving.set()
                await may_leave.wait()
        return "resumed"

    monkeypatch.setattr(engine, "suspend", suspend_and_renew)
    worker = await start_worker({"job": slow_to_leave, "steady": is_over.wait}, reconcile=False)
    steady, run = await submit(kind="steady"), await submit()
    await asyncio.wait_for(leaving.wait(), 60)
    # A renewal between the suspend and its answer finds the lease ended.
    assert renewals.of[-1] >= {run}
    renewals.of.clear()
    # Longer ago than the lease would have lasted.
    contexts[0]._running.renewed_at -= 3600
    for _ in range(2):
        await renewals.renew_all(worker)
    assert renewals.of == [{steady}, {steady}]
    assert contexts[0]._running.lost is None
    may_leave.set()
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    is_over.set()
    assert (await engine.wait_for_ending(steady, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_run_that_continues_after_its_suspend_was_refused_is_stopped_if_its_lease_is_lost(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    renewals: Renewals,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suspend, refused, is_stopped = engine.suspend, asyncio.Event(), asyncio.Event()

    async def suspend_after_a_loss(handle: Handle, args: SuspendArgs) -> SuspendOutcome:
        await engine.cancel_execution(execution_id=handle.execution_id, reason="not wanted")
        await renewals.renew_all(worker)
        return await suspend(handle, args)

    async def go_on(ctx: Context) -> None:
        try:
            await ctx.suspend(condition=READY)
        except EngineError:
            refused.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_stopped.set()

    monkeypatch.setattr(engine, "suspend", suspend_after_a_loss)
    worker = await start_worker({"job": go_on}, reconcile=False)
    await submit()
    await asyncio.wait_for(refused.wait(), 60)
    await renewals.renew_all(worker)
    await asyncio.wait_for(is_stopped.wait(), 60)


async def deliver(engine: Engine, ctx: Context, point: PendingWaitpoint, payload: bytes | None = None) -> None:
    await engine.deliver_signal(
        execution_id=ctx.execution_id,
        waitpoint_id=point.waitpoint_id,
        waitpoint_token=point.hmac_token,
        signal_name="ready",
        payload=payload,
    )


async def test_a_wait_returns_at_once_if_its_signal_came_before_and_a_refused_wait_keeps_the_lease(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    deep: Any = "OperatorOnly"
    for _ in range(5_000):
        deep = {"Composite": {"kind": "AllOf", "members": [deep]}}

    async def signalled_before(ctx: Context) -> list[str]:
        point = await ctx.create_waitpoint("answer", expires_in=60)
        await deliver(engine, ctx, point)
        details = await ctx.suspend(condition=READY, waitpoints=[point])
        assert details.waitpoint_id == point.waitpoint_id
        assert ctx.is_lease_healthy()
        assert not ctx.is_resumed
        assert list(ctx.resumed_signals()) == await ctx.observe_signals()
        return [one.signal_name for one in ctx.resumed_signals()]

    async def refused(ctx: Context) -> list[str]:
        point = await ctx.create_waitpoint("answer", expires_in=60)
        pending = [UsePending(waitpoint_id=point.waitpoint_id)]
        errors = []
        for condition, bindings in (
            (all_of_waitpoints(("answer", "other")), pending),
            (Single(waitpoint_key="other"), pending),
            (deep, pending),
            (deep, []),
        ):
            try:
                await ctx.suspend(condition=condition, waitpoints=bindings)
            except InvalidInputError as error:
                errors.append(str(error.detail))
        return errors

    async def impatient(ctx: Context) -> list[str]:
        if not ctx.resumed_signals():
            await ctx.suspend(
                keys=["a", "b"], timeout=0.05, timeout_behavior="auto_resume", reason_code="waiting_for_callback"
            )
        return [one.signal_name for one in ctx.resumed_signals()]

    too_deep = (
        "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]; "
        "nest AllOf and Count at most 4 levels deep"
    )
    missing = "referenced_waitpoint_key_missing_binding: other"
    expected = {
        signalled_before: ["ready"],
        refused: [missing, missing, too_deep, too_deep],
        impatient: ["timeout"],
    }
    await start_worker({handler.__name__: handler for handler in expected})
    runs = {handler: await submit(kind=handler.__name__) for handler in expected}
    ended = {handler: await engine.wait_for_ending(run, timeout=60) for handler, run in runs.items()}
    for handler, texts in expected.items():
        answers = json.loads(ended[handler].result or b"null")
        assert len(answers) == len(texts)
        assert all(answer.startswith(text) for answer, text in zip(answers, texts, strict=True))


def raw_args(binding: Binding) -> SuspendArgs:
    """The arguments of a wait whose idempotency key is not scoped to the attempt."""
    return SuspendArgs(
        suspension_id=SuspensionId(uuid4()),
        waitpoints=(binding,),
        resume_condition=READY,
        reason_code=SuspensionReason.WAITING_FOR_SIGNAL,
        idempotency_key="the-answer",
    )


async def test_a_new_attempt_waits_again_and_does_not_get_the_signals_of_an_earlier_one(
    engine: Engine, start_worker: StartWorker, submit: Submit, is_suspended: IsSuspended
) -> None:
    returned: list[int] = []

    async def keyed(ctx: Context) -> list[Any]:
        await ctx.suspend(condition=READY, idempotency_key="the-answer")
        if ctx.attempt_index == 0:
            raise ValueError("try again")
        return [ctx.attempt_index, [(one.payload or b"").decode() for one in ctx.resumed_signals()]]

    async def raw(ctx: Context) -> None:
        await ctx.suspend(raw_args(Fresh(waitpoint_id=WaitpointId(uuid4()), waitpoint_key="answer")))
        raise ValueError("try again")

    async def raw_and_signalled_before(ctx: Context) -> None:
        point = await ctx.create_waitpoint("answer", expires_in=60)
        if ctx.attempt_index == 0:
            await deliver(engine, ctx, point)
        for _ in range(2):
            # A repeat within the attempt returns the same.
            await ctx.suspend(raw_args(UsePending(waitpoint_id=point.waitpoint_id)))
            returned.append(ctx.attempt_index)
        raise ValueError("try again")

    handlers = (keyed, raw, raw_and_signalled_before)
    await start_worker({handler.__name__: handler for handler in handlers})
    runs = [await submit(kind=handler.__name__, policy=RETRIED) for handler in handlers]
    for run, payload in ((runs[0], b"first"), (runs[1], b"first"), (runs[0], b"second")):
        await is_suspended(run)
        await signal(engine, run, payload=payload)
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs]
    assert ended[0].result == b'[1,["second"]]'
    for one in ended[1:]:
        assert "idempotency_key: an earlier attempt has waited under it" in (one.reason or "")
    assert returned == [0, 0]


async def test_a_lost_answer_to_a_suspend_and_unread_signals_do_not_fail_the_run(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    is_suspended: IsSuspended,
    eventually: Eventually,
    lose_answers: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observe, faults = engine.observe_signals, iter([TransportError(), TransportError()])

    async def fails_at_first(*arguments: Any, **named: Any) -> Any:
        if fault := next(faults, None):
            raise fault
        return await observe(*arguments, **named)

    monkeypatch.setattr(engine, "observe_signals", fails_at_first)
    worker = await start_worker({"job": wait_for_answer})
    run = await submit()
    await is_suspended(run)
    await eventually(lambda: worker.running == 0)
    await signal(engine, run)
    ended = await engine.wait_for_ending(run, timeout=60)
    assert ended.result == b'[[["ready","",true]],0,true]'
    assert next(faults, None) is None
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_store_without_a_signing_key_fails_the_handler(
    engine: Engine, start_worker: StartWorker, submit: Submit, connection: asyncpg.Connection
) -> None:
    # No operation removes a key: this is a store that never had one.
    await connection.execute("delete from signing_key")
    await start_worker({"job": wait_for_answer}, reconcile=False)
    ended = await engine.wait_for_ending(await submit(), timeout=60)
    assert ended.outcome is TerminalOutcome.FAILED
    assert "hmac_secret_not_initialized" in (ended.reason or "")


async def test_another_worker_continues_the_attempt(engine: Engine, submit: Submit, is_suspended: IsSuspended) -> None:
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


async def test_many_waits_end_each_with_its_own_signal(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    waiting: asyncio.Queue[tuple[Context, PendingWaitpoint]] = asyncio.Queue()

    async def ask(ctx: Context, nth: int) -> list[Any]:
        if not ctx.is_resumed:
            point = await ctx.create_waitpoint("answer", expires_in=60)
            waiting.put_nowait((ctx, point))
            await ctx.suspend(condition=READY, waitpoints=[point])
        (answer,) = ctx.resumed_signals()
        return [nth, (answer.payload or b"").decode()]

    for _ in range(2):
        await start_worker({"job": ask}, concurrency=8)
    runs = {await submit(nth=nth): nth for nth in range(MANY)}

    async def answer() -> None:
        # Some signals arrive before the wait has begun and some after it.
        ctx, point = await waiting.get()
        await deliver(engine, ctx, point, b"%d" % runs[ctx.execution_id])

    await asyncio.gather(*(answer() for _ in runs))
    for run, nth in runs.items():
        ended = await engine.wait_for_ending(run, timeout=30)
        assert ended.result == b'[%d,"%d"]' % (nth, nth)
        assert len(await engine.list_attempts(run)) == 1
    assert await engine.find_inconsistencies() == []

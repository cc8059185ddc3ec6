"""A handler that runs again passes its earlier waits again: each returns the signals of its own wait."""

import json
from typing import Any

import pytest

from fixtures import IsSuspended, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import Single
from flowfabric.model.errors import TransportError
from flowfabric.worker.context import Context

from .waits import signal


async def test_a_repeated_wait_returns_the_signals_of_its_own_wait(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    is_suspended: IsSuspended,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observe, faults = engine.observe_signals, iter([TransportError()])

    async def fails_for_a_named_wait(*arguments: Any, suspension_id: Any) -> Any:
        if suspension_id is not None and (fault := next(faults, None)):
            raise fault
        return await observe(*arguments, suspension_id=suspension_id)

    monkeypatch.setattr(engine, "observe_signals", fails_for_a_named_wait)
    seen_by_runs: list[list[str]] = []

    def names(ctx: Context) -> list[str]:
        return [one.signal_name for one in ctx.resumed_signals()]

    async def thrice(ctx: Context) -> None:
        seen = names(ctx)
        seen_by_runs.append(seen)
        for key in ("first", "second", "third"):
            await ctx.suspend(keys=[key], idempotency_key=key)
            seen += [key, *names(ctx)]

    await start_worker({"job": thrice})
    run = await submit()
    for name in ("approved", "paid"):
        await is_suspended(run)
        await signal(engine, run, name)
    await is_suspended(run)
    await engine.resume_execution(execution_id=run, trigger_type="operator")
    await engine.wait_for_ending(run, timeout=60)
    assert seen_by_runs == [
        [],
        ["approved", "first", "approved"],
        ["paid", "first", "approved", "second", "paid"],
        ["first", "approved", "second", "paid", "third"],
    ]
    assert next(faults, None) is None


async def test_a_wait_on_a_waitpoint_created_before_survives_a_lost_answer(
    engine: Engine, start_worker: StartWorker, submit: Submit, is_suspended: IsSuspended, lose_answers: None
) -> None:
    async def signalled_before(ctx: Context, key: str | None) -> list[str]:
        seen = []
        for name in ("one", "two"):
            point = await ctx.create_waitpoint("answer", expires_in=60)
            await engine.deliver_signal(
                execution_id=ctx.execution_id,
                waitpoint_id=point.waitpoint_id,
                waitpoint_token=point.hmac_token,
                signal_name=name,
            )
            options: Any = {} if key is None else {"idempotency_key": f"{key}-{name}"}
            details = await ctx.suspend(condition=Single(waitpoint_key="answer"), waitpoints=[point], **options)
            assert details.waitpoint_id == point.waitpoint_id
            seen += [one.signal_name for one in ctx.resumed_signals()]
        return seen

    async def signalled_later(ctx: Context) -> list[str]:
        if not ctx.is_resumed:
            point = await ctx.create_waitpoint("answer", expires_in=60)
            await ctx.suspend(condition=Single(waitpoint_key="answer"), waitpoints=[point])
        return [one.signal_name for one in ctx.resumed_signals()]

    await start_worker({"before": signalled_before, "later": signalled_later})
    runs = [await submit(kind="before", key=key) for key in (None, "the-answer")]
    later = await submit(kind="later")
    await is_suspended(later)
    await signal(engine, later)
    ended = [await engine.wait_for_ending(run, timeout=60) for run in (*runs, later)]
    assert [json.loads(one.result or b"null") for one in ended] == [["one", "two"], ["one", "two"], ["ready"]]

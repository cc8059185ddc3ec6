"""Waits that a handler comes by again: it is told what it was told before, and nothing of another wait."""

from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.condition import Single
from flowfabric.model.errors import TransportError
from flowfabric.worker.context import Context

from .waits import signal


async def test_a_repeat_is_given_the_signals_of_its_own_wait(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any
) -> None:
    told: list[list[str]] = []

    def names(ctx: Context) -> list[str]:
        return [one.signal_name for one in ctx.resumed_signals()]

    async def thrice(ctx: Context) -> None:
        seen = names(ctx)
        told.append(seen)
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
    assert told == [
        [],
        ["approved", "first", "approved"],
        ["paid", "first", "approved", "second", "paid"],
        ["first", "approved", "second", "paid", "third"],
    ]


@pytest.mark.parametrize("idempotency_key", [None, "the-answer"])
async def test_a_handler_goes_on_where_the_answer_is_lost_that_it_need_not_wait(
    engine: Engine, start_worker: Any, submit: Any, lose_an_answer: None, idempotency_key: Any
) -> None:
    async def early(ctx: Context) -> list[str]:
        seen = []
        for name in ("one", "two"):
            point = await ctx.create_waitpoint("answer", expires_in=60)
            await engine.deliver_signal(
                execution_id=ctx.execution_id,
                waitpoint_id=point.waitpoint_id,
                waitpoint_token=point.hmac_token,
                signal_name=name,
            )
            key = idempotency_key and f"{idempotency_key}-{name}"
            details = await ctx.suspend(
                condition=Single(waitpoint_key="answer"), waitpoints=[point], idempotency_key=key
            )
            assert details.waitpoint_id == point.waitpoint_id
            seen += [one.signal_name for one in ctx.resumed_signals()]
        return seen

    await start_worker({"job": early})
    ended = await engine.wait_for_ending(await submit(), timeout=60)
    assert ended.result == b'["one","two"]'


async def test_a_run_ends_where_the_answer_is_lost_that_it_waits_on_a_waitpoint_made_ahead(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any, lose_an_answer: None
) -> None:
    async def ask(ctx: Context) -> list[str]:
        if not ctx.is_resumed:
            point = await ctx.create_waitpoint("answer", expires_in=60)
            await ctx.suspend(condition=Single(waitpoint_key="answer"), waitpoints=[point])
        return [one.signal_name for one in ctx.resumed_signals()]

    await start_worker({"job": ask})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'["ready"]'


async def test_a_handler_goes_on_after_its_wait_only_when_its_signals_are_known(
    engine: Engine, start_worker: Any, submit: Any, is_suspended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe, faults = engine.observe_signals, iter([TransportError()])

    async def fails_for_a_wait(*arguments: Any, suspension_id: Any) -> Any:
        if suspension_id is not None and (fault := next(faults, None)):
            raise fault
        return await observe(*arguments, suspension_id=suspension_id)

    async def keyed(ctx: Context) -> list[str]:
        await ctx.suspend(keys=["answer"], idempotency_key="the-answer")
        return [one.signal_name for one in ctx.resumed_signals()]

    monkeypatch.setattr(engine, "observe_signals", fails_for_a_wait)
    await start_worker({"job": keyed})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run)
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'["ready"]'
    assert next(faults, None) is None

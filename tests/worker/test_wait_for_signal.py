"""Waiting for a signal in a handler that reads from top to bottom."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import pydantic
import pytest

from fixtures import Clock, Eventually
from flowfabric import Context, Fabric, Run, RunFailed, WaitTimeout
from flowfabric.errors import NoSignal

IsWaiting: TypeAlias = Callable[[Run[Any]], Awaitable[None]]


class Reviewer(pydantic.BaseModel):
    name: str


@dataclass
class Verdict:
    by: Reviewer
    seal: bytes


@pytest.fixture
def is_waiting(eventually: Eventually) -> IsWaiting:
    """Wait until a run is suspended."""

    async def is_waiting(run: Run[Any]) -> None:
        async def is_suspended() -> bool:
            return (await run.status()).state == "suspended"

        await eventually(is_suspended)

    return is_waiting


async def test_a_wait_holds_no_worker_and_returns_the_payload_in_its_type(url: str, is_waiting: IsWaiting) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def typed(ctx: Context) -> list[Verdict]:
        return [await ctx.wait_for_signal("review", Verdict), await ctx.wait_for_signal("review", Verdict)]

    @fabric.task
    async def untyped(ctx: Context) -> Any:
        return await ctx.wait_for_signal("answer")

    @fabric.task
    async def wrong(ctx: Context) -> int:
        return await ctx.wait_for_signal("count", int)

    @fabric.task(retries=1, backoff=0)
    async def retried(ctx: Context) -> list[Any]:
        answer = await ctx.wait_for_signal("answer", str)
        if ctx.attempt == 1:
            raise ValueError(answer)
        return [ctx.attempt, answer]

    # One slot: a wait that held it would keep the other tasks from their start.
    async with fabric, fabric.worker(concurrency=1):
        first, second, third, fourth, unnamed = (
            await typed.submit(),
            await untyped.submit(),
            await wrong.submit(),
            await retried.submit(),
            await wrong.submit(),
        )
        for run in (first, second, third, fourth, unnamed):
            await is_waiting(run)
        verdicts = [Verdict(by=Reviewer(name="ada"), seal=seal) for seal in (b"abcd", b"\xff")]
        for verdict in verdicts:
            await first.signal("review", verdict)
        assert await first.result(timeout=60) == verdicts
        await second.signal("answer", {"a": [1, None]})
        assert await second.result(timeout=60) == {"a": [1, None]}
        await third.signal("count", "many", by="ada")
        with pytest.raises(RunFailed, match="signal 'count' from 'ada': the payload is not of type int"):
            await third.result(timeout=60)
        await unnamed.signal("count", "many")
        with pytest.raises(RunFailed, match="signal 'count': the payload is not of type int"):
            await unnamed.result(timeout=60)
        # A new attempt waits again.
        await fourth.signal("answer", "first")
        await fourth.signal("answer", "second")
        assert await fourth.result(timeout=60) == [2, "second"]


async def test_a_wait_without_a_signal_raises_or_returns_the_default(url: str, is_waiting: IsWaiting) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def strict(ctx: Context, seconds: float) -> str:
        timeout = timedelta(seconds=seconds) if ctx.priority else seconds
        try:
            return await ctx.wait_for_signal("answer", str, timeout=timeout)
        except WaitTimeout as late:
            return str(late)

    @fabric.task
    async def lenient(ctx: Context) -> str | None:
        assert await ctx.wait_for_signal("answer", timeout=0.05, default=None) is None
        return await ctx.wait_for_signal("answer", type=str, timeout=0.05, default=None)

    @fabric.task
    async def resumed(ctx: Context) -> str:
        try:
            return await ctx.wait_for_signal("answer", str)
        except NoSignal:
            return "resumed"

    async with fabric, fabric.worker():
        late, with_default, run = await strict.submit(0.05), await lenient.submit(), await resumed.submit()
        also_late = await strict.options(priority=1).submit(0.05)
        assert await also_late.result(timeout=60) == "no signal 'answer' arrived within 0.05 s"
        assert await late.result(timeout=60) == "no signal 'answer' arrived within 0.05 s"
        assert await with_default.result(timeout=60) is None
        await is_waiting(run)
        await fabric.engine.resume_execution(execution_id=run.id)
        assert await run.result(timeout=60) == "resumed"


async def test_a_signal_may_arrive_after_a_month(url: str, clock: Clock, is_waiting: IsWaiting) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def ask(ctx: Context) -> list[str]:
        return [await ctx.wait_for_signal("answer", str), await ctx.wait_for_signal("answer", str)]

    async with fabric, fabric.worker():
        run = await ask.submit()
        for answer in ("first", "second"):
            await is_waiting(run)
            await clock.advance(seconds=30 * 86_400)
            await fabric.engine.prepare()
            await run.signal("answer", answer)
        assert await run.result(timeout=60) == ["first", "second"]

"""Waiting for a signal in a handler that reads from top to bottom."""

from dataclasses import dataclass
from typing import Any

import pytest

from flowfabric import Context, Fabric, RunFailed, WaitTimeout
from flowfabric.errors import NoSignal


@dataclass
class Verdict:
    approved: bool


async def test_a_wait_returns_the_payload_in_its_type(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def ask(ctx: Context) -> bool:
        verdict = await ctx.wait_for_signal("review", Verdict)
        return verdict.approved

    async with fabric, fabric.worker():
        run = await ask.submit()
        await run.signal("review", Verdict(approved=True))
        assert await run.result(timeout=60) is True


async def test_a_wait_holds_no_worker(url: str, eventually: Any) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def ask(ctx: Context) -> Any:
        return await ctx.wait_for_signal("answer")

    @fabric.task
    async def other() -> str:
        return "done"

    async with fabric, fabric.worker(concurrency=1):
        waiting = await ask.submit()

        async def is_suspended() -> bool:
            return (await waiting.status()).state == "suspended"

        await eventually(is_suspended)
        assert await (await other.submit()).result(timeout=60) == "done"
        await waiting.signal("answer", {"a": [1, None]})
        assert await waiting.result(timeout=60) == {"a": [1, None]}


async def test_a_wait_that_is_not_answered_in_time_raises_or_gives_the_default(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def strict(ctx: Context) -> str:
        try:
            await ctx.wait_for_signal("answer", str, timeout=0.05)
        except WaitTimeout as late:
            return str(late)
        return "answered"

    @fabric.task
    async def lenient(ctx: Context) -> str | None:
        return await ctx.wait_for_signal("answer", str, timeout=0.05, default=None)

    async with fabric, fabric.worker():
        runs = [await strict.submit(), await lenient.submit()]
        assert await runs[0].result(timeout=60) == "no signal 'answer' arrived within 0.05 seconds"
        assert await runs[1].result(timeout=60) is None


async def test_a_wait_that_an_operator_ends_has_no_signal(url: str, eventually: Any) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def ask(ctx: Context) -> str:
        try:
            return await ctx.wait_for_signal("answer", str)
        except NoSignal:
            return "resumed"

    async with fabric, fabric.worker():
        run = await ask.submit()

        async def is_suspended() -> bool:
            return (await run.status()).state == "suspended"

        await eventually(is_suspended)
        await fabric.engine.resume_execution(execution_id=run.id)
        assert await run.result(timeout=60) == "resumed"


async def test_a_wait_may_be_answered_after_a_month(url: str, clock: Any, eventually: Any) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def ask(ctx: Context) -> list[str]:
        return [await ctx.wait_for_signal("answer", str), await ctx.wait_for_signal("answer", str)]

    async with fabric, fabric.worker():
        run = await ask.submit()
        for answer in ("first", "second"):

            async def is_suspended() -> bool:
                return (await run.status()).state == "suspended"

            await eventually(is_suspended)
            await clock.advance(seconds=30 * 86_400)
            await fabric.engine.prepare()
            await run.signal("answer", answer)
        assert await run.result(timeout=60) == ["first", "second"]


async def test_an_attempt_that_failed_forgets_its_waits(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(retries=1, backoff=0)
    async def ask(ctx: Context) -> list[Any]:
        answer = await ctx.wait_for_signal("answer", str)
        if ctx.attempt == 1:
            raise ValueError(answer)
        return [ctx.attempt, answer]

    async with fabric, fabric.worker():
        run = await ask.submit()
        await run.signal("answer", "first")
        await run.signal("answer", "second")
        assert await run.result(timeout=60) == [2, "second"]


async def test_a_payload_of_another_type_fails_the_attempt_with_the_sender_named(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def ask(ctx: Context) -> int:
        return await ctx.wait_for_signal("count", int)

    async with fabric, fabric.worker():
        run = await ask.submit()
        await run.signal("count", "many", by="ada")
        with pytest.raises(RunFailed, match="signal 'count' from 'ada': the payload is not of type int"):
            await run.result(timeout=60)

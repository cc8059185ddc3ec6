"""A handler in a thread calls the context with `from_thread`, not in an event loop of its own."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from fixtures import Attempts, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.states import TerminalOutcome
from flowfabric.worker.context import Context
from flowfabric.worker.streaming import FrameWriter, SummaryWriter

from .streaming import numbers, texts

VERBS: dict[str, Callable[[Context], Coroutine[Any, Any, object]]] = {
    "Context.progress": lambda ctx: ctx.progress(50),
    "Context.observe_signals": lambda ctx: ctx.observe_signals(),
    "Context.create_waitpoint": lambda ctx: ctx.create_waitpoint("ready", 60),
    "Context.suspend": lambda ctx: ctx.suspend(keys=["ready"]),
    "Context.wait_for_signal": lambda ctx: ctx.wait_for_signal("ready"),
    "Context.spend": lambda ctx: ctx.spend("01a1f699-7ccf-7777-8696-3ed79a473eab", tokens=1),
    "FrameWriter.write": lambda ctx: ctx.stream.write("a"),
    "FrameWriter.flush": lambda ctx: ctx.stream.flush(),
    "SummaryWriter.patch": lambda ctx: ctx.summary.patch({"a": 1}),
}
REFUSED = (
    "the worker of this run is in another event loop; run the call there: `asyncio.run_coroutine_threadsafe(call, "
    "loop)`, in a `def` task `ctx.from_thread(call)`"
)


def test_the_table_has_every_verb() -> None:
    verbs = {
        method.__qualname__
        for kind in (Context, FrameWriter, SummaryWriter)
        for name, method in vars(kind).items()
        if inspect.iscoroutinefunction(method) and not name.startswith("_")
    }
    assert verbs == VERBS.keys()


async def test_a_verb_in_another_event_loop_is_refused_and_harms_neither_its_run_nor_others(
    engine: Engine, start_worker: StartWorker, submit: Submit, attempts: Attempts
) -> None:
    async def call(verb: Callable[[Context], Coroutine[Any, Any, object]], ctx: Context) -> None:
        await verb(ctx)

    async def watch_lease(ctx: Context) -> None:
        await ctx.lease_lost

    def elsewhere(ctx: Context) -> list[str]:
        refused: list[str] = []
        for each in (*(verb(ctx) for verb in VERBS.values()), *(call(verb, ctx) for verb in VERBS.values())):
            try:
                asyncio.run(each)
            except RuntimeError as error:
                refused.append(str(error))
        try:
            asyncio.run(watch_lease(ctx))
        except RuntimeError as error:
            refused.append(str(error))
        ctx.from_thread(ctx.stream.write("a"))
        return refused

    async def stream(ctx: Context) -> None:
        for number in numbers(100):
            await ctx.stream.write(number)
            await asyncio.sleep(0)

    await start_worker({"elsewhere": elsewhere, "stream": stream})
    for _ in range(2):
        wrong = [await submit(kind="elsewhere") for _ in range(10)]
        right = [await submit(kind="stream") for _ in range(8)]
        for run in right:
            assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
            assert await texts(engine, run) == numbers(100)
        for run in wrong:
            ended = await engine.wait_for_ending(run, timeout=60)
            assert ended.result is not None
            assert msgspec.json.decode(ended.result) == [REFUSED] * 19
            assert await texts(engine, run) == ["a"]
        assert [len(await attempts(run)) for run in (*wrong, *right)] == [1] * 18


async def test_from_thread_serves_a_handler_that_runs_an_event_loop_of_its_own(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    def job(ctx: Context) -> None:
        async def main() -> None:
            for number in numbers(3):
                ctx.from_thread(ctx.stream.write(number))

        asyncio.run(main())

    await start_worker({"job": job})
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert await texts(engine, run) == numbers(3)


async def test_from_thread_takes_only_a_call(engine: Engine, start_worker: StartWorker, submit: Submit) -> None:
    def job(ctx: Context) -> list[str]:
        return refusals(ctx)

    async def async_job(ctx: Context) -> list[str]:
        return refusals(ctx)

    def refusals(ctx: Context) -> list[str]:
        from_thread: Callable[[object], object] = ctx.from_thread  # type: ignore[assignment]
        refused: list[str] = []
        for wrong in (5, None, ctx.stream.write, ctx.lease_lost):
            try:
                from_thread(wrong)
            except TypeError as error:
                refused.append(str(error))
        return refused

    await start_worker({"job": job, "async_job": async_job})
    for kind in ("job", "async_job"):
        assert (await engine.wait_for_ending(await submit(kind=kind), timeout=60)).result == (
            b'["from_thread: expected a call such as ctx.progress(50), got 5",'
            b'"from_thread: expected a call such as ctx.progress(50), got None",'
            b'"from_thread: expected a call such as ctx.progress(50), got the function write itself; '
            b'call it: ctx.from_thread(ctx.stream.write(line))",'
            b'"from_thread: expected a call such as ctx.progress(50), got a Future; '
            b'pass a call of an `async def` function that awaits it"]'
        )

"""What becomes of the frames of a run when it ends, suspends or loses its lease."""

import asyncio
import threading

import asyncpg
import pytest

from fixtures import Clock, Eventually, IsSuspended, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.states import TerminalOutcome
from flowfabric.worker import runs as worker_runs
from flowfabric.worker.context import Context
from flowfabric.worker.options import WorkerOptions
from flowfabric.worker.worker import Worker

from .streaming import numbers, refusal, texts
from .waiting import LONG_TTL_MS
from .waits import signal


async def test_what_was_written_is_stored_before_a_run_completes_fails_or_suspends(
    engine: Engine, start_worker: StartWorker, submit: Submit, is_suspended: IsSuspended
) -> None:
    async def write(ctx: Context) -> None:
        for number in numbers(900):
            await ctx.stream.write(number)

    async def complete(ctx: Context) -> None:
        await write(ctx)

    async def fail(ctx: Context) -> None:
        await write(ctx)
        raise ValueError("no luck")

    async def suspend(ctx: Context) -> None:
        if not ctx.is_resumed:
            await write(ctx)
            await ctx.suspend(keys=["ready"])
        await ctx.stream.write("resumed")

    handlers = {"complete": complete, "fail": fail, "suspend": suspend}
    await start_worker(handlers)
    runs = {kind: await submit(kind=kind) for kind in handlers}
    await engine.wait_for_ending(runs["complete"], timeout=60)
    await engine.wait_for_ending(runs["fail"], timeout=60)
    await is_suspended(runs["suspend"])
    for kind in ("complete", "fail", "suspend"):
        assert await texts(engine, runs[kind]) == numbers(900), kind
    await signal(engine, runs["suspend"])
    await engine.wait_for_ending(runs["suspend"], timeout=60)
    assert await texts(engine, runs["suspend"]) == [*numbers(900), "resumed"]


async def test_what_was_written_is_stored_before_a_run_is_handed_back_and_its_attempt_goes_on(
    engine: Engine, submit: Submit, eventually: Eventually
) -> None:
    started: list[Context] = []

    async def job(ctx: Context) -> None:
        await ctx.stream.write(f"run {len(started) + 1}")
        started.append(ctx)
        if len(started) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                await ctx.stream.write("stopped")

    run = await submit()
    for expected in (["run 1", "stopped"], ["run 1", "stopped", "run 2"]):
        async with Worker(engine, lanes=["default"], handlers={"job": job}, drain=0, lease_ttl=LONG_TTL_MS / 1000):
            count = len(started)
            await eventually(lambda count=count: len(started) > count)
        assert await texts(engine, run) == expected
    assert [ctx.attempt for ctx in started] == [1, 1]


async def test_a_writer_whose_lease_is_lost_is_told_and_its_frames_are_dropped(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    clock: Clock,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused: list[tuple[str, str]] = []
    has_written, is_lost = threading.Event(), threading.Event()

    async def write_late(ctx: Context) -> None:
        await ctx.stream.write("late")
        await ctx.stream.flush()

    def job(ctx: Context) -> None:
        ctx.from_thread(ctx.stream.write(f"attempt {ctx.attempt}", flush=True))
        if ctx.attempt == 1:
            has_written.set()
            assert is_lost.wait(60)
            # A thread is not cancelled when the lease is lost.
            for call in (
                write_late(ctx),
                ctx.stream.write("later"),
                ctx.stream.write("latest", flush=True),
                ctx.summary.patch({"a": 1}),
            ):
                refused.append(ctx.from_thread(refusal(call)))

    run = await submit()
    await start_worker({"job": job}, lease_ttl=60, reconcile=False)
    await eventually(has_written.is_set)
    await clock.advance(seconds=61)
    is_lost.set()
    parts_of(engine).wakeups.wake_all()
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert [code for code, _ in refused] == ["stale_owner_cannot_append"] * 4
    assert await texts(engine, run, 0) == ["attempt 1"]
    assert await texts(engine, run, 1) == ["attempt 2"]
    assert "of its stream" not in caplog.text


async def test_frames_of_a_cancelled_run_are_dropped_in_silence(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    contexts: list[Context] = []
    ended: list[str] = []

    async def job(ctx: Context, *, asks: bool) -> None:
        await ctx.stream.write("a", flush=True)
        contexts.append(ctx)
        try:
            await asyncio.Event().wait()
        finally:
            await ctx.stream.write("b")
            ended.append((await refusal(ctx.stream.flush()))[0] if asks else "not asked")

    worker = await start_worker({"job": job}, lease_ttl=LONG_TTL_MS / 1000)
    for asks in (True, False):
        contexts.clear()
        ended.clear()
        run = await submit(asks=asks)
        await eventually(lambda: contexts)
        await engine.cancel_execution(execution_id=run, reason="not wanted")
        await eventually(lambda: ended and not worker.running)
        assert ended == ["stream_closed" if asks else "not asked"]
        assert await texts(engine, run) == ["a"]
    assert "of its stream" not in caplog.text


class Returning:
    """A handler that writes `a`, and when it may return, `b`; a later run returns at once."""

    def __init__(self) -> None:
        self.runs = 0
        self.may_return = asyncio.Event()
        self.has_written = asyncio.Event()
        self.returns = asyncio.Event()

    async def __call__(self, ctx: Context) -> str:
        self.runs += 1
        if self.runs == 1:
            await ctx.stream.write("a", flush=True)
            self.has_written.set()
            await self.may_return.wait()
            await ctx.stream.write("b")
            self.returns.set()
        return f"run {self.runs}"


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_worker_that_stops_while_the_last_frames_are_stored_hands_the_run_back_after_them(
    engine: Engine, submit: Submit, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    handler, run = Returning(), await submit()
    options: WorkerOptions = {"lanes": ["default"], "drain": 0, "lease_ttl": LONG_TTL_MS / 1000}
    worker = await Worker(engine, handlers={"job": handler}, **options).__aenter__()
    await handler.has_written.wait()
    async with connection.transaction():
        await connection.execute("select from stream for update")
        handler.may_return.set()
        await handler.returns.wait()
        stopping = asyncio.create_task(worker.__aexit__(None, None, None))
        await eventually(lambda: [running.is_handed_back for running in worker._runs.slots.held] == [True])
    await stopping
    assert await texts(engine, run) == ["a", "b"]
    async with Worker(engine, handlers={"job": handler}, **options):
        assert (await engine.wait_for_ending(run, timeout=60)).result == b'"run 2"'


@pytest.mark.usefixtures("patient_with_locks")
async def test_the_end_of_a_run_waits_for_its_frames_only_for_a_while(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_runs, "FLUSH_SECONDS", 0.05)
    handler, run = Returning(), await submit()
    await start_worker({"job": handler}, lease_ttl=LONG_TTL_MS / 1000)
    await handler.has_written.wait()
    async with connection.transaction():
        await connection.execute("select from stream for update")
        handler.may_return.set()
        await eventually(
            lambda: "1 frame of its stream may not be stored: stream_closed: the run has ended first" in caplog.text
        )
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'"run 1"'


async def test_a_write_after_the_handler_has_returned_is_refused(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    contexts: list[Context] = []

    async def job(ctx: Context) -> None:
        contexts.append(ctx)
        await ctx.stream.write("a")

    await start_worker({"job": job})
    run = await submit()
    await engine.wait_for_ending(run, timeout=60)
    code, text = await refusal(contexts[0].stream.write("b"))
    assert (code, text) == ("stream_closed", "the handler has returned; await every write before it does")
    assert await texts(engine, run) == ["a"]


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_the_first_write_is_refused_too_if_the_handler_has_returned(
    engine: Engine, start_worker: StartWorker, submit: Submit, kind: str
) -> None:
    has_ended = threading.Event()
    left: list[asyncio.Task[tuple[str, str]]] = []

    async def write_late(ctx: Context) -> tuple[str, str]:
        await asyncio.to_thread(has_ended.wait, 60)
        return await refusal(ctx.stream.write("late"))

    def write_late_from_thread(ctx: Context) -> tuple[str, str]:
        assert has_ended.wait(60)
        return ctx.from_thread(refusal(ctx.stream.write("late")))

    async def job(ctx: Context) -> None:
        left.append(asyncio.create_task(write_late(ctx)))

    def plain_job(ctx: Context) -> None:
        loop.call_soon_threadsafe(
            lambda: left.append(asyncio.create_task(asyncio.to_thread(write_late_from_thread, ctx)))
        )

    loop = asyncio.get_running_loop()
    await start_worker({"async def": job, "def": plain_job})
    run = await submit(kind=kind)
    await engine.wait_for_ending(run, timeout=60)
    has_ended.set()
    assert await asyncio.gather(*left) == [
        ("stream_closed", "the handler has returned; await every write before it does")
    ]
    assert await texts(engine, run) == []


@pytest.mark.parametrize(
    ("count", "line"), [(1, "1 frame of its stream may not be stored"), (3, "3 frames of its stream may not be stored")]
)
async def test_frames_that_a_suspended_handler_writes_are_dropped_and_logged(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    is_suspended: IsSuspended,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    count: int,
    line: str,
) -> None:
    async def job(ctx: Context) -> None:
        try:
            await ctx.stream.write("a")
            await ctx.suspend(keys=["ready"])
        finally:
            for number in numbers(count):
                await ctx.stream.write(number)

    await start_worker({"job": job})
    run = await submit()
    await is_suspended(run)
    assert await texts(engine, run) == ["a"]
    await eventually(lambda: f"{run} (job): {line}: stream_closed: " in caplog.text)


@pytest.mark.parametrize(
    ("count", "line"), [(1, "1 frame of its stream was not stored"), (3, "3 frames of its stream were not stored")]
)
async def test_frames_that_the_store_has_refused_are_logged_if_no_later_write_raises_the_refusal(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    count: int,
    line: str,
) -> None:
    async def job(ctx: Context) -> None:
        try:
            await ctx.suspend(keys=["ready"])
        finally:
            for number in numbers(count):
                await ctx.stream.write(number)
            frames = ctx._running.frames
            assert frames is not None
            await eventually(lambda: not frames._waiting)

    await start_worker({"job": job})
    run = await submit()
    await eventually(lambda: f"{run} (job): {line}: " in caplog.text)
    assert await texts(engine, run) == []


async def test_a_resumed_run_writes_although_its_frames_are_numbered_from_one_again(
    engine: Engine, start_worker: StartWorker, submit: Submit, is_suspended: IsSuspended
) -> None:
    async def job(ctx: Context) -> None:
        await ctx.stream.write("a")
        await ctx.wait_for_signal("ready")
        await ctx.stream.write("b")

    await start_worker({"job": job})
    run = await submit()
    await is_suspended(run)
    await signal(engine, run)
    await engine.wait_for_ending(run, timeout=60)
    assert await texts(engine, run) == ["a", "a", "b"]

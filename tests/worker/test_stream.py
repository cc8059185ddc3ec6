"""What handlers write to their stream."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from fixtures import Eventually, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.engine.stream.append import Streams
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.stream import BestEffortLive, BestEffortLiveConfig, DurableSummary, FrameKind
from flowfabric.worker.context import Context

from .streaming import LONGEST, numbers, refusal, texts
from .waiting import LONG_TTL_MS


def keep_the_loop(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def test_frames_are_stored_in_order_many_in_one_transaction_and_before_the_result(
    engine: Engine, start_worker: StartWorker, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, transactions = Streams.append_numbered, 0

    async def count(*args: Any, **options: Any) -> Any:
        nonlocal transactions
        transactions += 1
        return await append(*args, **options)

    monkeypatch.setattr(Streams, "append_numbered", count)

    async def job(ctx: Context) -> None:
        for number in numbers(3000):
            await ctx.stream.write(number)

    await start_worker({"job": job})
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert await texts(engine, run) == numbers(3000)
    assert 6 <= transactions <= 60


async def test_a_slow_token_is_readable_before_the_next_one(
    engine: Engine, start_worker: StartWorker, submit: Submit, eventually: Eventually
) -> None:
    goes_on = [asyncio.Event() for _ in range(3)]

    async def job(ctx: Context) -> None:
        for nth, gate in enumerate(goes_on):
            await ctx.stream.write(str(nth))
            await gate.wait()

    await start_worker({"job": job})
    run = await submit()
    for nth, gate in enumerate(goes_on):

        async def is_readable(count: int = nth + 1) -> bool:
            return await texts(engine, run) == numbers(count)

        await eventually(is_readable)
        gate.set()
    await engine.wait_for_ending(run, timeout=60)


async def test_a_handler_that_keeps_the_event_loop_between_its_writes_streams_nevertheless(
    url: str, start_worker: StartWorker, submit: Submit, engine: Engine
) -> None:
    is_read = threading.Event()

    async def job(ctx: Context) -> bool:
        await ctx.stream.write("0")
        keep_the_loop(1)
        await ctx.stream.write("1")
        return is_read.wait(10)

    async def read(run: ExecutionId) -> None:
        async with Engine.connect(url) as reader:
            while len(await texts(reader, run)) < 2:
                await reader.tail_stream(run, 0, block_ms=100)
        is_read.set()

    await start_worker({"job": job})
    run = await submit()
    reading = asyncio.create_task(asyncio.to_thread(asyncio.run, read(run)))
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"true"
    await reading


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_write_gives_the_store_no_more_time_than_the_handler_has_kept_the_event_loop(
    engine: Engine, start_worker: StartWorker, submit: Submit, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    is_locked, has_written = asyncio.Event(), asyncio.Event()

    async def job(ctx: Context) -> None:
        await ctx.stream.write("0", flush=True)
        await is_locked.wait()
        await ctx.stream.write("1")
        keep_the_loop(0.03)
        await ctx.stream.write("2")
        has_written.set()

    await start_worker({"job": job}, lease_ttl=LONG_TTL_MS / 1000)
    run = await submit()

    async def has_begun() -> bool:
        return await texts(engine, run) == ["0"]

    await eventually(has_begun)
    async with connection.transaction():
        await connection.execute("select from stream for update")
        is_locked.set()
        await eventually(has_written.is_set, timeout=20)
    await engine.wait_for_ending(run, timeout=60)
    assert await texts(engine, run) == numbers(3)


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_writer_waits_while_a_thousand_frames_or_a_mebibyte_are_not_stored(
    engine: Engine, start_worker: StartWorker, submit: Submit, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    written = 0
    may_write = asyncio.Event()

    async def job(ctx: Context, count: int, size: int) -> None:
        nonlocal written
        await ctx.stream.write("first", flush=True)
        written = 0
        await may_write.wait()
        for _ in range(count):
            await ctx.stream.write(b"x" * size)
            written += 1

    await start_worker({"job": job}, lease_ttl=LONG_TTL_MS / 1000)
    for count, size, most in ((2500, 1, 1000), (100, LONGEST, 16)):
        may_write.clear()
        run = await submit(count=count, size=size)

        async def has_begun(run: ExecutionId = run) -> bool:
            return await texts(engine, run) == ["first"]

        await eventually(has_begun)
        async with connection.transaction():
            await connection.execute("select from stream for update")
            may_write.set()
            await eventually(lambda most=most: written == most)
            # A write that does not wait would go on during these turns of the event loop.
            for _ in range(1000):
                await asyncio.sleep(0)
            assert written == most
        assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
        assert len(await texts(engine, run)) == count + 1


async def test_a_flush_and_a_durable_policy_wait_until_the_frame_is_stored(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    async def job(ctx: Context) -> list[list[str]]:
        seen = []
        await ctx.stream.write("a")
        await ctx.stream.write("b", flush=True)
        seen.append(await texts(engine, ctx.execution_id))
        await ctx.stream.write("c")
        await ctx.stream.flush()
        seen.append(await texts(engine, ctx.execution_id))
        return seen

    async def durable(ctx: Context) -> list[str]:
        await ctx.stream.write("a")
        return await texts(engine, ctx.execution_id)

    await start_worker({"job": job, "durable": durable})
    ended = await engine.wait_for_ending(await submit(), timeout=60)
    assert ended.result == b'[["a","b"],["a","b","c"]]'
    run = await submit(kind="durable", policy={"stream_policy": {"durability_mode": "durable"}})
    assert (await engine.wait_for_ending(run, timeout=60)).result == b'["a"]'


async def test_a_frame_that_cannot_be_stored_is_refused_at_the_call_and_the_others_are_stored(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    refused: list[tuple[str, str]] = []

    async def job(ctx: Context) -> None:
        write: Callable[..., Coroutine[Any, Any, None]] = ctx.stream.write
        for call in (
            write(b"x" * (LONGEST + 1)),
            write("é" * (LONGEST // 2) + "x"),
            write(7),
            write("\ud800"),
            write("x", kind="smoke"),
            write("x", frame_type="a\0b"),
            write("x", frame_type=3),
            write("x", correlation_id=3),
            write("x", mode="durable"),
            write("x", flush="no"),
            write("[1]", mode=DurableSummary()),
        ):
            refused.append(await refusal(call))
        await write(b"x" * LONGEST)
        await write("")

    await start_worker({"job": job})
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).outcome is TerminalOutcome.SUCCESS
    assert [len(text) for text in await texts(engine, run)] == [LONGEST, 0]
    assert [code for code, _ in refused] == ["retention_limit_exceeded"] * 2 + ["invalid_input"] * 9
    assert refused[0][1] == (
        "data: must be at most 65536 bytes, got 65537; split it into several, or store it elsewhere and write where"
    )
    assert refused[2][1] == "data: must be text or bytes, got 7"
    assert refused[3][1] == r"data: is not valid Unicode, got '\ud800'; remove the lone surrogates"
    assert refused[4][1] == "kind: must be one of stdout, stderr, event, blob, got 'smoke'"
    assert refused[9][1] == "flush: must be True or False, got 'no'"


async def test_a_frame_has_the_kind_the_type_and_the_mode_it_was_written_with(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    live = BestEffortLive(config=BestEffortLiveConfig(ttl_ms=10_000))

    async def job(ctx: Context) -> None:
        await ctx.stream.write("a")
        await ctx.stream.write(b"\xff\x00", kind=FrameKind.BLOB, correlation_id="part 1")
        await ctx.stream.write("c", kind="stderr", frame_type="warning", mode=live)

    await start_worker({"job": job})
    run = await submit()
    await engine.wait_for_ending(run, timeout=60)
    a, b, c = (await engine.read_stream(run, 0)).frames
    assert (a.frame_type, a.mode, a.payload, a.correlation_id) == ("stdout", "durable", b"a", None)
    assert (b.frame_type, b.mode, b.payload, b.correlation_id) == ("blob", "durable", b"\xff\x00", "part 1")
    assert (c.frame_type, c.mode, c.payload) == ("warning", "best_effort", b"c")


async def test_a_buffer_that_is_reused_after_a_write_leaves_the_frame_as_it_was_written(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    refused: list[tuple[str, str]] = []

    async def job(ctx: Context) -> None:
        buffer = bytearray(b"abcdef")
        await ctx.stream.write(buffer)
        await ctx.stream.write(memoryview(buffer)[1:3])
        await ctx.stream.write(memoryview(buffer)[::2])
        buffer[:] = b"------"
        refused.append(await refusal(ctx.stream.write(memoryview(bytearray(LONGEST + 4)).cast("i"))))

    await start_worker({"job": job})
    run = await submit()
    await engine.wait_for_ending(run, timeout=60)
    assert await texts(engine, run) == ["abcdef", "bc", "ace"]
    assert [code for code, _ in refused] == ["retention_limit_exceeded"]


async def test_a_plain_function_writes_from_its_thread(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    def job(ctx: Context) -> int:
        for number in numbers(20):
            ctx.from_thread(ctx.stream.write(number))
        version = ctx.from_thread(ctx.summary.patch({"done": 20}))
        ctx.from_thread(ctx.stream.write("last"))
        return version

    await start_worker({"job": job})
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"1"
    assert await texts(engine, run) == [*numbers(20), '{"done":20}', "last"]

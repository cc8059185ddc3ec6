"""Following the output of a run from any process, and reading its summary."""

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from faults.proxy import Proxy
from fixtures import Clock, Eventually
from flowfabric import Context, Fabric, InvalidInputError, Run, Settings
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream.parked import ParkedTails
from flowfabric.errors import EngineError, NotFoundError
from flowfabric.fabric import follow
from flowfabric.model.event import EventFamily
from flowfabric.policy import StreamPolicy
from flowfabric.streams import FrameKind, RunFrame

from .reading import read, texts

UNKNOWN = "{fp:0}:00000000-0000-7000-8000-000000000000"


@pytest.fixture
def hints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling, so that only a notification wakes a reader."""
    monkeypatch.setattr(ParkedTails, "HINTED_SECONDS", 600.0)
    monkeypatch.setattr(follow, "WAIT_MS", 600_000)


async def test_a_reader_gets_every_frame_in_order_as_it_is_written_until_the_run_ends(url: str) -> None:
    fabric, goes_on = Fabric(url), asyncio.Event()

    @fabric.task
    async def answer(ctx: Context) -> str:
        await ctx.stream.write("one ")
        await ctx.stream.write("two ", correlation_id="7", frame_type="token")
        await goes_on.wait()
        await ctx.stream.write(b"\xffthree", kind=FrameKind.BLOB)
        return "done"

    async with fabric, fabric.worker():
        before = datetime.now(UTC) - timedelta(minutes=1)
        run = await answer.submit()
        frames = run.stream()
        one, two = await read(frames, 2)
        goes_on.set()
        (three,) = await read(frames)
        assert await run.result(timeout=60) == "done"
        with pytest.raises(StopAsyncIteration):
            await anext(frames)
    assert (one.text, one.frame_type, one.mode, one.attempt) == ("one ", "stdout", "durable", 1)
    assert (two.text, two.frame_type, two.correlation_id) == ("two ", "token", "7")
    assert (three.payload, three.text, three.frame_type) == (b"\xffthree", "\N{REPLACEMENT CHARACTER}three", "blob")
    assert before < one.at <= two.at <= three.at < before + timedelta(minutes=2)
    assert (one.correlation_id, one.summary_version) == (None, None)


@pytest.mark.usefixtures("hints_only")
async def test_a_reader_that_begins_before_the_run_gets_all_of_it(url: str, eventually: Eventually) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def speak(ctx: Context) -> None:
        await ctx.stream.write("hello")

    @fabric.task
    async def be_silent() -> None: ...

    async with fabric:
        runs = [await speak.submit(), await be_silent.submit()]
        readers = [asyncio.create_task(read(run.stream())) for run in runs]
        await eventually(lambda: parts_of(fabric.engine).tails._operations == 2)
        async with fabric.worker():
            found = await asyncio.gather(*readers)
    assert [texts(each) for each in found] == [["hello"], []]


async def two_attempts(fabric: Fabric) -> Run[None]:
    """A run whose first attempt wrote two frames and failed, and whose second attempt wrote two."""

    @fabric.task(retries=1, backoff=0.001)
    async def build(ctx: Context) -> None:
        await ctx.stream.write(f"{ctx.attempt} a")
        await ctx.stream.write(f"{ctx.attempt} b")
        if ctx.attempt == 1:
            raise ValueError("no luck")

    async with fabric.worker():
        run = await build.submit()
        await run.result(timeout=60)
    return run


async def test_the_frames_of_all_attempts_follow_each_other_and_can_be_resumed_after_each(url: str) -> None:
    fabric = Fabric(url)
    async with fabric:
        run = await two_attempts(fabric)
        frames = await read(run.stream())
        assert texts(frames) == ["1 a", "1 b", "2 a", "2 b"]
        assert [(frame.attempt, frame.number) for frame in frames] == [(1, 1), (1, 2), (2, 1), (2, 2)]
        assert [frame.id.partition(":")[0] for frame in frames] == ["0", "0", "1", "1"]
        for nth, frame in enumerate(frames):
            for follows in (True, False):
                rest = await read(fabric.run(run.plain_id).stream(after=frame.id, follow=follows))
                assert rest == frames[nth + 1 :]
        for attempt in (1, 2):
            mine = [frame for frame in frames if frame.attempt == attempt]
            assert await read(run.stream(attempt=attempt)) == mine
            assert await read(run.stream(attempt=attempt, after=mine[0].id)) == mine[1:]
            assert await read(run.stream(attempt=attempt, follow=False)) == mine
        assert await read(run.stream(attempt=3)) == []


@pytest.mark.usefixtures("hints_only")
async def test_a_reader_of_one_attempt_is_done_when_that_attempt_is_over(url: str) -> None:
    fabric, fails = Fabric(url), asyncio.Event()

    @fabric.task(retries=1, backoff=600)
    async def build(ctx: Context) -> None:
        await ctx.stream.write("a")
        await fails.wait()
        raise ValueError("no luck")

    async with fabric, fabric.worker():
        run = await build.submit()
        frames = run.stream(attempt=1)
        assert texts(await read(frames, 1)) == ["a"]
        fails.set()
        assert await read(frames) == []
        second = asyncio.create_task(read(run.stream(attempt=2)))
        await run.cancel()
        assert await second == []


@pytest.mark.usefixtures("hints_only")
async def test_a_reader_of_an_attempt_without_a_frame_is_done_when_that_attempt_is_over(
    url: str, eventually: Eventually
) -> None:
    fabric, fails = Fabric(url), asyncio.Event()

    @fabric.task(retries=1, backoff=600)
    async def build() -> None:
        await fails.wait()
        raise ValueError("no luck")

    async with fabric, fabric.worker():
        run = await build.submit()
        reading = asyncio.create_task(read(run.stream(attempt=1)))
        feeds = parts_of(fabric.engine).wakeups.feeds
        await eventually(lambda: EventFamily.LEASE in feeds._events)
        fails.set()
        assert await reading == []
        await run.cancel()


async def test_a_reader_follows_a_run_over_suspensions_and_reclaims(
    url: str, clock: Clock, eventually: Eventually
) -> None:
    fabric, started = Fabric(url), 0

    @fabric.task
    async def deploy(ctx: Context) -> None:
        nonlocal started
        started += 1
        await ctx.stream.write(f"start {started}", flush=True)
        if ctx.attempt == 1:
            await ctx.wait_for_signal("go")
            await ctx.stream.write("signalled", flush=True)
            await asyncio.Event().wait()

    async with fabric, fabric.worker(lease_ttl=60):
        run = await deploy.submit()
        frames = run.stream()
        assert texts(await read(frames, 1)) == ["start 1"]
        await run.signal("go")
        assert texts(await read(frames, 2)) == ["start 2", "signalled"]
        await clock.advance(seconds=61)
        parts_of(fabric.engine).wakeups.wake_all()
        (last,) = await read(frames)
        assert (last.text, last.attempt) == ("start 3", 2)


async def test_a_reader_of_an_unknown_run_is_told_so(url: str) -> None:
    fabric = Fabric(url)
    async with fabric:
        run = fabric.run(UNKNOWN)
        for follows in (True, False):
            with pytest.raises(NotFoundError, match="it was not submitted to this store, or its retention is over"):
                await read(run.stream(follow=follows))
        with pytest.raises(NotFoundError, match="not submitted"):
            await run.summary()


async def test_a_wrong_argument_of_stream_is_refused_at_the_call(url: str) -> None:
    fabric = Fabric(url)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"after": ""}, "after: must be the id of a frame of run.stream(), got ''"),
        (
            {"after": "1795000000000-0"},
            "after: must be the id of a frame of run.stream(), which begins with its attempt, such as "
            "'0:1795000000000-0', got '1795000000000-0'",
        ),
        ({"after": "0:1"}, "after: must be the id of a frame of run.stream(), got '0:1'"),
        ({"after": "-1:1-2"}, "after: must be the id of a frame of run.stream(), got '-1:1-2'"),
        ({"after": "0:1-2\n"}, "after: must be the id of a frame of run.stream(), got '0:1-2\\n'"),
        ({"after": "٣:1-2"}, "after: must be the id of a frame of run.stream(), got '٣:1-2'"),
        ({"after": "9999999999:1-2"}, "after: must be the id of a frame of run.stream(), got '9999999999:1-2'"),
        ({"after": 7}, "after: must be the id of a frame of run.stream(), got 7"),
        ({"after": "0:1-2", "attempt": 2}, "after: is a frame of attempt 1, got '0:1-2'; leave out after= or attempt="),
        ({"attempt": 0}, "attempt: must be a whole number from 1 to 2147483647, got 0"),
        ({"attempt": "1"}, "attempt: must be a whole number from 1 to 2147483647, got '1'"),
        ({"follow": "no"}, "follow: must be True or False, got 'no'"),
    ]
    async with fabric:
        run = fabric.run(UNKNOWN)
        for arguments, text in wrong:
            with pytest.raises(InvalidInputError) as refused:
                run.stream(**arguments)
            assert (refused.value.code, refused.value.detail) == ("invalid_input", text)


async def test_without_follow_a_reader_ends_after_the_last_stored_frame(url: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(follow, "MAX_COUNT", 10)
    fabric, goes_on = Fabric(url), asyncio.Event()

    @fabric.task
    async def write(ctx: Context) -> None:
        for number in range(20):
            await ctx.stream.write(str(number))
        await ctx.stream.flush()
        await goes_on.wait()

    async with fabric, fabric.worker():
        run = await write.submit()
        await read(run.stream(), 20)
        assert texts(await read(run.stream(follow=False))) == [str(number) for number in range(20)]
        goes_on.set()
        await run.result(timeout=60)


async def test_a_slow_reader_misses_nothing_and_holds_one_page(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def write(ctx: Context) -> None:
        for number in range(5000):
            await ctx.stream.write(str(number))

    async with fabric, fabric.worker():
        run = await write.submit()
        frames = run.stream()
        first = await read(frames, 1)
        await run.result(timeout=60)
        found, most = first, 0
        async for frame in frames:
            found.append(frame)
            most = max(most, len(frames._page))
    assert texts(found) == [str(number) for number in range(5000)]
    assert most < follow.MAX_COUNT


async def test_a_reader_that_is_too_slow_sees_by_the_numbers_that_it_missed_frames(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(stream=StreamPolicy(retention_maxlen=10))
    async def write(ctx: Context) -> None:
        await ctx.stream.write("0", flush=True)
        await is_read.wait()
        for number in range(1, 100):
            await ctx.stream.write(str(number))

    is_read = asyncio.Event()
    async with fabric, fabric.worker():
        run = await write.submit()
        frames = run.stream()
        found = await read(frames, 1)
        is_read.set()
        await run.result(timeout=60)
        found += await read(frames)
    assert [(frame.text, frame.number) for frame in found] == [
        ("0", 1),
        *((str(number), number + 1) for number in range(90, 100)),
    ]


async def test_many_readers_on_a_small_pool_get_everything_and_leave_room_for_others(url: str) -> None:
    fabric, goes_on = Fabric(settings=Settings(database_url=url, database_pool_size=2)), asyncio.Event()

    @fabric.task
    async def write(ctx: Context) -> int:
        for number in range(20):
            await ctx.stream.write(str(number))
            if number == 10:
                await goes_on.wait()
            await asyncio.sleep(0)
        return 20

    async with fabric, fabric.worker():
        run = await write.submit()
        readers = [asyncio.create_task(read(run.stream())) for _ in range(60)]
        await read(run.stream(), 10)
        # All of them are waiting, and none holds a connection.
        async with asyncio.timeout(30):
            assert [(await run.status()).state for _ in range(10)] == ["active"] * 10
        goes_on.set()
        assert await run.result(timeout=60) == 20
        found = await asyncio.gather(*readers)
    assert {tuple(texts(each)) for each in found} == {tuple(str(number) for number in range(20))}


async def test_a_reader_that_is_cancelled_while_it_waits_loses_nothing(url: str) -> None:
    fabric, may_write = Fabric(url), asyncio.Semaphore(0)

    @fabric.task
    async def write(ctx: Context) -> None:
        for number in range(50):
            await may_write.acquire()
            await ctx.stream.write(str(number))

    async with fabric, fabric.worker(), asyncio.timeout(60):
        run = await write.submit()
        frames, found = run.stream(), list[str]()
        for nth in itertools.count():
            may_write.release()
            reading = asyncio.create_task(frames.__anext__())
            # From too few turns of the event loop for an answer to enough on any machine.
            for _ in range(2 ** (nth % 16)):
                if reading.done():
                    break
                await asyncio.sleep(0)
            reading.cancel()
            try:
                found.append((await reading).text)
            except asyncio.CancelledError:
                pass
            except StopAsyncIteration:
                break
    assert found == [str(number) for number in range(50)]


async def test_an_iterator_that_two_tasks_use_at_the_same_time_refuses_the_second_and_stays_usable(
    url: str, eventually: Eventually
) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def write(ctx: Context) -> None:
        for number in range(3):
            await ctx.stream.write(str(number))

    async with fabric:
        frames = (await write.submit()).stream()
        first = asyncio.create_task(read(frames, 1))
        await eventually(lambda: parts_of(fabric.engine).tails._operations == 1)
        with pytest.raises(RuntimeError, match="another task waits for the next frame of this iterator"):
            async with asyncio.timeout(60):
                await anext(frames)
        async with fabric.worker():
            assert texts(await first + await read(frames)) == ["0", "1", "2"]


async def test_an_iterator_in_another_event_loop_is_refused_and_keeps_its_frames(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def write(ctx: Context) -> None:
        for number in range(3):
            await ctx.stream.write(str(number))

    async with fabric, fabric.worker():
        run = await write.submit()
        await run.result()
        frames = run.stream()
        found = await read(frames, 1)
        with pytest.raises(
            RuntimeError, match=r"^run\.stream\(\): this iterator is in another event loop; call run\.str"
        ):
            await asyncio.to_thread(asyncio.run, read(frames, 1))
        assert texts(found + await read(frames)) == ["0", "1", "2"]


async def test_a_reader_that_disconnects_again_and_again_gets_every_frame_once(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(retries=1, backoff=0.001)
    async def write(ctx: Context) -> None:
        for number in range(100):
            await ctx.stream.write(f"{ctx.attempt}:{number}", flush=number % 10 == 0)
        if ctx.attempt == 1:
            raise ValueError("no luck")

    async with fabric, fabric.worker():
        run = await write.submit()
        found: list[RunFrame] = []
        while some := await read(run.stream(after=found[-1].id if found else None), 3):
            found += some
    assert texts(found) == [f"{attempt}:{number}" for attempt in (1, 2) for number in range(100)]


async def test_a_reader_survives_a_server_that_is_gone_for_a_while(url: str, eventually: Eventually) -> None:
    writer, goes_on = Fabric(url), asyncio.Event()

    @writer.task
    async def write(ctx: Context) -> None:
        await ctx.stream.write("before")
        await goes_on.wait()
        await ctx.stream.write("after")

    async with Proxy(url) as proxy, writer, writer.worker(), Fabric(proxy.url) as reader:
        run = await write.submit()
        frames = reader.run(run.id).stream()
        assert texts(await read(frames, 1)) == ["before"]
        rest = asyncio.create_task(read(frames))
        await eventually(lambda: parts_of(reader.engine).wakeups.hints.is_listening)
        proxy.refuses = True
        proxy.cut()
        goes_on.set()
        await run.result(timeout=60)
        refused = proxy.connections
        await eventually(lambda: proxy.connections > refused + 2)
        assert not rest.done()
        proxy.refuses = False
        assert texts(await rest) == ["after"]


async def test_a_reader_survives_sessions_that_the_server_ends(url: str, connection: asyncpg.Connection) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def write(ctx: Context) -> None:
        for number in range(30):
            await ctx.stream.write(str(number), flush=True)

    async with fabric, fabric.worker(lease_ttl=60):
        run = await write.submit()
        found: list[RunFrame] = []
        async for frame in run.stream():
            found.append(frame)
            if len(found) in (5, 15, 25):
                await connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and application_name = 'flowfabric'"
                )
        await run.result(timeout=60)
    assert texts(found) == [str(number) for number in range(30)]


async def test_a_reader_ends_with_an_error_when_its_fabric_closes(url: str, eventually: Eventually) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        run = await job.submit()
        reading = asyncio.create_task(read(run.stream()))
        await eventually(lambda: parts_of(fabric.engine).tails._operations == 1)
    with pytest.raises(EngineError) as refused:
        await reading
    assert (refused.value.code, refused.value.detail) == ("unavailable", "run.stream(): the engine is closing")


async def test_a_reader_whose_run_no_worker_can_run_is_warned(
    url: str, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follow, "WAIT_MS", 50)
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        run = await job.submit()
        reading = asyncio.create_task(read(run.stream()))
        await eventually(lambda: "has not started" in caplog.text)
        await run.cancel()
        assert await reading == []

"""Frames are stored once and in order, whatever happens to the connection."""

import asyncio
from typing import Any

import pytest

from engine.state import rounds
from faults.proxy import Action, Fault, Proxy, Side
from fixtures import Eventually, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.engine.stream.append import Streams
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.handle import Handle
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.context import Context
from flowfabric.worker.running import Running
from flowfabric.worker.worker import Worker

from .streaming import numbers, texts


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The connection breaks after every first commit of frames and before its answer, so that each is repeated."""
    append, lost = Streams.append_numbered, set[int]()

    async def append_and_lose(streams: Streams, handle: Handle, frames: Any, *, first_number: int) -> Any:
        answers = await append(streams, handle, frames, first_number=first_number)
        if first_number not in lost:
            lost.add(first_number)
            raise TransportError(outcome_unknown=True)
        return answers

    monkeypatch.setattr(Streams, "append_numbered", append_and_lose)
    return lost


async def test_a_frame_whose_answer_is_lost_is_stored_once(
    engine: Engine, start_worker: StartWorker, submit: Submit, lost: set[int]
) -> None:
    async def job(ctx: Context) -> list[int]:
        for number in numbers(1500):
            await ctx.stream.write(number)
        # Three patches in one transaction.
        return await asyncio.gather(*(ctx.summary.patch({"nth": nth}) for nth in range(3)))

    await start_worker({"job": job})
    run = await submit()
    assert (await engine.wait_for_ending(run, timeout=60)).result == b"[1,2,3]"
    patches = [f'{{"nth":{nth}}}' for nth in range(3)]
    # A patch keeps the newest 64 frames.
    assert await texts(engine, run) == [*numbers(61, 1439), *patches]
    assert len(lost) >= 4


async def test_a_frame_whose_answer_is_lost_with_the_lease_is_not_reported_as_lost(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    append, is_refused = Streams.append_numbered, asyncio.Event()

    async def append_and_lose(streams: Streams, handle: Handle, frames: Any, *, first_number: int) -> Any:
        await append(streams, handle, frames, first_number=first_number)
        monkeypatch.setattr(Running, "is_lease_expired", True)
        is_refused.set()
        raise TransportError(outcome_unknown=True)

    monkeypatch.setattr(Streams, "append_numbered", append_and_lose)

    async def job(ctx: Context) -> None:
        await ctx.stream.write("a")
        await is_refused.wait()

    await start_worker({"job": job})
    run = await submit()
    await eventually(lambda: "1 frame of its stream may not be stored: transport" in caplog.text)
    assert await texts(engine, run) == ["a"]


@pytest.mark.usefixtures("lost")
async def test_a_refused_patch_whose_answer_is_lost_is_refused_alone(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    large = "x" * 60_000

    async def job(ctx: Context) -> list[str]:
        for nth in range(17):
            await ctx.summary.patch({str(nth): large})
        patches: list[dict[str, object]] = [{"first": 1}, {"a": 1}, {"17": large}, {"b": 1}]
        answers = await asyncio.gather(*(ctx.summary.patch(each) for each in patches), return_exceptions=True)
        return [answer.code if isinstance(answer, EngineError) else str(answer) for answer in answers]

    await start_worker({"job": job})
    result = (await engine.wait_for_ending(await submit(), timeout=60)).result
    assert result == b'["18","19","retention_limit_exceeded","20"]'


async def test_frames_are_stored_once_and_in_order_although_connections_break_at_any_message(
    url: str, submit: Submit, engine: Engine
) -> None:
    """A cut leaves it unknown whether the frames in progress are stored; the repeat must store them once."""
    faults: list[Fault] = []
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url)) as cut:

        async def job(ctx: Context) -> list[int]:
            versions = []
            proxy.arm(faults[-1])
            for number in range(3):
                await ctx.stream.write(f"{number}a")
                await ctx.stream.write(f"{number}b")
                versions.append(await ctx.summary.patch({"done": number}))
            return versions

        async with Worker(cut, lanes=["default"], handlers={"job": job}, reconcile=False):
            for action in (Action.CUT_BEFORE, Action.CUT_AFTER, Action.DROP_ANSWER):
                for nth in rounds(4, whole=30):
                    faults.append(Fault(action=action, side=Side.CLIENT, nth=nth + 1))
                    run = await submit()
                    ended = await engine.wait_for_ending(run, timeout=60)
                    assert (ended.outcome, ended.result) == (TerminalOutcome.SUCCESS, b"[1,2,3]"), faults[-1]
                    expected = [text for n in range(3) for text in (f"{n}a", f"{n}b", f'{{"done":{n}}}')]
                    # A cut that takes effect late can lose the answer of a claim: then the next attempt runs.
                    attempt_index = await engine.read_current_attempt_index(run)
                    assert await texts(engine, run, attempt_index) == expected, faults[-1]
                    assert proxy.triggered, faults[-1]
                    proxy.arm(None)

"""Frames that a worker numbers: a repeat is not stored again."""

import asyncio
from collections.abc import Sequence

from fixtures import Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.stream import AppendFrameOutcome, DurableSummary, Frame


def frames(*texts: str) -> list[Frame]:
    """A frame for each text; a JSON object is a patch."""
    return [
        Frame(bytes=text.encode(), mode=DurableSummary()) if text.startswith("{") else Frame(bytes=text.encode())
        for text in texts
    ]


async def append(engine: Engine, handle: Handle, first_number: int, *texts: str) -> list[AppendFrameOutcome]:
    """Append numbered frames, none of which is refused."""
    answers: Sequence[AppendFrameOutcome | EngineError] = await parts_of(engine).streams.append_numbered(
        handle, frames(*texts), first_number=first_number
    )
    assert not any(isinstance(answer, EngineError) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, AppendFrameOutcome)]


async def stored(engine: Engine, handle: Handle) -> list[str]:
    found = await engine.read_stream(handle.execution_id, handle.attempt_index)
    return [frame.text for frame in found.frames]


async def test_numbered_frames_that_are_repeated_are_stored_once(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    first = await append(engine, handle, 1, "a", "b")
    assert [answer.frame_count for answer in first] == [1, 2]
    assert [answer.frame_count for answer in await append(engine, handle, 1, "a", "b")] == [2, 2]
    # Only the first frame of this call is a repeat.
    assert [answer.frame_count for answer in await append(engine, handle, 2, "b", "c")] == [2, 3]
    assert await stored(engine, handle) == ["a", "b", "c"]


async def test_the_repeat_of_a_patch_is_answered_with_the_version_that_it_made(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    texts = ('{"n": 1}', "a", '{"n": 2}', '{"n": 3}', "b")
    for _ in range(2):
        answers = await append(engine, handle, 1, *texts)
        assert [answer.summary_version for answer in answers] == [1, None, 2, 3, None]
    summary = await engine.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert (summary.version, summary.document) == (3, {"n": 3})
    assert await stored(engine, handle) == list(texts)


async def test_frames_without_numbers_do_not_count_as_numbered(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    for text in ("x", "y"):
        await engine.append_frame(handle, Frame(bytes=text.encode()))
    await append(engine, handle, 1, "a")
    await engine.append_frame(handle, Frame(bytes=b"z"))
    await append(engine, handle, 1, "a")
    await append(engine, handle, 2, "b")
    assert await stored(engine, handle) == ["x", "y", "a", "z", "b"]


async def test_a_new_lease_numbers_its_frames_from_one_again(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await append(engine, handle, 1, "a", "b")
    await engine.hand_back(handle)
    again = (await given.claim()).handle
    assert (again.execution_id, again.attempt_index) == (handle.execution_id, handle.attempt_index)
    await append(engine, again, 1, "c")
    assert await stored(engine, again) == ["a", "b", "c"]


async def test_a_call_that_arrives_after_its_own_repeat_stores_nothing(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await asyncio.gather(*(append(engine, handle, 1, "a", "b") for _ in range(5)))
    assert await stored(engine, handle) == ["a", "b"]

"""Frames that a worker numbers: a repeat is not stored again."""

import asyncio
from collections.abc import Sequence

import asyncpg

from fixtures import Given, Rows
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


async def try_all(
    engine: Engine, handle: Handle, first_number: int, frames: Sequence[Frame]
) -> Sequence[AppendFrameOutcome | EngineError]:
    """Append numbered frames."""
    answers: Sequence[AppendFrameOutcome | EngineError] = await parts_of(engine).streams.append_numbered(
        handle, frames, first_number=first_number
    )
    return answers


def codes(answers: Sequence[AppendFrameOutcome | EngineError]) -> list[object]:
    """The version of the summary that each frame made, or the code of its refusal."""
    return [answer.code if isinstance(answer, EngineError) else answer.summary_version for answer in answers]


async def append(engine: Engine, handle: Handle, first_number: int, *texts: str) -> list[AppendFrameOutcome]:
    """Append numbered frames, none of which is refused."""
    answers = await try_all(engine, handle, first_number, frames(*texts))
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


LARGE = "x" * 60_000
POISONED = """
create function check_frames() returns trigger language plpgsql as $$
begin
  if exists (select from added where frame_type = 'poison') then
    raise 'poison' using errcode = 'check_violation';
  elsif exists (select from added where frame_type = 'busy') then
    raise 'busy' using errcode = 'lock_not_available';
  end if;
  return null;
end $$;
create trigger check_frames after insert on stream_frame referencing new table as added
  for each statement execute function check_frames();
"""


async def test_a_group_is_stored_up_to_its_first_refused_frame(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await append(engine, handle, 1, *(f'{{"{nth}":"{LARGE}"}}' for nth in range(17)))
    group = frames('{"first":1}', '{"a":1}', f'{{"17":"{LARGE}"}}', '{"b":1}')
    for _ in range(2):
        # The second call repeats the first one: the refused frame is refused again.
        assert codes(await try_all(engine, handle, 18, group)) == [18, 19, "retention_limit_exceeded"]
    # The refused frame has the number 20.
    for _ in range(2):
        assert codes(await try_all(engine, handle, 21, frames('{"b":1}', "c"))) == [20, None]
    assert (await stored(engine, handle))[17:] == ['{"first":1}', '{"a":1}', '{"b":1}', "c"]


async def test_a_group_whose_first_frame_is_refused_creates_no_stream(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    async with rows.unchanged():
        assert codes(await try_all(engine, handle, 1, frames("{", "{}"))) == ["invalid_input"]
    assert codes(await try_all(engine, handle, 2, frames("{}"))) == [1]


async def test_a_group_of_a_lost_lease_is_refused_with_one_answer(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await append(engine, handle, 1, "a")
    await engine.complete(handle, b"")
    assert codes(await try_all(engine, handle, 2, frames("b", "c"))) == ["stream_closed"]


async def test_frames_behind_a_fault_of_the_store_are_not_stored(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    """A later number that is stored would make the repeat of an earlier one look stored."""
    handle = await given.claimed()
    await append(engine, handle, 1, "a")
    await connection.execute(POISONED)
    # The poisoned frame splits the group.
    types = ("", "busy", "poison", "")
    group = [Frame(bytes=b"%d" % nth, frame_type=name) for nth, name in enumerate(types, 2)]
    assert codes(await try_all(engine, handle, 2, group)) == [None, "retry_exhausted"]
    assert codes(await try_all(engine, handle, 4, group[2:])) == ["other"]
    assert await stored(engine, handle) == ["a", "2"]
    await connection.execute("drop trigger check_frames on stream_frame")
    assert codes(await try_all(engine, handle, 2, group)) == [None] * 4
    assert await stored(engine, handle) == ["a", "2", "3", "4", "5"]

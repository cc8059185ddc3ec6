"""Frames, and the stored rows of streams, for the tests of writers."""

from collections.abc import Awaitable, Sequence
from typing import Any

from engine.state import refused
from fixtures import Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.stream import (
    AppendFrameOutcome,
    BestEffortLive,
    BestEffortLiveConfig,
    DurableSummary,
    Frame,
    StreamFrame,
    StreamFrames,
)

SUMMARY = DurableSummary()
STREAM_TABLES = ("stream", "stream_frame", "stream_summary")


def live(ttl_ms: int = 10_000, **config: Any) -> BestEffortLive:
    """The mode of best-effort frames."""
    return BestEffortLive(config=BestEffortLiveConfig(ttl_ms=ttl_ms, **config))


async def append(engine: Engine, handle: Handle, data: bytes | str = b"x", **fields: Any) -> AppendFrameOutcome:
    """Append one frame."""
    payload = data.encode() if isinstance(data, str) else data
    return await engine.append_frame(handle, Frame(bytes=payload, **fields))


async def patch(engine: Engine, handle: Handle, text: str) -> AppendFrameOutcome:
    """Append one patch to the summary."""
    return await append(engine, handle, text, mode=SUMMARY)


async def read(engine: Engine, handle: Handle) -> StreamFrames:
    """What a reader of the attempt sees."""
    return await engine.read_stream(handle.execution_id, handle.attempt_index, count_limit=10_000)


async def frames(engine: Engine, handle: Handle) -> Sequence[StreamFrame]:
    """The frames that a reader of the attempt sees."""
    return (await read(engine, handle)).frames


async def payloads(engine: Engine, handle: Handle) -> list[bytes]:
    """The payloads that a reader of the attempt sees."""
    return [frame.payload for frame in await frames(engine, handle)]


async def stored(rows: Rows, handle: Handle) -> dict[str, Any]:
    """The stored row of the stream of the attempt."""
    execution = uuid_of(handle.execution_id)
    (row,) = await rows.of("stream", execution_id=execution, attempt_index=handle.attempt_index)
    return row


async def stored_frames(rows: Rows, handle: Handle) -> list[dict[str, Any]]:
    """The stored frames of the attempt in order, hidden ones too."""
    execution = uuid_of(handle.execution_id)
    found = await rows.of("stream_frame", execution_id=execution, attempt_index=handle.attempt_index)
    return sorted(found, key=lambda row: (row["ms"], row["seq"]))


async def refused_unwritten(rows: Rows, call: Awaitable[object], code: str, detail: str | None = None) -> EngineError:
    """Return the error of a call that must be refused and must not write anything."""
    async with rows.unchanged():
        return await refused(call, code, detail)


def code_of(answer: object) -> object:
    """The code of a refusal, or the answer itself."""
    return answer.code if isinstance(answer, EngineError) else answer

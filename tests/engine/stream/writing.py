"""For tests of streams: frames, what readers see of them, stored rows, and waiting readers."""

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from engine.state import refused
from fixtures import Eventually, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
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
    StreamMode,
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


async def append_each(engine: Engine, handle: Handle, *data: str | bytes, **fields: Any) -> list[str]:
    """Append frames one after the other; return their ids."""
    return [(await append(engine, handle, each, **fields)).stream_id for each in data]


async def append_in_modes(engine: Engine, handle: Handle, frames: Iterable[tuple[str, StreamMode]]) -> None:
    """Append frames of different modes."""
    for text, mode in frames:
        await append(engine, handle, text, mode=mode)


async def patch(engine: Engine, handle: Handle, text: str) -> AppendFrameOutcome:
    """Append one patch to the summary."""
    return await append(engine, handle, text, mode=SUMMARY)


def texts(found: StreamFrames) -> list[str]:
    """The payloads of frames as text."""
    return [frame.text for frame in found.frames]


def ids(found: StreamFrames) -> list[str]:
    """The ids of frames."""
    return [frame.id for frame in found.frames]


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


async def parked(engine: Engine, count: int, eventually: Eventually) -> None:
    """Wait until this many tails are parked: in progress, not woken, and without a query or a connection."""
    parts = parts_of(engine)
    size = engine.settings.database_pool_size

    def are_parked() -> bool:
        is_ready = parts.wakeups.hints.is_listening or not engine.settings.listen
        tails = parts.tails
        woken = [tail for tail in tails._parked._tails if tail.changed.is_set()]
        return (
            is_ready
            and tails._operations == count
            and not woken
            and not parts.wakeups.streams_missed.is_set()
            and tails._queries._value == max(size // 2, 1)
            and parts.store.database._slots._value == size
        )

    await eventually(are_parked)

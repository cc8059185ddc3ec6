"""Frames for the tests of readers, written by real appends."""

from collections.abc import Iterable
from typing import Any

from flowfabric.engine.engine import Engine
from flowfabric.model.handle import Handle
from flowfabric.model.stream import (
    BestEffortLive,
    BestEffortLiveConfig,
    DurableSummary,
    Frame,
    StreamFrames,
    StreamMode,
)

SUMMARY = DurableSummary()
LIVE = BestEffortLive(config=BestEffortLiveConfig(ttl_ms=10_000))


async def append(engine: Engine, handle: Handle, *texts: str | bytes, **fields: Any) -> list[str]:
    """Append one frame per text, one after the other; return their ids."""
    ids = []
    for text in texts:
        data = text if isinstance(text, bytes) else text.encode()
        ids.append((await engine.append_frame(handle, Frame(bytes=data, **fields))).stream_id)
    return ids


async def append_in_modes(engine: Engine, handle: Handle, frames: Iterable[tuple[str, StreamMode]]) -> None:
    """Append frames of different modes."""
    for text, mode in frames:
        await append(engine, handle, text, mode=mode)


def texts(found: StreamFrames) -> list[str]:
    """The payloads of frames as text."""
    return [frame.text for frame in found.frames]


def ids(found: StreamFrames) -> list[str]:
    """The ids of frames."""
    return [frame.id for frame in found.frames]

"""The streams of attempts: frames and their modes as `append_frame` takes them, and what readers get."""

from flowfabric.model.stream import (
    AppendFrameOutcome,
    BestEffortLive,
    BestEffortLiveConfig,
    ClosedReason,
    Durable,
    DurableSummary,
    Frame,
    FrameId,
    FrameKind,
    FrameMode,
    StreamFrame,
    StreamFrames,
    StreamMode,
    SummaryDocument,
    TailVisibility,
)
from flowfabric.model.summary import PatchKind

__all__ = [
    "AppendFrameOutcome",
    "BestEffortLive",
    "BestEffortLiveConfig",
    "ClosedReason",
    "Durable",
    "DurableSummary",
    "Frame",
    "FrameId",
    "FrameKind",
    "FrameMode",
    "PatchKind",
    "StreamFrame",
    "StreamFrames",
    "StreamMode",
    "SummaryDocument",
    "TailVisibility",
]

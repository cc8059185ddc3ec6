"""The streams of attempts: frames and their modes as `append_frame` takes them, and what readers get."""

from flowfabric.fabric.follow import RunFrame, RunFrames
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
from flowfabric.model.summary import NULL, PatchKind
from flowfabric.worker.streaming import FrameWriter, SummaryWriter

__all__ = [
    "NULL",
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
    "FrameWriter",
    "PatchKind",
    "RunFrame",
    "RunFrames",
    "StreamFrame",
    "StreamFrames",
    "StreamMode",
    "SummaryDocument",
    "SummaryWriter",
    "TailVisibility",
]

"""Batches of frames of one lease, and the parameters of the statements that append them."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.faults import StoreFault
from flowfabric.db.statements import full_columns, short_columns
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, split_execution_id
from flowfabric.model.open_stream import OpenStream
from flowfabric.model.stream import AppendFrameOutcome, DurableSummary, Frame
from flowfabric.model.summary import encode_document

_TARGET_COLUMNS = ("partition_keys", "execution_ids", "attempt_indexes", "lease_epochs", "lease_ids")
_KEY_COLUMNS = _TARGET_COLUMNS[:3]
_FRAME_COLUMNS = (
    "places",
    "mss",
    "seqs",
    "frame_nos",
    "modes",
    "frame_types",
    "payloads",
    "correlation_ids",
    "summary_versions",
    "ttls_ms",
)
_STREAM_COLUMNS = (
    *_KEY_COLUMNS,
    "last_mss",
    "last_seqs",
    "frame_counts",
    "first_frame_nos",
    "total_bytes",
    "have_durable_frame",
    "ema_rates_hz",
    "last_append_times",
    "maxlens_applied",
    "expiries",
    "sweeps",
    "numbered_epochs",
    "numbered_counts",
    "trims",
)
_SUMMARY_COLUMNS = ("summary_places", "documents", "versions", "patch_kinds", "first_applied_times")


class Writer(NamedTuple):
    """The stream that a worker writes to, and the lease under which it does."""

    execution_id: ExecutionId
    attempt_index: int
    lease_epoch: int
    lease_id: UUID

    @classmethod
    def of(cls, handle: Handle) -> "Writer":
        """The writer of a handle."""
        return cls(handle.execution_id, handle.attempt_index, handle.lease_epoch, handle.lease_id)


class FrameBatch:
    """Frames of one lease that are appended in one transaction, in the order of the calls."""

    MAX_FRAMES = 500
    MAX_BYTES = 1_048_576
    BYTES_LIKE_A_FRAME = 2_048
    """A frame this large takes about twice the time of an empty one."""

    __slots__ = ("_answers", "_bytes", "first_number", "frames", "key", "writer")

    def __init__(self, writer: Writer, frames: Iterable[Frame] = (), *, first_number: int | None = None) -> None:
        self.writer = writer
        self.key = (*split_execution_id(writer.execution_id), writer.attempt_index)
        self.frames = list(frames)
        self.first_number = first_number
        """The number of the first frame among those of its lease, if the writer numbers them."""
        self._answers: list[asyncio.Future[AppendFrameOutcome]] = []
        self._bytes = sum(len(frame.bytes) for frame in self.frames)

    @property
    def is_full(self) -> bool:
        """Whether the next frame needs another batch."""
        return len(self.frames) >= self.MAX_FRAMES or self._bytes >= self.MAX_BYTES

    @property
    def weight(self) -> int:
        """What the batch costs, in small frames."""
        return len(self.frames) + self._bytes // self.BYTES_LIKE_A_FRAME

    @property
    def is_numbered(self) -> bool:
        """Whether the writer numbers the frames; then those after the first refused one are not appended."""
        return self.first_number is not None

    @property
    def tried(self) -> list[Frame]:
        """The frames that are tried if each of them is refused."""
        return self.frames[:1] if self.is_numbered else self.frames

    @property
    def has_patches(self) -> bool:
        """Whether the batch needs the summary of its stream."""
        return any(isinstance(frame.mode, DurableSummary) for frame in self.frames)

    def split(self) -> "list[FrameBatch]":
        """A batch for each frame."""
        first = self.first_number
        return [
            FrameBatch(self.writer, [frame], first_number=None if first is None else first + nth)
            for nth, frame in enumerate(self.frames)
        ]

    def add(self, frame: Frame) -> "asyncio.Future[AppendFrameOutcome]":
        """Add a frame; return the future of its outcome, which its caller may cancel without affecting the others."""
        answer: asyncio.Future[AppendFrameOutcome] = asyncio.get_running_loop().create_future()
        self.frames.append(frame)
        self._answers.append(answer)
        self._bytes += len(frame.bytes)
        return answer

    def answer(self, appended: "asyncio.Future[list[AppendFrameOutcome | EngineError]]") -> None:
        """Resolve the future of every caller with its outcome, or with the fault that failed the whole batch."""
        fault = appended.exception()
        answers = [fault] * len(self.frames) if fault is not None else appended.result()
        for waiting, answer in zip(self._answers, answers, strict=True):
            if waiting.done():
                continue
            if isinstance(answer, BaseException):
                # Each raised exception collects its own traceback.
                waiting.set_exception(answer.copy() if isinstance(answer, StoreFault | EngineError) else answer)
            else:
                waiting.set_result(answer)


def target_columns(batches: Sequence[FrameBatch]) -> Mapping[str, object]:
    """The parameters of `lock_streams` and `open_streams`."""
    rows = [(*batch.key, batch.writer.lease_epoch, batch.writer.lease_id) for batch in batches]
    return full_columns(_TARGET_COLUMNS, rows)


def key_columns(batches: Sequence[FrameBatch]) -> Mapping[str, object]:
    """The parameters of `read_summaries`."""
    return full_columns(_KEY_COLUMNS, [batch.key for batch in batches])


def write_columns(grown: Sequence[tuple[FrameBatch, OpenStream]]) -> Mapping[str, object]:
    """The parameters of `insert_frames`: new frames, the streams as they are now, and changed summaries.

    Frames and summaries name their stream by its place among the streams.
    """
    frames: list[tuple[object, ...]] = []
    streams: list[tuple[object, ...]] = []
    summaries: list[tuple[object, ...]] = []
    for place, (batch, stream) in enumerate(grown, 1):
        frames += [
            (
                place,
                id.ms,
                id.seq,
                number,
                mode.value,
                frame.frame_type,
                frame.bytes,
                frame.correlation_id,
                version,
                ttl_ms,
            )
            for id, number, mode, frame, version, ttl_ms in stream.new_frames
        ]
        streams.append(
            (
                *batch.key,
                stream.last.ms,
                stream.last.seq,
                stream.frame_count,
                stream.first_frame_no,
                stream.total_bytes,
                stream.has_durable_frame,
                stream.ema_rate_hz,
                stream.last_append_ts_ms,
                stream.maxlen_applied_last,
                stream.expires_at,
                stream.sweep_at,
                stream.numbered_epoch,
                stream.numbered_count,
                stream.trim_limit,
            )
        )
        if (summary := stream.summary) is not None and summary.is_changed:
            document = encode_document(summary.document)
            summaries.append((place, document, summary.version, summary.patch_kind, summary.first_applied_ms))
    return {
        **(short_columns(_FRAME_COLUMNS, frames) if frames else full_columns(_FRAME_COLUMNS, [])),
        **full_columns(_STREAM_COLUMNS, streams),
        **full_columns(_SUMMARY_COLUMNS, summaries),
    }

"""An open stream as appends change it: ids, counters, the frames that readers see, and the summary."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowfabric.model.errors import error
from flowfabric.model.stream import (
    FIRST,
    SUMMARY_MAXLEN,
    AppendFrameOutcome,
    BestEffortLive,
    Durable,
    DurableSummary,
    Frame,
    FrameId,
    FrameMode,
    live_window,
    next_id,
)
from flowfabric.model.summary import MAX_SUMMARY_BYTES, PatchKind, encode_document, growth, merge_patch, read_patch

TRIM_STEP = 256
"""Hidden frames are deleted whenever the first visible frame passes a multiple of this number."""
MAX_TRIMMED = 4096
"""The most hidden frames that one append deletes; the sweep and later appends delete the rest."""
SWEEP_STEPS = 8
"""The time of the sweep follows the expiry in steps of this part of the time left, a quarter of the ttl."""
MIN_SWEEP_STEP_MS = 1_000

NEW_STREAM: Mapping[str, Any] = {
    "last_ms": FIRST.ms,
    "last_seq": FIRST.seq,
    "frame_count": 0,
    "first_frame_no": 1,
    "total_bytes": 0,
    "has_durable_frame": False,
    "ema_rate_hz": None,
    "last_append_ts_ms": None,
    "maxlen_applied_last": None,
    "expires_at": None,
    "sweep_at": None,
    "numbered_epoch": 0,
    "numbered_count": 0,
}
"""The columns of a stream before its first frame, with no time of the sweep to keep."""


class NewFrame(NamedTuple):
    """A frame to be stored; its number counts the frames of the stream from 1."""

    id: FrameId
    number: int
    mode: FrameMode
    frame: Frame
    summary_version: int | None
    ttl_ms: int | None


class Summary:
    """The summary of a stream and its version; version 0 is the empty summary before the first patch."""

    __slots__ = ("document", "first_applied_ms", "is_changed", "patch_kind", "size", "version")

    def __init__(self, document: dict[str, Any], version: int, first_applied_ms: int, size: int | None = None) -> None:
        self.document = document
        self.size = len(encode_document(document)) if size is None else size
        """The bytes of the encoded document."""
        self.version = version
        self.first_applied_ms = first_applied_ms
        self.patch_kind = PatchKind.JSON_MERGE_PATCH
        self.is_changed = False


class OpenStream:
    """A stream that the caller has locked, and the frames appended to it so far.

    An append changes the stream as if every frame had been committed by itself. A frame that a later one of the same
    transaction hides is counted, but not stored.
    """

    __slots__ = (
        "_frames",
        "_stored_first",
        "_stored_sweep",
        "ema_rate_hz",
        "expires_at",
        "first_frame_no",
        "frame_count",
        "has_durable_frame",
        "last",
        "last_append_ts_ms",
        "maxlen_applied_last",
        "now",
        "numbered_count",
        "numbered_epoch",
        "retention_maxlen",
        "summary",
        "total_bytes",
    )

    def __init__(self, *, now: int, retention_maxlen: int, stored: Mapping[str, Any] = NEW_STREAM) -> None:
        """Begin at the stored state of a stream."""
        self.now = now
        self.retention_maxlen = retention_maxlen
        self.summary: Summary | None = None
        self.last = FrameId(stored["last_ms"], stored["last_seq"])
        self.frame_count: int = stored["frame_count"]
        self.first_frame_no: int = stored["first_frame_no"]
        self.total_bytes: int = stored["total_bytes"]
        self.has_durable_frame: bool = stored["has_durable_frame"]
        self.ema_rate_hz: float | None = stored["ema_rate_hz"]
        self.last_append_ts_ms: int | None = stored["last_append_ts_ms"]
        self.maxlen_applied_last: int | None = stored["maxlen_applied_last"]
        self.expires_at: int | None = stored["expires_at"]
        self.numbered_epoch: int = stored["numbered_epoch"]
        self.numbered_count: int = stored["numbered_count"]
        self._stored_first: int = self.first_frame_no
        self._stored_sweep: int | None = stored["sweep_at"]
        self._frames: list[NewFrame] = []

    def append(self, frame: Frame) -> AppendFrameOutcome:
        """Append a frame; raise if its patch is refused, which changes nothing."""
        mode = frame.mode
        # Before any change: only a patch can be refused.
        version = self._patch(frame) if isinstance(mode, DurableSummary) else None
        now = self.now
        if self.expires_at is not None and self.expires_at <= now:
            self.first_frame_no = self.frame_count + 1
            self.expires_at = None
        ttl_ms = None
        match mode:
            case Durable():
                maxlen = self.retention_maxlen
            case DurableSummary():
                maxlen = SUMMARY_MAXLEN
            case BestEffortLive(config=config):
                window = live_window(config, now, self.ema_rate_hz, self.last_append_ts_ms)
                self.ema_rate_hz, self.last_append_ts_ms = window.ema_rate_hz, now
                self.maxlen_applied_last = maxlen = window.maxlen
                self.expires_at = window.expires_at
                ttl_ms = config.ttl_ms
        self.has_durable_frame = self.has_durable_frame or not isinstance(mode, BestEffortLive)
        if self.has_durable_frame:
            self.expires_at = None
        self.last = next_id(now, self.last)
        self.frame_count += 1
        self.total_bytes += len(frame.bytes)
        self.first_frame_no = max(self.first_frame_no, self.frame_count - maxlen + 1)
        self._frames.append(NewFrame(self.last, self.frame_count, mode.frame_mode, frame, version, ttl_ms))
        return AppendFrameOutcome(stream_id=str(self.last), frame_count=self.frame_count, summary_version=version)

    def append_numbered(self, frame: Frame, epoch: int, number: int) -> AppendFrameOutcome:
        """Append a frame that is known to be new, and remember its number among the frames of its lease."""
        outcome = self.append(frame)
        self.numbered_epoch, self.numbered_count = epoch, number
        return outcome

    def count_stored(self, epoch: int, first_number: int, count: int) -> int:
        """How many of these numbered frames are stored already, because their writer repeats them."""
        stored = self.numbered_count if self.numbered_epoch == epoch else 0
        return min(max(stored + 1 - first_number, 0), count)

    def answers_again(self, frames: Sequence[Frame]) -> list[AppendFrameOutcome]:
        """The answers to the newest frames of the stream, which are repeated; all of them have the newest id."""
        answers: list[AppendFrameOutcome] = []
        version = 0 if self.summary is None else self.summary.version
        for frame in reversed(frames):
            is_patch = isinstance(frame.mode, DurableSummary)
            answers.append(
                AppendFrameOutcome(
                    stream_id=str(self.last),
                    frame_count=self.frame_count,
                    summary_version=version if is_patch else None,
                )
            )
            version -= is_patch
        return answers[::-1]

    def _patch(self, frame: Frame) -> int:
        """Merge the patch of a frame into the summary; return the new version."""
        summary = self.summary
        assert summary is not None, "the summary is read before a patch is appended"
        patch = read_patch(frame.bytes)
        size = summary.size + growth(summary.document, patch)
        if size > MAX_SUMMARY_BYTES:
            raise error(
                "retention_limit_exceeded",
                f"with this patch the summary has {size} bytes; at most {MAX_SUMMARY_BYTES} bytes are stored, "
                "delete keys that are not needed by setting them to null",
            )
        summary.document, summary.size = merge_patch(summary.document, patch), size
        summary.version += 1
        summary.is_changed = True
        if summary.version == 1:
            summary.first_applied_ms = self.now
        return summary.version

    @property
    def has_grown(self) -> bool:
        """Whether a frame was appended."""
        return bool(self._frames)

    @property
    def new_frames(self) -> list[NewFrame]:
        """The frames to store: those that are not hidden already."""
        return [each for each in self._frames if each.number >= self.first_frame_no]

    @property
    def sweep_at(self) -> int | None:
        """When the sweep is to look at the stream; None to keep the stored time.

        It follows the expiry in steps, because the stored time is indexed.
        """
        if self.trim_limit >= MAX_TRIMMED:
            return self.now
        stored, expires_at = self._stored_sweep, self.expires_at
        if expires_at is None or stored is None:
            return expires_at
        step = max((expires_at - self.now) // SWEEP_STEPS, MIN_SWEEP_STEP_MS)
        # If it is due, the sweep itself sets the next time.
        return expires_at if stored > self.now and abs(expires_at - stored) >= step else None

    @property
    def trim_limit(self) -> int:
        """How many of the oldest frames to check for deletion; 0 unless it is time to."""
        reached = self._stored_first - self._stored_first % TRIM_STEP
        if self.first_frame_no < reached + TRIM_STEP:
            return 0
        # More than those hidden since the last time, so that what MAX_TRIMMED has left is deleted too.
        return min(self.first_frame_no - reached + TRIM_STEP, MAX_TRIMMED)

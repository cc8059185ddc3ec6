"""The streams of attempts: frames, their modes, their ids, cursors, and what readers get."""

import base64
import builtins
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Self

from flowfabric.model.errors import error
from flowfabric.model.policy_checks import INT32, MAX_MS, set_field
from flowfabric.model.summary import PatchKind, decode_document
from flowfabric.model.text import check_length, check_range, shown, word_of

MAX_FRAME_BYTES = 65_536
MAX_TEXT = 1_024
"""The largest number of characters in a text field of a frame."""
SUMMARY_MAXLEN = 64
"""How many frames a stream keeps after a summary frame."""
MAX_COUNT = 10_000
"""The most frames in one answer."""
MAX_BLOCK_MS = 30_000
"""The longest wait of a tail."""

_FLOOR = 64
_CEILING = 16_384
_ALPHA = 0.2
_MAX_SEQ = INT32 - 1
_UINT64 = 2**64 - 1
_FRAME_ID = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_RUN_FRAME_ID = re.compile(r"[0-9]+:([0-9]+-[0-9]+)")
"""The id of a frame among all frames of its run, with the index of the attempt in front."""


class FrameKind(StrEnum):
    """What a frame holds; its name is the type of frames that have none."""

    STDOUT = "stdout"
    STDERR = "stderr"
    EVENT = "event"
    BLOB = "blob"


class FrameMode(StrEnum):
    """How a stored frame is kept."""

    DURABLE = "durable"
    SUMMARY = "summary"
    BEST_EFFORT = "best_effort"


class ClosedReason(StrEnum):
    """Why no frame can be appended to a stream any more."""

    ATTEMPT_SUCCESS = "attempt_success"
    ATTEMPT_FAILURE = "attempt_failure"
    ATTEMPT_CANCELLED = "attempt_cancelled"
    EXPIRED = "expired"
    """The attempt timed out, or the execution passed its deadline."""
    SUSPENSION_TIMEOUT = "suspension_timeout"
    LEASE_EXPIRED = "lease_expired"
    RECLAIMED = "reclaimed"
    DEPENDENCY_IMPOSSIBLE = "dependency_impossible"
    ATTEMPT_INTERRUPTED = "attempt_interrupted"
    """An operator revoked the lease."""


class TailVisibility(StrEnum):
    """Which frames a tail returns."""

    ALL = ""
    EXCLUDE_BEST_EFFORT = "exclude_best_effort"


@dataclass(frozen=True, kw_only=True, slots=True)
class Durable:
    """Keep the newest frames of the stream, as many as the stream policy says."""

    frame_mode: ClassVar[FrameMode] = FrameMode.DURABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class DurableSummary:
    """Merge the payload, a JSON merge patch, into the summary of the stream, and append it as a frame."""

    frame_mode: ClassVar[FrameMode] = FrameMode.SUMMARY
    patch_kind: PatchKind = PatchKind.JSON_MERGE_PATCH

    def __post_init__(self) -> None:
        """Reject an unknown kind of patch."""
        if (kind := word_of(PatchKind, self.patch_kind)) is None:
            raise error(
                "invalid_input",
                f"unsupported patch_kind {shown(self.patch_kind)}; the only kind is '{PatchKind.JSON_MERGE_PATCH}'",
            )
        set_field(self, "patch_kind", kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestEffortLiveConfig:
    """How many frames a live stream keeps, and for how long: about twice what arrives within `ttl_ms`.

    A floor or a ceiling that is not positive, and an alpha outside (0, 1], is replaced by its default.
    """

    ttl_ms: int
    maxlen_floor: int = _FLOOR
    maxlen_ceiling: int = _CEILING
    ema_alpha: float = _ALPHA

    def __post_init__(self) -> None:
        """Reject fields of a wrong type; replace those that are not positive, and an alpha outside (0, 1]."""
        check_range(self.ttl_ms, "ttl_ms", 0, MAX_MS)
        check_range(self.maxlen_floor, "maxlen_floor", -INT32, INT32)
        check_range(self.maxlen_ceiling, "maxlen_ceiling", -INT32, INT32)
        if isinstance(self.ema_alpha, bool) or not isinstance(self.ema_alpha, int | float):
            raise error("invalid_input", f"ema_alpha: must be a number, got {shown(self.ema_alpha)}")
        floor = self.maxlen_floor if self.maxlen_floor > 0 else _FLOOR
        ceiling = self.maxlen_ceiling if self.maxlen_ceiling > 0 else _CEILING
        set_field(self, "maxlen_floor", floor)
        set_field(self, "maxlen_ceiling", max(ceiling, floor))
        set_field(self, "ema_alpha", self.ema_alpha if 0 < self.ema_alpha <= 1 else _ALPHA)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestEffortLive:
    """Keep a window of the newest frames; a stream of such frames alone expires when no more arrive."""

    frame_mode: ClassVar[FrameMode] = FrameMode.BEST_EFFORT
    config: BestEffortLiveConfig

    def __post_init__(self) -> None:
        """Reject anything except a config."""
        if not isinstance(self.config, BestEffortLiveConfig):
            raise error("invalid_input", f"config: expected a BestEffortLiveConfig, got {shown(self.config)}")


StreamMode = Durable | DurableSummary | BestEffortLive


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A frame as a worker appends it; `seq` is ignored, because the engine assigns the ids."""

    bytes: builtins.bytes = field(repr=False)
    kind: FrameKind = FrameKind.EVENT
    frame_type: str = ""
    correlation_id: str | None = None
    mode: StreamMode = Durable()
    seq: int | None = None

    def __post_init__(self) -> None:
        """Reject fields of a wrong type; an empty frame type becomes the name of the kind."""
        if not isinstance(self.bytes, builtins.bytes):
            advice = "; write text.encode()" if isinstance(self.bytes, str) else ""
            raise error("invalid_input", f"bytes: must be bytes, got {shown(self.bytes)}{advice}")
        if (kind := word_of(FrameKind, self.kind)) is None:
            raise error("invalid_input", f"kind: must be one of {', '.join(FrameKind)}, got {shown(self.kind)}")
        set_field(self, "kind", kind)
        set_field(self, "frame_type", check_length(self.frame_type, "frame_type", MAX_TEXT) or kind.value)
        if self.correlation_id is not None:
            check_length(self.correlation_id, "correlation_id", MAX_TEXT)
        if not isinstance(self.mode, Durable | DurableSummary | BestEffortLive):
            raise error(
                "invalid_input", f"mode: expected Durable, DurableSummary or BestEffortLive, got {shown(self.mode)}"
            )
        if self.seq is not None:
            check_range(self.seq, "seq", 0, _UINT64)


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendFrameOutcome:
    """The id of the new frame, how many frames the attempt has appended, and the version of the summary it made."""

    stream_id: str
    frame_count: int
    summary_version: int | None = None


class FrameId(NamedTuple):
    """The position of a frame: the milliseconds of the clock, and the number within the millisecond."""

    ms: int
    seq: int

    def __str__(self) -> str:
        """Return `<ms>-<seq>`."""
        return f"{self.ms}-{self.seq}"


FIRST = FrameId(0, 0)
"""The position before all frames, and the lowest bound."""
LAST = FrameId(2**63 - 1, INT32)
"""The position after all frames, and the highest bound."""


def next_id(now_ms: int, last: FrameId) -> FrameId:
    """Return the id of the next frame, which is always greater than the last one, even if the clock stepped back."""
    if now_ms > last.ms:
        return FrameId(now_ms, 0)
    if last.seq < _MAX_SEQ:
        return FrameId(last.ms, last.seq + 1)
    return FrameId(last.ms + 1, 0)


_BOUND_ADVICE = "write 'start', 'end', '<ms>' or '<ms>-<seq>'"
_TAIL_ADVICE = "write '<ms>' or '<ms>-<seq>', or '0-0' to start from the beginning"


def lower_bound(cursor: object, name: str = "from") -> FrameId:
    """Return the first position that a cursor includes: `start`, `end`, `<ms>` or `<ms>-<seq>`."""
    if cursor in ("start", "end"):
        return FIRST if cursor == "start" else LAST
    return _parse_position(cursor, name, seq=0)


def upper_bound(cursor: object, name: str = "to") -> FrameId:
    """Return the last position that a cursor includes; `<ms>` means the whole millisecond."""
    if cursor in ("start", "end"):
        return FIRST if cursor == "start" else LAST
    return _parse_position(cursor, name, seq=INT32)


def tail_position(cursor: object, name: str = "after") -> FrameId:
    """Return the position of a cursor after which a tail starts; `start` and `end` are refused."""
    if cursor in ("start", "end"):
        raise error(
            "invalid_input",
            f"{name}: must be the id of a frame, got {shown(cursor)}; write '0-0' to start from the beginning",
        )
    return _parse_position(cursor, name, seq=0, advice=_TAIL_ADVICE)


def _parse_position(cursor: object, name: str, *, seq: int, advice: str = _BOUND_ADVICE) -> FrameId:
    if isinstance(cursor, FrameId):
        cursor = str(cursor)
    if cursor == "":
        raise error("invalid_input", f"{name}: must not be empty; {advice}")
    if cursor in ("-", "+"):
        if advice is _BOUND_ADVICE:
            advice = "write 'start'" if cursor == "-" else "write 'end'"
        raise error("invalid_input", f"{name}: bare '{cursor}' is not a cursor; {advice}")
    text = cursor if isinstance(cursor, str) and len(cursor) <= MAX_TEXT else ""
    if match := _RUN_FRAME_ID.fullmatch(text):
        advice = f"it is an id of run.stream(), whose part after the colon is the cursor: write '{match[1]}'"
    match = _FRAME_ID.fullmatch(text)
    numbers = [int(digits) for digits in match.groups() if digits is not None] if match else []
    if not numbers or max(numbers) > _UINT64:
        raise error("invalid_input", f"{name}: malformed cursor {shown(cursor)}; {advice}")
    return FrameId(min(numbers[0], LAST.ms), min(numbers[1], LAST.seq) if len(numbers) > 1 else seq)


class LiveWindow(NamedTuple):
    """The window of best-effort frames after an append."""

    ema_rate_hz: float
    """The smoothed rate of appends, in frames per second."""
    maxlen: int
    """How many of the newest frames are kept."""
    expires_at: int
    """When the stream expires if no more frames arrive."""


def live_window(config: BestEffortLiveConfig, now_ms: int, rate_hz: float | None, last_ms: int | None) -> LiveWindow:
    """Return the window after an append at this time, given the rate and the time of the previous best-effort one."""
    ttl_ms = max(config.ttl_ms, 1)
    ttl_s = ttl_ms / 1000
    expires_at = min(now_ms + 2 * ttl_ms, LAST.ms)
    floor, ceiling = config.maxlen_floor, config.maxlen_ceiling
    if rate_hz is None or last_ms is None:
        return LiveWindow(floor / (ttl_s * 2), floor, expires_at)
    elapsed_ms = max(now_ms - last_ms, 1)
    rate = config.ema_alpha * (1000 / elapsed_ms) + (1 - config.ema_alpha) * rate_hz
    # Bounded before rounding: the product may be too large for a whole number of frames.
    frames = min(rate * ttl_s * 2, float(ceiling))
    return LiveWindow(rate, min(max(math.ceil(frames), floor), ceiling), expires_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFrame:
    """A frame as readers get it."""

    position: FrameId
    """The id as numbers, which compare in the order of the stream."""
    number: int
    """The number of the frame in its attempt, from 1; a jump shows frames that are no longer kept, or not asked for."""
    payload: bytes = field(repr=False)
    """The bytes that were appended."""
    frame_type: str
    """The type given by the worker, or else the name of the kind."""
    mode: FrameMode = FrameMode.DURABLE
    """How the frame is kept."""
    ts: int
    """When the frame was appended, in milliseconds since the epoch."""
    correlation_id: str | None = None
    """The correlation id given by the worker."""
    summary_version: int | None = None
    """The version of the summary that this frame made."""
    ttl_ms: int | None = None
    """The time given by the worker of a best-effort frame."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return the frame of a stored row."""
        return cls(
            position=FrameId(row["ms"], row["seq"]),
            number=row["frame_no"],
            payload=row["payload"],
            frame_type=row["frame_type"],
            mode=FrameMode(row["mode"]),
            ts=row["at"],
            correlation_id=row["correlation_id"],
            summary_version=row["summary_version"],
            ttl_ms=row["ttl_ms"],
        )

    @property
    def id(self) -> str:
        """The id, `<ms>-<seq>`."""
        return str(self.position)

    @property
    def text(self) -> str:
        """The payload as text; bytes that are not UTF-8 are replaced."""
        return self.payload.decode(errors="replace")

    @property
    def fields(self) -> Mapping[str, str]:
        """The frame as text, with sorted names; a payload that is not UTF-8 is encoded as base64."""
        try:
            payload, encoding = self.payload.decode(), "utf8"
        except UnicodeDecodeError:
            payload, encoding = base64.b64encode(self.payload).decode(), "base64"
        values = {
            "correlation_id": self.correlation_id,
            "encoding": encoding,
            "frame_type": self.frame_type,
            "mode": self.mode,
            "payload": payload,
            "source": "worker",
            "summary_version": self.summary_version,
            "ts": self.ts,
            "ttl_ms": self.ttl_ms,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFrames:
    """Frames in the order of their ids, and when and why the stream was closed, if it was."""

    frames: Sequence[StreamFrame]
    closed_at: int | None = None
    closed_reason: ClosedReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryDocument:
    """The document that the summary frames of an attempt were merged into."""

    document_json: bytes = field(repr=False)
    version: int
    patch_kind: PatchKind
    last_updated_ms: int
    first_applied_ms: int

    @property
    def document(self) -> dict[str, Any]:
        """The decoded document."""
        return decode_document(self.document_json)

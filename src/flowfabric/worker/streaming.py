"""What a handler publishes while it runs: frames of its stream, and patches of its summary."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError, TransportError, error
from flowfabric.model.lease import ClaimedExecution
from flowfabric.model.policy import DurabilityMode
from flowfabric.model.stream import (
    MAX_FRAME_BYTES,
    AppendFrameOutcome,
    Durable,
    DurableSummary,
    Frame,
    FrameKind,
    StreamMode,
)
from flowfabric.model.summary import read_patch
from flowfabric.model.text import shown
from flowfabric.pauses import pauses
from flowfabric.worker.codec import encode_untyped, parts_in, reason
from flowfabric.worker.faults import RETRY_SECONDS, is_bad_input, is_store_fault
from flowfabric.worker.logs import log_about

logger = logging.getLogger(__name__)

MAX_FRAMES = 1000
"""The most frames of a run that wait to be stored; a further write waits until there are fewer."""
MAX_BYTES = 1_048_576
"""The most bytes in these frames."""
GROUP_FRAMES = 500
"""The most frames of a run that are stored in one transaction."""

HELD_SECONDS = 0.01
"""How long a handler may keep the event loop between its writes before a write gives it to the store."""
GIVEN_SECONDS = 1.0
"""The longest time that a write gives to the store, and no longer than the handler has kept the loop."""

FLUSH_SECONDS = 30.0
"""How long the end of a run, or its suspension, waits for its frames to be stored."""
STOPPED_FLUSH_SECONDS = 2.0
"""The same for a run that was stopped, for example because its worker stops."""

Answer = AppendFrameOutcome | EngineError


class StreamingRun(Protocol):
    """A run that holds a lease."""

    @property
    def claimed(self) -> ClaimedExecution: ...

    @property
    def is_lease_held(self) -> bool: ...

    @property
    def lost(self) -> object: ...


class _Queued:
    """A frame that is not stored yet, and the future of its outcome if somebody waits for it."""

    __slots__ = ("answer", "frame")

    def __init__(self, frame: Frame, answer: "asyncio.Future[AppendFrameOutcome] | None") -> None:
        self.frame = frame
        self.answer = answer

    def succeed(self, outcome: AppendFrameOutcome) -> None:
        """Resolve the future with its outcome."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(outcome)

    def fail(self, refusal: EngineError) -> bool:
        """Resolve the future with its refusal; return whether anybody waits for it."""
        if self.answer is None or self.answer.done():
            return False
        self.answer.set_exception(refusal)
        return True


class _LoopHold:
    """Measures for how long a handler has kept the event loop from its next turn."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self) -> None:
        """Measure from now on, until the loop has its next turn."""
        if self._began is None:
            self._began = time.monotonic()
            asyncio.get_running_loop().call_soon(self._end)

    @property
    def seconds(self) -> float:
        """How long the loop has had no turn."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _end(self) -> None:
        self._began = None


class FrameQueue:
    """The frames of a run on their way to the store, which gets them in order, many in one transaction.

    Faults of the store are retried while the lease is held. When a frame is refused because the lease is lost, the
    frames after it are dropped, and every later write is refused as well.
    """

    def __init__(self, engine: Engine, run: StreamingRun) -> None:
        self._streams = parts_of(engine).streams
        self._run = run
        self._waiting: deque[_Queued] = deque()
        """The frames that are not stored yet, including those that are being stored."""
        self._bytes = 0
        """The size of these frames."""
        self._task: asyncio.Task[None] | None = None
        """Stores the waiting frames; it ends when there are none."""
        self._finished = 0
        """How many frames were stored or refused so far."""
        self._progressed = asyncio.Event()
        """Set when frames are stored or refused, and then replaced by a new one."""
        self._unreported: list[EngineError] = []
        """The refusals not yet raised to the handler, of frames that nobody waits for."""
        self._refusal: EngineError | None = None
        """Why no more frames are accepted."""
        self._hold = _LoopHold()
        policy = run.claimed.policy
        stream_policy = None if policy is None else policy.stream_policy
        self.is_durable = stream_policy is not None and stream_policy.durability_mode is DurabilityMode.DURABLE
        """Whether every write waits until its frame is stored."""

    async def put(self, frame: Frame) -> None:
        """Queue a frame; wait first if too many are queued.

        If the handler has kept the event loop, wait afterwards until the frame is stored, or as long as it has.
        """
        await self._put(frame, None)
        if (held := self._hold.seconds) > HELD_SECONDS:
            await self.wait_stored(min(held, GIVEN_SECONDS))
        self._hold.begin()

    async def store(self, frame: Frame) -> AppendFrameOutcome:
        """Queue a frame and wait until it is stored."""
        answer: asyncio.Future[AppendFrameOutcome] = asyncio.get_running_loop().create_future()
        await self._put(frame, answer)
        return await answer

    async def flush(self) -> None:
        """Wait until every frame queued so far is stored; raise the error of one that was refused."""
        await self._wait_for_queued()
        self._raise_refusal()

    async def wait_stored(self, seconds: float) -> None:
        """Wait until every frame queued so far is stored or refused, for at most `seconds` and if the lease is held."""
        if self._run.is_lease_held:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wait_for_queued()

    def close(self) -> None:
        """Drop what is not stored, and refuse later writes."""
        is_storing = self._task is not None and self._task.cancel()
        self._drop_waiting(error("stream_closed", "the run has ended first"))
        self._refusal = self._refusal or error(
            "stream_closed", "the handler has returned; await every write before it does"
        )
        if self._unreported and self._run.lost is None:
            # A transaction that has begun may still commit, and one whose answer was lost may have.
            is_unknown = is_storing or any(map(_is_outcome_unknown, self._unreported))
            count, first = len(self._unreported), self._unreported[0]
            frames, were = ("1 frame", "was") if count == 1 else (f"{count} frames", "were")
            text = "%s: %s of its stream " + ("may not be" if is_unknown else f"{were} not") + " stored: %s"
            log_about(self._run.claimed, logger, logging.WARNING, text, self._run, frames, first)

    async def _put(self, frame: Frame, answer: "asyncio.Future[AppendFrameOutcome] | None") -> None:
        self._raise_refusal()
        size = len(frame.bytes)
        while self._waiting and (len(self._waiting) >= MAX_FRAMES or self._bytes + size > MAX_BYTES):
            await self._progressed.wait()
            self._raise_refusal()
        self._waiting.append(_Queued(frame, answer))
        self._bytes += size
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._store_waiting())

    async def _wait_for_queued(self) -> None:
        queued = self._finished + len(self._waiting)
        while self._finished < queued:
            await self._progressed.wait()

    async def _store_waiting(self) -> None:
        try:
            while self._waiting:
                await self._store_group()
        except Exception as fault:
            # A write or a flush must not wait forever, whatever goes wrong here.
            logger.exception("%s: storing frames failed", self._run)
            self._refuse_waiting(error("internal", f"storing frames failed: {reason(fault)}"))

    async def _store_group(self) -> None:
        """Store the frames that are next in one transaction; repeat it while the store is unavailable.

        Frames after a refused one are not answered: they are the next group.
        """
        frames = [queued.frame for queued in itertools.islice(self._waiting, GROUP_FRAMES)]
        for pause in pauses(*RETRY_SECONDS):
            answers = await self._append(frames)
            refusal = last if isinstance(last := answers[-1], EngineError) else None
            if refusal is None or not is_store_fault(refusal) or not self._run.is_lease_held:
                break
            await asyncio.sleep(pause)
        for answer in answers:
            self._finish(self._waiting.popleft(), answer)
        if refusal is not None and not is_bad_input(refusal):
            self._refuse_waiting(refusal)
        self._wake()

    async def _append(self, frames: Sequence[Frame]) -> Sequence[Answer]:
        """Append frames; return the answers up to the first refusal."""
        # Numbered, because a fault may leave it unknown whether frames are stored.
        try:
            first_number = self._finished + 1
            return await self._streams.append_numbered(self._run.claimed.handle, frames, first_number=first_number)
        except EngineError as fault:
            return [fault]

    def _finish(self, queued: _Queued, answer: Answer) -> None:
        self._finished += 1
        self._bytes -= len(queued.frame.bytes)
        if not isinstance(answer, EngineError):
            queued.succeed(answer)
        elif not queued.fail(answer):
            self._unreported.append(answer)

    def _refuse_waiting(self, refusal: EngineError) -> None:
        """Refuse the frames that wait, and every later one."""
        self._refusal = self._refusal or refusal
        self._drop_waiting(self._refusal)

    def _drop_waiting(self, refusal: EngineError) -> None:
        while self._waiting:
            self._finish(self._waiting.popleft(), refusal.copy())
        self._wake()

    def _wake(self) -> None:
        self._progressed.set()
        self._progressed = asyncio.Event()

    def _raise_refusal(self) -> None:
        unreported, self._unreported = self._unreported, []
        if self._refusal is not None:
            raise self._refusal.copy()
        if unreported:
            raise unreported[0]


class FrameWriter:
    """The stream of a run, to write to: `await ctx.stream.write(token)`.

    Frames are stored in the order they were written. What was written before the handler ends or suspends is stored
    before its end is, unless the lease is lost.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: Callable[[], FrameQueue]) -> None:
        # Called in the event loop, because threads of a handler may get this object at the same time.
        self._queue = queue

    async def write(
        self,
        data: str | bytes | bytearray | memoryview,
        *,
        kind: FrameKind | str = FrameKind.STDOUT,
        frame_type: str = "",
        correlation_id: str | None = None,
        mode: StreamMode | None = None,
        flush: bool = False,
    ) -> None:
        """Append a frame of at most 64 KiB to the stream, where `run.stream()` reads it.

        The frame is queued and stored in the background together with its neighbours, so that a token does not cost a
        transaction. The call waits while 1000 frames or 1 MiB are not stored yet, and if the handler has kept the event
        loop since its last write, until the store has had as much time. With `flush`, and if the stream policy is
        `durable`, it waits until the frame is stored. Raises the error of an earlier frame that was refused, such as
        `stale_owner_cannot_append` after the lease was lost; the frame of that write is not stored.
        """
        if not isinstance(flush, bool):
            raise error("invalid_input", f"flush: must be True or False, got {shown(flush)}")
        frame = Frame(
            bytes=_bytes_of(data),
            # A frame accepts the word of a kind, and refuses any other.
            kind=cast(FrameKind, kind),
            frame_type=frame_type,
            correlation_id=correlation_id,
            mode=Durable() if mode is None else mode,
        )
        if isinstance(frame.mode, DurableSummary):
            read_patch(frame.bytes)
        queue = self._queue()
        if flush or queue.is_durable:
            await queue.store(frame)
        else:
            await queue.put(frame)

    async def flush(self) -> None:
        """Wait until every frame written so far is stored; raise the error of one that was refused."""
        await self._queue().flush()


class SummaryWriter:
    """The summary of a run: a JSON document that patches change, such as `await ctx.summary.patch({"done": 3})`."""

    __slots__ = ("_queue",)

    def __init__(self, queue: Callable[[], FrameQueue]) -> None:
        self._queue = queue

    async def patch(self, patch: Mapping[str, object]) -> int:
        """Merge a patch into the summary, wait until it is stored, and return the version of the summary, from 1.

        Objects are merged key by key, anything else is replaced. `None` deletes a key; `NULL`, from
        `flowfabric.streams`, sets it to null. `run.summary()` reads the document.
        """
        payload = _json_of(patch)
        read_patch(payload)
        outcome = await self._queue().store(
            Frame(bytes=_checked_size(payload, "patch"), kind=FrameKind.EVENT, mode=DurableSummary())
        )
        assert outcome.summary_version is not None, "a patch makes a new version"
        return outcome.summary_version


def _is_outcome_unknown(fault: EngineError) -> bool:
    return isinstance(fault, TransportError) and fault.outcome_unknown


def _bytes_of(data: object) -> bytes:
    if isinstance(data, str):
        try:
            data = data.encode()
        except UnicodeEncodeError:
            raise error(
                "invalid_input", f"data: is not valid Unicode, got {shown(data)}; remove the lone surrogates"
            ) from None
    elif isinstance(data, bytearray | memoryview):
        data = bytes(data)
    if not isinstance(data, bytes):
        raise error("invalid_input", f"data: must be text or bytes, got {shown(data)}")
    return _checked_size(data, "data")


def _checked_size(data: bytes, field: str) -> bytes:
    if len(data) > MAX_FRAME_BYTES:
        raise error(
            "retention_limit_exceeded",
            f"{field}: must be at most {MAX_FRAME_BYTES} bytes, got {len(data)}; split it into several, or store it "
            "elsewhere and write where",
        )
    return data


def _json_of(patch: object) -> bytes:
    if not isinstance(patch, Mapping):
        raise error("invalid_input", f"patch: expected a dict, such as {{'done': 3}}, got {shown(patch)}")
    try:
        payload = encode_untyped(dict(patch))
    except Exception as refused:
        raise error("invalid_input", f"patch: {shown(patch)} cannot be stored as JSON: {reason(refused)}") from None
    _check_keys(patch)
    return payload


def _check_keys(patch: Mapping[Any, object]) -> None:
    """Refuse keys that are not text: in JSON, 1 and "1" are the same key."""
    for part in parts_in(dict(patch)):
        if isinstance(part, dict):
            for key in part:
                if not isinstance(key, str):
                    raise error("invalid_input", f"patch: keys must be text, got {shown(key)}; write {str(key)!r}")

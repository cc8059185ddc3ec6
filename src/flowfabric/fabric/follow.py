"""Following the output of a run: the frames of all of its attempts, in order, as they are written."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.stream.tail import FollowedFrames
from flowfabric.loops import check_loop
from flowfabric.model.errors import EngineError, NotFoundError, UnavailableError, error
from flowfabric.model.ids import ExecutionId
from flowfabric.model.policy_checks import INT32
from flowfabric.model.stream import FIRST, LAST, FrameId, FrameMode, StreamFrame
from flowfabric.model.text import check_range, shown
from flowfabric.pauses import pauses

MAX_COUNT = 256
"""The most frames that are read at a time."""
WAIT_MS = 10_000
"""How long one read waits for frames."""
RETRY_SECONDS = (0.1, 2.0)
"""The first and the longest pause before a read that failed is repeated."""

_ID = re.compile(r"([0-9]{1,10}):([0-9]{1,19})-([0-9]{1,10})")
_ID_OF_ATTEMPT = re.compile(r"[0-9]{1,19}-[0-9]{1,10}")
"""An id of `engine.read_stream`, which reads one attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFrame:
    """A frame that the handler of a run has written."""

    id: str
    """The place of the frame among all frames of the run; `run.stream(after=frame.id)` continues after it."""
    attempt: int
    """The number of the attempt that wrote it, from 1."""
    number: int
    """The number of the frame in its attempt, from 1; a jump shows frames that are no longer kept."""
    payload: bytes = field(repr=False)
    """The bytes that were written; text is in UTF-8."""
    frame_type: str
    """What the handler calls it; `stdout` if it gave no type and no kind."""
    mode: FrameMode
    """How long the frame is kept: `durable`, `summary` or `best_effort`."""
    at: datetime
    """When it was stored."""
    correlation_id: str | None
    """What the handler relates it to."""
    summary_version: int | None
    """The version of the summary that it made, if it is a patch."""

    @property
    def text(self) -> str:
        """The payload as text; bytes that are not UTF-8 are replaced."""
        return self.payload.decode(errors="replace")


class RunFrames(AsyncIterator[RunFrame]):
    """The frames of a run, for `async for`: first those that are stored, then new ones as they are written.

    It ends when the run has ended, or the one attempt that was asked for. It may be left at any time, and nothing is
    running or connected between two frames.
    """

    def __init__(
        self,
        execution_id: ExecutionId,
        *,
        after: str | None,
        attempt: int | None,
        follow: bool,
        engine: Callable[[], Engine],
        not_found: Callable[[], EngineError],
        warn_if_unserved: Callable[[], Awaitable[None]],
    ) -> None:
        if attempt is not None:
            check_range(attempt, "attempt", 1, INT32)
        if not isinstance(follow, bool):
            raise error("invalid_input", f"follow: must be True or False, got {shown(follow)}")
        self._execution_id = execution_id
        self._engine = engine
        self._not_found = not_found
        self._warn_if_unserved = warn_if_unserved
        self._first, self._last = (0, INT32) if attempt is None else (attempt - 1, attempt - 1)
        """The indexes of the first and the last attempt to read."""
        self._position = (self._first, FIRST) if after is None else self._parse(after)
        """The attempt and the id of the frame that was read last."""
        self._follows = follow
        self._has_timed_out = False
        """Whether a wait ended without a frame."""
        self._page: deque[RunFrame] = deque()
        self._is_over = False
        self._is_in_use = False
        """Whether a call waits for the next frame."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which it reads; set by the first read."""

    def __aiter__(self) -> Self:
        """Return this iterator."""
        return self

    async def __anext__(self) -> RunFrame:
        """Return the next frame, as soon as there is one."""
        check_loop(self._loop, "run.stream(): this iterator is", "call run.stream() in each event loop, or ")
        if self._is_in_use:
            raise RuntimeError(
                "run.stream(): another task waits for the next frame of this iterator; call run.stream() in each task"
            )
        self._is_in_use = True
        try:
            while not self._page:
                if self._is_over:
                    raise StopAsyncIteration
                await self._read_page()
            return self._page.popleft()
        finally:
            self._is_in_use = False

    async def _read_page(self) -> None:
        found = await self._read()
        if self._follows and not found.frames and not found.is_ended and not self._has_timed_out:
            self._has_timed_out = True
            await self._warn_if_unserved()
        self._page.extend(_frame_of(attempt_index, frame) for attempt_index, frame in found.frames)
        if found.frames:
            attempt_index, frame = found.frames[-1]
            self._position = attempt_index, frame.position
        self._is_over = found.is_ended or (not self._follows and len(found.frames) < MAX_COUNT)

    async def _read(self) -> FollowedFrames:
        """Read the next frames, waiting for them; repeat it while the store is unavailable."""
        tails, (attempt_index, after) = parts_of(self._engine()).tails, self._position
        self._loop = asyncio.get_running_loop()
        for pause in pauses(*RETRY_SECONDS):
            try:
                return await tails.follow(
                    self._execution_id,
                    attempt_index=attempt_index,
                    after=after,
                    block_ms=WAIT_MS if self._follows else 0,
                    last_attempt_index=self._last,
                    count_limit=MAX_COUNT,
                )
            except NotFoundError:
                raise self._not_found() from None
            except UnavailableError:
                raise error("unavailable", "run.stream(): the engine is closing") from None
            except EngineError as fault:
                if not fault.retryable:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("the pauses never end")

    def _parse(self, after: object) -> tuple[int, FrameId]:
        if isinstance(after, str) and _ID_OF_ATTEMPT.fullmatch(after):
            raise error(
                "invalid_input",
                "after: must be the id of a frame of run.stream(), which begins with its attempt, such as "
                f"'0:{after}', got {shown(after)}",
            )
        match = _ID.fullmatch(after) if isinstance(after, str) else None
        attempt_index, ms, seq = map(int, match.groups()) if match else (INT32 + 1, 0, 0)
        if attempt_index > INT32:
            raise error("invalid_input", f"after: must be the id of a frame of run.stream(), got {shown(after)}")
        if not self._first <= attempt_index <= self._last:
            raise error(
                "invalid_input",
                f"after: is a frame of attempt {attempt_index + 1}, got {shown(after)}; leave out after= or attempt=",
            )
        return attempt_index, FrameId(min(ms, LAST.ms), min(seq, LAST.seq))


def _frame_of(attempt_index: int, frame: StreamFrame) -> RunFrame:
    return RunFrame(
        id=f"{attempt_index}:{frame.id}",
        attempt=attempt_index + 1,
        number=frame.number,
        payload=frame.payload,
        frame_type=frame.frame_type,
        mode=frame.mode,
        at=datetime.fromtimestamp(frame.ts / 1000, UTC),
        correlation_id=frame.correlation_id,
        summary_version=frame.summary_version,
    )

"""Reading streams: pages of frames, waits for new frames, and summaries."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import literal
from flowfabric.engine.execution.results import Results
from flowfabric.engine.store import Store
from flowfabric.engine.stream.parked import ParkedTails, Wait
from flowfabric.model.errors import error
from flowfabric.model.event import EventFamily
from flowfabric.model.ids import ExecutionId, parse_execution_id, row_key
from flowfabric.model.policy_checks import INT32
from flowfabric.model.stream import (
    FIRST,
    LAST,
    MAX_BLOCK_MS,
    MAX_COUNT,
    ClosedReason,
    FrameId,
    StreamFrame,
    StreamFrames,
    SummaryDocument,
    TailVisibility,
    lower_bound,
    tail_position,
    upper_bound,
)
from flowfabric.model.summary import PatchKind
from flowfabric.model.text import check_range, shown, word_of
from flowfabric.pauses import pauses

SQL = statements_beside(__file__)
Answer = TypeVar("Answer")
Waker: TypeAlias = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Sets the event of a waiter when its query may find something."""

_POSITION = itemgetter("ms", "seq")
_FOLLOWED_POSITION = itemgetter("attempt_index", "ms", "seq")


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedFrames:
    """Frames of an execution over all of its attempts, each with the index of its attempt."""

    frames: Sequence[tuple[int, StreamFrame]]
    is_ended: bool
    """Whether no frame follows these, because the execution or the last attempt asked for has ended."""


class Tails:
    """Reads frames and summaries, and waits for frames without holding a connection.

    A wait queries at first, when it is woken, and at its end. `queries` limits how many of these run at once, and
    `repeated_queries` those that are not the first one of their call.
    """

    PAUSE_SECONDS = (0.002, 0.05)
    """The first and the longest pause before another query if the last one was hinted and found nothing."""
    ENDING_SECONDS = 0.1
    """How long `follow` waits for a frame before it also waits for the end of an execution that may write no more."""
    LEASE_PAUSE_SECONDS = 0.5
    """The pause between two queries of a follower of one attempt that lease events of any execution cause."""
    RETRY_AFTER_MS = 25

    def __init__(
        self,
        store: Store,
        results: Results,
        *,
        queries: asyncio.Semaphore,
        repeated_queries: asyncio.Semaphore,
        max_operations: int | None,
    ) -> None:
        self._store = store
        self._results = results
        self._parked = ParkedTails(store, SQL.list_changed)
        self._queries = queries
        self._repeated_queries = repeated_queries
        self._max_operations = max_operations
        self._operations = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._refuses = False

    async def read_stream(
        self,
        execution_id: ExecutionId | str,
        attempt_index: int,
        *,
        from_: str | FrameId = "start",
        to: str | FrameId = "end",
        count_limit: int = 100,
    ) -> StreamFrames:
        """The frames of an attempt between two cursors, both inclusive, and when and why its stream was closed.

        A stream that was never written looks like an open one without frames.
        """
        parsed, key = _stream_key(execution_id, attempt_index)
        first, last = lower_bound(from_, "from_"), upper_bound(to, "to")
        _check_count(count_limit)
        with self._operation():
            found, _ = await self._list(parsed, key, first, last, count_limit)
            return found

    async def tail_stream(
        self,
        execution_id: ExecutionId | str,
        attempt_index: int,
        *,
        after: str | FrameId = "0-0",
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: TailVisibility | str = TailVisibility.ALL,
    ) -> StreamFrames:
        """The frames of an attempt after a position; wait up to `block_ms` until there is one or the stream is closed.

        After the wait, it returns no frames and the current state of the stream.
        """
        parsed, key = _stream_key(execution_id, attempt_index)
        position = tail_position(after)
        check_range(block_ms, "block_ms", 0, MAX_BLOCK_MS)
        _check_count(count_limit)
        excludes = _check_visibility(visibility) is TailVisibility.EXCLUDE_BEST_EFFORT

        async def query(wait: Wait) -> tuple[StreamFrames, Wait]:
            first = FrameId(wait.ms, wait.seq)
            found, newest = await self._list(parsed, key, first, LAST, count_limit, excludes_best_effort=excludes)
            # Nothing is appended before the newest frame any more.
            ms, seq = max(first, _after(newest))
            return found, wait._replace(ms=ms, seq=seq)

        first = _after(position)
        wait = Wait(**key, ms=first.ms, seq=first.seq, last_attempt_index=attempt_index, is_following=False)
        with self._operation():
            return await self._wait(
                parsed, block_ms, wait, query, lambda found: bool(found.frames) or found.closed_at is not None
            )

    async def read_summary(self, execution_id: ExecutionId | str, attempt_index: int) -> SummaryDocument | None:
        """The summary of an attempt; None if no summary frame was ever appended."""
        parsed, key = _stream_key(execution_id, attempt_index)
        with self._operation():
            rows = await self._store.fetch(SQL.read_summary, **key)
        return _summary(parsed, rows[0]) if rows else None

    async def read_newest_summary(self, execution_id: ExecutionId) -> SummaryDocument | None:
        """The summary of the latest attempt that has one; None if no attempt has."""
        partition, uuid = row_key(execution_id)
        with self._operation():
            rows = await self._store.fetch(SQL.read_newest_summary, partition_key=partition, execution_id=uuid)
        if not rows:
            raise error("execution_not_found", execution_id)
        return None if rows[0]["document"] is None else _summary(execution_id, rows[0])

    async def follow(
        self,
        execution_id: ExecutionId,
        *,
        attempt_index: int,
        after: FrameId,
        block_ms: int,
        last_attempt_index: int = INT32,
        count_limit: int = 256,
    ) -> FollowedFrames:
        """The frames of an execution after a position, over all attempts; wait until there is one or it has ended.

        With `last_attempt_index`, later attempts do not count, and the end is that of this attempt.
        """
        partition, uuid = row_key(execution_id)

        async def query(wait: Wait) -> tuple[FollowedFrames, Wait]:
            rows = await self._store.fetch(
                SQL.list_followed_frames,
                partition_key=partition,
                execution_id=uuid,
                attempt_index=wait.attempt_index,
                from_ms=wait.ms,
                from_seq=wait.seq,
                last_attempt_index=last_attempt_index,
                count_limit=count_limit,
            )
            if not rows:
                raise error("execution_not_found", execution_id)
            frames = [
                (row["attempt_index"], StreamFrame.of(row))
                for row in sorted(rows, key=_FOLLOWED_POSITION)
                if row["ms"] is not None
            ]
            if rows[0]["newest_index"] is not None:
                newest = _after(FrameId(rows[0]["last_ms"], rows[0]["last_seq"]))
                index, ms, seq = max((wait.attempt_index, wait.ms, wait.seq), (rows[0]["newest_index"], *newest))
                wait = wait._replace(attempt_index=index, ms=ms, seq=seq)
            return FollowedFrames(frames=frames, is_ended=rows[0]["is_ended"] and len(frames) < count_limit), wait

        first = _after(after)
        wait = Wait(partition, uuid, attempt_index, first.ms, first.seq, last_attempt_index, is_following=True)
        wakers: list[Waker] = [partial(self._wake_at_end, execution_id)]
        # An attempt that has written a frame has a stream, whose closing wakes its tails.
        if last_attempt_index < INT32 and (attempt_index, after) <= (last_attempt_index, FIRST):
            wakers.append(self._wake_at_lease_events)
        with self._operation():
            return await self._wait(
                execution_id, block_ms, wait, query, lambda found: bool(found.frames) or found.is_ended, wakers=wakers
            )

    def refuse(self) -> None:
        """Fail parked tails and reject new calls."""
        self._refuses = True
        self._parked.wake_all()

    async def drain(self) -> None:
        """Wait until every call in progress is answered."""
        await self._idle.wait()
        await self._parked.close()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Count a call while it runs; refuse it if the engine is closing or too many run already."""
        self._check_open()
        if self._max_operations is not None and self._operations >= self._max_operations:
            raise error(
                "resource_exhausted",
                {"pool": "stream_ops", "max": self._max_operations, "retry_after_ms": self.RETRY_AFTER_MS},
            )
        self._operations += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._operations -= 1
            if not self._operations:
                self._idle.set()

    def _check_open(self) -> None:
        if self._refuses:
            raise error("unavailable", {"op": "stream_ops"})

    async def _list(
        self,
        execution_id: ExecutionId,
        key: Mapping[str, object],
        first: FrameId,
        last: FrameId,
        count_limit: int,
        *,
        excludes_best_effort: bool = False,
    ) -> tuple[StreamFrames, FrameId]:
        """The frames between two positions, and the id of the newest frame of the stream."""
        rows = await self._store.fetch(
            SQL.list_frames,
            **key,
            from_ms=first.ms,
            from_seq=first.seq,
            to_ms=last.ms,
            to_seq=last.seq,
            count_limit=count_limit,
            excludes_best_effort=excludes_best_effort,
        )
        if not rows:
            return StreamFrames(frames=[]), FIRST
        frames = [StreamFrame.of(row) for row in sorted(rows, key=_POSITION) if row["ms"] is not None]
        found = StreamFrames(
            frames=frames, closed_at=rows[0]["closed_at"], closed_reason=_closed_reason(execution_id, rows[0])
        )
        return found, FrameId(rows[0]["last_ms"], rows[0]["last_seq"])

    async def _wait(
        self,
        execution_id: ExecutionId,
        block_ms: int,
        wait: Wait,
        query: Callable[[Wait], Awaitable[tuple[Answer, Wait]]],
        is_found: Callable[[Answer], bool],
        *,
        wakers: Sequence[Waker] = (),
    ) -> Answer:
        """Query until something is found or the time is over; return the last answer.

        Each query returns what to wait for after it, so that the next one does not look at the same frames again.
        The wakers run once there was no hint for a while: they wake for what the hints of the stream do not tell.
        """
        if not block_ms:
            return (await query(wait))[0]
        deadline = time.monotonic() + block_ms / 1000
        wakeups = self._store.wakeups
        # Connecting takes place in the background; once hints arrive, every waiter is woken.
        wakeups.hints.start_listening()
        repeats = pauses(*self.PAUSE_SECONDS)
        is_first, was_woken = True, False
        waking: list[asyncio.Task[None]] = []
        with self._parked.watch(execution_id, wait) as tail:
            try:
                while True:
                    self._check_open()
                    tail.changed.clear()
                    async with self._turn(is_first=is_first):
                        found, tail.wait = await query(tail.wait)
                    is_first = False
                    if is_found(found) or time.monotonic() >= deadline:
                        return found
                    if was_woken:
                        await asyncio.sleep(next(repeats))
                    seconds = deadline - time.monotonic()
                    if wakers and not waking:
                        seconds = min(seconds, self.ENDING_SECONDS)
                    was_woken = await self._parked.is_woken_within(tail, seconds)
                    if not waking and not was_woken:
                        waking = [asyncio.create_task(wake(tail.changed)) for wake in wakers]
            finally:
                for task in waking:
                    task.cancel()
                await asyncio.gather(*waking, return_exceptions=True)

    @asynccontextmanager
    async def _turn(self, *, is_first: bool) -> AsyncIterator[None]:
        """Wait for a turn to query; the first query of a call does not wait for all tails that were woken before."""
        if is_first:
            async with self._queries:
                yield
        else:
            async with self._repeated_queries, self._queries:
                yield

    async def _wake_at_end(self, execution_id: ExecutionId, changed: asyncio.Event) -> None:
        """Wake a waiter when the execution ends, because the end of one without an open stream wakes no tail."""
        try:
            await self._results.wait_for_ending(execution_id)
        finally:
            changed.set()

    async def _wake_at_lease_events(self, changed: asyncio.Event) -> None:
        """Wake a waiter at lease events, because the end of an attempt without a stream wakes no tail.

        The hint of these events is sent anyway. One that names the execution would cost every retry a hint, although
        hardly any attempt is followed by itself.
        """
        with self._store.wakeups.feeds.watch(EventFamily.LEASE) as moved:
            while True:
                # At first too: the attempt may have ended before the watch began.
                changed.set()
                await asyncio.sleep(self.LEASE_PAUSE_SECONDS)
                await moved.wait()
                moved.clear()


def _after(id: FrameId) -> FrameId:
    """The lowest id after this one."""
    return FrameId(id.ms, min(id.seq + 1, LAST.seq))


def _stream_key(execution_id: ExecutionId | str, attempt_index: int) -> tuple[ExecutionId, Mapping[str, Any]]:
    parsed = parse_execution_id(execution_id)
    partition, uuid = row_key(parsed)
    check_range(attempt_index, "attempt_index", 0, INT32)
    return parsed, {"partition_key": partition, "execution_id": uuid, "attempt_index": attempt_index}


def _check_count(value: object) -> None:
    if type(value) is not int:
        raise error("invalid_input", f"count_limit: must be a whole number from 1 to {MAX_COUNT}, got {shown(value)}")
    if value < 1:
        raise error("invalid_input", f"count_limit must be >= 1, got {value}")
    if value > MAX_COUNT:
        raise error(
            "invalid_input",
            f"count_limit_exceeds_hard_cap: at most {MAX_COUNT} frames in one call, got {value};"
            " read the others in further calls",
        )


def _check_visibility(value: object) -> TailVisibility:
    if (visibility := word_of(TailVisibility, value)) is None:
        raise error(
            "invalid_input",
            f"visibility: must be '' for all frames or '{TailVisibility.EXCLUDE_BEST_EFFORT}', got {shown(value)}",
        )
    return visibility


def _summary(execution_id: ExecutionId, row: Record) -> SummaryDocument:
    return SummaryDocument(
        document_json=row["document"],
        version=row["version"],
        patch_kind=literal(PatchKind, row["patch_kind"], context=f"summary of {execution_id}", field="patch_kind"),
        last_updated_ms=row["last_updated_ms"],
        first_applied_ms=row["first_applied_ms"],
    )


def _closed_reason(execution_id: ExecutionId, row: Record) -> ClosedReason | None:
    reason = row["closed_reason"]
    if reason is None:
        return None
    return literal(ClosedReason, reason, context=f"stream of {execution_id}", field="closed_reason")

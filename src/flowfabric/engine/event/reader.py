"""The reader of a subscription: reads windows of events into a bounded queue, and survives faults of the store."""

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from flowfabric.db.database import Record
from flowfabric.db.statements import Statement, statements_beside
from flowfabric.engine.event.decoding import Event, Feed, Undecodable
from flowfabric.engine.event.origin import keep_origin
from flowfabric.engine.store import Store
from flowfabric.model.cursor import OLDEST, CursorWriter
from flowfabric.model.errors import EngineError, TransportError, error
from flowfabric.model.event import FAMILY_KINDS, RARE_FAMILIES, EventFamily
from flowfabric.model.feed import ScannerFilter
from flowfabric.model.position import Position, Snapshot, Trimmed
from flowfabric.pauses import is_set_within, pauses

SQL = statements_beside(__file__)
Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class Buffer(Generic[Event]):
    """The events that were read and not yet taken, and where the reader is."""

    LIMIT = 1024
    """The most events in the queue; a full queue stops the reader until half of it is free."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.reached: Position | None = None
        """The position after the last event of the queue, if that event is not the last one that was read."""
        self.failure: BaseException | None = None
        self.disconnected: str | None = None
        """Why the reader has given up."""
        self.drops_queued = False
        """Whether the events of the queue are not delivered any more."""
        self.is_closed = False
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()

    def take(self) -> Event:
        """Remove and return the next event."""
        event = self.events.popleft()
        if len(self.events) <= self.LIMIT // 2:
            self._has_room.set()
        return event

    async def put(self, event: Event) -> None:
        """Add an event; wait while the queue is full."""
        while len(self.events) >= self.LIMIT:
            self._has_room.clear()
            await self._has_room.wait()
        self.reached = None
        self.events.append(event)
        self._arrived.set()

    async def wait(self) -> None:
        """Wait until something has happened."""
        self._arrived.clear()
        await self._arrived.wait()

    def disconnect(self, reason: str, *, drops_queued: bool = False) -> None:
        """End the subscription with `stream_disconnected`: after the events of the queue, or instead of them."""
        self.disconnected = self.disconnected or reason
        self.drops_queued = drops_queued
        self._arrived.set()

    def fail(self, failure: BaseException) -> None:
        """End the subscription with an error, after the events of the queue."""
        self.failure = failure
        self._arrived.set()

    def close(self) -> None:
        """End the subscription."""
        self.is_closed = True
        self._arrived.set()


class Reader(Generic[Event]):
    """Reads the events of one subscription."""

    PAGE = 256
    """How many matching rows a statement returns."""
    SCANNED = 2048
    """How many rows a statement reads at most."""
    HINTED_SECONDS = 5.0
    """The pause between two polls while hints arrive."""
    UNHINTED_SECONDS = (0.1, 1.0)
    """The first and the longest pause between two polls while no hints arrive."""
    PAUSE_SECONDS = 0.005
    """The pause after a window with events, so that the next one is worth a statement."""
    RETRY_SECONDS = (0.2, 2.0)
    """The first and the longest pause after a failed read."""
    UNREACHABLE_SECONDS = 30.0
    """How long reads may fail before the subscription ends."""

    def __init__(
        self,
        store: Store,
        feed: Feed[Event],
        filter: ScannerFilter | None,
        buffer: Buffer[Event],
        *,
        queries: asyncio.Semaphore,
    ) -> None:
        self._store = store
        self._queries = queries
        self._feed = feed
        self._buffer = buffer
        self._is_rare = feed.family in RARE_FAMILIES
        self._matching = _matching(store, feed, filter or ScannerFilter())
        # A page of a rare family without a filter matches row by row.
        self._scanned = self.PAGE if self._is_rare and filter in (None, ScannerFilter()) else self.SCANNED
        self._warned: set[str] = set()

    async def start(self, position: Position | None, *, is_oldest: bool) -> Position:
        """The position to read from: the given one, the oldest event, or now; raise if the given one is too old."""
        if position is not None:
            return self._checked(position, await self._look(position))
        blank = Position.oldest(self._feed.family)
        found = await self._look(blank)
        blank = replace(blank, generation=found.generation, origin=found.origin, trims=found.trimmed.trims)
        return blank if is_oldest else found.opened(blank).closed()

    async def run(self, position: Position) -> None:
        """Read until the subscription ends."""
        wakeups = self._store.wakeups
        wakeups.hints.start_listening()
        try:
            with wakeups.feeds.watch(self._feed.family) as changed:
                unhinted = pauses(*self.UNHINTED_SECONDS)
                while True:
                    changed.clear()
                    if position.window is None:
                        position = await self._open(position)
                    if position.window is not None:
                        position = await self._read_window(position)
                        self._buffer.reached = position
                        unhinted = pauses(*self.UNHINTED_SECONDS)
                        await asyncio.sleep(self.PAUSE_SECONDS)
                        continue
                    self._buffer.reached = position
                    await is_set_within(changed, self.HINTED_SECONDS if wakeups.hints.is_listening else next(unhinted))
        except _Unreachable as reason:
            self._buffer.disconnect(str(reason))
        except Exception as failure:
            self._buffer.fail(failure)

    async def _open(self, position: Position) -> Position:
        """The position in a new window, or an equal one without a window if there is nothing to read."""
        found = await self._retry(partial(self._look, position))
        position = self._checked(position, found)
        if found.snapshot.next_xid == 0:
            return position
        opened = found.opened(position)
        return opened if opened.has_late_events or opened.newest > opened.floor else opened.closed()

    def _checked(self, position: Position, found: "_Found") -> Position:
        """The position in the store as it was found; raise if events that it needs were deleted."""
        if (rewound_to := found.restored_after(position)) is not None:
            position = position.rewound(rewound_to)
        self._check_trimmed(position, found.trimmed, found.snapshot)
        if max(found.newest, found.trimmed_newest) < max(position.last, position.floor):
            raise _refusal(
                "cursor_ahead", "the store has no event with the id of this cursor: it lost its newest events"
            )
        return position if position.window is not None else replace(position, trims=found.trimmed.trims)

    def _check_trimmed(self, position: Position, trimmed: Trimmed, current: Snapshot) -> None:
        if position.needs(trimmed, position.window or current):
            raise _refusal("cursor_expired", "events after this cursor were deleted, see FF_FEED_RETENTION_MS")

    async def _look(self, position: Position) -> "_Found":
        while True:
            (row,) = await self._fetch(
                SQL.open_window,
                floor=position.floor,
                generation=position.generation,
                **self._late(position),
            )
            if row["is_current"]:
                return _Found(row)
            await keep_origin(self._store)

    async def _read_window(self, position: Position) -> Position:
        """Read a window into the queue, page by page; return the position after it."""
        while position.window is not None:
            rows = await self._retry(partial(self._page, position))
            self._check_trimmed(position, _trimmed(rows[0]), position.window)
            cursors = CursorWriter(position)
            if rows[0]["event_id"] is None:
                # An empty page still returns the trim columns.
                rows = []
            for row in rows:
                skipped = position.nth if row["event_id"] == position.last else 0
                position = replace(position, last=row["event_id"], nth=0)
                if not row["is_match"]:
                    self._buffer.reached = position
                    continue
                await self._put(row, cursors, skipped, position)
            if rows and (len(rows) >= self.PAGE or rows[-1]["place"] == self._scanned):
                continue
            position = position.past_late_events() if position.has_late_events else position.closed()
        return position

    async def _put(self, row: Record, cursors: CursorWriter, skipped: int, position: Position) -> None:
        try:
            for event in self._feed.events(row, cursors.of_event(row["event_id"]), skipped):
                await self._buffer.put(event)
        except Undecodable as reason:
            self._warn(f"{self._feed.operation} skips event {row['event_id']}: {reason}", str(reason))
            self._buffer.reached = position

    def _warn(self, text: str, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("%s; more events like this are skipped without a warning", text)

    async def _page(self, position: Position) -> list[Record]:
        window = position.window
        assert window is not None
        statement: Statement = SQL.list_rare_events if self._is_rare else SQL.list_events
        after, newest = position.after, position.newest
        if position.has_late_events:
            statement, after, newest = SQL.list_late_events, position.late_after, position.floor
        return await self._fetch(
            statement,
            after=after,
            newest=newest,
            snapshot=window.as_record,
            restored_event_id=window.restored_event_id,
            scanned=self._scanned,
            page=self.PAGE,
            **self._matching,
            **self._late(position),
        )

    def _late(self, position: Position) -> dict[str, object]:
        """The parameters that say which late events are unread."""
        before = position.before
        return {
            "family": self._feed.family,
            "trims": position.trims,
            "late_after": position.late_after,
            "xmax": before.xmax,
            "next_xid": before.next_xid,
            "in_progress": before.in_progress,
            "before_restored_event_id": before.restored_event_id,
        }

    async def _fetch(self, statement: Statement, **values: object) -> list[Record]:
        async with self._queries:
            return await self._store.fetch(statement, **values)

    async def _retry(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Repeat a read that fails because of the store; give up after UNREACHABLE_SECONDS."""
        since = time.monotonic()
        for pause in pauses(*self.RETRY_SECONDS):
            try:
                return await call()
            except EngineError as failure:
                if not isinstance(failure, TransportError) and failure.code != "retry_exhausted":
                    raise
                logger.debug("%s: a read failed: %s", self._feed.operation, failure)
                if time.monotonic() - since >= self.UNREACHABLE_SECONDS:
                    raise _Unreachable(f"the store cannot be read: {failure}") from failure
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")


class _Unreachable(Exception):
    """Reads have failed for too long; the message says why."""


class _Found:
    """The store at the start of a window."""

    def __init__(self, row: Record) -> None:
        _, xmax, in_progress = row["snapshot"]
        self.newest: int = row["newest"]
        self.snapshot = Snapshot(
            xmax=xmax,
            next_xid=row["next_xid"] or 0,
            in_progress=tuple(in_progress),
            restored_event_id=row["restored_event_id"],
        )
        self.generation: int = row["generation"]
        self.origin = _checksum(row["origin"])
        self.trimmed = _trimmed(row)
        self.trimmed_newest: int = row["trimmed_newest"]
        self._earlier_origin: str | None = row["earlier_origin"]
        self._restored: list[int] = row["restored"]

    def opened(self, position: Position) -> Position:
        """The position at the start of the window."""
        return position.opened(self.snapshot, generation=self.generation, origin=self.origin, newest=self.newest)

    def restored_after(self, position: Position) -> int | None:
        """The newest event that was restored with the store after a position was reached; None if it was not."""
        # A store may be restored twice from the same dump: then two servers have the same number.
        is_same = self._earlier_origin is not None and _checksum(self._earlier_origin) == position.origin
        since = self._restored[1:] if is_same else self._restored or [self.snapshot.restored_event_id]
        return min(since, default=None)


def _checksum(origin: str) -> int:
    return zlib.crc32(origin.encode())


def _refusal(reason: str, message: str) -> EngineError:
    detail = {"reason": reason, "oldest_cursor": OLDEST, "message": f"{message}; continue with oldest_cursor"}
    return error("invalid_input", detail)


def _trimmed(row: Record) -> Trimmed:
    return Trimmed(row["trims"], row["trimmed_event_id"], row["trimmed_late_events"], row["unlisted_xid"])


def _matching(store: Store, feed: Feed[Event], filter: ScannerFilter) -> dict[str, object]:
    """The parameters that decide which events match."""
    family = feed.family
    known = {kind for kinds in FAMILY_KINDS.values() for kind in kinds}
    # The lease feed reads the kinds that belong to no other feed, so that it warns about unknown ones.
    takes_unknown = family is EventFamily.LEASE
    kinds = known - set(FAMILY_KINDS[family]) if takes_unknown else set(FAMILY_KINDS[family])
    key, value = filter.instance_tag or (None, None)
    return {
        "kinds": sorted(kinds),
        "takes_unknown_kinds": takes_unknown,
        "has_outcome": feed.has_outcome,
        "has_leases": feed.has_leases,
        "namespace": filter.namespace,
        "tag_key": key,
        "tag_value": value,
        "is_instance_tag": key == store.rules.instance_tag,
    }

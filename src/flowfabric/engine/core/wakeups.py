"""Wakeups of the waiters for work, results, timers and lost leases: directly in this process, by hints in others."""

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from flowfabric.db.database import Record, Transaction
from flowfabric.db.notify import EVERYTHING, Hints
from flowfabric.engine.core.place import BAND_BITS
from flowfabric.engine.core.watermark import Watermarks
from flowfabric.model.event import EventFamily
from flowfabric.model.ids import ExecutionId

_WORK = "work"
_ENDED = "ended"
_LOST = "lost"
_STREAM = "stream"
_ROOM = "room"


class LostReason(StrEnum):
    """Why a lease ended without a call of its holder; reasons that are a `Move` have its value."""

    COMPLETED = "completed"
    FAILED = "failed"
    RETRY = "retry"
    RETRY_NOW = "retry_now"
    CANCELLED = "cancelled"
    TIMEOUT_RETRY = "timeout_retry"
    TIMEOUT_RETRY_NOW = "timeout_retry_now"
    TIMEOUT_EXPIRED = "timeout_expired"
    DEADLINE_EXPIRED = "deadline_expired"
    RECLAIM_LIMIT = "reclaim_limit"
    LEASE_EXPIRED = "lease_expired"
    LEASE_REVOKED = "lease_revoked"
    SKIPPED = "skipped"
    RECLAIMED = "reclaimed"
    NOT_RENEWED = "not_renewed"
    ATTEMPT_TIMEOUT = "attempt_timeout"
    UNKNOWN = "unknown"
    """A reason that this version does not know."""

    @classmethod
    def _missing_(cls, _: object) -> "LostReason":
        return cls.UNKNOWN


class LostLease(NamedTuple):
    """A lease that ended without a call of its holder, and why."""

    execution_id: ExecutionId
    lease_epoch: int
    reason: LostReason


class Work(NamedTuple):
    """Where an execution can be claimed: its queue, and its place in it."""

    lane_id: str
    route_no: int
    queue_no: int
    place: int


class CascadeKey(NamedTuple):
    """The key of an entry of the cascade: members of a flow that ended together."""

    partition_key: int
    event_id: int


OnMembersEnded = Callable[[Sequence[CascadeKey]], None]
"""Called when members of flows have ended, so that the cascade settles their edges."""
OnLost = Callable[[Sequence[LostLease] | None], None]
"""Called with the leases that were lost, or with None if any lease may have been."""


OnRoom = Callable[[Iterable[int] | None], None]
"""Called with the quota keys that have room again, or with None if any may have."""


class Watchers:
    """The waiters of this process for changes of named things: streams, or families of events."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def watch(self, name: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever the thing may have changed; clear it before each query."""
        event = asyncio.Event()
        self._events.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            watching = self._events[name]
            watching.discard(event)
            if not watching:
                del self._events[name]

    def wake(self, name: str) -> None:
        """Wake the waiters for one thing."""
        for event in self._events.get(name, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake every waiter."""
        for name in self._events:
            self.wake(name)


class Wakeups:
    """Wakes the waiters of this process directly and those of other processes by a hint."""

    MAX_PLACES = 20
    """The most places in one hint; other processes find the rest when their watermarks expire."""

    def __init__(self, hints: Hints, first: "Wakeups | None" = None) -> None:
        self.hints = hints
        self._first = first
        self._loop = asyncio.get_running_loop()
        self.watermarks = Watermarks()
        self.ended_event = asyncio.Event()
        self.timer_event = asyncio.Event()
        self.next_timer = float("inf")
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._wakes: dict[str, int] = {}
        self._on_lost: list[OnLost] = []
        self._on_room: list[OnRoom] = []
        self.on_members_ended: OnMembersEnded | None = None
        self.on_siblings: Callable[[], None] | None = None
        self.streams = Watchers()
        """Waiters for frames, by the words of executions in hints."""
        self.streams_missed = asyncio.Event()
        """Set when any stream may have changed."""
        self.feeds = Watchers()
        """Waiters for events, by family."""
        hints.subscribe(_WORK, self._work_heard)
        hints.subscribe(_ENDED, self._ended_heard)
        hints.subscribe(_LOST, self._lost_heard)
        hints.subscribe(_STREAM, self._stream_heard)
        hints.subscribe(_ROOM, self._room_heard)
        for family in EventFamily:
            hints.subscribe(family.value, partial(self._events_heard, family))

    def work(self, found: Iterable[Work]) -> None:
        """Wake the claims that wait for work at these places."""
        # The lowest place of each priority, as each priority has its own watermark.
        lowest: dict[str, dict[tuple[int, int, int], int]] = {}
        for lane_id, route_no, queue_no, place in found:
            places = lowest.setdefault(lane_id, {})
            band = route_no, queue_no, place >> BAND_BITS
            places[band] = min(places.get(band, place), place)
        for lane_id, places in lowest.items():
            for (route_no, queue_no, _), place in places.items():
                self.watermarks.lower(route_no, queue_no, place)
            self._wake(lane_id)
            texts = [f"{route_no}.{queue_no}.{place}" for (route_no, queue_no, _), place in places.items()]
            self.hints.send(_WORK, ",".join([lane_id.encode().hex(), *texts[: self.MAX_PLACES]]))

    def lane(self, lane_id: str) -> None:
        """Wake the claims of a lane whose state or whose limits have changed."""
        self.watermarks.resume()
        self._wake(lane_id)
        self.hints.send(_WORK, lane_id.encode().hex())

    def wake(self, lanes: Iterable[str]) -> None:
        """Wake the claims of these lanes that wait in this process."""
        for lane in lanes:
            self._wake(lane)

    def room(self, quota_key_nos: Sequence[int]) -> None:
        """Wake the claims that these quota keys have denied something: they have room again."""
        self._call_on_room(quota_key_nos)
        many = len(quota_key_nos) > self.MAX_PLACES
        for word in (EVERYTHING,) if many else map(str, quota_key_nos):
            self.hints.send(_ROOM, word, can_wait=True)

    def room_after(self, transaction: Transaction, rows: Sequence[Record]) -> None:
        """The same for the keys of these rows once the transaction has committed."""
        if rows:
            transaction.on_commit(partial(self.room, sorted(row["quota_key_no"] for row in rows)))

    def on_room(self, callback: OnRoom) -> None:
        """Register a callback for quota keys that have room again."""
        self._on_room.append(callback)

    def work_of(self, rows: Iterable[Record]) -> None:
        """Wake the claims that wait for the work of these rows."""
        self.work(Work(row["lane_id"], row["route_no"], row["queue_no"], row["place"]) for row in rows)

    def ended(self) -> None:
        """Wake the waiters for results: executions have ended."""
        self.ended_event.set()
        self.feeds.wake(EventFamily.COMPLETION)
        self.hints.send(_ENDED)

    def members_ended(self, entries: Sequence[CascadeKey]) -> None:
        """Settle these entries of the cascade in this process; what it leaves is found by a sweep of any process."""
        if self._first is not None:
            self._first._call_soon(partial(self._first.members_ended, entries))
        elif self.on_members_ended is not None:
            self.on_members_ended(entries)

    def siblings(self) -> None:
        """Cancel the siblings of groups that were decided, in this process; a sweep finds what is left over."""
        if self._first is not None:
            self._first._call_soon(self._first.siblings)
        elif self.on_siblings is not None:
            self.on_siblings()

    def stream(self, execution_ids: Iterable[ExecutionId]) -> None:
        """Wake the readers of streams that have grown or closed."""
        for execution_id in execution_ids:
            word = _stream_word(execution_id)
            self.streams.wake(word)
            self.hints.send(_STREAM, word)

    def watch_stream(self, execution_id: ExecutionId) -> AbstractContextManager[asyncio.Event]:
        """Yield an event that is set whenever a stream of the execution may have changed; clear it before each query.

        It is not set when hints were missed, see `streams_missed`.
        """
        return self.streams.watch(_stream_word(execution_id))

    def events(self, *families: EventFamily) -> None:
        """Wake the feeds of these families: events were written."""
        if self._first is not None:
            # The first engine of the process already has a connection for hints.
            self._first._call_soon(partial(self._first.events, *families))
            return
        for family in families:
            self.feeds.wake(family)
            # Every claim writes lease events: a hint of its own for each would double the number of hints.
            self.hints.send(family.value, can_wait=family is EventFamily.LEASE)

    def lost(self, leases: Sequence[LostLease]) -> None:
        """Notify the holders of leases that ended without their call."""
        for lease in leases:
            self.hints.send(_LOST, f"{lease.execution_id},{lease.lease_epoch},{lease.reason}")
        self._call_on_lost(leases)

    def on_lost(self, callback: OnLost) -> Callable[[], None]:
        """Register a callback for lost leases; return the function that removes it."""
        self._on_lost.append(callback)
        return lambda: self._on_lost.remove(callback)

    def timer(self, milliseconds: int) -> None:
        """Record a timer that is due in this many milliseconds."""
        due = time.monotonic() + milliseconds / 1000
        if due < self.next_timer:
            self.next_timer = due
            self.timer_event.set()

    def wakes(self, lanes: Iterable[str]) -> int:
        """How often these lanes were woken; read it before a claim, so that `wait_for_work` misses no wake."""
        return sum(self._wakes.setdefault(lane, 0) for lane in lanes)

    async def wait_for_work(self, lanes: Iterable[str], seconds: float, *, since: int | None = None) -> bool:
        """Wait until one of these lanes is woken, or was woken after `since`; return False on timeout."""
        await self.hints.listen()
        lanes = tuple(lanes)
        if since is not None and self.wakes(lanes) != since:
            return True
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for lane in lanes:
            self._waiting.setdefault(lane, set()).add(woken)
        try:
            await asyncio.wait((woken,), timeout=seconds)
            return woken.done()
        finally:
            woken.cancel()
            for lane in lanes:
                self._waiting[lane].discard(woken)

    def wake_all(self) -> None:
        """Wake every waiting claim."""
        for lane in {*self._waiting, *self._wakes}:
            self._wake(lane)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        """Call a function in the event loop of this engine, from any thread; do nothing if the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _wake(self, lane_id: str) -> None:
        if lane_id in self._wakes:
            self._wakes[lane_id] += 1
        for woken in self._waiting.get(lane_id, ()):
            if not woken.done():
                woken.set_result(None)

    def _call_on_lost(self, leases: Sequence[LostLease] | None) -> None:
        for callback in tuple(self._on_lost):
            callback(leases)

    def _call_on_room(self, quota_key_nos: Iterable[int] | None) -> None:
        for callback in self._on_room:
            callback(quota_key_nos)

    def _room_heard(self, words: list[str]) -> None:
        self._call_on_room(None if EVERYTHING in words else [int(word) for word in words])

    def _lost_heard(self, words: list[str]) -> None:
        if EVERYTHING in words:
            self._call_on_lost(None)
            return
        parts = (word.split(",") for word in words)
        self._call_on_lost(
            [LostLease(ExecutionId(each), int(epoch), LostReason(reason)) for each, epoch, reason in parts]
        )

    def _ended_heard(self, _: list[str]) -> None:
        self.ended_event.set()
        self.feeds.wake(EventFamily.COMPLETION)

    def _events_heard(self, family: EventFamily, _: list[str]) -> None:
        self.feeds.wake(family)

    def _stream_heard(self, words: list[str]) -> None:
        if EVERYTHING in words:
            self.streams_missed.set()
            return
        for word in words:
            self.streams.wake(word)

    def _work_heard(self, words: list[str]) -> None:
        if EVERYTHING in words:
            self.watermarks.clear()
            self.wake_all()
            return
        for word in words:
            lane, *places = word.split(",")
            if not places:
                self.watermarks.resume()
            for place in places:
                self.watermarks.lower(*map(int, place.split(".")))
            self._wake(bytes.fromhex(lane).decode())


def _stream_word(execution_id: ExecutionId) -> str:
    """A short word for the streams of an execution: more of them fit into a hint. Others may have the same word."""
    return f"{zlib.crc32(execution_id.encode()):x}"

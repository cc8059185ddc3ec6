"""Positions in the events of a store.

Events become visible when they are committed, which is not in the order of their ids. So a position holds, besides an
event id, the transactions that were in progress when the events up to that id were read: their events may still come.
Events are read in windows. A window is what became visible from one snapshot to the next: first the late events, with
ids up to `floor`, of the transactions that were in progress before; then all events with higher ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from flowfabric.model.event import EventFamily


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The transactions that had ended at some moment, and the newest restored event."""

    xmax: int
    """Transactions with lower ids had ended, except those in `in_progress`."""
    next_xid: int
    """Transactions from `xmax` up to this id may have been in progress; those with higher ids began later."""
    in_progress: tuple[int, ...]
    restored_event_id: int
    """Events up to this id are from another server: their transaction ids mean nothing, and all of them had ended."""

    @property
    def as_record(self) -> tuple[int, int, tuple[int, ...]]:
        """The value of the Postgres type pg_snapshot."""
        return min(self.in_progress, default=self.xmax), self.xmax, self.in_progress

    def first_ended_by(self, later: Snapshot) -> int | None:
        """The lowest id of a transaction that was in progress and may have ended by a later snapshot.

        Transaction ids are compared only if both snapshots are of one server. Otherwise all transactions have ended.
        """
        # A restore after which restored_event_id is the same had no new events, so there is nothing to compare.
        is_comparable = later.restored_event_id == self.restored_event_id
        still_running = later.in_progress if is_comparable else ()
        xmax = later.xmax if is_comparable else self.next_xid
        ended = [xid for xid in self.in_progress if xid < xmax and xid not in still_running]
        if self.xmax < self.next_xid and self.xmax < xmax:
            ended.append(self.xmax)
        return min(ended, default=None)


NOTHING_IN_PROGRESS: Final = Snapshot(xmax=0, next_xid=0, in_progress=(), restored_event_id=0)


class Trimmed(NamedTuple):
    """What was deleted of a family, as far as a position is concerned."""

    trims: int
    """How often events were deleted."""
    event_id: int
    """The newest deleted event."""
    has_late_events: bool
    """Whether unread events of transactions that were in progress in `before` are known to be deleted."""
    unlisted_xid: int
    """Transactions up to this one may have written deleted events that are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a feed has been read."""

    family: EventFamily
    generation: int
    """The number of the server that the newest snapshot is from."""
    origin: int
    """A checksum of the name of that server."""
    trims: int
    """How often events had been deleted; none of those deleted so far were needed."""
    floor: int
    """Events up to this id were read, except those of transactions that were in progress in `before`."""
    before: Snapshot
    window: Snapshot | None = None
    """What is being read: the events visible in this snapshot. Between two windows None."""
    newest: int = 0
    """The highest id of an event in the window."""
    last: int = 0
    """The last event that was read; between two windows `floor`."""
    nth: int = 0
    """How many executions of that event were read; 0 means all."""

    @classmethod
    def oldest(cls, family: EventFamily) -> Position:
        """The position before all events of a new store."""
        return cls(family=family, generation=0, origin=0, trims=0, floor=0, before=NOTHING_IN_PROGRESS)

    @property
    def after(self) -> int:
        """Read events with higher ids than this."""
        return self.last - 1 if self.nth else self.last

    @property
    def has_late_events(self) -> bool:
        """Whether late events of the window may still be unread."""
        return self.window is not None and self.after < self.floor

    def opened(self, window: Snapshot, *, generation: int, origin: int, newest: int) -> Position:
        """The position at the start of a window."""
        has_late = self.before.first_ended_by(window) is not None
        return replace(
            self,
            generation=generation,
            origin=origin,
            window=window,
            newest=max(newest, self.floor),
            last=0 if has_late else self.floor,
            nth=0,
        )

    def past_late_events(self) -> Position:
        """The position after the late events of the window."""
        return replace(self, last=self.floor, nth=0)

    def closed(self) -> Position:
        """The position at the end of a window."""
        assert self.window is not None
        return replace(self, floor=self.newest, before=self.window, window=None, last=self.newest, nth=0)

    def rewound(self, event_id: int) -> Position:
        """The position in a store that was restored from a dump whose newest event has this id.

        Events that this position has passed and the dump does not contain are gone; new ones get their ids.
        """
        is_beyond = self.last > event_id
        return replace(
            self,
            # Trim counts of two stores are not comparable.
            trims=0,
            floor=min(self.floor, event_id),
            newest=min(self.newest, event_id),
            last=event_id if is_beyond else self.last,
            nth=0 if is_beyond else self.nth,
        )

    @property
    def late_after(self) -> int:
        """Late events with higher ids than this are unread."""
        return max(0 if self.window is None else self.after, self.before.restored_event_id)

    def needs(self, trimmed: Trimmed, current: Snapshot) -> bool:
        """Whether deleted events may be unread ones; `current` is the window, or the snapshot of the next one."""
        if trimmed.trims == self.trims:
            return False
        if trimmed.event_id > max(self.after, self.floor):
            return True
        if self.late_after >= self.floor:
            return False
        first = self.before.first_ended_by(current)
        return trimmed.has_late_events or (first is not None and first <= trimmed.unlisted_xid)

"""Positions in the events of a store, and the cursors that hold them.

Events become visible when they are committed, which is not in the order of their ids. So a position holds, besides an
event id, the transactions that were in progress when the events up to that id were read: their events may still come.
Events are read in windows. A window is what became visible from one snapshot to the next: first the late events, with
ids up to `floor`, of the transactions that were in progress before; then all events with higher ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from flowfabric.model.event import EventFamily

OLDEST: Final = b"\x02\x00"
"""The cursor of the oldest event that is still stored."""

_PREFIX: Final = 0x02
_FORM_OLDEST: Final = 0
_FORM_POSITION: Final = 1
_FAMILIES: Final = tuple(EventFamily)
"""Numbered by their order, so that order must not change."""
_CHECKSUM_BYTES: Final = 4
_MAX: Final = 2**63 - 1
_MAX_VARINT_BYTES: Final = 9


class InvalidCursor(ValueError):
    """The bytes are not a cursor; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The transactions that had ended at some moment, and the newest event that a restore had brought until then."""

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
        # Every restore that brought events has another restored_event_id; one that brought none left nothing to read.
        is_comparable = later.restored_event_id == self.restored_event_id
        unended = later.in_progress if is_comparable else ()
        xmax = later.xmax if is_comparable else self.next_xid
        ended = [xid for xid in self.in_progress if xid < xmax and xid not in unended]
        if self.xmax < self.next_xid and self.xmax < xmax:
            ended.append(self.xmax)
        return min(ended, default=None)


NOTHING_IN_PROGRESS: Final = Snapshot(xmax=0, next_xid=0, in_progress=(), restored_event_id=0)


class TrimMark(NamedTuple):
    """How often events of a family were deleted, and the highest event id and transaction id among them."""

    trims: int
    event_id: int
    xid: int


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
            # The count of the other store says nothing.
            trims=0,
            floor=min(self.floor, event_id),
            newest=min(self.newest, event_id),
            last=event_id if is_beyond else self.last,
            nth=0 if is_beyond else self.nth,
        )

    def needs(self, deleted: TrimMark, current: Snapshot) -> bool:
        """Whether deleted events may be unread ones; `current` is the window, or the snapshot of the next one."""
        if deleted.trims == self.trims:
            return False
        if deleted.event_id > max(self.after, self.floor):
            return True
        if self.window is not None and not self.has_late_events:
            return False
        late = self.before.first_ended_by(current)
        return late is not None and late <= deleted.xid


class CursorWriter:
    """Writes the cursors of the events of a window: they differ only in the last event and in the number within it."""

    __slots__ = ("_checksum", "_prefix")

    def __init__(self, position: Position) -> None:
        data = bytearray((_PREFIX, _FORM_POSITION, _FAMILIES.index(position.family)))
        numbers = [
            position.generation,
            position.origin,
            position.trims,
            position.floor,
            *_snapshot_numbers(position.before),
        ]
        if position.window is None:
            numbers.append(0)
        else:
            numbers += [1, *_snapshot_numbers(position.window), position.newest]
        for number in numbers:
            data += _varint(number)
        self._prefix = bytes(data)
        self._checksum = zlib.crc32(data)

    def of_event(self, event_id: int) -> EventCursors:
        """The cursors of an event and of the executions in it."""
        number = _varint(event_id)
        return EventCursors(self._prefix + number, zlib.crc32(number, self._checksum))


class EventCursors:
    """The cursors of the executions of one event."""

    __slots__ = ("_checksum", "_prefix")

    def __init__(self, prefix: bytes, checksum: int) -> None:
        self._prefix = prefix
        self._checksum = checksum

    def after(self, nth: int) -> bytes:
        """The cursor after this many executions of the event; 0 means after all of them."""
        number = _SMALL[nth] if nth < len(_SMALL) else _varint(nth)
        return self._prefix + number + zlib.crc32(number, self._checksum).to_bytes(_CHECKSUM_BYTES, "big")


def encode_cursor(position: Position) -> bytes:
    """The cursor of a position."""
    return CursorWriter(position).of_event(position.last).after(position.nth)


def decode_cursor(cursor: bytes, family: EventFamily) -> Position | None:
    """The position of a cursor that is not empty, or None for OLDEST; raise InvalidCursor for anything else."""
    if not cursor or cursor[0] != _PREFIX:
        raise InvalidCursor(f"not a cursor of a feed: it must start with the byte 0x02, got 0x{cursor[:1].hex()}")
    if cursor[1:] == bytes((_FORM_OLDEST,)):
        return None
    if cursor[1:2] != bytes((_FORM_POSITION,)):
        raise InvalidCursor("it is incomplete, or of a newer version")
    body, checksum = cursor[:-_CHECKSUM_BYTES], cursor[-_CHECKSUM_BYTES:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big") != checksum or len(body) < 3:
        raise InvalidCursor("it is incomplete or damaged")
    if body[2] >= len(_FAMILIES) or _FAMILIES[body[2]] is not family:
        raise InvalidCursor("it is the cursor of another feed")
    numbers = _numbers(body[3:])
    try:
        position = _read_position(family, numbers)
    except StopIteration:
        raise InvalidCursor("it is incomplete") from None
    if next(numbers, None) is not None:
        raise InvalidCursor("it is too long")
    return position


def _read_position(family: EventFamily, numbers: Iterator[int]) -> Position:
    generation, origin, trims, floor = next(numbers), next(numbers), next(numbers), next(numbers)
    before = _read_snapshot(numbers)
    window = _read_snapshot(numbers) if next(numbers) else None
    newest = floor if window is None else next(numbers)
    return Position(
        family=family,
        generation=generation,
        origin=origin,
        trims=trims,
        floor=floor,
        before=before,
        window=window,
        newest=newest,
        last=next(numbers),
        nth=next(numbers),
    )


def _snapshot_numbers(snapshot: Snapshot) -> Iterator[int]:
    yield snapshot.restored_event_id
    yield snapshot.xmax
    yield snapshot.next_xid - snapshot.xmax
    yield len(snapshot.in_progress)
    for xid in snapshot.in_progress:
        yield snapshot.xmax - xid


def _read_snapshot(numbers: Iterator[int]) -> Snapshot:
    restored, xmax, assigned, count = next(numbers), next(numbers), next(numbers), next(numbers)
    # The list ends where the numbers end, however large the count.
    in_progress = tuple(xmax - distance for _, distance in zip(range(count), numbers, strict=False))
    if len(in_progress) < count or min(in_progress, default=0) < 0 or xmax + assigned > _MAX:
        raise InvalidCursor("it is damaged")
    return Snapshot(xmax=xmax, next_xid=xmax + assigned, in_progress=in_progress, restored_event_id=restored)


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _numbers(data: bytes) -> Iterator[int]:
    number, shift = 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            if shift >= 7 * _MAX_VARINT_BYTES:
                raise InvalidCursor("it is damaged")
            continue
        yield number
        number, shift = 0, 0
    if shift:
        raise InvalidCursor("it is incomplete")


_SMALL: Final = tuple(_varint(number) for number in range(1024))

"""Cursors: positions in the events of a store, as bytes that are saved and given back."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from flowfabric.model.event import EventFamily
from flowfabric.model.position import Position, Snapshot

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

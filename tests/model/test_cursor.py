import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.cursor import OLDEST, CursorWriter, InvalidCursor, decode_cursor, encode_cursor
from flowfabric.model.event import EventFamily
from flowfabric.model.position import Position, Snapshot

COMPLETION = EventFamily.COMPLETION
BEFORE = Snapshot(xmax=1000, next_xid=1003, in_progress=(990, 998), restored_event_id=7)
WINDOW = Snapshot(xmax=1010, next_xid=1010, in_progress=(990,), restored_event_id=7)
POSITION = Position(
    family=COMPLETION,
    generation=2,
    origin=3735928559,
    trims=5,
    floor=300,
    before=BEFORE,
    window=WINDOW,
    newest=420,
    last=333,
    nth=4,
)
PINNED = bytes.fromhex("02010002effdb6f50d05ac0207e80703020a020107f207000114a403cd0204947c76da")
"""A cursor as the first version wrote it: every later version must accept it."""

numbers = st.integers(0, 2**63 - 1)
snapshots = st.builds(
    lambda xmax, assigned, distances, restored: Snapshot(
        xmax=xmax,
        next_xid=xmax + assigned,
        in_progress=tuple(xmax - each for each in distances if each <= xmax),
        restored_event_id=restored,
    ),
    st.integers(0, 2**62),
    st.integers(0, 2**20),
    st.lists(st.integers(1, 2**40), max_size=5),
    numbers,
)


def positions(has_window: bool) -> st.SearchStrategy[Position]:  # noqa: FBT001
    """Any position, in a window or between two."""
    return st.builds(
        lambda newest, **fields: Position(newest=newest if has_window else fields["floor"], **fields),
        family=st.sampled_from(EventFamily),
        generation=numbers,
        origin=numbers,
        trims=numbers,
        floor=numbers,
        before=snapshots,
        window=snapshots if has_window else st.none(),
        newest=numbers,
        last=numbers,
        nth=numbers,
    )


@given(st.booleans().flatmap(positions))
def test_a_cursor_holds_its_position(position: Position) -> None:
    assert decode_cursor(encode_cursor(position), position.family) == position


def test_a_cursor_of_the_first_version_stays_valid() -> None:
    assert encode_cursor(POSITION) == PINNED
    assert decode_cursor(PINNED, COMPLETION) == POSITION
    assert decode_cursor(b"\x02\x00", COMPLETION) is None
    assert OLDEST == b"\x02\x00"
    assert list(EventFamily) == ["completion", "lease_event", "signal_event", "operator_event", "instance_tag"]


def test_the_cursors_of_a_window_differ_only_in_the_event() -> None:
    event = CursorWriter(POSITION).of_event(333)
    assert event.after(4) == PINNED
    for nth in (0, 127, 128, 1023, 1024, 5000):
        found = decode_cursor(event.after(nth), COMPLETION)
        assert found is not None
        assert (found.last, found.nth) == (333, nth)


@pytest.mark.parametrize(
    ("cursor", "why"),
    [
        (b"\x01" + bytes(16), "^not a cursor of a feed"),
        (b"\x00", "^not a cursor of a feed"),
        (b"hello", "^not a cursor of a feed"),
        (b"\x02", "incomplete"),
        (b"\x02\x00\x00", "incomplete"),
        (b"\x02\x03" + PINNED[2:], "newer version"),
        (PINNED + b"\x00", "damaged"),
        (b"\x02\x01" + bytes(40), "damaged"),
    ],
)
def test_other_bytes_are_no_cursor(cursor: bytes, why: str) -> None:
    with pytest.raises(InvalidCursor, match=why):
        decode_cursor(cursor, COMPLETION)


def test_a_cut_or_altered_cursor_is_refused() -> None:
    for length in range(1, len(PINNED)):
        with pytest.raises(InvalidCursor):
            decode_cursor(PINNED[:length], COMPLETION)
    for bit in range(len(PINNED) * 8):
        altered = bytearray(PINNED)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidCursor):
            decode_cursor(bytes(altered), COMPLETION)


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidCursor):
        decode_cursor(b"\x02\x01" + data, COMPLETION)


def test_the_cursor_of_another_feed_is_refused() -> None:
    with pytest.raises(InvalidCursor, match="another feed"):
        decode_cursor(PINNED, EventFamily.LEASE)

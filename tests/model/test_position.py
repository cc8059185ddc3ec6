from dataclasses import replace

from flowfabric.model.event import EventFamily
from flowfabric.model.position import Position, Snapshot, Trimmed

BEFORE = Snapshot(xmax=1000, next_xid=1003, in_progress=(990, 998), restored_event_id=7)
WINDOW = Snapshot(xmax=1010, next_xid=1010, in_progress=(990,), restored_event_id=7)
POSITION = Position(
    family=EventFamily.COMPLETION,
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


def test_a_window_starts_with_late_events_only_if_a_transaction_may_have_ended() -> None:
    between = POSITION.closed()
    assert (between.floor, between.last, between.window, between.before) == (420, 420, None, WINDOW)
    later = Snapshot(xmax=1020, next_xid=1020, in_progress=(990,), restored_event_id=7)
    opened = between.opened(later, generation=2, origin=1, newest=430)
    assert (opened.has_late_events, opened.after, opened.newest) == (False, 420, 430)
    ended = Snapshot(xmax=1020, next_xid=1020, in_progress=(), restored_event_id=7)
    opened = between.opened(ended, generation=2, origin=1, newest=430)
    assert (opened.has_late_events, opened.after) == (True, 0)
    assert opened.past_late_events().after == 420


def test_a_transaction_that_the_snapshot_does_not_list_may_end_later() -> None:
    # Transaction 1001 was in progress, but no later transaction had ended.
    now = Snapshot(xmax=1000, next_xid=1003, in_progress=(), restored_event_id=0)
    assert now.first_ended_by(now) is None
    assert now.first_ended_by(Snapshot(xmax=1002, next_xid=1005, in_progress=(), restored_event_id=0)) == 1000
    # A snapshot of another server says nothing about them, except that they have ended.
    elsewhere = Snapshot(xmax=5, next_xid=5, in_progress=(), restored_event_id=9)
    assert now.first_ended_by(elsewhere) == 1000
    assert BEFORE.first_ended_by(elsewhere) == 990


def test_deleted_events_are_needed_if_they_may_be_unread() -> None:
    between = POSITION.closed()
    ended = Snapshot(xmax=2000, next_xid=2000, in_progress=(), restored_event_id=7)
    still = Snapshot(xmax=2000, next_xid=2000, in_progress=(990,), restored_event_id=7)

    def trimmed(trims: int, event_id: int, unlisted_xid: int = 0, *, late: bool = False) -> Trimmed:
        return Trimmed(trims, event_id, late, unlisted_xid)

    # Nothing was deleted since.
    assert not between.needs(trimmed(5, 10_000, 10_000, late=True), ended)
    assert not between.needs(trimmed(6, 420), ended)
    assert between.needs(trimmed(6, 421), ended)
    assert between.needs(trimmed(6, 420, late=True), ended)
    # Transaction 990 was in progress and may have written deleted events, but not while it is in progress.
    assert between.needs(trimmed(6, 420, 990), ended)
    assert not between.needs(trimmed(6, 420, 989), ended)
    assert not between.needs(trimmed(6, 420, 990), still)
    # In a window, events up to the last one were read; its late events were read before.
    assert not POSITION.needs(trimmed(6, 332, 10_000, late=True), WINDOW)
    assert POSITION.needs(trimmed(6, 333), WINDOW)
    # A store that was restored from a dump up to the position has none of its late events.
    assert not between.rewound(7).needs(trimmed(6, 7, 10_000, late=True), ended)
    assert between.rewound(8).needs(trimmed(6, 8, 10_000), ended)


def test_late_events_are_read_behind_the_restored_ones() -> None:
    assert (replace(POSITION, last=0, nth=0).late_after, POSITION.closed().late_after) == (7, 7)
    assert POSITION.late_after == POSITION.after == 332


def test_a_position_beyond_a_restored_dump_goes_back_to_its_end() -> None:
    rewound = POSITION.rewound(310)
    assert rewound.trims == 0
    assert (rewound.floor, rewound.newest, rewound.last, rewound.nth) == (300, 310, 310, 0)
    assert replace(POSITION.rewound(1000), trims=5) == POSITION
    between = POSITION.closed().rewound(310)
    assert (between.floor, between.last) == (310, 310)

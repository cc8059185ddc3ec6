"""A saved cursor is refused only if an event behind it was deleted, however the transactions of the events overlapped.

The tests write events themselves: operations do not let a test choose when a transaction gets its id, draws the ids of
its events and ends.
"""

import asyncio
import random
from collections.abc import AsyncIterator

import asyncpg
import pytest

from engine.sending import waiting
from engine.state import rounds
from fixtures import Clock, Eventually, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.errors import InvalidInputError
from flowfabric.feeds import FeedEvent, Subscription
from flowfabric.model.cursor import decode_cursor
from flowfabric.model.event import EventFamily
from sessions import session

from .following import DAY, expired, ids, is_quiet, take, trim

pytestmark = pytest.mark.usefixtures("fast_polls")

COMPLETION, SIGNAL = EventFamily.COMPLETION, EventFamily.SIGNAL
INSERT = {
    COMPLETION: """insert into event (at, partition_key, kind, namespace_no, execution_id, outcome)
                   values (ff_now(), 1, 'ended', 1, gen_random_uuid(), 1) returning event_id""",
    SIGNAL: """insert into event (at, partition_key, kind, namespace_no, execution_id, details)
               values (ff_now(), 1, 'signal', 1, gen_random_uuid(), jsonb_build_object(
                 'signal_id', gen_random_uuid(), 'waitpoint_id', null, 'effect', 'satisfied', 'disposition', null))
               returning event_id""",
}


@pytest.fixture(params=["partitions", "rows"])
async def kept(request: pytest.FixtureRequest, engine: Engine) -> Engine:
    """An engine whose events are in daily partitions, which are dropped, or in one that is trimmed row by row."""
    if request.param == "partitions":
        assert await parts_of(engine).event_partitions.keep_partitions() == 3
    return engine


@pytest.fixture
async def writers(url: str) -> AsyncIterator[list[asyncpg.Connection]]:
    """Sessions with transactions of their own."""
    opened = [await session(url, f"test writer {nth}") for nth in range(3)]
    yield opened
    for connection in opened:
        await connection.close()


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and record as little as possible of what is deleted."""
    for limit in ("LISTED", "SCANNED", "TRIM_LIMIT"):
        monkeypatch.setattr(f"flowfabric.engine.event.partitions.{limit}", 1)


async def begin(connection: asyncpg.Connection) -> int:
    """Begin a transaction; return its id."""
    await connection.execute("begin")
    return int(await connection.fetchval("select pg_current_xact_id()::text"))


def subscribe(engine: Engine, family: EventFamily, cursor: bytes = b"") -> Subscription[FeedEvent]:
    """A subscription to completions or signals."""
    if family is COMPLETION:
        return engine.subscribe_completion(cursor)
    return engine.subscribe_signal_delivery(cursor)


def place(event: FeedEvent, family: EventFamily) -> int:
    """The id of an event."""
    position = decode_cursor(event.cursor, family)
    assert position is not None
    return position.last


async def test_a_cursor_of_a_quiet_rare_feed_stays_valid(
    kept: Engine, clock: Clock, given: Given, writers: list[asyncpg.Connection]
) -> None:
    wait = await waiting(kept, given)
    await begin(writers[0])
    async with kept.subscribe_operator_events() as events:
        await kept.resume_execution(execution_id=wait.execution_id)
        (event,) = await take(events, 1)
    await writers[0].execute("commit")
    for _ in range(3):
        await given.completed(lane_id="other")
    await clock.advance(seconds=2 * DAY)
    await trim(kept)
    again = await waiting(kept, given, lane_id="again")
    async with kept.subscribe_operator_events(event.cursor) as resumed:
        await kept.resume_execution(execution_id=again.execution_id)
        assert ids(await take(resumed, 1)) == [again.execution_id]


async def test_a_cursor_of_quiet_completions_stays_valid_although_leases_go_on(
    kept: Engine, clock: Clock, given: Given, writers: list[asyncpg.Connection]
) -> None:
    await begin(writers[0])
    handle = await given.claimed()
    async with kept.subscribe_completion() as events:
        await given.completed()
        (event,) = await take(events, 1)
    await writers[0].execute("commit")
    for _ in range(3):
        await kept.renew(handle)
    # Ends its lease, but not the execution.
    await kept.delay(handle, 0)
    await clock.advance(seconds=2 * DAY)
    await trim(kept)
    later = await given.completed(lane_id="later")
    async with kept.subscribe_completion(event.cursor) as resumed:
        assert ids(await take(resumed, 1)) == [later]


@pytest.mark.parametrize("family", [COMPLETION, SIGNAL])
@pytest.mark.parametrize("are_bounded", [False, True], ids=["all", "bounded"])
@pytest.mark.parametrize("is_unlisted", [False, True], ids=["in progress", "above xmax"])
async def test_a_late_event_is_found_to_be_deleted_if_the_highest_transaction_has_the_lowest_event_id(
    kept: Engine,
    clock: Clock,
    writers: list[asyncpg.Connection],
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    family: EventFamily,
    are_bounded: bool,  # noqa: FBT001
    is_unlisted: bool,  # noqa: FBT001
) -> None:
    if are_bounded:
        # The late event is not one of the newest ones that are read, but one of those of the highest transactions.
        for limit in ("LISTED", "SCANNED"):
            monkeypatch.setattr(f"flowfabric.engine.event.partitions.{limit}", 3)
    low, high, _ = writers

    async def write_late() -> int:
        assert await begin(low) < await begin(high)
        return int(await high.fetchval(INSERT[family]))

    late = 0 if is_unlisted else await write_late()
    async with subscribe(kept, family) as events:
        before = events.cursor
        # No transaction with a higher id ends, so the snapshot of the next window does not list this one.
        late = late or await write_late()
        for _ in range(3):
            assert await low.fetchval(INSERT[family]) > late
        await low.execute("commit")
        *_, event = await take(events, 3)
        await eventually(lambda: events.cursor != event.cursor)
        cursors = [before, event.cursor, events.cursor]
        await high.execute("commit")
        (last,) = await take(events, 1)
    await clock.advance(seconds=2 * DAY)
    await trim(kept)
    for cursor in cursors:
        await expired(subscribe(kept, family, cursor))
    if are_bounded:
        return
    # This one is after all of them: it was read as a late event.
    async with subscribe(kept, family, last.cursor) as resumed:
        later = await low.fetchval(INSERT[family])
        assert [place(event, family) for event in await take(resumed, 1)] == [later]


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("family", [COMPLETION, SIGNAL])
async def test_a_late_event_is_found_to_be_deleted_if_its_transaction_is_not_recorded(
    kept: Engine, clock: Clock, writers: list[asyncpg.Connection], eventually: Eventually, family: EventFamily
) -> None:
    slow, fast, _ = writers
    await begin(slow)
    await slow.fetchval(INSERT[family])
    for _ in range(3):
        await fast.fetchval(INSERT[family])
    async with subscribe(kept, family) as events:
        saved = events.cursor
        await slow.execute("commit")
        await take(events, 1)
    await clock.advance(seconds=2 * DAY)
    await trim(kept)
    await expired(subscribe(kept, family, saved))


class Schedule:
    """Random transactions that write events, and subscriptions whose cursors are saved in between."""

    def __init__(self, engine: Engine, writers: list[asyncpg.Connection], rng: random.Random) -> None:
        self._engine = engine
        self._writers = writers
        self._rng = rng
        self._open: set[int] = set()
        self._read: dict[EventFamily, set[int]] = {COMPLETION: set(), SIGNAL: set()}
        self.written: dict[EventFamily, set[int]] = {COMPLETION: set(), SIGNAL: set()}
        self.saved: list[tuple[EventFamily, bytes, frozenset[int]]] = []
        """Cursors, each with the events that were read before it."""
        self._subscriptions = {family: subscribe(engine, family) for family in self._read}

    async def run(self, steps: int) -> None:
        """Write and read; in the end commit and read everything."""
        for subscription in self._subscriptions.values():
            await subscription
        for _ in range(steps):
            nth = self._rng.randrange(len(self._writers))
            writer = self._writers[nth]
            action = self._rng.choice(("begin", "write", "write", "commit", "read"))
            if action == "begin" and nth not in self._open:
                await begin(writer)
                self._open.add(nth)
            elif action == "write":
                family = self._rng.choice((COMPLETION, SIGNAL))
                self.written[family].add(await writer.fetchval(INSERT[family]))
            elif action == "commit" and nth in self._open:
                await self._commit(nth)
            elif action == "read":
                await self._take()
        for nth in tuple(self._open):
            await self._commit(nth)
        async with asyncio.timeout(30):
            while self._read != self.written:
                await self._take()

    async def check(self, left: set[int], *, is_exact: bool) -> None:
        """Every cursor continues if no later event was deleted, and otherwise is refused."""
        for family, cursor, read in self.saved:
            unread = self.written[family] - read
            try:
                async with subscribe(self._engine, family, cursor) as resumed:
                    got = {place(event, family) for event in await take(resumed, len(unread))}
            except InvalidInputError:
                assert unread - left or not is_exact
            else:
                assert got == unread

    async def close(self) -> None:
        """Close the subscriptions."""
        for subscription in self._subscriptions.values():
            await subscription.aclose()

    async def _commit(self, nth: int) -> None:
        await self._writers[nth].execute("commit")
        self._open.remove(nth)

    async def _take(self) -> None:
        for family, subscription in self._subscriptions.items():
            while True:
                try:
                    (event,) = await take(subscription, 1, seconds=0.06)
                except TimeoutError:
                    break
                self._read[family].add(place(event, family))
                self.saved.append((family, event.cursor, frozenset(self._read[family])))
            self.saved.append((family, subscription.cursor, frozenset(self._read[family])))


@pytest.mark.parametrize("limit", [1, 2, 1000])
async def test_no_order_of_transactions_loses_a_deleted_event_silently(
    kept: Engine,
    clock: Clock,
    writers: list[asyncpg.Connection],
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
) -> None:
    monkeypatch.setattr("flowfabric.engine.event.partitions.LISTED", limit)
    monkeypatch.setattr("flowfabric.engine.event.partitions.SCANNED", limit)
    monkeypatch.setattr("flowfabric.engine.event.partitions.TRIM_LIMIT", 3)
    for _ in rounds(2, whole=15):
        seed = random.randrange(1 << 32)
        print("seed", seed)
        schedule = Schedule(kept, writers, random.Random(seed))
        await schedule.run(20)
        await clock.advance(seconds=DAY)
        await schedule.run(15)
        await schedule.close()
        for passed in (0.9, 0.2, 1):
            await clock.advance(seconds=passed * DAY)
            await trim(kept)
            left = {row["event_id"] for row in await connection.fetch("select event_id from event")}
            await schedule.check(left, is_exact=limit == 1000)


async def test_a_quiet_subscription_is_not_ended_by_what_is_deleted(kept: Engine, clock: Clock, given: Given) -> None:
    async with kept.subscribe_signal_delivery() as events:
        for _ in range(3):
            await given.completed()
            await clock.advance(seconds=2 * DAY)
            await trim(kept)
            assert await is_quiet(events)

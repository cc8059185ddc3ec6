"""Readers that are killed and resumed under load miss no event and get those of an execution in order."""

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from engine.sending import waiting
from engine.state import items, new, rounds
from fixtures import Clock, Engines, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.feeds import OLDEST, FeedEvent, Subscription
from flowfabric.model.cursor import decode_cursor
from flowfabric.model.event import FAMILY_KINDS, RARE_FAMILIES, EventFamily

Subscribe = Callable[[Engine, bytes], Subscription[FeedEvent]]
Place = tuple[int, int]
"""The id of an event and the number of the execution in it."""

FEEDS: dict[EventFamily, Subscribe] = {
    EventFamily.COMPLETION: lambda engine, cursor: engine.subscribe_completion(cursor),
    EventFamily.LEASE: lambda engine, cursor: engine.subscribe_lease_history(cursor),
    EventFamily.SIGNAL: lambda engine, cursor: engine.subscribe_signal_delivery(cursor),
    EventFamily.OPERATOR: lambda engine, cursor: engine.subscribe_operator_events(cursor),
    EventFamily.INSTANCE_TAG: lambda engine, cursor: engine.subscribe_instance_tags(cursor),
}


@pytest.fixture
def alteration() -> str:
    """Commits take a random time, so that they are seldom in the order of the event ids."""
    return """
        create function test_delay() returns trigger language plpgsql as $$
        begin perform pg_sleep(random() * 0.02); return null; end $$;
        create constraint trigger test_delay after insert on event_default deferrable initially deferred
          for each row when (new.event_id % 3 = 0) execute function test_delay();
        """


class Load:
    """Workers that run batches of executions until stopped."""

    def __init__(self, engine: Engine, clock: Clock, lane: str, rng: random.Random) -> None:
        self._engine = engine
        self._given = Given(engine, clock)
        self._lane = lane
        self._rng = rng
        self.is_stopped = False
        self.completed = 0

    async def run(self) -> None:
        """Create, claim, renew and end executions, some together and some concurrently; signal and tag others."""
        while not self.is_stopped:
            await self._wait_and_resume()
            count = self._rng.randint(1, 20)
            await self._engine.create_many(items(*[new(lane_id=self._lane)] * count))
            claimed = await self._engine.claim_many(
                lanes=(self._lane,), worker_id="w", worker_instance_id=f"w-{self._lane}", limit=count
            )
            handles = [one.handle for one in claimed]
            if self._rng.random() < 0.5:
                await self._engine.renew_many(handles)
            together, alone = handles[: count // 2], handles[count // 2 :]
            calls: list[Any] = [
                self._engine.complete(handle)
                if self._rng.random() < 0.7
                else self._engine.fail(handle, reason="x", classification="permanent")
                for handle in alone
            ]
            if together:
                calls.append(self._engine.complete_many([(handle, b"") for handle in together]))
            await asyncio.gather(*calls)
            self.completed += count

    async def _wait_and_resume(self) -> None:
        wait = await waiting(self._engine, self._given, lane_id=f"{self._lane}-waits")
        await self._engine.set_execution_tag(wait.execution_id, "ff.instance_id", "a")
        calls: list[Any] = [wait.send("other") for _ in range(self._rng.randint(1, 3))]
        calls.append(self._engine.set_execution_tag(wait.execution_id, "ff.instance_id", "b"))
        await asyncio.gather(*calls)
        await self._engine.resume_execution(execution_id=wait.execution_id)
        await self._engine.cancel_execution(execution_id=wait.execution_id, reason="done")


class Consumer:
    """A reader of one feed that is killed and resumed, and remembers what it got."""

    def __init__(self, family: EventFamily, engines: list[Engine], rng: random.Random) -> None:
        self._family = family
        self._engines = engines
        self._rng = rng
        self._cursor = OLDEST
        self.lives: list[list[tuple[str, Place]]] = []
        """What each life of the reader got: execution and place."""

    async def live(self, most: int, *, seconds: float) -> int:
        """Read up to so many events after the saved cursor, then die; return how many were read."""
        subscription = FEEDS[self._family](self._rng.choice(self._engines), self._cursor)
        got: list[tuple[str, Place]] = []
        unsaved = self._rng.choice((0, 0, 0, 3))
        cursors = [self._cursor]
        try:
            async with asyncio.timeout(seconds):
                while len(got) < most:
                    event = await anext(subscription)
                    got.append((event.execution_id, self._place(event)))
                    cursors.append(event.cursor)
        except TimeoutError:
            pass
        # It may die before it has saved its last cursors, or save the position without an event.
        self._cursor = cursors[max(len(cursors) - 1 - unsaved, 0)]
        if not unsaved and self._rng.random() < 0.5 and len(got) < most:
            self._cursor = subscription.cursor or self._cursor
        await subscription.aclose()
        self.lives.append(got)
        return len(got)

    def _place(self, event: FeedEvent) -> Place:
        position = decode_cursor(event.cursor, self._family)
        assert position is not None
        return position.last, position.nth

    def check(self, expected: set[Place]) -> None:
        """Every stored event was delivered, and those of an execution in order."""
        first: dict[Place, str] = {}
        for life in self.lives:
            assert _are_in_order(life)
            for execution_id, place in life:
                first.setdefault(place, execution_id)
        assert set(first) == expected
        assert _are_in_order([(execution_id, place) for place, execution_id in first.items()])


def _are_in_order(events: list[tuple[str, Place]]) -> bool:
    places = defaultdict(list)
    for execution_id, (event_id, _) in events:
        places[execution_id].append(event_id)
    return all(each == sorted(set(each)) for each in places.values())


async def _stored(rows: Rows, family: EventFamily) -> set[Place]:
    found = []
    for row in await rows.of("event"):
        if row["kind"] in FAMILY_KINDS[family] and (family is not EventFamily.COMPLETION or row["outcome"] is not None):
            size = len(row["execution_ids"] or (None,))
            found += [(row["event_id"], nth % size) for nth in range(1, size + 1)]
    return set(found)


async def test_a_reader_that_is_killed_100_times_under_load_misses_nothing(
    engines: Engines, clock: Clock, rows: Rows
) -> None:
    rng = random.Random(7)
    opened = [await engines(database_pool_size=4) for _ in range(3)]
    loads = [Load(opened[nth % 2], clock, f"lane-{nth}", rng) for nth in range(4)]
    running = [asyncio.create_task(load.run()) for load in loads]
    consumers = {
        family: [Consumer(family, opened, rng) for _ in range(1 if family in RARE_FAMILIES else 2)] for family in FEEDS
    }

    async def lives(consumer: Consumer) -> None:
        for _ in rounds(100, whole=400):
            await consumer.live(rng.randint(0, 60), seconds=rng.choice((0.02, 0.2)))

    await asyncio.gather(*map(lives, itertools.chain(*consumers.values())))
    for load in loads:
        load.is_stopped = True
    await asyncio.gather(*running)
    assert sum(load.completed for load in loads) > 500

    async def read_the_rest(consumer: Consumer) -> None:
        while await consumer.live(10_000, seconds=1):
            pass

    await asyncio.gather(*map(read_the_rest, itertools.chain(*consumers.values())))
    for family, found in consumers.items():
        expected = await _stored(rows, family)
        assert len(expected) > (50 if family in RARE_FAMILIES else 500)
        for consumer in found:
            assert len(consumer.lives) > 100
            consumer.check(expected)

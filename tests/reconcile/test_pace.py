"""The pace of the loop, tick by tick on a frozen clock: cheap when idle, gentle when behind."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from fixtures import Given
from flowfabric.db.database import Database
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import Parts, parts_of
from flowfabric.reconcile import loop
from flowfabric.reconcile.due import AHEAD_MS, read_due
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import Sweep

EVERY = 10.0


class HandClock:
    """The clock of the loop, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> HandClock:
    """Freeze the clock of the loop and clear the timers of the engine."""
    hand = HandClock()
    monkeypatch.setattr(loop, "time", hand)
    parts_of(engine).wakeups.next_timer = float("inf")
    return hand


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of connections acquired so far."""
    acquire, count = Database.acquire, 0

    def counted(database: Database) -> Any:
        nonlocal count
        count += 1
        return acquire(database)

    monkeypatch.setattr(Database, "acquire", counted)
    return lambda: count


def sweep(
    run: Callable[[], int], *, every: float = EVERY, is_woken_by_timers: bool = False, is_gentle: bool = False
) -> Sweep:
    """A sweep that is always due and whose full batch is ten."""

    async def batch(_: Parts) -> int:
        return run()

    return Sweep(
        "sweep",
        batch,
        every=lambda _: timedelta(seconds=every),
        batch=10,
        is_due=lambda _: True,
        is_woken_by_timers=is_woken_by_timers,
        is_gentle=is_gentle,
    )


async def test_an_idle_loop_costs_less_than_a_statement_a_second(
    engine: Engine, hand: HandClock, statements: Callable[[], int]
) -> None:
    reconciler = Reconciler(engine)
    # The first tick creates the event partitions, and the second starts the pause until their next check.
    for _ in range(2):
        hand.now += await reconciler._tick()
    began, before = hand.now, statements()
    for _ in range(20):
        hand.now += await reconciler._tick()
    assert 0 < statements() - before < hand.now - began


def test_an_idle_loop_sees_every_timer_within_its_pause() -> None:
    assert AHEAD_MS / 1000 >= Reconciler.IDLE_SECONDS


async def test_the_shortest_interval_is_the_pause_only_while_timers_are_due(
    engine: Engine, given: Given, hand: HandClock
) -> None:
    await given.clock.stop()
    reconciler = Reconciler(engine)
    while await reconciler._tick() < Reconciler.IDLE_SECONDS:
        pass
    await given.delayed(seconds=1.5)
    assert await reconciler._tick() == pytest.approx(0.75)
    await given.clock.advance(seconds=2)
    assert await reconciler._tick() == pytest.approx(0.75)
    assert reconciler.stats["delayed_promoter"].processed == 1
    assert await reconciler._tick() == Reconciler.IDLE_SECONDS


async def test_a_sweep_pauses_for_ten_intervals_after_three_failures_in_a_row(engine: Engine, hand: HandClock) -> None:
    def fail() -> int:
        raise ValueError("cannot")

    reconciler = Reconciler(engine, sweeps=[sweep(fail, is_woken_by_timers=True)])
    errors = []
    for _ in range(14):
        await reconciler._tick()
        errors.append(reconciler.stats["sweep"].errors)
        hand.now += EVERY
    assert errors == [1, 2, *[3] * 10, 4, 5]


async def test_a_success_resets_the_count_of_failures(engine: Engine, hand: HandClock) -> None:
    calls = 0

    def fail_twice() -> int:
        nonlocal calls
        calls += 1
        if calls % 3:
            raise ValueError("cannot")
        return 0

    reconciler = Reconciler(engine, sweeps=[sweep(fail_twice, is_woken_by_timers=True)])
    for _ in range(9):
        await reconciler._tick()
        hand.now += EVERY
    assert (reconciler.stats["sweep"].errors, reconciler.stats["sweep"].cycles) == (6, 3)


async def test_a_gentle_sweep_pauses_after_a_full_batch_for_as_long_as_it_took(engine: Engine, hand: HandClock) -> None:
    def take_a_second() -> int:
        hand.now += 1
        return 10

    for is_gentle, pause in ((True, 1.0), (False, Reconciler.MIN_PAUSE_SECONDS)):
        reconciler = Reconciler(engine, sweeps=[sweep(take_a_second, is_gentle=is_gentle)])
        for cycles in (1, 2):
            assert await reconciler._tick() == pytest.approx(pause)
            assert reconciler.stats["sweep"].cycles == cycles
            if is_gentle:
                hand.now += pause / 2
                await reconciler._tick()
                assert reconciler.stats["sweep"].cycles == cycles
            hand.now += pause


async def test_a_gentle_sweep_stops_pausing_when_it_stays_behind(engine: Engine, hand: HandClock) -> None:
    left = 60

    def take_a_second() -> int:
        nonlocal left
        hand.now += 1
        left -= 10
        return 10 if left > 0 else 0

    reconciler = Reconciler(engine, sweeps=[sweep(take_a_second, every=60, is_gentle=True)])
    pauses = []
    while left > 0:
        pauses.append(await reconciler._tick())
        hand.now += Reconciler.GENTLE_SECONDS / 4
    assert pauses[:5] == pytest.approx([1.0, 1.0, 1.0, Reconciler.MIN_PAUSE_SECONDS, Reconciler.MIN_PAUSE_SECONDS])
    # When it falls behind again it pauses again, however long it was due before.
    left = 20
    while left == 20:
        pause = await reconciler._tick()
        hand.now += 1
    assert pause == pytest.approx(1.0)


@pytest.fixture
def looks(hand: HandClock, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of looks so far, each of which takes a tenth of a second."""
    count = 0

    async def slow(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        hand.now += 0.1
        return await read_due(*arguments)

    monkeypatch.setattr(loop, "read_due", slow)
    return lambda: count


async def test_looks_between_full_batches_take_only_a_share_of_the_time(
    engine: Engine, hand: HandClock, looks: Callable[[], int]
) -> None:
    def take_a_tenth() -> int:
        hand.now += 0.1
        return 10

    reconciler = Reconciler(engine, sweeps=[sweep(take_a_tenth, is_woken_by_timers=True)])
    for _ in range(100):
        await reconciler._tick()
    # After a look of a tenth of a second there is none for a second, that is, for ten batches.
    assert reconciler.stats["sweep"].cycles == 100
    assert looks() == pytest.approx(100 / Reconciler.READ_SHARE, abs=1)


async def test_a_due_timer_causes_a_look_between_full_batches(
    engine: Engine, hand: HandClock, looks: Callable[[], int]
) -> None:
    reconciler = Reconciler(engine, sweeps=[sweep(lambda: 10, is_woken_by_timers=True)])
    for _ in range(5):
        await reconciler._tick()
    assert looks() == 1
    parts_of(engine).wakeups.next_timer = hand.now
    await reconciler._tick()
    assert looks() == 2

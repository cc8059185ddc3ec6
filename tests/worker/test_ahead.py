"""Executions claimed ahead of free slots: how many, and what happens to those that wait for a slot."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable
from typing import TypeAlias

import pytest

from faults.proxy import Proxy
from fixtures import Attempts, Engines, Eventually, Given, Rows, StartWorker, Submit
from fixtures import Clock as StoreClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease import claim
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import TerminalOutcome
from flowfabric.settings import Settings
from flowfabric.worker.ahead import Ahead
from flowfabric.worker.context import Context
from flowfabric.worker.faults import StoreHealth
from flowfabric.worker.heartbeat import Heartbeat
from flowfabric.worker.running import Running
from flowfabric.worker.slots import Slots
from flowfabric.worker.worker import Worker

from .waiting import LONG_TTL_MS

SLOTS = 2
FAST = 8
"""How many runs return at once, before the others block their slots."""
ALL = 24


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# How many are claimed ahead.


def sizes(returned: int, seconds: float, *, concurrency: int = 64, windows: int = 8) -> list[int]:
    """How many executions may be held beyond the slots after each window, if this many handlers return per window."""
    clock = Clock()
    ahead = Ahead(concurrency, 500, clock=clock)
    found = []
    for _ in range(windows):
        clock.now += seconds
        ahead.returned += returned
        ahead.claimed(is_full=True)
        found.append(ahead.size)
    return found


def test_the_number_claimed_ahead_starts_within_a_tenth_of_a_second_and_is_at_most_one_batch() -> None:
    assert sizes(200, 0.1)[-1] == 200
    assert sizes(200, 0.02)[-1] == 500


def test_the_number_at_most_doubles_from_one_window_to_the_next() -> None:
    assert sizes(1000, 0.1, windows=4) == [128, 256, 500, 500]


def test_nothing_is_claimed_ahead_of_slow_handlers() -> None:
    for returned, seconds in ((64, 0.2), (64, 10.0), (6, 0.1), (0, 1.0)):
        assert (returned, seconds, set(sizes(returned, seconds))) == (returned, seconds, {0})


def test_nothing_is_claimed_ahead_without_a_backlog() -> None:
    clock = Clock()
    ahead = Ahead(64, 500, clock=clock)
    clock.now += 0.1
    ahead.returned = 1000
    ahead.claimed(is_full=True)
    assert ahead.size == 128
    ahead.claimed(is_full=False)
    assert ahead.size == 0


def test_no_rate_is_measured_over_a_very_short_window() -> None:
    assert set(sizes(2, Ahead.WINDOW_SECONDS / 10, windows=9)) == {0}


# What happens to those that wait for a slot.


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every handler counts as fast, and an execution may wait for a slot as long as a test takes."""
    monkeypatch.setattr(Ahead, "SECONDS", 1e9)
    monkeypatch.setattr(Ahead, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(Ahead, "STALE_SECONDS", 3600.0)


class Job:
    """A handler whose first runs return at once; each later one waits until the test releases it."""

    def __init__(self, *, fast: int = FAST) -> None:
        self.fast = fast
        self.now = 0
        self.most = 0
        self.runs: list[tuple[ExecutionId, int]] = []
        """The execution and the lease epoch of every run, in the order they started."""
        self.blocked: dict[ExecutionId, asyncio.Event] = {}
        self.is_open = False

    async def __call__(self, ctx: Context) -> None:
        assert not ctx.is_resumed, "no run has waited"
        self.runs.append((ctx.execution_id, ctx.lease_epoch))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            if len(self.runs) > self.fast and not self.is_open:
                await self.blocked.setdefault(ctx.execution_id, asyncio.Event()).wait()
        finally:
            self.blocked.pop(ctx.execution_id, None)
            self.now -= 1

    @property
    def started(self) -> set[ExecutionId]:
        return {execution_id for execution_id, _ in self.runs}

    def open(self) -> None:
        self.is_open = True
        for gate in self.blocked.values():
            gate.set()


Held: TypeAlias = Callable[[Job], Awaitable[set[ExecutionId]]]
SomeWaiting: TypeAlias = Callable[[Worker, Job], Awaitable[set[ExecutionId]]]


@pytest.fixture
def held(rows: Rows) -> Held:
    """Read the executions that are leased and have not started."""

    async def held(job: Job) -> set[ExecutionId]:
        leased = await rows.of("execution", ownership_state="leased")
        found = {ExecutionId(f"{{fp:{row['partition_key']}}}:{row['execution_id']}") for row in leased}
        return found - job.started

    return held


@pytest.fixture
def waiting(eventually: Eventually, held: Held) -> SomeWaiting:
    """Wait until every slot is blocked and no claim is under way; return the executions that wait for a slot."""

    async def waiting(worker: Worker, job: Job) -> set[ExecutionId]:
        def is_settled() -> bool:
            is_full = len(worker._runs.slots._waiting) > max(1, worker._runs.slots.ahead.size // 2)
            return len(job.blocked) == worker.running == SLOTS and is_full

        await eventually(is_settled)
        return await held(job)

    return waiting


async def all_succeed(engine: Engine, runs: Iterable[ExecutionId], *, but: Container[ExecutionId] = ()) -> None:
    ended = [await engine.wait_for_ending(run, timeout=60) for run in runs if run not in but]
    assert {one.outcome for one in ended} <= {TerminalOutcome.SUCCESS}


@pytest.mark.usefixtures("eager")
async def test_no_more_handlers_run_than_there_are_slots(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    runs = [await submit() for _ in range(100)]
    job = Job(fast=1000)
    worker = await start_worker({"job": job}, concurrency=4)
    ahead = 0

    async def watch() -> None:
        nonlocal ahead
        while len(job.runs) < len(runs):
            ahead = max(ahead, len(worker._runs.slots._waiting))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await all_succeed(engine, runs)
    await watching
    assert ahead > 0
    assert job.most <= 4
    assert max(Counter(run for run, _ in job.runs).values()) == 1
    assert worker.running == 0


async def test_a_worker_may_have_more_slots_than_a_claim_takes(
    engine: Engine, start_worker: StartWorker, submit: Submit
) -> None:
    await start_worker({"job": Job()}, concurrency=1500)
    await all_succeed(engine, [await submit()])


@pytest.mark.usefixtures("eager")
async def test_the_lease_of_an_execution_that_waits_for_a_slot_is_renewed(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    waiting: SomeWaiting,
    rows: Rows,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Heartbeat, "CHECK_SECONDS", 0.0)
    runs = [await submit() for _ in range(ALL)]
    job = Job()
    worker = await start_worker({"job": job}, concurrency=SLOTS, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    ahead = await waiting(worker, job)
    assert worker._heartbeat is not None
    worker._heartbeat.check_all()

    async def are_renewed() -> bool:
        return all([(await rows.execution(run))["lease_renewed_at"] is not None for run in ahead])

    await eventually(are_renewed)
    assert not ahead & job.started
    job.open()
    await all_succeed(engine, runs)


@pytest.mark.usefixtures("eager")
async def test_an_execution_that_waits_for_a_slot_is_handed_back_when_the_worker_stops(
    engine: Engine,
    engines: Engines,
    start_worker: StartWorker,
    submit: Submit,
    waiting: SomeWaiting,
    attempts: Attempts,
    eventually: Eventually,
) -> None:
    runs = [await submit() for _ in range(ALL)]
    job, other = Job(), Job(fast=ALL)
    worker = await start_worker({"job": job}, concurrency=SLOTS, lease_ttl=LONG_TTL_MS / 1000)
    ahead = await waiting(worker, job)
    async with Worker(await engines(), lanes=["default"], handlers={"job": other}, lease_ttl=LONG_TTL_MS / 1000):
        worker.stop()
        await all_succeed(engine, ahead)
    assert ahead <= other.started
    assert not ahead & job.started
    await eventually(lambda: len(job.blocked) == worker.running == SLOTS)
    assert {len(await attempts(run)) for run in ahead} == {1}
    job.open()
    await all_succeed(engine, runs)


@pytest.mark.usefixtures("eager")
async def test_an_execution_that_waits_too_long_for_a_slot_is_handed_back(
    engine: Engine,
    engines: Engines,
    start_worker: StartWorker,
    submit: Submit,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed_back: set[ExecutionId] = set()
    skip = Slots._skip

    def recorded(self: Slots, running: Running) -> None:
        handed_back.add(running.execution_id)
        skip(self, running)

    monkeypatch.setattr(Slots, "_skip", recorded)
    monkeypatch.setattr(Ahead, "STALE_SECONDS", 0.1)
    runs = [await submit() for _ in range(ALL)]
    job, other = Job(), Job(fast=ALL)
    worker = await start_worker({"job": job}, concurrency=SLOTS, lease_ttl=LONG_TTL_MS / 1000)
    await eventually(lambda: handed_back and len(job.blocked) == worker.running == SLOTS)
    async with Worker(await engines(), lanes=["default"], handlers={"job": other}, lease_ttl=LONG_TTL_MS / 1000):
        await all_succeed(engine, runs, but=job.blocked)
    assert other.started == set(runs) - job.started
    assert len(job.blocked) == SLOTS
    job.open()
    await all_succeed(engine, runs)


async def test_nothing_is_claimed_in_place_of_what_was_handed_back(given: Given) -> None:
    begun: list[Running] = []
    slots = Slots(1, begun.append, StoreHealth())
    slots.ahead.size = 4
    first, second = Running(await given.run(), 0.0), Running(await given.run(), 0.0)
    for running in (first, second):
        slots.held.add(running)
        slots.enter(running)
    assert (begun, slots.started) == ([first], 1)
    slots.hand_back_waiting()
    assert (begun, slots.ahead.size) == ([first, second], 0)
    assert (first.is_handed_back, second.is_handed_back) == (False, True)
    slots.close()


@pytest.mark.usefixtures("eager")
async def test_an_execution_that_loses_its_lease_before_a_slot_is_free_is_not_run(
    engine: Engine, start_worker: StartWorker, submit: Submit, waiting: SomeWaiting, eventually: Eventually
) -> None:
    runs = [await submit() for _ in range(ALL)]
    job = Job()
    worker = await start_worker({"job": job}, concurrency=SLOTS, lease_ttl=LONG_TTL_MS / 1000)
    ahead = await waiting(worker, job)
    lost = sorted(ahead)[:2]
    for run in lost:
        await engine.cancel_execution(execution_id=run, reason="not wanted")
    await eventually(lambda: not {one.execution_id for one in worker._runs.slots.held} & set(lost))
    job.open()
    await all_succeed(engine, runs, but=lost)
    assert not set(lost) & job.started
    assert worker.running == 0


@pytest.mark.usefixtures("eager")
async def test_an_execution_whose_lease_expires_before_a_slot_is_free_is_not_run(
    engine: Engine,
    start_worker: StartWorker,
    submit: Submit,
    waiting: SomeWaiting,
    clock: StoreClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = [await submit() for _ in range(ALL)]
    job = Job()
    worker = await start_worker({"job": job}, concurrency=SLOTS, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    ahead = await waiting(worker, job)
    await clock.advance(ms=LONG_TTL_MS)
    for running in worker._runs.slots.held:
        running.renewed_at -= LONG_TTL_MS / 1000
    job.open()
    await all_succeed(engine, runs)
    assert {epoch for run, epoch in job.runs if run in ahead} == {2}
    assert "is not started: its lease expired before a slot was free" in caplog.text


@pytest.mark.usefixtures("eager")
async def test_an_execution_that_waits_for_a_slot_does_not_start_while_the_store_does_not_answer(
    engine: Engine, url: str, submit: Submit, waiting: SomeWaiting, eventually: Eventually
) -> None:
    runs = [await submit() for _ in range(ALL)]
    job = Job()
    async with Proxy(url) as proxy, Engine.connect(settings=Settings(database_url=proxy.url)) as cut:
        worker = Worker(cut, lanes=["default"], handlers={"job": job}, concurrency=SLOTS, lease_ttl=LONG_TTL_MS / 1000)
        async with worker:
            ahead = await waiting(worker, job)
            proxy.refuses = True
            proxy.cut()
            first, second = list(job.blocked.values())
            first.set()
            await eventually(lambda: worker._health.is_silent and len(job.blocked) == SLOTS)
            begun = job.started & ahead
            assert len(begun) == 1
            second.set()
            await eventually(lambda: len(job.blocked) == 1)
            assert job.started & ahead == begun
            assert not worker._runs.slots._waiting
            proxy.refuses = False
            job.open()
            await all_succeed(engine, runs)


async def test_slow_handlers_leave_the_backlog_to_others(
    engine: Engine,
    engines: Engines,
    start_worker: StartWorker,
    submit: Submit,
    eventually: Eventually,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No handler counts as fast, even on a fast machine.
    monkeypatch.setattr(Ahead, "SECONDS", 1e-9)
    monkeypatch.setattr(Ahead, "WINDOW_SECONDS", 0.0)
    runs = [await submit() for _ in range(ALL)]
    job, other = Job(), Job(fast=ALL)
    await start_worker({"job": job}, concurrency=SLOTS, lease_ttl=LONG_TTL_MS / 1000)
    await eventually(lambda: len(job.blocked) == SLOTS)
    assert await held(job) == set()
    mine = job.started
    async with Worker(await engines(), lanes=["default"], handlers={"job": other}, lease_ttl=LONG_TTL_MS / 1000):
        await all_succeed(engine, runs, but=job.blocked)
    assert other.started == set(runs) - mine
    job.open()
    await all_succeed(engine, runs)


# The timeout of an attempt counts from its claim.


@pytest.mark.usefixtures("eager")
async def test_an_execution_with_a_short_timeout_is_not_claimed_ahead(
    engine: Engine,
    engines: Engines,
    start_worker: StartWorker,
    submit: Submit,
    eventually: Eventually,
    held: Held,
    attempts: Attempts,
) -> None:
    short = {"timeout_policy": {"attempt_timeout_ms": 4000}}
    runs = [await submit() for _ in range(FAST)] + [await submit(policy=short) for _ in range(ALL)]
    job, other = Job(fast=FAST - 1), Job(fast=ALL)
    await start_worker({"job": job}, concurrency=1, lease_ttl=LONG_TTL_MS / 1000)
    await eventually(lambda: len(job.blocked) == 1)

    async def is_held_back() -> bool:
        return not await held(job)

    await eventually(is_held_back)
    mine = job.started
    async with Worker(await engines(), lanes=["default"], handlers={"job": other}, lease_ttl=LONG_TTL_MS / 1000):
        await all_succeed(engine, set(runs) - mine)
    assert set(runs) - mine == other.started
    assert {len(await attempts(run)) for run in other.started} == {1}
    job.open()
    await all_succeed(engine, mine)


@pytest.mark.usefixtures("eager")
async def test_an_attempt_whose_timeout_passes_before_a_slot_is_free_is_not_run(
    engine: Engine, start_worker: StartWorker, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "LEAST_AHEAD_MS", 0)
    fast = [await submit() for _ in range(FAST + SLOTS)]
    short = {"timeout_policy": {"attempt_timeout_ms": 100}}
    late = [await submit(policy=short) for _ in range(SLOTS)]
    job = Job()
    worker = await start_worker({"job": job}, concurrency=SLOTS, lease_ttl=LONG_TTL_MS / 1000, reconcile=False)
    # Every slot is taken by one of the others, which are older and do not return.
    ended = [await engine.wait_for_ending(run, timeout=60) for run in late]
    assert {(one.outcome, one.reason) for one in ended} == {(TerminalOutcome.EXPIRED, "attempt_timeout")}
    job.open()
    await all_succeed(engine, fast)
    assert not set(late) & job.started
    assert worker.running == 0

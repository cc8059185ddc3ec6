"""A claim that was denied waits without polling: whatever makes room wakes it, in this process and in others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from engine.limit.budgets import budget, report
from engine.limit.limits import limited, quota
from engine.state import claim, new
from fixtures import Clock, Engines, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.limited import LimitedClaims
from flowfabric.engine.parts import parts_of
from flowfabric.model.lease import ClaimedExecution

pytestmark = pytest.mark.usefixtures("hints_only")

WAIT_MS = 120_000


async def until_waiting(engine: Engine) -> None:
    """Return once a claim of this engine has found nothing and waits for a wake of its lane."""
    async with asyncio.timeout(20):
        while not parts_of(engine).wakeups._waiting.get("default"):  # noqa: ASYNC110
            await asyncio.sleep(0)


@asynccontextmanager
async def denied(engine: Engine, waiting: str) -> AsyncIterator[None]:
    """A claim that was denied waits; the block makes room for it."""
    assert await claim(engine) == []
    task = asyncio.create_task(claim(engine, max_wait_ms=WAIT_MS))
    await until_waiting(engine)
    assert not task.done()
    yield
    async with asyncio.timeout(20):
        assert [each.execution_id for each in await task] == [waiting]


@pytest.fixture(params=["this engine", "another engine"])
async def changing(request: pytest.FixtureRequest, engine: Engine, engines: Engines) -> Engine:
    """The engine that makes room."""
    return engine if request.param == "this engine" else await engines()


@pytest.fixture(params=["in order", "in turns"])
async def turns(request: pytest.FixtureRequest, engine: Engine, given: Given) -> None:
    """How the lane serves its queues."""
    await given.cancelled()
    if request.param == "in turns":
        await engine.set_lane_fairness(lane_id="default", fair_by="namespace")


ENDS: dict[str, Callable[[Engine, ClaimedExecution], Awaitable[object]]] = {
    "complete": lambda engine, run: engine.complete(run.handle, b"x"),
    "complete_many": lambda engine, run: engine.complete_many([(run.handle, b"x")]),
    "fail": lambda engine, run: engine.fail(run.handle, reason="x"),
    "cancel": lambda engine, run: engine.cancel_execution(execution_id=run.execution_id, reason="x"),
    "delay": lambda engine, run: engine.delay(run.handle, 3_600_000),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.usefixtures("turns")
async def test_a_returned_slot_wakes_a_claim(
    engine: Engine, given: Given, clock: Clock, changing: Engine, end: str
) -> None:
    slots = await quota(engine, running=1)
    await given.created(policy=limited(slots))
    (run,) = await claim(engine)
    async with denied(engine, await given.created(policy=limited(slots))):
        await ENDS[end](changing, run)


@pytest.mark.usefixtures("turns")
async def test_a_reset_budget_wakes_a_claim(engine: Engine, given: Given, clock: Clock, changing: Engine) -> None:
    spent = await budget(engine, hard={"tokens": 10})
    await report(engine, spent, tokens=10)
    async with denied(engine, await given.created(policy={"budget_ids": [str(spent)]})):
        await changing.reset_budget(spent)


@pytest.mark.usefixtures("turns")
async def test_a_raised_budget_wakes_a_claim(engine: Engine, given: Given, clock: Clock, changing: Engine) -> None:
    spent = await budget(engine, hard={"tokens": 10})
    await report(engine, spent, tokens=10)
    async with denied(engine, await given.created(policy={"budget_ids": [str(spent)]})):
        await changing.change_budget_limits(spent, limits={"tokens": {"hard": 20}})


@pytest.mark.usefixtures("turns")
async def test_a_changed_quota_wakes_a_claim(engine: Engine, given: Given, clock: Clock, changing: Engine) -> None:
    slots = await quota(engine, running=1)
    await given.created(policy=limited(slots))
    await claim(engine)
    async with denied(engine, await given.created(policy=limited(slots))):
        await changing.change_quota_policy(slots, 60, 0, 2)


@pytest.mark.usefixtures("turns")
async def test_a_detached_quota_wakes_a_claim(engine: Engine, given: Given, clock: Clock, changing: Engine) -> None:
    slots: UUID = uuid4()
    await engine.create_quota_policy(slots, 60, 0, 1)
    await engine.attach_quota("lane", "default", slots)
    await given.created()
    await claim(engine)
    async with denied(engine, await given.created()):
        await changing.detach_quota("lane", "default", slots)


@pytest.mark.usefixtures("turns")
async def test_a_released_admission_wakes_a_claim(engine: Engine, given: Given, clock: Clock, changing: Engine) -> None:
    slots = await quota(engine, running=1)
    holder = await given.created(lane_id="other")
    await engine.check_admission(slots, execution_id=holder, window_seconds=60, rate_limit=0, concurrency_cap=1)
    async with denied(engine, await given.created(policy=limited(slots))):
        await changing.release_admission(slots, holder)


@pytest.mark.usefixtures("turns")
async def test_a_rate_wakes_a_claim_when_its_window_has_passed(engine: Engine, given: Given, clock: Clock) -> None:
    rate = await quota(engine, rate=1, window=2)
    await given.created(policy=limited(rate))
    await claim(engine)
    async with denied(engine, await given.created(policy=limited(rate))):
        await clock.advance(seconds=2)


@pytest.mark.usefixtures("turns")
async def test_a_slot_that_returns_while_a_claim_is_denied_wakes_it(
    engine: Engine, given: Given, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = await quota(engine, running=1)
    await given.created(policy=limited(slots))
    (run,) = await claim(engine)
    waiting = await given.created(policy=limited(slots))
    calls = 0
    last: int | None = None
    for name in ("_round", "_round_of_spans"):
        call = getattr(LimitedClaims, name)

        async def counted(*values: Any, call: Any = call, **named: Any) -> Any:
            nonlocal calls
            found = await call(*values, **named)
            calls += 1
            if calls == last:
                await engine.complete(run.handle, b"x")
            return found

        monkeypatch.setattr(LimitedClaims, name, counted)
    assert await claim(engine) == []
    # The slot returns after the last statement that a claim makes before it waits has read that there is none.
    calls, last = 0, calls
    async with asyncio.timeout(20):
        assert [each.execution_id for each in await claim(engine, max_wait_ms=WAIT_MS)] == [waiting]


async def test_the_first_limited_execution_of_a_lane_wakes_a_claim(
    engine: Engine, given: Given, clock: Clock, changing: Engine
) -> None:
    slots = await quota(engine, running=1)
    await given.cancelled()
    task = asyncio.create_task(claim(engine, max_wait_ms=WAIT_MS))
    await until_waiting(engine)
    made = await changing.create_execution(**new(policy=limited(slots)))
    async with asyncio.timeout(20):
        assert [each.execution_id for each in await task] == [made.execution_id]


async def test_a_claim_knows_a_limit_that_was_attached_just_now(
    engine: Engine, given: Given, clock: Clock, changing: Engine
) -> None:
    slots = await quota(engine, running=1)
    waiting = [await given.created() for _ in range(2)]
    (run,) = await claim(engine, limit=1)
    await changing.attach_quota("lane", "default", slots)
    task = asyncio.create_task(claim(engine, max_wait_ms=WAIT_MS))
    async with asyncio.timeout(20):
        assert [each.execution_id for each in await task] == waiting[1:]
    assert run.execution_id == waiting[0]

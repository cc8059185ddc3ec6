"""Counts of executions after random histories and during concurrent work."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import asyncpg
import pytest

from engine.counts import COLUMNS, miscounts
from engine.state import claim, items, new
from engine.waits import suspend_args
from fixtures import Clock, Engines
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import ContentionError, NotFoundError, StateError
from flowfabric.model.states import PublicState

from .test_counting import AS_OLDER_VERSION, counted

DAY = 86_400
IS_WHOLE = os.environ.get("FF_TEST_SWEEP") == "whole"
STEPS = 400 if IS_WHOLE else 200


class History:
    """Random operations that cover every transition."""

    def __init__(self, engine: Engine, clock: Clock, chance: random.Random) -> None:
        self.engine = engine
        self.clock = clock
        self.chance = chance
        self.handles: list[Any] = []
        self.ids: list[str] = []
        self.steps: list[Callable[[], Awaitable[object]]] = [
            self.create,
            self.create,
            self.claim,
            self.claim,
            self.claim,
            self.complete,
            self.fail,
            self.suspend,
            self.suspend,
            self.resume,
            self.resume,
            self.park,
            self.cancel,
            self.wait,
            self.sweep,
            self.renew,
        ]

    async def step(self) -> None:
        """Run one operation, which may be refused: a lease may have expired, an execution may have ended."""
        with suppress(NotFoundError, ContentionError, StateError):
            await self.chance.choice(self.steps)()

    def handle(self) -> Any:
        return self.handles.pop(self.chance.randrange(len(self.handles))) if self.handles else None

    async def create(self) -> None:
        chance = self.chance
        made = [
            new(
                namespace=chance.choice("ab"),
                lane_id=chance.choice(("north", "south")),
                execution_kind=chance.choice("kl"),
                delay_ms=chance.choice((None, None, 40_000)),
                execution_deadline_at=chance.choice((None, await self.clock.now() + 50_000)),
                policy=chance.choice(
                    (None, {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}})
                ),
            )
            for _ in range(chance.randrange(1, 8))
        ]
        self.ids += [one.execution_id for one in await self.engine.create_many(items(*made))]  # type: ignore[union-attr]

    async def claim(self) -> None:
        runs = await claim(self.engine, "north", "south", limit=self.chance.randrange(1, 9))
        self.handles += [run.handle for run in runs]

    async def complete(self) -> None:
        ending = [self.handles.pop() for _ in range(min(len(self.handles), 4))]
        if ending:
            await self.engine.complete_many([(handle, b"x") for handle in ending])

    async def fail(self) -> None:
        if handle := self.handle():
            await self.engine.fail(handle, reason="no", classification=self.chance.choice(("permanent", "transient")))

    async def suspend(self) -> None:
        if handle := self.handle():
            timeout = self.chance.choice((None, await self.clock.now() + 30_000))
            await self.engine.suspend(handle, suspend_args(timeout_at=timeout))

    async def resume(self) -> None:
        found = await self.engine.list_executions(public_state="suspended", limit=1)
        for one in found.executions:
            delay_ms = self.chance.choice((0, 20_000))
            await self.engine.resume_execution(execution_id=one.execution_id, resume_delay_ms=delay_ms)

    async def park(self) -> None:
        if handle := self.handle():
            later = await self.clock.now() + 10_000
            await self.chance.choice(
                (self.engine.hand_back, self.engine.wait_children, lambda held: self.engine.delay(held, later))
            )(handle)

    async def cancel(self) -> None:
        if self.ids:
            await self.engine.cancel_execution(execution_id=self.chance.choice(self.ids), reason="no")

    async def renew(self) -> None:
        if self.handles:
            await self.engine.renew_many(self.handles[:5])

    async def wait(self) -> None:
        await self.clock.advance(seconds=self.chance.choice((1, 15, 31, DAY / 4)))

    async def sweep(self) -> None:
        engine = self.engine
        await parts_of(engine).lease_expiry.sweep()
        await parts_of(engine).delays.promote_due()
        await parts_of(engine).timeouts.expire_due()
        await parts_of(engine).suspension_timeouts.expire_due()
        await parts_of(engine).retention.trim_batch()


@pytest.mark.parametrize("seed", range(4 if IS_WHOLE else 1))
async def test_counts_match_the_rows_after_a_random_history(
    engine: Engine, clock: Clock, connection: asyncpg.Connection, consistent_rows: None, seed: int
) -> None:
    chance = random.Random(seed)
    history = History(engine, clock, chance)
    seen: Counter[str] = Counter()
    for at in range(STEPS):
        if at == STEPS // 3:
            await connection.execute(AS_OLDER_VERSION)
        await history.step()
        assert await miscounts(engine, connection) == []
        seen.update(await counted(engine))
        by = tuple(chance.sample(list(COLUMNS), chance.randrange(1, 5)))
        states = chance.sample(list(PublicState), 3)
        filters = {"public_state": states, "lane_id": chance.choice((["north"], ["north", "south"])), "namespace": "a"}
        assert await miscounts(engine, connection, *by, **filters) == []
    assert set(PublicState) - set(seen) == {"rate_limited", "waiting_children", "skipped"}


async def test_counts_during_concurrent_work_are_of_one_snapshot(engine: Engine, engines: Engines) -> None:
    size = 400 if IS_WHOLE else 150
    await engine.create_many(items(*[new(lane_id=f"l{at % 2}", execution_kind=f"k{at % 3}") for at in range(size)]))
    others = [await engines(), await engines()]

    async def work(other: Engine, name: str) -> None:
        chance = random.Random(name)
        while runs := await claim(other, "l0", "l1", worker_id=name, worker_instance_id=name, limit=7):
            for run in runs:
                match chance.randrange(5):
                    case 0:
                        await other.hand_back(run.handle)
                    case 1:
                        await other.suspend(run.handle, suspend_args())
                        await other.resume_execution(execution_id=run.execution_id)
                    case 2:
                        await other.fail(run.handle, reason="no", classification="permanent")
                    case _:
                        await other.complete_many([(run.handle, b"x")])

    working = asyncio.gather(*(work(other, f"w{at}") for at, other in enumerate(others)))
    ended = looks = 0
    is_mixed = False
    while not working.done():
        found = await counted(engine)
        assert sum(found.values()) == size, found
        now_ended = found.get("completed", 0) + found.get("failed", 0)
        assert now_ended >= ended, found
        ended, looks, is_mixed = now_ended, looks + 1, is_mixed or len(found) > 3
    await working
    assert looks > 5
    assert is_mixed
    assert sum((await counted(engine, public_state=["completed", "failed"])).values()) == size

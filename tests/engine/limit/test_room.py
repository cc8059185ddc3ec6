"""A claim finds the room that there is, however many queues have none, and is woken as soon as there is some."""

import asyncio
from collections.abc import Iterable
from typing import Any

import asyncpg
import pytest

from engine.limit.limits import limited, quota
from engine.state import claim
from fixtures import Clock, Engines, Given
from flowfabric.engine.core.wakeups import Wakeups
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease import room
from flowfabric.engine.lease.room import RoomWaits
from flowfabric.engine.limit import account, reserve
from flowfabric.engine.parts import parts_of

TENANT = "tests.tenant"


async def test_a_claim_finds_the_only_queue_with_room_behind_many_without(
    engine: Engine, engines: Engines, given: Given, clock: Clock
) -> None:
    slots = await quota(engine, running=1, key_from=f"tag:{TENANT}")
    created = [await given.created(policy=limited(slots), tags={TENANT: str(nth % 60)}) for nth in range(120)]
    await engine.set_lane_fairness(lane_id="default", fair_by=f"tag:{TENANT}")
    runs = await claim(engine, limit=100)
    assert len(runs) == 60
    await engine.complete(next(run.handle for run in runs if run.execution_id == created[59]), b"")
    assert [run.execution_id for run in await claim(await engines(), limit=1)] == [created[119]]


async def test_the_first_time_at_which_a_rate_lets_more_through_wakes_a_claim(engine: Engine) -> None:
    wakeups = parts_of(engine).store.wakeups
    waits = RoomWaits(wakeups)
    # The first time, all claims are woken.
    await wakeups.hints.listen()
    since = wakeups.wakes(("default",))
    waits.add(("default",), (), 100, since=0)
    waits.add(("default",), (), 60_000, since=0)
    assert await wakeups.wait_for_work(("default",), 5, since=since)
    waits.close()


async def test_keys_that_never_get_room_do_not_fill_the_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups = parts_of(engine).store.wakeups
    waits = RoomWaits(wakeups)
    await wakeups.hints.listen()
    monkeypatch.setattr(room, "MAX_KEYS", 10)
    since = wakeups.wakes(("default",))
    for key_no in range(100):
        waits.add(("default",), [(key_no, [key_no])], None, since=waits.now)
        assert len(waits._lanes) <= 10
        assert len(waits._queues) <= 10
    assert await wakeups.wait_for_work(("default",), 5, since=since)


async def test_many_keys_that_get_room_at_once_wake_the_claims_of_other_processes(
    engine: Engine, engines: Engines, given: Given, clock: Clock
) -> None:
    heard: list[Any] = []
    has_heard = asyncio.Event()

    def hear(keys: Iterable[int] | None) -> None:
        heard.append(None if keys is None else set(keys))
        has_heard.set()

    other = parts_of(await engines()).store.wakeups
    other.on_room(hear)
    # The first time, all may have got room.
    await other.hints.listen()
    heard.clear()
    has_heard.clear()
    parts_of(engine).store.wakeups.room(range(1, Wakeups.MAX_PLACES + 2))
    await asyncio.wait_for(has_heard.wait(), 10)
    assert heard == [None]


async def test_the_queues_of_a_budget_are_found_by_an_index(
    engine: Engine, given: Given, connection: asyncpg.Connection, altered_rows: None
) -> None:
    await given.created()
    await connection.execute(
        """
        insert into queue (route_no, lane_no, kind_no, namespace_no, admission_key_no, budget_ids)
        select route_no, lane_no, kind_no, namespace_no, n, array[gen_random_uuid()]
          from queue, generate_series(1, 5000) n
        """
    )
    await connection.execute("analyze queue")
    for statement in (account.SQL.list_lanes_of_budgets, reserve.SQL.take_reservations):
        nothing = ", ".join(["'{}'"] * len(statement.parameters))
        await connection.execute(f"prepare found as {statement.sql}")
        plan = await connection.fetch(f"explain execute found({nothing})")
        assert any("queue_of_budget" in row[0] for row in plan)
        await connection.execute("deallocate found")

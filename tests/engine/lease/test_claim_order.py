"""Which executions a claim takes, and in which order."""

from typing import Any

import asyncpg

from engine.state import claim, ids, made, new
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.states import AttemptType, HandleKind


def requiring(*tokens: str, **overrides: Any) -> dict[str, Any]:
    """The arguments of a create that requires capabilities."""
    return new(policy={"routing_requirements": {"required_capabilities": tokens}}, **overrides)


async def test_the_highest_priority_comes_first_then_the_oldest(engine: Engine) -> None:
    priorities = [0, 9000, 5, 5, 9000, 0, 4, 5]
    created = await made(engine, *(new(priority=priority) for priority in priorities))
    expected = [created[at] for at in (1, 4, 2, 3, 7, 6, 0, 5)]
    assert ids(await claim(engine, limit=3)) == expected[:3]
    late = (await engine.create_execution(**new(priority=6))).execution_id
    assert ids(await claim(engine, limit=1)) == [late]
    assert ids(await claim(engine)) == expected[3:]


async def test_age_is_the_order_of_creation_across_calls_processes_and_partitions(
    engines: Engines, engine: Engine
) -> None:
    other = await engines()
    created: list[str] = []
    for at in range(10):
        given = {"execution_id": f"{{fp:{255 - at}}}:{9 - at}1111111-2222-3333-4444-555555555555"} if at % 2 else {}
        created += [(await (engine, other)[at // 2 % 2].create_execution(**new(**given))).execution_id]
    assert ids(await claim(engine)) == created


async def test_a_claim_orders_several_lanes_by_priority_then_age(engine: Engine) -> None:
    created = await made(
        engine, *(new(lane_id=lane, priority=priority) for priority in (1, 2) for lane in ("a", "b", "c", "b"))
    )
    in_order = created[4:] + created[:4]
    assert ids(await claim(engine, "c", "b", "a", limit=5)) == in_order[:5]
    assert ids(await claim(engine, "a", "b", "c", limit=5)) == in_order[5:]


async def test_a_claim_takes_nothing_from_lanes_it_does_not_name(engine: Engine, rows: Rows) -> None:
    await made(engine, new(lane_id="a"), new(lane_id="b"))
    assert len(await claim(engine, "a")) == 1
    async with rows.unchanged():
        assert await claim(engine, "a") == []
        assert await claim(engine, "nowhere") == []


async def test_a_claim_orders_capability_sets_by_priority_then_age(engine: Engine) -> None:
    wanted = [("gpu",), (), ("cpu",), ("gpu", "cpu"), (), ("gpu",)]
    created = await made(engine, *(requiring(*tokens, priority=at % 2) for at, tokens in enumerate(wanted)))
    expected = created[1::2] + created[::2]
    assert ids(await claim(engine, limit=4, capabilities=("cpu", "gpu", "more"))) == expected[:4]
    assert ids(await claim(engine, capabilities=("cpu", "gpu", "more"))) == expected[4:]


async def test_a_worker_claims_only_what_its_capabilities_cover(engine: Engine) -> None:
    nothing, gpu, both, upper, accent = await made(
        engine, new(), requiring("gpu"), requiring("gpu", "cpu"), requiring("GPU"), requiring("größe")
    )
    assert ids(await claim(engine, capabilities=("cpu",))) == [nothing]
    assert ids(await claim(engine, capabilities=["gpu", "gpu"])) == [gpu]
    assert ids(await claim(engine, capabilities={"cpu", "gpu", "tpu"})) == [both]
    assert ids(await claim(engine, capabilities=("gpu", "größe"))) == [accent]
    assert ids(await claim(engine, capabilities=("GPU",))) == [upper]


async def test_executions_that_no_worker_can_run_do_not_hide_those_behind_them(engine: Engine, rows: Rows) -> None:
    for at in range(3):
        await made(engine, *[requiring(f"rare-{at}", priority=9000)] * 50)
    (behind,) = await made(engine, new())
    assert ids(await claim(engine, limit=1)) == [behind]
    async with rows.unchanged():
        assert await claim(engine) == []
    waiting = await rows.of("execution", public_state="waiting")
    assert {row["eligibility_state"] for row in waiting} == {"eligible_now"}
    assert len(waiting) == 150


async def test_a_locked_row_does_not_hide_those_behind_it(
    engine: Engine, connection: asyncpg.Connection, rows: Rows
) -> None:
    held, behind = await made(engine, new(priority=5), new())
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(held))
        assert ids(await claim(engine, limit=1)) == [behind]
    assert ids(await claim(engine, limit=1)) == [held]


async def test_a_claim_takes_no_more_than_its_limit(engine: Engine) -> None:
    created = await made(engine, *[new()] * 1000)
    assert ids(await claim(engine, limit=1)) == created[:1]
    assert ids(await claim(engine, limit=998)) == created[1:999]
    assert ids(await claim(engine, limit=1000)) == created[999:]
    assert await claim(engine, limit=1000) == []


async def test_a_claim_takes_64_lanes_and_counts_duplicates_once(engine: Engine) -> None:
    lanes = [f"lane-{at}" for at in range(64)]
    created = await made(engine, *(new(lane_id=lane) for lane in lanes))
    assert ids(await claim(engine, *reversed(lanes), "lane-0", limit=64)) == created


async def test_retries_and_lost_leases_keep_their_place(engine: Engine, given: Given, clock: Clock) -> None:
    failed = await given.backing_off(delay_ms=1000, lane_id="retry")
    behind = await given.created(lane_id="retry")
    await clock.advance(seconds=1)
    await parts_of(engine).delays.promote_due()
    assert ids(await claim(engine, "retry")) == [failed.execution_id, behind]
    ahead = await given.reclaimable(priority=2)
    behind = await given.created(priority=1)
    first = await given.created(priority=3)
    claimed = await claim(engine)
    assert ids(claimed) == [first, ahead.execution_id, behind]
    assert [one.handle.kind for one in claimed] == [HandleKind.FRESH, HandleKind.RECLAIMED, HandleKind.FRESH]
    assert [one.attempt_type for one in claimed] == [AttemptType.INITIAL, AttemptType.RECLAIM, AttemptType.INITIAL]


async def test_an_execution_that_becomes_claimable_again_is_found_by_every_process(
    engines: Engines, engine: Engine, clock: Clock
) -> None:
    """Each process caches where its queues begin; an execution that returns below that point must be found again."""
    other = await engines()
    created = await made(engine, *[new(policy={"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}}})] * 6)
    (first,) = await claim(engine, limit=1)
    assert ids(await claim(other, limit=1)) == created[1:2]
    await engine.fail(first.handle, reason="again")
    await parts_of(engine).delays.promote_due()
    assert ids(await claim(engine, limit=1)) == created[:1]
    assert ids(await claim(other, limit=9)) == created[2:]


async def test_many_priorities_are_claimed_in_order(engine: Engine) -> None:
    created = await made(engine, *(new(priority=at * 7 % 50) for at in range(50)))
    by_priority = sorted(range(50), key=lambda at: -(at * 7 % 50))
    taken: list[str] = []
    for _ in range(17):
        taken += ids(await claim(engine, limit=3))
    assert taken == [created[at] for at in by_priority]

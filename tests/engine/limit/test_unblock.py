"""The sweep that unblocks: executions whose limits have room again, and those whose route a worker serves."""

from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from engine.limit.budgets import budget, report
from engine.limit.limits import check, limited, quota, some_id
from engine.state import claim, ids
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.limit import block
from flowfabric.engine.parts import parts_of
from flowfabric.reconcile.due import read_due
from flowfabric.reconcile.loop import Reconciler
from flowfabric.reconcile.sweeps import SWEEPS

GPU: dict[str, Any] = {"policy": {"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}}}
ROUTE = "waiting_for_capable_worker"


async def unblock(engine: Engine) -> None:
    """Run the sweep until it has nothing more to do."""
    await Reconciler(engine, sweeps=[sweep for sweep in SWEEPS if sweep.name == "unblock"]).catch_up()


async def states(rows: Rows, *execution_ids: str) -> list[str]:
    return [(await rows.execution(each))["eligibility_state"] for each in execution_ids]


async def budget_with(engine: Engine, *, hard: int, used: int) -> UUID:
    """A budget with a limited dimension and an unlimited one."""
    budget_id = await budget(engine, hard={"tokens": hard})
    await report(engine, budget_id, tokens=used, free=10**9)
    return budget_id


async def test_an_execution_is_unblocked_when_every_budget_has_room(engine: Engine, given: Given, rows: Rows) -> None:
    roomy = await budget_with(engine, hard=100, used=99)
    spent = await budget_with(engine, hard=100, used=100)
    execution_id = await given.created(policy={"budget_ids": [str(each) for each in (roomy, spent, uuid4())]})
    await engine.block_execution_for_admission(execution_id, "waiting_for_budget")
    await unblock(engine)
    assert await states(rows, execution_id) == ["blocked_by_budget"]
    await engine.change_budget_limits(spent, limits={"tokens": {"hard": 101}})
    await unblock(engine)
    assert await states(rows, execution_id) == ["eligible_now"]
    assert ids(await claim(engine)) == [execution_id]


async def test_an_execution_is_unblocked_when_every_quota_has_a_token_and_a_slot(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    await clock.stop()
    own, other = await quota(engine, rate=1, window=10), await quota(engine, running=1, window=10)
    await engine.attach_quota("lane", "default", other)
    execution_id = await given.created(policy=limited(own))
    await check(engine, own, some_id(), rate_limit=1)
    holder = some_id()
    await check(engine, other, holder, concurrency_cap=1)
    await engine.block_execution_for_admission(execution_id, "waiting_for_quota")
    await unblock(engine)
    assert await states(rows, execution_id) == ["blocked_by_quota"]
    await engine.release_admission(other, holder)
    await unblock(engine)
    # The slot is free, the token is not.
    assert await states(rows, execution_id) == ["blocked_by_quota"]
    await clock.advance(seconds=10)
    await unblock(engine)
    assert await states(rows, execution_id) == ["eligible_now"]


async def test_a_quota_with_a_corrupt_limit_keeps_only_its_own_executions_blocked(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    corrupt, sound = await quota(engine, running=1), await quota(engine, running=1)
    execution_ids = []
    for each in (corrupt, sound):
        execution_ids.append(await given.created(policy=limited(each)))
        await engine.block_execution_for_admission(execution_ids[-1], "waiting_for_quota")
    await connection.execute("update quota_policy set max_concurrent = -1 where quota_policy_id = $1", corrupt)
    await unblock(engine)
    assert await states(rows, *execution_ids) == ["blocked_by_quota", "eligible_now"]


async def test_the_longest_blocked_executions_get_the_room_that_there_is(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    policy = limited(await quota(engine, running=2))
    execution_ids = [await given.created(policy=policy) for _ in range(4)]
    for nth in (2, 0, 3, 1):
        await clock.advance(ms=1)
        await engine.block_execution_for_admission(execution_ids[nth], "waiting_for_quota")
    assert (await parts_of(engine).unblocking.unblock_batch()).done == 2
    assert await states(rows, *execution_ids) == ["eligible_now", "blocked_by_quota"] * 2


async def test_an_execution_of_a_queue_without_limits_is_unblocked(engine: Engine, given: Given, rows: Rows) -> None:
    execution_ids = [await given.created() for _ in range(2)]
    for execution_id, reason in zip(execution_ids, ("waiting_for_budget", "waiting_for_quota"), strict=True):
        await engine.block_execution_for_admission(execution_id, reason)
    await unblock(engine)
    assert await states(rows, *execution_ids) == ["eligible_now"] * 2


async def test_what_cannot_be_unblocked_does_not_hide_what_is_behind_it(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "PAGE_LIMIT", 2)
    monkeypatch.setattr(block, "PAGES_IN_A_ROW", 3)
    policy = {"budget_ids": [str(await budget_with(engine, hard=1, used=1))]}
    stuck = [await given.created(lane_id="stuck", policy=policy) for _ in range(7)]
    behind = await given.created()
    served = await given.created(**GPU)
    for execution_id in (*stuck, behind):
        await engine.block_execution_for_admission(execution_id, "waiting_for_budget")
    for _ in range(5):
        await engine.block_execution_for_admission(await given.created(), "paused_by_operator")
    await engine.block_execution_for_admission(served, ROUTE)
    # A pass ends after a number of pages, and the next one goes on.
    await unblock(engine)
    assert await states(rows, behind, served) == ["blocked_by_budget", "blocked_by_route"]
    await connection.execute(
        """insert into worker (partition_key, namespace, worker_instance_id, worker_id, lanes, capabilities,
                               serves_all_namespaces, last_heartbeat_at, liveness_ttl_ms, registered_at)
           values (0, 'tests', 'w', 'w', '{default}', '{cuda,gpu}', false, ff_now(), 60000, ff_now())"""
    )
    await unblock(engine)
    assert await states(rows, behind, served) == ["eligible_now", "eligible_now"]
    assert await states(rows, *stuck) == ["blocked_by_budget"] * 7


async def test_a_locked_execution_is_left_for_the_next_pass(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    locked, free = await given.created(), await given.created()
    for execution_id in (locked, free):
        await engine.block_execution_for_admission(execution_id, "waiting_for_quota")
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(locked))
        await unblock(engine)
        assert await states(rows, locked, free) == ["blocked_by_quota", "eligible_now"]
    await unblock(engine)
    assert await states(rows, locked) == ["eligible_now"]


@pytest.mark.parametrize(
    ("worker", "state"),
    [
        ({"capabilities": ("cuda", "gpu", "more")}, "eligible_now"),
        ({"capabilities": ("cuda", "gpu"), "namespace": "others", "serves_all_namespaces": True}, "eligible_now"),
        ({"capabilities": ("cuda", "gpu"), "kinds": ("job", "other")}, "eligible_now"),
        ({"capabilities": ("cuda",)}, "blocked_by_route"),
        ({"capabilities": ("cuda", "gpu"), "namespace": "others"}, "blocked_by_route"),
        ({"capabilities": ("cuda", "gpu"), "lanes": ("other",)}, "blocked_by_route"),
        ({"capabilities": ("cuda", "gpu"), "kinds": ("other",)}, "blocked_by_route"),
    ],
)
async def test_the_registration_of_a_worker_unblocks_what_it_alone_can_run(
    engine: Engine, given: Given, rows: Rows, worker: dict[str, Any], state: str
) -> None:
    execution_id = await given.created(**GPU)
    await given.registered(worker_instance_id="half", capabilities=("gpu",))
    await engine.block_execution_for_admission(execution_id, ROUTE)
    await given.registered(worker_instance_id="new", **worker)
    assert await states(rows, execution_id) == [state]
    await unblock(engine)
    assert await states(rows, execution_id) == [state]


async def test_the_sweep_unblocks_what_a_live_worker_can_run(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    await clock.stop()
    await given.registered(capabilities=("cuda", "gpu"), liveness_ttl_ms=1000)
    execution_id, simple = await given.created(**GPU), await given.created()
    for each in (execution_id, simple):
        await engine.block_execution_for_admission(each, ROUTE)
    await clock.advance(seconds=1)
    await unblock(engine)
    assert await states(rows, execution_id, simple) == ["blocked_by_route"] * 2
    await engine.register_worker(
        worker_id="plain", worker_instance_id="plain-1", lanes=("default",), liveness_ttl_ms=1000, namespace="tests"
    )
    assert await states(rows, execution_id, simple) == ["blocked_by_route", "eligible_now"]


async def test_a_reserved_capability_does_not_keep_a_worker_from_a_route(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    execution_id = await given.created(**GPU)
    await connection.execute(
        "update capability_set set required = required || '{limited claims 1}' where required <> '{}'"
    )
    await engine.block_execution_for_admission(execution_id, ROUTE)
    await given.registered(capabilities=("cuda", "gpu"))
    assert await states(rows, execution_id) == ["eligible_now"]


async def test_blocks_of_operators_lanes_and_cancelled_flows_are_never_lifted_by_the_sweep(
    engine: Engine, given: Given, rows: Rows
) -> None:
    await given.registered()
    for reason in ("paused_by_operator", "paused_by_policy"):
        await engine.block_execution_for_admission(await given.created(), reason)
    async with rows.unchanged():
        await unblock(engine)


async def test_the_sweep_is_due_only_if_something_is_blocked(engine: Engine, given: Given) -> None:
    store = parts_of(engine).store
    execution_id = await given.created()
    assert not (await read_due(store, [])).has_blocked
    for reason in ("waiting_for_quota", ROUTE):
        await engine.block_execution_for_admission(execution_id, reason)
        assert (await read_due(store, [])).has_blocked
    await engine.unblock_execution(execution_id)
    assert not (await read_due(store, [])).has_blocked


async def test_an_execution_that_cannot_be_unblocked_does_not_stop_the_others(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    execution_ids = [await given.created(priority=nth) for nth in range(4)]
    for execution_id in execution_ids:
        await engine.block_execution_for_admission(execution_id, "waiting_for_quota")
    await connection.execute(
        f"""alter table execution add constraint poisoned
              check (execution_id <> '{uuid_of(execution_ids[1])}' or eligibility_state <> 'eligible_now') not valid"""
    )
    await unblock(engine)
    assert await states(rows, *execution_ids) == ["eligible_now", "blocked_by_quota", "eligible_now", "eligible_now"]
    assert "failed 1 times" in caplog.text

"""Edge cases of grants and claims by id: closed lanes, past deadlines, locked rows, unusual JSON."""

import asyncio

import asyncpg
import pytest

from engine.cases import Cases, in_turn
from engine.grants import (
    claim_granted,
    claim_resumed,
    grant_for_worker,
    issue_grant,
    issue_reclaim_grant,
    reclaim,
    register_workers,
    resumable,
    worker,
)
from engine.state import claim, ids, made, new, refused
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.grant import NotReclaimable
from flowfabric.model.key import HmacKids, VerifyingKid
from flowfabric.model.states import PublicState

GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}


@in_turn("state", ["paused", "disabled"])
async def test_a_closed_lane_stops_named_claims(
    engine: Engine, given: Given, rows: Rows, clock: Clock, state: str
) -> None:
    await register_workers(engine)
    lost = await given.claimed(lease_ttl_ms=1000)
    put_aside = await resumable(given)
    await clock.advance(seconds=2)
    await engine.mark_lease_expired_if_due(lost.execution_id)
    await engine.set_lane_state("default", state)
    async with rows.unchanged():
        await refused(claim_resumed(engine, put_aside), "execution_not_leaseable")
        for call in (issue_reclaim_grant, reclaim):
            answer = await call(engine, lost.execution_id)
            assert answer == NotReclaimable(execution_id=lost.execution_id, detail=f"lane default is {state}")


async def test_a_deadline_given_with_a_claim_counts_even_if_it_is_past(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    execution_id = await given.created()
    await issue_grant(engine, execution_id)
    now = await clock.now()
    await claim_granted(engine, execution_id, execution_deadline_at=now - 60_000)
    row = await rows.execution(execution_id)
    assert (row["deadline_at"], await rows.timers(execution_id)) == (now - 60_000, {"deadline": now})
    assert await parts_of(engine).timeouts.expire_due() == 1
    assert await engine.read_execution_state(execution_id) is PublicState.EXPIRED


async def test_a_locked_row_does_not_change_the_order_of_the_others(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    held, worse, better = await made(
        engine, new(priority=9000, policy=GPU), new(priority=0, policy=GPU), new(priority=5000)
    )
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", uuid_of(held))
        for expected in (better, worse):
            answer = await grant_for_worker(engine, worker_capabilities=("gpu",))
            assert answer.execution_id == expected
    assert (await grant_for_worker(engine, worker_capabilities=("gpu",))).execution_id == held


async def test_only_json_that_postgres_can_store_is_accepted(engine: Engine, given: Given, rows: Rows) -> None:
    await register_workers(engine)
    execution_id, granted_id = await given.created(), await given.created()
    await issue_grant(engine, granted_id)
    with Cases() as cases:
        async with rows.unchanged():
            for text in ('{"a": "\\u0000"}', '{"\\u0000": 1}', '[["\\u0000"]]', "{", "1e400"):
                with cases(text):
                    await refused(issue_grant(engine, execution_id, route_snapshot_json=text), "invalid_input")
                    await refused(claim_granted(engine, granted_id, attempt_policy_json=text), "invalid_policy_json")
        for text in ('{"a": 1e-20000}', '{"a": "C:\\\\u0000"}', '{"a": "\\u00e9"}'):
            with cases(text):
                execution_id = await given.created()
                await issue_grant(engine, execution_id, route_snapshot_json=text)
                await claim_granted(engine, execution_id, attempt_policy_json=text)


@pytest.mark.usefixtures("hints_only")
async def test_a_refused_reclaim_grant_marks_the_expired_lease_and_wakes_waiting_claims(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    lost = await given.claimed(lease_ttl_ms=1000, policy=GPU, capabilities=("gpu",), lane_id="quiet")
    now = await clock.advance(seconds=2)
    answer = await issue_reclaim_grant(engine, lost.execution_id, lane_id="quiet")
    assert answer == NotReclaimable(execution_id=lost.execution_id, detail="capability_mismatch: gpu")
    row = await rows.execution(lost.execution_id)
    assert (row["lease_expired_at"], row["last_capability_mismatch_at"], row["last_mutation_at"]) == (now, now, now)

    lost = await given.claimed(lease_ttl_ms=1000, policy=GPU, capabilities=("gpu",))
    waiting = asyncio.create_task(claim(engine, capabilities=("gpu",), max_wait_ms=60_000))
    async with asyncio.timeout(30):
        while not parts_of(engine).wakeups._waiting.get("default"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    await clock.advance(seconds=2)
    assert isinstance(await issue_reclaim_grant(engine, lost.execution_id), NotReclaimable)
    assert ids(await asyncio.wait_for(waiting, 30)) == [lost.execution_id]


async def test_a_retired_key_verifies_until_the_end_of_its_grace(engine: Engine, clock: Clock) -> None:
    await engine.rotate_waitpoint_hmac_secret_all(new_kid="k2", new_secret_hex="cd" * 32, grace_ms=500)
    ends_at = await clock.advance(ms=500)
    kids = HmacKids(current_kid="k2", verifying=(VerifyingKid(kid="k1", expires_at_ms=ends_at),))
    assert await engine.list_waitpoint_hmac_kids() == kids
    await clock.advance(ms=1)
    assert (await engine.list_waitpoint_hmac_kids()).verifying == ()


async def test_executions_of_one_uuid_in_several_partitions_expire_together(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    uuid = "11111111-2222-4333-8444-555555555555"
    now = await clock.now()
    ids = [f"{{fp:{partition}}}:{uuid}" for partition in range(4)]
    await made(engine, *(new(execution_id=one, execution_deadline_at=now + 10) for one in ids))
    await clock.advance(ms=10)
    assert await parts_of(engine).timeouts.expire_due() == 4
    assert {row["public_state"] for row in await rows.of("execution")} == {"expired"}
    assert await parts_of(engine).timeouts.expire_due() == 0


async def test_a_rolled_back_claim_does_not_cache_the_number_of_its_worker(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    waiting = await given.created()
    await issue_grant(engine, waiting, "newcomer")
    await connection.execute("alter table execution add constraint nobody check (worker_no is null) not valid")
    with pytest.raises(EngineError):
        await engine.claim_execution(execution_id=waiting, **worker("newcomer"))
    await connection.execute("alter table execution drop constraint nobody")
    await engine.claim_execution(execution_id=waiting, **worker("newcomer"))
    described = await engine.describe_execution(waiting)
    assert described is not None
    assert described.current_lease is not None
    assert described.current_lease.worker_instance_id == worker("newcomer")["worker_instance_id"]

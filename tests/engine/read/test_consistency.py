"""The checker finds what no operation can have brought about, and nothing else."""

from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.state import claim, refused, revoke
from flowfabric.engine.engine import Engine
from flowfabric.engine.read import consistency

_FREE = """
do $$ declare c record; begin
  for c in select conname from pg_constraint where conrelid = 'execution'::regclass and contype = 'c' loop
    execute format('alter table execution drop constraint %I', c.conname);
  end loop; end $$
"""
"""Takes from the table what would refuse a corrupt row."""


async def test_no_operation_leaves_anything_to_find(
    engine: Engine, given: Any, clock: Any, connection: asyncpg.Connection
) -> None:
    await given.reclaimable(lane_id="lost")
    revoked = await given.claimed(lane_id="revoked")
    await revoke(connection, revoked.execution_id)
    await given.expired_lease(lane_id="lapsed")
    await given.claimed(lane_id="claimed", tags={"a.b": "1", "ff.instance_id": "x"})
    await given.completed(lane_id="completed")
    await given.failed(lane_id="failed")
    await given.cancelled(lane_id="cancelled")
    await given.delayed(lane_id="delayed")
    await given.backing_off(lane_id="backing_off")
    await given.created(lane_id="created")
    parked = await given.claimed(lane_id="parked")
    await engine.delay(parked, await clock.now() + 1000)
    resumed = await given.claimed(lane_id="resumed")
    await engine.delay(resumed, await clock.now())
    await given.claim(lane_id="resumed")
    ended = await given.claimed(lane_id="ended")
    await engine.wait_children(ended)
    await engine.complete((await given.claim(lane_id="ended")).handle)
    gone = await given.claimed(lane_id="gone")
    await engine.delay(gone, await clock.now())
    await engine.cancel_execution(execution_id=gone.execution_id, reason="x")
    taken = await given.reclaimable(lane_id="taken")
    await claim(engine, "taken")
    await engine.set_execution_tag(taken.execution_id, "a.b", "1")
    assert await engine.find_inconsistencies() == []
    await clock.advance(seconds=3600)
    await engine.lease_expiry.mark_expired()
    await claim(engine, "lost", "revoked", "lapsed", "claimed", "parked", "resumed", "backing_off", "delayed")
    assert await engine.find_inconsistencies() == []
    await clock.advance(seconds=100_000)
    await engine.retention.trim()
    assert await engine.find_inconsistencies() == []


CORRUPTIONS: list[tuple[str, str, str]] = [
    # The state before, what is done to it, what is found.
    (
        "created",
        "lifecycle_phase = 'submitted', eligibility_state = 'not_applicable'",
        "submitted is never left stored",
    ),
    ("created", "ownership_state = 'leased'", "leased implies active"),
    ("created", "ownership_state = 'lease_revoked'", "lease_revoked implies active"),
    ("created", "terminal_outcome = 'success'", "terminal_outcome is set if and only if"),
    ("completed", "terminal_outcome = 'none'", "terminal_outcome is set if and only if"),
    ("created", "eligibility_state = 'not_applicable'", "eligibility_state applies if and only if"),
    ("claimed", "eligibility_state = 'eligible_now'", "eligibility_state applies if and only if"),
    ("claimed", "ownership_state = 'unowned'", "ownership_state: active work is owned"),
    ("created", "blocking_reason = 'none'", "blocking_reason: does not fit"),
    ("claimed", "blocking_reason = 'waiting_for_worker'", "blocking_reason: does not fit"),
    ("delayed", "blocking_reason = 'waiting_for_budget'", "blocking_reason: does not fit"),
    ("completed", "blocking_reason = 'paused_by_policy'", "blocking_reason: does not fit"),
    ("claimed", "attempt_state = 'attempt_interrupted'", "attempt_state: does not fit"),
    ("created", "attempt_state = 'attempt_terminal'", "attempt_state: does not fit"),
    ("completed", "attempt_state = 'running_attempt'", "attempt_state: does not fit"),
    ("created", "completed_at = 1", "completed_at: is set exactly while terminal"),
    ("completed", "completed_at = null", "completed_at: is set exactly while terminal"),
    ("completed", "retain_until = null", "retain_until: is set exactly while terminal"),
    ("claimed", "started_at = null", "started_at: is set exactly from the first attempt on"),
    ("created", "started_at = 1", "started_at: is set exactly from the first attempt on"),
    ("delayed", "delay_until = null", "delay_until: is missing"),
    ("failed", "cancelled_by = 'x'", "cancelled_by: without a cancellation"),
    ("created", "attempt_count = 1", "attempt_count: does not fit"),
    ("completed", "attempt_count = 0", "attempt_count: does not fit"),
    ("completed", "attempt_count = 2", "attempt: the rows are not as many"),
    ("backing_off", "attempt_count = 0", "attempt: an index is beyond the count"),
    ("claimed", "attempt_id = null", "attempt_id: does not fit"),
    ("created", "attempt_id = gen_random_uuid()", "attempt_id: does not fit"),
    ("completed", "lease_epoch = 0", "lease_epoch: is lower than the number of attempts"),
    ("completed", "lease_epoch = 0", "lease_epoch: is lower than that of an attempt"),
    ("claimed", "lease_id = null", "lease: is owned without all of its fields"),
    ("claimed", "worker_no = null", "lease: is owned without all of its fields"),
    ("claimed", "lease_expires_at = null", "lease: is owned without all of its fields"),
    ("failed", "lease_id = gen_random_uuid()", "lease: is left on what nobody owns"),
    ("backing_off", "lease_expires_at = 5", "lease: is left on what nobody owns"),
    ("claimed", "lease_expired_at = 5", "lease_expired_at: does not fit"),
    ("claimed", "lease_revoked_at = 5", "lease_revoked_at: does not fit"),
    ("backing_off", "retry_count = 2", "retry_count: is impossible"),
    ("created", "retry_count = -1", "retry_count: is impossible"),
    ("created", "replay_count = -1", "replay_count: is negative"),
    ("claimed", "reclaim_count = 1", "reclaim_count: is impossible"),
    ("created", "priority = 5", "place: does not fit priority"),
    ("created", "queue_no = 99", "queue_no: there is no such queue"),
    ("created", "lane_no = 99", "queue_no: is not one of its lane"),
    ("created", "namespace_no = 99", "queue_no: is not one of its namespace"),
    ("created", "namespace_no = 99", "namespace_no: there is no such namespace"),
    ("claimed", "worker_no = 99", "worker_no: there is no such worker"),
    ("created", "granted_until = ff_now() + 1000", "granted_until: without a grant"),
    ("created", "instance_tag = 'x'", "instance_tag: is not the value of its tag"),
]


@pytest.mark.parametrize(("state", "change", "problem"), CORRUPTIONS)
async def test_a_corrupt_row_is_found(
    engine: Engine, given: Any, connection: asyncpg.Connection, state: str, change: str, problem: str
) -> None:
    await given.completed(lane_id="sound")
    made = await getattr(given, state)()
    execution_id = getattr(made, "execution_id", made)
    assert await engine.find_inconsistencies() == []
    await connection.execute(_FREE)
    await connection.execute(f"update execution set {change} where execution_id = $1", execution_id[-36:])
    found = await engine.find_inconsistencies()
    assert {one.execution_id for one in found} == {execution_id}
    assert any(problem in one.problem for one in found), found


BELONGINGS: list[tuple[str, str]] = [
    ("delete from execution_input", "execution_input: is missing"),
    ("update execution_input set namespace_no = 99", "execution_input: is missing"),
    ("update execution_input set lane_no = 99", "execution_input: without its execution"),
    ("update execution_input set created_at = 1", "execution_input: without its execution"),
    ("update execution_input set has_tags = true", "execution_tag: has_tags does not say"),
    (
        "insert into execution_tag select partition_key, execution_id, 'a.b', 'x' from execution",
        "execution_tag: has_tags does not say",
    ),
    ("delete from attempt", "attempt: the rows are not as many"),
    ("update attempt set attempt_index = 5", "attempt: an index is beyond the count"),
    ("update attempt set attempt_state = 'started'", "attempt: one is stored as started"),
    ("update attempt set attempt_state = 'suspended', ended_at = null", "attempt: the latest one does not fit"),
    ("update attempt set ended_at = null", "attempt: ended_at does not fit"),
    ("update attempt set lease_epoch = 9", "lease_epoch: is lower than that of an attempt"),
]


@pytest.mark.parametrize(("command", "problem"), BELONGINGS)
async def test_corrupt_belongings_are_found(
    engine: Engine, given: Any, connection: asyncpg.Connection, command: str, problem: str
) -> None:
    execution_id = await given.completed()
    await connection.execute(command)
    found = await engine.find_inconsistencies()
    assert {one.execution_id for one in found} == {execution_id}
    assert any(problem in one.problem for one in found), found


async def test_epochs_of_attempts_rise_and_only_the_latest_is_parked(
    engine: Engine, given: Any, clock: Any, connection: asyncpg.Connection
) -> None:
    handle = await given.backing_off(delay_ms=10)
    await clock.advance(seconds=1)
    await engine.complete((await given.claim()).handle)
    assert await engine.find_inconsistencies() == []
    await connection.execute("update attempt set lease_epoch = 1")
    (one,) = await engine.find_inconsistencies()
    assert (one.execution_id, one.problem) == (handle.execution_id, "attempt: the epochs do not rise")
    await connection.execute(
        "update attempt set attempt_state = 'suspended', ended_at = null where attempt_index = 0",
    )
    await connection.execute("update attempt set lease_epoch = attempt_index + 1")
    (one,) = await engine.find_inconsistencies()
    assert one.problem == "attempt: one before the latest is parked"


async def test_a_public_state_that_is_not_the_derived_one_is_found(
    engine: Engine, given: Any, connection: asyncpg.Connection
) -> None:
    execution_id = await given.created()
    await connection.execute("alter table execution alter column public_state drop expression")
    await connection.execute("update execution set public_state = 'suspended'")
    (one,) = await engine.find_inconsistencies()
    assert (one.execution_id, one.problem) == (execution_id, "public_state is suspended where waiting is derived")


async def test_an_unknown_literal_is_found(engine: Engine, given: Any, connection: asyncpg.Connection) -> None:
    execution_id = await given.created()
    await connection.execute("alter type attempt_state add value 'pending'")
    await connection.execute("update execution set attempt_state = 'pending'")
    found = await engine.find_inconsistencies()
    assert (execution_id, "attempt_state: unknown literal 'pending'") in [
        (one.execution_id, one.problem) for one in found
    ]


async def test_orphans_are_found(engine: Engine, given: Any, connection: asyncpg.Connection) -> None:
    execution_id = await given.completed(tags={"a.b": "1"})
    await connection.execute(
        """insert into claim_grant (partition_key, execution_id, grant_id, kind, worker_id, worker_instance_id, lane_no,
                                    issued_at, expires_at)
           select partition_key, execution_id, 'x', 'claim', 'w', 'w-1', 1, 0, 0 from execution"""
    )
    await connection.execute("delete from execution")
    found = await engine.find_inconsistencies()
    assert {one.execution_id for one in found} == {execution_id}
    assert sorted(one.problem.partition(":")[0] for one in found) == [
        "attempt",
        "claim_grant",
        "execution_input",
        "execution_tag",
    ]


async def test_it_looks_at_every_row_and_stops_at_the_limit(
    engine: Engine, given: Any, connection: asyncpg.Connection, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consistency, "STRETCH", 2)
    ids = sorted([await given.created(execution_id=f"{{fp:{at % 3}}}:{uuid4()}") for at in range(7)])
    await connection.execute("update execution set replay_count = -1")
    async with rows.unchanged():
        assert [one.execution_id for one in await engine.find_inconsistencies()] == ids
        for limit in (0, 1, 3, 7):
            assert len(await engine.find_inconsistencies(limit=limit)) == limit
        assert len(await engine.find_inconsistencies(limit=2**62)) == 7
        for wrong in (-1, "5", None):
            await refused(engine.find_inconsistencies(limit=wrong), "invalid_input", "limit")  # type: ignore[arg-type]


async def test_a_queue_of_another_kind_is_told(engine: Engine, given: Any, connection: asyncpg.Connection) -> None:
    execution_id = await given.created()
    other = await given.created(execution_kind="other")
    await connection.execute(
        """update execution set queue_no = (select queue_no from execution where execution_id = $2)
            where execution_id = $1""",
        execution_id[-36:],
        other[-36:],
    )
    found = await engine.find_inconsistencies()
    assert [(each.execution_id, each.problem) for each in found] == [(execution_id, "queue_no: is not one of its kind")]

"""The checker finds what no operation can have written, and nothing else."""

import re
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.grants import grant, granted, resumable
from engine.state import claim, refused, revoke
from engine.waits import suspended
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read import consistency
from flowfabric.model.attempt import FailureReason

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
    raised = FailureReason("no luck", error_type="KeyError", traceback="Traceback")
    await engine.fail(await given.claimed(lane_id="raised"), reason=raised)
    await engine.fail(await given.claimed(lane_id="retried", policy={"retry_policy": {}}), reason=raised)
    await given.cancelled(lane_id="cancelled")
    await given.delayed(lane_id="delayed")
    await given.backing_off(lane_id="backing_off")
    await given.created(lane_id="created")
    await given.created(lane_id="large", input_payload=b"x" * 300)
    await given.completed(lane_id="large_completed", input_payload=b"x" * 300, result=b"x" * 300)
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
    await given.created(lane_id="granted")
    await granted(engine, lane_id="granted")
    waiting = await given.claimed(lane_id="waiting")
    await suspended(engine, waiting, timeout_at=await clock.now() + 1000)
    twice = await given.claimed(lane_id="twice")
    await suspended(engine, twice)
    await engine.resume_execution(execution_id=twice.execution_id)
    await suspended(engine, (await given.claim(lane_id="twice")).handle)
    await engine.cancel_execution(execution_id=twice.execution_id, reason="x")
    timed = await given.claimed(
        lane_id="timed",
        policy={"timeout_policy": {"attempt_timeout_ms": 1000}},
        execution_deadline_at=await clock.now() + 5000,
    )
    await engine.renew(timed)
    kept = [await given.claimed(lane_id="kept", lease_ttl_ms=10**7) for _ in range(3)]
    await engine.renew_many(kept[:2])
    given_up = await given.backing_off(lane_id="given_up")
    await engine.cancel_execution(execution_id=given_up.execution_id, reason="x")
    await given.reclaimable(lane_id="reclaimed_out", policy={"max_reclaim_count": 0})
    await claim(engine, "reclaimed_out")
    taken = await given.reclaimable(lane_id="taken")
    await claim(engine, "taken")
    await engine.set_execution_tag(taken.execution_id, "a.b", "1")
    assert await engine.find_inconsistencies() == []
    await clock.advance(seconds=3600)
    await parts_of(engine).lease_expiry.sweep()
    await parts_of(engine).timeouts.expire_due()
    await claim(engine, "lost", "revoked", "lapsed", "claimed", "parked", "resumed", "backing_off", "delayed")
    assert await engine.find_inconsistencies() == []
    await clock.advance(seconds=100_000)
    await parts_of(engine).retention.trim()
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
    ("created", "started_at = 1", "started_at: is set exactly from the first attempt on"),
    ("created", "claimed_at = 1", "started_at: is set exactly from the first attempt on"),
    ("reclaimed", "started_at = null", "started_at: is missing though the first attempt is not the latest"),
    ("claimed", "result_payload = 'x'", "result_payload: without a success"),
    ("delayed", "delay_until = null", "delay_until: is missing"),
    ("failed", "cancelled_by = 'x'", "cancelled_by: without a cancellation"),
    ("created", "attempt_count = 1", "attempt_count: does not fit"),
    ("completed", "attempt_count = 0", "attempt_count: does not fit"),
    ("backing_off", "attempt_count = 0", "attempt: an index is beyond the count"),
    ("completed", "attempt_count = 2", "attempt: the rows are not as many"),
    ("reclaimed", "attempt_count = 1", "attempt: the rows are not as many"),
    ("created", "attempt_id = gen_random_uuid()", "attempt_id: does not fit"),
    ("backing_off", "attempt_id = gen_random_uuid()", "attempt_id: does not fit"),
    ("completed", "lease_id = null", "attempt_id: does not fit"),
    ("resumable", "attempt_id = null", "attempt_id: does not fit"),
    ("completed", "lease_epoch = 0", "lease_epoch: is lower than the number of attempts"),
    ("reclaimed", "lease_epoch = 0", "lease_epoch: is lower than that of an attempt"),
    ("reclaimed", "lease_epoch = 1", "lease_epoch: is not higher than that of an earlier attempt"),
    ("claimed", "lease_id = null", "lease: is owned without all of its fields"),
    ("claimed", "worker_no = null", "lease: is owned without all of its fields"),
    ("claimed", "lease_expires_at = null", "lease: is owned without all of its fields"),
    ("claimed", "claim_no = null", "lease: is owned without all of its fields"),
    ("backing_off", "lease_id = gen_random_uuid()", "lease_id: is left on what nobody owns"),
    ("resumable", "lease_id = gen_random_uuid()", "lease_id: is left on what nobody owns"),
    ("claimed", "lease_expired_at = 5", "lease_expired_at: does not fit"),
    ("claimed", "lease_revoked_at = 5", "lease_revoked_at: does not fit"),
    ("backing_off", "retry_count = 2", "retry_count: is impossible"),
    ("created", "retry_count = -1", "retry_count: is impossible"),
    ("created", "replay_count = -1", "replay_count: is negative"),
    ("claimed", "reclaim_count = 1", "reclaim_count: is impossible"),
    ("created", "place = (9001::bigint << 48) + place", "place: is of no priority"),
    ("created", "queue_no = 99", "queue_no: there is no such queue"),
    ("created", "lane_no = 99", "queue_no: is not one of its lane"),
    ("created", "namespace_no = 99", "queue_no: is not one of its namespace"),
    ("created", "namespace_no = 99", "namespace_no: there is no such namespace"),
    ("claimed", "worker_no = 99", "worker_no: there is no such worker"),
    ("created", "granted_until = ff_now() + 1000", "granted_until: without a grant"),
    ("created", "granted_until = 5", "ready: granted_until is not that of the execution"),
    ("created", "input_payload = null", "input_payload: is neither on the row nor in execution_input"),
    ("created", "has_tags = true", "execution_tag: has_tags does not say"),
    ("created", "attached = 2", "attached: does not say whether a suspension is open"),
    ("suspended", "attached = 0", "attached: does not say whether a suspension is open"),
    ("granted", "attached = 0", "attached: does not say that there is a grant"),
    ("suspended", "suspension_id = null", "suspension: is missing, or closed"),
    ("suspended", "suspension_id = null", "suspension_id: is not the latest suspension"),
    ("created", "suspension_id = gen_random_uuid()", "suspension_id: there is no such suspension"),
    ("suspended", "suspension_timeout_at = null", "suspension_timeout_at: does not fit the suspension"),
    ("created", "place = place + 1", "ready: there is no entry though it is claimable"),
    ("created", "place = place + 1", "ready: without its execution"),
    (
        "created",
        "eligibility_state = 'blocked_by_quota', blocking_reason = 'waiting_for_quota'",
        "ready: there is an entry though it is not claimable",
    ),
    (
        "created",
        "eligibility_state = 'blocked_by_quota', blocking_reason = 'waiting_for_quota'",
        "listed: there is no entry",
    ),
    ("lost", "blocking_reason = 'paused_by_flow_cancel'", "ready: there is an entry though it is not claimable"),
    ("failed", "terminal_outcome = 'expired'", "listed: there is an entry of a state it is not in"),
    ("failed", "terminal_outcome = 'success'", "listed: there is an entry of a state it is not in"),
    ("failed", "last_transition_at = 5", "listed: at is not when it ended"),
    ("completed", "last_transition_at = 5", "retained: there is no entry of its ending"),
    ("delayed", "delay_until = delay_until + 1", "timer: due_at is not the time of the execution"),
    ("delayed", "delay_until = delay_until - 1", "timer: due_at is not the time of the execution"),
    ("timed", "attempt_timeout_at = null", "timer: attempt_timeout does not fit"),
    ("claimed", "attempt_timeout_at = 5", "timer: attempt_timeout does not fit"),
    ("timed", "deadline_at = null", "timer: deadline does not fit"),
    ("created", "deadline_at = 5", "timer: deadline does not fit"),
    ("claimed", "claim_no = 99", "claim: there is none of its lease"),
    ("claimed", "worker_no = 99", "claim: it is of another worker"),
    ("created", "instance_tag = 'x'", "instance_tag: is not the value of its tag"),
]


class States:
    """The states that the tests corrupt."""

    def __init__(self, engine: Engine, given: Any, clock: Any) -> None:
        self.engine, self.given, self.clock = engine, given, clock

    async def make(self, state: str) -> str:
        """The id of an execution in a state of this name, or of a starting point of this name."""
        made = await getattr(self if hasattr(self, state) else self.given, state)()
        return str(getattr(made, "execution_id", made))

    async def large(self) -> Any:
        return await self.given.created(input_payload=b"x" * 300)

    async def lost(self) -> Any:
        return await self.given.reclaimable()

    async def reclaimed(self) -> Any:
        await self.given.reclaimable()
        return await self.given.claim()

    async def reclaimed_out(self) -> Any:
        lost = await self.given.reclaimable(policy={"max_reclaim_count": 0})
        assert await claim(self.engine) == []
        return lost

    async def suspended(self) -> Any:
        handle = await self.given.claimed()
        await suspended(self.engine, handle, timeout_at=await self.clock.now() + 60_000)
        return handle

    async def resumed(self) -> Any:
        """Suspended twice; the second time it was resumed."""
        handle = await self.suspended()
        await self.engine.resume_execution(execution_id=handle.execution_id)
        await suspended(self.engine, (await self.given.claim()).handle)
        await self.engine.resume_execution(execution_id=handle.execution_id)
        return handle

    async def resumable(self) -> str:
        return await resumable(self.given)

    async def granted(self) -> str:
        execution_id = await self.given.created()
        await grant(self.engine, execution_id)
        return str(execution_id)

    async def timed(self) -> Any:
        return await self.given.claimed(
            policy={"timeout_policy": {"attempt_timeout_ms": 60_000}},
            execution_deadline_at=await self.clock.now() + 120_000,
        )


@pytest.fixture
def states(engine: Engine, given: Any, clock: Any) -> States:
    """Executions in any state: `await states.make("suspended")`."""
    return States(engine, given, clock)


@pytest.mark.parametrize(("state", "change", "problem"), CORRUPTIONS)
async def test_a_corrupt_row_is_found(
    engine: Engine, given: Any, states: States, connection: asyncpg.Connection, state: str, change: str, problem: str
) -> None:
    await given.completed(lane_id="sound")
    execution_id = await states.make(state)
    assert await engine.find_inconsistencies() == []
    await connection.execute(_FREE)
    await connection.execute(f"update execution set {change} where execution_id = $1", execution_id[-36:])
    found = await engine.find_inconsistencies()
    assert {one.execution_id for one in found} == {execution_id}
    assert any(problem in one.problem for one in found), found


ENTRY = """
insert into ready (place, route_no, queue_no, partition_key, execution_id)
select place, route_no, queue_no, partition_key, execution_id from execution join queue using (queue_no)
"""
"""Queues every execution."""


BELONGINGS: list[tuple[str, str, str]] = [
    # The state before, what is done to the rows that belong to it, what is found.
    (
        "created",
        "insert into execution_tag select partition_key, execution_id, 'a.b', 'x' from execution",
        "execution_tag:",
    ),
    (
        "created",
        "insert into execution_input select partition_key, execution_id, input_payload from execution",
        "input_payload: is both on the row and in execution_input",
    ),
    ("large", "delete from execution_input", "input_payload: is neither on the row nor in execution_input"),
    (
        "completed",
        "insert into execution_result select partition_key, execution_id, result_payload from execution",
        "result_payload: is both on the row and in execution_result",
    ),
    (
        "failed",
        "insert into execution_result select partition_key, execution_id, '' from execution",
        "execution_result: without a success",
    ),
    ("backing_off", "delete from attempt where ended_at is not null", "attempt: the rows are not as many"),
    ("backing_off", "delete from attempt where ended_at is null", "attempt: the lineage of the pending one is missing"),
    ("backing_off", "update attempt set attempt_index = attempt_index + 5", "attempt: an index is beyond the count"),
    ("backing_off", "update attempt set attempt_state = 'ended_failure'", "attempt: ended_at does not fit"),
    (
        "backing_off",
        "update attempt set attempt_state = 'started', ended_at = null",
        "attempt: one is stored as started",
    ),
    ("backing_off", "update attempt set ended_at = null", "attempt: ended_at does not fit"),
    ("backing_off", "update attempt set lease_epoch = 9", "lease_epoch: is lower than that of an attempt"),
    ("backing_off", "update attempt set error_type = 'KeyError'", "attempt: one has an error though it has not failed"),
    ("resumable", "update attempt set traceback = 'Traceback'", "attempt: one has an error though it has not failed"),
    ("backing_off", "update attempt set attempt_id = null", "attempt: one has ended without all of its fields"),
    (
        "backing_off",
        "update attempt set previous_attempt_index = 1",
        "attempt: one follows another that is not before it",
    ),
    ("reclaimed", "delete from attempt where attempt_index = 1", "attempt: the lineage of one is missing"),
    ("reclaimed", "update attempt set lease_epoch = 9", "attempt: the epochs do not rise"),
    (
        "reclaimed",
        "update attempt set attempt_state = 'suspended', ended_at = null where attempt_index = 0",
        "attempt: one before the latest has not ended",
    ),
    (
        "created",
        "insert into attempt (partition_key, execution_id, attempt_index, attempt_state) "
        "select partition_key, execution_id, 0, 'created' from execution",
        "attempt: the next one is known though none is pending",
    ),
    ("resumable", "delete from attempt", "attempt: the latest one does not fit"),
    ("resumable", "update attempt set attempt_state = 'created'", "attempt: the latest one does not fit"),
    (
        "resumable",
        "update attempt set attempt_state = 'ended_failure', ended_at = 5",
        "attempt: the latest one does not fit",
    ),
    ("reclaimed_out", "update attempt set attempt_state = 'ended_failure'", "attempt: the latest one does not fit"),
    ("created", "delete from ready", "ready: there is no entry though it is claimable"),
    ("resumable", "delete from ready", "ready: there is no entry though it is claimable"),
    ("lost", "delete from ready", "ready: there is no entry though it is claimable"),
    ("created", "update ready set execution_id = gen_random_uuid()", "ready: the entry is that of another execution"),
    ("created", "update ready set route_no = 99", "ready: the route is not that of the queue"),
    (
        "created",
        "insert into ready select 5, route_no, queue_no, partition_key, execution_id from ready",
        "ready: without",
    ),
    ("granted", "update ready set granted_until = null", "ready: granted_until is not that of the execution"),
    ("claimed", ENTRY, "ready: there is an entry though it is not claimable"),
    ("completed", ENTRY, "ready: there is an entry though it is not claimable"),
    ("suspended", ENTRY, "ready: there is an entry though it is not claimable"),
    ("delayed", ENTRY, "ready: there is an entry though it is not claimable"),
    ("resumable", "delete from listed", "listed: there is no entry"),
    ("lost", "delete from listed", "listed: there is no entry"),
    ("failed", "delete from listed", "listed: there is no entry"),
    ("cancelled", "update listed set public_state = 'failed'", "listed: there is an entry of a state it is not in"),
    ("cancelled", "update listed set at = at + 1", "listed: at is not when it ended"),
    (
        "created",
        "insert into listed select partition_key, execution_id, public_state, 5 from execution",
        "listed: there is an entry of a state it is not in",
    ),
    ("delayed", "delete from timer", "timer: delay does not fit"),
    ("backing_off", "delete from timer", "timer: delay does not fit"),
    ("delayed", "update timer set due_at = due_at + 1", "timer: due_at is not the time"),
    ("timed", "delete from timer where kind = 'deadline'", "timer: deadline does not fit"),
    ("timed", "delete from timer where kind = 'attempt_timeout'", "timer: attempt_timeout does not fit"),
    ("timed", "update timer set due_at = 5 where kind = 'deadline'", "timer: due_at is not the time"),
    ("suspended", "delete from timer", "timer: suspension_timeout does not fit"),
    *(
        (
            state,
            f"insert into timer select partition_key, execution_id, '{kind}', 5 from execution",
            f"timer: {kind} does",
        )
        for state, kind in (
            ("created", "delay"),
            ("created", "deadline"),
            ("claimed", "attempt_timeout"),
            ("claimed", "delay"),
            ("completed", "attempt_timeout"),
            ("completed", "deadline"),
            ("resumable", "suspension_timeout"),
        )
    ),
    ("claimed", "delete from claim", "claim: there is none of its lease"),
    ("claimed", "update claim set execution_ids = '{}'", "claim: it does not hold the execution"),
    ("claimed", "update claim set worker_no = 99", "claim: it is of another worker"),
    ("expired_lease", "delete from claim", "claim: there is none of its lease"),
    ("completed", "delete from retained", "retained: there is no entry of its ending"),
    ("cancelled", "delete from retained", "retained: there is no entry of its ending"),
    ("completed", "update retained set ended_at = 5", "retained: there is no entry of its ending"),
    ("completed", "update retained set execution_ids = '{}'", "retained: there is no entry of its ending"),
    ("completed", "update retained set queue_no = 99", "retained: the entry of its ending is of another"),
    ("failed", "update retained set terminal_outcome = 'success'", "retained: the entry of its ending is of another"),
    ("completed", "update retained set ended_at = 5", "retained: counts an execution that did not end then"),
    ("granted", "delete from claim_grant", "granted_until: without a grant"),
    ("granted", "update claim_grant set expires_at = 5", "granted_until: without a grant"),
    ("suspended", "delete from suspension", "suspension: is missing, or closed"),
    ("suspended", "delete from suspension", "suspension_id: there is no such suspension"),
    ("suspended", "update suspension set closed_at = 5, close_reason = 'x'", "suspension: is missing, or closed"),
    ("suspended", "update suspension set attempt_index = 5", "suspension: of another attempt than the latest"),
    ("suspended", "update suspension set lane_no = 99", "suspension: of another namespace or lane"),
    ("suspended", "update suspension set timeout_at = null", "suspension_timeout_at: does not fit"),
    ("suspended", "delete from waitpoint", "suspension: not every waitpoint of it is there"),
    ("suspended", "update waitpoint set suspension_id = gen_random_uuid()", "waitpoint: one is active without an open"),
    ("suspended", "update waitpoint set closed_at = 5", "waitpoint: closed_at does not fit"),
    (
        "resumed",
        "update suspension set closed_at = null, close_reason = null",
        "suspension: is open though the execution",
    ),
    (
        "resumed",
        "update suspension set closed_at = null, close_reason = null",
        "suspension: one before the latest is open",
    ),
    (
        "resumed",
        "update suspension set attempt_index = 1 where suspension_id <> (select suspension_id from execution)",
        "suspension: of an attempt there is not",
    ),
    (
        "resumed",
        "update suspension set attempt_index = 1 where suspension_id <> (select suspension_id from execution)",
        "suspension_id: is not the latest suspension",
    ),
]


@pytest.mark.parametrize(("state", "command", "problem"), BELONGINGS)
async def test_corrupt_belongings_are_found(
    engine: Engine, states: States, connection: asyncpg.Connection, state: str, command: str, problem: str
) -> None:
    execution_id = await states.make(state)
    assert await engine.find_inconsistencies() == []
    await connection.execute(command)
    found = await engine.find_inconsistencies()
    assert execution_id in {one.execution_id for one in found}
    assert any(problem in one.problem for one in found), found


NEGATIVE = "partition_key: is negative"
"""The one rule whose break changes the id of the execution."""


def test_every_rule_is_broken_by_a_test() -> None:
    rules = set(re.findall(r"\('([a-z_]+: [^']+)',", consistency.SQL.list_broken_rules.sql))
    broken = [problem for _, _, problem in CORRUPTIONS + BELONGINGS]
    assert len(rules) > 60
    assert {rule for rule in rules if not any(problem in rule for problem in broken)} == {NEGATIVE}


async def test_a_negative_partition_is_found(engine: Engine, given: Any, connection: asyncpg.Connection) -> None:
    await given.created()
    await connection.execute("update execution set partition_key = -1")
    assert NEGATIVE in [one.problem for one in await engine.find_inconsistencies()]


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


async def test_it_looks_at_every_row_and_stops_at_the_limit(
    engine: Engine, given: Any, connection: asyncpg.Connection, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consistency, "RANGE_SIZE", 2)
    ids = sorted([await given.created(execution_id=f"{{fp:{at % 3}}}:{uuid4()}") for at in range(7)])
    await connection.execute("update execution set replay_count = -1")
    async with rows.unchanged():
        assert [one.execution_id for one in await engine.find_inconsistencies()] == ids
        for limit in (0, 1, 3, 7):
            assert len(await engine.find_inconsistencies(limit=limit)) == limit
        assert len(await engine.find_inconsistencies(limit=2**62)) == 7
        for wrong in (-1, "5", None):
            await refused(engine.find_inconsistencies(limit=wrong), "invalid_input", "limit")  # type: ignore[arg-type]

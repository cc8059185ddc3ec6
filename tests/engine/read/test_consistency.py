"""find_inconsistencies reports what no operation can have written, and nothing else."""

import re
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.grants import grant_for_worker, issue_grant, resumable
from engine.read.corruptions import RELATED_ROWS, ROWS
from engine.state import claim, refused, revoke
from engine.waits import on_all, suspend_args, suspend_run
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read import consistency
from flowfabric.model.attempt import FailureReason
from flowfabric.model.stream import DurableSummary, Frame

_DROP_CHECKS = """
do $$ declare c record; begin
  for c in select conname from pg_constraint where conrelid = 'execution'::regclass and contype = 'c' loop
    execute format('alter table execution drop constraint %I', c.conname);
  end loop; end $$
"""
"""Drops the constraints that would reject a corrupt row."""


async def test_no_operation_leaves_an_inconsistency(engine: Engine, given: Given, clock: Clock) -> None:
    await given.reclaimable(lane_id="lost")
    revoked = await given.claimed(lane_id="revoked")
    await revoke(engine, revoked.execution_id)
    await given.expired_lease(lane_id="expired")
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
    await grant_for_worker(engine, lane_id="granted")
    waiting = await given.claimed(lane_id="waiting")
    await suspend_run(engine, waiting, timeout_at=await clock.now() + 1000)
    twice = await given.claimed(lane_id="twice")
    await suspend_run(engine, twice)
    await engine.resume_execution(execution_id=twice.execution_id)
    await suspend_run(engine, (await given.claim(lane_id="twice")).handle)
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
    await claim(engine, "lost", "revoked", "expired", "claimed", "parked", "resumed", "backing_off", "delayed")
    assert await engine.find_inconsistencies() == []
    await clock.advance(seconds=100_000)
    await parts_of(engine).retention.trim_batch()
    assert await engine.find_inconsistencies() == []


class States:
    """Executions in the states that are corrupted, each on a lane of its own."""

    def __init__(self, engine: Engine, given: Given, clock: Clock) -> None:
        self.engine, self.given, self.clock = engine, given, clock

    async def make(self, state: str) -> str:
        """Return the id of a new execution in this state of this class or of `given`."""
        made = await getattr(self if hasattr(self, state) else self.given, state)(lane_id=f"lane-{uuid4()}")
        return str(getattr(made, "execution_id", made))

    async def large(self, lane_id: str) -> Any:
        return await self.given.created(lane_id=lane_id, input_payload=b"x" * 300)

    async def lost(self, lane_id: str, **overrides: Any) -> Any:
        return await self.given.reclaimable(lane_id=lane_id, lease_ttl_ms=1_000, **overrides)

    async def expired_lease(self, lane_id: str) -> Any:
        return await self.given.expired_lease(lane_id=lane_id, lease_ttl_ms=1_000)

    async def reclaimed(self, lane_id: str) -> Any:
        await self.lost(lane_id)
        return await self.given.claim(lane_id=lane_id, lease_ttl_ms=600_000)

    async def reclaimed_out(self, lane_id: str) -> Any:
        lost = await self.lost(lane_id, policy={"max_reclaim_count": 0})
        assert await claim(self.engine, lane_id) == []
        return lost

    async def suspended(self, lane_id: str) -> Any:
        handle = await self.given.claimed(lane_id=lane_id)
        await suspend_run(self.engine, handle, on_all("a", "b", timeout_at=await self.clock.now() + 60_000))
        return handle

    async def resumed(self, lane_id: str) -> Any:
        """Suspended and resumed twice."""
        handle = await self.suspended(lane_id)
        await self.engine.resume_execution(execution_id=handle.execution_id)
        await suspend_run(self.engine, (await self.given.claim(lane_id=lane_id)).handle)
        await self.engine.resume_execution(execution_id=handle.execution_id)
        return handle

    async def resumable(self, lane_id: str) -> str:
        return await resumable(self.given, lane_id=lane_id)

    async def granted(self, lane_id: str) -> str:
        execution_id = await self.given.created(lane_id=lane_id)
        await issue_grant(self.engine, execution_id, lane_id=lane_id)
        return str(execution_id)

    async def streaming(self, lane_id: str) -> Any:
        """Running, with a frame and a summary."""
        handle = await self.given.claimed(lane_id=lane_id)
        await self.engine.append_frame(handle, Frame(bytes=b"{}"))
        await self.engine.append_frame(handle, Frame(bytes=b"{}", mode=DurableSummary()))
        return handle

    async def timed(self, lane_id: str) -> Any:
        return await self.given.claimed(
            lane_id=lane_id,
            policy={"timeout_policy": {"attempt_timeout_ms": 60_000}},
            execution_deadline_at=await self.clock.now() + 120_000,
        )


ORDER = ("lost", "reclaimed", "reclaimed_out", "", "expired_lease")
"""States that move the clock are made first, so that no other lease expires. A claim would mark the expired lease."""


async def test_every_corrupt_row_is_found_and_no_sound_one(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    cases = [
        (state, f"update execution set {change} where {{mine}}", problem)
        for problem, changes in ROWS.items()
        for state, change in changes
    ] + [(state, command, problem) for problem, commands in RELATED_ROWS.items() for state, command in commands]
    states = States(engine, given, clock)
    sound = [(state, None, None) for state in sorted({state for state, _, _ in cases})]
    everything: list[tuple[str, str | None, str | None]] = [*cases, *sound]
    everything.sort(key=lambda case: ORDER.index(case[0] if case[0] in ORDER else ""))
    made = [(await states.make(state), command, problem) for state, command, problem in everything]
    assert await engine.find_inconsistencies(limit=10_000) == []
    await connection.execute(_DROP_CHECKS)
    for execution_id, command, _ in made:
        if command is not None:
            uuid = f"'{uuid_of(execution_id)}'::uuid"
            await connection.execute(
                command.replace("{mine}", f"execution_id = {uuid}").replace("{holds}", f"{uuid} = any(execution_ids)")
            )
    found: dict[str | None, list[str]] = {}
    for one in await engine.find_inconsistencies(limit=10_000):
        found.setdefault(one.execution_id, []).append(one.problem)
    missed = [
        (execution_id, command, problem, found.get(execution_id))
        for execution_id, command, problem in made
        if problem is not None and not any(problem in each for each in found.get(execution_id, ()))
    ]
    assert missed == []
    assert [execution_id for execution_id, command, _ in made if command is None and execution_id in found] == []


NEGATIVE = "partition_key: negative"
"""The rule whose corruption changes the id of the execution."""


def test_every_rule_is_broken_by_a_test() -> None:
    rules = set(re.findall(r"\('([a-z_]+: [^']+)',", consistency.SQL.list_broken_rules.sql))
    assert len(rules) > 60
    assert rules - ROWS.keys() - RELATED_ROWS.keys() == {NEGATIVE}


async def test_a_negative_partition_a_wrong_public_state_and_an_unknown_literal_are_found(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    negative, derived, unknown = [await given.created() for _ in range(3)]
    await connection.execute("alter table execution alter column public_state drop expression")
    await connection.execute("alter type attempt_state add value 'pending'")
    for execution_id, change in (
        (negative, "partition_key = -1"),
        (derived, "public_state = 'suspended'"),
        (unknown, "attempt_state = 'pending'"),
    ):
        await connection.execute(f"update execution set {change} where execution_id = $1", uuid_of(execution_id))
    found = [(one.execution_id, one.problem) for one in await engine.find_inconsistencies()]
    assert NEGATIVE in [problem for _, problem in found]
    assert [one for one in found if one[0] == derived] == [(derived, "public_state is suspended but must be waiting")]
    assert (unknown, "attempt_state: unknown literal 'pending'") in found


async def test_every_row_is_checked_up_to_the_limit(
    engine: Engine, given: Given, connection: asyncpg.Connection, rows: Rows, monkeypatch: pytest.MonkeyPatch
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


async def test_rows_without_their_execution_are_found(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    waiting = await given.created(tags={"a.b": "1"}, execution_deadline_at=await clock.now() + 60_000)
    large = await given.created(input_payload=b"x" * 300)
    failed = await given.failed(lane_id="other")
    completed = await given.completed(lane_id="completed", result=b"x" * 300)
    await issue_grant(engine, await given.created())
    handle = await given.claimed(lane_id="suspended")
    outcome = await suspend_run(
        engine, handle, suspend_args(idempotency_key="key", timeout_at=await clock.now() + 60_000)
    )
    await engine.deliver_signal(
        execution_id=handle.execution_id,
        waitpoint_id=outcome.details.waitpoint_id,
        waitpoint_token=outcome.details.waitpoint_token,
        signal_name="other",
    )
    retried = await given.backing_off(lane_id="backing_off")
    assert await engine.find_inconsistencies() == []
    await connection.execute("delete from execution")
    found = [(one.execution_id, one.problem.partition(":")[0]) for one in await engine.find_inconsistencies()]
    assert {problem for _, problem in found} == {
        "attempt",
        "claim_grant",
        "execution_input",
        "execution_result",
        "execution_tag",
        "idempotency_key",
        "listed",
        "ready",
        "retained",
        "signal",
        "suspension",
        "timer",
        "waitpoint",
    }
    assert {(waiting, "ready"), (waiting, "timer"), (waiting, "execution_tag")} <= set(found)
    assert {(large, "execution_input"), (completed, "execution_result")} <= set(found)
    assert {(failed, "listed"), (failed, "retained")} <= set(found)
    assert {(handle.execution_id, table) for table in ("suspension", "waitpoint", "signal", "idempotency_key")} <= set(
        found
    )
    assert {(retried.execution_id, "attempt"), (retried.execution_id, "timer")} <= set(found)


async def test_a_retained_entry_with_wrong_queues_is_reported(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    one, two = [await given.claimed(execution_kind=kind) for kind in ("k1", "k2")]
    await engine.complete_many([(one, b"x"), (two, b"x")])
    assert await engine.find_inconsistencies() == []
    await connection.execute("update retained set queue_nos = array[queue_nos[2], queue_nos[1]]")
    found = await engine.find_inconsistencies()
    assert {each.execution_id for each in found} == {one.execution_id, two.execution_id}
    assert all(each.problem.startswith("retained: ") for each in found)
    # An older version writes no queues.
    await connection.execute("update retained set queue_nos = null")
    assert await engine.find_inconsistencies() == []

"""Replaying: an execution that has ended runs again, and its earlier attempts stay."""

import asyncio
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.counts import miscounts
from engine.ends import WAYS, Scene
from engine.event.following import take
from engine.state import REPLAYED, all_cases, attempts, claim, event_texts, pending_fields, refused, vector
from engine.waits import suspend_args
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.engine.core.transition import MOVES
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.attempt import FailureReason
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.event import EventKind
from flowfabric.model.execution import Ended, Replayed
from flowfabric.model.feed import LeaseReplayInitiated
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import LifecyclePhase, PublicState, TerminalOutcome

DAY = 86_400_000
ENDS = {
    name: way
    for name, (move, way) in WAYS.items()
    if MOVES[move].target.phase is LifecyclePhase.TERMINAL and MOVES[move].target.outcome is not TerminalOutcome.SKIPPED
}
"""Every way to end an execution, except skips: a skipped member waits for its dependencies again."""


async def check(engine: Engine, connection: asyncpg.Connection) -> None:
    """Nothing contradicts anything, and the counts are right."""
    assert await engine.find_inconsistencies() == []
    assert await miscounts(engine, connection) == []


async def test_an_execution_runs_again_however_it_ended(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection, rows: Rows
) -> None:
    scene = Scene(given=given, clock=clock, connection=connection)
    with all_cases() as case:
        for name, way in ENDS.items():
            with case(name):
                scene.lane = name
                steps = way(scene)
                execution_id = await anext(steps)
                async for _ in steps:
                    raise AssertionError(f"{name} has two steps")
                now = await clock.advance(ms=7)
                before, history = await rows.execution(execution_id), await attempts(rows, execution_id)
                assert before["lifecycle_phase"] == "terminal"
                answer = await engine.replay_execution(
                    execution_id=execution_id, reason="wrong result", requested_by="ada"
                )
                assert answer == Replayed(public_state=PublicState.WAITING)
                row = await rows.execution(execution_id)
                check_replayed(before, row, now)
                assert await rows.of("listed", execution_id=uuid_of(execution_id)) == []
                assert await attempts(rows, execution_id) == history
                count = before["attempt_count"]
                pending = {"replay_reason": "wrong result", "replay_requested_by": "ada"}
                previous = {"previous_attempt_index": str(count - 1)} if count else {}
                assert await pending_fields(engine, execution_id) == {**pending, **previous}
                assert (await event_texts(rows, execution_id))[-2:] == [
                    "replay_initiated normal",
                    "operator_action replayed",
                ]
                await check(engine, connection)

                (run,) = await claim(engine, name)
                assert (run.execution_id, run.attempt_type, run.attempt_index) == (execution_id, "replay", count)
                assert run.handle.lease_epoch == before["lease_epoch"] + 1
                await engine.complete(run.handle, b"second")
                *earlier, last = await attempts(rows, execution_id)
                assert earlier == history
                assert (last["attempt_type"], last["attempt_state"]) == ("replay", "ended_success")
                assert (last["replay_reason"], last["replay_requested_by"]) == ("wrong result", "ada")
                assert last["previous_attempt_index"] == (count - 1 if count else None)
                assert await engine.get_execution_result(execution_id) == b"second"
                await check(engine, connection)


def check_replayed(before: dict[str, Any], row: dict[str, Any], now: int) -> None:
    """Check the row of an execution that has just been replayed."""
    assert vector(row) == REPLAYED
    assert row["replay_count"] == before["replay_count"] + 1
    assert (row["retry_count"], row["reclaim_count"]) == (0, 0)
    assert {row["last_transition_at"], row["last_mutation_at"]} == {now}
    cleared = (
        "completed_at result_payload result_encoding failure_reason failure_category cancellation_reason cancelled_by "
        "delay_until granted_until attempt_timeout_at suspension_timeout_at lease_id attempt_id blocking_detail"
    )
    assert [name for name in cleared.split() if row[name] is not None] == []
    kept = "place created_at queue_no lease_epoch attempt_count started_at policy flow_id instance_tag has_tags"
    assert [name for name in kept.split() if row[name] != before[name]] == []


async def test_the_old_result_is_gone_until_the_new_run_ends(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    for result in (b"small", b"x" * 5000):
        execution_id = await given.completed(result=result)
        await engine.replay_execution(execution_id=execution_id)
        assert await engine.get_execution_result(execution_id) is None
        assert await rows.of("execution_result") == []
        (run,) = await claim(engine)
        await engine.fail(run.handle, reason="no luck", classification="permanent")
        ended = await engine.wait_for_ending(execution_id, timeout=10)
        assert isinstance(ended, Ended)
        assert (ended.outcome, ended.result) == (TerminalOutcome.FAILED, None)
    await check(engine, connection)


async def test_a_replayed_execution_keeps_its_place(engine: Engine, given: Given) -> None:
    first = await given.completed(priority=5)
    await given.created(priority=5)
    await given.created(priority=4)
    await engine.replay_execution(execution_id=first)
    (run,) = await claim(engine, limit=1)
    assert run.execution_id == first


async def test_what_cannot_be_replayed_is_refused_unchanged(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    waiting = await given.created(lane_id="other")
    running = await given.claimed(lane_id="running")
    suspended = await given.claimed(lane_id="suspended")
    await engine.suspend(suspended, suspend_args())
    never = await given.completed(policy={"max_replay_count": 0})
    absent = f"{{fp:3}}:{uuid4()}"
    async with rows.unchanged():
        await refused(engine.replay_execution(execution_id=absent), "execution_not_found")
        for execution_id in (waiting, running.execution_id, suspended.execution_id):
            await refused(engine.replay_execution(execution_id=execution_id), "execution_not_terminal")
        await refused(engine.replay_execution(execution_id=never), "max_replays_exhausted")
        wrong: list[dict[str, Any]] = [
            {"execution_id": "x"},
            {"execution_id": never, "reason": 3},
            {"execution_id": never, "requested_by": "a\0"},
            {"execution_id": never, "allow_cancelled_flow": 1},
        ]
        for arguments in wrong:
            with pytest.raises(InvalidInputError):
                await engine.replay_execution(**arguments)
    await check(engine, connection)


@pytest.mark.parametrize(("policy", "allowed"), [(None, 10), ({"max_replay_count": 2}, 2)])
async def test_the_policy_limits_the_replays(
    engine: Engine, given: Given, rows: Rows, clock: Clock, policy: dict[str, Any] | None, allowed: int
) -> None:
    execution_id = await given.cancelled(policy=policy)
    for _ in range(allowed):
        await clock.advance(ms=3)
        await engine.replay_execution(execution_id=execution_id)
        await engine.cancel_execution(execution_id=execution_id, reason="not wanted")
        assert await engine.find_inconsistencies() == []
    async with rows.unchanged():
        await refused(engine.replay_execution(execution_id=execution_id), "max_replays_exhausted")


async def test_the_worker_of_an_earlier_run_stays_fenced(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    await engine.cancel_execution(execution_id=handle.execution_id, reason="not wanted")
    await engine.replay_execution(execution_id=handle.execution_id)
    async with rows.unchanged():
        await refused(engine.complete(handle, b"late"), "execution_not_active")
        await refused(engine.renew(handle), "execution_not_active")
    (run,) = await claim(engine)
    async with rows.unchanged():
        await refused(engine.complete(handle, b"late"), "lease_conflict")
        await refused(engine.cancel(handle, "late"), "lease_conflict")
    await engine.complete(run.handle, b"done")
    async with rows.unchanged():
        await refused(engine.complete(handle, b"late"), "lease_conflict")


async def test_a_replayed_execution_has_its_retries_and_reclaims_again(
    engine: Engine, given: Given, clock: Clock, connection: asyncpg.Connection
) -> None:
    retry = {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}
    execution_id = await given.created(policy={"retry_policy": retry, "max_reclaim_count": 1})
    for round_number in range(2):
        states = []
        for _ in range(2):
            (run,) = await claim(engine)
            states.append(run.attempt_type)
            await engine.fail(run.handle, reason="no luck")
        assert states == ["replay" if round_number else "initial", "retry"]
        assert await engine.read_execution_state(execution_id) is PublicState.FAILED
        await engine.replay_execution(execution_id=execution_id)
    await claim(engine, lease_ttl_ms=1000)
    await clock.advance(ms=1001)
    (run,) = await claim(engine)
    assert run.attempt_type == "reclaim"
    await engine.complete(run.handle, b"done")
    await check(engine, connection)


async def test_a_retry_that_was_cancelled_before_it_began_is_replaced_by_the_replay(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    handle = await given.backing_off()
    execution_id = handle.execution_id
    await engine.cancel_execution(execution_id=execution_id, reason="not wanted")
    for nth in range(2):
        await engine.replay_execution(execution_id=execution_id, reason=f"again {nth}")
        pending = await pending_fields(engine, execution_id)
        assert pending == {"replay_reason": f"again {nth}", "previous_attempt_index": "0"}
        await check(engine, connection)
        await engine.cancel_execution(execution_id=execution_id, reason="not wanted")
        await check(engine, connection)
    assert [one["attempt_state"] for one in await attempts(rows, execution_id)] == ["ended_failure"]


async def test_the_error_of_the_last_attempt_stays_in_its_history(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    raised = FailureReason("no luck", error_type="ValueError", traceback="Traceback")
    await engine.fail(handle, reason=raised, classification="permanent")
    before = await engine.list_attempts(handle.execution_id)
    await engine.replay_execution(execution_id=handle.execution_id)
    assert await engine.list_attempts(handle.execution_id) == before
    assert before[0].error_type == "ValueError"
    status = await engine.read_execution_status(handle.execution_id)
    assert status is not None
    assert status.failure is None
    await check(engine, connection)


async def test_a_deadline_is_kept_rearmed_or_dropped(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    now = await clock.now()
    later = await given.cancelled(execution_deadline_at=now + 10 * DAY)
    policy = {"timeout_policy": {"execution_deadline_ms": 5000}}
    by_policy = await given.cancelled(policy=policy)
    absolute = await given.cancelled(execution_deadline_at=now + 5000)
    now = await clock.advance(ms=5000)
    expected = {later: now - 5000 + 10 * DAY, by_policy: now + 5000, absolute: None}
    for execution_id, deadline_at in expected.items():
        await engine.replay_execution(execution_id=execution_id)
        assert (await rows.execution(execution_id))["deadline_at"] == deadline_at
        timers = {} if deadline_at is None else {"deadline": deadline_at}
        assert await rows.timers(execution_id) == timers
    await check(engine, connection)
    await clock.advance(ms=5000)
    assert await parts_of(engine).timeouts.expire_due() == 1
    assert await engine.read_execution_state(by_policy) is PublicState.EXPIRED


async def test_retention_leaves_what_runs_again(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection, engines: Engines
) -> None:
    handles = [await given.claimed(execution_kind=f"kind {nth % 2}") for nth in range(4)]
    await engine.complete_many([(handle, b"done") for handle in handles])
    replayed, ended_again, *others = [handle.execution_id for handle in handles]
    # The setting has changed since they ended.
    other = await engines(retention_ms=1000)
    await engine.replay_execution(execution_id=replayed)
    await other.replay_execution(execution_id=ended_again)
    await check(engine, connection)
    (run,) = [run for run in await claim(engine, limit=2) if run.execution_id == ended_again]
    await engine.complete(run.handle, b"again")
    await check(engine, connection)
    left = {each for row in await rows.of("retained") for each in row["execution_ids"]}
    assert {str(each) for each in left} == {uuid_of(each) for each in (ended_again, *others)}
    await clock.advance(ms=DAY + 1)
    assert (await parts_of(engine).retention.trim_batch()).done == 3
    assert [str(row["execution_id"]) for row in await rows.of("execution")] == [uuid_of(replayed)]
    assert await rows.of("retained") == []


async def test_the_last_execution_of_an_entry_of_retained_takes_it_with_it(
    engine: Engine, given: Given, rows: Rows
) -> None:
    execution_id = await given.completed()
    await engine.replay_execution(execution_id=execution_id)
    assert await rows.of("retained") == []


async def test_the_history_and_the_feeds_show_a_replay(engine: Engine, given: Given, rows: Rows) -> None:
    execution_id = await given.completed(tags={"app.customer": "acme"})
    await engine.replay_execution(execution_id=execution_id)
    lease, operator = (await rows.events(execution_id))[-2:]
    assert (lease["kind"], lease["reason"], lease["attempt_index"], lease["lease_epoch"]) == (
        EventKind.REPLAY_INITIATED,
        "normal",
        0,
        1,
    )
    assert lease["details"] == '{"replay_type": "normal", "replay_count": 1}'
    assert (operator["kind"], operator["reason"], operator["details"]) == (
        EventKind.OPERATOR_ACTION,
        "replayed",
        '{"branch": "normal"}',
    )
    assert {each["tags"] for each in (lease, operator)} == {'{"app.customer": "acme"}'}


async def test_the_history_of_leases_counts_the_replays(engine: Engine, given: Given) -> None:
    execution_id = await given.cancelled()
    async with engine.subscribe_lease_history() as events:
        for count in (1, 2):
            await engine.replay_execution(execution_id=execution_id)
            (event,) = await take(events, 1)
            assert isinstance(event, LeaseReplayInitiated)
            assert (event.execution_id, event.reason, event.replay_count) == (execution_id, "normal", count)
            await engine.cancel_execution(execution_id=execution_id, reason="not wanted")


async def test_a_replay_wakes_a_waiting_claim(engine: Engine, given: Given, hints_only: None) -> None:
    execution_id: ExecutionId = await given.completed()
    waiting = asyncio.create_task(claim(engine, max_wait_ms=10_000))
    await asyncio.sleep(0)
    await engine.replay_execution(execution_id=execution_id)
    assert [run.execution_id for run in await waiting] == [execution_id]

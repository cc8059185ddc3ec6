"""Explain: every reason that holds an execution, from one statement that changes nothing."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from creates import new
from engine.state import block, refused
from engine.waits import fresh, on_all, suspend_args, suspend_run
from fixtures import Clock, Explain, Given, Rows, uuid_of
from flowfabric.db.database import Database, Transaction
from flowfabric.db.statements import Statement
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.condition import ByName, Count, CountKind, OperatorOnly, TimeoutOnly
from flowfabric.model.explanation import (
    BudgetReason,
    DelayedReason,
    DependenciesReason,
    EndedReason,
    Explanation,
    HeldReason,
    LastFailure,
    LeaseLostReason,
    NoCapableWorkerReason,
    OpenWaitpoint,
    QueuedReason,
    QuotaReason,
    RunningReason,
    SignalsReason,
)
from flowfabric.model.resume import ResumePolicy
from flowfabric.model.states import LaneState

MINUTE = 60_000
NEXT = QueuedReason(lane_id="default", lane_state=LaneState.ACTIVE, ahead=0, workers=1)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
async def _served(given: Given) -> None:
    """A live worker serves the lane, so that no explanation lacks one."""
    await given.registered(worker_instance_id="any", liveness_ttl_ms=2**50)


def requiring(*tokens: str) -> dict[str, Any]:
    return {"policy": {"routing_requirements": {"required_capabilities": list(tokens)}}}


def ahead(found: Explanation) -> int:
    """How many executions are ahead of one that only waits for its turn."""
    (reason,) = found.reasons
    assert isinstance(reason, QueuedReason)
    return reason.ahead


def signals_reason(found: Explanation) -> SignalsReason:
    """The reason of an execution that only waits for signals."""
    (reason,) = found.reasons
    assert isinstance(reason, SignalsReason)
    return reason


def shown(ms: int) -> str:
    """A time in the format of a summary."""
    return f"{datetime.fromtimestamp(ms // 1000, UTC):%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


# The statement.


async def test_an_unknown_execution_is_not_found(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        await refused(engine.explain(f"{{fp:1}}:{uuid4()}"), "execution_not_found")


async def test_an_explanation_is_one_statement_outside_a_transaction(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await given.claimed(**requiring("gpu"), capabilities=["gpu"])
    await suspend_run(engine, handle)
    asked: list[str] = []
    fetch = Database.fetch

    async def listen(database: Database, statement: Statement, values: Mapping[str, object], **others: Any) -> Any:
        asked.append(statement.name)
        return await fetch(database, statement, values, **others)

    async def listen_within(_: Transaction, statement: Statement, **__: object) -> Any:
        asked.append(f"{statement.name} in a transaction")

    monkeypatch.setattr(Database, "fetch", listen)
    monkeypatch.setattr(Transaction, "fetch", listen_within)
    await engine.explain(handle.execution_id)
    assert asked == ["read_reasons"]


async def test_an_explanation_waits_for_no_lock(engine: Engine, given: Given, connection: asyncpg.Connection) -> None:
    execution_id = await given.created()
    async with connection.transaction():
        await connection.execute(
            "lock table execution, ready, claim, attempt, worker, suspension, waitpoint, lane in exclusive mode"
        )
        assert (await engine.explain(execution_id)).reasons == (NEXT,)


# Waiting in the queue.


async def test_executions_that_are_claimed_first_are_counted_as_ahead(explain: Explain, given: Given) -> None:
    first, second = await given.created(), await given.created()
    assert (await explain(first)).reasons == (NEXT,)
    found = await explain(second)
    assert ahead(found) == 1
    assert found.summary == "waiting: 1 ahead of it on lane 'default'"
    await given.created(priority=5)
    assert ahead(await explain(second)) == 2
    await given.created(lane_id="other", priority=9)
    await given.delayed(priority=9)
    await given.claim()
    assert ahead(await explain(second)) == 1


async def test_executions_with_other_capabilities_are_counted_as_ahead(explain: Explain, given: Given) -> None:
    await given.registered(capabilities=("gpu",))
    await given.created(**requiring("gpu"))
    plain = await given.created()
    assert ahead(await explain(plain)) == 1


async def test_at_most_a_thousand_are_counted_as_ahead(engine: Engine, given: Given) -> None:
    await engine.create_many([new() for _ in range(994)])
    await engine.create_many([new(policy=requiring("gpu")["policy"]) for _ in range(5)])
    for ahead in (999, 1000, 1000):
        found = await engine.explain(await given.created())
        assert [getattr(reason, "ahead", None) for reason in found.reasons] == [ahead]
        assert found.summary.startswith("waiting: 999 ahead" if ahead < 1000 else "waiting: 1000 or more ahead")


async def test_a_stopped_lane_is_named_in_the_summary(engine: Engine, explain: Explain, given: Given) -> None:
    execution_id = await given.created()
    for state in LaneState:
        await engine.set_lane_state("default", state)
        found = await explain(execution_id)
        assert found.reasons == (replace(NEXT, lane_state=state),)
        stopped = f", which is {state}" if state in ("paused", "disabled") else ""
        assert found.summary == f"waiting: 0 ahead of it on lane 'default'{stopped}"


async def test_a_resumable_execution_is_queued_like_the_others(engine: Engine, explain: Explain, given: Given) -> None:
    handle = await given.claimed()
    await engine.wait_children(handle)
    found = await explain(handle.execution_id)
    assert found.reasons == (NEXT,)
    assert found.summary == "resumable: 0 ahead of it on lane 'default'"


# Delayed.


async def test_a_delay_is_explained_with_its_end(explain: Explain, given: Given, clock: Clock) -> None:
    until = await clock.now() + MINUTE
    found = await explain(await given.delayed(seconds=60))
    assert found.reasons == (DelayedReason(until=until, cause="delay", last_failure=None),)
    assert found.summary == f"delayed until {shown(until)}"
    # A time beyond the calendar is shown in milliseconds.
    found = await explain(await given.created(delay_until=2**53 - 1))
    assert found.summary == f"delayed until {2**53 - 1} ms since the epoch"


async def test_a_retry_is_explained_with_the_failure_before_it(explain: Explain, given: Given, clock: Clock) -> None:
    until = await clock.now() + MINUTE
    handle = await given.backing_off(delay_ms=MINUTE)
    found = await explain(handle.execution_id)
    failure = LastFailure(attempt_index=0, reason="no luck", category="transient")
    assert found.reasons == (DelayedReason(until=until, cause="retry_backoff", last_failure=failure),)
    failed = "after attempt 1 failed: no luck (transient)"
    assert found.summary == f"delayed until {shown(until)} for its next attempt, {failed}"


async def test_a_delayed_run_is_explained_with_the_failure_of_an_earlier_attempt(
    engine: Engine, explain: Explain, given: Given, clock: Clock
) -> None:
    handle = await given.backing_off(delay_ms=1)
    await clock.advance(ms=1)
    await engine.promote_delayed(handle.execution_id)
    again = await given.claim()
    until = await clock.now() + MINUTE
    await engine.delay(again.handle, until)
    failure = LastFailure(attempt_index=0, reason="no luck", category="transient")
    (reason,) = (await explain(handle.execution_id)).reasons
    assert reason == DelayedReason(until=until, cause="delay", last_failure=failure)


async def test_a_delayed_resume_is_not_a_retry(engine: Engine, explain: Explain, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    wait = await suspend_run(engine, handle, resume_policy=ResumePolicy(resume_delay_ms=MINUTE))
    await engine.deliver_signal(
        execution_id=handle.execution_id,
        waitpoint_id=wait.details.waitpoint_id,
        waitpoint_token=wait.details.waitpoint_token,
        signal_name="ready",
    )
    until = await clock.now() + MINUTE
    found = await explain(handle.execution_id)
    assert found.reasons == (DelayedReason(until=until, cause="resume_delay", last_failure=None),)
    assert found.summary == f"delayed until {shown(until)} before it resumes"


# Suspended.


async def test_a_suspension_is_explained_with_its_waitpoint_names_and_timeout(
    engine: Engine, explain: Explain, given: Given, clock: Clock
) -> None:
    handle = await given.claimed()
    timeout_at = await clock.now() + MINUTE
    wait = await suspend_run(engine, handle, timeout_at=timeout_at, reason_code="waiting_for_approval")
    found = await explain(handle.execution_id)
    (reason,) = found.reasons
    assert reason == SignalsReason(
        suspension_id=wait.details.suspension_id,
        reason_code="waiting_for_approval",
        waitpoints=(
            OpenWaitpoint(
                waitpoint_id=wait.details.waitpoint_id, waitpoint_key="wait", required_signal_names=("ready",)
            ),
        ),
        timeout_at=timeout_at,
    )
    reaches = "a signal 'ready' reaches waitpoint 'wait'"
    assert found.summary == f"suspended until {reaches}; times out at {shown(timeout_at)}"
    assert str(wait.details.waitpoint_token.reveal()) not in repr(found)


async def test_several_waitpoints_are_listed_in_the_order_of_their_bindings(
    engine: Engine, explain: Explain, given: Given
) -> None:
    handle = await given.claimed()
    keys = ("e", "a", "d", "b", "c")
    await suspend_run(engine, handle, on_all(*keys))
    found = await explain(handle.execution_id)
    waitpoints = signals_reason(found).waitpoints
    assert [(each.waitpoint_key, each.required_signal_names) for each in waitpoints] == [(key, ()) for key in keys]
    reaches = ", ".join(f"a signal reaches waitpoint '{key}'" for key in keys[:3])
    assert found.summary == f"suspended until {reaches} and 2 more"


async def test_a_closed_waitpoint_is_not_listed(engine: Engine, explain: Explain, given: Given) -> None:
    handle = await given.claimed()
    wait = await suspend_run(engine, handle, on_all("a", "b"))
    await engine.close_waitpoint(execution_id=handle.execution_id, waitpoint_id=wait.details.waitpoint_id)
    await engine.create_waitpoint(await given.claimed(), waitpoint_key="another", expires_in_ms=MINUTE)
    waitpoints = signals_reason(await explain(handle.execution_id)).waitpoints
    assert [each.waitpoint_key for each in waitpoints] == ["b"]


async def test_a_count_requires_its_signal_name_at_each_of_its_waitpoints(
    engine: Engine, explain: Explain, given: Given
) -> None:
    handle = await given.claimed()
    count = Count(n=2, count_kind=CountKind.DISTINCT_WAITPOINTS, matcher=ByName("vote"), waitpoints=("a", "b"))
    await suspend_run(engine, handle, suspend_args(waitpoints=(fresh("a"), fresh("b")), resume_condition=count))
    waitpoints = signals_reason(await explain(handle.execution_id)).waitpoints
    assert [(each.waitpoint_key, each.required_signal_names) for each in waitpoints] == [
        ("a", ("vote",)),
        ("b", ("vote",)),
    ]


async def test_a_wait_for_an_operator_or_a_timeout_only_is_explained_as_such(
    engine: Engine, explain: Explain, given: Given, clock: Clock
) -> None:
    for condition, name, ends in (
        (OperatorOnly(), "__operator_only__", "an operator resumes it"),
        (TimeoutOnly(), "__timeout_only__", "its timeout"),
    ):
        handle = await given.claimed()
        timeout_at = await clock.now() + MINUTE
        await suspend_run(engine, handle, resume_condition=condition, timeout_at=timeout_at)
        found = await explain(handle.execution_id)
        assert [each.required_signal_names for each in signals_reason(found).waitpoints] == [(name,)]
        assert found.summary == f"suspended until {ends}; times out at {shown(timeout_at)}"


async def test_a_manual_pause_has_the_reasons_signals_and_held(engine: Engine, explain: Explain, given: Given) -> None:
    handle = await given.claimed()
    await suspend_run(engine, handle, reason_code="manual_pause")
    found = await explain(handle.execution_id)
    signals, held = found.reasons
    assert isinstance(signals, SignalsReason)
    assert isinstance(held, HeldReason)
    assert held.blocking_reason == "paused_by_operator"


async def test_a_suspension_of_a_newer_version_is_explained_as_far_as_it_is_understood(
    engine: Engine, explain: Explain, given: Given, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed(policy={"max_reclaim_count": 7})
    await suspend_run(engine, handle)
    await connection.execute("""update suspension set reason_code = 'waiting_for_rain', condition = '{"Rain": {}}'""")
    await connection.execute("""update execution set policy = policy || '{"wipers": true}'""")
    reason = signals_reason(await explain(handle.execution_id))
    assert (reason.reason_code, len(reason.waitpoints)) == ("waiting_for_rain", 1)


# Running, lost, ended.


def lease(kind: Any, expires_at: int, **overrides: Any) -> Any:
    return kind(
        **{
            "worker_id": "worker",
            "worker_instance_id": "worker-1",
            "lease_expires_at": expires_at,
            "attempt_index": 0,
            "reclaim_count": 0,
            "reclaim_cap": 1000,
            **overrides,
        }
    )


async def test_a_running_execution_is_explained_with_its_worker_and_lease(
    explain: Explain, given: Given, clock: Clock
) -> None:
    expires_at = await clock.now() + 30_000
    found = await explain((await given.claimed()).execution_id)
    assert found.reasons == (lease(RunningReason, expires_at),)
    assert found.summary == f"active on worker 'worker-1' in attempt 1, leased until {shown(expires_at)}"
    handle = await given.claimed(policy={"max_reclaim_count": 7})
    assert (await explain(handle.execution_id)).reasons == (lease(RunningReason, expires_at, reclaim_cap=7),)


async def test_an_expired_lease_is_lost_and_is_queued_once_it_is_marked(
    engine: Engine, explain: Explain, given: Given, clock: Clock
) -> None:
    handle = await given.expired_lease()
    expires_at = await clock.now() - 1
    assert (await explain(handle.execution_id)).reasons == (lease(LeaseLostReason, expires_at),)
    await parts_of(engine).lease_expiry.mark_expired([handle.execution_id])
    found = await explain(handle.execution_id)
    assert found.reasons == (lease(LeaseLostReason, expires_at), NEXT)
    lost = "lease lost by worker 'worker-1' in attempt 1, reclaimed 0 of at most 1000 times"
    assert found.summary == f"active: {lost}; 0 ahead of it on lane 'default'"
    again = await given.claim(worker="other")
    (reason,) = (await explain(again.execution_id)).reasons
    assert isinstance(reason, RunningReason)
    assert (reason.worker_id, reason.attempt_index, reason.reclaim_count) == ("other", 1, 1)


async def test_a_renewed_lease_is_explained_with_its_new_end_even_when_it_is_lost(
    engine: Engine, explain: Explain, given: Given, clock: Clock
) -> None:
    handle = await given.claimed()
    await clock.advance(seconds=10)
    await engine.renew(handle)
    expires_at = await clock.now() + 30_000
    assert (await explain(handle.execution_id)).reasons == (lease(RunningReason, expires_at),)
    await clock.advance(seconds=31)
    # The first sweep marks the lease, the second removes its claim.
    for _ in range(2):
        await parts_of(engine).lease_expiry.sweep()
        assert (await explain(handle.execution_id)).reasons == (lease(LeaseLostReason, expires_at), NEXT)


async def test_an_ended_execution_is_explained_with_its_outcome_and_reason(
    engine: Engine, explain: Explain, given: Given, clock: Clock
) -> None:
    now = await clock.now()
    late = await given.created(execution_deadline_at=now + 1)
    for execution_id, outcome, reason in (
        (await given.completed(lane_id="a"), "success", None),
        (await given.failed(lane_id="a"), "failed", "no luck"),
        (await given.cancelled(lane_id="a"), "cancelled", "not wanted"),
    ):
        found = await explain(execution_id)
        assert found.reasons == (EndedReason(outcome=outcome, reason=reason, completed_at=now),)  # type: ignore[arg-type]
        assert found.summary == f"{found.public_state} at {shown(now)}{f', {reason}' if reason else ''}"
    await clock.advance(ms=1)
    await engine.expire_execution(late, "execution_deadline")
    (ended,) = (await explain(late)).reasons
    assert isinstance(ended, EndedReason)
    assert (ended.outcome, ended.reason) == ("expired", "execution_deadline")


# States that no operation sets yet.

BLOCKED: dict[str, tuple[str, str, Any, str]] = {
    "operator": (
        "blocked_by_operator",
        "paused_by_operator",
        HeldReason(blocking_reason="paused_by_operator", detail="why"),  # type: ignore[arg-type]
        "waiting: paused by operator, why",
    ),
    "lane": (
        "blocked_by_lane_state",
        "paused_by_policy",
        HeldReason(blocking_reason="paused_by_policy", detail="why"),  # type: ignore[arg-type]
        "waiting: paused by policy, why",
    ),
    "flow": (
        "blocked_by_operator",
        "paused_by_flow_cancel",
        HeldReason(blocking_reason="paused_by_flow_cancel", detail="why"),  # type: ignore[arg-type]
        "waiting: paused by flow cancel, why",
    ),
    "dependencies": (
        "blocked_by_dependencies",
        "waiting_for_children",
        DependenciesReason(detail="why"),
        "waiting children: dependencies, why",
    ),
    "budget": (
        "blocked_by_budget",
        "waiting_for_budget",
        BudgetReason(detail="why"),
        "rate limited: about to be released: its budgets have room",
    ),
    "quota": (
        "blocked_by_quota",
        "waiting_for_quota",
        QuotaReason(detail="why"),
        "rate limited: about to be released: its quotas have room",
    ),
    "route": (
        "blocked_by_route",
        "waiting_for_capable_worker",
        NoCapableWorkerReason(missing=("gpu",), workers_seen=1),
        "waiting: no live worker of its lane, namespace and kind offers gpu",
    ),
}


async def test_a_block_is_explained_together_with_a_delay(
    explain: Explain, given: Given, clock: Clock, connection: asyncpg.Connection, subtests: pytest.Subtests
) -> None:
    for case, (eligibility, blocking, reason, summary) in BLOCKED.items():
        with subtests.test(case):
            execution_id = await given.created(**requiring("gpu"))
            await block(connection, execution_id, eligibility, blocking)
            found = await explain(execution_id)
            assert (found.reasons, found.summary) == ((reason,), summary)
            until = await clock.now() + MINUTE
            await connection.execute(
                "update execution set delay_until = $1 where execution_id = $2", until, uuid_of(execution_id)
            )
            found = await explain(execution_id)
            delayed = DelayedReason(until=until, cause="delay", last_failure=None)
            assert set(found.reasons) == {reason, delayed}
            await clock.advance(ms=MINUTE)
            assert (await explain(execution_id)).reasons == (reason,)
            if case == "route":
                await given.registered(capabilities=("gpu",))
                # The registration of a capable worker unblocks it.
                (served,) = (await explain(execution_id)).reasons
                assert isinstance(served, QueuedReason)


async def test_an_unknown_state_literal_is_corruption(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    execution_id = await given.created()
    await connection.execute("alter type blocking_reason add value 'waiting_for_godot'")
    await connection.execute("update execution set blocking_reason = 'waiting_for_godot'")
    await refused(engine.explain(execution_id), "corruption", "blocking_reason: unknown literal 'waiting_for_godot'")

"""Suspend: what it releases, keeps and stores."""

from typing import Any

import pytest

from engine.state import FENCED_OPERATIONS, RESUMABLE, attempts, claim, event_texts, lease_fields, refused, vector
from engine.waits import (
    SUSPENDED,
    fresh,
    on_all,
    suspend_args,
    suspend_run,
    suspension,
    token_of,
    triple,
    waitpoint,
    waitpoints,
)
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.condition import AllOf, ByName, Count, CountKind, OperatorOnly, Single, TimeoutOnly, Wildcard
from flowfabric.model.handle import Backend
from flowfabric.model.resume import ResumePolicy
from flowfabric.model.states import HandleKind, PublicState
from flowfabric.model.suspension import Suspended, SuspensionReason


async def test_a_suspend_releases_the_lease_and_keeps_the_attempt(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    began = await clock.now()
    claimed = await given.run(tags={"ff.instance_id": "i-1"}, execution_deadline_at=began + 3_600_000)
    worker_no = (await rows.execution(claimed.execution_id))["worker_no"]
    now = await clock.advance(seconds=1)
    request = suspend_args(timeout_at=now + 60_000)
    await engine.suspend(claimed.handle, request)
    row = await rows.execution(claimed.execution_id)
    assert (vector(row), lease_fields(row)) == (SUSPENDED, {})
    first = request.waitpoints[0].waitpoint_id
    assert row["blocking_detail"] == f"suspended: waitpoint {first} awaiting waiting_for_signal"
    assert (row["suspension_timeout_at"], row["suspension_id"]) == (now + 60_000, request.suspension_id)
    assert (row["deadline_at"], row["delay_until"]) == (began + 3_600_000, None)
    assert await rows.timers(claimed.execution_id) == {
        "suspension_timeout": now + 60_000,
        "deadline": began + 3_600_000,
    }
    assert (row["attempt_id"], row["attempt_count"]) == (claimed.attempt_id, 1)
    assert (row["lease_epoch"], row["retry_count"], row["completed_at"]) == (2, 0, None)
    assert {row[stamp] for stamp in ("last_transition_at", "last_mutation_at")} == {now}
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["suspension_marker"]) == ("suspended", "suspend")
    assert (attempt["started_at"], attempt["suspended_at"], attempt["ended_at"]) == (began, now, None)
    assert (attempt["attempt_id"], attempt["suspension_id"]) == (claimed.attempt_id, request.suspension_id)
    assert (attempt["lease_epoch"], attempt["worker_no"]) == (2, None)
    assert await event_texts(rows, claimed.execution_id) == ["tag_attached", "acquired", "released suspend"]
    event = (await rows.events(claimed.execution_id))[2]
    assert (event["lease_id"], event["lease_epoch"], event["worker_no"]) == (claimed.lease_id, 1, worker_no)
    assert (event["attempt_index"], event["instance_tag"], event["outcome"]) == (0, "i-1", None)
    assert await engine.read_execution_state(claimed.execution_id) == PublicState.SUSPENDED


async def test_a_suspension_row_holds_the_arguments(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    claimed = await given.run()
    now = await clock.advance(seconds=1)
    request = suspend_args(
        reason_code="waiting_for_approval",
        requested_by="policy",
        timeout_at=now + 60_000,
        timeout_behavior="expire",
        continuation_metadata_pointer="s3://there",
        resume_policy=ResumePolicy(resume_delay_ms=500),
    )
    await engine.suspend(claimed.handle, request)
    row = await suspension(rows, claimed.execution_id)
    execution = await rows.execution(claimed.execution_id)
    assert row == {
        "partition_key": execution["partition_key"],
        "execution_id": execution["execution_id"],
        "suspension_id": request.suspension_id,
        "attempt_index": 0,
        "waitpoint_ids": [request.waitpoints[0].waitpoint_id],
        "namespace_no": execution["namespace_no"],
        "lane_no": row["lane_no"],
        "reason_code": "waiting_for_approval",
        "requested_by": "policy",
        "suspended_at": now,
        "timeout_at": now + 60_000,
        "timeout_behavior": "expire",
        "condition": '{"Single": {"matcher": {"ByName": "ready"}, "waitpoint_key": "wait"}}',
        "resume_policy": row["resume_policy"],
        "continuation_metadata_pointer": "s3://there",
        "satisfier_ids": [],
        "satisfied_at": None,
        "closed_at": None,
        "close_reason": None,
        "last_signal_at": None,
    }
    assert '"resume_delay_ms": 500' in row["resume_policy"]


async def test_a_waitpoint_of_a_suspension_is_active_and_has_its_token(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    claimed = await given.run()
    now = await clock.advance(seconds=1)
    outcome = await suspend_run(engine, claimed.handle, timeout_at=now + 60_000)
    details = outcome.details
    row = await waitpoint(rows, details.waitpoint_id)
    token = token_of(claimed.execution_id, details.waitpoint_id)
    assert row == {
        "partition_key": row["partition_key"],
        "waitpoint_id": details.waitpoint_id,
        "execution_id": row["execution_id"],
        "attempt_index": 0,
        "suspension_id": details.suspension_id,
        "waitpoint_key": "wait",
        "token_kid": "k1",
        "token": token,
        "state": "active",
        "required_signal_names": ["ready"],
        "created_at": now,
        "activated_at": now,
        "satisfied_at": None,
        "closed_at": None,
        "expires_at": now + 60_000,
        "close_reason": None,
        "signal_count": 0,
        "matched_signal_count": 0,
        "last_signal_at": None,
    }
    assert (details.waitpoint_key, details.waitpoint_token.reveal()) == ("wait", token)
    assert details.additional_waitpoints == ()


async def test_each_of_several_waitpoints_has_its_own_token(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    request = on_all("a", "b", "c")
    details = (await suspend_run(engine, handle, request)).details
    ids = [binding.waitpoint_id for binding in request.waitpoints]
    assert (await suspension(rows, handle.execution_id))["waitpoint_ids"] == ids
    others = details.additional_waitpoints
    assert [details.waitpoint_id, *(each.waitpoint_id for each in others)] == ids
    assert [each.waitpoint_key for each in others] == ["b", "c"]
    tokens = [details.waitpoint_token.reveal(), *(each.waitpoint_token.reveal() for each in others)]
    assert tokens == [token_of(handle.execution_id, each) for each in ids]
    assert [row["token"] for row in await waitpoints(rows, handle.execution_id)] == tokens
    assert [row["required_signal_names"] for row in await waitpoints(rows, handle.execution_id)] == [[]] * 3


async def test_a_waitpoint_stores_the_signal_names_of_its_condition(engine: Engine, given: Given, rows: Rows) -> None:
    condition = AllOf(
        (
            Single(waitpoint_key="a", matcher=ByName("go")),
            Single(waitpoint_key="b", matcher=Wildcard()),
            Count(n=1, count_kind=CountKind.DISTINCT_SIGNALS, matcher=ByName("vote"), waitpoints=("a", "b")),
            OperatorOnly(),
        )
    )
    handle = await given.claimed()
    await suspend_run(engine, handle, waitpoints=(fresh("a"), fresh("b")), resume_condition=condition)
    one, other = await waitpoints(rows, handle.execution_id)
    assert one["required_signal_names"] == ["go", "vote", "__operator_only__"]
    assert other["required_signal_names"] == ["vote", "__operator_only__"]


BLOCKING_REASONS = {
    "waiting_for_signal": "waiting_for_signal",
    "waiting_for_approval": "waiting_for_approval",
    "waiting_for_callback": "waiting_for_callback",
    "waiting_for_tool_result": "waiting_for_tool_result",
    "waiting_for_operator_review": "paused_by_operator",
    "paused_by_policy": "paused_by_policy",
    "paused_by_budget": "waiting_for_budget",
    "step_boundary": "waiting_for_signal",
    "manual_pause": "paused_by_operator",
}
"""The blocking reason of an execution by the reason code of its suspension."""


async def test_every_reason_code_sets_its_blocking_reason(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    assert set(BLOCKING_REASONS) == set(SuspensionReason)
    for reason, blocking in BLOCKING_REASONS.items():
        with subtests.test(reason):
            handle = await given.claimed()
            await suspend_run(engine, handle, reason_code=reason)
            row = await rows.execution(handle.execution_id)
            assert (row["blocking_reason"], row["public_state"]) == (blocking, "suspended")
            assert row["blocking_detail"].endswith(f" awaiting {reason}")
    assert await engine.find_inconsistencies() == []


async def test_an_operator_only_or_timeout_only_wait_has_a_waitpoint(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    for condition in (OperatorOnly(), TimeoutOnly()):
        handle = await given.claimed()
        await suspend_run(engine, handle, resume_condition=condition, timeout_at=await clock.now() + 1000)
        (row,) = await waitpoints(rows, handle.execution_id)
        assert (row["state"], len(row["required_signal_names"])) == ("active", 1)


# Handles.


async def test_after_a_suspend_the_old_and_the_returned_handle_are_refused(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    handle = await given.claimed()
    outcome = await suspend_run(engine, handle)
    assert (outcome.handle.kind, outcome.handle.backend) == (HandleKind.SUSPENDED, Backend.POSTGRES)
    assert outcome.handle.opaque == handle.opaque
    async with rows.unchanged():
        for name, operation in FENCED_OPERATIONS.items():
            with subtests.test(name):
                await refused(operation(engine, handle), "lease_conflict")
                await refused(operation(engine, outcome.handle), "lease_conflict")
        await refused(engine.suspend(handle, suspend_args()), "lease_conflict")
        await refused(engine.suspend(outcome.handle, suspend_args()), "already_suspended")


async def test_suspend_by_triple_needs_only_the_fence_of_the_lease(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(lease_ttl_ms=20_000)
    request = suspend_args()
    outcome = await engine.suspend_by_triple(**triple(handle), args=request)
    assert isinstance(outcome, Suspended)
    assert (outcome.handle.kind, outcome.handle.backend) == (HandleKind.SUSPENDED, Backend.POSTGRES)
    assert outcome.handle.opaque == handle.opaque
    assert outcome.details.suspension_id == request.suspension_id
    assert vector(await rows.execution(handle.execution_id)) == SUSPENDED
    async with rows.unchanged():
        await refused(engine.suspend_by_triple(**triple(handle), args=suspend_args()), "lease_conflict")


async def test_suspend_by_triple_returns_a_handle_with_the_ttl_of_the_renewed_lease(
    engine: Engine, given: Given, clock: Clock
) -> None:
    handle = await given.claimed(lease_ttl_ms=20_000)
    await clock.advance(seconds=5)
    await engine.renew(handle)
    outcome = await engine.suspend_by_triple(
        **{**triple(handle), "lease_id": str(handle.lease_id)}, args=suspend_args()
    )
    assert isinstance(outcome, Suspended)
    assert outcome.handle.lease_ttl_ms == 20_000


# Timeouts.


async def test_a_suspend_without_a_timeout_sets_no_timer(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    await suspend_run(engine, handle, timeout_behavior="expire")
    assert (await rows.execution(handle.execution_id))["suspension_timeout_at"] is None
    assert await rows.timers(handle.execution_id) == {}
    wait = await suspension(rows, handle.execution_id)
    assert (wait["timeout_at"], wait["timeout_behavior"]) == (None, "expire")
    (point,) = await waitpoints(rows, handle.execution_id)
    assert point["expires_at"] is None


TIMEOUTS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 30_000, "escalate"),
    ({"timeout_behavior": "cancel"}, 30_000, "cancel"),
    ({"timeout_at": 5000}, 5000, "fail"),
    ({"timeout_at": 5000, "timeout_behavior": "auto_resume"}, 5000, "auto_resume_with_timeout_signal"),
]
"""The arguments with timeout_at counted from now, the resulting timeout in milliseconds, and its behavior."""


async def test_a_timeout_that_the_arguments_omit_is_taken_from_the_policy(
    engine: Engine, given: Given, rows: Rows, clock: Clock, subtests: pytest.Subtests
) -> None:
    policy = {"suspension_policy": {"default_timeout_ms": 30_000, "timeout_behavior": "escalate"}}
    for request, after_ms, behavior in TIMEOUTS:
        with subtests.test(f"{request}"):
            handle = await given.claimed(policy=policy)
            now = await clock.advance(seconds=1)
            timeout = {"timeout_at": now + request["timeout_at"]} if "timeout_at" in request else {}
            await suspend_run(engine, handle, **{**request, **timeout})
            wait = await suspension(rows, handle.execution_id)
            assert (wait["timeout_at"], wait["timeout_behavior"]) == (now + after_ms, behavior)
            assert await rows.timers(handle.execution_id) == {"suspension_timeout": now + after_ms}
            (point,) = await waitpoints(rows, handle.execution_id)
            assert point["expires_at"] == now + after_ms


async def test_a_timeout_in_the_recent_past_is_due_at_once(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    for ago_ms in (0, 1, 600_000):
        handle = await given.claimed()
        now = await clock.now()
        await suspend_run(engine, handle, timeout_at=now - ago_ms)
        # The timer is set to now: a sweep that has read all timers up to now does not read older ones again.
        assert await rows.timers(handle.execution_id) == {"suspension_timeout": now}
        assert (await suspension(rows, handle.execution_id))["timeout_at"] == now - ago_ms


async def test_a_timeout_wakes_the_loop_that_waits_for_timers(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    await suspend_run(engine, handle)
    parts_of(engine).wakeups.next_timer = float("inf")
    parts_of(engine).wakeups.timer_event.clear()
    other = await given.claimed()
    await suspend_run(engine, other, timeout_at=await clock.now() + 1000)
    assert parts_of(engine).wakeups.timer_event.is_set()
    assert parts_of(engine).wakeups.next_timer < float("inf")


# Resumed runs and secret tokens.


async def test_a_run_that_was_delayed_before_can_suspend(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    began = await clock.now()
    first = await given.run()
    await engine.delay(first.handle, 0)
    assert vector(await rows.execution(first.execution_id)) != RESUMABLE
    await parts_of(engine).delays.promote_due()
    now = await clock.advance(seconds=1)
    (again,) = await claim(engine)
    outcome = await suspend_run(engine, again.handle)
    (attempt,) = await attempts(rows, first.execution_id)
    assert (attempt["attempt_state"], attempt["suspension_marker"]) == ("suspended", "suspend")
    assert (attempt["started_at"], attempt["resumed_at"], attempt["suspended_at"]) == (began, now, now)
    assert (attempt["suspension_id"], attempt["worker_no"]) == (outcome.details.suspension_id, None)
    assert (attempt["lease_epoch"], attempt["lease_id"]) == (3, again.lease_id)
    assert await engine.find_inconsistencies() == []


async def test_tokens_appear_in_no_output_or_log(
    engine: Engine, given: Given, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    handle = await given.claimed()
    outcome = await suspend_run(engine, handle, on_all("a", "b", idempotency_key="once"))
    details = outcome.details
    tokens = [details.waitpoint_token.reveal(), details.additional_waitpoints[0].waitpoint_token.reveal()]
    shown = repr(outcome) + str(outcome) + caplog.text + str(await rows.of("event_each"))
    shown += str(await engine.describe_execution(handle.execution_id))
    shown += str(await engine.list_pending_waitpoints(execution_id=handle.execution_id))
    assert [token for token in tokens if token in shown or token.partition(":")[2] in shown] == []

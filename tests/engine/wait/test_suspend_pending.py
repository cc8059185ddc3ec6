"""Suspends on a pending waitpoint: signals that arrived before count, and may satisfy the condition."""

from typing import Any
from uuid import uuid4

import pytest

from engine.state import ACTIVE, event_texts, refused, vector
from engine.waits import FORMS, SUSPENDED, fresh, suspend_args, suspend_run, suspension, using, waitpoint
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.condition import (
    AllOf,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    all_of_waitpoints,
)
from flowfabric.model.lease import AlreadySatisfied
from flowfabric.model.waitpoint import PendingWaitpoint, UsePending

LONG = 3_600_000


async def ahead(engine: Engine, handle: Any, key: str = "wait") -> PendingWaitpoint:
    return await engine.create_waitpoint(handle, waitpoint_key=key, expires_in_ms=LONG)


async def signal(engine: Engine, handle: Any, pending: PendingWaitpoint, name: str, source: str = "") -> Any:
    return await engine.deliver_signal(
        execution_id=handle.execution_id,
        waitpoint_id=pending.waitpoint_id,
        waitpoint_token=pending.hmac_token,
        signal_name=name,
        source_identity=source,
    )


def votes(n: int) -> Count:
    return Count(n=n, count_kind=CountKind.DISTINCT_SOURCES, matcher=ByName("vote"), waitpoints=("wait",))


async def test_a_pending_waitpoint_keeps_its_id_key_and_token(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    before = await waitpoint(rows, pending.waitpoint_id)
    now = await clock.advance(seconds=1)
    await engine.rotate_waitpoint_hmac_secret_all(new_kid="k2", new_secret_hex="cd" * 32, grace_ms=LONG)
    request = using(pending, timeout_at=now + 5000)
    outcome = await suspend_run(engine, handle, request)
    assert outcome.details.waitpoint_id == pending.waitpoint_id
    assert (outcome.details.waitpoint_key, outcome.details.additional_waitpoints) == ("wait", ())
    assert outcome.details.waitpoint_token.reveal() == pending.hmac_token.reveal()
    after = await waitpoint(rows, pending.waitpoint_id)
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        "state": "active",
        "suspension_id": request.suspension_id,
        "activated_at": now,
        "expires_at": now + 5000,
        "required_signal_names": ["ready"],
    }
    row = await suspension(rows, handle.execution_id)
    assert (row["waitpoint_ids"], row["satisfier_ids"]) == ([pending.waitpoint_id], [])
    assert vector(await rows.execution(handle.execution_id)) == SUSPENDED
    assert (await signal(engine, handle, pending, "ready")).effect == "resume_condition_satisfied"


async def test_the_satisfiers_of_a_suspension_stay_readable_by_its_id(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    await signal(engine, handle, pending, "ready")
    request = using(pending)
    assert isinstance(await engine.suspend(handle, request), AlreadySatisfied)
    seen = await engine.observe_signals(handle)
    assert [(each.signal_name, each.satisfier) for each in seen] == [("ready", True)]
    await suspend_run(engine, handle)
    assert await engine.observe_signals(handle) == []
    assert await engine.observe_signals(handle, suspension_id=request.suspension_id) == seen


async def test_without_a_timeout_an_activated_waitpoint_does_not_expire(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    await suspend_run(engine, handle, using(pending))
    assert (await waitpoint(rows, pending.waitpoint_id))["expires_at"] is None


async def test_a_satisfied_condition_keeps_the_lease(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    await signal(engine, handle, pending, "other")
    accepted = await signal(engine, handle, pending, "ready")
    assert accepted.effect == "buffered_for_pending_waitpoint"
    now = await clock.advance(seconds=1)
    execution = await rows.execution(handle.execution_id)
    events = await event_texts(rows, handle.execution_id)
    request = using(pending)
    outcome = await engine.suspend(handle, request)
    assert isinstance(outcome, AlreadySatisfied)
    assert outcome.details is not None
    assert (outcome.details.suspension_id, outcome.details.waitpoint_id) == (
        request.suspension_id,
        pending.waitpoint_id,
    )
    assert outcome.details.waitpoint_token == pending.hmac_token
    assert outcome.reason == "resume_condition_satisfied"
    assert await rows.execution(handle.execution_id) == {**execution, "suspension_id": request.suspension_id}
    assert (vector(execution), await event_texts(rows, handle.execution_id)) == (ACTIVE, events)
    assert await rows.of("attempt") == []
    row = await waitpoint(rows, pending.waitpoint_id)
    assert (row["state"], row["close_reason"]) == ("closed", "resumed")
    assert (row["satisfied_at"], row["closed_at"], row["activated_at"]) == (now, now, None)
    assert (row["signal_count"], row["matched_signal_count"]) == (2, 1)
    wait = await suspension(rows, handle.execution_id)
    assert (wait["satisfied_at"], wait["closed_at"], wait["close_reason"]) == (now, now, "resumed")
    assert wait["satisfier_ids"] == [accepted.signal_id]
    await engine.renew(handle)
    observed = await engine.observe_signals(handle)
    assert [(each.signal_name, each.satisfier) for each in observed] == [("other", False), ("ready", True)]
    assert await engine.find_inconsistencies() == []
    await engine.complete(handle)


async def test_a_run_may_suspend_again_after_a_satisfied_suspend(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    await signal(engine, handle, pending, "ready")
    assert isinstance(await engine.suspend(handle, using(pending)), AlreadySatisfied)
    outcome = await suspend_run(engine, handle)
    row = await suspension(rows, handle.execution_id)
    assert (row["suspension_id"], row["closed_at"]) == (outcome.details.suspension_id, None)
    assert (row["satisfier_ids"], row["satisfied_at"], row["last_signal_at"]) == ([], None, None)


async def test_buffered_signals_count_towards_a_composite(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    await signal(engine, handle, pending, "noise")
    first = await signal(engine, handle, pending, "vote", "ann")
    await signal(engine, handle, pending, "vote", "ann")
    signalled_at = await clock.now()
    await clock.advance(seconds=1)
    outcome = await suspend_run(engine, handle, using(pending, resume_condition=votes(2)))
    wait = await suspension(rows, handle.execution_id)
    assert (wait["satisfier_ids"], wait["last_signal_at"]) == ([first.signal_id], signalled_at)
    row = await waitpoint(rows, pending.waitpoint_id)
    assert (row["state"], row["signal_count"], row["matched_signal_count"]) == ("active", 3, 2)
    again = await signal(engine, handle, pending, "vote", "ann")
    assert again.disposition == "appended_to_waitpoint_duplicate"
    last = await signal(engine, handle, pending, "vote", "bob")
    assert last.effect == "resume_condition_satisfied"
    assert (await suspension(rows, handle.execution_id))["satisfier_ids"] == [first.signal_id, last.signal_id]
    observed = [each.signal_name for each in await engine.observe_signals(outcome.handle)]
    assert observed == ["noise", "vote", "vote", "vote", "vote"]


async def test_buffered_signals_may_satisfy_a_composite(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    for name, source in (("vote", "ann"), ("go", ""), ("vote", "bob")):
        await signal(engine, handle, pending, name, source)
    condition = AllOf((votes(2), Single(waitpoint_key="wait", matcher=ByName("go"))))
    assert isinstance(await engine.suspend(handle, using(pending, resume_condition=condition)), AlreadySatisfied)


async def test_a_satisfied_suspend_by_triple_keeps_the_lease(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    await signal(engine, handle, pending, "ready")
    outcome = await engine.suspend_by_triple(
        execution_id=handle.execution_id,
        lease_id=handle.lease_id,
        lease_epoch=handle.lease_epoch,
        attempt_id=handle.attempt_id,
        args=using(pending),
    )
    assert isinstance(outcome, AlreadySatisfied)
    await engine.complete(handle)


async def test_buffered_signals_do_not_count_for_a_fresh_waitpoint(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    await signal(engine, handle, pending, "ready")
    outcome = await suspend_run(engine, handle, suspension_id=uuid4())
    assert outcome.details.waitpoint_id != pending.waitpoint_id


async def test_a_pending_waitpoint_may_be_passed_as_plain_values(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    plain = {"UsePending": {"waitpoint_id": str(pending.waitpoint_id)}}
    request = suspend_args(waitpoints=[plain], resume_condition="OperatorOnly", suspension_id=str(uuid4()))
    assert request.waitpoints == (UsePending(waitpoint_id=pending.waitpoint_id),)
    await suspend_run(engine, handle, request)
    assert (await waitpoint(rows, pending.waitpoint_id))["required_signal_names"] == ["__operator_only__"]


def of_keys(n: int, *keys: str) -> Count:
    return Count(n=n, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints=keys)


MISSING = "referenced_waitpoint_key_missing_binding: "
EXTRA = "extra_binding_not_referenced_by_condition: "
UNBOUND: list[tuple[Condition, str]] = [
    (Single(waitpoint_key="a"), f"{MISSING}a"),
    (all_of_waitpoints(("wait", "a")), f"{MISSING}a"),
    (all_of_waitpoints(("b", "wait", "a")), f"{MISSING}b"),
    (of_keys(1, "wait", "a"), f"{MISSING}a"),
    (of_keys(1, "a"), f"{MISSING}a"),
    (AllOf((Single(waitpoint_key="wait"), AllOf((of_keys(2, "wait", "c"),)))), f"{MISSING}c"),
    (AllOf((OperatorOnly(),)), f"{EXTRA}wait"),
]


async def test_keys_that_a_pending_waitpoint_does_not_bind_are_refused(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        handle = await given.claimed()
        pending = await ahead(engine, handle)
        # The buffered signal could satisfy some of the conditions.
        await signal(engine, handle, pending, "ready")
        async with rows.unchanged():
            for condition, detail in UNBOUND:
                with subtests.test(f"{form}: {condition}"):
                    request = using(pending, resume_condition=condition, idempotency_key="once")
                    refusal = await refused(suspend(engine, handle, request), "invalid_input")
                    assert str(refusal.detail).startswith(detail)
        assert isinstance(await suspend(engine, handle, using(pending)), AlreadySatisfied)


async def test_a_pending_waitpoint_must_be_the_only_one(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    binding = UsePending(waitpoint_id=pending.waitpoint_id)
    cases: list[tuple[tuple[Any, ...], Condition, str]] = [
        ((fresh("a"), binding), all_of_waitpoints(("a", "wait")), "additional_waitpoint_binding_must_be_fresh"),
        ((binding, fresh("a")), all_of_waitpoints(("a", "wait")), f"{MISSING}wait"),
        ((binding, fresh("a")), all_of_waitpoints(("a", "b")), f"{MISSING}b"),
        ((binding, fresh("a")), Single(waitpoint_key="a"), EXTRA),
    ]
    async with rows.unchanged():
        for bindings, condition, detail in cases:
            for suspend in FORMS.values():
                request = suspend_args(waitpoints=bindings, resume_condition=condition)
                await refused(suspend(engine, handle, request), "invalid_input", detail)
    await engine.renew(handle)


async def test_a_pending_waitpoint_may_wait_for_an_operator_or_a_timeout_only(engine: Engine, given: Given) -> None:
    for condition, others in ((OperatorOnly(), {}), (TimeoutOnly(), {"timeout_at": 2**50})):
        handle = await given.claimed()
        pending = await ahead(engine, handle)
        await suspend_run(engine, handle, using(pending, resume_condition=condition, **others))


async def test_the_state_of_a_pending_waitpoint_is_checked_before_its_key(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    pending = await ahead(engine, handle)
    await engine.close_waitpoint(execution_id=handle.execution_id, waitpoint_id=pending.waitpoint_id)
    request = using(pending, resume_condition=Single(waitpoint_key="a"))
    await refused(engine.suspend(handle, request), "waitpoint_not_pending")

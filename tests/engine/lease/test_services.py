"""The service forms: end and renew a run for a caller that holds its fence."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

from engine.cases import Cases, in_turn
from engine.state import (
    ACTIVE,
    BACKING_OFF,
    COMPLETED,
    EXPIRED_LEASE,
    FAILED,
    attempts,
    claim,
    event_texts,
    lease_fields,
    refused,
    revoke,
    vector,
)
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import ContentionError, InvalidInputError, NotFoundError, StateError
from flowfabric.model.handle import Handle
from flowfabric.model.lease import Completed, Renewed, RetryScheduled, TerminalFailed
from flowfabric.model.policy import ExecutionPolicy, FixedBackoff, RetryPolicy
from flowfabric.model.states import PublicState

RETRYING = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1000}}}

Service = Callable[..., Awaitable[object]]

SERVICES: dict[str, Service] = {
    "complete_execution": lambda engine, **args: engine.complete_execution(**args),
    "fail_execution": lambda engine, **args: engine.fail_execution(**{"failure_reason": "x", **args}),
    "renew_lease": lambda engine, **args: engine.renew_lease(**{"attempt_index": 0, "lease_ttl_ms": 5000, **args}),
}

each_service = in_turn("operation", SERVICES)
each_ending = in_turn("operation", ["complete_execution", "fail_execution"])


def fence(handle: Handle, **changes: Any) -> dict[str, Any]:
    """The execution and the fence of a handle as arguments, some of them changed."""
    given = {
        "execution_id": handle.execution_id,
        "lease_id": handle.lease_id,
        "lease_epoch": handle.lease_epoch,
        "attempt_id": handle.attempt_id,
    }
    return {**given, **changes}


# With a valid fence.


async def test_complete_execution_ends_a_run_like_complete(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    began = await clock.now()
    claimed = await given.run(tags={"ff.instance_id": "i-1"})
    now = await clock.advance(seconds=1)
    done = await engine.complete_execution(
        **fence(claimed.handle), attempt_index=0, payload=b"\x00done", result_encoding="raw"
    )
    assert done == Completed(execution_id=claimed.execution_id, public_state=PublicState.COMPLETED)
    row = await rows.execution(claimed.execution_id)
    assert (vector(row), lease_fields(row)) == (COMPLETED, {})
    assert {row[stamp] for stamp in ("completed_at", "last_transition_at", "last_mutation_at")} == {now}
    assert (row["lease_epoch"], row["attempt_id"]) == (1, claimed.attempt_id)
    (attempt,) = await attempts(rows, claimed.execution_id)
    assert (attempt["attempt_state"], attempt["started_at"], attempt["ended_at"]) == ("ended_success", began, now)
    assert (row["result_payload"], row["result_encoding"]) == (b"\x00done", "raw")
    assert await engine.get_execution_result(claimed.execution_id) == b"\x00done"
    assert (await engine.wait_for_ending(claimed.execution_id)).result_encoding == "raw"
    assert await event_texts(rows, claimed.execution_id) == ["tag_attached", "acquired", "released completed>success"]
    handle = await given.claimed()
    await engine.complete_execution(**fence(handle))
    row = await rows.execution(handle.execution_id)
    assert (row["result_payload"], row["result_encoding"]) == (None, None)
    assert await engine.get_execution_result(handle.execution_id) is None


async def test_fail_execution_ends_an_execution_without_a_retry_left(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    now = await clock.advance(seconds=1)
    failed = await engine.fail_execution(
        **fence(handle), attempt_index=0, failure_reason="disk full", failure_category="infra_crash"
    )
    assert failed == TerminalFailed()
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["failure_reason"], row["completed_at"]) == (FAILED, "disk full", now)
    (attempt,) = await attempts(rows, handle.execution_id)
    assert (attempt["attempt_state"], attempt["failure_reason"], attempt["failure_category"]) == (
        "ended_failure",
        "disk full",
        "infra_crash",
    )
    assert await event_texts(rows, handle.execution_id) == ["acquired", "released failed_terminal>failed"]


async def test_fail_execution_schedules_a_retry_and_returns_its_attempt_index(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(policy=RETRYING)
    now = await clock.now()
    failed = await engine.fail_execution(**fence(handle), failure_reason="busy")
    assert failed == RetryScheduled(delay_until=now + 1000, next_attempt_index=1)
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["retry_count"], row["attempt_id"]) == (BACKING_OFF, 1, None)
    assert row["blocking_detail"] == f"retry backoff until {now + 1000} (attempt 0 failed: busy)"
    (attempt,) = await attempts(rows, handle.execution_id)
    assert (attempt["attempt_state"], attempt["failure_category"]) == ("ended_failure", None)
    assert await event_texts(rows, handle.execution_id) == ["acquired", "released failed_retry_scheduled"]
    await clock.advance(seconds=1)
    (again,) = await claim(engine)
    assert again.attempt_index == 1
    assert await engine.fail_execution(**fence(again.handle), failure_reason="busy") == TerminalFailed()


async def test_the_retry_policy_of_the_call_overrides_the_stored_one(
    engine: Engine, given: Given, clock: Clock
) -> None:
    now = await clock.now()
    for category in ("permanent", "cancelled"):
        handle = await given.claimed(policy=RETRYING)
        call = engine.fail_execution(**fence(handle), failure_reason="x", failure_category=category)
        assert await call == TerminalFailed(), category
    empty: tuple[Any, ...] = (None, "", b"")
    for none in empty:
        handle = await given.claimed(policy=RETRYING)
        call = engine.fail_execution(**fence(handle), failure_reason="x", retry_policy_json=none)
        assert await call == RetryScheduled(delay_until=now + 1000, next_attempt_index=1), none
    text = '{"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 7}, "retryable_categories": ["odd"]}'
    for given_policy in (text, text.encode(), RetryPolicy(max_retries=5, backoff=FixedBackoff(delay_ms=7))):
        handle = await given.claimed()
        call = engine.fail_execution(
            **fence(handle), failure_reason="x", failure_category="odd", retry_policy_json=given_policy
        )
        assert await call == RetryScheduled(delay_until=now + 7, next_attempt_index=1)
    handle = await given.claimed(policy=RETRYING)
    call = engine.fail_execution(**fence(handle), failure_reason="x", retry_policy_json=text)
    assert await call == TerminalFailed()
    handle = await given.claimed(policy=RETRYING)
    call = engine.fail_execution(**fence(handle), failure_reason="x", retry_policy_json='{"max_retries": 0}')
    assert await call == TerminalFailed()


@in_turn("policy", ['{"a": "é", "b": [1]}', b'{"a": "\xc3\xa9", "b": [1]}', {"a": "é", "b": [1]}])
async def test_the_next_attempt_has_the_policy_given_for_it(
    engine: Engine, given: Given, rows: Rows, clock: Clock, policy: Any
) -> None:
    handle = await given.claimed(policy=RETRYING)
    await engine.fail_execution(**fence(handle), failure_reason="x", next_attempt_policy_json=policy)
    stored = '{"a": "é", "b": [1]}'

    async def shown() -> list[Any]:
        return [attempt.policy for attempt in await engine.list_attempts(handle.execution_id)]

    assert await shown() == [None]
    await clock.advance(seconds=1)
    (again,) = await claim(engine)
    assert await shown() == [None, stored]
    await engine.delay(again.handle, 0)
    assert await shown() == [None, stored]
    (last,) = await claim(engine)
    assert await shown() == [None, stored]
    await engine.complete(last.handle)
    assert await shown() == [None, stored]


async def test_the_policy_of_an_attempt_does_not_apply_to_later_ones(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    policy = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 1000}}}
    handle = await given.claimed(policy=policy)
    await engine.fail_execution(
        **fence(handle), failure_reason="x", next_attempt_policy_json=ExecutionPolicy(max_replay_count=3)
    )
    await clock.advance(seconds=1)
    (second,) = await claim(engine)
    await engine.fail(second.handle, reason="x")
    await clock.advance(seconds=1)
    (third,) = await claim(engine)
    await engine.complete(third.handle)
    policies = [attempt["policy"] for attempt in await attempts(rows, handle.execution_id)]
    assert policies == [None, '{"max_replay_count": 3}', None]


async def test_a_policy_for_the_next_attempt_is_dropped_if_there_is_none(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    await engine.fail_execution(**fence(handle), failure_reason="x", next_attempt_policy_json='{"a": 1}')
    assert await rows.of("attempt") == []
    (attempt,) = await engine.list_attempts(handle.execution_id)
    assert (attempt.attempt_state, attempt.policy) == ("ended_failure", None)


async def test_a_failure_is_never_refused_for_its_message(engine: Engine, given: Given, rows: Rows) -> None:
    for text, stored in (("", ""), ("a\0b", "a\N{REPLACEMENT CHARACTER}b"), ("\ud800", "?")):
        handle = await given.claimed()
        await engine.fail_execution(**fence(handle), failure_reason=text, failure_category=text)
        (attempt,) = await attempts(rows, handle.execution_id)
        assert (attempt["failure_reason"], attempt["failure_category"]) == (stored, stored or None)


async def test_renew_lease_extends_a_lease_by_the_given_duration(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed(lease_ttl_ms=1000)
    before = await rows.execution(handle.execution_id)
    now = await clock.advance(ms=999)
    renewed = await engine.renew_lease(**fence(handle), attempt_index=0, lease_ttl_ms=70_000)
    assert renewed == Renewed(expires_at_ms=now + 70_000, lease_epoch=1)
    row = await rows.execution(handle.execution_id)
    changed = {name: row[name] for name in row if row[name] != before[name]}
    assert changed == {
        "lease_expires_at": now + 70_000,
        "lease_ttl_ms": 70_000,
        "lease_renewed_at": now,
        "last_mutation_at": now,
    }
    assert await event_texts(rows, handle.execution_id) == ["acquired", "renewed"]
    await clock.advance(seconds=60)
    await engine.complete(handle)


async def test_a_resumed_run_needs_the_fence_of_its_new_lease(engine: Engine, given: Given, rows: Rows) -> None:
    for operation in SERVICES:
        handle = await given.claimed()
        await engine.delay(handle, 0)
        (again,) = await claim(engine)
        assert again.lease_id != again.attempt_id
        async with rows.unchanged():
            await refused(SERVICES[operation](engine, **fence(handle)), "stale_lease")
        ids = {"lease_id": str(again.lease_id), "attempt_id": str(again.attempt_id).upper()}
        await SERVICES[operation](engine, **fence(again.handle, **ids), attempt_index=0)


# With an absent or incomplete fence.

PARTS = [
    {"lease_id"},
    {"lease_epoch"},
    {"attempt_id"},
    {"lease_id", "lease_epoch"},
    {"lease_id", "attempt_id"},
    {"lease_epoch", "attempt_id"},
]


async def test_a_complete_fence_is_required(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    with Cases() as cases:
        async with rows.unchanged():
            for operation, call in SERVICES.items():
                is_ending = operation != "renew_lease"
                sources = ("lease_holder", "flow_cascade", "system_timeout", "me", "") if is_ending else ()
                for source in ({}, *({"source": source} for source in sources)):
                    for absent in ({}, {"lease_id": "", "attempt_id": ""}):
                        with cases((operation, source, absent)):
                            refusal = await refused(
                                call(engine, execution_id=handle.execution_id, **source, **absent),
                                "invalid_input",
                                "fence_required",
                            )
                            assert isinstance(refusal, InvalidInputError)
                for kept in PARTS:
                    part = {name: value for name, value in fence(handle).items() if name in {*kept, "execution_id"}}
                    for source in ({}, {"source": "operator_override"}) if is_ending else ({},):
                        with cases((operation, source, kept)):
                            await refused(call(engine, **part, **source), "invalid_input", "partial_fence_triple")


@each_ending
async def test_an_operator_needs_no_fence_but_a_given_fence_must_match(
    engine: Engine, given: Given, rows: Rows, operation: str
) -> None:
    for index in ({}, {"attempt_index": 0}):
        handle = await given.claimed()
        override = {"execution_id": handle.execution_id, "source": "operator_override", **index}
        await SERVICES[operation](engine, **override)
        row = await rows.execution(handle.execution_id)
        assert vector(row) == (COMPLETED if operation == "complete_execution" else FAILED)
        (attempt,) = await attempts(rows, handle.execution_id)
        assert (attempt["lease_id"], attempt["lease_epoch"]) == (handle.lease_id, 1)
    handle = await given.claimed()
    async with rows.unchanged():
        wrong = fence(handle, lease_epoch=2, source="operator_override")
        await refused(SERVICES[operation](engine, **wrong), "stale_lease")
    await SERVICES[operation](engine, **fence(handle, source="operator_override"))


@each_ending
async def test_an_operator_cannot_end_an_inactive_revoked_or_expired_run(
    engine: Engine, given: Given, rows: Rows, clock: Clock, operation: str
) -> None:
    waiting = await given.created(lane_id="elsewhere")
    ended = await given.completed()
    revoked, expired = await given.claimed(lease_ttl_ms=1000), await given.claimed(lease_ttl_ms=1000)
    parked = await given.claimed()
    await engine.delay(parked, await clock.now() + 60_000)
    await revoke(engine, revoked.execution_id)
    now = await clock.advance(seconds=1)

    def call(execution_id: str) -> Awaitable[object]:
        return SERVICES[operation](engine, execution_id=execution_id, source="operator_override", attempt_index=7)

    async with rows.unchanged():
        refusal = await refused(call(waiting), "execution_not_active")
        assert refusal.detail == {
            "terminal_outcome": "none",
            "lease_epoch": "0",
            "lifecycle_phase": "runnable",
            "attempt_id": "",
        }
        assert (await refused(call(ended), "execution_not_active")).detail["terminal_outcome"] == "success"  # type: ignore[index]
        await refused(call(parked.execution_id), "execution_not_active")
        await refused(call(revoked.execution_id), "lease_revoked")
    await refused(call(expired.execution_id), "lease_expired")
    row = await rows.execution(expired.execution_id)
    assert (vector(row), row["lease_expired_at"]) == (EXPIRED_LEASE, now)


# With a fence that does not match, in the order of the checks.


async def test_each_part_of_the_fence_must_match(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    wrong: list[dict[str, Any]] = [
        {"lease_epoch": 0},
        {"lease_epoch": 2},
        {"lease_epoch": 2**63 - 1},
        {"lease_id": uuid4()},
        {"lease_id": UUID(int=0)},
        {"attempt_id": uuid4()},
        {"lease_id": (other := uuid4()), "attempt_id": other},
        {"attempt_index": 1},
        {"attempt_index": 2**31 - 1},
    ]
    absent = f"{{fp:1}}:{uuid_of(handle.execution_id)}"
    with Cases() as cases:
        async with rows.unchanged():
            for operation, call in SERVICES.items():
                for changes in wrong:
                    with cases((operation, changes)):
                        refusal = await refused(call(engine, **fence(handle, **changes)), "stale_lease")
                        assert isinstance(refusal, StateError)
                with cases((operation, "absent")):
                    refusal = await refused(call(engine, **fence(handle, execution_id=absent)), "execution_not_found")
                    assert isinstance(refusal, NotFoundError)


async def test_the_epoch_is_checked_before_the_phase_and_the_phase_before_the_ids(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    await engine.complete(handle)
    with Cases() as cases:
        async with rows.unchanged():
            for operation, call in SERVICES.items():
                with cases((operation, "epoch")):
                    await refused(call(engine, **fence(handle, lease_epoch=2)), "stale_lease")
                for changes in ({}, {"lease_id": uuid4()}, {"attempt_id": uuid4()}, {"attempt_index": 5}):
                    with cases((operation, changes)):
                        refusal = await refused(call(engine, **fence(handle, **changes)), "execution_not_active")
                        assert isinstance(refusal, ContentionError)
                        assert refusal.detail == {
                            "terminal_outcome": "success",
                            "lease_epoch": "1",
                            "lifecycle_phase": "terminal",
                            "attempt_id": str(handle.attempt_id),
                        }


@each_service
async def test_revocation_is_checked_before_expiry_and_expiry_before_the_ids(
    engine: Engine, given: Given, rows: Rows, clock: Clock, operation: str
) -> None:
    revoked, expired = await given.claimed(lease_ttl_ms=1000), await given.claimed(lease_ttl_ms=1000)
    await revoke(engine, revoked.execution_id)
    now = await clock.advance(seconds=1)
    async with rows.unchanged():
        for changes in ({}, {"lease_id": uuid4()}, {"attempt_index": 5}):
            await refused(SERVICES[operation](engine, **fence(revoked, **changes)), "lease_revoked")
    call = SERVICES[operation](engine, **fence(expired, lease_id=uuid4(), attempt_index=5))
    await refused(call, "lease_expired")
    row = await rows.execution(expired.execution_id)
    assert (vector(row), row["lease_expired_at"]) == (EXPIRED_LEASE, now)
    assert await event_texts(rows, expired.execution_id) == ["acquired", "expired"]
    async with rows.unchanged():
        await refused(SERVICES[operation](engine, **fence(expired)), "lease_expired")


@each_service
async def test_a_lease_expires_exactly_at_its_expiry(
    engine: Engine, given: Given, clock: Clock, operation: str
) -> None:
    kept, lost = await given.claimed(lease_ttl_ms=1000), await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=999)
    await SERVICES[operation](engine, **fence(kept))
    await clock.advance(ms=1)
    await refused(SERVICES[operation](engine, **fence(lost)), "lease_expired")


async def test_arguments_out_of_range_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    beyond = f"{{fp:32768}}:{uuid_of(handle.execution_id)}"
    wrong: list[dict[str, Any]] = [
        {"execution_id": "nonsense"},
        {"execution_id": None},
        {"execution_id": beyond},
        {"lease_id": "nonsense"},
        {"attempt_id": 7},
        {"lease_epoch": -1},
        {"lease_epoch": 2**63},
        {"lease_epoch": "1"},
        {"lease_epoch": True},
        {"attempt_index": -1},
        {"attempt_index": 2**31},
        {"attempt_index": "0"},
    ]
    own: dict[str, list[dict[str, Any]]] = {
        "complete_execution": [{"source": 7}, {"payload": "text"}, {"result_encoding": 7}, {"result_encoding": "a\0b"}],
        "fail_execution": [],
        "renew_lease": [
            {"lease_ttl_ms": 0},
            {"lease_ttl_ms": 2**32},
            {"lease_history_grace_ms": -1},
            {"attempt_index": None},
        ],
    }
    with Cases() as cases:
        async with rows.unchanged():
            for operation, call in SERVICES.items():
                for changes in (*wrong, *own[operation]):
                    with cases((operation, changes)):
                        await refused(call(engine, **fence(handle, **changes)), "invalid_input")


async def test_unreadable_policies_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed(policy=RETRYING)
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"retry_policy_json": "{"}, "invalid_policy_json", "malformed"),
        ({"retry_policy_json": "[]"}, "invalid_policy_json", "retry_policy"),
        ({"retry_policy_json": '{"max_retries": -1}'}, "invalid_policy_json", "max_retries"),
        ({"next_attempt_policy_json": "{"}, "invalid_policy_json", "malformed"),
        ({"next_attempt_policy_json": "[]"}, "invalid_policy_json", "not_object"),
        ({"next_attempt_policy_json": b"\xff"}, "invalid_policy_json", "malformed"),
        ({"next_attempt_policy_json": {"a": object()}}, "invalid_policy_json", "malformed"),
        ({"next_attempt_policy_json": '{"a": "\\u0000"}'}, "invalid_policy_json", "NUL"),
    ]
    async with rows.unchanged():
        for changes, code, detail in wrong:
            await refused(engine.fail_execution(**fence(handle), failure_reason="x", **changes), code, detail)
    assert vector(await rows.execution(handle.execution_id)) == ACTIVE


# Repeated.


async def test_a_repeated_call_is_refused_with_the_state_it_found(engine: Engine, given: Given, rows: Rows) -> None:
    completed, failed, retried = await given.claimed(), await given.claimed(), await given.claimed(policy=RETRYING)
    await engine.complete_execution(**fence(completed))
    await engine.fail_execution(**fence(failed), failure_reason="x")
    await engine.fail_execution(**fence(retried), failure_reason="x")
    expected = {
        completed: ("success", "terminal", str(completed.attempt_id)),
        failed: ("failed", "terminal", str(failed.attempt_id)),
        retried: ("none", "runnable", ""),
    }
    async with rows.unchanged():
        for handle, (outcome, phase, attempt_id) in expected.items():
            for operation in SERVICES.values():
                refusal = await refused(operation(engine, **fence(handle)), "execution_not_active")
                assert refusal.detail == {
                    "terminal_outcome": outcome,
                    "lease_epoch": "1",
                    "lifecycle_phase": phase,
                    "attempt_id": attempt_id,
                }
                assert not refusal.retryable
        # The worker itself may have lost the reply: it gets the first answer again.
        await engine.complete(completed)
        assert await engine.fail(failed, reason="x") == TerminalFailed()
        assert isinstance(await engine.fail(retried, reason="x"), RetryScheduled)

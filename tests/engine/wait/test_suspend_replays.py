"""Suspending twice under one idempotency key: one suspension, one answer."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from engine.state import claim, refused, vector
from engine.waits import SUSPENDED, args, on_all, suspend_keys, suspended, triple, using
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import LeaseId
from flowfabric.model.lease import AlreadySatisfied
from flowfabric.model.signal import Accepted, SignalDuplicate
from flowfabric.model.states import HandleKind
from flowfabric.model.suspension import Suspended

MINUTE = 60_000
WEEK = 604_800_000


async def test_a_repeat_gets_the_first_answer_and_changes_nothing(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    handle = await given.claimed()
    first = await suspended(engine, handle, on_all("a", "b", "c", idempotency_key="once"))
    await clock.advance(seconds=1)
    async with rows.unchanged():
        # The caller's old handle works, and what else it asks for is not looked at.
        again = await engine.suspend(handle, args(idempotency_key="once"))
        by_triple = await engine.suspend_by_triple(**triple(handle), args=args(idempotency_key="once"))
        without = await engine.suspend_by_triple(execution_id=handle.execution_id, args=args(idempotency_key="once"))
    assert again == by_triple == without == first
    assert isinstance(again, Suspended)
    assert again.handle.opaque == first.handle.opaque
    assert revealed(again) == revealed(first)
    assert len(set(revealed(again))) == 3


def revealed(outcome: Suspended) -> list[str]:
    """The tokens of an outcome as their texts."""
    others = [each.waitpoint_token.reveal() for each in outcome.details.additional_waitpoints]
    return [outcome.details.waitpoint_token.reveal(), *others]


async def test_the_stored_answer_has_its_form(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    first = await suspended(engine, handle, on_all("a", "b", idempotency_key="once"))
    (row,) = await suspend_keys(rows)
    details, (extra,) = first.details, first.details.additional_waitpoints
    assert msgspec.json.decode(row["outcome"]) == {
        "variant": "Suspended",
        "details": {
            "suspension_id": str(details.suspension_id),
            "waitpoint_id": str(details.waitpoint_id),
            "waitpoint_key": "a",
            "token": details.waitpoint_token.reveal(),
            "extras": [
                {
                    "waitpoint_id": str(extra.waitpoint_id),
                    "waitpoint_key": "b",
                    "token": extra.waitpoint_token.reveal(),
                }
            ],
        },
        "handle_opaque_hex": handle.opaque.hex(),
    }


async def test_a_suspended_handle_is_refused_though_the_key_is_known(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    first = await suspended(engine, handle, idempotency_key="once")
    async with rows.unchanged():
        await refused(engine.suspend(first.handle, args(idempotency_key="once")), "already_suspended")
        await refused(engine.suspend(handle, args(idempotency_key="once", waitpoints=())), "invalid_input")
        await refused(engine.suspend(handle, args(idempotency_key="once", timeout_at=0)), "invalid_input")


async def test_a_key_is_of_one_execution(engine: Engine, given: Any, rows: Any) -> None:
    one, other = await given.claimed(), await given.claimed()
    assert one.execution_id[:-36] == other.execution_id[:-36]
    first = await suspended(engine, one, idempotency_key="once")
    second = await suspended(engine, other, idempotency_key="once")
    assert first.details.waitpoint_token != second.details.waitpoint_token
    assert vector(await rows.execution(other.execution_id)) == SUSPENDED


async def test_a_key_is_of_one_operation(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed(idempotency_key="once")
    first = await suspended(engine, handle, idempotency_key="once")
    signal = {
        "execution_id": handle.execution_id,
        "waitpoint_id": first.details.waitpoint_id,
        "waitpoint_token": first.details.waitpoint_token,
        "signal_name": "other",
        "idempotency_key": "once",
    }
    sent = await engine.deliver_signal(**signal)
    assert isinstance(sent, Accepted)
    assert await engine.deliver_signal(**signal) == SignalDuplicate(existing_signal_id=sent.signal_id)
    assert await engine.suspend(handle, args(idempotency_key="once")) == first
    found = {row["operation"]: (row["scope"], row["subject_id"]) for row in await rows.of("idempotency_key")}
    execution, waitpoint = UUID(handle.execution_id[-36:]), first.details.waitpoint_id
    assert (found["suspend"], found["signal"]) == ((execution, execution), (waitpoint, sent.signal_id))
    assert found["submit"][1] == execution


async def test_another_key_and_no_key_are_no_repeats(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    await suspended(engine, handle, idempotency_key="once")
    async with rows.unchanged():
        for key in ("other", "", None):
            await refused(engine.suspend(handle, args(idempotency_key=key)), "lease_conflict")
    plain = await given.claimed()
    await suspended(engine, plain, idempotency_key="")
    assert len(await suspend_keys(rows)) == 1


@pytest.mark.parametrize(
    ("timeout_ms", "kept_ms"),
    [(None, WEEK), (1000, 1000 + MINUTE), (-1000, MINUTE), (0, MINUTE), (WEEK, WEEK), (WEEK - MINUTE, WEEK)],
)
async def test_an_answer_is_kept_a_minute_longer_than_the_wait(
    engine: Engine, given: Any, rows: Any, clock: Any, timeout_ms: int | None, kept_ms: int
) -> None:
    handle = await given.claimed(lease_ttl_ms=86_400_000)
    now = await clock.now()
    timeout_at = None if timeout_ms is None else now + timeout_ms
    first = await suspended(engine, handle, idempotency_key="once", timeout_at=timeout_at)
    (row,) = await suspend_keys(rows)
    assert row["expires_at"] == now + kept_ms
    await clock.advance(ms=kept_ms - 1)
    assert await engine.suspend(handle, args(idempotency_key="once")) == first
    await clock.advance(ms=1)
    async with rows.unchanged():
        await refused(engine.suspend(handle, args(idempotency_key="once")), "lease_conflict")


async def test_the_deadline_of_the_policy_counts_for_how_long_an_answer_is_kept(
    engine: Engine, given: Any, rows: Any, clock: Any
) -> None:
    handle = await given.claimed(policy={"suspension_policy": {"default_timeout_ms": 5000}})
    now = await clock.now()
    await suspended(engine, handle, idempotency_key="once")
    (row,) = await suspend_keys(rows)
    assert row["expires_at"] == now + 5000 + MINUTE


async def test_a_key_past_its_time_serves_again(engine: Engine, given: Any, rows: Any, clock: Any) -> None:
    handle = await given.claimed()
    first = await suspended(engine, handle, idempotency_key="once", timeout_at=await clock.now())
    await engine.resume_execution(execution_id=handle.execution_id)
    await clock.advance(ms=MINUTE)
    (again,) = await claim(engine)
    second = await suspended(engine, again.handle, idempotency_key="once")
    assert second.details.suspension_id != first.details.suspension_id
    assert await engine.suspend(handle, args(idempotency_key="once")) == second
    assert len(await suspend_keys(rows)) == 1


async def test_a_live_key_answers_for_the_next_run_too(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    first = await suspended(engine, handle, idempotency_key="once")
    await engine.resume_execution(execution_id=handle.execution_id)
    (again,) = await claim(engine)
    async with rows.unchanged():
        assert await engine.suspend(again.handle, args(idempotency_key="once")) == first


@pytest.mark.parametrize(
    "stored",
    [
        "{}",
        "[]",
        '"Suspended"',
        '{"variant": "Suspended", "details": {}, "handle_opaque_hex": ""}',
        '{"variant": "Sleeping", "details": null, "handle_opaque_hex": null}',
    ],
)
async def test_an_answer_that_cannot_be_read_is_none(
    engine: Engine, given: Any, rows: Any, connection: Any, stored: str
) -> None:
    handle = await given.claimed()
    await suspended(engine, handle, idempotency_key="once")
    await connection.execute("update idempotency_key set outcome = $1", stored)
    async with rows.unchanged():
        await refused(engine.suspend(handle, args(idempotency_key="once")), "lease_conflict")
    await engine.resume_execution(execution_id=handle.execution_id)
    (again,) = await claim(engine)
    second = await suspended(engine, again.handle, idempotency_key="once")
    assert await engine.suspend(handle, args(idempotency_key="once")) == second


@pytest.mark.parametrize("field", ["variant", "token", "suspension_id", "handle_opaque_hex"])
async def test_an_answer_with_a_wrong_part_is_none(
    engine: Engine, given: Any, rows: Any, connection: Any, field: str
) -> None:
    handle = await given.claimed()
    await suspended(engine, handle, idempotency_key="once")
    path = [field] if field in ("variant", "handle_opaque_hex") else ["details", field]
    wrong = "7" if field == "token" else '"zz"'
    await connection.execute("update idempotency_key set outcome = jsonb_set(outcome, $1, $2)", path, wrong)
    async with rows.unchanged():
        await refused(engine.suspend(handle, args(idempotency_key="once")), "lease_conflict")


async def test_a_wait_that_was_over_is_answered_the_same_again(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    pending = await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=MINUTE)
    await engine.deliver_signal(
        execution_id=handle.execution_id,
        waitpoint_id=pending.waitpoint_id,
        waitpoint_token=pending.hmac_token,
        signal_name="ready",
    )
    first = await engine.suspend(handle, using(pending, idempotency_key="once"))
    assert isinstance(first, AlreadySatisfied)
    async with rows.unchanged():
        again = await engine.suspend(handle, using(pending, idempotency_key="once"))
    assert again == first
    (row,) = await suspend_keys(rows)
    assert msgspec.json.decode(row["outcome"])["variant"] == "AlreadySatisfied"
    assert msgspec.json.decode(row["outcome"])["handle_opaque_hex"] is None


async def test_two_at_once_make_one_suspension(engine: Engine, engines: Any, given: Any, rows: Any) -> None:
    other = await engines()
    for _ in range(20):
        handle: Handle = await given.claimed()
        both = [each.suspend(handle, args(idempotency_key="once")) for each in (engine, other)]
        one, two = await asyncio.gather(*both)
        assert one == two
        assert isinstance(one, Suspended)
        assert one.handle.kind is HandleKind.SUSPENDED
        assert len(await rows.of("waitpoint", execution_id=handle.execution_id[-36:])) == 1


async def test_two_at_once_without_a_key_give_one_suspension(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    both = await asyncio.gather(*(engine.suspend(handle, args()) for _ in range(2)), return_exceptions=True)
    (refusal,) = [each for each in both if isinstance(each, EngineError)]
    assert refusal.code == "lease_conflict"
    assert len(await rows.of("waitpoint")) == 1


async def test_a_refused_suspend_keeps_no_answer(engine: Engine, given: Any, rows: Any) -> None:
    handle = await given.claimed()
    stranger = msgspec.structs.replace(handle, lease_id=LeaseId(uuid4()))
    async with rows.unchanged():
        await refused(engine.suspend(stranger, args(idempotency_key="once")), "lease_conflict")
    await suspended(engine, handle, idempotency_key="once")

"""Suspends with an idempotency key: a repeat returns the first outcome and changes nothing."""

import asyncio
import os
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest

from engine.state import claim, refused, vector
from engine.waits import SUSPENDED, on_all, suspend_args, suspend_keys, suspend_run, triple, using
from fixtures import Clock, Engines, Given, Rows, uuid_of
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


async def test_a_repeat_returns_the_first_outcome_and_changes_nothing(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    first = await suspend_run(engine, handle, on_all("a", "b", "c", idempotency_key="once"))
    await clock.advance(seconds=1)
    async with rows.unchanged():
        # The old handle is accepted, and the other arguments are ignored.
        again = await engine.suspend(handle, suspend_args(idempotency_key="once"))
        by_triple = await engine.suspend_by_triple(**triple(handle), args=suspend_args(idempotency_key="once"))
        without = await engine.suspend_by_triple(
            execution_id=handle.execution_id, args=suspend_args(idempotency_key="once")
        )
    assert again == by_triple == without == first
    assert isinstance(again, Suspended)
    assert again.handle.opaque == first.handle.opaque
    assert revealed(again) == revealed(first)
    assert len(set(revealed(again))) == 3


def revealed(outcome: Suspended) -> list[str]:
    """The tokens of an outcome as text."""
    others = [each.waitpoint_token.reveal() for each in outcome.details.additional_waitpoints]
    return [outcome.details.waitpoint_token.reveal(), *others]


async def test_the_stored_outcome_has_a_fixed_form(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    first = await suspend_run(engine, handle, on_all("a", "b", idempotency_key="once"))
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


async def test_a_suspended_handle_or_wrong_arguments_are_refused_even_for_a_known_key(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    first = await suspend_run(engine, handle, idempotency_key="once")
    async with rows.unchanged():
        await refused(engine.suspend(first.handle, suspend_args(idempotency_key="once")), "already_suspended")
        await refused(engine.suspend(handle, suspend_args(idempotency_key="once", waitpoints=())), "invalid_input")
        await refused(engine.suspend(handle, suspend_args(idempotency_key="once", timeout_at=0)), "invalid_input")


async def test_a_key_belongs_to_one_execution(engine: Engine, given: Given, rows: Rows) -> None:
    one, other = await given.claimed(), await given.claimed()
    assert one.execution_id[:-36] == other.execution_id[:-36]
    first = await suspend_run(engine, one, idempotency_key="once")
    second = await suspend_run(engine, other, idempotency_key="once")
    assert first.details.waitpoint_token != second.details.waitpoint_token
    assert vector(await rows.execution(other.execution_id)) == SUSPENDED


async def test_a_key_belongs_to_one_operation(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed(idempotency_key="once")
    first = await suspend_run(engine, handle, idempotency_key="once")
    signal: dict[str, Any] = {
        "execution_id": handle.execution_id,
        "waitpoint_id": first.details.waitpoint_id,
        "waitpoint_token": first.details.waitpoint_token,
        "signal_name": "other",
        "idempotency_key": "once",
    }
    sent = await engine.deliver_signal(**signal)
    assert isinstance(sent, Accepted)
    assert await engine.deliver_signal(**signal) == SignalDuplicate(existing_signal_id=sent.signal_id)
    assert await engine.suspend(handle, suspend_args(idempotency_key="once")) == first
    found = {row["operation"]: (row["scope"], row["subject_id"]) for row in await rows.of("idempotency_key")}
    execution, waitpoint = UUID(uuid_of(handle.execution_id)), first.details.waitpoint_id
    assert (found["suspend"], found["signal"]) == ((execution, execution), (waitpoint, sent.signal_id))
    assert found["submit"][1] == execution


async def test_another_key_or_no_key_is_not_a_repeat(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    await suspend_run(engine, handle, idempotency_key="once")
    async with rows.unchanged():
        for key in ("other", "", None):
            await refused(engine.suspend(handle, suspend_args(idempotency_key=key)), "lease_conflict")
    plain = await given.claimed()
    await suspend_run(engine, plain, idempotency_key="")
    assert len(await suspend_keys(rows)) == 1


KEPT: list[tuple[int | None, dict[str, Any], int]] = [
    (None, {}, WEEK),
    (1000, {}, 1000 + MINUTE),
    (-1000, {}, MINUTE),
    (0, {}, MINUTE),
    (WEEK, {}, WEEK),
    (WEEK - MINUTE, {}, WEEK),
    (None, {"suspension_policy": {"default_timeout_ms": 5000}}, 5000 + MINUTE),
]
"""The timeout of the suspend, the policy of the execution, and how long the outcome is kept, in milliseconds."""


async def test_an_outcome_is_kept_until_a_minute_after_the_timeout(
    engine: Engine, given: Given, rows: Rows, clock: Clock, subtests: pytest.Subtests
) -> None:
    for timeout_ms, policy, kept_ms in KEPT:
        with subtests.test(f"timeout {timeout_ms}, policy {policy}"):
            handle = await given.claimed(lease_ttl_ms=86_400_000, lane_id=f"{uuid4()}", policy=policy)
            now = await clock.now()
            timeout_at = None if timeout_ms is None else now + timeout_ms
            first = await suspend_run(engine, handle, idempotency_key="once", timeout_at=timeout_at)
            (row,) = [row for row in await suspend_keys(rows) if str(row["scope"]) == uuid_of(handle.execution_id)]
            assert row["expires_at"] == now + kept_ms
            await clock.advance(ms=kept_ms - 1)
            assert await engine.suspend(handle, suspend_args(idempotency_key="once")) == first
            await clock.advance(ms=1)
            async with rows.unchanged():
                await refused(engine.suspend(handle, suspend_args(idempotency_key="once")), "lease_conflict")


async def test_an_expired_key_can_be_used_again(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed()
    first = await suspend_run(engine, handle, idempotency_key="once", timeout_at=await clock.now())
    await engine.resume_execution(execution_id=handle.execution_id)
    await clock.advance(ms=MINUTE)
    (again,) = await claim(engine)
    second = await suspend_run(engine, again.handle, idempotency_key="once")
    assert second.details.suspension_id != first.details.suspension_id
    assert await engine.suspend(handle, suspend_args(idempotency_key="once")) == second
    assert len(await suspend_keys(rows)) == 1


async def test_a_live_key_returns_its_outcome_to_the_next_run_too(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    first = await suspend_run(engine, handle, idempotency_key="once")
    await engine.resume_execution(execution_id=handle.execution_id)
    (again,) = await claim(engine)
    async with rows.unchanged():
        assert await engine.suspend(again.handle, suspend_args(idempotency_key="once")) == first


UNREADABLE = {
    "an empty object": "'{}'",
    "a list": "'[]'",
    "a text": """'"Suspended"'""",
    "no details": """'{"variant": "Suspended", "details": {}, "handle_opaque_hex": ""}'""",
    "an unknown variant": """'{"variant": "Sleeping", "details": null, "handle_opaque_hex": null}'""",
    "a wrong variant": """jsonb_set(outcome, '{variant}', '"zz"')""",
    "a wrong token": """jsonb_set(outcome, '{details,token}', '7')""",
    "a wrong suspension id": """jsonb_set(outcome, '{details,suspension_id}', '"zz"')""",
    "a wrong handle": """jsonb_set(outcome, '{handle_opaque_hex}', '"zz"')""",
}
"""Stored outcomes that cannot be read."""


async def test_an_unreadable_stored_outcome_is_ignored(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, subtests: pytest.Subtests
) -> None:
    for name, outcome in UNREADABLE.items():
        with subtests.test(name):
            handle = await given.claimed()
            await suspend_run(engine, handle, idempotency_key="once")
            await connection.execute(
                f"update idempotency_key set outcome = {outcome} where scope = $1", uuid_of(handle.execution_id)
            )
            async with rows.unchanged():
                await refused(engine.suspend(handle, suspend_args(idempotency_key="once")), "lease_conflict")
            await engine.resume_execution(execution_id=handle.execution_id)
            (again,) = await claim(engine)
            second = await suspend_run(engine, again.handle, idempotency_key="once")
            assert await engine.suspend(handle, suspend_args(idempotency_key="once")) == second


async def test_a_repeat_of_an_already_satisfied_suspend_returns_the_same(
    engine: Engine, given: Given, rows: Rows
) -> None:
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


async def test_concurrent_suspends_with_one_key_make_one_suspension(
    engine: Engine, engines: Engines, given: Given, rows: Rows
) -> None:
    other = await engines()
    for _ in range(20 if os.environ.get("FF_TEST_SWEEP") == "whole" else 5):
        handle: Handle = await given.claimed()
        both = [each.suspend(handle, suspend_args(idempotency_key="once")) for each in (engine, other)]
        one, two = await asyncio.gather(*both)
        assert one == two
        assert isinstance(one, Suspended)
        assert one.handle.kind is HandleKind.SUSPENDED
        assert len(await rows.of("waitpoint", execution_id=uuid_of(handle.execution_id))) == 1


async def test_concurrent_suspends_without_a_key_make_one_suspension(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    both = await asyncio.gather(*(engine.suspend(handle, suspend_args()) for _ in range(2)), return_exceptions=True)
    (refusal,) = [each for each in both if isinstance(each, EngineError)]
    assert refusal.code == "lease_conflict"
    assert len(await rows.of("waitpoint")) == 1


async def test_a_refused_suspend_stores_no_outcome(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    stranger = msgspec.structs.replace(handle, lease_id=LeaseId(uuid4()))
    async with rows.unchanged():
        await refused(engine.suspend(stranger, suspend_args(idempotency_key="once")), "lease_conflict")
    await suspend_run(engine, handle, idempotency_key="once")

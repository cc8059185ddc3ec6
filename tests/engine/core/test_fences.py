"""The rules every operation under a lease keeps, in the order in which they are judged."""

from typing import Any
from uuid import uuid4

import msgspec
import pytest

from engine.state import EXPIRED_LEASE, FENCED, attempts, claim, each_fenced, event_texts, refused, revoke, vector
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import ContentionError, InvalidInputError, NotFoundError, StateError
from flowfabric.model.handle import Backend, Handle
from flowfabric.model.ids import AttemptId, ExecutionId, LeaseId
from flowfabric.model.states import HandleKind


def altered(handle: Handle, **changes: Any) -> Handle:
    """A handle that differs in some fields."""
    return msgspec.structs.replace(handle, **changes)


@each_fenced
async def test_a_lease_holds_until_its_last_millisecond(engine: Engine, given: Any, clock: Any, operation: str) -> None:
    handle = await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=999)
    await FENCED[operation](engine, handle)


@each_fenced
async def test_a_lease_is_over_exactly_at_its_expiry_and_the_refusal_marks_it(
    engine: Engine, given: Any, rows: Any, clock: Any, operation: str
) -> None:
    handle = await given.claimed(lease_ttl_ms=1000)
    now = await clock.advance(ms=1000)
    refusal = await refused(FENCED[operation](engine, handle), "lease_expired")
    assert isinstance(refusal, StateError)
    row = await rows.execution(handle.execution_id)
    assert (vector(row), row["lease_expired_at"]) == (EXPIRED_LEASE, now)
    assert row["blocking_detail"] == "lease expired, awaiting reclaim"
    assert await event_texts(rows, handle.execution_id) == ["acquired", "expired"]
    assert [row["ended_at"] for row in await attempts(rows, handle.execution_id)] == [None]
    async with rows.unchanged():
        await refused(FENCED[operation](engine, handle), "lease_expired")


@each_fenced
async def test_a_run_that_was_taken_over_is_refused_at_once(
    engine: Engine, given: Any, rows: Any, operation: str
) -> None:
    stale = await given.reclaimable()
    await claim(engine)
    async with rows.unchanged():
        refusal = await refused(FENCED[operation](engine, stale), "lease_conflict")
        assert isinstance(refusal, ContentionError)


@each_fenced
async def test_each_part_of_the_fence_counts(engine: Engine, given: Any, rows: Any, operation: str) -> None:
    handle = await given.claimed()
    wrong = [
        altered(handle, lease_epoch=0),
        altered(handle, lease_epoch=2),
        altered(handle, lease_epoch=2**63 - 1),
        altered(handle, lease_id=LeaseId(uuid4())),
        altered(handle, attempt_id=AttemptId(uuid4())),
        altered(handle, lease_id=(other := uuid4()), attempt_id=other),
    ]
    async with rows.unchanged():
        for stale in wrong:
            await refused(FENCED[operation](engine, stale), "lease_conflict")


@each_fenced
async def test_the_epoch_is_judged_before_the_phase(engine: Engine, given: Any, rows: Any, operation: str) -> None:
    ended = await given.claimed()
    await engine.complete(ended)
    async with rows.unchanged():
        await refused(FENCED[operation](engine, altered(ended, lease_epoch=2)), "lease_conflict")


@each_fenced
async def test_the_phase_is_judged_before_the_ids(engine: Engine, given: Any, rows: Any, operation: str) -> None:
    ended = await given.claimed()
    await engine.complete(ended)
    stale = altered(ended, lease_id=LeaseId(uuid4()), attempt_id=AttemptId(uuid4()))
    async with rows.unchanged():
        refusal = await refused(FENCED[operation](engine, stale), "execution_not_active")
        assert isinstance(refusal, ContentionError)
        assert not refusal.retryable
        assert refusal.detail == {
            "terminal_outcome": "success",
            "lease_epoch": "1",
            "lifecycle_phase": "terminal",
            "attempt_id": str(ended.attempt_id),
        }


@each_fenced
async def test_an_attempt_that_failed_and_waits_for_its_retry_is_not_active(
    engine: Engine, given: Any, rows: Any, operation: str
) -> None:
    failed = await given.backing_off()
    async with rows.unchanged():
        if operation == "fail":
            await refused(FENCED[operation](engine, altered(failed, attempt_index=7)), "execution_not_active")
            return
        refusal = await refused(FENCED[operation](engine, failed), "execution_not_active")
        assert refusal.detail == {
            "terminal_outcome": "none",
            "lease_epoch": "1",
            "lifecycle_phase": "runnable",
            "attempt_id": "",
        }


@each_fenced
async def test_revocation_is_judged_before_expiry_and_expiry_before_the_ids(
    engine: Engine, given: Any, rows: Any, connection: Any, clock: Any, operation: str
) -> None:
    revoked = await given.claimed(lease_ttl_ms=1000)
    lapsed = await given.claimed(lease_ttl_ms=1000)
    await revoke(connection, revoked.execution_id)
    await clock.advance(seconds=2)
    async with rows.unchanged():
        for handle in (revoked, altered(revoked, lease_id=LeaseId(uuid4()))):
            refusal = await refused(FENCED[operation](engine, handle), "lease_revoked")
            assert isinstance(refusal, StateError)
    await refused(FENCED[operation](engine, altered(lapsed, lease_id=LeaseId(uuid4()))), "lease_expired")
    assert vector(await rows.execution(lapsed.execution_id)) == EXPIRED_LEASE


@each_fenced
async def test_what_names_no_execution_is_not_found(engine: Engine, given: Any, rows: Any, operation: str) -> None:
    handle = await given.claimed()
    elsewhere = [ExecutionId(f"{{fp:1}}:{handle.execution_id[-36:]}"), ExecutionId(f"{{fp:32767}}:{uuid4()}")]
    async with rows.unchanged():
        for execution_id in elsewhere:
            absent = altered(handle, execution_id=execution_id)
            refusal = await refused(FENCED[operation](engine, absent), "execution_not_found")
            assert isinstance(refusal, NotFoundError)


@each_fenced
async def test_a_handle_that_stands_for_no_lease_of_this_store_is_refused(
    engine: Engine, given: Any, rows: Any, operation: str
) -> None:
    handle = await given.claimed()
    beyond = ExecutionId(f"{{fp:32768}}:{handle.execution_id[-36:]}")
    wrong: list[tuple[Any, str, str]] = [
        (altered(handle, kind=HandleKind.SUSPENDED), "lease_conflict", ""),
        (altered(handle, backend=Backend.VALKEY), "handle_from_other_backend", "expected=Postgres actual=Valkey"),
        (altered(handle, backend=Backend.SQLITE), "handle_from_other_backend", "expected=Postgres actual=Sqlite"),
        (altered(handle, execution_id=beyond), "invalid_input", "exceeds i16 range"),
        (handle.opaque, "invalid_input", "handle"),
        (None, "invalid_input", "handle"),
    ]
    async with rows.unchanged():
        for stale, code, detail in wrong:
            refusal = await refused(FENCED[operation](engine, stale), code, detail)
            assert isinstance(refusal, InvalidInputError | ContentionError)


@pytest.mark.parametrize("operation", ["complete", "complete_many", "fail", "cancel"])
async def test_a_run_ends_once(engine: Engine, given: Any, rows: Any, operation: str) -> None:
    handle = await given.claimed()
    await FENCED[operation](engine, handle)
    async with rows.unchanged():
        for other in sorted({*FENCED} - {operation, operation.removesuffix("_many"), f"{operation}_many"}):
            await refused(FENCED[other](engine, handle), "execution_not_active")
    events = await rows.events(handle.execution_id)
    assert [event["outcome"] is not None for event in events] == [False, True]

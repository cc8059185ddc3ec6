"""The checks of every operation under a lease, and their order."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

import msgspec

from engine.state import (
    EXPIRED_LEASE,
    FENCED_OPERATIONS,
    Fenced,
    all_cases,
    attempts,
    claim,
    event_texts,
    refused,
    revoke,
    vector,
)
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import ContentionError, InvalidInputError, NotFoundError, StateError
from flowfabric.model.handle import Backend, Handle
from flowfabric.model.ids import AttemptId, ExecutionId, LeaseId
from flowfabric.model.states import HandleKind
from flowfabric.model.stream import Frame

COMPLETIONS = {"complete", "complete_many"}


def altered(handle: Handle, **changes: Any) -> Handle:
    """A copy of a handle with other values."""
    return msgspec.structs.replace(handle, **changes)


def each_operation() -> Iterator[tuple[str, Fenced, Callable[[], AbstractContextManager[None]]]]:
    """Every operation under a lease: its name, the call, and what collects its failures."""
    with all_cases() as case:
        for name, operation in FENCED_OPERATIONS.items():
            yield name, operation, functools.partial(case, name)


async def test_a_lease_is_valid_until_its_last_millisecond(engine: Engine, given: Given, clock: Clock) -> None:
    handles = {name: await given.claimed(lease_ttl_ms=1000, lane_id=name) for name in FENCED_OPERATIONS}
    await clock.advance(ms=999)
    for name, operation, case in each_operation():
        with case():
            await operation(engine, handles[name])


async def test_a_lease_ends_exactly_at_its_expiry_and_the_refusal_marks_it(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handles = {name: await given.claimed(lease_ttl_ms=1000, lane_id=name) for name in FENCED_OPERATIONS}
    now = await clock.advance(ms=1000)
    for name, operation, case in each_operation():
        handle = handles[name]
        with case():
            refusal = await refused(operation(engine, handle), "lease_expired")
            assert isinstance(refusal, StateError)
            row = await rows.execution(handle.execution_id)
            assert (vector(row), row["lease_expired_at"]) == (EXPIRED_LEASE, now)
            assert row["blocking_detail"] == "lease expired, awaiting reclaim"
            assert await event_texts(rows, handle.execution_id) == ["acquired", "expired"]
            assert [row["ended_at"] for row in await attempts(rows, handle.execution_id)] == [None]
    async with rows.unchanged():
        for name, operation, case in each_operation():
            with case():
                await refused(operation(engine, handles[name]), "lease_expired")


async def test_a_handle_whose_numbers_cannot_be_stored_is_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    beyond = [altered(handle, attempt_index=2**31), altered(handle, lease_epoch=2**63)]
    async with rows.unchanged():
        for _, operation, case in each_operation():
            for wrong in beyond:
                with case():
                    await refused(operation(engine, wrong), "invalid_input", "must be a whole number from 0 to")
        for wrong in beyond:
            await refused(engine.append_frame(wrong, Frame(bytes=b"")), "invalid_input", "must be a whole number")


async def test_a_worker_whose_run_was_reclaimed_is_refused(engine: Engine, given: Given, rows: Rows) -> None:
    stale = await given.reclaimable()
    await claim(engine)
    async with rows.unchanged():
        for _, operation, case in each_operation():
            with case():
                assert isinstance(await refused(operation(engine, stale), "lease_conflict"), ContentionError)


async def test_every_part_of_the_fence_is_compared(engine: Engine, given: Given, rows: Rows) -> None:
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
        for _, operation, case in each_operation():
            for stale in wrong:
                with case():
                    await refused(operation(engine, stale), "lease_conflict")


async def test_an_ended_run_is_refused_by_epoch_then_phase_then_ids(engine: Engine, given: Given, rows: Rows) -> None:
    ended = await given.claimed()
    await engine.complete(ended)
    other_ids = altered(ended, lease_id=LeaseId(uuid4()), attempt_id=AttemptId(uuid4()))
    async with rows.unchanged():
        for _, operation, case in each_operation():
            with case():
                await refused(operation(engine, altered(ended, lease_epoch=2)), "lease_conflict")
                refusal = await refused(operation(engine, other_ids), "execution_not_active")
                assert isinstance(refusal, ContentionError)
                assert not refusal.retryable
                assert refusal.detail == {
                    "terminal_outcome": "success",
                    "lease_epoch": "1",
                    "lifecycle_phase": "terminal",
                    "attempt_id": str(ended.attempt_id),
                }


async def test_an_attempt_that_waits_for_its_retry_is_not_active(engine: Engine, given: Given, rows: Rows) -> None:
    failed = await given.backing_off()
    async with rows.unchanged():
        for name, operation, case in each_operation():
            with case():
                # A repeated fail of the same attempt succeeds; that of another attempt is refused.
                handle = altered(failed, attempt_index=7) if name == "fail" else failed
                refusal = await refused(operation(engine, handle), "execution_not_active")
                assert refusal.detail == {
                    "terminal_outcome": "none",
                    "lease_epoch": "1",
                    "lifecycle_phase": "runnable",
                    "attempt_id": "",
                }


async def test_revocation_is_checked_before_expiry_and_expiry_before_the_ids(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    revoked = await given.claimed(lease_ttl_ms=1000)
    expired = {name: await given.claimed(lease_ttl_ms=1000, lane_id=name) for name in FENCED_OPERATIONS}
    await revoke(engine, revoked.execution_id)
    await clock.advance(seconds=2)
    async with rows.unchanged():
        for _, operation, case in each_operation():
            for handle in (revoked, altered(revoked, lease_id=LeaseId(uuid4()))):
                with case():
                    assert isinstance(await refused(operation(engine, handle), "lease_revoked"), StateError)
    for name, operation, case in each_operation():
        with case():
            await refused(operation(engine, altered(expired[name], lease_id=LeaseId(uuid4()))), "lease_expired")
            assert vector(await rows.execution(expired[name].execution_id)) == EXPIRED_LEASE


async def test_a_handle_that_cannot_belong_to_a_lease_of_this_store_is_refused(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    uuid = uuid_of(handle.execution_id)
    wrong: list[tuple[Any, str, str]] = [
        (altered(handle, execution_id=ExecutionId(f"{{fp:1}}:{uuid}")), "execution_not_found", ""),
        (altered(handle, execution_id=ExecutionId(f"{{fp:32767}}:{uuid4()}")), "execution_not_found", ""),
        (altered(handle, kind=HandleKind.SUSPENDED), "lease_conflict", ""),
        (altered(handle, backend=Backend.VALKEY), "handle_from_other_backend", "expected=Postgres actual=Valkey"),
        (altered(handle, backend=Backend.SQLITE), "handle_from_other_backend", "expected=Postgres actual=Sqlite"),
        (altered(handle, execution_id=ExecutionId(f"{{fp:32768}}:{uuid}")), "invalid_input", "exceeds i16 range"),
        (handle.opaque, "invalid_input", "handle"),
        (None, "invalid_input", "handle"),
    ]
    async with rows.unchanged():
        for _, operation, case in each_operation():
            for stale, code, detail in wrong:
                with case():
                    refusal = await refused(operation(engine, stale), code, detail)
                    expected = NotFoundError if code == "execution_not_found" else InvalidInputError | ContentionError
                    assert isinstance(refusal, expected)


async def test_a_run_ends_once(engine: Engine, given: Given, rows: Rows) -> None:
    handles = {name: await given.claimed(lane_id=name) for name in ("complete", "complete_many", "fail", "cancel")}
    for name, handle in handles.items():
        await FENCED_OPERATIONS[name](engine, handle)
    async with rows.unchanged():
        for name, operation, case in each_operation():
            for ending, handle in handles.items():
                # A worker may repeat the call that ended its run.
                if name not in (COMPLETIONS if ending in COMPLETIONS else {ending}):
                    with case():
                        await refused(operation(engine, handle), "execution_not_active")
    for name, handle in handles.items():
        events = await rows.events(handle.execution_id)
        assert [event["outcome"] is not None for event in events] == [False, True], name

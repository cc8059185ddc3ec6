"""Refused suspends: the error code, the order of the checks, and no change."""

from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from engine.sending import waiting
from engine.state import ACTIVE, EXPIRED_LEASE, claim, event_texts, refused, revoke, vector
from engine.waits import FORMS, fresh, on_all, suspend_args, suspend_run, using
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.condition import (
    AllOf,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    condition_value,
)
from flowfabric.model.handle import Backend, Handle
from flowfabric.model.ids import AttemptId, LeaseId, WaitpointId
from flowfabric.model.states import HandleKind
from flowfabric.model.waitpoint import Fresh, UsePending


def one(key: str = "wait", name: str = "ready") -> Single:
    return Single(waitpoint_key=key, matcher=ByName(name))


def count(n: int, *keys: str, kind: CountKind = CountKind.DISTINCT_WAITPOINTS, name: str = "ready") -> Count:
    return Count(n=n, count_kind=kind, matcher=ByName(name), waitpoints=keys)


def nested(depth: int) -> Condition:
    condition: Condition = one()
    for _ in range(depth):
        condition = AllOf((condition,))
    return condition


def plain_nested(depth: int) -> Any:
    plain: Any = condition_value(one())
    for _ in range(depth):
        plain = {"Composite": {"kind": "AllOf", "members": [plain]}}
    return plain


AGAIN = WaitpointId(uuid4())

REFUSED: dict[str, dict[str, Any]] = {
    "waitpoints_empty": {"waitpoints": ()},
    "waitpoint_key_mismatch": {"resume_condition": one("other")},
    "additional_waitpoint_binding_must_be_fresh at waitpoints[1]": {
        "waitpoints": (fresh(), UsePending(waitpoint_id=WaitpointId(uuid4())))
    },
    "additional_waitpoint_binding_empty_key at waitpoints[2]": {"waitpoints": (fresh(), fresh("b"), fresh(""))},
    "referenced_waitpoint_key_missing_binding: c": {
        "waitpoints": (fresh("a"), fresh("b")),
        "resume_condition": AllOf((one("a"), one("b"), one("c"))),
    },
    "extra_binding_not_referenced_by_condition: b": {"waitpoints": (fresh(), fresh("b")), "resume_condition": one()},
    "timeout_only_without_deadline": {"resume_condition": TimeoutOnly()},
    "resume_condition: empty signal name (use Wildcard instead)": {"resume_condition": one(name="")},
    "timeout_at_in_past": {"timeout_at": 0},
    "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]": {"resume_condition": nested(5)},
    "allof_empty_members at path <root>": {"resume_condition": AllOf(())},
    "allof_empty_members at path members[1].members[0]": {
        "resume_condition": AllOf((one(), AllOf((AllOf(()),)))),
    },
    "count_n_zero at path <root>": {"resume_condition": count(0, "wait")},
    "count_waitpoints_empty at path members[1]": {"resume_condition": AllOf((one(), count(1)))},
    "count_exceeds_waitpoint_set: n=2 > waitpoints.len()=1 at path <root>": {
        "resume_condition": count(2, "wait", "wait")
    },
    "duplicate_waitpoint_binding": {
        "waitpoints": (
            Fresh(waitpoint_id=AGAIN, waitpoint_key="a"),
            Fresh(waitpoint_id=AGAIN, waitpoint_key="b"),
        ),
        "resume_condition": AllOf((one("a"), one("b"))),
    },
}
"""Arguments that are refused for every execution, by the detail of the refusal."""

ALSO_REFUSED: list[tuple[str, dict[str, Any]]] = [
    (
        "resume_condition: empty signal name (use Wildcard instead)",
        {"resume_condition": AllOf((one(), count(1, "wait", name="")))},
    ),
    (
        "duplicate_waitpoint_binding",
        {"waitpoints": (fresh("a"), fresh("a")), "resume_condition": AllOf((one("a"),))},
    ),
    ("referenced_waitpoint_key_missing_binding: b", {"resume_condition": AllOf((one(), one("b")))}),
    ("extra_binding_not_referenced_by_condition: wait", {"resume_condition": AllOf((OperatorOnly(),))}),
    *(
        ("depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]", {"resume_condition": deep})
        for deep in (nested(5_000), plain_nested(5), plain_nested(5_000))
    ),
]


async def test_inconsistent_arguments_are_refused(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            async with rows.unchanged():
                for detail, overrides in (*REFUSED.items(), *ALSO_REFUSED):
                    refusal = await refused(suspend(engine, handle, suspend_args(**overrides)), "invalid_input")
                    assert str(refusal.detail).startswith(detail)
                await refused(suspend(engine, handle, "args"), "invalid_input", "args")  # type: ignore[arg-type]


async def test_a_condition_may_be_four_levels_deep(engine: Engine, given: Given, subtests: pytest.Subtests) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            await suspend(engine, handle, suspend_args(resume_condition=nested(4)))


async def test_a_timeout_may_be_up_to_ten_minutes_in_the_past(
    engine: Engine, given: Given, rows: Rows, clock: Clock, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            now = await clock.now()
            async with rows.unchanged():
                await refused(
                    suspend(engine, handle, suspend_args(timeout_at=now - 600_001)),
                    "invalid_input",
                    "timeout_at_in_past",
                )
            await suspend(engine, handle, suspend_args(timeout_at=now - 600_000))


# The order of the checks: every case would fail later checks too.


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("waitpoints_empty", {"waitpoints": (), "resume_condition": TimeoutOnly()}),
    ("waitpoint_key_mismatch", {"waitpoints": (fresh("b"), fresh("")), "resume_condition": one("a", "")}),
    (
        "additional_waitpoint_binding_empty_key at waitpoints[1]",
        {"waitpoints": (fresh("b"), fresh("")), "resume_condition": AllOf((one("a"),))},
    ),
    (
        "referenced_waitpoint_key_missing_binding: a",
        {"waitpoints": (fresh("b"), fresh("b")), "resume_condition": AllOf((one("a", ""), AllOf(())))},
    ),
    (
        "extra_binding_not_referenced_by_condition: b",
        {"waitpoints": (fresh("b"), fresh("b")), "resume_condition": TimeoutOnly()},
    ),
    (
        "resume_condition: empty signal name (use Wildcard instead)",
        {"resume_condition": AllOf((one("wait", ""), AllOf(())))},
    ),
    ("allof_empty_members at path members[1]", {"resume_condition": AllOf((one("b"), AllOf(())))}),
]


async def test_a_suspended_handle_is_refused_first_then_the_first_wrong_argument_then_a_foreign_handle(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    handle = await given.claimed()
    foreign = msgspec.structs.replace(handle, backend=Backend.VALKEY)
    waiting = msgspec.structs.replace(handle, kind=HandleKind.SUSPENDED)
    async with rows.unchanged():
        for detail, overrides in FAULTS:
            with subtests.test(detail):
                timeout_at = 0 if overrides.get("resume_condition") != TimeoutOnly() else None
                given_args = suspend_args(**overrides, timeout_at=timeout_at)
                await refused(engine.suspend(foreign, given_args), "invalid_input", detail)
                await refused(engine.suspend(waiting, given_args), "already_suspended")
        await refused(engine.suspend(foreign, suspend_args(timeout_at=0)), "handle_from_other_backend")
        await refused(engine.suspend("handle", suspend_args()), "invalid_input", "handle")  # type: ignore[arg-type]


async def test_the_timeout_is_checked_before_the_execution(engine: Engine, rows: Rows) -> None:
    absent_execution: dict[str, Any] = {"execution_id": f"{{fp:0}}:{uuid4()}"}
    async with rows.unchanged():
        await refused(
            engine.suspend_by_triple(**absent_execution, args=suspend_args(timeout_at=0)), "invalid_input", "timeout_at"
        )
        await refused(engine.suspend_by_triple(**absent_execution, args=suspend_args()), "execution_not_found")
        await refused(engine.suspend_by_triple(execution_id="x", args=suspend_args()), "invalid_input", "MissingTag")


async def test_a_suspend_by_triple_needs_a_whole_fence_and_an_attempt(engine: Engine, given: Given, rows: Rows) -> None:
    untried = await given.created()
    fence: dict[str, Any] = {"lease_id": uuid4(), "lease_epoch": 7, "attempt_id": uuid4()}
    async with rows.unchanged():
        await refused(
            engine.suspend_by_triple(execution_id=untried, args=suspend_args()), "invalid_input", "fence_required"
        )
        for missing in fence:
            part = {name: value for name, value in fence.items() if name != missing}
            for others in (part, {missing: fence[missing]}):
                await refused(
                    engine.suspend_by_triple(execution_id=untried, **others, args=suspend_args()),
                    "invalid_input",
                    "partial_fence_triple",
                )
        await refused(
            engine.suspend_by_triple(execution_id=untried, **{**fence, "lease_id": "x"}, args=suspend_args()),
            "invalid_input",
            "lease_id",
        )
        await refused(engine.suspend_by_triple(execution_id=untried, **fence, args=suspend_args()), "attempt_not_found")


async def test_the_lease_epoch_is_checked_before_the_phase(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            await engine.complete(handle)
            stale = msgspec.structs.replace(handle, lease_epoch=5)
            async with rows.unchanged():
                await refused(suspend(engine, stale, suspend_args()), "lease_conflict")
                refusal = await refused(suspend(engine, handle, suspend_args()), "execution_not_active")
            assert refusal.detail == {
                "terminal_outcome": "success",
                "lease_epoch": "1",
                "lifecycle_phase": "terminal",
                "attempt_id": str(handle.attempt_id),
            }


async def test_a_run_that_waits_for_its_retry_cannot_suspend(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.backing_off()
            async with rows.unchanged():
                refusal = await refused(suspend(engine, handle, suspend_args()), "execution_not_active")
            assert isinstance(refusal.detail, dict)
            assert refusal.detail["lifecycle_phase"] == "runnable"


async def test_a_revoked_lease_is_reported_before_its_expiry(
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    subtests: pytest.Subtests,
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed(lane_id=form)
            await revoke(engine, handle.execution_id)
            await clock.advance(seconds=3600)
            stranger = msgspec.structs.replace(handle, lease_id=LeaseId(uuid4()))
            async with rows.unchanged():
                await refused(suspend(engine, stranger, suspend_args()), "lease_revoked")


async def test_a_suspend_under_an_expired_lease_is_refused_and_marks_the_lease(
    engine: Engine, given: Given, rows: Rows, clock: Clock, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed(lease_ttl_ms=1000, lane_id=form)
            stranger = msgspec.structs.replace(handle, attempt_id=AttemptId(uuid4()))
            now = await clock.advance(seconds=1)
            assert vector(await rows.execution(handle.execution_id)) == ACTIVE
            await refused(suspend(engine, stranger, suspend_args()), "lease_expired")
            row = await rows.execution(handle.execution_id)
            assert (vector(row), row["lease_expired_at"]) == (EXPIRED_LEASE, now)
            assert await event_texts(rows, handle.execution_id) == ["acquired", "expired"]
            assert await rows.of("suspension") == await rows.of("waitpoint") == []
            async with rows.unchanged():
                await refused(suspend(engine, handle, suspend_args()), "lease_expired")


async def test_another_lease_or_attempt_cannot_suspend(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            async with rows.unchanged():
                for stranger in (
                    msgspec.structs.replace(handle, lease_id=LeaseId(uuid4()), attempt_index=3),
                    msgspec.structs.replace(handle, attempt_id=AttemptId(uuid4()), attempt_index=3),
                ):
                    await refused(suspend(engine, stranger, suspend_args()), "lease_conflict")


async def test_a_handle_with_another_attempt_index_is_refused(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    await _open_suspension(connection, handle)
    other = msgspec.structs.replace(handle, attempt_index=1)
    async with rows.unchanged():
        await refused(engine.suspend(other, suspend_args()), "invalid_lease_for_suspend")


async def _open_suspension(connection: asyncpg.Connection, handle: Handle) -> None:
    """Open a suspension on an active execution, which no operation does."""
    await connection.execute(
        """with waiting as (
             update execution set suspension_id = $2, attached = attached | 2 where execution_id = $1 returning *)
           insert into suspension (partition_key, execution_id, suspension_id, attempt_index, waitpoint_ids,
                                   namespace_no, lane_no, reason_code, requested_by, suspended_at, condition,
                                   resume_policy)
           select partition_key, execution_id, $2, 0, '{}', namespace_no, 1, 'step_boundary', 'worker', 0, '{}', '{}'
             from waiting""",
        uuid_of(handle.execution_id),
        uuid4(),
    )


async def test_an_open_suspension_is_reported_before_a_missing_key(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            await connection.execute("delete from signing_key")
            await _open_suspension(connection, handle)
            async with rows.unchanged():
                await refused(suspend(engine, handle, suspend_args()), "already_suspended")


async def test_a_suspend_needs_a_signing_key(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            await connection.execute("delete from signing_key")
            unknown = suspend_args(waitpoints=(UsePending(waitpoint_id=WaitpointId(uuid4())),))
            async with rows.unchanged():
                await refused(suspend(engine, handle, suspend_args()), "hmac_secret_not_initialized")
                await refused(suspend(engine, handle, unknown), "hmac_secret_not_initialized")


async def test_an_unusable_stored_secret_is_corruption(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    await connection.execute("update signing_key set secret = '', installed_at = installed_at + 1")
    async with rows.unchanged():
        await refused(engine.suspend(handle, suspend_args()), "corruption")


# Waitpoints.


async def test_an_unknown_waitpoint_cannot_be_used(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            async with rows.unchanged():
                unknown = suspend_args(waitpoints=(UsePending(waitpoint_id=WaitpointId(uuid4())),))
                await refused(suspend(engine, handle, unknown), "waitpoint_not_found")


async def test_only_a_pending_waitpoint_can_be_used(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            other = await given.claimed()
            active = (await suspend_run(engine, other)).details
            handle = await given.claimed()
            closed = await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=0)
            await engine.close_waitpoint(execution_id=handle.execution_id, waitpoint_id=closed.waitpoint_id)
            async with rows.unchanged():
                await refused(suspend(engine, handle, using(closed)), "waitpoint_not_pending")
                # Its state is checked before its execution.
                taken = suspend_args(waitpoints=(UsePending(waitpoint_id=active.waitpoint_id),))
                await refused(suspend(engine, handle, taken), "waitpoint_not_pending")


async def test_only_a_waitpoint_of_the_same_attempt_can_be_used(
    engine: Engine, given: Given, rows: Rows, clock: Clock, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            other = await given.claimed()
            foreign = await engine.create_waitpoint(other, waitpoint_key="wait", expires_in_ms=0)
            handle = await given.claimed(policy={"retry_policy": {"max_retries": 3}})
            earlier = await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=0)
            await given.backing_off(delay_ms=0)
            await engine.fail(handle, reason="no luck")
            await clock.advance(seconds=3600)
            await parts_of(engine).delays.promote_due()
            again = [await given.claim() for _ in range(2)]
            (now,) = [claimed.handle for claimed in again if claimed.execution_id == handle.execution_id]
            assert now.attempt_index == 1
            async with rows.unchanged():
                await refused(suspend(engine, now, using(foreign)), "invalid_waitpoint_for_execution")
                await refused(suspend(engine, now, using(earlier)), "invalid_waitpoint_for_execution")


async def test_an_expired_pending_waitpoint_cannot_be_used(
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    connection: asyncpg.Connection,
    subtests: pytest.Subtests,
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            handle = await given.claimed()
            pending = await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=1000)
            await connection.execute("update waitpoint set token = ''")
            await clock.advance(ms=999)
            async with rows.unchanged():
                await refused(suspend(engine, handle, using(pending)), "waitpoint_not_token_bound")
            await clock.advance(ms=1)
            async with rows.unchanged():
                await refused(suspend(engine, handle, using(pending)), "pending_waitpoint_expired")


async def test_the_id_of_an_open_waitpoint_cannot_be_reused(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            other = await given.claimed()
            active = (await suspend_run(engine, other)).details.waitpoint_id
            handle = await given.claimed()
            pending = await engine.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=1000)
            async with rows.unchanged():
                for taken in (active, pending.waitpoint_id):
                    binding = Fresh(waitpoint_id=taken, waitpoint_key="wait")
                    await refused(
                        suspend(engine, handle, suspend_args(waitpoints=(binding,))), "waitpoint_already_exists"
                    )
                    several = on_all("a", "b")
                    mixed = (several.waitpoints[0], Fresh(waitpoint_id=taken, waitpoint_key="b"))
                    await refused(
                        suspend(
                            engine, handle, suspend_args(waitpoints=mixed, resume_condition=several.resume_condition)
                        ),
                        "waitpoint_already_exists",
                    )


async def test_the_id_of_a_closed_waitpoint_cannot_be_reused(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for form, suspend in FORMS.items():
        with subtests.test(form):
            wait = await waiting(engine, given)
            await wait.send(idempotency_key="once")
            (run,) = await claim(engine)
            other = await given.claimed()
            foreign = (await suspend_run(engine, other)).details.waitpoint_id
            await engine.cancel_execution(execution_id=other.execution_id, reason="not wanted")
            unused = (await engine.create_waitpoint(run.handle, waitpoint_key="old", expires_in_ms=1000)).waitpoint_id
            await engine.close_waitpoint(execution_id=run.execution_id, waitpoint_id=unused)
            async with rows.unchanged():
                for known in (wait.points["wait"].waitpoint_id, unused, foreign):
                    binding = Fresh(waitpoint_id=WaitpointId(known), waitpoint_key="wait")
                    await refused(
                        suspend(engine, run.handle, suspend_args(waitpoints=(binding,))), "waitpoint_already_exists"
                    )
            # The token of the first suspension is not accepted by the second.
            await suspend_run(engine, run.handle)
            await refused(wait.send(), "waitpoint_closed")

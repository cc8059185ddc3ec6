"""Lists and reads of suspended executions, retention, and the history of suspensions."""

from collections import Counter
from typing import Any
from uuid import uuid4

import pytest

from engine.state import claim, refused
from engine.waits import on_all, suspend_args, suspend_run, suspension
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read import listing
from flowfabric.engine.wait import waitpoint
from flowfabric.model.suspension import SuspendedExecution

WEEK = 604_800_000


async def waiting(engine: Engine, given: Given, *, reason: str = "waiting_for_signal", **overrides: Any) -> str:
    """The id of a new suspended execution."""
    handle = await given.claimed(**overrides)
    await suspend_run(engine, handle, reason_code=reason)
    return str(handle.execution_id)


async def listed(engine: Engine, **filters: Any) -> list[str]:
    page = await engine.list_suspended(**filters)
    return [entry.execution_id for entry in page.entries]


async def test_the_longest_suspended_execution_is_listed_first(engine: Engine, given: Given, clock: Clock) -> None:
    first = await waiting(engine, given)
    began = await clock.now()
    later = await clock.advance(seconds=1)
    second = await waiting(engine, given, reason="waiting_for_approval")
    await given.claimed()
    page = await engine.list_suspended()
    assert page.next_cursor is None
    assert page.entries == [
        SuspendedExecution(execution_id=first, suspended_at_ms=began, reason="waiting_for_signal"),  # type: ignore[arg-type]
        SuspendedExecution(execution_id=second, suspended_at_ms=later, reason="waiting_for_approval"),  # type: ignore[arg-type]
    ]


async def test_executions_suspended_in_the_same_millisecond_are_listed_by_id(engine: Engine, given: Given) -> None:
    ids = [await waiting(engine, given, execution_id=f"{{fp:{at}}}:{uuid4()}") for at in (2, 10, 1, 10)]
    assert await listed(engine) == sorted(ids)


async def test_only_suspended_executions_are_listed(engine: Engine, given: Given) -> None:
    cancelled, resumed, waits = [await waiting(engine, given) for _ in range(3)]
    await engine.cancel_execution(execution_id=cancelled, reason="not wanted")
    await engine.resume_execution(execution_id=resumed)
    assert await listed(engine) == [waits]


async def test_filters_narrow_the_list_of_suspended_executions(engine: Engine, given: Given) -> None:
    one = await waiting(engine, given, namespace="north", lane_id="slow")
    two = await waiting(engine, given, namespace="north", lane_id="fast", reason="manual_pause")
    three = await waiting(engine, given, namespace="south", lane_id="slow")
    for filters, found in (
        ({}, {one, two, three}),
        ({"namespace": "north"}, {one, two}),
        ({"lane_id": "slow"}, {one, three}),
        ({"reason": "manual_pause"}, {two}),
        ({"namespace": "north", "lane_id": "slow"}, {one}),
        ({"namespace": "nowhere"}, set()),
        ({"lane_id": "none"}, set()),
        ({"reason": "none"}, set()),
    ):
        assert set(await listed(engine, **filters)) == found


async def test_the_next_page_follows_even_if_the_last_entry_is_gone(engine: Engine, given: Given, clock: Clock) -> None:
    ids: list[str] = []
    for _ in range(3):
        ids += sorted([await waiting(engine, given) for _ in range(2)])
        await clock.advance(ms=1)
    found: list[str] = []
    cursor: str | None = None
    for size in (4, 2):
        page = await engine.list_suspended(cursor=cursor, limit=4)
        assert len(page.entries) == size
        found += [entry.execution_id for entry in page.entries]
        cursor = page.next_cursor
        await engine.cancel_execution(execution_id=found[-1], reason="not wanted")
    assert (found, cursor) == (ids, None)
    assert (await engine.list_suspended(limit=4)).next_cursor is None


async def test_a_page_has_a_maximum_size_and_may_be_empty(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {await waiting(engine, given) for _ in range(3)}
    page = await engine.list_suspended(limit=0)
    assert (page.entries, page.next_cursor) == ([], None)
    assert {entry.execution_id for entry in (await engine.list_suspended(limit=50_000)).entries} == ids
    monkeypatch.setattr(waitpoint, "MAX_LIMIT", 2)
    page = await engine.list_suspended(limit=3)
    assert (len(page.entries), page.next_cursor is not None) == (2, True)


async def test_wrong_arguments_of_the_list_are_refused(engine: Engine) -> None:
    wrong: list[dict[str, Any]] = [
        {"limit": -1},
        {"limit": "5"},
        {"limit": None},
        {"cursor": ""},
        {"cursor": "not one"},
        {"cursor": "bnVsbA"},
        {"cursor": "WzEsIngiXQ"},
        {"cursor": 5},
        {"namespace": 5},
        {"namespace": "a\0b"},
        {"lane_id": ""},
        {"reason": 5},
    ]
    for filters in wrong:
        await refused(engine.list_suspended(**filters), "invalid_input", next(iter(filters)))


async def test_a_snapshot_shows_the_first_waitpoint_and_the_continuation_pointer(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    before = await engine.describe_execution(handle.execution_id)
    assert before is not None
    assert (before.current_waitpoint, before.continuation_metadata_pointer) == (None, None)
    request = on_all("a", "b", continuation_metadata_pointer="s3://there")
    await suspend_run(engine, handle, request)
    shown = await engine.describe_execution(handle.execution_id)
    assert shown is not None
    assert shown.current_waitpoint == request.waitpoints[0].waitpoint_id
    assert shown.continuation_metadata_pointer == "s3://there"
    assert (shown.public_state, shown.blocking_reason) == ("suspended", "waiting_for_signal")
    assert (shown.current_lease, shown.total_attempt_count) == (None, 1)
    (attempt,) = await engine.list_attempts(handle.execution_id)
    assert (attempt.attempt_state, attempt.suspension_id) == ("suspended", request.suspension_id)
    await engine.resume_execution(execution_id=handle.execution_id)
    after = await engine.describe_execution(handle.execution_id)
    assert after is not None
    assert (after.current_waitpoint, after.continuation_metadata_pointer) == (None, "s3://there")
    (again,) = await claim(engine)
    (attempt,) = await engine.list_attempts(handle.execution_id)
    assert (attempt.attempt_state, attempt.suspension_id, attempt.attempt_id) == ("started", None, again.attempt_id)


async def test_the_fields_of_a_suspension_are_read_by_name(engine: Engine, given: Given, clock: Clock) -> None:
    handle = await given.claimed()
    timeout_at = await clock.now() + 1000
    request = suspend_args(timeout_at=timeout_at)
    names = ["current_suspension_id", "current_waitpoint_id", "suspension_timeout_at", "last_hmac_validation_failed_at"]
    nothing = dict.fromkeys(names)
    assert await engine.read_exec_core_fields(handle.execution_id, names) == nothing
    await suspend_run(engine, handle, request)
    assert await engine.read_exec_core_fields(handle.execution_id, names) == {
        "current_suspension_id": str(request.suspension_id),
        "current_waitpoint_id": str(request.waitpoints[0].waitpoint_id),
        "suspension_timeout_at": str(timeout_at),
        "last_hmac_validation_failed_at": None,
    }
    await engine.resume_execution(execution_id=handle.execution_id)
    assert await engine.read_exec_core_fields(handle.execution_id, names) == nothing


async def test_a_few_suspended_executions_among_many_are_listed_by_state(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "FIRST_SCAN", 1)
    ids = [await waiting(engine, given, namespace=f"n{at % 2}") for at in range(4)]
    for _ in range(10):
        await given.created(lane_id="other")
    ended = await waiting(engine, given)
    await engine.cancel_execution(execution_id=ended, reason="not wanted")
    page = await engine.list_executions(public_state="suspended")
    assert [entry.execution_id for entry in page.executions] == sorted(ids, reverse=True)
    page = await engine.list_executions(public_state=["suspended", "cancelled"], namespace="n1", order="oldest")
    assert [entry.execution_id for entry in page.executions] == sorted(ids[1::2])


# Retention.


TABLES = ("execution", "attempt", "suspension", "waitpoint", "signal")


async def test_the_rows_of_a_suspension_are_deleted_with_its_execution(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    async def waits() -> str:
        handle = await given.claimed(policy={"max_signals_per_execution": 5})
        request = on_all("a", "b", idempotency_key="once")
        details = (await suspend_run(engine, handle, request)).details
        await engine.deliver_signal(
            execution_id=handle.execution_id,
            waitpoint_id=details.waitpoint_id,
            waitpoint_token=details.waitpoint_token,
            signal_name="ready",
        )
        return str(handle.execution_id)

    gone, stays = await waits(), await waits()
    await engine.cancel_execution(execution_id=gone, reason="not wanted")
    kept = {table: await rows.of(table, execution_id=uuid_of(stays)) for table in TABLES}
    assert all(kept.values())
    await clock.advance(ms=WEEK * 52)
    assert [len(await rows.of("idempotency_key", scope=uuid_of(one))) for one in (gone, stays)] == [1, 1]
    assert (await parts_of(engine).retention.trim_batch()).done == 1
    assert [len(await rows.of("idempotency_key", scope=uuid_of(one))) for one in (gone, stays)] == [0, 1]
    for table in TABLES:
        assert await rows.of(table, execution_id=uuid_of(gone)) == []
        assert await rows.of(table, execution_id=uuid_of(stays)) == kept[table]
    assert await engine.find_inconsistencies() == []


# The history of suspensions.


async def test_a_closed_suspension_is_kept_when_the_next_begins(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    first = await suspend_run(engine, handle, on_all("a", "b", timeout_at=await clock.now() + 1000))
    await engine.resume_execution(execution_id=handle.execution_id)
    closed = await suspension(rows, handle.execution_id)
    assert closed["suspension_id"] == first.details.suspension_id
    (again,) = await claim(engine)
    now = await clock.advance(seconds=1)
    second = await suspend_run(engine, again.handle, reason_code="manual_pause")
    assert closed in await rows.of("suspension", execution_id=uuid_of(handle.execution_id))
    row = await suspension(rows, handle.execution_id)
    assert (row["suspension_id"], row["suspended_at"]) == (second.details.suspension_id, now)
    assert (row["closed_at"], row["close_reason"], row["timeout_at"]) == (None, None, None)
    assert (row["waitpoint_ids"], row["reason_code"]) == ([second.details.waitpoint_id], "manual_pause")
    states = {each["waitpoint_key"]: each["state"] for each in await rows.of("waitpoint")}
    assert states == {"wait": "active", "a": "closed", "b": "closed"}
    assert await engine.find_inconsistencies() == []
    assert await listed(engine) == [handle.execution_id]


async def test_the_end_of_an_execution_does_not_change_its_earlier_suspensions(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    for _ in range(2):
        await suspend_run(engine, handle, on_all("a", "b"))
        await engine.resume_execution(execution_id=handle.execution_id)
        (resumed,) = await claim(engine)
        handle = resumed.handle
    earlier = await rows.of("suspension")
    latest = await suspend_run(engine, handle, on_all("a", "b"))
    now = await clock.advance(seconds=1)
    await engine.cancel_execution(execution_id=handle.execution_id, reason="not wanted")
    kept = await rows.of("suspension")
    assert len(kept) == 3
    assert [row for row in kept if row["suspension_id"] != latest.details.suspension_id] == earlier
    closed = await suspension(rows, handle.execution_id)
    assert (closed["suspension_id"], closed["closed_at"]) == (latest.details.suspension_id, now)
    assert Counter(row["close_reason"] for row in await rows.of("waitpoint")) == {"resumed": 4, "cancelled": 2}
    assert await engine.find_inconsistencies() == []


async def test_a_reused_suspension_id_replaces_the_earlier_suspension(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    first = await suspend_run(engine, handle, on_all("a", "b"))
    await engine.resume_execution(execution_id=handle.execution_id)
    (again,) = await claim(engine)
    request = suspend_args(suspension_id=first.details.suspension_id, reason_code="manual_pause")
    second = await suspend_run(engine, again.handle, request)
    (row,) = await rows.of("suspension")
    assert (row["reason_code"], row["closed_at"]) == ("manual_pause", None)
    assert row["waitpoint_ids"] == [second.details.waitpoint_id]
    assert await engine.find_inconsistencies() == []

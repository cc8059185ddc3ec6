"""Quotas: their policies, admissions by the limits of the caller, releases, and the recount."""

import asyncio
import logging
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from engine.limit.limits import check, key_no, limited, quota, some_id, used, window
from engine.state import refused
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.limit import quota as quotas
from flowfabric.engine.parts import parts_of
from flowfabric.model.quota import (
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    QuotaAlreadySatisfied,
    QuotaChanged,
    QuotaCreated,
    QuotaLimits,
    RateExceeded,
    Released,
)

QUOTA = UUID("0190a0a0-0000-7000-8000-000000000001")


def limits(rate: int = 0, cap: int = 0, seconds: int = 1) -> dict[str, Any]:
    return {"window_seconds": seconds, "rate_limit": rate, "concurrency_cap": cap}


# Policies.


async def test_a_policy_is_created_once_and_never_changed_by_a_second_call(engine: Engine, rows: Rows) -> None:
    created = await engine.create_quota_policy(QUOTA, 10, 5, 2, 7, key_from="tag:app.user", weight_from="payload:/size")
    assert created == QuotaCreated(quota_policy_id=QUOTA)  # type: ignore[arg-type]
    async with rows.unchanged():
        assert await engine.create_quota_policy(str(QUOTA), 1, 1, 1) == QuotaAlreadySatisfied(quota_policy_id=QUOTA)  # type: ignore[arg-type]
    assert await engine.read_quota_policy_limits(QUOTA) == QuotaLimits(
        max_requests_per_window=5, requests_per_window_seconds=10, active_concurrency_cap=2, jitter_ms=7
    )
    (row,) = await rows.of("quota_policy")
    assert (row["key_from"], row["weight_from"]) == ("tag:app.user", "payload:/size")


async def test_the_limits_of_a_policy_can_be_changed_at_run_time(engine: Engine) -> None:
    await refused(engine.change_quota_policy(QUOTA, 1, 1, 1), "quota_policy_not_found", str(QUOTA))
    await engine.create_quota_policy(QUOTA, 10, 5, 2)
    assert await engine.change_quota_policy(QUOTA, 0, 6, 3, 1) == QuotaChanged(quota_policy_id=QUOTA)  # type: ignore[arg-type]
    found = await engine.read_quota_policy_limits(QUOTA)
    assert found == QuotaLimits(
        max_requests_per_window=6, requests_per_window_seconds=0, active_concurrency_cap=3, jitter_ms=1
    )
    assert found.window_ms == 60_000


async def test_an_unknown_policy_has_no_limits_to_read(engine: Engine) -> None:
    assert await engine.read_quota_policy_limits(QUOTA) is None


async def test_a_negative_stored_limit_is_corruption(engine: Engine, connection: asyncpg.Connection) -> None:
    await engine.create_quota_policy(QUOTA, 10, 5, 2)
    await connection.execute("update quota_policy set max_concurrent = -1")
    await refused(engine.read_quota_policy_limits(QUOTA), "corruption", "max_concurrent: is negative: -1")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("no uuid", 1, 1, 1), "invalid_input"),
        ((QUOTA, -1, 1, 1), "invalid_input"),
        ((QUOTA, 1, 1.5, 1), "invalid_input"),
        ((QUOTA, 1, 1, True), "invalid_input"),
        ((QUOTA, 1, 1, 2**53), "invalid_input"),
        ((QUOTA, 2**53, 1, 1), "invalid_input"),
        ((QUOTA, 1, 1, 1, -1), "invalid_input"),
        ((QUOTA, 1, 1, 1, 0, "app.user"), "invalid_quota_spec"),
        ((QUOTA, 1, 1, 1, 0, 7), "invalid_input"),
        ((QUOTA, 1, 1, 1, 0, "payload:user"), "invalid_quota_spec"),
        ((QUOTA, 1, 1, 1, 0, "payload"), "invalid_quota_spec"),
        ((QUOTA, 1, 1, 1, 0, "tag:user"), "invalid_tag_key"),
        ((QUOTA, 1, 1, 1, 0, "payload:/" + "x" * 1024), "invalid_input"),
    ],
)
async def test_an_invalid_policy_is_refused(engine: Engine, rows: Rows, arguments: Any, code: str) -> None:
    given = {"key_from": arguments[5]} if len(arguments) > 5 else {}
    async with rows.unchanged():
        for operation in (engine.create_quota_policy, engine.change_quota_policy):
            await refused(operation(*arguments[:5], **given), code)
            if given:
                await refused(operation(*arguments[:5], weight_from=arguments[5]), code)


# Admissions.


async def test_the_rate_of_a_window_is_used_up_until_the_oldest_token_has_left_it(engine: Engine, clock: Clock) -> None:
    await clock.stop()
    for _ in range(2):
        assert await check(engine, QUOTA, some_id(), **limits(rate=2)) == Admitted()
        await clock.advance(ms=100)
    assert await check(engine, QUOTA, some_id(), **limits(rate=2)) == RateExceeded(retry_after_ms=800)
    await clock.advance(ms=799)
    assert await check(engine, QUOTA, some_id(), **limits(rate=2)) == RateExceeded(retry_after_ms=1)
    await clock.advance(ms=1)
    assert await check(engine, QUOTA, some_id(), **limits(rate=2)) == Admitted()
    assert isinstance(await check(engine, QUOTA, some_id(), **limits(rate=2)), RateExceeded)


async def test_the_time_until_the_next_try_has_a_random_part(engine: Engine, clock: Clock) -> None:
    await clock.stop()
    await check(engine, QUOTA, some_id(), **limits(rate=1))
    found = {
        answer.retry_after_ms
        for _ in range(20)
        if isinstance(answer := await check(engine, QUOTA, some_id(), jitter_ms=500, **limits(rate=1)), RateExceeded)
    }
    assert len(found) > 3
    assert 1000 <= min(found) <= max(found) <= 1500


async def test_an_admitted_execution_takes_no_second_token_until_its_guard_has_expired(
    engine: Engine, clock: Clock, rows: Rows
) -> None:
    await clock.stop()
    one = some_id()
    assert await check(engine, QUOTA, one, **limits(rate=2)) == Admitted()
    async with rows.unchanged():
        assert await check(engine, QUOTA, one, **limits(rate=2)) == AlreadyAdmitted()
    await clock.advance(seconds=1)
    assert await check(engine, QUOTA, one, **limits(rate=2)) == Admitted()
    assert await window(rows, QUOTA) == [(await clock.now(), 1)]


async def test_a_guarded_execution_without_a_slot_takes_one_when_there_is_a_cap(
    engine: Engine, clock: Clock, rows: Rows
) -> None:
    await clock.stop()
    one, other = some_id(), some_id()
    assert await check(engine, QUOTA, one, **limits(rate=1)) == Admitted()
    assert await check(engine, QUOTA, other, **limits(cap=1)) == Admitted()
    # The rate is used up, but it needs no second token.
    assert await check(engine, QUOTA, one, **limits(rate=1, cap=1)) == ConcurrencyExceeded()
    await engine.release_admission(QUOTA, other)
    entered_at = await clock.now()
    await clock.advance(ms=10)
    assert await check(engine, QUOTA, one, **limits(rate=1, cap=1)) == Admitted()
    assert await check(engine, QUOTA, one, **limits(rate=1, cap=1)) == AlreadyAdmitted()
    assert (await used(rows, QUOTA), await window(rows, QUOTA)) == (1, [(entered_at, 1)])


async def test_the_rate_is_tested_before_the_slots(engine: Engine, clock: Clock) -> None:
    await clock.stop()
    await check(engine, QUOTA, some_id(), **limits(rate=1, cap=1))
    assert isinstance(await check(engine, QUOTA, some_id(), **limits(rate=1, cap=1)), RateExceeded)
    assert await check(engine, QUOTA, some_id(), **limits(rate=2, cap=1)) == ConcurrencyExceeded()


async def test_a_slot_lives_as_long_as_its_guard(engine: Engine, clock: Clock, rows: Rows) -> None:
    await clock.stop()
    for _ in range(2):
        assert await check(engine, QUOTA, some_id(), **limits(cap=2)) == Admitted()
    assert await check(engine, QUOTA, some_id(), **limits(cap=2)) == ConcurrencyExceeded()
    await clock.advance(ms=999)
    assert await check(engine, QUOTA, some_id(), **limits(cap=2)) == ConcurrencyExceeded()
    await clock.advance(ms=1)
    assert await check(engine, QUOTA, some_id(), **limits(cap=2)) == Admitted()
    assert await used(rows, QUOTA) == 1


async def test_a_denial_writes_nothing_but_the_sweep_of_the_window(engine: Engine, clock: Clock, rows: Rows) -> None:
    await clock.stop()
    await check(engine, QUOTA, some_id(), **limits(rate=2, cap=2))
    await clock.advance(ms=600)
    await check(engine, QUOTA, some_id(), **limits(rate=2, cap=2, seconds=2))
    async with rows.unchanged():
        assert isinstance(await check(engine, QUOTA, some_id(), **limits(rate=2)), RateExceeded)
        assert await check(engine, QUOTA, some_id(), **limits(cap=2)) == ConcurrencyExceeded()
    await clock.advance(ms=400)
    async with rows.unchanged(without=["quota_key"]):
        assert await check(engine, QUOTA, some_id(), **limits(rate=2, cap=1)) == ConcurrencyExceeded()
    assert len(await window(rows, QUOTA)) == 1


async def test_each_dimension_counts_by_itself_and_an_empty_one_is_the_default(engine: Engine, rows: Rows) -> None:
    for dimension in ("", "a", "b"):
        assert await check(engine, QUOTA, some_id(), dimension, **limits(cap=1)) == Admitted()
    assert await check(engine, QUOTA, some_id(), "default", **limits(cap=1)) == ConcurrencyExceeded()
    assert await check(engine, uuid4(), some_id(), **limits(cap=1)) == Admitted()
    assert await rows.of("quota_policy") == []
    assert await engine.create_quota_policy(QUOTA, 1, 1, 1) == QuotaCreated(quota_policy_id=QUOTA)  # type: ignore[arg-type]


async def test_an_execution_that_holds_a_slot_by_its_lease_takes_no_second_one(
    engine: Engine, given: Given, rows: Rows
) -> None:
    await engine.create_quota_policy(QUOTA, 60, 0, 1)
    handle = await given.claimed(policy=limited(QUOTA))
    assert await check(engine, QUOTA, handle.execution_id, **limits(rate=1, cap=1)) == Admitted()
    assert await check(engine, QUOTA, handle.execution_id, **limits(rate=1, cap=1)) == AlreadyAdmitted()
    assert await used(rows, QUOTA) == 1
    await engine.complete(handle, b"x")
    assert await used(rows, QUOTA) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"quota_policy_id": "x"},
        {"execution_id": "x"},
        {"dimension": "x" * 1025},
        {"dimension": None},
        {"window_seconds": -1},
        {"rate_limit": -1},
        {"concurrency_cap": "1"},
        {"jitter_ms": -1},
    ],
)
async def test_an_invalid_check_is_refused(engine: Engine, rows: Rows, changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"quota_policy_id": QUOTA, "execution_id": some_id(), **limits(rate=1)}
    async with rows.unchanged():
        await refused(engine.check_admission(**{**given, **changes}), "invalid_input")


async def test_of_many_concurrent_checks_exactly_the_cap_is_admitted(
    engine: Engine, clock: Clock, rows: Rows, patient_with_locks: None
) -> None:
    await clock.stop()
    answers = await asyncio.gather(*(check(engine, QUOTA, some_id(), **limits(cap=7)) for _ in range(100)))
    assert (answers.count(Admitted()), answers.count(ConcurrencyExceeded())) == (7, 93)
    assert await used(rows, QUOTA) == 7
    answers = await asyncio.gather(*(check(engine, QUOTA, some_id(), "rate", **limits(rate=9)) for _ in range(100)))
    assert answers.count(Admitted()) == 9


# Releases.


async def test_a_release_frees_the_slot_once_and_keeps_the_token(engine: Engine, clock: Clock, rows: Rows) -> None:
    await clock.stop()
    one, other = some_id(), some_id()
    await check(engine, QUOTA, one, **limits(rate=3, cap=2))
    await check(engine, QUOTA, other, **limits(rate=3, cap=2))
    assert await engine.release_admission(QUOTA, one) == Released()
    assert (await used(rows, QUOTA), sum(tokens for _, tokens in await window(rows, QUOTA))) == (1, 2)
    async with rows.unchanged():
        assert await engine.release_admission(QUOTA, one) == Released()
        assert await engine.release_admission(uuid4(), other) == Released()
        assert await engine.release_admission(QUOTA, some_id()) == Released()


async def test_an_execution_admitted_again_after_its_release_moves_its_token(
    engine: Engine, clock: Clock, rows: Rows
) -> None:
    await clock.stop()
    one = some_id()
    await check(engine, QUOTA, one, **limits(rate=2))
    await engine.release_admission(QUOTA, one)
    later = await clock.advance(ms=500)
    assert await check(engine, QUOTA, one, **limits(rate=2)) == Admitted()
    assert await window(rows, QUOTA) == [(later, 1)]
    # The token of a full window counts, also if it is that of the execution itself.
    await engine.release_admission(QUOTA, one)
    assert await check(engine, QUOTA, one, **limits(rate=1)) == RateExceeded(retry_after_ms=1000)


async def test_an_admission_without_a_rate_gives_no_token_back(engine: Engine, clock: Clock, rows: Rows) -> None:
    one = some_id()
    now = await clock.now()
    assert await check(engine, QUOTA, one, rate_limit=1) == Admitted()
    await engine.release_admission(QUOTA, one)
    assert await check(engine, QUOTA, one) == Admitted()
    assert await window(rows, QUOTA) == [(now, 1)]
    await engine.release_admission(QUOTA, one)
    now = await clock.advance(seconds=10)
    assert await check(engine, QUOTA, one, rate_limit=2) == Admitted()
    assert await window(rows, QUOTA) == [(now, 1)]


async def test_a_release_frees_the_slots_under_every_key(engine: Engine, rows: Rows) -> None:
    one = some_id()
    for dimension in ("a", "b"):
        await check(engine, QUOTA, one, dimension, **limits(cap=1))
    other = uuid4()
    await check(engine, other, one, **limits(cap=1))
    await engine.release_admission(QUOTA, one)
    assert [await used(rows, QUOTA, key) for key in ("a", "b")] == [0, 0]
    assert await used(rows, other) == 1


async def test_a_release_frees_the_slot_of_a_lease(engine: Engine, given: Given, rows: Rows) -> None:
    await engine.create_quota_policy(QUOTA, 60, 0, 5)
    await engine.attach_quota("lane", "default", other := await quota(engine, running=5))
    handle = await given.claimed(policy=limited(QUOTA))
    kept = await key_no(engine, rows, other)
    assert [await used(rows, each) for each in (QUOTA, other)] == [1, 1]
    await engine.release_admission(QUOTA, handle.execution_id)
    (row,) = await rows.of("execution")
    assert (row["slot_keys"], row["attached"]) == ([kept], 8)
    await engine.release_admission(other, handle.execution_id)
    (row,) = await rows.of("execution")
    assert (row["slot_keys"], row["attached"]) == (None, 0)
    assert [await used(rows, each) for each in (QUOTA, other)] == [0, 0]
    await engine.complete(handle, b"x")
    assert [await used(rows, each) for each in (QUOTA, other)] == [0, 0]


async def test_a_free_slot_and_a_changed_policy_wake_the_lanes_of_the_queues(engine: Engine, given: Given) -> None:
    await given.created(lane_id="limited")
    await given.created(lane_id="other")
    await engine.create_quota_policy(QUOTA, 1, 1, 1)
    await engine.attach_quota("lane", "limited", QUOTA)
    wakeups = parts_of(engine).wakeups
    before = wakeups.wakes(["limited"]), wakeups.wakes(["other"])
    one = some_id()
    await check(engine, QUOTA, one, **limits(cap=1))
    await engine.release_admission(QUOTA, one)
    assert (wakeups.wakes(["limited"]), wakeups.wakes(["other"])) == (before[0] + 1, before[1])
    await engine.release_admission(QUOTA, one)
    assert wakeups.wakes(["limited"]) == before[0] + 1
    await engine.change_quota_policy(QUOTA, 1, 1, 2)
    assert (wakeups.wakes(["limited"]), wakeups.wakes(["other"])) == (before[0] + 2, before[1])


# The recount.


async def test_a_corrupted_counter_is_set_to_the_real_holders(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    await clock.stop()
    await engine.create_quota_policy(QUOTA, 60, 0, 5)
    handle, _ = await given.claimed(policy=limited(QUOTA)), await given.claimed()
    await check(engine, QUOTA, some_id(), **limits(cap=5))
    granted = await given.created(policy=limited(QUOTA))
    await given.registered()
    await engine.issue_claim_grant(
        execution_id=granted, lane_id="default", worker_id="worker", worker_instance_id="worker-1"
    )
    assert (await engine.reconcile_quota_counters()).errors == 0
    assert await used(rows, QUOTA) == 3
    for corrupted in (5, 0, -7):
        await connection.execute("update quota_key set taken = $1", corrupted)
        found = await engine.reconcile_quota_counters()
        assert (found.processed, found.errors) == (1, 0)
        assert await used(rows, QUOTA) == 3
    await engine.fail(handle, reason="x")
    assert await used(rows, QUOTA) == 2


async def test_the_recount_drops_old_tokens_and_the_slots_of_expired_guards(
    engine: Engine, clock: Clock, rows: Rows
) -> None:
    await clock.stop()
    await engine.create_quota_policy(QUOTA, 1, 5, 5)
    for _ in range(2):
        await check(engine, QUOTA, some_id(), **limits(rate=5, cap=5))
        await clock.advance(ms=600)
    await engine.reconcile_quota_counters()
    assert (await used(rows, QUOTA), len(await window(rows, QUOTA))) == (1, 1)
    await clock.advance(seconds=1)
    await engine.reconcile_quota_counters()
    assert (await used(rows, QUOTA), await window(rows, QUOTA)) == (0, [])
    async with rows.unchanged():
        await engine.reconcile_quota_counters()


async def test_the_tokens_of_an_undefined_quota_are_kept(engine: Engine, clock: Clock, rows: Rows) -> None:
    await clock.stop()
    await check(engine, QUOTA, some_id(), **limits(rate=1, seconds=3600))
    await clock.advance(seconds=600)
    await engine.reconcile_quota_counters()
    assert isinstance(await check(engine, QUOTA, some_id(), **limits(rate=1, seconds=3600)), RateExceeded)


async def test_a_lease_whose_slot_an_older_version_did_not_return_is_not_counted(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, altered_rows: None
) -> None:
    await engine.create_quota_policy(QUOTA, 60, 0, 5)
    handle = await given.claimed(policy=limited(QUOTA))
    await engine.complete(handle, b"x")
    # What an older version leaves: it does not know the column.
    await connection.execute("delete from slot_return")
    assert await used(rows, QUOTA) == 1
    await engine.reconcile_quota_counters()
    assert await used(rows, QUOTA) == 0


async def test_a_locked_key_is_left_for_the_next_pass(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    one, other = uuid4(), uuid4()
    for each in (one, other):
        await key_no(engine, rows, each)
    await connection.execute("update quota_key set taken = 9")
    async with connection.transaction():
        await connection.execute("select from quota_key where quota_policy_id = $1 for update", one)
        await engine.reconcile_quota_counters()
        assert [await used(rows, each) for each in (one, other)] == [9, 0]
    await engine.reconcile_quota_counters()
    assert [await used(rows, each) for each in (one, other)] == [0, 0]


async def test_a_key_that_cannot_be_recounted_does_not_stop_the_others(
    engine: Engine,
    rows: Rows,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    altered_rows: None,
) -> None:
    monkeypatch.setattr(quotas, "PAGE_LIMIT", 2)
    policies = [uuid4() for _ in range(5)]
    for each in policies:
        await key_no(engine, rows, each)
    await connection.execute("update quota_key set taken = 9")
    # A counter that cannot be corrected.
    await connection.execute(
        "insert into slot_return select quota_key_no, 0, 1000 from quota_key where quota_policy_id = $1", policies[1]
    )
    await connection.execute("alter table quota_key add constraint broken check (taken < 100) not valid")
    with caplog.at_level(logging.WARNING):
        found = await engine.reconcile_quota_counters()
    assert (found.processed, found.errors) == (4, 1)
    assert [await used(rows, each) for each in (policies[0], *policies[2:])] == [0] * 4
    assert "could not be recounted" in caplog.text


async def test_expired_guards_are_deleted(engine: Engine, clock: Clock, rows: Rows) -> None:
    await clock.stop()
    await check(engine, QUOTA, some_id(), **limits(rate=5))
    assert await parts_of(engine).quotas.purge_guards() == 0
    await clock.advance(seconds=1)
    assert await parts_of(engine).quotas.purge_guards() == 1
    assert await rows.of("quota_admission") == []

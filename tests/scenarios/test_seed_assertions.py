"""The seed assertions of the specification about keys, suspensions, signals and resumes, by number."""

import asyncio
import logging
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.state import all_cases
from fixtures import Engines, Eventually, Given, Rows, uuid_of
from flowfabric import Engine
from flowfabric.conditions import AllOf, Count, CountKind, Single
from flowfabric.db.database import ATTEMPTS
from flowfabric.errors import ConflictError
from flowfabric.model.event import CompletionOutcome
from flowfabric.outcomes import (
    AlreadyRotated,
    AlreadySeeded,
    HandleKind,
    HmacKids,
    Rotated,
    RotationEntry,
    Seeded,
    Suspended,
)

from .waiting import APPENDED, READY, SATISFIED, A, B, Waiting, args, claim_resumed, completions, refused, suspended


@pytest.fixture
async def keyed(keyless: Engine) -> Engine:
    """An engine whose store has a signing key, v1."""
    await keyless.seed_waitpoint_hmac_secret(kid="v1", secret_hex=A)
    return keyless


async def rotate(engine: Engine, kid: str, secret_hex: str, grace_ms: int = 60_000) -> list[RotationEntry]:
    return await engine.rotate_waitpoint_hmac_secret_all(new_kid=kid, new_secret_hex=secret_hex, grace_ms=grace_ms)


async def test_1_a_rotation_of_an_empty_store_installs_the_first_key(keyless: Engine) -> None:
    assert await rotate(keyless, "v1", A) == [
        RotationEntry(partition=0, result=Rotated(previous_kid=None, new_kid="v1", gc_count=0))
    ]
    assert await keyless.list_waitpoint_hmac_kids() == HmacKids(current_kid="v1", verifying=())


async def test_2_a_repeated_rotation_does_nothing_and_another_secret_is_a_conflict(keyless: Engine) -> None:
    await rotate(keyless, "v1", A)
    assert await rotate(keyless, "v1", A) == [RotationEntry(partition=0, result=AlreadyRotated(kid="v1"))]
    (entry,) = await rotate(keyless, "v1", B)
    assert entry.partition == 0
    assert isinstance(entry.result, ConflictError)
    assert entry.result.code == "rotation_conflict"


async def test_3_a_seed_installs_once(keyless: Engine, rows: Rows) -> None:
    seed = keyless.seed_waitpoint_hmac_secret
    assert await seed(kid="v1", secret_hex=A) == Seeded(kid="v1")
    async with rows.unchanged():
        assert await seed(kid="v1", secret_hex=A) == AlreadySeeded(kid="v1", same_secret=True)
        assert await seed(kid="v1", secret_hex=B) == AlreadySeeded(kid="v1", same_secret=False)
        assert (await refused(seed(kid="v2", secret_hex=B), "invalid_input")).category == "validation"
        for secret in ("a" * 63, "a" * 65, "g" * 64, ""):
            assert (await refused(seed(kid="v1", secret_hex=secret), "invalid_input")).category == "validation"


async def test_4_a_token_stays_valid_after_a_rotation_for_its_own_waitpoint_only(keyed: Engine, given: Given) -> None:
    first = await suspended(keyed, await given.claimed(), READY)
    second = await suspended(keyed, await given.claimed(), READY)
    await rotate(keyed, "v2", B)
    (_, token), (_, other) = first.points["wp"], second.points["wp"]
    assert token.kid == "v1"
    text = token.reveal()
    tampered = text[:-1] + ("0" if text[-1] != "0" else "1")
    for wrong in (tampered, other, text.replace("v1:", "v2:")):
        await refused(first.signal("ready", waitpoint_token=wrong), "invalid_token")
    assert (await first.effect("ready"))[0] == SATISFIED


async def test_5_only_the_expected_signal_resumes(keyed: Engine, given: Given, rows: Rows) -> None:
    wait = await suspended(keyed, await given.claimed(), READY)
    assert (await wait.effect("other"))[0] == APPENDED
    assert await keyed.read_execution_state(wait.execution_id) == "suspended"
    assert (await wait.effect("ready"))[0] == SATISFIED
    assert await completions(rows, wait.execution_id) == [CompletionOutcome.RESUMABLE]


async def test_6_two_distinct_sources_are_needed(keyed: Engine, given: Given) -> None:
    two = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("wp",))
    wait = await suspended(keyed, await given.claimed(), two)
    by = {"source_type": "user"}
    assert (await wait.effect("go", source_identity="ada", **by))[0] == APPENDED
    assert (await wait.effect("go", source_identity="ada", **by))[0] == APPENDED
    assert (await wait.effect("go", source_identity="grace", **by))[0] == SATISFIED


async def test_7_each_of_two_waitpoints_has_its_own_token_and_both_are_needed(keyed: Engine, given: Given) -> None:
    both = AllOf((Single(waitpoint_key="a"), Single(waitpoint_key="b")))
    wait = await suspended(keyed, await given.claimed(), both, keys=("a", "b"))
    assert wait.points["a"][1] != wait.points["b"][1]
    assert (await wait.effect("x", "a"))[0] == APPENDED
    assert (await wait.effect("x", "b"))[0] == SATISFIED


async def test_8_one_idempotency_key_makes_one_suspension(keyed: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    first = await keyed.suspend(handle, args(READY, idempotency_key="once"))
    assert isinstance(first, Suspended)
    async with rows.unchanged():
        second = await keyed.suspend(handle, args(READY, idempotency_key="once"))
    assert isinstance(second, Suspended)
    assert second.details.suspension_id == first.details.suspension_id
    assert second.details.waitpoint_token == first.details.waitpoint_token
    assert len(await rows.of("waitpoint")) == 1


async def test_9_a_resumed_claim_needs_the_satisfaction_and_raises_the_epoch(keyed: Engine, given: Given) -> None:
    run = await given.run()
    wait = await suspended(keyed, run.handle, READY)
    await refused(wait.claim(), "not_a_resumed_execution")
    await wait.signal("ready")
    claimed = await wait.claim()
    assert claimed.execution_id == run.execution_id
    assert claimed.lease_epoch > run.lease_epoch


async def test_10_every_signal_is_observed_before_and_after_the_resume(keyed: Engine, given: Given) -> None:
    wait = await suspended(keyed, await given.claimed(), READY)
    for name in ("a", "b", "ready"):
        await wait.signal(name)
    assert wait.handle is not None
    before = await keyed.observe_signals(wait.handle)
    assert [signal.signal_name for signal in before] == ["a", "b", "ready"]
    assert [signal.satisfier for signal in before] == [False, False, True]
    claimed = await wait.claim()
    assert await keyed.observe_signals(claimed.handle) == before


@pytest.mark.usefixtures("patient_with_locks")
async def test_11_a_signal_waits_for_a_row_that_another_session_locks(
    keyed: Engine, given: Given, rows: Rows, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with all_cases() as case:
        for table in ("suspension", "execution", "waitpoint"):
            with case(table):
                wait = await suspended(keyed, await given.claimed(), READY)
                named = uuid_of(wait.execution_id)
                async with connection.transaction():
                    update = f"update {table} set partition_key = partition_key where execution_id = $1"
                    await connection.execute(update, named)
                    delivering = asyncio.create_task(wait.signal("ready"))
                    await eventually(lambda: connection.fetchval(waiting))
                    assert await keyed.read_execution_state(wait.execution_id) == "suspended"
                    assert not delivering.done()
                answer = await asyncio.wait_for(delivering, 30)
                assert answer.effect == SATISFIED
                assert len(await rows.of("signal", execution_id=named)) == 1
                assert await completions(rows, wait.execution_id) == [CompletionOutcome.RESUMABLE]
                # The next case claims its own execution.
                await keyed.complete((await wait.claim()).handle)
    assert await keyed.find_inconsistencies() == []


def test_11_a_transaction_is_tried_three_times() -> None:
    assert ATTEMPTS == 3


async def test_12_a_fence_suspends_without_a_handle_and_only_once(keyed: Engine, given: Given, rows: Rows) -> None:
    run = await given.run()
    fence: dict[str, Any] = {
        "execution_id": run.execution_id,
        "lease_id": run.lease_id,
        "lease_epoch": run.lease_epoch,
        "attempt_id": run.attempt_id,
    }
    outcome = await keyed.suspend_by_triple(**fence, args=args(READY))
    assert isinstance(outcome, Suspended)
    assert (outcome.handle.kind, outcome.handle.backend) == (HandleKind.SUSPENDED, "Postgres")
    assert (outcome.handle.lane_id, outcome.handle.worker_instance_id) == ("default", "worker-1")
    async with rows.unchanged():
        await refused(keyed.suspend_by_triple(**fence, args=args(READY)), "lease_conflict")
    wait = Waiting(keyed, run.handle, outcome.details, outcome.handle)
    assert (await wait.effect("ready"))[0] == SATISFIED


async def test_13_a_low_max_locks_per_transaction_is_enough_and_causes_no_warning(
    engines: Engines, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    assert int(await connection.fetchval("show max_locks_per_transaction")) < 256
    with caplog.at_level(logging.WARNING):
        engine = await engines()
        await engine.prepare()
    assert caplog.records == []


async def test_13_a_partition_index_beyond_sixteen_bits_is_refused(engine: Engine, rows: Rows) -> None:
    beyond = f"{{fp:32768}}:{uuid4()}"
    async with rows.unchanged():
        for call in (
            engine.describe_execution(beyond),
            engine.resume_execution(execution_id=beyond),
            claim_resumed(engine, beyond),
        ):
            assert (await refused(call, "invalid_input", "exceeds i16 range")).category == "validation"

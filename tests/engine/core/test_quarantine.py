"""Quarantine: a sweep skips items that failed for a while, and processes the others."""

from collections.abc import Sequence
from uuid import UUID

import asyncpg
import pytest

from engine.state import HandClock
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric.db.faults import StoreFault
from flowfabric.engine.core import quarantine as quarantine_module
from flowfabric.engine.core.quarantine import SKIPPED_INTERVALS, Quarantine, pause_after
from flowfabric.engine.core.sweep import RAISE_AFTER, BatchSize
from flowfabric.engine.parts import parts_of
from flowfabric.engine.store import error_of
from flowfabric.model.errors import EngineError, TransportError, error
from flowfabric.model.ids import ExecutionId

IDS = [ExecutionId(f"{{fp:{nth}}}:11111111-1111-4111-8111-{nth:012d}") for nth in range(10)]


@pytest.fixture
def monotonic() -> HandClock:
    return HandClock()


@pytest.fixture
def quarantine(monotonic: HandClock) -> Quarantine:
    """The quarantine of a sweep that runs every two seconds."""
    return Quarantine(2.0, clock=monotonic)


def uuids(*execution_ids: ExecutionId) -> list[UUID]:
    """The UUIDs in execution ids, which is how a quarantine lists them."""
    return [UUID(uuid_of(each)) for each in execution_ids]


def too_slow() -> EngineError:
    """The error of a statement that Postgres canceled because it took too long."""
    fault = StoreFault("timeout", "too slow", is_canceled=True)
    answer = error_of(fault)
    answer.__cause__ = fault
    return answer


def test_every_third_failure_in_a_row_pauses_for_ten_intervals() -> None:
    assert [pause_after(failures, 2.0) for failures in range(1, 8)] == [2, 2, 20, 2, 2, 20, 2]


def test_an_item_that_failed_is_skipped_until_its_pause_is_over(quarantine: Quarantine, monotonic: HandClock) -> None:
    for pause in (2.0, 2.0, 20.0):
        quarantine.failed(IDS[0], "broken")
        monotonic.now += pause - 0.1
        assert quarantine.skipped() == uuids(IDS[0])
        monotonic.now += 0.1
        assert quarantine.skipped() == []


def test_an_item_that_has_not_failed_for_ten_intervals_starts_again_with_the_first_failure(
    quarantine: Quarantine, monotonic: HandClock
) -> None:
    for _ in range(2):
        quarantine.failed(IDS[0], "broken")
    monotonic.now += 2.1 + 2.0 * SKIPPED_INTERVALS
    assert quarantine.skipped() == []
    quarantine.failed(IDS[0], "broken")
    # A third failure in a row would pause for 20 seconds.
    monotonic.now += 2.0
    assert quarantine.skipped() == []


def test_the_oldest_failures_are_forgotten_beyond_the_limit(
    quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine_module, "MAX_SKIPPED", 3)
    for execution_id in IDS[:5]:
        quarantine.failed(execution_id, "broken")
    assert quarantine.skipped() == uuids(*IDS[2:5])


async def test_a_failing_batch_is_processed_item_by_item_and_the_next_skips_the_failures(
    quarantine: Quarantine,
) -> None:
    bad, tried, done = IDS[:6], [], []

    async def together(skipped: Sequence[UUID], found: list[ExecutionId]) -> int:
        found[:] = [each for each in IDS if each not in done and UUID(uuid_of(each)) not in skipped][:3]
        if set(found) & set(bad):
            raise error("corruption")
        done.extend(found)
        return len(found)

    async def alone(execution_id: ExecutionId) -> bool:
        # Items fail in both ways: with an exception, or by returning False.
        tried.append(execution_id)
        if execution_id in bad[:3]:
            raise ValueError("broken")
        return execution_id not in bad

    assert await quarantine.sweep(together, alone, limit=3) == 3
    assert (tried, done) == (bad, IDS[6:9])
    assert quarantine.skipped() == uuids(*bad)
    assert await quarantine.sweep(together, alone, limit=3) == 1


async def test_a_connection_fault_is_raised_and_does_not_count_as_a_failure_of_an_item(quarantine: Quarantine) -> None:
    async def together(skipped: Sequence[UUID], found: list[ExecutionId]) -> int:
        found[:] = IDS[:2]
        raise TransportError("transport", "gone")

    async def alone(execution_id: ExecutionId) -> bool:
        raise AssertionError("no item is tried alone")

    with pytest.raises(TransportError):
        await quarantine.sweep(together, alone, limit=3)
    assert quarantine.skipped() == []


async def test_a_fault_before_any_item_is_found_is_raised(quarantine: Quarantine) -> None:
    async def together(skipped: Sequence[UUID], found: list[ExecutionId]) -> int:
        raise error("corruption")

    async def alone(execution_id: ExecutionId) -> bool:
        raise AssertionError("no item is tried alone")

    with pytest.raises(Exception, match="corruption"):
        await quarantine.sweep(together, alone, limit=3)


async def test_a_failing_batch_is_halved_until_only_failing_items_are_left(quarantine: Quarantine) -> None:
    bad, sizes = {IDS[2], IDS[7]}, []

    async def batch(skipped: Sequence[UUID]) -> int:
        raise error("corruption")

    async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
        return IDS[:8]

    async def items(execution_ids: Sequence[ExecutionId]) -> int:
        sizes.append(len(execution_ids))
        if bad & set(execution_ids):
            raise error("corruption")
        return len(execution_ids)

    assert await quarantine.sweep_by_halves(batch, list_due, items, limit=9) == 6
    assert sorted(sizes, reverse=True) == [8, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1]
    assert quarantine.skipped() == uuids(IDS[2], IDS[7])


async def test_a_connection_fault_while_a_batch_is_halved_does_not_count_as_a_failure_of_an_item(
    quarantine: Quarantine,
) -> None:
    async def batch(skipped: Sequence[UUID]) -> int:
        raise error("corruption")

    async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
        return IDS[:2]

    async def items(execution_ids: Sequence[ExecutionId]) -> int:
        if len(execution_ids) == 2:
            raise error("corruption")
        raise TransportError("transport", "gone")

    with pytest.raises(TransportError):
        await quarantine.sweep_by_halves(batch, list_due, items, limit=3)
    assert quarantine.skipped() == []


async def test_batches_become_smaller_after_timeouts_and_larger_when_they_are_in_time(
    quarantine: Quarantine, monotonic: HandClock
) -> None:
    size, slow, sizes = BatchSize(), [IDS[0]], []

    async def batch(skipped: Sequence[UUID]) -> int:
        return await items([each for each in IDS if UUID(uuid_of(each)) not in skipped])

    async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
        return [each for each in IDS if UUID(uuid_of(each)) not in skipped]

    async def items(execution_ids: Sequence[ExecutionId]) -> int:
        sizes.append(len(execution_ids))
        if set(slow) & set(execution_ids):
            raise too_slow()
        return len(execution_ids)

    async def sweep() -> int:
        return await quarantine.sweep_in_time(batch, list_due, items, limit=10, size=size, parts=64)

    assert [await sweep() for _ in range(5)] == [0, 0, 0, 0, 1]
    assert sizes == [10, 2, 1, 1, 1]
    assert quarantine.skipped() == uuids(IDS[0])
    sizes.clear()
    for _ in range(RAISE_AFTER * 7 - 1):
        await sweep()
    assert sizes == [1] * (4 * RAISE_AFTER - 1) + [2] * RAISE_AFTER + [5] * RAISE_AFTER + [9] * RAISE_AFTER
    # It is not tried again soon, because that takes several timeouts.
    monotonic.now += 2.0 * SKIPPED_INTERVALS - 0.1
    assert quarantine.skipped() == uuids(IDS[0])


async def test_items_that_are_left_do_not_stop_others_while_batches_are_small(quarantine: Quarantine) -> None:
    size, left, sizes = BatchSize(), IDS[:4], []
    size.reduce()

    async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
        return [each for each in IDS if UUID(uuid_of(each)) not in skipped]

    async def items(execution_ids: Sequence[ExecutionId]) -> int:
        sizes.append(len(execution_ids))
        return len(set(execution_ids) - set(left))

    async def batch(skipped: Sequence[UUID]) -> int:
        raise AssertionError("batches are small")

    for _ in range(6):
        await quarantine.sweep_in_time(batch, list_due, items, limit=10, size=size)
    assert sizes == [2, 1, 1, 1, 1, 1]
    assert quarantine.skipped() == uuids(*left)


async def test_a_batch_that_finds_nothing_due_makes_the_next_one_as_large_as_possible(quarantine: Quarantine) -> None:
    size = BatchSize()
    for _ in range(3):
        size.reduce()

    async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
        return []

    async def nothing(ids: Sequence[object]) -> int:
        raise AssertionError("nothing is due")

    assert await quarantine.sweep_in_time(nothing, list_due, nothing, limit=10, size=size) == 0
    assert not size.is_reduced


async def test_an_item_that_can_be_set_aside_is_not_skipped(quarantine: Quarantine) -> None:
    size, due = BatchSize(), IDS[:2]
    size.reduce()

    async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
        return [each for each in due if UUID(uuid_of(each)) not in skipped]

    async def slow(ids: Sequence[object]) -> int:
        raise too_slow()

    async def set_aside(execution_id: ExecutionId) -> bool:
        if execution_id == IDS[1]:
            return False
        due.remove(execution_id)
        return True

    for _ in range(2):
        await quarantine.sweep_in_time(slow, list_due, slow, limit=4, size=size, set_aside=set_aside)
    assert (due, quarantine.skipped()) == ([IDS[1]], uuids(IDS[1]))


@pytest.mark.parametrize("kind", ["transport", "timeout"])
@pytest.mark.parametrize("is_sent", [True, False])
@pytest.mark.parametrize("is_small", [True, False])
async def test_a_store_that_does_not_answer_makes_no_batch_smaller(
    quarantine: Quarantine, kind: str, *, is_sent: bool, is_small: bool
) -> None:
    size = BatchSize()
    if is_small:
        size.reduce()
    limit = size.of(10)

    async def gone(ids: Sequence[object]) -> int:
        # As without a free connection in time, if nothing was sent.
        raise TransportError(kind, "gone", outcome_unknown=is_sent)

    async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
        return IDS[:1]

    with pytest.raises(TransportError):
        await quarantine.sweep_in_time(gone, list_due, gone, limit=10, size=size)
    assert (size.of(10), quarantine.skipped()) == (limit, [])


async def test_a_store_that_is_too_slow_to_list_what_is_due_is_reported(quarantine: Quarantine) -> None:
    size = BatchSize()

    async def slow(ids: Sequence[object]) -> int:
        raise too_slow()

    async def list_due(skipped: Sequence[UUID]) -> list[ExecutionId]:
        raise too_slow()

    async def sweep() -> int:
        return await quarantine.sweep_in_time(slow, list_due, slow, limit=10, size=size)

    assert await sweep() == 0
    with pytest.raises(TransportError, match="too slow"):
        await sweep()


async def test_an_unreadable_policy_does_not_block_other_timeouts(
    engines: Engines, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    engine = await engines(attempt_timeout_interval_s=3600)
    policy = {"timeout_policy": {"attempt_timeout_ms": 1000}}
    bad, good = await given.claimed(policy=policy), await given.claimed(policy=policy)
    past_deadline = await given.claimed(policy=policy, execution_deadline_at=await clock.now() + 1000)
    # A policy that cannot be read, as a faulty version might have stored it; a deadline does not depend on the policy.
    await connection.execute(
        "update execution set policy = '[]' where execution_id = any($1)",
        [uuid_of(bad.execution_id), uuid_of(past_deadline.execution_id)],
    )
    await clock.advance(ms=1000)
    assert await parts_of(engine).timeouts.expire_due() == 2
    states = [(await rows.execution(each.execution_id))["public_state"] for each in (bad, good, past_deadline)]
    assert states == ["active", "expired", "expired"]
    assert parts_of(engine).timeouts.quarantine.skipped() == uuids(bad.execution_id)

"""Workers, control planes and sweeps end, delay or expire the same leases at once: one wins, and the rows agree."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from engine.state import IS_WHOLE, all_cases, made, new
from fixtures import Clock, Eventually, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Cancelled
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import (
    AlreadySatisfied,
    AlreadyTerminal,
    Completed,
    Expired,
    Marked,
    NotYetDue,
    Promoted,
    RetryScheduled,
    TerminalFailed,
)

from .races import HOUR_MS, TOGETHER, Rivals, cancel_all, check_winners, claim, claimed, outcome, race_all, rivals

__all__ = ["rivals"]

WAVES = 12 if IS_WHOLE else 3
"""How many waves of concurrent races a test runs."""
RETRYING = {"retry_policy": {"max_retries": 9, "backoff": {"type": "fixed", "delay_ms": 60_000}}}


def fence(handle: Handle) -> dict[str, Any]:
    """The arguments that name the execution and the lease of a handle."""
    return {
        "execution_id": handle.execution_id,
        "lease_id": handle.lease_id,
        "lease_epoch": handle.lease_epoch,
        "attempt_id": handle.attempt_id,
    }


async def lease_ends(rows: Rows, handle: Handle) -> list[str]:
    """Why each lease of an execution ended."""
    return [
        row["reason"] or "marked"
        for row in await rows.events(handle.execution_id)
        if row["kind"] in ("ended", "released", "expired")
    ]


async def test_a_run_is_delayed_or_its_lease_is_marked_as_expired(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    worker, other, third = await rivals(3)
    seen: Counter[str] = Counter()

    async def expire_leases_after_pings(count: int) -> None:
        for _ in range(count):
            await other.ping()
        await clock.advance(seconds=61)

    def calls(handle: Handle) -> list[Awaitable[Any]]:
        return [
            worker.delay(handle, 2**61),
            other.mark_lease_expired_if_due(handle.execution_id),
            third.mark_lease_expired_if_due(handle.execution_id),
        ]

    for wave in range(WAVES):
        handles = await claimed(worker, count=TOGETHER, lease_ttl_ms=60_000)
        raced, _, _ = await asyncio.gather(
            race_all(wave, calls, handles),
            expire_leases_after_pings(wave % 4 * 3),
            parts_of(third).lease_expiry.sweep(),
        )
        for handle, (delay, *marks) in raced:
            row = await rows.execution(handle.execution_id)
            assert marks.count(Marked()) <= 1
            if delay is None:
                assert (row["public_state"], row["ownership_state"]) == ("delayed", "unowned")
                assert Marked() not in marks
                assert await lease_ends(rows, handle) == ["worker_delay"]
            else:
                assert delay == "lease_expired"
                assert (row["public_state"], row["ownership_state"]) == ("active", "lease_expired_reclaimable")
                assert await lease_ends(rows, handle) == ["marked"]
            seen["delayed" if delay is None else "marked"] += 1
        await cancel_all(worker, *(handle.execution_id for handle in handles))
    check_winners(seen, "delayed", "marked", rounds=WAVES * TOGETHER)


async def test_of_a_worker_and_two_control_planes_one_completes(rivals: Rivals, rows: Rows) -> None:
    worker, first, second = await rivals(3)
    won: Counter[str] = Counter()

    def calls(handle: Handle) -> list[Awaitable[Any]]:
        named = handle.execution_id
        return [
            worker.complete(handle, b"worker"),
            first.complete_execution(**fence(handle), payload=b"first", attempt_index=0),
            second.complete_execution(execution_id=named, source="operator_override", payload=b"second"),
        ]

    for wave in range(WAVES):
        handles = await claimed(worker, count=TOGETHER)
        for handle, answers in await race_all(wave, calls, handles):
            # For the worker, a run that somebody else has completed counts as completed.
            assert answers[0] is None
            result = await worker.get_execution_result(handle.execution_id)
            assert result is not None
            won[result.decode()] += 1
            completed = [isinstance(answer, Completed) for answer in answers[1:]]
            assert completed == [result == b"first", result == b"second"]
            assert {answer for answer in answers[1:] if isinstance(answer, str)} <= {"execution_not_active"}
            assert await lease_ends(rows, handle) == ["completed"]
            assert len(await rows.of("attempt_all", execution_id=uuid_of(handle.execution_id))) == 1
    check_winners(won, "worker", "first", "second", rounds=WAVES * TOGETHER)


async def test_a_delayed_execution_is_promoted_once(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    engines = await rivals(3)

    def calls(execution_id: ExecutionId) -> list[Awaitable[Any]]:
        return [engine.promote_delayed(execution_id) for engine in engines]

    for wave in range(WAVES):
        until = await clock.now() + 60_000
        execution_ids = await made(engines[0], *[new(delay_until=until)] * TOGETHER)
        await clock.advance(seconds=61)
        raced, swept = await asyncio.gather(
            race_all(wave, calls, execution_ids), parts_of(engines[1]).delays.promote_due()
        )
        promoted = [sum(isinstance(answer, Promoted) for answer in answers) for _, answers in raced]
        assert max(promoted) <= 1
        assert sum(promoted) + swept == TOGETHER
        others = [answer for _, answers in raced for answer in answers if not isinstance(answer, Promoted)]
        assert set(others) == {AlreadySatisfied(reason="not_delayed")}
        for execution_id in execution_ids:
            assert (await rows.execution(execution_id))["public_state"] == "waiting"
        await cancel_all(engines[0], *execution_ids)


async def test_of_two_failures_and_a_cancel_one_ends_the_run(rivals: Rivals, rows: Rows) -> None:
    worker, first, second = await rivals(3)

    def calls(handle: Handle) -> list[Awaitable[Any]]:
        return [
            first.fail_execution(**fence(handle), failure_reason="x"),
            second.cancel_execution(execution_id=handle.execution_id, reason="x"),
            worker.fail(handle, reason="y"),
        ]

    for wave in range(WAVES):
        policy = RETRYING if wave % 2 else None
        handles = await claimed(worker, count=TOGETHER, policy=policy)
        for handle, (failed, cancelled, repeated) in await race_all(wave, calls, handles):
            row = await rows.execution(handle.execution_id)
            ends = await lease_ends(rows, handle)
            assert len(await rows.of("attempt_all", execution_id=uuid_of(handle.execution_id))) == 1
            if policy is None:
                # The losers are refused, except a worker whose run has failed: its call counts as repeated.
                assert len(ends) == 1
                has_failed = row["terminal_outcome"] == "failed"
                assert isinstance(cancelled, Cancelled) != has_failed
                assert isinstance(repeated, TerminalFailed) == has_failed
                assert isinstance(failed, TerminalFailed) == (row["failure_reason"] == "x")
            else:
                # A cancel also ends an execution that waits for its retry.
                assert isinstance(cancelled, Cancelled)
                assert row["terminal_outcome"] == "cancelled"
                assert ends in (["cancelled"], ["failed_retry_scheduled", "cancelled"])
                assert not (isinstance(failed, RetryScheduled) and len(ends) == 1)


async def test_of_a_delay_a_wait_a_completion_and_a_failure_one_ends_the_lease(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(4)
    won: Counter[str] = Counter()

    def calls(handle: Handle) -> list[Awaitable[Any]]:
        one, two, three, four = random.sample(engines, 4)
        return [
            one.delay(handle, 2**61),
            two.wait_children(handle),
            three.complete_execution(**fence(handle)),
            four.fail_execution(**fence(handle), failure_reason="x"),
            four.renew_lease(**fence(handle), attempt_index=0, lease_ttl_ms=HOUR_MS),
        ]

    ends = {
        "worker_delay": "suspended",
        "waiting_children": "suspended",
        "completed": "ended_success",
        "failed_terminal": "ended_failure",
    }
    for wave in range(WAVES):
        handles = await claimed(engines[0], count=TOGETHER)
        for handle, answers in await race_all(wave, calls, handles):
            (winner,) = [at for at, answer in enumerate(answers[:4]) if answer != "execution_not_active"]
            (reason,) = await lease_ends(rows, handle)
            (attempt,) = await rows.of("attempt_all", execution_id=uuid_of(handle.execution_id))
            assert (reason, attempt["attempt_state"]) == list(ends.items())[winner]
            won[reason] += 1
        await cancel_all(engines[0], *(handle.execution_id for handle in handles))
    check_winners(won, *ends, rounds=WAVES * TOGETHER)


async def test_an_attempt_is_completed_or_times_out_once(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    worker, first, second = await rivals(3)
    policy = {"timeout_policy": {"attempt_timeout_ms": 60_000}}
    won: Counter[str] = Counter()

    def calls(handle: Handle) -> list[Awaitable[Any]]:
        return [
            worker.complete(handle),
            first.expire_execution(handle.execution_id, "attempt_timeout"),
            second.expire_execution(handle.execution_id, "attempt_timeout"),
        ]

    async def sweep_after_pings(count: int) -> int:
        for _ in range(count):
            await second.ping()
        return await parts_of(second).timeouts.expire_due()

    for wave in range(WAVES):
        retry = RETRYING if wave % 2 else {}
        handles = await claimed(worker, count=TOGETHER, lease_ttl_ms=600_000, policy={**policy, **retry})
        await clock.advance(seconds=61)
        raced, swept = await asyncio.gather(race_all(wave, calls, handles), sweep_after_pings(9 - wave % 4 * 3))
        timed_out_by_sweep = 0
        for handle, (completed, *expired) in raced:
            timed_out = [answer for answer in expired if isinstance(answer, Expired | RetryScheduled)]
            late = AlreadyTerminal() if not retry or completed is None else NotYetDue()
            assert all(answer == late for answer in expired if answer not in timed_out)
            (reason,) = await lease_ends(rows, handle)
            assert (completed is None) == (reason == "completed")
            assert len(timed_out) <= (0 if completed is None else 1)
            timed_out_by_sweep += completed is not None and not timed_out
            won[reason] += 1
        await cancel_all(worker, *(handle.execution_id for handle in handles))
        assert swept == timed_out_by_sweep
    check_winners(won, "completed", "expired:attempt_timeout", rounds=WAVES * TOGETHER)


async def test_a_run_that_is_released_many_times_stays_one_attempt(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(3)
    execution_id = (await engines[0].create_execution(**new())).execution_id
    turns = 0

    async def work(engine: Engine) -> None:
        nonlocal turns
        while turns < WAVES * TOGETHER:
            for one in await claim(engine):
                turns += 1
                assert one.lease_epoch == turns
                assert one.attempt_index == 0
                await (engine.delay(one.handle, 0) if turns % 2 else engine.wait_children(one.handle))

    await asyncio.gather(*map(work, engines))
    row = await rows.execution(execution_id)
    assert (row["attempt_count"], row["lease_epoch"]) == (1, turns)
    assert len(await rows.of("attempt_all")) == 1
    kinds = [event["kind"] for event in await rows.events(execution_id)]
    assert kinds == ["acquired", "released"] * turns


AFTER_A_CANCEL: dict[str, tuple[Callable[[Engine, Handle], Awaitable[Any]], Any]] = {
    "complete_execution": (lambda engine, handle: engine.complete_execution(**fence(handle)), "execution_not_active"),
    "fail_execution": (
        lambda engine, handle: engine.fail_execution(**fence(handle), failure_reason="x"),
        "execution_not_active",
    ),
    "renew_lease": (
        lambda engine, handle: engine.renew_lease(**fence(handle), attempt_index=0, lease_ttl_ms=1000),
        "execution_not_active",
    ),
    "delay": (lambda engine, handle: engine.delay(handle, 0), "execution_not_active"),
    "wait_children": (lambda engine, handle: engine.wait_children(handle), "execution_not_active"),
    "hand_back": (lambda engine, handle: engine.hand_back(handle), "execution_not_active"),
    "expire_execution": (
        lambda engine, handle: engine.expire_execution(handle.execution_id, "execution_deadline"),
        AlreadyTerminal(),
    ),
    "promote_delayed": (
        lambda engine, handle: engine.promote_delayed(handle.execution_id),
        AlreadySatisfied(reason="not_delayed"),
    ),
    "mark_lease_expired_if_due": (
        lambda engine, handle: engine.mark_lease_expired_if_due(handle.execution_id),
        AlreadySatisfied(reason="not_active"),
    ),
}
"""What each operation answers if the execution is cancelled while it waits for the row."""


@pytest.mark.usefixtures("patient_with_locks")
async def test_an_operation_that_waited_for_a_lock_decides_by_the_row_it_then_finds(
    engine: Engine, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with all_cases() as case:
        for operation, (call, expected) in AFTER_A_CANCEL.items():
            with case(operation):
                (handle,) = await claimed(engine)
                async with connection.transaction():
                    # The row as a cancel leaves it.
                    await connection.execute(
                        """update execution set lifecycle_phase = 'terminal', ownership_state = 'unowned',
                                  attempt_state = 'attempt_terminal', terminal_outcome = 'cancelled',
                                  last_transition_at = ff_now() where execution_id = $1""",
                        uuid_of(handle.execution_id),
                    )
                    answer = asyncio.ensure_future(outcome(call(engine, handle)))
                    await eventually(lambda: connection.fetchval(waiting))
                assert await answer == expected

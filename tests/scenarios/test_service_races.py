"""Rivals over parking, timers and the service forms: one wins, the others are told, and the rows agree."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Eventually, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Cancelled
from flowfabric.model.handle import Handle
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

from .test_races import IS_WHOLE, claim, claimed, new, outcome, rivals  # noqa: F401

WAVES, TOGETHER = 12 if IS_WHOLE else 6, 20
RETRYING = {"retry_policy": {"max_retries": 9, "backoff": {"type": "fixed", "delay_ms": 60_000}}}


def fence(handle: Handle) -> dict[str, Any]:
    """The execution and the fence of a handle as arguments."""
    return {
        "execution_id": handle.execution_id,
        "lease_id": handle.lease_id,
        "lease_epoch": handle.lease_epoch,
        "attempt_id": handle.attempt_id,
    }


async def at_once(*calls: Awaitable[Any]) -> list[Any]:
    """The answers of calls that begin in one moment, in an order of chance."""
    order = random.sample(range(len(calls)), len(calls))
    answers = await asyncio.gather(*(calls[at] for at in order))
    return [answers[order.index(at)] for at in range(len(calls))]


async def endings(rows: Rows, handle: Handle) -> list[str]:
    """Why each lease of an execution ended."""
    return [
        row["reason"] or "marked"
        for row in await rows.events(handle.execution_id)
        if row["kind"] in ("ended", "released", "expired")
    ]


async def test_a_run_is_put_aside_or_its_lease_is_marked(rivals: Any, rows: Rows, clock: Clock) -> None:  # noqa: F811
    worker, other, third = await rivals(3)
    seen: Counter[str] = Counter()

    async def pass_time(turns: int) -> None:
        for _ in range(turns):
            await other.ping()
        await clock.advance(seconds=61)

    for wave in range(WAVES):
        handles = await claimed(worker, count=TOGETHER, lease_ttl_ms=60_000)

        async def race(handle: Handle) -> tuple[Any, list[Any]]:
            delay, *marks = await at_once(
                outcome(worker.delay(handle, 2**61)),
                other.mark_lease_expired_if_due(handle.execution_id),
                third.mark_lease_expired_if_due(handle.execution_id),
            )
            return delay, marks

        *raced, _, _ = await at_once(*map(race, handles), pass_time(wave % 4), parts_of(third).lease_expiry.sweep())
        for handle, (delay, marks) in zip(handles, raced, strict=True):
            row = await rows.execution(handle.execution_id)
            assert marks.count(Marked()) <= 1
            if delay is None:
                assert (row["public_state"], row["ownership_state"]) == ("delayed", "unowned")
                assert Marked() not in marks
                assert await endings(rows, handle) == ["worker_delay"]
            else:
                assert delay == "lease_expired"
                assert (row["public_state"], row["ownership_state"]) == ("active", "lease_expired_reclaimable")
                assert await endings(rows, handle) == ["marked"]
            seen["parked" if delay is None else "marked"] += 1
        for handle in handles:
            await worker.cancel_execution(execution_id=handle.execution_id, reason="next wave")
    assert seen.total() == WAVES * TOGETHER


async def test_a_service_and_a_worker_complete_once(rivals: Any, rows: Rows) -> None:  # noqa: F811
    worker, first, second = await rivals(3)
    won: Counter[str] = Counter()
    for _ in range(WAVES):
        handles = await claimed(worker, count=TOGETHER)

        async def race(handle: Handle) -> list[Any]:
            return await at_once(
                outcome(worker.complete(handle, b"worker")),
                outcome(first.complete_execution(**fence(handle), payload=b"first", attempt_index=0)),
                outcome(
                    second.complete_execution(
                        execution_id=handle.execution_id, source="operator_override", payload=b"second"
                    )
                ),
            )

        for handle, answers in zip(handles, await at_once(*map(race, handles)), strict=True):
            # The worker's repeat is a success whoever it was that completed its run.
            assert answers[0] is None
            result = await worker.get_execution_result(handle.execution_id)
            assert result is not None
            won[result.decode()] += 1
            expected = [isinstance(answer, Completed) for answer in answers[1:]]
            assert expected == [result == b"first", result == b"second"]
            assert all(answer in ("execution_not_active",) for answer in answers[1:] if isinstance(answer, str))
            assert await endings(rows, handle) == ["completed"]
            assert len(await rows.of("attempt_all", execution_id=handle.execution_id[-36:])) == 1
    assert won.total() == WAVES * TOGETHER


async def test_a_delay_is_promoted_once(rivals: Any, rows: Rows, clock: Clock) -> None:  # noqa: F811
    engines: list[Engine] = await rivals(3)
    for _ in range(WAVES):
        until = await clock.now() + 60_000
        made = [(await engines[0].create_execution(**new(delay_until=until))).execution_id for _ in range(TOGETHER)]
        await clock.advance(seconds=61)

        async def race(execution_id: Any) -> list[Any]:
            return await at_once(*(engine.promote_delayed(execution_id) for engine in engines))

        *raced, swept = await at_once(*map(race, made), parts_of(engines[1]).delays.promote_due())
        promoted = [sum(isinstance(answer, Promoted) for answer in answers) for answers in raced]
        assert max(promoted) <= 1
        assert sum(promoted) + swept == TOGETHER
        for answers in raced:
            assert all(
                answer == AlreadySatisfied(reason="not_delayed")
                for answer in answers
                if not isinstance(answer, Promoted)
            )
        for execution_id in made:
            assert (await rows.execution(execution_id))["public_state"] == "waiting"
            await engines[0].cancel_execution(execution_id=execution_id, reason="next wave")


async def test_a_failure_and_a_cancel_meet(rivals: Any, rows: Rows) -> None:  # noqa: F811
    worker, first, second = await rivals(3)
    for wave in range(WAVES):
        policy = RETRYING if wave % 2 else None
        made = [await worker.create_execution(**new(policy=policy)) for _ in range(TOGETHER)]
        handles = [one.handle for one in await claim(worker, limit=TOGETHER)]
        assert len(handles) == len(made)

        async def race(handle: Handle) -> list[Any]:
            return await at_once(
                outcome(first.fail_execution(**fence(handle), failure_reason="x")),
                outcome(second.cancel_execution(execution_id=handle.execution_id, reason="x")),
                outcome(worker.fail(handle, reason="y")),
            )

        for handle, (failed, cancelled, repeated) in zip(handles, await at_once(*map(race, handles)), strict=True):
            row = await rows.execution(handle.execution_id)
            ended = await endings(rows, handle)
            assert len(await rows.of("attempt_all", execution_id=handle.execution_id[-36:])) == 1
            if policy is None:
                # One ending; who came too late is told so, but for the worker whose run did fail.
                assert len(ended) == 1
                has_failed = row["terminal_outcome"] == "failed"
                assert isinstance(cancelled, Cancelled) != has_failed
                assert isinstance(repeated, TerminalFailed) == has_failed
                assert isinstance(failed, TerminalFailed) == (row["failure_reason"] == "x")
            else:
                # A retry that waits is cancelled too, after the failure or instead of it.
                assert isinstance(cancelled, Cancelled)
                assert row["terminal_outcome"] == "cancelled"
                assert ended in (["cancelled"], ["failed_retry_scheduled", "cancelled"])
                assert not (isinstance(failed, RetryScheduled) and len(ended) == 1)


async def test_a_run_leaves_its_lease_in_one_way(rivals: Any, rows: Rows) -> None:  # noqa: F811
    engines: list[Engine] = await rivals(4)
    seen: Counter[str] = Counter()
    for _ in range(WAVES):
        handles = await claimed(engines[0], count=TOGETHER)

        async def race(handle: Handle) -> list[Any]:
            one, two, three, four = random.sample(engines, 4)
            return await at_once(
                outcome(one.delay(handle, 2**61)),
                outcome(two.wait_children(handle)),
                outcome(three.complete_execution(**fence(handle))),
                outcome(four.fail_execution(**fence(handle), failure_reason="x")),
                outcome(four.renew_lease(**fence(handle), attempt_index=0, lease_ttl_ms=1000)),
            )

        for handle, answers in zip(handles, await at_once(*map(race, handles)), strict=True):
            winners = [answer for answer in answers[:4] if answer != "execution_not_active"]
            assert len(winners) == 1, answers
            (reason,) = await endings(rows, handle)
            (attempt,) = await rows.of("attempt_all", execution_id=handle.execution_id[-36:])
            place = answers[:4].index(winners[0])
            expected = ("worker_delay", "waiting_children", "completed", "failed_terminal")[place]
            state = ("suspended", "suspended", "ended_success", "ended_failure")[place]
            assert (reason, attempt["attempt_state"]) == (expected, state)
            seen[reason] += 1
            if place < 2:
                await engines[0].cancel_execution(execution_id=handle.execution_id, reason="next wave")
    assert seen.total() == WAVES * TOGETHER


async def test_an_attempt_that_times_out_ends_once(rivals: Any, rows: Rows, clock: Clock) -> None:  # noqa: F811
    worker, first, second = await rivals(3)
    policy = {"timeout_policy": {"attempt_timeout_ms": 60_000}}
    seen: Counter[str] = Counter()
    for wave in range(WAVES):
        retry = RETRYING if wave % 2 else {}
        for _ in range(TOGETHER):
            await worker.create_execution(**new(policy={**policy, **retry}))
        handles = [one.handle for one in await claim(worker, limit=TOGETHER, lease_ttl_ms=600_000)]
        await clock.advance(seconds=61)

        async def race(handle: Handle) -> list[Any]:
            return await at_once(
                outcome(worker.complete(handle)),
                first.expire_execution(handle.execution_id, "attempt_timeout"),
                second.expire_execution(handle.execution_id, "attempt_timeout"),
            )

        *raced, swept = await at_once(*map(race, handles), parts_of(second).timeouts.expire_due())
        timed_out = 0
        for handle, (completed, *expired) in zip(handles, raced, strict=True):
            won = [answer for answer in expired if isinstance(answer, Expired | RetryScheduled)]
            late = AlreadyTerminal() if not retry or completed is None else NotYetDue()
            assert all(answer == late for answer in expired if answer not in won)
            (reason,) = await endings(rows, handle)
            assert (completed is None) == (reason == "completed")
            assert len(won) <= (0 if completed is None else 1)
            timed_out += completed is not None and not won
            seen[reason] += 1
            await outcome(worker.cancel_execution(execution_id=handle.execution_id, reason="next wave"))
        assert swept == timed_out
    assert seen.total() == WAVES * TOGETHER


async def test_a_run_that_is_put_aside_again_and_again_stays_one_attempt(rivals: Any, rows: Rows) -> None:  # noqa: F811
    engines: list[Engine] = await rivals(3)
    made = (await engines[0].create_execution(**new())).execution_id
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
    row = await rows.execution(made)
    assert (row["attempt_count"], row["lease_epoch"]) == (1, turns)
    assert len(await rows.of("attempt_all")) == 1
    kinds = [event["kind"] for event in await rows.events(made)]
    assert kinds == ["acquired", "released"] * turns


LATE: dict[str, tuple[Callable[[Engine, Handle], Awaitable[Any]], Any]] = {
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


@pytest.mark.usefixtures("patient_with_locks")
@pytest.mark.parametrize("operation", LATE)
async def test_each_waits_for_a_row_held_elsewhere_and_judges_what_it_finds(
    engine: Engine, connection: asyncpg.Connection, eventually: Eventually, operation: str
) -> None:
    async def is_waited_for() -> bool:
        waiting = (
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        return bool(await connection.fetchval(waiting))

    call, expected = LATE[operation]
    (handle,) = await claimed(engine)
    async with connection.transaction():
        await connection.execute(
            """update execution set lifecycle_phase = 'terminal', ownership_state = 'unowned',
                      attempt_state = 'attempt_terminal', terminal_outcome = 'cancelled',
                      last_transition_at = ff_now()"""
        )
        waiting = asyncio.ensure_future(outcome(call(engine, handle)))
        await eventually(is_waited_for)
    assert await waiting == expected

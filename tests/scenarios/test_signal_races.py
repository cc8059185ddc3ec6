"""Rivals over what a suspended execution waits for: one wins, the others are told, and the rows agree."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from fixtures import Clock, Rows
from flowfabric import Engine
from flowfabric.conditions import TimeoutBehavior
from flowfabric.engine.parts import parts_of
from flowfabric.engine.wait.deliver import Signals
from flowfabric.outcomes import (
    Accepted,
    AlreadySatisfied,
    Cancelled,
    Handle,
    Resumed,
    Rotated,
    SignalDuplicate,
    SuspensionExpired,
)

from .test_races import IS_WHOLE, at_once, claimed, outcome, rivals
from .waiting import Waiting, args, suspended

__all__ = ["rivals"]

TOGETHER = 20
ROUNDS = 1000 if IS_WHOLE else 400

RESUMABLE = 6
"""The outcome the completion feed tells of a wait that a signal has ended."""
OVER = "target_not_signalable"
"""What a signal is told whose wait is over."""


async def waves(engine: Engine) -> list[list[Handle]]:
    """Runs of all rounds, a wave at a time."""
    handles = [handle for _ in range(2) for handle in await claimed(engine, count=ROUNDS // 2, lease_ttl_ms=3_600_000)]
    return [handles[at : at + TOGETHER] for at in range(0, ROUNDS, TOGETHER)]


async def waits(engine: Engine, handles: list[Handle], **overrides: Any) -> list[Waiting]:
    """A wave of suspended executions."""
    return list(await asyncio.gather(*(suspended(engine, handle, **overrides) for handle in handles)))


def signal(engine: Engine, wait: Waiting, key: str = "wp", **overrides: Any) -> Awaitable[Any]:
    """A signal that is sent through some engine."""
    waitpoint_id, token = wait.points[key]
    return engine.deliver_signal(
        **{
            "execution_id": wait.execution_id,
            "waitpoint_id": waitpoint_id,
            "waitpoint_token": token,
            "signal_name": "ready",
            **overrides,
        }
    )


def has_met(answer: Any) -> bool:
    """Whether a signal was told that it has met the condition."""
    return isinstance(answer, Accepted) and answer.effect == "resume_condition_satisfied"


class Left:
    """What the rounds have left in the tables, by execution."""

    def __init__(self, tables: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
        self._tables = tables

    @classmethod
    async def read(cls, rows: Rows) -> "Left":
        tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name in ("execution", "suspension", "waitpoint", "signal", "event_each"):
            tables[name] = defaultdict(list)
            for row in await rows.of(name):
                tables[name][str(row["execution_id"])].append(row)
        return cls(tables)

    def of(self, table: str, execution_id: str) -> list[dict[str, Any]]:
        """The rows of an execution."""
        return self._tables[table][execution_id[-36:]]

    def state(self, execution_id: str) -> str:
        """Where the execution stands."""
        (row,) = self.of("execution", execution_id)
        return str(row["public_state"])

    def closed(self, execution_id: str) -> set[str | None]:
        """Why the suspension and the waitpoints are closed; None for one that is open."""
        return {row["close_reason"] for table in ("suspension", "waitpoint") for row in self.of(table, execution_id)}

    def told(self, execution_id: str) -> Counter[int]:
        """How often each outcome was told."""
        return Counter(row["outcome"] for row in self.of("event_each", execution_id) if row["outcome"] is not None)


async def settled(engine: Engine, rows: Rows) -> Left:
    """What is left once all rounds are run."""
    assert await engine.find_inconsistencies() == []
    return await Left.read(rows)


def check_won(won: Counter[str], *rivals_of: str) -> None:
    """A race that somebody never wins is none."""
    assert set(won) == set(rivals_of), won
    assert won.total() == ROUNDS


@pytest.mark.parametrize("key", [None, "once"], ids=["two signals", "one signal twice"])
async def test_of_two_signals_that_meet_the_condition_one_resumes(rivals: Any, rows: Rows, key: str | None) -> None:
    one, other = await rivals(2)

    async def race(wait: Waiting) -> tuple[Waiting, list[Any]]:
        return wait, await at_once(*(signal(engine, wait, idempotency_key=key) for engine in (one, other)))

    rounds = []
    for handles in await waves(one):
        rounds += await asyncio.gather(*map(race, await waits(one, handles)))
    left = await settled(one, rows)
    won: Counter[str] = Counter()
    for wait, answers in rounds:
        winner = int(has_met(answers[1]))
        assert has_met(answers[winner])
        told = OVER if key is None else SignalDuplicate(existing_signal_id=answers[winner].signal_id)
        assert answers[1 - winner] == told
        assert [row["signal_id"] for row in left.of("signal", wait.execution_id)] == [answers[winner].signal_id]
        assert (left.state(wait.execution_id), left.closed(wait.execution_id)) == ("resumable", {"resumed"})
        assert left.told(wait.execution_id) == {RESUMABLE: 1}
        won[str(winner)] += 1
    check_won(won, "0", "1")


_LEFT: dict[TimeoutBehavior, tuple[str, str, dict[int, int]]] = {
    TimeoutBehavior.FAIL: ("failed", "timed_out_fail", {2: 1}),
    TimeoutBehavior.CANCEL: ("cancelled", "timed_out_cancel", {3: 1}),
    TimeoutBehavior.EXPIRE: ("expired", "timed_out_expire", {4: 1}),
    TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL: ("resumable", "timed_out_auto_resume", {}),
}
"""What the timeouts that end a wait leave."""


async def test_of_a_signal_and_the_timeout_one_ends_the_wait(rivals: Any, rows: Rows, clock: Clock) -> None:
    one, other, third = await rivals(3)

    async def race(wait: Waiting) -> tuple[Waiting, list[Any]]:
        answers = await at_once(
            signal(one, wait), other.expire_suspension(wait.execution_id), third.expire_suspension(wait.execution_id)
        )
        return wait, answers

    rounds = []
    for at, handles in enumerate(await waves(one)):
        behavior = list(_LEFT)[at % len(_LEFT)]
        due = await waits(one, handles, timeout_at=await clock.now() - 1, timeout_behavior=behavior)
        rounds += await asyncio.gather(*map(race, due))
        # Whoever sweeps is a rival too, and finds nothing left to do.
        assert await parts_of(third).suspension_timeouts.expire_due() == 0
    left = await settled(one, rows)
    won: Counter[str] = Counter()
    for wait, (answer, *expiries) in rounds:
        timeouts = [each.behavior_applied for each in expiries if isinstance(each, SuspensionExpired)]
        assert {each for each in expiries if not isinstance(each, SuspensionExpired)} == {
            AlreadySatisfied(reason="not_suspended_cleaned")
        }
        assert len(timeouts) == (not has_met(answer))
        if has_met(answer):
            state, reason, told = "resumable", "resumed", {RESUMABLE: 1}
        else:
            assert answer == OVER
            state, reason, told = _LEFT[timeouts[0]]
        assert (left.state(wait.execution_id), left.closed(wait.execution_id)) == (state, {reason})
        assert left.told(wait.execution_id) == told
        names = [row["signal_name"] for row in left.of("signal", wait.execution_id)]
        assert names == {"resumed": ["ready"], "timed_out_auto_resume": ["timeout"]}.get(reason, [])
        won[timeouts[0] if timeouts else "signal"] += 1
    check_won(won, "signal", *_LEFT)


async def test_of_a_signal_and_a_cancel_one_comes_first(rivals: Any, rows: Rows) -> None:
    one, other = await rivals(2)

    async def race(wait: Waiting) -> tuple[Waiting, list[Any]]:
        cancel = other.cancel_execution(execution_id=wait.execution_id, reason="not wanted")
        return wait, await at_once(signal(one, wait), cancel)

    rounds = []
    for handles in await waves(one):
        rounds += await asyncio.gather(*map(race, await waits(one, handles)))
    left = await settled(one, rows)
    won: Counter[str] = Counter()
    for wait, (answer, cancelled) in rounds:
        assert isinstance(cancelled, Cancelled)
        assert left.state(wait.execution_id) == "cancelled"
        # A cancel may come after the resume; a signal is never taken after the cancel.
        if has_met(answer):
            assert left.closed(wait.execution_id) == {"resumed"}
            assert left.told(wait.execution_id) == {RESUMABLE: 1, 3: 1}
            won["signal"] += 1
        else:
            assert (answer, left.closed(wait.execution_id)) == (OVER, {"cancelled"})
            assert (left.told(wait.execution_id), left.of("signal", wait.execution_id)) == ({3: 1}, [])
            won["cancel"] += 1
    check_won(won, "signal", "cancel")


async def test_a_signal_during_a_rotation_is_judged_by_the_keys_before_or_after_it(
    rivals: Any, rows: Rows, clock: Clock
) -> None:
    one, other = await rivals(2)

    async def moments() -> None:
        for _ in range(random.randrange(8)):
            await other.ping()

    async def race(wait: Waiting, grace_ms: int) -> tuple[Waiting, int, Any]:
        await moments()
        return wait, grace_ms, await outcome(signal(one, wait))

    async def rotate(number: int, grace_ms: int) -> None:
        await moments()
        (entry,) = await other.rotate_waitpoint_hmac_secret_all(
            new_kid=f"r{number}", new_secret_hex=random.randbytes(32).hex(), grace_ms=grace_ms
        )
        assert isinstance(entry.result, Rotated)
        if not grace_ms:
            await clock.advance(ms=1)

    rounds: list[tuple[Waiting, int, Any]] = []
    for number, handles in enumerate(await waves(one)):
        grace_ms = 0 if number % 5 else 60_000
        wave = await waits(one, handles)
        _, *answered = await asyncio.gather(rotate(number, grace_ms), *(race(wait, grace_ms) for wait in wave))
        rounds += answered
    for engine in (one, other):
        await engine._services[Signals].drain()
    left = await settled(one, rows)
    won: Counter[str] = Counter()
    for wait, grace_ms, answer in rounds:
        (row,) = left.of("execution", wait.execution_id)
        if has_met(answer):
            assert (row["public_state"], row["last_hmac_validation_failed_at"]) == ("resumable", None)
            assert left.told(wait.execution_id) == {RESUMABLE: 1}
            won["accepted"] += 1
        else:
            assert (answer, grace_ms) == ("token_expired", 0)
            assert (row["public_state"], left.closed(wait.execution_id)) == ("suspended", {None})
            assert row["last_hmac_validation_failed_at"] is not None
            assert left.of("signal", wait.execution_id) == []
            won["expired"] += 1
    check_won(won, "accepted", "expired")


async def test_of_two_suspends_with_one_key_one_suspends_and_both_are_told_the_same(rivals: Any, rows: Rows) -> None:
    one, other = await rivals(2)

    async def race(handle: Handle) -> tuple[Handle, list[Any], list[Any]]:
        asked = [args(idempotency_key="once") for _ in range(2)]
        return handle, asked, await at_once(one.suspend(handle, asked[0]), other.suspend(handle, asked[1]))

    rounds = []
    for handles in await waves(one):
        rounds += await asyncio.gather(*map(race, handles))
    left = await settled(one, rows)
    won: Counter[str] = Counter()
    for handle, asked, (first, second) in rounds:
        assert (first.details, first.handle) == (second.details, second.handle)
        assert [row["suspension_id"] for row in left.of("suspension", handle.execution_id)] == [
            first.details.suspension_id
        ]
        (waitpoint,) = left.of("waitpoint", handle.execution_id)
        assert waitpoint["waitpoint_id"] == first.details.waitpoint_id
        assert waitpoint["token"] == first.details.waitpoint_token.reveal()
        (row,) = left.of("execution", handle.execution_id)
        assert (row["public_state"], row["lease_epoch"]) == ("suspended", 2)
        won[str([each.suspension_id for each in asked].index(first.details.suspension_id))] += 1
    check_won(won, "0", "1")


async def test_a_wait_that_everybody_ends_at_once_ends_once(rivals: Any, rows: Rows, clock: Clock) -> None:
    one, other, third = await rivals(3)
    body = {"kind": "Count", "n": 2, "count_kind": "DistinctWaitpoints", "waitpoints": ["a", "b", "c"]}

    async def race(wait: Waiting) -> tuple[Waiting, list[Any]]:
        answers = await at_once(
            signal(one, wait, key="a"),
            signal(other, wait, key="b"),
            third.resume_execution(execution_id=wait.execution_id, trigger_type="operator"),
            third.expire_suspension(wait.execution_id),
            other.close_waitpoint(execution_id=wait.execution_id, waitpoint_id=wait.points["c"][0]),
        )
        return wait, answers

    rounds = []
    for handles in await waves(one):
        asked = {"timeout_at": await clock.now() - 1, "timeout_behavior": "auto_resume", "keys": ("a", "b", "c")}
        rounds += await asyncio.gather(*map(race, await waits(one, handles, condition={"Composite": body}, **asked)))
    left = await settled(one, rows)
    won: Counter[str] = Counter()
    for wait, (left_signal, right_signal, resumed, expired, _) in rounds:
        (winner,) = _winners([left_signal, right_signal], resumed, expired)
        assert left.state(wait.execution_id) == "resumable"
        reason = "timed_out_auto_resume" if winner == "timeout" else "resumed"
        assert left.closed(wait.execution_id) - {"proactive_close"} == {reason}
        assert left.told(wait.execution_id) == ({RESUMABLE: 1} if winner == "signal" else {})
        won[winner] += 1
    check_won(won, "signal", "operator", "timeout")


def _winners(signals: list[Any], resumed: Any, expired: Any) -> Iterator[str]:
    """Who was told that it has ended the wait; the others must have been told that it was over."""
    assert all(isinstance(answer, Accepted) or answer == OVER for answer in signals)
    if any(map(has_met, signals)):
        yield "signal"
    if isinstance(resumed, Resumed):
        yield "operator"
    else:
        assert resumed == "execution_not_suspended"
    if isinstance(expired, SuspensionExpired):
        yield "timeout"
    else:
        assert expired == AlreadySatisfied(reason="not_suspended_cleaned")

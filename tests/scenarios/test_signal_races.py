"""Signals, timeouts, operators and rotations meet at one suspended execution: one ends the wait, the rows agree."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from engine.state import IS_WHOLE
from fixtures import Clock, Rows, uuid_of
from flowfabric import Engine
from flowfabric.conditions import SuspendArgs, TimeoutBehavior
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

from .races import HOUR_MS, TOGETHER, Raced, Rivals, check_winners, claimed, outcome, race_all, rivals
from .waiting import Waiting, args, suspended

__all__ = ["rivals"]

ROUNDS = 1000 if IS_WHOLE else 120

RESUMABLE = 6
"""The outcome in the completion feed of a wait that a signal has ended."""
OVER = "target_not_signalable"
"""The code that refuses a signal after the end of the wait."""


async def waves(engine: Engine) -> list[list[Handle]]:
    """Claimed executions for all rounds, in groups of those that are raced for at the same time."""
    handles = await claimed(engine, count=ROUNDS, lease_ttl_ms=HOUR_MS)
    return [handles[at : at + TOGETHER] for at in range(0, ROUNDS, TOGETHER)]


async def waits(engine: Engine, handles: list[Handle], **overrides: Any) -> list[Waiting]:
    """Suspend a wave of executions."""
    return list(await asyncio.gather(*(suspended(engine, handle, **overrides) for handle in handles)))


def signal(engine: Engine, wait: Waiting, key: str = "wp", **overrides: Any) -> Awaitable[Any]:
    """Send a signal through an engine."""
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


def has_resumed(answer: Any) -> bool:
    """Whether a signal was answered with the end of the wait."""
    return isinstance(answer, Accepted) and answer.effect == "resume_condition_satisfied"


class Stored:
    """The rows of all executions after the last round."""

    def __init__(self, tables: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
        self._tables = tables

    @classmethod
    async def read(cls, engine: Engine, rows: Rows) -> "Stored":
        """Read the rows, which must be consistent."""
        assert await engine.find_inconsistencies() == []
        tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name in ("execution", "suspension", "waitpoint", "signal", "event_each"):
            tables[name] = defaultdict(list)
            for row in await rows.of(name):
                tables[name][str(row["execution_id"])].append(row)
        return cls(tables)

    def of(self, table: str, execution_id: str) -> list[dict[str, Any]]:
        """The rows of an execution in a table."""
        return self._tables[table][uuid_of(execution_id)]

    def state(self, execution_id: str) -> str:
        """The public state of an execution."""
        (row,) = self.of("execution", execution_id)
        return str(row["public_state"])

    def close_reasons(self, execution_id: str) -> set[str | None]:
        """The reasons why the suspension and the waitpoints are closed; None for one that is open."""
        return {row["close_reason"] for table in ("suspension", "waitpoint") for row in self.of(table, execution_id)}

    def completions(self, execution_id: str) -> Counter[int]:
        """How often each outcome is in the completion feed."""
        return Counter(row["outcome"] for row in self.of("event_each", execution_id) if row["outcome"] is not None)


@pytest.mark.parametrize("key", [None, "once"], ids=["two signals", "one signal twice"])
async def test_of_two_signals_that_satisfy_the_condition_one_resumes(
    rivals: Rivals, rows: Rows, key: str | None
) -> None:
    one, other = await rivals(2)

    def calls(wait: Waiting) -> list[Awaitable[Any]]:
        return [signal(engine, wait, idempotency_key=key) for engine in (one, other)]

    rounds: Raced = []
    for wave, handles in enumerate(await waves(one)):
        rounds += await race_all(wave, calls, await waits(one, handles))
    stored = await Stored.read(one, rows)
    won: Counter[str] = Counter()
    for wait, answers in rounds:
        winner = int(has_resumed(answers[1]))
        assert has_resumed(answers[winner])
        late = OVER if key is None else SignalDuplicate(existing_signal_id=answers[winner].signal_id)
        assert answers[1 - winner] == late
        assert [row["signal_id"] for row in stored.of("signal", wait.execution_id)] == [answers[winner].signal_id]
        assert (stored.state(wait.execution_id), stored.close_reasons(wait.execution_id)) == ("resumable", {"resumed"})
        assert stored.completions(wait.execution_id) == {RESUMABLE: 1}
        won[str(winner)] += 1
    check_winners(won, "0", "1", rounds=ROUNDS)


AFTER_TIMEOUT: dict[TimeoutBehavior, tuple[str, str, dict[int, int]]] = {
    TimeoutBehavior.FAIL: ("failed", "timed_out_fail", {2: 1}),
    TimeoutBehavior.CANCEL: ("cancelled", "timed_out_cancel", {3: 1}),
    TimeoutBehavior.EXPIRE: ("expired", "timed_out_expire", {4: 1}),
    TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL: ("resumable", "timed_out_auto_resume", {}),
}
"""The state, the close reason and the completions after each timeout that ends a wait."""


async def test_of_a_signal_and_the_timeout_one_ends_the_wait(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    one, other, third = await rivals(3)

    def calls(wait: Waiting) -> list[Awaitable[Any]]:
        expiries = [engine.expire_suspension(wait.execution_id) for engine in (other, third)]
        return [signal(one, wait), *expiries]

    rounds: Raced = []
    for wave, handles in enumerate(await waves(one)):
        behavior = list(AFTER_TIMEOUT)[wave % len(AFTER_TIMEOUT)]
        due = await waits(one, handles, timeout_at=await clock.now() - 1, timeout_behavior=behavior)
        rounds += await race_all(wave, calls, due)
        # Nothing is left for the sweep.
        assert await parts_of(third).suspension_timeouts.expire_due() == 0
    stored = await Stored.read(one, rows)
    won: Counter[str] = Counter()
    for wait, (answer, *expiries) in rounds:
        timeouts = [each.behavior_applied for each in expiries if isinstance(each, SuspensionExpired)]
        assert {each for each in expiries if not isinstance(each, SuspensionExpired)} == {
            AlreadySatisfied(reason="not_suspended_cleaned")
        }
        assert len(timeouts) == (not has_resumed(answer))
        if has_resumed(answer):
            state, reason, completions = "resumable", "resumed", {RESUMABLE: 1}
        else:
            assert answer == OVER
            state, reason, completions = AFTER_TIMEOUT[timeouts[0]]
        assert (stored.state(wait.execution_id), stored.close_reasons(wait.execution_id)) == (state, {reason})
        assert stored.completions(wait.execution_id) == completions
        names = [row["signal_name"] for row in stored.of("signal", wait.execution_id)]
        assert names == {"resumed": ["ready"], "timed_out_auto_resume": ["timeout"]}.get(reason, [])
        won[timeouts[0] if timeouts else "signal"] += 1
    check_winners(won, "signal", *AFTER_TIMEOUT, rounds=ROUNDS)


async def test_a_signal_is_accepted_before_a_cancel_or_refused(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)

    def calls(wait: Waiting) -> list[Awaitable[Any]]:
        return [signal(one, wait), other.cancel_execution(execution_id=wait.execution_id, reason="not wanted")]

    rounds: Raced = []
    for wave, handles in enumerate(await waves(one)):
        rounds += await race_all(wave, calls, await waits(one, handles))
    stored = await Stored.read(one, rows)
    won: Counter[str] = Counter()
    for wait, (answer, cancelled) in rounds:
        assert isinstance(cancelled, Cancelled)
        assert stored.state(wait.execution_id) == "cancelled"
        # The cancel also succeeds after the resume, but no signal is accepted after the cancel.
        if has_resumed(answer):
            assert stored.close_reasons(wait.execution_id) == {"resumed"}
            assert stored.completions(wait.execution_id) == {RESUMABLE: 1, 3: 1}
            won["signal"] += 1
        else:
            assert (answer, stored.close_reasons(wait.execution_id)) == (OVER, {"cancelled"})
            assert (stored.completions(wait.execution_id), stored.of("signal", wait.execution_id)) == ({3: 1}, [])
            won["cancel"] += 1
    check_winners(won, "signal", "cancel", rounds=ROUNDS)


async def test_a_signal_during_a_rotation_is_verified_by_the_keys_before_or_after_it(
    rivals: Rivals, rows: Rows, clock: Clock
) -> None:
    one, other = await rivals(2)

    async def random_pings() -> None:
        for _ in range(random.randrange(8)):
            await other.ping()

    async def signal_after_pings(wait: Waiting, grace_ms: int) -> tuple[Waiting, int, Any]:
        await random_pings()
        return wait, grace_ms, await outcome(signal(one, wait))

    async def rotate(number: int, grace_ms: int) -> None:
        await random_pings()
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
        signals = [signal_after_pings(wait, grace_ms) for wait in wave]
        _, *answered = await asyncio.gather(rotate(number, grace_ms), *signals)
        rounds += answered
    for engine in (one, other):
        await engine._services[Signals].drain()
    stored = await Stored.read(one, rows)
    won: Counter[str] = Counter()
    for wait, grace_ms, answer in rounds:
        (row,) = stored.of("execution", wait.execution_id)
        if has_resumed(answer):
            assert (row["public_state"], row["last_hmac_validation_failed_at"]) == ("resumable", None)
            assert stored.completions(wait.execution_id) == {RESUMABLE: 1}
            won["accepted"] += 1
        else:
            assert (answer, grace_ms) == ("token_expired", 0)
            assert (row["public_state"], stored.close_reasons(wait.execution_id)) == ("suspended", {None})
            assert row["last_hmac_validation_failed_at"] is not None
            assert stored.of("signal", wait.execution_id) == []
            won["expired"] += 1
    check_winners(won, "accepted", "expired", rounds=ROUNDS)


async def test_two_suspends_with_one_idempotency_key_suspend_once_and_return_the_same(
    rivals: Rivals, rows: Rows
) -> None:
    one, other = await rivals(2)

    def calls(subject: tuple[Handle, list[SuspendArgs]]) -> list[Awaitable[Any]]:
        handle, (first, second) = subject
        return [one.suspend(handle, first), other.suspend(handle, second)]

    rounds: Raced = []
    for wave, handles in enumerate(await waves(one)):
        subjects = [(handle, [args(idempotency_key="once") for _ in range(2)]) for handle in handles]
        rounds += await race_all(wave, calls, subjects)
    stored = await Stored.read(one, rows)
    won: Counter[str] = Counter()
    for (handle, requests), (first, second) in rounds:
        assert (first.details, first.handle) == (second.details, second.handle)
        assert [row["suspension_id"] for row in stored.of("suspension", handle.execution_id)] == [
            first.details.suspension_id
        ]
        (waitpoint,) = stored.of("waitpoint", handle.execution_id)
        assert waitpoint["waitpoint_id"] == first.details.waitpoint_id
        assert waitpoint["token"] == first.details.waitpoint_token.reveal()
        (row,) = stored.of("execution", handle.execution_id)
        assert (row["public_state"], row["lease_epoch"]) == ("suspended", 2)
        won[str([each.suspension_id for each in requests].index(first.details.suspension_id))] += 1
    check_winners(won, "0", "1", rounds=ROUNDS)


async def test_of_signals_an_operator_and_the_timeout_one_ends_the_wait(
    rivals: Rivals, rows: Rows, clock: Clock
) -> None:
    one, other, third = await rivals(3)
    body = {"kind": "Count", "n": 2, "count_kind": "DistinctWaitpoints", "waitpoints": ["a", "b", "c"]}

    def calls(wait: Waiting) -> list[Awaitable[Any]]:
        return [
            signal(one, wait, key="a"),
            signal(other, wait, key="b"),
            third.resume_execution(execution_id=wait.execution_id, trigger_type="operator"),
            third.expire_suspension(wait.execution_id),
            other.close_waitpoint(execution_id=wait.execution_id, waitpoint_id=wait.points["c"][0]),
        ]

    rounds: Raced = []
    for wave, handles in enumerate(await waves(one)):
        due = {"timeout_at": await clock.now() - 1, "timeout_behavior": "auto_resume", "keys": ("a", "b", "c")}
        rounds += await race_all(wave, calls, await waits(one, handles, condition={"Composite": body}, **due))
    stored = await Stored.read(one, rows)
    won: Counter[str] = Counter()
    for wait, (left_signal, right_signal, resumed, expired, _) in rounds:
        (winner,) = _winners([left_signal, right_signal], resumed, expired)
        assert stored.state(wait.execution_id) == "resumable"
        reason = "timed_out_auto_resume" if winner == "timeout" else "resumed"
        assert stored.close_reasons(wait.execution_id) - {"proactive_close"} == {reason}
        assert stored.completions(wait.execution_id) == ({RESUMABLE: 1} if winner == "signal" else {})
        won[winner] += 1
    check_winners(won, "signal", "operator", "timeout", rounds=ROUNDS)


def _winners(signals: list[Any], resumed: Any, expired: Any) -> Iterator[str]:
    """Who was answered with the end of the wait; the others must have been refused."""
    assert all(isinstance(answer, Accepted) or answer == OVER for answer in signals)
    if any(map(has_resumed, signals)):
        yield "signal"
    if isinstance(resumed, Resumed):
        yield "operator"
    else:
        assert resumed == "execution_not_suspended"
    if isinstance(expired, SuspensionExpired):
        yield "timeout"
    else:
        assert expired == AlreadySatisfied(reason="not_suspended_cleaned")

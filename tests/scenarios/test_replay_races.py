"""Races of replays: with each other, with cancels, with retention, and with the cascade."""

import asyncio
from collections import Counter
from typing import Any

import asyncpg

from engine.flow.graphs import BuiltFlow
from engine.state import rounds
from fixtures import Clock, Given, Rows
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Cancelled, Replayed
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState

from .races import Rivals, cancel_all, outcome, race, rivals

__all__ = ["rivals"]

DAY = 86_400_000


def word(answer: Any) -> str:
    """An answer or the code of a refusal."""
    return answer if isinstance(answer, str) else type(answer).__name__


async def test_of_two_replays_one_wins(
    clock: Clock, rivals: Rivals, rows: Rows, connection: asyncpg.Connection
) -> None:
    one, other = await rivals(2)
    given = Given(one, clock)
    for nth in rounds(10, whole=100):
        execution_id = await given.completed()
        answers = await race(nth, *(engine.replay_execution(execution_id=execution_id) for engine in (one, other, one)))
        assert sorted(map(word, answers)) == ["Replayed", "execution_not_terminal", "execution_not_terminal"]
        assert (await rows.execution(execution_id))["replay_count"] == 1
        await cancel_all(one, execution_id)
    assert await one.find_inconsistencies() == []


async def test_a_replay_and_a_cancel_leave_what_their_answers_say(clock: Clock, rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    given = Given(one, clock)
    seen: Counter[tuple[str, str]] = Counter()
    for nth in rounds(20, whole=200):
        execution_id = await given.failed()
        replayed, cancelled = await race(
            nth,
            one.replay_execution(execution_id=execution_id),
            other.cancel_execution(execution_id=execution_id, reason="not wanted"),
        )
        seen[word(replayed), word(cancelled)] += 1
        assert replayed == Replayed(public_state=PublicState.WAITING)
        state = await one.read_execution_state(execution_id)
        if isinstance(cancelled, Cancelled):
            assert state is PublicState.CANCELLED
        else:
            assert (cancelled, state) == ("execution_not_active", PublicState.WAITING)
        await cancel_all(one, execution_id)
    assert await one.find_inconsistencies() == []


async def test_what_is_replayed_in_time_is_not_deleted(clock: Clock, rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    given = Given(one, clock)
    for nth in rounds(10, whole=100):
        handles = [await given.claimed() for _ in range(3)]
        await one.complete_many([(handle, b"done") for handle in handles])
        await clock.advance(ms=DAY + 1)
        execution_id: ExecutionId = handles[nth % 3].execution_id
        replayed, _ = await race(
            nth,
            one.replay_execution(execution_id=execution_id),
            parts_of(other).retention.trim_batch(),
        )
        await parts_of(other).retention.trim_batch()
        # An entry that was locked when its turn came is looked at again by the next full scan.
        state = await one.read_execution_state(execution_id)
        if isinstance(replayed, Replayed):
            assert state is PublicState.WAITING
            await cancel_all(one, execution_id)
        else:
            assert (replayed, state) == ("execution_not_found", None)
    assert await one.find_inconsistencies() == []


async def test_a_replay_counts_in_the_flow_that_the_execution_joins_meanwhile(
    clock: Clock, rivals: Rivals, rows: Rows
) -> None:
    one, other = await rivals(2)
    given = Given(one, clock)
    for nth in rounds(30, whole=300):
        flow = await BuiltFlow.create(given, rows)
        execution_id = await flow.outside()
        await one.cancel_execution(execution_id=execution_id, reason="not wanted")
        answers = await race(
            nth,
            one.replay_execution(execution_id=execution_id),
            other.add_execution_to_flow(flow.flow_id, execution_id),
        )
        assert [word(answer) for answer in answers] == ["Replayed", "Added"]
        row = await flow.row()
        assert (row["live_count"], row["failed_count"], row["derived_state"]) == (1, 0, "open")
        await cancel_all(one, execution_id)
        await flow.settle()
        row = await flow.row()
        assert (row["live_count"], row["failed_count"], row["derived_state"]) == (0, 1, "failed")
    assert await one.find_inconsistencies() == []


async def test_replays_of_members_and_the_ends_of_others_do_not_block_each_other(
    clock: Clock, rivals: Rivals, rows: Rows
) -> None:
    one, other = await rivals(2)
    given = Given(one, clock)
    for _ in rounds(4, whole=40):
        flow = await BuiltFlow.create(given, rows)
        upstreams = await flow.members(4)
        children = await flow.members(2)
        for child in children:
            for upstream in upstreams:
                await flow.connect(upstream, child)
        await asyncio.gather(*(one.cancel_execution(execution_id=each, reason="x") for each in upstreams))
        await flow.settle()
        answers = await asyncio.gather(
            *(
                outcome(engine.replay_execution(execution_id=each))
                for each in (*upstreams, *children)
                for engine in (one, other)
            )
        )
        assert Counter(map(word, answers)) == {"Replayed": 6, "execution_not_terminal": 6}
        ends = [one.cancel_execution(execution_id=each, reason="x") for each in upstreams[:2]]
        again = [outcome(other.replay_execution(execution_id=each)) for each in upstreams[:2]]
        await asyncio.gather(*ends, *again)
        await flow.settle()
        row = await flow.row()
        ended = [
            each for each in await rows.of("execution", flow_id=flow.flow_id) if each["lifecycle_phase"] == "terminal"
        ]
        assert row["live_count"] == 6 - len(ended)
        assert row["failed_count"] == sum(each["terminal_outcome"] == "cancelled" for each in ended)
        await cancel_all(one, *upstreams, *children)
        await flow.settle()
        assert (await flow.row())["live_count"] == 0
    assert await one.find_inconsistencies() == []

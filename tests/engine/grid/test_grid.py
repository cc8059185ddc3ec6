"""Every operation in every state does what the table says, and nothing else."""

from collections.abc import Iterable
from typing import Any

import asyncpg
import pytest

from engine.cases import Emptied
from fixtures import Clock, Rows, uuid_of
from flowfabric.engine.core.transition import BLOCKS
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.event import CompletionOutcome

from ..state import vector  # noqa: TID252
from .operations import OPERATIONS, Operation, answer
from .states import STATES, State, Subject
from .table import ABSENT, BETWEEN, ENDED, HELD, INTERRUPTED, LOST, MARKED, TABLE, UNTRIED, Moved, Refused

_COUNTERS = ("lease_epoch", "attempt_count", "retry_count", "reclaim_count", "replay_count")

_DELETING_CLAIMS = {"claim", "claim_many", "claim_for_worker", "mark expired leases, sweep"}
"""Operations that may delete spent claims, whatever else they do."""
_REGISTERS = ("lane", "worker_identity")
"""Tables in which an operation may register a name even if it is refused."""

GROUPS = {
    "not claimed yet": (*ABSENT, *UNTRIED),
    "leased": (*HELD, "past_expiry"),
    "lost": LOST,
    "between leases": (*BETWEEN, *INTERRUPTED),
    "ended": ENDED,
}


class Seen:
    """An execution as its rows show it."""

    def __init__(self, row: dict[str, Any] | None, attempts: list[str], events: list[Any], grants: int) -> None:
        self.row = row
        self.attempts = attempts
        self.events = events
        self.grants = grants

    @classmethod
    async def of(cls, connection: asyncpg.Connection, execution_id: str) -> "Seen":
        uuid = uuid_of(execution_id)
        row = await connection.fetchrow("select * from execution_detail where execution_id = $1", uuid)
        attempts = await connection.fetch(
            "select attempt_state from attempt_all where execution_id = $1 order by attempt_index", uuid
        )
        events = await connection.fetch(
            "select kind, reason, outcome, at from event_each where execution_id = $1 order by event_id", uuid
        )
        grants = await connection.fetchval("select count(*) from claim_grant where execution_id = $1", uuid)
        return cls(row and dict(row), [one["attempt_state"] for one in attempts], events, grants)

    @property
    def event_texts(self) -> list[str]:
        """The events as `kind reason>outcome`."""
        return [_told(event) for event in self.events]


def _told(event: Any) -> str:
    outcome = "" if event["outcome"] is None else f">{CompletionOutcome(event['outcome']).literal}"
    if event["kind"] == "ended":
        return f"ended{outcome}"
    reason = "" if event["reason"] is None else f" {event['reason']}"
    return f"{event['kind']}{reason}{outcome}"


@pytest.fixture
def emptied(engine: Engine, connection: asyncpg.Connection) -> Emptied:
    return Emptied(engine, connection, checks=False)


def test_the_groups_hold_every_state_once() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(STATES)


@pytest.mark.parametrize("group", GROUPS)
async def test_an_operation_does_in_every_state_what_the_table_says(
    engine: Engine, clock: Clock, connection: asyncpg.Connection, rows: Rows, emptied: Emptied, group: str
) -> None:
    grid = Grid(engine, clock, connection, rows, emptied)
    for name in GROUPS[group]:
        await grid.check(name, STATES[name])
    assert not grid.wrong, "\n" + "\n".join(grid.wrong)


class Grid:
    """Compares operations with the table and collects every difference."""

    def __init__(
        self, engine: Engine, clock: Clock, connection: asyncpg.Connection, rows: Rows, emptied: Emptied
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._connection = connection
        self._rows = rows
        self._emptied = emptied
        self.wrong: list[str] = []

    async def check(self, name: str, state: State) -> None:
        """Run every operation in a state.

        Operations without effect share one execution and one comparison of all rows; if that fails, each of them runs
        again on its own execution, to find the one that wrote.
        """
        idle = [title for title in OPERATIONS if not self._changes(title, name)]
        for titles, without in (
            ([title for title in idle if title not in _DELETING_CLAIMS], _REGISTERS),
            ([title for title in idle if title in _DELETING_CLAIMS], (*_REGISTERS, "claim")),
        ):
            found = await self._without_effect(name, state, titles, without)
            if found:
                alone = [await self._without_effect(name, state, [title], without) for title in titles]
                self.wrong += [one for each in alone for one in each] or found
        for title, operation in OPERATIONS.items():
            if title not in idle:
                await self._with_effect(name, state, operation)

    @staticmethod
    def _changes(title: str, name: str) -> bool:
        expected = TABLE[title][name]
        return isinstance(expected, Moved) or (isinstance(expected, Refused) and expected.marks)

    async def _reach(self, state: State) -> tuple[Subject, Seen]:
        await self._emptied()
        subject = Subject(self._engine, self._clock, self._connection)
        await state.reach(subject)
        await self._clock.advance(ms=7)
        seen = await Seen.of(self._connection, subject.execution_id)
        assert (seen.row and vector(seen.row)) == state.vector, "the state was not reached"
        assert tuple(seen.attempts) == state.attempts, "the state was not reached"
        return subject, seen

    async def _without_effect(
        self, name: str, state: State, titles: Iterable[str], without: Iterable[str]
    ) -> list[str]:
        wrong = []
        try:
            subject, _ = await self._reach(state)
            async with self._rows.unchanged(without=without):
                for title in titles:
                    expected = TABLE[title][name]
                    said = expected.code if isinstance(expected, Refused) else expected.answer
                    got = await self._answer(OPERATIONS[title], subject, refuses=isinstance(expected, Refused))
                    if got != said:
                        wrong.append(f"{title} / {name}: expected {said}, got {got}")
        except (AssertionError, EngineError) as difference:
            wrong.append(f"{', '.join(titles)} / {name}: {type(difference).__name__} {difference}")
        return wrong

    async def _with_effect(self, name: str, state: State, operation: Operation) -> None:
        expected = TABLE[operation.title][name]
        try:
            subject, before = await self._reach(state)
            if isinstance(expected, Refused):
                assert await self._answer(operation, subject, refuses=True) == expected.code
                await _check_move(subject, before, MARKED)
            else:
                assert isinstance(expected, Moved)
                assert await self._answer(operation, subject, refuses=False) == expected.answer
                await _check_move(subject, before, expected)
        except (AssertionError, EngineError) as difference:
            self.wrong.append(f"{operation.title} / {name}: {type(difference).__name__} {difference}")

    @staticmethod
    async def _answer(operation: Operation, subject: Subject, *, refuses: bool) -> str:
        """The answer of a call, or the code of its refusal if one is expected."""
        try:
            return answer(await operation.call(subject))
        except EngineError as refusal:
            return refusal.code if refuses else f"refusal {refusal}"


async def _check_move(subject: Subject, before: Seen, move: Moved) -> None:
    now = await subject.clock.now()
    after = await Seen.of(subject.connection, subject.execution_id)
    row, old = after.row, before.row or dict.fromkeys((*_COUNTERS, "started_at", "completed_at"), None)
    assert row is not None
    if move.to is None:
        assert vector(row) == vector(old)
    else:
        assert vector(row) == move.to
    assert tuple(after.event_texts[len(before.event_texts) :]) == move.events
    assert all(event["at"] == now for event in after.events[len(before.events) :])
    attempts = list(before.attempts)
    if move.last is not None:
        attempts[-1] = move.last
    assert after.attempts == [*attempts, *(["started"] if move.begins else [])]
    counted = (int(move.leases), int(move.begins), move.retries, move.reclaims, move.replays)
    assert {name: row[name] for name in _COUNTERS} == {
        name: (old[name] or 0) + more for name, more in zip(_COUNTERS, counted, strict=True)
    }
    _check_stamps(row, old, move, now)
    grants = {"same": before.grants, "none": 0, "one": 1, "any": after.grants}[move.grants]
    assert after.grants == grants, "grants left"
    await _check_reads(subject, row, after)


def _check_stamps(row: dict[str, Any], old: dict[str, Any], move: Moved, now: int) -> None:
    if move.is_transition:
        assert row["last_transition_at"] == now
        assert row["last_mutation_at"] == now
    else:
        assert row["last_transition_at"] == old["last_transition_at"]
        if move.grants != "one":
            assert row["last_mutation_at"] == now
    ended_at = now if row["lifecycle_phase"] == "terminal" and move.is_transition else old["completed_at"]
    assert row["completed_at"] == (None if move.replays else ended_at)
    assert row["started_at"] == (now if move.leases and old["started_at"] is None else old["started_at"])
    if row["blocking_reason"] in BLOCKS:
        # The delay goes on behind the block.
        assert row["delay_until"] == old["delay_until"]
    else:
        assert (row["delay_until"] is not None) == (row["eligibility_state"] == "not_eligible_until_time")


async def _check_reads(subject: Subject, row: dict[str, Any], seen: Seen) -> None:
    """Check that the reads show what the rows hold."""
    info = await subject.engine.read_execution_info(subject.execution_id)
    assert info is not None
    assert await subject.engine.read_execution_state(subject.execution_id) == row["public_state"]
    assert (info.started_at, info.completed_at) == (row["started_at"], row["completed_at"])
    snapshot = await subject.engine.describe_execution(subject.execution_id)
    assert snapshot is not None
    assert snapshot.total_attempt_count == len(seen.attempts)
    assert (snapshot.current_lease is not None) == (row["lifecycle_phase"] == "active")
    assert (snapshot.current_attempt is not None) == (row["attempt_id"] is not None)
    assert [str(one.attempt_state) for one in await subject.engine.list_attempts(subject.execution_id)] == seen.attempts
    found = await subject.engine.find_inconsistencies()
    assert [one.problem for one in found if one.execution_id == subject.execution_id] == []
    assert snapshot.last_mutation_at == row["last_mutation_at"]
    explanation = await subject.engine.explain(subject.execution_id)
    assert (explanation.state_vector, explanation.since) == (info.state_vector, row["last_transition_at"])
    assert explanation.reasons

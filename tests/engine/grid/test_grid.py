"""Every operation in every state does what the table says, and nothing else."""

import contextlib
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.event import CompletionOutcome

from ..state import vector  # noqa: TID252
from .operations import OPERATIONS, Operation, answer
from .states import STATES, State, Subject
from .table import MARKED, TABLE, Expected, Moved, Refused, Same

_COUNTERS = ("lease_epoch", "attempt_count", "retry_count", "reclaim_count", "replay_count")

_DELETING_CLAIMS = {"claim", "claim_many", "claim_for_worker", "mark lapsed leases, sweep"}
"""Operations that delete the spent claims of earlier executions, whatever they do to this one."""


class Seen:
    """An execution as its rows tell it."""

    def __init__(self, row: dict[str, Any] | None, attempts: list[Any], events: list[Any], grants: int) -> None:
        self.row = row
        self.attempts = attempts
        self.events = events
        self.grants = grants

    @classmethod
    async def of(cls, connection: Any, execution_id: str) -> "Seen":
        uuid = execution_id[-36:]
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
    def told(self) -> list[str]:
        """The events as `kind reason>outcome`."""
        return [_told(event) for event in self.events]


def _told(event: Any) -> str:
    outcome = "" if event["outcome"] is None else f">{CompletionOutcome(event['outcome']).literal}"
    if event["kind"] == "ended":
        return f"ended{outcome}"
    reason = "" if event["reason"] is None else f" {event['reason']}"
    return f"{event['kind']}{reason}{outcome}"


@pytest.mark.parametrize("title", OPERATIONS)
async def test_an_operation_does_in_every_state_what_the_table_says(
    engine: Engine, clock: Any, connection: Any, rows: Any, title: str
) -> None:
    wrong = []
    for name, state in STATES.items():
        subject = Subject(engine, clock, connection)
        try:
            await state.reach(subject)
            await clock.advance(ms=7)
            await check(subject, state, OPERATIONS[title], TABLE[title][name], rows)
        except (AssertionError, EngineError) as difference:
            wrong.append(f"{title} / {name}: {type(difference).__name__} {difference}")
        finally:
            await _leave(subject)
    assert not wrong, "\n" + "\n".join(wrong)


async def check(subject: Subject, state: State, operation: Operation, expected: Expected, rows: Any) -> None:
    """Do the operation and compare all it leaves with what is expected."""
    before = await Seen.of(subject.connection, subject.execution_id)
    assert (before.row and vector(before.row)) == state.vector, "the state was not reached"
    assert tuple(before.attempts) == state.attempts, "the state was not reached"
    match expected:
        case Same(answer=said):
            spent = ["claim"] if operation.title in _DELETING_CLAIMS else []
            async with rows.unchanged(without=("lane", "worker_identity", *spent)):
                assert answer(await operation.call(subject)) == said
        case Refused(code=code, marks=False):
            async with rows.unchanged(without=("lane",)):
                await _refused(operation, subject, code)
        case Refused(code=code):
            await _refused(operation, subject, code)
            await _check_move(subject, before, MARKED)
        case Moved(answer=said):
            assert answer(await operation.call(subject)) == said
            await _check_move(subject, before, expected)


async def _refused(operation: Operation, subject: Subject, code: str) -> None:
    try:
        got = answer(await operation.call(subject))
    except EngineError as refusal:
        got = refusal.code
    assert got == code


async def _check_move(subject: Subject, before: Seen, move: Moved) -> None:
    now = await subject.clock.now()
    after = await Seen.of(subject.connection, subject.execution_id)
    row, old = after.row, before.row or dict.fromkeys((*_COUNTERS, "started_at", "completed_at"), None)
    assert row is not None
    if move.to is None:
        assert vector(row) == vector(old)
    else:
        assert vector(row) == move.to
    assert tuple(after.told[len(before.told) :]) == move.tells
    assert all(event["at"] == now for event in after.events[len(before.events) :])
    attempts = list(before.attempts)
    if move.last is not None:
        attempts[-1] = move.last
    assert after.attempts == [*attempts, *(["started"] if move.begins else [])]
    counted = (int(move.leases), int(move.begins), move.retries, move.reclaims, 0)
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
    assert row["completed_at"] == (
        now if row["lifecycle_phase"] == "terminal" and move.is_transition else old["completed_at"]
    )
    assert row["started_at"] == (now if move.leases and old["started_at"] is None else old["started_at"])
    assert (row["delay_until"] is not None) == (row["eligibility_state"] == "not_eligible_until_time")


async def _check_reads(subject: Subject, row: dict[str, Any], seen: Seen) -> None:
    """What the reads say is what the rows hold."""
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


async def _leave(subject: Subject) -> None:
    """End the execution, so that the next one has the sweeps and searches to itself."""
    with contextlib.suppress(EngineError):
        await subject.engine.cancel_execution(execution_id=subject.execution_id, reason="done")

"""Several engines create, claim, end and delete the same executions at once: one wins, and every answer is true."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from engine.state import IS_WHOLE, items, new
from fixtures import Clock, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Cancelled, Created, Duplicate
from flowfabric.model.handle import Handle
from flowfabric.model.lease import Completed, Renewed, TerminalFailed

from .races import (
    HOUR_MS,
    ROUNDS,
    Rivals,
    check_winners,
    claim,
    claimed,
    completion_counts,
    given_id,
    race,
    rivals,
)

__all__ = ["rivals"]


def creator(answers: list[Any]) -> int:
    """Which of two creates has created the execution; the other one must name the same execution."""
    assert sorted(type(answer).__name__ for answer in answers) == ["Created", "Duplicate"]
    assert answers[0].execution_id == answers[1].execution_id
    return int(isinstance(answers[1], Created))


async def test_of_two_creates_with_one_id_one_creates(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(2)
    won: Counter[int] = Counter()
    for nth in range(ROUNDS):
        answers = await race(nth, *(engine.create_execution(**new(execution_id=given_id(nth))) for engine in engines))
        won[creator(answers)] += 1
        assert answers[0].execution_id == given_id(nth)
    check_winners(won, 0, 1)
    assert len(await rows.of("execution")) == len(await rows.of("ready")) == ROUNDS


@pytest.mark.parametrize("ids", ["minted", "given", "one of each"])
async def test_of_two_creates_with_one_key_and_different_ids_one_creates(rivals: Rivals, rows: Rows, ids: str) -> None:
    one, other = await rivals(2)
    won: Counter[int] = Counter()
    for nth in range(ROUNDS):
        # Both ids are of one partition: a key belongs to a namespace and a lane.
        named = [f"{{fp:86}}:{which}1111111-2222-3333-4444-{nth:012}" for which in "ab"]
        first = None if ids != "given" else named[0]
        second = None if ids == "minted" else named[1]
        answers = await race(
            nth,
            one.create_execution(**new(execution_id=first, idempotency_key=f"k{nth}")),
            other.create_execution(**new(execution_id=second, idempotency_key=f"k{nth}")),
        )
        won[creator(answers)] += 1
    check_winners(won, 0, 1)
    assert len(await rows.of("execution")) == len(await rows.of("idempotency_key")) == ROUNDS


async def test_of_two_creates_with_one_id_and_different_keys_only_the_key_of_the_winner_is_stored(
    rivals: Rivals, rows: Rows
) -> None:
    one, other = await rivals(2)
    won: Counter[int] = Counter()
    for nth in range(ROUNDS):
        second_key = f"b{nth}" if nth % 2 else None
        answers = await race(
            nth,
            one.create_execution(**new(execution_id=given_id(nth), idempotency_key=f"a{nth}")),
            other.create_execution(**new(execution_id=given_id(nth), idempotency_key=second_key)),
        )
        winner = creator(answers)
        won[winner] += 1
        stored = {entry["key"] for entry in await rows.of("idempotency_key", subject_id=uuid_of(given_id(nth)))}
        assert stored == {(f"a{nth}", second_key)[winner]} - {None}
    check_winners(won, 0, 1)


async def test_batches_that_share_ids_and_keys_in_different_order_create_each_once(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(3)
    created: Counter[str] = Counter()
    for nth in range(ROUNDS):
        shared = [new(execution_id=given_id(nth * 6 + at)) for at in range(6)]
        shared += [new(idempotency_key=f"{nth} {at}") for at in range(6)]
        calls = [engine.create_many(items(*random.sample(shared, 12))) for engine in engines]
        for verdict in [verdict for verdicts in await race(nth, *calls) for verdict in verdicts]:
            assert isinstance(verdict, Created | Duplicate), verdict
            created[verdict.execution_id] += isinstance(verdict, Created)
    assert set(created.values()) == {1}
    assert len(created) == len(await rows.of("execution")) == ROUNDS * 12


async def test_of_two_claims_of_one_execution_one_gets_it(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    won: Counter[bool] = Counter()
    for nth in range(ROUNDS):
        made = await one.create_execution(**new())
        found = await race(nth, claim(one), claim(other))
        assert sorted(len(answer) for answer in found) == [0, 1]
        won[bool(found[0])] += 1
        (taken,) = found[0] or found[1]
        assert (taken.execution_id, taken.lease_epoch) == (made.execution_id, 1)
        row = await rows.execution(taken.execution_id)
        assert (row["lease_id"], row["attempt_count"]) == (taken.lease_id, 1)
    check_winners(won, True, False)
    assert Counter(event["kind"] for event in await rows.of("event_each")) == {"acquired": ROUNDS}


async def test_claims_from_four_engines_lease_each_execution_once(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(4)
    batches = 4 if IS_WHOLE else 1
    for _ in range(batches):
        await engines[0].create_many(items(*(new(priority=at % 3) for at in range(1000))))
    claims = 0

    async def claim_and_complete_all(engine: Engine) -> list[Any]:
        nonlocal claims
        taken: list[Any] = []
        while found := await claim(engine, limit=random.randint(1, 30)):
            claims += 1
            taken += found
            verdicts = await engine.complete_many([(one.handle, b"x") for one in found])
            assert {type(verdict) for verdict in verdicts} == {Completed}
        return taken

    taken = [one for found in await asyncio.gather(*map(claim_and_complete_all, engines)) for one in found]
    count = 1000 * batches
    assert claims >= count // 20
    assert len(taken) == len({one.execution_id for one in taken}) == count
    assert {one.lease_epoch for one in taken} == {1}
    assert Counter(event["kind"] for event in await rows.of("event_each")) == {"acquired": count, "released": count}
    assert set((await completion_counts(rows)).values()) == {1}


async def test_a_completion_succeeds_or_its_expired_lease_is_taken_over(
    rivals: Rivals, rows: Rows, clock: Clock
) -> None:
    one, other = await rivals(2)

    async def take_over() -> list[Any]:
        await clock.advance(ms=1001)
        return await claim(other)

    completions: Counter[bool] = Counter()
    for nth in range(ROUNDS):
        (handle,) = await claimed(one, lease_ttl_ms=1000)
        completed, taken = await race(nth, one.complete(handle, b"mine"), take_over())
        completions[completed is None] += 1
        if completed is None:
            assert taken == []
            assert await one.get_execution_result(handle.execution_id) == b"mine"
            continue
        assert completed in ("lease_expired", "lease_conflict")
        (second,) = taken or await claim(other)
        assert (second.execution_id, second.lease_epoch, second.attempt_index) == (handle.execution_id, 2, 1)
        await other.complete(second.handle, b"theirs")
        assert await one.get_execution_result(handle.execution_id) == b"theirs"
    check_winners(completions, True, False)
    assert set((await completion_counts(rows)).values()) == {1}
    assert len(await rows.of("execution", public_state="completed")) == ROUNDS


async def test_a_lease_is_renewed_or_marked_as_expired(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    one, other = await rivals(2)

    async def mark(handle: Handle) -> int:
        await clock.advance(ms=5000)
        return await parts_of(other).lease_expiry.mark_expired([handle.execution_id])

    renewals: Counter[bool] = Counter()
    for nth in range(ROUNDS):
        (handle,) = await claimed(one, lease_ttl_ms=60_000)
        await clock.advance(ms=57_000)
        renewed, marked = await race(nth, one.renew(handle), mark(handle))
        row = await rows.execution(handle.execution_id)
        kinds = [event["kind"] for event in await rows.events(handle.execution_id)]
        renewals[isinstance(renewed, Renewed)] += 1
        if isinstance(renewed, Renewed):
            assert (row["ownership_state"], marked, kinds) == ("leased", 0, ["acquired", "renewed"])
            assert row["lease_expires_at"] == renewed.expires_at_ms
        else:
            assert (row["ownership_state"], renewed) == ("lease_expired_reclaimable", "lease_expired")
            assert kinds == ["acquired", "expired"]
        await other.cancel_execution(execution_id=handle.execution_id, reason="next")
    check_winners(renewals, True, False)


async def test_of_a_cancel_and_a_completion_one_wins(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    won: Counter[str] = Counter()
    for nth, handle in enumerate(await claimed(one, count=ROUNDS, lease_ttl_ms=HOUR_MS)):
        completed, cancelled = await race(
            nth, one.complete(handle, b"x"), other.cancel_execution(execution_id=handle.execution_id, reason="x")
        )
        row = await rows.execution(handle.execution_id)
        won[row["terminal_outcome"]] += 1
        if row["terminal_outcome"] == "success":
            assert (completed, cancelled) == (None, "execution_not_active")
        else:
            assert (completed, row["terminal_outcome"]) == ("execution_not_active", "cancelled")
            assert isinstance(cancelled, Cancelled)
    check_winners(won, "success", "cancelled")
    assert set((await completion_counts(rows)).values()) == {1}
    assert len(await rows.of("attempt_all")) == ROUNDS


async def test_of_a_completion_a_failure_and_two_cancels_one_ends_the_execution(rivals: Rivals, rows: Rows) -> None:
    engines = await rivals(4)
    count = 500 if IS_WHOLE else 50
    await engines[0].create_many(items(*(new() for _ in range(count))))
    runs = await claim(engines[0], limit=count, lease_ttl_ms=HOUR_MS)
    won: Counter[str] = Counter()
    for nth, run in enumerate(runs):
        completed, failed, cancelled, overridden, renewed = await race(
            nth,
            engines[0].complete(run.handle, b"x"),
            engines[1].fail(run.handle, reason="x", claimed=run),
            engines[2].cancel(run.handle, "x"),
            engines[3].cancel_execution(execution_id=run.execution_id, reason="x"),
            engines[3].renew(run.handle),
        )
        ended = (await rows.execution(run.execution_id))["terminal_outcome"]
        won[ended] += 1
        claims_success = {
            "success": completed is None,
            "failed": isinstance(failed, TerminalFailed),
            "cancelled": cancelled is None or isinstance(overridden, Cancelled),
        }
        assert claims_success == {outcome: outcome == ended for outcome in claims_success}
        refusals = {answer for answer in (completed, failed, cancelled, overridden) if isinstance(answer, str)}
        assert refusals <= {"execution_not_active"}
        assert isinstance(renewed, Renewed) or renewed == "execution_not_active"
    check_winners(won, "success", "failed", "cancelled", rounds=count)
    assert {row["lifecycle_phase"] for row in await rows.of("execution")} == {"terminal"}
    assert await completion_counts(rows) == {uuid_of(run.execution_id): 1 for run in runs}
    assert len(await rows.of("attempt_all")) == count


async def test_batches_of_completions_and_renewals_in_different_order_do_not_deadlock(
    rivals: Rivals, rows: Rows
) -> None:
    one, other = await rivals(2)
    for nth in range(25 if IS_WHOLE else 3):
        handles = await claimed(one, count=40)
        for at in range(20):
            shuffled = [random.sample(handles, 40) for _ in range(2)]
            for verdicts in await race(at, one.renew_many(shuffled[0]), other.renew_many(shuffled[1])):
                assert {type(verdict) for verdict in verdicts} == {Renewed}
        shuffled = [random.sample(handles, 40) for _ in range(2)]
        answers = await race(
            nth,
            one.complete_many([(handle, b"1") for handle in shuffled[0]]),
            other.complete_many([(handle, b"2") for handle in shuffled[1]]),
        )
        for verdicts in answers:
            assert {type(verdict) for verdict in verdicts} == {Completed}
    assert set((await completion_counts(rows)).values()) == {1}


async def test_concurrent_trims_and_tags_leave_no_rows_of_trimmed_executions(
    rivals: Rivals, rows: Rows, clock: Clock
) -> None:
    one, other, tagging = await rivals(3)
    trimmed = 0
    for nth in range(ROUNDS):
        handles = await claimed(one, count=4)
        await one.complete_many([(handle, b"done") for handle in handles])
        await clock.advance(ms=one.settings.retention_ms + 1)
        first, second, _ = await race(
            nth,
            parts_of(one).retention.trim_batch(limit=2),
            parts_of(other).retention.trim_batch(limit=2),
            tagging.set_execution_tag(random.choice(handles).execution_id, "app.team", "a"),
        )
        trimmed += first.done + second.done
    while found := (await parts_of(one).retention.trim_batch()).done:
        trimmed += found
    assert trimmed == 4 * ROUNDS
    for table in ("execution", "execution_tag", "retained"):
        assert await rows.of(table) == []

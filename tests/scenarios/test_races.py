"""Rivals: the same work wanted by several processes at once, over and over; one wins and nobody is lied to.

`FF_TEST_SWEEP=whole` runs more rounds of every race.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from fixtures import Clock, Eventually, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Cancelled, Created, Duplicate, NewExecution
from flowfabric.model.handle import Handle
from flowfabric.model.lease import Completed, Renewed, TerminalFailed
from flowfabric.settings import Settings

IS_WHOLE = os.environ.get("FF_TEST_SWEEP") == "whole"
ROUNDS = 500 if IS_WHOLE else 120
HOUR_MS = 3_600_000
"""A lease that outlasts all rounds, however slow the machine is."""

Rivals = Callable[[int], Awaitable[list[Engine]]]


@pytest.fixture
async def rivals(url: str, connection: asyncpg.Connection, eventually: Eventually) -> AsyncIterator[Rivals]:
    """Engines with connections of their own; when they are gone, the server must have met no deadlock."""
    async with AsyncExitStack() as stack:

        async def open_rivals(count: int) -> list[Engine]:
            settings = Settings(database_url=url, database_pool_size=4)
            return [await stack.enter_async_context(Engine.connect(settings=settings)) for _ in range(count)]

        yield open_rivals

    async def are_gone() -> bool:
        query = "select count(*) from pg_stat_activity where datname = current_database() and application_name = $1"
        return bool(await connection.fetchval(query, "flowfabric") == 0)

    # A session tells of its deadlocks at its end at the latest.
    await eventually(are_gone)
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    assert await connection.fetchval(deadlocks) == 0


def new(**overrides: Any) -> dict[str, Any]:
    """The arguments of a create."""
    return {
        "namespace": "tests",
        "lane_id": "default",
        "execution_kind": "job",
        "input_payload": b"{}",
        "priority": 0,
        "creator_identity": "test",
        **overrides,
    }


async def claim(engine: Engine, *, limit: int = 1, lease_ttl_ms: int = 30_000) -> list[Any]:
    """Claim for a worker of this engine's own."""
    name = f"worker-{id(engine)}"
    return list(
        await engine.claim_many(
            lanes=("default",), worker_id=name, worker_instance_id=name, limit=limit, lease_ttl_ms=lease_ttl_ms
        )
    )


async def claimed(engine: Engine, *, count: int = 1, lease_ttl_ms: int = 30_000) -> list[Handle]:
    """The handles of new executions."""
    await engine.create_many([NewExecution(**new()) for _ in range(count)])
    return [one.handle for one in await claim(engine, limit=count, lease_ttl_ms=lease_ttl_ms)]


async def outcome(call: Awaitable[Any]) -> Any:
    """The answer of a call, or the code of its refusal."""
    try:
        return await call
    except EngineError as refused:
        return refused.code


async def at_once(*calls: Awaitable[Any]) -> list[Any]:
    """The outcomes of calls made at the same time, begun in any order."""
    order = list(range(len(calls)))
    random.shuffle(order)
    answers = await asyncio.gather(*(outcome(calls[at]) for at in order))
    return [answers[order.index(at)] for at in range(len(calls))]


async def a_moment() -> None:
    """Let the rival go ahead by a little, or not at all."""
    for _ in range(random.randrange(12)):
        await asyncio.sleep(0)


def creator(answers: list[Any]) -> int:
    """Which of two creates has created; the other one is told of the same execution."""
    assert sorted(type(answer).__name__ for answer in answers) == ["Created", "Duplicate"]
    assert answers[0].execution_id == answers[1].execution_id
    return int(isinstance(answers[1], Created))


def check_both_won(won: Counter[Any], *, rounds: int = ROUNDS) -> None:
    """A race that only one side can win is none."""
    assert len(won) == 2, won
    assert won.total() == rounds


def given_id(number: int) -> str:
    """An id of the caller's own."""
    return f"{{fp:{number % 256}}}:11111111-2222-3333-4444-{number:012}"


async def endings(rows: Rows) -> Counter[str]:
    """How many endings were told of each execution."""
    return Counter(str(event["execution_id"]) for event in await rows.of("event_each") if event["outcome"] is not None)


async def test_of_two_creates_with_one_id_one_creates(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    won: Counter[int] = Counter()
    for at in range(ROUNDS):
        answers = await at_once(*(engine.create_execution(**new(execution_id=given_id(at))) for engine in (one, other)))
        won[creator(answers)] += 1
        assert answers[0].execution_id == given_id(at)
    check_both_won(won)
    assert len(await rows.of("execution")) == len(await rows.of("ready")) == ROUNDS


@pytest.mark.parametrize("ids", ["minted", "given", "one of each"])
async def test_of_two_creates_with_one_key_and_different_ids_one_creates(rivals: Rivals, rows: Rows, ids: str) -> None:
    one, other = await rivals(2)
    won: Counter[int] = Counter()
    for at in range(ROUNDS):
        # Ids of the same partition; keys belong to namespace and lane.
        named = [f"{{fp:86}}:{which}1111111-2222-3333-4444-{at:012}" for which in "ab"]
        first = None if ids != "given" else named[0]
        second = None if ids == "minted" else named[1]
        answers = await at_once(
            one.create_execution(**new(execution_id=first, idempotency_key=f"k{at}")),
            other.create_execution(**new(execution_id=second, idempotency_key=f"k{at}")),
        )
        won[creator(answers)] += 1
    check_both_won(won)
    assert len(await rows.of("execution")) == len(await rows.of("idempotency_key")) == ROUNDS


async def test_of_two_creates_with_one_id_and_different_keys_one_creates_and_keeps_its_key(
    rivals: Rivals, rows: Rows
) -> None:
    one, other = await rivals(2)
    won: Counter[int] = Counter()
    for at in range(ROUNDS):
        answers = await at_once(
            one.create_execution(**new(execution_id=given_id(at), idempotency_key=f"a{at}")),
            other.create_execution(**new(execution_id=given_id(at), idempotency_key=f"b{at}" if at % 2 else None)),
        )
        winner = creator(answers)
        won[winner] += 1
        kept = {entry["key"] for entry in await rows.of("idempotency_key", subject_id=given_id(at)[-36:])}
        assert kept == ({f"b{at}"} if winner and at % 2 else set() if winner else {f"a{at}"})
    check_both_won(won)


async def test_batches_that_share_ids_and_keys_in_opposite_order_create_each_once(rivals: Rivals, rows: Rows) -> None:
    several = await rivals(3)
    created: Counter[str] = Counter()
    for at in range(ROUNDS):
        named = [new(execution_id=given_id(at * 6 + nth)) for nth in range(6)]
        keyed = [new(idempotency_key=f"{at} {nth}") for nth in range(6)]
        batches = [random.sample([*named, *keyed], 12) for _ in several]
        calls = [
            engine.create_many([NewExecution(**arguments) for arguments in batch])
            for engine, batch in zip(several, batches, strict=True)
        ]
        for verdict in [verdict for verdicts in await at_once(*calls) for verdict in verdicts]:
            assert isinstance(verdict, Created | Duplicate), verdict
            created[verdict.execution_id] += isinstance(verdict, Created)
    assert set(created.values()) == {1}
    assert len(created) == len(await rows.of("execution")) == ROUNDS * 12


async def test_of_two_claims_of_one_row_one_gets_it(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    won: Counter[bool] = Counter()
    for _ in range(ROUNDS):
        made = await one.create_execution(**new())
        found = await at_once(claim(one), claim(other))
        assert sorted(len(answer) for answer in found) == [0, 1]
        won[bool(found[0])] += 1
        (taken,) = found[0] or found[1]
        assert (taken.execution_id, taken.lease_epoch) == (made.execution_id, 1)
        row = await rows.execution(taken.execution_id)
        assert (row["lease_id"], row["attempt_count"]) == (taken.lease_id, 1)
    check_both_won(won)
    assert Counter(event["kind"] for event in await rows.of("event_each")) == {"acquired": ROUNDS}


async def test_claims_from_four_processes_lease_nothing_twice(rivals: Rivals, rows: Rows) -> None:
    several = await rivals(4)
    for _ in range(4):
        await several[0].create_many([NewExecution(**new(priority=at % 3)) for at in range(1000)])
    rounds = 0

    async def take_all(engine: Engine) -> list[Any]:
        nonlocal rounds
        taken: list[Any] = []
        while found := await claim(engine, limit=random.randint(1, 30)):
            rounds += 1
            taken += found
            verdicts = await engine.complete_many([(one.handle, b"x") for one in found])
            assert {type(verdict) for verdict in verdicts} == {Completed}
        return taken

    taken = [one for found in await asyncio.gather(*map(take_all, several)) for one in found]
    assert rounds >= 200
    assert len(taken) == len({one.execution_id for one in taken}) == 4000
    assert {one.lease_epoch for one in taken} == {1}
    assert Counter(event["kind"] for event in await rows.of("event_each")) == {"acquired": 4000, "released": 4000}
    assert set((await endings(rows)).values()) == {1}


async def test_a_completion_and_the_expiry_of_its_lease_agree(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    one, other = await rivals(2)

    async def take_over() -> list[Any]:
        await a_moment()
        await clock.advance(ms=1001)
        return await claim(other)

    seen: Counter[bool] = Counter()
    for _ in range(ROUNDS):
        (handle,) = await claimed(one, lease_ttl_ms=1000)
        completed, taken = await at_once(one.complete(handle, b"mine"), take_over())
        seen[completed is None] += 1
        if completed is None:
            assert taken == []
            assert await one.get_execution_result(handle.execution_id) == b"mine"
            continue
        assert completed in ("lease_expired", "lease_conflict")
        (second,) = taken or await claim(other)
        assert (second.execution_id, second.lease_epoch, second.attempt_index) == (handle.execution_id, 2, 1)
        await other.complete(second.handle, b"theirs")
        assert await one.get_execution_result(handle.execution_id) == b"theirs"
    check_both_won(seen)
    assert set((await endings(rows)).values()) == {1}
    assert len(await rows.of("execution", public_state="completed")) == ROUNDS


async def test_a_renewal_and_the_mark_of_an_expired_lease_agree(rivals: Rivals, rows: Rows, clock: Clock) -> None:
    one, other = await rivals(2)

    async def mark(handle: Handle) -> int:
        await a_moment()
        await clock.advance(ms=5000)
        return await parts_of(other).lease_expiry.mark_expired([handle.execution_id])

    seen: Counter[bool] = Counter()
    for _ in range(ROUNDS):
        (handle,) = await claimed(one, lease_ttl_ms=60_000)
        await clock.advance(ms=57_000)
        renewed, marked = await at_once(one.renew(handle), mark(handle))
        row = await rows.execution(handle.execution_id)
        kinds = [event["kind"] for event in await rows.events(handle.execution_id)]
        seen[isinstance(renewed, Renewed)] += 1
        if isinstance(renewed, Renewed):
            assert (row["ownership_state"], marked, kinds) == ("leased", 0, ["acquired", "renewed"])
            assert row["lease_expires_at"] == renewed.expires_at_ms
        else:
            assert (row["ownership_state"], renewed) == ("lease_expired_reclaimable", "lease_expired")
            assert kinds == ["acquired", "expired"]
        await other.cancel_execution(execution_id=handle.execution_id, reason="next")
    check_both_won(seen)


async def test_of_a_cancel_and_a_completion_one_wins(rivals: Rivals, rows: Rows) -> None:
    one, other = await rivals(2)
    handles = await claimed(one, count=ROUNDS, lease_ttl_ms=HOUR_MS)
    won: Counter[str] = Counter()
    for handle in handles:
        completed, cancelled = await at_once(
            one.complete(handle, b"x"), other.cancel_execution(execution_id=handle.execution_id, reason="x")
        )
        row = await rows.execution(handle.execution_id)
        won[row["terminal_outcome"]] += 1
        if row["terminal_outcome"] == "success":
            assert (completed, cancelled) == (None, "execution_not_active")
        else:
            assert (completed, row["terminal_outcome"]) == ("execution_not_active", "cancelled")
            assert isinstance(cancelled, Cancelled)
    check_both_won(won)
    assert set((await endings(rows)).values()) == {1}
    assert len(await rows.of("attempt_all")) == ROUNDS


async def test_endings_of_every_kind_at_once_leave_one(rivals: Rivals, rows: Rows) -> None:
    several = await rivals(4)
    await several[0].create_many([NewExecution(**new()) for _ in range(ROUNDS)])
    runs = await claim(several[0], limit=ROUNDS, lease_ttl_ms=HOUR_MS)
    won: Counter[str] = Counter()

    async def after_a_moment(call: Awaitable[Any], first: asyncio.Task[Any], *, waits: bool) -> Any:
        await (asyncio.wait([first]) if waits else a_moment())
        return await outcome(call)

    for nth, run in enumerate(runs):
        handle = run.handle
        endings_of_it: list[Awaitable[Any]] = [
            several[0].complete(handle, b"x"),
            several[1].fail(handle, reason="x", claimed=run),
            several[2].cancel(handle, "x"),
            several[3].cancel_execution(execution_id=handle.execution_id, reason="x"),
        ]
        # The one with the longest way to the row wins no race: now and then the others begin when the first is done.
        at_first = random.randrange(len(endings_of_it))
        first = asyncio.create_task(outcome(endings_of_it[at_first]))
        completed, failed, cancelled, overridden, renewed = await at_once(
            *(
                first if at == at_first else after_a_moment(call, first, waits=nth % 4 == 0)
                for at, call in enumerate(endings_of_it)
            ),
            several[3].renew(handle),
        )
        ended = (await rows.execution(handle.execution_id))["terminal_outcome"]
        won[ended] += 1
        told = {
            "success": completed is None,
            "failed": isinstance(failed, TerminalFailed),
            "cancelled": cancelled is None or isinstance(overridden, Cancelled),
        }
        # Of a complete and a fail one at most is told that it has won, and nobody who has not.
        assert told == {outcome: outcome == ended for outcome in told}
        refused = {answer for answer in (completed, failed, cancelled, overridden) if isinstance(answer, str)}
        assert refused <= {"execution_not_active"}
        assert isinstance(renewed, Renewed) or renewed == "execution_not_active"
    assert set(won) == {"success", "failed", "cancelled"}
    assert {row["lifecycle_phase"] for row in await rows.of("execution")} == {"terminal"}
    assert (await endings(rows)) == {run.execution_id[-36:]: 1 for run in runs}
    assert len(await rows.of("attempt_all")) == ROUNDS


async def test_batches_of_endings_and_renewals_in_opposite_order_do_not_wait_in_a_circle(
    rivals: Rivals, rows: Rows
) -> None:
    one, other = await rivals(2)
    for _ in range(ROUNDS // 20):
        handles = await claimed(one, count=40)
        for _ in range(20):
            shuffled = [random.sample(handles, 40) for _ in range(2)]
            for verdicts in await at_once(one.renew_many(shuffled[0]), other.renew_many(shuffled[1])):
                assert {type(verdict) for verdict in verdicts} == {Renewed}
        shuffled = [random.sample(handles, 40) for _ in range(2)]
        answers = await at_once(
            one.complete_many([(handle, b"1") for handle in shuffled[0]]),
            other.complete_many([(handle, b"2") for handle in shuffled[1]]),
        )
        for verdicts in answers:
            assert {type(verdict) for verdict in verdicts} == {Completed}
    assert set((await endings(rows)).values()) == {1}


async def test_trims_at_once_and_tags_leave_nothing_of_what_they_delete(
    rivals: Rivals, rows: Rows, clock: Clock
) -> None:
    one, other, tagging = await rivals(3)
    trimmed = 0
    for _ in range(ROUNDS):
        made = [await one.create_execution(**new()) for _ in range(4)]
        claimed = await one.claim_many(lanes=("default",), limit=4, worker_id="w", worker_instance_id="w-1")
        await one.complete_many([(each.handle, b"done") for each in claimed])
        await clock.advance(ms=one.settings.retention_ms + 1)
        first, second, _ = await at_once(
            parts_of(one).retention.trim(limit=2),
            parts_of(other).retention.trim(limit=2),
            tagging.set_execution_tag(random.choice(made).execution_id, "app.team", "a"),
        )
        trimmed += first + second
    while found := await parts_of(one).retention.trim():
        trimmed += found
    assert trimmed == 4 * ROUNDS
    for table in ("execution", "execution_tag", "retained"):
        assert await rows.of(table) == []

"""A batch survives its worst member: 99 good items get their answers whatever the hundredth is."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from creates import new
from fixtures import Engines, Eventually, Rows
from flowfabric.db import session as sessions
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import create as creation
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.handle import Backend, Handle
from flowfabric.model.lease import Completed, Renewed, RetryScheduled, TerminalFailed
from flowfabric.model.states import HandleKind

GOOD = 99
LOCKED_TEXT = (
    "{} is locked by another session: 3 tries failed (canceling statement due to lock timeout); "
    "nothing was written, repeat the call"
)
RETRIED = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 1000}}}


async def claimed(engine: Engine, count: int, **overrides: Any) -> list[Handle]:
    """The handles of so many new executions, claimed in one go, but for the one at 50, which has a claim of its own."""
    await engine.create_many([new(**overrides) for _ in range(count)])
    name = "worker-1"
    found: list[Handle] = []
    for limit in (50, 1, count) if count > 50 else (count,):
        claims = await engine.claim_many(lanes=("default",), worker_id=name, worker_instance_id=name, limit=limit)
        found += [one.handle for one in claims]
    assert len(found) == count
    return found


def altered(handle: Handle, **changes: Any) -> Handle:
    """A handle that differs in some fields."""
    return msgspec.structs.replace(handle, **changes)


async def one_by_one(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The answers of single calls made at the same time, a refusal as a value."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def create_each(engine: Engine, items: Sequence[NewExecution]) -> list[Any]:
    """Create by single calls that share statements."""
    fields = NewExecution.__struct_fields__
    return await one_by_one([engine.create_execution(**{name: getattr(new, name) for name in fields}) for new in items])


async def renew_each(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Renew by single calls that share statements."""
    return await one_by_one([engine.renew(handle) for handle in handles])


async def complete_each(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Complete by single calls that share statements; success reads as in the batch form."""
    answers = await one_by_one([engine.complete(handle, handle.execution_id.encode()) for handle in handles])
    return ["completed" if answer is None else answer for answer in answers]


async def fail_each(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Fail by single calls that share statements."""
    return await one_by_one([engine.fail(handle, reason="no luck") for handle in handles])


async def create_many(engine: Engine, items: Sequence[NewExecution]) -> list[Any]:
    """Create by the batch form."""
    return list(await engine.create_many(items))


async def renew_many(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Renew by the batch form."""
    return list(await engine.renew_many(handles))


async def complete_many(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Complete by the batch form."""
    answers = await engine.complete_many([(handle, handle.execution_id.encode()) for handle in handles])
    named = [
        getattr(answer, "execution_id", handle.execution_id) for answer, handle in zip(answers, handles, strict=True)
    ]
    assert named == [handle.execution_id for handle in handles]
    return ["completed" if isinstance(answer, Completed) else answer for answer in answers]


Batched = Callable[[Engine, Sequence[Any]], Coroutine[Any, Any, list[Any]]]

creates = pytest.mark.parametrize("create", [create_each, create_many], ids=["each", "many"])
UNDER_LEASE: dict[str, Batched] = {
    "renew each": renew_each,
    "renew many": renew_many,
    "complete each": complete_each,
    "complete many": complete_many,
    "fail each": fail_each,
}
under_lease = pytest.mark.parametrize("operation", UNDER_LEASE)


def is_good(operation: str, answer: object) -> bool:
    """Whether this is what the operation answers when all is well."""
    if operation.startswith("complete"):
        return answer == "completed"
    return isinstance(answer, Renewed if operation.startswith("renew") else TerminalFailed)


def code(answer: object) -> str | None:
    """The code of a refusal."""
    return answer.code if isinstance(answer, EngineError) else None


@asynccontextmanager
async def held(connection: asyncpg.Connection, execution_id: str) -> AsyncIterator[None]:
    """Keep the row of an execution locked, and its claim, which is all that a renewal may write."""
    async with connection.transaction():
        await connection.execute("select from execution where execution_id = $1 for update", execution_id[-36:])
        await connection.execute("select from claim where $1 = any(execution_ids) for update", execution_id[-36:])
        yield


# create


@creates
@pytest.mark.parametrize("own_id", [None, "{fp:86}:21111111-2222-3333-4444-555555555555"], ids=["minted", "own"])
async def test_a_key_locked_for_too_long_is_refused_alone(
    engine: Engine,
    create: Batched,
    rows: Rows,
    connection: asyncpg.Connection,
    own_id: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(creation, "PATIENCE_ALONE", "60ms")
    (first,) = await create(engine, [new(idempotency_key="k")])
    items = [new(idempotency_key=f"k{at}" if at % 2 else None) for at in range(GOOD)]
    items.insert(50, new(idempotency_key="k", execution_id=own_id))
    async with connection.transaction():
        await connection.execute("select from idempotency_key where key = 'k' for update")
        answers = await create(engine, items)
    refusal = answers.pop(50)
    assert code(refusal) == "retry_exhausted"
    about = "idempotency key 'k'" + (f" or execution {own_id}" if own_id else "")
    assert refusal.detail == LOCKED_TEXT.format(about)
    assert {type(answer) for answer in answers} == {Created}
    assert len(await rows.of("execution")) == GOOD + 1
    assert await create(engine, [items[50]]) == [Duplicate(execution_id=first.execution_id)]


@creates
async def test_a_duplicate_among_creates(engine: Engine, create: Batched, rows: Rows) -> None:
    named = "{fp:86}:11111111-2222-3333-4444-555555555555"
    keyed, _ = await create(engine, [new(idempotency_key="k"), new(execution_id=named)])
    items = [new(input_payload=b"%d" % at) for at in range(GOOD)]
    items[30:30] = [new(execution_id=named)]
    items[60:60] = [new(idempotency_key="k")]
    answers = await create(engine, items)
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, Created)] == [30, 60]
    assert (answers[30], answers[60]) == (Duplicate(execution_id=named), Duplicate(execution_id=keyed.execution_id))  # type: ignore[arg-type]
    await check_created(rows, items, answers)


async def check_created(rows: Rows, items: Sequence[NewExecution], answers: Sequence[Any]) -> None:
    """Each created execution is the one its caller described."""
    stored = {str(row["execution_id"]): row["input_payload"] for row in await rows.of("execution")}
    for item, answer in zip(items, answers, strict=True):
        if isinstance(answer, Created):
            assert stored[answer.execution_id[-36:]] == item.input_payload


@creates
async def test_creates_that_name_each_other(engine: Engine, create: Batched, rows: Rows) -> None:
    items = [new() for _ in range(GOOD)]
    items += [new(idempotency_key="k") for _ in range(10)]
    items += [new(execution_id="{fp:86}:11111111-2222-3333-4444-555555555555") for _ in range(10)]
    answers = await create(engine, items)
    assert Counter(type(answer) for answer in answers) == {Created: GOOD + 2, Duplicate: 18}
    for group in (answers[GOOD : GOOD + 10], answers[GOOD + 10 :]):
        assert len({answer.execution_id for answer in group}) == 1
        if create is create_many:
            assert isinstance(group[0], Created)
    assert len(await rows.of("execution")) == GOOD + 2


@creates
async def test_a_poisoned_create(engine: Engine, create: Batched, rows: Rows) -> None:
    poisons: list[dict[str, Any]] = [
        {"execution_kind": "nul \0"},
        {"creator_identity": "half \ud800"},
        {"idempotency_key": "k" * 1025},
        {"idempotency_key": "nul \0", "execution_id": f"{{fp:1}}:{uuid4()}"},
        {"tags": {"app.x": "nul \0"}},
        {"tags": {"app.x": "half \ud800"}},
        {"policy": {"budget_ids": ["nul \0"]}},
        {"input_payload": "text"},
    ]
    items = [new(input_payload=b"%d" % at) for at in range(GOOD)]
    for at, poison in enumerate(poisons):
        items.insert(at * 10, new(**poison))
    answers = await create(engine, items)
    refused = [at for at, answer in enumerate(answers) if not isinstance(answer, Created)]
    assert refused == [at * 10 for at in range(len(poisons))]
    assert {code(answers[at]) for at in refused} == {"invalid_input", "invalid_policy_json"}
    await check_created(rows, items, answers)
    assert len(await rows.of("execution")) == GOOD


@creates
async def test_a_create_the_store_chokes_on(
    engine: Engine, create: Batched, rows: Rows, connection: asyncpg.Connection
) -> None:
    await connection.execute("alter table execution add check (creator_identity <> 'poison')")
    items = [new(input_payload=b"%d" % at) for at in range(GOOD)]
    items[50:50] = [new(creator_identity="poison", idempotency_key="k", tags={"a.b": "c"})]
    answers = await create(engine, items)
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, Created)] == [50]
    assert code(answers[50]) == "other"
    await check_created(rows, items, answers)
    assert len(await rows.of("execution")) == GOOD
    assert await rows.of("idempotency_key") == await rows.of("execution_tag") == []


@pytest.mark.usefixtures("patient_with_locks")
@creates
async def test_a_create_whose_execution_somebody_holds(
    engine: Engine, create: Batched, connection: asyncpg.Connection
) -> None:
    (taken,) = await create(engine, [new()])
    async with held(connection, taken.execution_id), asyncio.timeout(30):
        answers = await create(engine, [*(new() for _ in range(GOOD)), new(execution_id=taken.execution_id)])
    assert Counter(type(answer) for answer in answers) == {Created: GOOD, Duplicate: 1}


@pytest.mark.usefixtures("patient_with_locks")
async def test_one_held_key_does_not_hold_the_other_callers(engine: Engine, connection: asyncpg.Connection) -> None:
    (taken,) = await engine.create_many([new(idempotency_key="k")])
    items = [*(new() for _ in range(GOOD)), new(idempotency_key="k")]
    async with connection.transaction():
        await connection.execute("select from idempotency_key for update")
        tasks = [asyncio.create_task(create_each(engine, [item])) for item in items]
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*tasks[:GOOD])
        assert {type(answer) for (answer,) in answers} == {Created}
        assert not tasks[GOOD].done()
    assert await tasks[GOOD] == [Duplicate(execution_id=taken.execution_id)]  # type: ignore[union-attr]


async def test_creates_of_a_cancelled_caller(engine: Engine, rows: Rows, eventually: Eventually) -> None:
    await engine.create_many([new()])
    given = {name: getattr(new(), name) for name in NewExecution.__struct_fields__}
    tasks = [asyncio.create_task(engine.create_execution(**given)) for _ in range(GOOD + 1)]
    await asyncio.sleep(0)
    tasks[40].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, Created)] == [40]

    async def are_all_there() -> bool:
        return len(await rows.of("execution")) == GOOD + 2

    await eventually(are_all_there)


# renew, complete, fail


@under_lease
async def test_bad_handles_among_good_ones(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, operation: str
) -> None:
    handles = await claimed(engine, GOOD + 3)
    lapsed, other, third = handles[GOOD:]
    await connection.execute("update test_clock set offset_ms = offset_ms + 20000")
    await engine.renew_many([*handles[:GOOD], other, third])
    await connection.execute("update test_clock set offset_ms = offset_ms + 20000")
    bad = {
        10: (altered(other, lease_epoch=other.lease_epoch + 1), "lease_conflict"),
        20: (altered(other, lease_id=uuid4()), "lease_conflict"),
        30: (lapsed, "lease_expired"),
        40: (altered(third, execution_id=f"{{fp:1}}:{uuid4()}"), "execution_not_found"),
        50: (altered(third, backend=Backend.SQLITE), "handle_from_other_backend"),
        60: (altered(third, kind=HandleKind.SUSPENDED), "lease_conflict"),
        70: (altered(other, lease_epoch=2**63), "other"),
    }
    items = list(handles[:GOOD])
    for at, (handle, _) in bad.items():
        items.insert(at, handle)
    answers = await UNDER_LEASE[operation](engine, items)
    assert {at: code(answer) for at, answer in enumerate(answers) if not is_good(operation, answer)} == {
        at: expected for at, (_, expected) in bad.items()
    }
    assert {row["ownership_state"] for row in await rows.of("execution", execution_id=lapsed.execution_id[-36:])} == {
        "lease_expired_reclaimable"
    }
    await check_done(engine, rows, handles[:GOOD], operation)


async def check_done(engine: Engine, rows: Rows, handles: Sequence[Handle], operation: str) -> None:
    """What was answered as done is done, each with its own result and told once."""
    told = Counter(str(event["execution_id"]) for event in await rows.of("event_each") if event["outcome"] is not None)
    for handle in handles:
        row = await rows.execution(handle.execution_id)
        if operation.startswith("renew"):
            assert row["ownership_state"] == "leased"
            continue
        assert row["terminal_outcome"] == ("success" if operation.startswith("complete") else "failed")
        assert told[handle.execution_id[-36:]] == 1
        if operation.startswith("complete"):
            assert await engine.get_execution_result(handle.execution_id) == handle.execution_id.encode()


CHOKES = {
    "renew": "alter table event add check (kind <> 'renewed' or '{id}'::uuid <> all(execution_ids))",
    "complete": "alter table execution add check (result_payload is null or execution_id <> '{id}')",
    "fail": "alter table execution add check (failure_reason is null or execution_id <> '{id}')",
}


@under_lease
async def test_a_run_the_store_chokes_on(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, operation: str
) -> None:
    handles = await claimed(engine, GOOD + 1)
    await connection.execute(CHOKES[operation.split()[0]].format(id=handles[50].execution_id[-36:]))
    answers = await UNDER_LEASE[operation](engine, handles)
    assert [at for at, answer in enumerate(answers) if not is_good(operation, answer)] == [50]
    assert code(answers[50]) == "other"
    row = await rows.execution(handles[50].execution_id)
    assert (row["public_state"], row["lease_renewed_at"]) == ("active", None)
    del handles[50]
    await check_done(engine, rows, handles, operation)


@under_lease
async def test_a_run_named_twice_is_answered_in_order(engine: Engine, rows: Rows, operation: str) -> None:
    handles = await claimed(engine, GOOD)
    items = [*handles, handles[0], handles[50], handles[0]]
    answers = await UNDER_LEASE[operation](engine, items)
    assert all(is_good(operation, answer) for answer in answers)
    await check_done(engine, rows, handles, operation)


@pytest.mark.usefixtures("patient_with_locks")
@pytest.mark.parametrize("operation", ["renew each", "complete each", "fail each"])
async def test_one_locked_row_does_not_hold_the_other_callers(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, operation: str
) -> None:
    handles = await claimed(engine, GOOD + 1)
    async with held(connection, handles[50].execution_id):
        tasks = [asyncio.create_task(UNDER_LEASE[operation](engine, [handle])) for handle in handles]
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(task for at, task in enumerate(tasks) if at != 50))
        assert not tasks[50].done()
    assert all(is_good(operation, answer) for (answer,) in (*answers, await tasks[50]))
    await check_done(engine, rows, handles, operation)


@pytest.mark.usefixtures("patient_with_locks")
@pytest.mark.parametrize("operation", ["renew many", "complete many"])
async def test_a_batch_waits_for_its_locked_row_and_answers_all(
    engine: Engine, rows: Rows, connection: asyncpg.Connection, operation: str
) -> None:
    handles = await claimed(engine, GOOD + 1)
    async with held(connection, handles[50].execution_id):
        task = asyncio.create_task(UNDER_LEASE[operation](engine, handles))
        await asyncio.wait([task], timeout=0.3)
        assert not task.done()
    answers = await task
    assert all(is_good(operation, answer) for answer in answers)
    await check_done(engine, rows, handles, operation)


@under_lease
async def test_a_row_locked_for_too_long_is_refused_alone(
    engines: Engines, rows: Rows, connection: asyncpg.Connection, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sessions._SESSION, "lock_timeout", "60ms")
    engine = await engines()
    handles = await claimed(engine, GOOD + 1)
    async with held(connection, handles[50].execution_id):
        answers = await UNDER_LEASE[operation](engine, handles)
    assert [at for at, answer in enumerate(answers) if not is_good(operation, answer)] == [50]
    assert code(answers[50]) == "retry_exhausted"
    assert answers[50].retryable
    assert answers[50].detail == LOCKED_TEXT.format(f"execution {handles[50].execution_id}")
    (again,) = await UNDER_LEASE[operation](engine, [handles[50]])
    assert is_good(operation, again)
    await check_done(engine, rows, handles, operation)


@pytest.mark.parametrize("operation", ["renew each", "complete each", "fail each"])
async def test_a_cancelled_caller_takes_nobody_with_it(
    engine: Engine, rows: Rows, operation: str, eventually: Eventually
) -> None:
    handles = await claimed(engine, GOOD + 1)
    tasks = [asyncio.create_task(UNDER_LEASE[operation](engine, [handle])) for handle in handles]
    for _ in range(3):
        await asyncio.sleep(0)
    tasks[50].cancel()
    answers: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers.pop(50), asyncio.CancelledError)
    assert all(is_good(operation, answer) for (answer,) in answers)
    left = handles.pop(50)
    await check_done(engine, rows, handles, operation)
    # The engine stays usable, and the call may be repeated.
    (again,) = await UNDER_LEASE[operation](engine, [left])
    assert is_good(operation, again)


async def test_failures_with_and_without_a_retry_share_a_statement(engine: Engine, rows: Rows) -> None:
    retried = await claimed(engine, 50, policy=RETRIED)
    ended = await claimed(engine, 50)
    mixed = [handle for pair in zip(retried, ended, strict=True) for handle in pair]
    answers = await fail_each(engine, mixed)
    assert [type(answer) for answer in answers] == [RetryScheduled, TerminalFailed] * 50
    states = Counter(row["public_state"] for row in await rows.of("execution"))
    assert states == {"delayed": 50, "failed": 50}


async def test_endings_of_every_kind_share_a_statement(engine: Engine, rows: Rows) -> None:
    completed, failed, cancelled = await claimed(engine, 40), await claimed(engine, 40), await claimed(engine, 40)
    calls: list[Coroutine[Any, Any, Any]] = []
    for one, two, three in zip(completed, failed, cancelled, strict=True):
        calls += [
            engine.complete(one, one.execution_id.encode()),
            engine.fail(two, reason="x"),
            engine.cancel(three, "x"),
        ]
    assert [type(answer) for answer in await one_by_one(calls)] == [type(None), TerminalFailed, type(None)] * 40
    await check_done(engine, rows, completed, "complete each")
    await check_done(engine, rows, failed, "fail each")
    states = Counter(row["public_state"] for row in await rows.of("execution"))
    assert states == {"completed": 40, "failed": 40, "cancelled": 40}


async def test_a_batch_of_a_thousand_is_one_and_of_more_is_refused(engine: Engine) -> None:
    handles = await claimed(engine, 1000)
    assert all(isinstance(answer, Renewed) for answer in await engine.renew_many(handles))
    for items in ([], [*handles, handles[0]]):
        for call in (engine.renew_many(items), engine.complete_many([(handle, b"") for handle in items])):
            with pytest.raises(EngineError, match="invalid_input"):
                await call
    assert await complete_many(engine, handles) == ["completed"] * 1000

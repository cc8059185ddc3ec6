"""A bad create of a batch does not affect the others: all of them are created, and each caller gets its own answer."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from creates import new
from engine.cases import Cases
from fixtures import Eventually, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.execution import create as creation
from flowfabric.model.execution import Created, Duplicate, NewExecution

from .batches import GOOD, LOCKED_TEXT, MIDDLE, Batched, code, gathered, locked


async def create_each(engine: Engine, items: Sequence[NewExecution]) -> list[Any]:
    """Create with concurrent single calls, which share statements."""
    fields = NewExecution.__struct_fields__
    return await gathered([engine.create_execution(**{name: getattr(item, name) for name in fields}) for item in items])


async def create_many(engine: Engine, items: Sequence[NewExecution]) -> list[Any]:
    """Create with one call of the batch form."""
    return list(await engine.create_many(items))


single_calls_and_batch_form = pytest.mark.parametrize("create", [create_each, create_many], ids=["each", "many"])


@single_calls_and_batch_form
@pytest.mark.parametrize("given_id", [None, "{fp:86}:21111111-2222-3333-4444-555555555555"], ids=["generated", "given"])
async def test_a_create_whose_key_is_locked_too_long_is_refused_and_the_others_succeed(
    engine: Engine,
    create: Batched,
    rows: Rows,
    connection: asyncpg.Connection,
    given_id: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(creation, "LOCK_TIMEOUT_ALONE", "15ms")
    (first,) = await create(engine, [new(idempotency_key="k")])
    items = [new(idempotency_key=f"k{at}" if at % 2 else None) for at in range(GOOD)]
    items.insert(MIDDLE, new(idempotency_key="k", execution_id=given_id))
    async with connection.transaction():
        await connection.execute("select from idempotency_key where key = 'k' for update")
        answers = await create(engine, items)
    refusal = answers.pop(MIDDLE)
    assert code(refusal) == "retry_exhausted"
    locked_thing = "idempotency key 'k'" + (f" or execution {given_id}" if given_id else "")
    assert refusal.detail == LOCKED_TEXT.format(locked_thing)
    assert {type(answer) for answer in answers} == {Created}
    assert len(await rows.of("execution")) == GOOD + 1
    assert await create(engine, [items[MIDDLE]]) == [Duplicate(execution_id=first.execution_id)]


@single_calls_and_batch_form
async def test_duplicates_among_creates_name_the_existing_executions(
    engine: Engine, create: Batched, rows: Rows
) -> None:
    given_id = "{fp:86}:11111111-2222-3333-4444-555555555555"
    keyed, _ = await create(engine, [new(idempotency_key="k"), new(execution_id=given_id)])
    items = [new(input_payload=b"%d" % at) for at in range(GOOD)]
    items.insert(10, new(execution_id=given_id))
    items.insert(20, new(idempotency_key="k"))
    answers = await create(engine, items)
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, Created)] == [10, 20]
    assert (answers[10], answers[20]) == (Duplicate(execution_id=given_id), Duplicate(execution_id=keyed.execution_id))  # type: ignore[arg-type]
    await check_created(rows, items, answers)


async def check_created(rows: Rows, items: Sequence[NewExecution], answers: Sequence[Any]) -> None:
    """Check that each created execution has the input of its own item."""
    stored = {str(row["execution_id"]): row["input_payload"] for row in await rows.of("execution")}
    for item, answer in zip(items, answers, strict=True):
        if isinstance(answer, Created):
            assert stored[uuid_of(answer.execution_id)] == item.input_payload


@single_calls_and_batch_form
async def test_creates_with_the_same_key_or_id_in_one_batch_create_one_execution(
    engine: Engine, create: Batched, rows: Rows
) -> None:
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


@single_calls_and_batch_form
async def test_invalid_creates_are_refused_and_the_others_succeed(engine: Engine, create: Batched, rows: Rows) -> None:
    invalid: list[dict[str, Any]] = [
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
    for at, overrides in enumerate(invalid):
        items.insert(at * 3, new(**overrides))
    answers = await create(engine, items)
    refused = [at for at, answer in enumerate(answers) if not isinstance(answer, Created)]
    assert refused == [at * 3 for at in range(len(invalid))]
    assert {code(answers[at]) for at in refused} == {"invalid_input", "invalid_policy_json"}
    await check_created(rows, items, answers)
    assert len(await rows.of("execution")) == GOOD


async def test_a_create_that_the_database_rejects_is_refused_and_the_others_succeed(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    await connection.execute("alter table execution add check (creator_identity <> 'rejected')")
    with Cases() as cases:
        for create in (create_each, create_many):
            with cases(create.__name__):
                before = len(await rows.of("execution"))
                items = [new(input_payload=b"%d" % at) for at in range(GOOD)]
                items.insert(MIDDLE, new(creator_identity="rejected", idempotency_key="k", tags={"a.b": "c"}))
                answers = await create(engine, items)
                assert [at for at, answer in enumerate(answers) if not isinstance(answer, Created)] == [MIDDLE]
                assert code(answers[MIDDLE]) == "other"
                await check_created(rows, items, answers)
                assert len(await rows.of("execution")) == before + GOOD
                assert await rows.of("idempotency_key") == await rows.of("execution_tag") == []


@pytest.mark.usefixtures("patient_with_locks")
@single_calls_and_batch_form
async def test_a_create_with_the_id_of_a_locked_execution_is_a_duplicate_at_once(
    engine: Engine, create: Batched, connection: asyncpg.Connection
) -> None:
    (taken,) = await create(engine, [new()])
    async with locked(connection, taken.execution_id), asyncio.timeout(30):
        answers = await create(engine, [*(new() for _ in range(GOOD)), new(execution_id=taken.execution_id)])
    assert Counter(type(answer) for answer in answers) == {Created: GOOD, Duplicate: 1}


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_locked_key_delays_only_its_own_caller(engine: Engine, connection: asyncpg.Connection) -> None:
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


async def test_a_cancelled_caller_of_a_create_does_not_affect_the_others(
    engine: Engine, rows: Rows, eventually: Eventually
) -> None:
    # Caches the numbers of lane and kind, so that the calls below queue their items before one of them is cancelled.
    await engine.create_many([new()])
    arguments = {name: getattr(new(), name) for name in NewExecution.__struct_fields__}
    tasks = [asyncio.create_task(engine.create_execution(**arguments)) for _ in range(GOOD + 1)]
    await asyncio.sleep(0)
    tasks[MIDDLE].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [at for at, answer in enumerate(answers) if not isinstance(answer, Created)] == [MIDDLE]

    async def are_all_created() -> bool:
        # Including the one whose caller was cancelled.
        return len(await rows.of("execution")) == GOOD + 2

    await eventually(are_all_created)

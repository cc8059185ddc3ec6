"""Inputs of every size come back as they were given; the large ones are stored apart from the execution's row."""

import random
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from engine.grants import claim_named, grant
from engine.state import Creating, both_creates, claim, items, new, refused
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created, Duplicate

SIZES = (0, 1, 256, 257, 1_500, 100_000)
UUID = "11111111-2222-3333-4444-555555555555"
GIVEN = f"{{fp:7}}:{UUID}"
WAYS: dict[str, dict[str, Any]] = {
    "minted": {},
    "with an id": {"execution_id": GIVEN},
    "with a key": {"idempotency_key": "k"},
    "with an id and a key": {"execution_id": GIVEN, "idempotency_key": "k"},
}

each_size = pytest.mark.parametrize("size", SIZES)
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{seed} {size}").randbytes(size)


async def check_stored(rows: Any, expected: dict[str, bytes]) -> None:
    """Every input is in exactly one place, the one that its size asks for."""
    on_row = {str(row["execution_id"]): row["input_payload"] for row in await rows.of("execution")}
    apart = {str(row["execution_id"]): row["input_payload"] for row in await rows.of("execution_input")}
    inputs = {execution_id[-36:]: given for execution_id, given in expected.items()}
    assert apart == {uuid: given for uuid, given in inputs.items() if len(given) > 256}
    assert on_row == {uuid: None if uuid in apart else given for uuid, given in inputs.items()}


def test_the_sizes_are_those_around_the_limit() -> None:
    assert {INLINE_PAYLOAD_BYTES, INLINE_PAYLOAD_BYTES + 1} <= set(SIZES)


@both_creates
@each_way
@each_size
async def test_an_input_comes_back_equal(
    engine: Engine, create: Creating, rows: Any, way: dict[str, Any], size: int
) -> None:
    # The first submission gives names their numbers, the second meets what is known.
    for round_, one in enumerate(({}, way)):
        given = content(size, round_)
        made = await create(engine, **new(lane_id=f"lane{round_}", input_payload=given, **one))
        assert isinstance(made, Created)
        assert (await engine.read_execution_context(made.execution_id)).input_payload == given
        assert (await rows.execution(made.execution_id))["input_payload"] == given
        (claimed,) = await claim(engine, f"lane{round_}")
        assert claimed.input_payload == given
        # Another lease of the same execution brings it again, by queue where a kind is named.
        await engine.hand_back(claimed.handle)
        (again,) = await claim(engine, f"lane{round_}", kinds=["job"])
        assert (again.execution_id, again.input_payload) == (made.execution_id, given)


@each_size
async def test_a_named_claim_brings_the_input(engine: Engine, given: Any, size: int) -> None:
    waiting = await given.created(input_payload=content(size))
    await grant(engine, waiting)
    assert (await claim_named(engine, waiting)).input_payload == content(size)


@each_size
async def test_a_delayed_execution_keeps_its_input(engine: Engine, given: Any, clock: Any, size: int) -> None:
    await given.created(input_payload=content(size), delay_ms=1000)
    await clock.advance(ms=1000)
    await parts_of(engine).delays.promote_due()
    (claimed,) = await claim(engine)
    assert claimed.input_payload == content(size)


@pytest.mark.parametrize("other", [{}, {"tags": {"app.a": "b"}}, {"idempotency_key": "k"}], ids=["alike", "tag", "key"])
async def test_inputs_of_one_batch_stay_with_their_executions(engine: Engine, rows: Any, other: dict[str, Any]) -> None:
    await engine.create_execution(**new(lane_id="known"))
    (first,) = await claim(engine, "known")
    given = [content(size, seed) for seed in range(3) for size in SIZES]
    random.Random(1).shuffle(given)
    batch = [new(input_payload=one, priority=len(given) - at) for at, one in enumerate(given)]
    batch[7] |= other
    made = await engine.create_many(items(*batch))
    expected = {one.execution_id: each for one, each in zip(made, given, strict=True)}  # type: ignore[union-attr]
    await check_stored(rows, expected | {first.execution_id: b"{}"})
    claimed = await claim(engine, limit=100)
    assert {one.execution_id: one.input_payload for one in claimed} == expected
    assert [one.input_payload for one in claimed] == given


@pytest.mark.parametrize("other", [{}, {"idempotency_key": "k"}], ids=["alike", "key"])
@each_size
async def test_a_batch_may_share_one_input(engine: Engine, rows: Any, other: dict[str, Any], size: int) -> None:
    await engine.create_execution(**new(lane_id="known"))
    (first,) = await claim(engine, "known")
    shared = content(size)
    batch = [new(input_payload=shared) for _ in range(20)]
    batch[3] |= other
    made = await engine.create_many(items(*batch))
    await check_stored(rows, {one.execution_id: shared for one in made} | {first.execution_id: b"{}"})  # type: ignore[union-attr]
    assert [one.input_payload for one in await claim(engine, limit=100)] == [shared] * 20


@both_creates
@pytest.mark.parametrize("form", [bytearray, memoryview])
@each_size
async def test_an_input_may_be_a_buffer(
    engine: Engine, create: Creating, form: Callable[[bytes], Any], size: int
) -> None:
    for _ in range(2):
        await create(engine, **new(input_payload=form(content(size))))
    assert [one.input_payload for one in await claim(engine)] == [content(size)] * 2


@both_creates
@each_size
async def test_a_repeat_under_a_key_is_compared_with_the_whole_input(
    engine: Engine, create: Creating, rows: Any, size: int
) -> None:
    first = await create(engine, **new(idempotency_key="k", input_payload=content(size)))
    async with rows.unchanged():
        again = await create(engine, **new(idempotency_key="k", input_payload=content(size)))
        assert again == Duplicate(execution_id=first.execution_id)
        longer = new(idempotency_key="k", input_payload=content(size) + b"!")
        await refused(create(engine, **longer), "idempotency_conflict", "payload")


@both_creates
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("stored", [1, 1_500])
async def test_an_id_that_is_taken_leaves_no_input_behind(
    engine: Engine, create: Creating, rows: Any, key: str | None, stored: int
) -> None:
    await create(engine, **new(execution_id=GIVEN, input_payload=content(stored)))
    async with rows.unchanged():
        for size in SIZES:
            again = new(execution_id=GIVEN, input_payload=content(size, 1), idempotency_key=key)
            assert isinstance(await create(engine, **again), Duplicate)
    assert [one.input_payload for one in await claim(engine)] == [content(stored)]


@pytest.mark.parametrize("stored", [1, 1_500])
async def test_an_id_that_is_taken_leaves_no_input_behind_among_new_ones(
    engine: Engine, rows: Any, stored: int
) -> None:
    await engine.create_execution(**new(execution_id=GIVEN, input_payload=content(stored)))
    # The same UUID in another partition is another execution.
    elsewhere = f"{{fp:8}}:{UUID}"
    batch = [new(input_payload=content(1_500, seed)) for seed in range(1, 4)]
    batch[0] |= {"execution_id": GIVEN}
    batch[1] |= {"execution_id": elsewhere}
    verdicts = await engine.create_many(items(*batch))
    assert [type(verdict) for verdict in verdicts] == [Duplicate, Created, Created]
    stored_rows = await rows.of("execution_input")
    assert len(stored_rows) == 2 + (stored > 256)
    inputs = {one.execution_id: one.input_payload for one in await claim(engine)}
    assert inputs == {
        GIVEN: content(stored),
        elsewhere: content(1_500, 2),
        verdicts[2].execution_id: content(1_500, 3),  # type: ignore[union-attr]
    }


@both_creates
@each_way
async def test_a_lane_that_accepts_nothing_takes_no_input(
    engine: Engine, create: Creating, rows: Any, way: dict[str, Any]
) -> None:
    await create(engine, **new())
    await engine.set_lane_state("default", "draining")
    async with rows.unchanged():
        await refused(create(engine, **new(input_payload=content(1_500), **way)), "invalid_input", "accepts no")


async def test_a_batch_the_store_refuses_in_part_leaves_the_inputs_of_the_others(
    engine: Engine, rows: Any, connection: asyncpg.Connection
) -> None:
    await engine.create_many(items(new(lane_id="known")))
    (first,) = await claim(engine, "known")
    await connection.execute("alter table execution_input add check (input_payload <> repeat('p', 300)::bytea)")
    batch = [new(input_payload=content(1_500, seed)) for seed in range(10)]
    batch[4] = new(input_payload=b"p" * 300)
    verdicts = await engine.create_many(items(*batch))
    assert [at for at, verdict in enumerate(verdicts) if isinstance(verdict, EngineError)] == [4]
    created = {
        verdict.execution_id: batch[at]["input_payload"]
        for at, verdict in enumerate(verdicts)
        if isinstance(verdict, Created)
    }
    await check_stored(rows, created | {first.execution_id: b"{}"})


@pytest.mark.parametrize("size", [1, 1_500])
async def test_retention_takes_the_input_with_its_execution(
    engine: Engine, given: Any, clock: Any, rows: Any, size: int
) -> None:
    short = {"policy": {"stream_policy": {"retention_ttl_ms": 1000}}}
    for _ in range(3):
        await given.completed(input_payload=content(size), **short)
        await given.cancelled(input_payload=content(size), **short)
    kept = await given.completed(input_payload=content(1_500))
    await clock.advance(ms=1000)
    assert await parts_of(engine).retention.trim() == 6
    await check_stored(rows, {kept: content(1_500)})


async def test_large_inputs_leave_as_many_executions_on_a_page(engine: Engine, connection: asyncpg.Connection) -> None:
    pages = []
    for size in (1, 1_500):
        before = await connection.fetchval("select pg_relation_size('execution')")
        batch = [new(input_payload=content(size, seed)) for seed in range(1000)]
        assert len(await engine.create_many(items(*batch))) == 1000
        pages.append(await connection.fetchval("select (pg_relation_size('execution') - $1) / 8192", before))
    small, large = pages
    assert 50 < large <= small + 2

"""Inputs of every size come back unchanged; large ones are stored in their own table."""

import itertools
import random
from typing import Any

import asyncpg

from engine.grants import claim_granted, issue_grant
from engine.state import CREATES, all_cases, claim, items, new, refused
from fixtures import Clock, Given, Rows, uuid_of
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created, Duplicate

SIZES = (0, 1, 256, 257, 1_500, 100_000)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{seed} {size}").randbytes(size)


def own_id(number: int, partition: int = 7) -> str:
    """An id of the caller's own."""
    return f"{{fp:{partition}}}:11111111-2222-3333-4444-{number:012d}"


def ways(number: int) -> dict[str, dict[str, Any]]:
    """How a create may name its execution."""
    return {
        "minted": {},
        "with an id": {"execution_id": own_id(2 * number)},
        "with a key": {"idempotency_key": f"{number} key"},
        "with an id and a key": {"execution_id": own_id(2 * number + 1), "idempotency_key": f"{number} both"},
    }


async def check_stored(rows: Rows, expected: dict[str, bytes]) -> None:
    """Every input is in exactly one table, the one for its size."""
    on_row = {str(row["execution_id"]): row["input_payload"] for row in await rows.of("execution")}
    apart = {str(row["execution_id"]): row["input_payload"] for row in await rows.of("execution_input")}
    inputs = {uuid_of(execution_id): given for execution_id, given in expected.items()}
    assert apart == {uuid: given for uuid, given in inputs.items() if len(given) > 256}
    assert on_row == {uuid: None if uuid in apart else given for uuid, given in inputs.items()}


def test_the_sizes_are_those_around_the_limit() -> None:
    assert {INLINE_PAYLOAD_BYTES, INLINE_PAYLOAD_BYTES + 1} <= set(SIZES)


async def test_an_input_comes_back_unchanged_however_it_was_submitted(engine: Engine, rows: Rows) -> None:
    with all_cases() as case:
        for number, ((name, create), size) in enumerate(itertools.product(CREATES.items(), SIZES)):
            # The first create meets a lane that is not registered yet, the others a known one.
            lane = f"{name} {size}"
            for seed, (way, named) in enumerate([("new lane", {}), *ways(number).items()]):
                with case(f"{lane} {way}"):
                    given = content(size, seed)
                    made = await create(engine, **new(lane_id=lane, input_payload=given, **named))
                    assert isinstance(made, Created)
                    assert (await engine.read_execution_context(made.execution_id)).input_payload == given
                    assert (await rows.execution(made.execution_id))["input_payload"] == given
                    (claimed,) = await claim(engine, lane)
                    assert claimed.input_payload == given
                    # The next lease returns it again; a claim that names kinds scans by queue.
                    await engine.hand_back(claimed.handle)
                    (again,) = await claim(engine, lane, kinds=["job"])
                    assert (again.execution_id, again.input_payload) == (made.execution_id, given)


async def test_a_named_claim_and_a_claim_after_a_delay_return_the_input(
    engine: Engine, given: Given, clock: Clock
) -> None:
    for size in SIZES:
        waiting = await given.created(input_payload=content(size))
        await issue_grant(engine, waiting)
        assert (await claim_granted(engine, waiting)).input_payload == content(size), size
        await given.created(input_payload=content(size), delay_ms=1000, lane_id="delayed")
    await clock.advance(ms=1000)
    await parts_of(engine).delays.promote_due()
    assert [one.input_payload for one in await claim(engine, "delayed")] == [content(size) for size in SIZES]


async def test_a_batch_keeps_each_input_with_its_execution(engine: Engine, rows: Rows) -> None:
    expected: dict[str, bytes] = {}
    different: dict[str, dict[str, Any]] = {
        "alike": {},
        "tag": {"tags": {"app.a": "b"}},
        "key": {"idempotency_key": "k"},
    }
    for lane, other in different.items():
        given = [content(size, seed) for seed in range(3) for size in SIZES]
        random.Random(1).shuffle(given)
        batch = [new(lane_id=lane, input_payload=one, priority=len(given) - at) for at, one in enumerate(given)]
        batch[7] |= other
        # The second of two batches meets a known lane.
        expected |= await created(engine, new(lane_id=lane, priority=100))
        made = await created(engine, *batch)
        expected |= made
        claimed = await claim(engine, lane, limit=100)
        assert {one.execution_id: one.input_payload for one in claimed[1:]} == made, lane
        assert [one.input_payload for one in claimed[1:]] == given, lane
    await check_stored(rows, expected)


async def created(engine: Engine, *arguments: dict[str, Any]) -> dict[str, bytes]:
    """The inputs of new executions by their ids."""
    verdicts = await engine.create_many(items(*arguments))
    assert [type(verdict) for verdict in verdicts] == [Created] * len(arguments)
    return {
        verdict.execution_id: argument["input_payload"]
        for verdict, argument in zip(verdicts, arguments, strict=True)
        if isinstance(verdict, Created)
    }


async def test_a_batch_may_share_one_input(engine: Engine, rows: Rows) -> None:
    expected: dict[str, bytes] = {}
    with all_cases() as case:
        for size, key in itertools.product(SIZES, (None, "k")):
            lane = f"{size} {key}"
            with case(lane):
                expected |= await created(engine, new(lane_id=lane, priority=1))
                batch = [new(lane_id=lane, input_payload=content(size)) for _ in range(20)]
                batch[3]["idempotency_key"] = key
                expected |= await created(engine, *batch)
                claimed = await claim(engine, lane, limit=100)
                assert [one.input_payload for one in claimed[1:]] == [content(size)] * 20
    await check_stored(rows, expected)


async def test_an_input_may_be_a_buffer(engine: Engine) -> None:
    with all_cases() as case:
        for (name, create), size in itertools.product(CREATES.items(), SIZES):
            with case(f"{name} {size}"):
                for form in (bytearray, memoryview, bytearray, memoryview):
                    await create(engine, **new(input_payload=form(content(size))))
                assert [one.input_payload for one in await claim(engine)] == [content(size)] * 4


async def test_a_repeat_under_a_key_is_compared_with_the_whole_input(engine: Engine, rows: Rows) -> None:
    cases = list(itertools.product(CREATES.items(), SIZES))
    first = {}
    for (name, create), size in cases:
        made = await create(engine, **new(idempotency_key=f"{name} {size}", input_payload=content(size)))
        first[name, size] = made.execution_id
    async with rows.unchanged():
        with all_cases() as case:
            for (name, create), size in cases:
                key = f"{name} {size}"
                with case(key):
                    again = await create(engine, **new(idempotency_key=key, input_payload=content(size)))
                    assert again == Duplicate(execution_id=first[name, size])
                    longer = new(idempotency_key=key, input_payload=content(size) + b"!")
                    await refused(create(engine, **longer), "idempotency_conflict", "payload")


async def test_a_create_with_an_id_in_use_stores_no_input(engine: Engine, rows: Rows) -> None:
    stored = (1, 1_500)
    for number, size in enumerate(stored):
        await engine.create_execution(**new(execution_id=own_id(number), input_payload=content(size)))
    async with rows.unchanged():
        with all_cases() as case:
            for (name, create), key, number, size in itertools.product(CREATES.items(), (None, "k"), (0, 1), SIZES):
                with case(f"{name} {key} {number} {size}"):
                    again = new(execution_id=own_id(number), input_payload=content(size, 1), idempotency_key=key)
                    assert isinstance(await create(engine, **again), Duplicate)
    assert [one.input_payload for one in await claim(engine)] == [content(size) for size in stored]


async def test_an_id_in_use_stores_no_input_among_new_executions(engine: Engine, rows: Rows) -> None:
    for number, stored in enumerate((1, 1_500)):
        lane = f"lane {stored}"
        known, elsewhere = own_id(number), own_id(number, partition=8)
        await engine.create_execution(**new(lane_id=lane, execution_id=known, input_payload=content(stored)))
        before = len(await rows.of("execution_input"))
        # The same UUID in another partition is another execution.
        batch = [new(lane_id=lane, input_payload=content(1_500, seed)) for seed in range(1, 4)]
        batch[0] |= {"execution_id": known}
        batch[1] |= {"execution_id": elsewhere}
        verdicts = await engine.create_many(items(*batch))
        assert [type(verdict) for verdict in verdicts] == [Duplicate, Created, Created]
        assert len(await rows.of("execution_input")) == before + 2
        inputs = {one.execution_id: one.input_payload for one in await claim(engine, lane)}
        assert inputs == {
            known: content(stored),
            elsewhere: content(1_500, 2),
            verdicts[2].execution_id: content(1_500, 3),  # type: ignore[union-attr]
        }


async def test_a_lane_that_accepts_nothing_stores_no_input(engine: Engine, rows: Rows) -> None:
    await engine.create_execution(**new())
    await engine.set_lane_state("default", "draining")
    async with rows.unchanged():
        with all_cases() as case:
            for (name, create), (way, named) in itertools.product(CREATES.items(), ways(0).items()):
                with case(f"{name} {way}"):
                    submitted = create(engine, **new(input_payload=content(1_500), **named))
                    await refused(submitted, "invalid_input", "accepts no submissions")


async def test_a_batch_that_the_store_rejects_in_part_stores_the_inputs_of_the_others(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    known = await created(engine, new())
    await connection.execute("alter table execution_input add check (input_payload <> repeat('p', 300)::bytea)")
    batch = [new(input_payload=content(1_500, seed)) for seed in range(10)]
    batch[4] = new(input_payload=b"p" * 300)
    verdicts = await engine.create_many(items(*batch))
    assert [at for at, verdict in enumerate(verdicts) if isinstance(verdict, EngineError)] == [4]
    made = {
        verdict.execution_id: batch[at]["input_payload"]
        for at, verdict in enumerate(verdicts)
        if isinstance(verdict, Created)
    }
    await check_stored(rows, known | made)


async def test_retention_deletes_the_input_with_its_execution(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    short: dict[str, Any] = {"policy": {"stream_policy": {"retention_ttl_ms": 1000}}}
    for size in (1, 1_500):
        await given.completed(input_payload=content(size), **short)
        await given.cancelled(input_payload=content(size), **short)
    kept = await given.completed(input_payload=content(1_500))
    await clock.advance(ms=1000)
    assert (await parts_of(engine).retention.trim_batch()).done == 4
    await check_stored(rows, {kept: content(1_500)})


async def test_large_inputs_do_not_reduce_the_executions_on_a_page(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    pages = []
    for size in (1, 1_500):
        before = await connection.fetchval("select pg_relation_size('execution')")
        batch = [new(input_payload=content(size, seed)) for seed in range(300)]
        assert len(await engine.create_many(items(*batch))) == 300
        pages.append(await connection.fetchval("select (pg_relation_size('execution') - $1) / 8192", before))
    small, large = pages
    assert 15 < large <= small + 2

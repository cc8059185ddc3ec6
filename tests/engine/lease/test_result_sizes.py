"""Results of every size are returned unchanged; large ones are stored outside the execution row."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import asyncpg
import msgspec

from engine.cases import in_turn
from engine.state import claim, items, new, refused
from fixtures import Clock, Engines, Given, Rows, uuid_of
from flowfabric import Fabric
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId
from flowfabric.model.lease import Completed

SIZES = (None, 0, 1, 256, 257, 1_500, 100_000)
SHORT: dict[str, Any] = {"policy": {"stream_policy": {"retention_ttl_ms": 1000}}}


def content(size: int | None, seed: int = 0) -> bytes | None:
    return None if size is None else random.Random(f"{seed} {size}").randbytes(size)


async def complete_one(engine: Engine, handle: Handle, payload: bytes | None) -> None:
    await engine.complete(handle, payload)


async def complete_in_many(engine: Engine, handle: Handle, payload: bytes | None) -> None:
    (answer,) = await engine.complete_many([(handle, payload)])
    assert isinstance(answer, Completed), answer


async def complete_for_holder(engine: Engine, handle: Handle, payload: bytes | None) -> None:
    await engine.complete_execution(
        execution_id=handle.execution_id,
        attempt_index=handle.attempt_index,
        payload=payload,
        lease_id=handle.lease_id,
        lease_epoch=handle.lease_epoch,
        attempt_id=handle.attempt_id,
    )


async def complete_by_override(engine: Engine, handle: Handle, payload: bytes | None) -> None:
    await engine.complete_execution(execution_id=handle.execution_id, payload=payload, source="operator_override")


WAYS = (complete_one, complete_in_many, complete_for_holder, complete_by_override)


async def check_results(engine: Engine, rows: Rows, expected: Mapping[ExecutionId, bytes | None]) -> None:
    """Check that every reader returns each result, and that it is stored once, in the place for its size."""
    on_row = {str(row["execution_id"]): row["result_payload"] for row in await rows.of("execution")}
    apart = {str(row["execution_id"]): row["result_payload"] for row in await rows.of("execution_result")}
    results = {uuid_of(execution_id): given for execution_id, given in expected.items()}
    assert apart == {uuid: given for uuid, given in results.items() if given is not None and len(given) > 256}
    assert {uuid: on_row[uuid] for uuid in results} == {
        uuid: None if uuid in apart else given for uuid, given in results.items()
    }
    assert {execution_id: await engine.get_execution_result(execution_id) for execution_id in expected} == expected
    endings = await asyncio.gather(*(engine.wait_for_ending(execution_id, timeout=60) for execution_id in expected))
    assert {ending.execution_id: ending.result for ending in endings} == expected
    shown = {str(row["execution_id"]): row["result_payload"] for row in await rows.of("execution_detail")}
    assert {uuid: shown[uuid] for uuid in results} == results
    assert await engine.find_inconsistencies() == []


async def leased(engine: Engine, count: int, **overrides: Any) -> list[Handle]:
    await engine.create_many(items(*(new(**overrides) for _ in range(count))))
    return [claimed.handle for claimed in await claim(engine, limit=count)]


def test_the_sizes_are_those_around_the_limit() -> None:
    assert {INLINE_PAYLOAD_BYTES, INLINE_PAYLOAD_BYTES + 1} <= set(SIZES)


async def test_a_result_is_returned_unchanged(engine: Engine, given: Given, rows: Rows) -> None:
    expected = {}
    forms: tuple[Any, ...] = (bytes, bytearray, memoryview)
    for complete in WAYS:
        for size in SIZES:
            for form in forms if size in (1, 1_500) else (bytes,):
                handle = await given.claimed()
                payload = content(size)
                await complete(engine, handle, None if payload is None else form(payload))
                expected[handle.execution_id] = payload
    await check_results(engine, rows, expected)


async def test_results_of_a_batch_belong_to_their_executions(engine: Engine, rows: Rows) -> None:
    given = [content(size, seed) for seed in range(3) for size in SIZES]
    # Some results of the batch are equal.
    given += [content(size) for size in SIZES for _ in range(2)]
    random.Random(1).shuffle(given)
    handles = await leased(engine, len(given))
    answers = await engine.complete_many(list(zip(handles, given, strict=True)))
    assert all(isinstance(answer, Completed) for answer in answers)
    await check_results(engine, rows, {one.execution_id: each for one, each in zip(handles, given, strict=True)})


async def test_completions_and_failures_share_a_batch(engine: Engine, rows: Rows) -> None:
    handles = await leased(engine, 10)
    ends = [
        engine.fail(handle, reason="no luck") if at % 2 else engine.complete(handle, content(1_500, at))
        for at, handle in enumerate(handles)
    ]
    await asyncio.gather(*ends)
    expected = {handle.execution_id: None if at % 2 else content(1_500, at) for at, handle in enumerate(handles)}
    failed = [execution_id for execution_id, result in expected.items() if result is None]
    assert {(await engine.wait_for_ending(execution_id)).result for execution_id in failed} == {None}
    await check_results(engine, rows, {key: result for key, result in expected.items() if result is not None})


async def test_waiters_get_results_of_every_size(engine: Engine, rows: Rows) -> None:
    handles = await leased(engine, len(SIZES))
    waits = [asyncio.create_task(engine.wait_for_ending(handle.execution_id, timeout=60)) for handle in handles]
    for handle, size in zip(handles, SIZES, strict=True):
        await engine.complete(handle, content(size))
    assert [(await wait).result for wait in waits] == [content(size) for size in SIZES]


async def test_a_task_returns_a_result_of_any_size(url: str, rows: Rows) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def make(size: int) -> bytes:
        return content(size) or b""

    @fabric.task
    async def repeat(size: int) -> str:
        return "x" * size

    @fabric.task
    async def nothing() -> str | None:
        return None

    async with fabric, fabric.worker():
        sizes = [size for size in SIZES if size is not None]
        made = [await make.submit(size) for size in sizes]
        repeated = [await repeat.submit(size) for size in sizes]
        assert await (await nothing.submit()).result(timeout=60) is None
        assert [await run.result(timeout=60) for run in made] == [content(size) for size in sizes]
        assert [await run.result(timeout=60) for run in repeated] == ["x" * size for size in sizes]
    # Two quotes are stored with a text.
    stored = sorted(len(row["result_payload"]) for row in await rows.of("execution_result"))
    assert stored == [257, 258, 259, 1_500, 1_502, 100_000, 100_002]


@in_turn("at", [0, 5, 9])
async def test_a_stale_fence_in_a_batch_stores_no_result(engine: Engine, rows: Rows, at: int) -> None:
    handles = await leased(engine, 10)
    batch = [(handle, content(1_500, nth)) for nth, handle in enumerate(handles)]
    batch[at] = (msgspec.structs.replace(handles[at], lease_epoch=handles[at].lease_epoch + 1), batch[at][1])
    answers = await engine.complete_many(batch)
    assert [nth for nth, answer in enumerate(answers) if isinstance(answer, EngineError)] == [at]
    assert await engine.get_execution_result(handles[at].execution_id) is None
    del batch[at]
    await check_results(engine, rows, {handle.execution_id: payload for handle, payload in batch})


async def test_a_stale_fence_stores_no_result(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed(lease_ttl_ms=1000)
    await clock.advance(ms=1000)
    await given.claim()
    await refused(complete_one(engine, handle, content(1_500)), "lease_conflict")
    await refused(complete_for_holder(engine, handle, content(1_500)), "stale_lease")
    assert await rows.of("execution_result") == []


async def test_a_repeated_completion_keeps_the_first_result(
    engine: Engine, engines: Engines, given: Given, rows: Rows, clock: Clock
) -> None:
    expected = {}
    other = await engines()
    for complete in (complete_one, complete_in_many):
        for size in (1, 1_500):
            handle = await given.claimed()
            await complete(engine, handle, content(size))
            expected[handle.execution_id] = content(size)
            # The lease would have expired by now.
            await clock.advance(seconds=60)
            async with rows.unchanged():
                for again in (engine, other):
                    await complete(again, handle, content(size))
                    await complete(again, handle, content(2_000))
                    await complete(again, handle, None)
    handles = await leased(engine, 5)
    answers = await engine.complete_many([(handle, content(1_500)) for handle in (*handles, *handles)])
    assert all(isinstance(answer, Completed) for answer in answers)
    await check_results(engine, rows, {**expected, **{handle.execution_id: content(1_500) for handle in handles}})


async def test_a_result_replaces_a_leftover_one(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    handles = [await given.claimed() for _ in WAYS]
    await connection.execute("insert into execution_result select partition_key, execution_id, '' from execution")
    for complete, handle in zip(WAYS, handles, strict=True):
        await complete(engine, handle, content(1_500))
    await check_results(engine, rows, {handle.execution_id: content(1_500) for handle in handles})


async def test_a_result_that_postgres_refuses_does_not_affect_the_rest_of_its_batch(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    await connection.execute("alter table execution_result add check (result_payload <> repeat('p', 300)::bytea)")
    handles = await leased(engine, 10)
    batch = [(handle, content(1_500, nth)) for nth, handle in enumerate(handles)]
    batch[4] = (handles[4], b"p" * 300)
    answers = await engine.complete_many(batch)
    assert [nth for nth, answer in enumerate(answers) if isinstance(answer, EngineError)] == [4]
    assert await engine.read_execution_state(handles[4].execution_id) == "active"
    del batch[4]
    await check_results(engine, rows, {handle.execution_id: payload for handle, payload in batch})


async def test_retention_deletes_the_result_with_its_execution(
    engine: Engine, given: Given, clock: Clock, rows: Rows
) -> None:
    for size in SIZES:
        await given.completed(result=content(size), **SHORT)
        await given.failed(**SHORT)
    kept = await given.completed(result=content(1_500))
    await clock.advance(ms=1000)
    assert (await parts_of(engine).retention.trim_batch()).done == 2 * len(SIZES)
    await check_results(engine, rows, {kept: content(1_500)})

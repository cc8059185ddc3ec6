"""What the engine implements, what it does not, and how it shuts down."""

import asyncio
from typing import Any

import asyncpg
import pytest

from fixtures import Eventually, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.support import FLAGS, NAMED_OPERATIONS, OPERATIONS

from .state import claim, refused


def test_every_flag_names_its_operations() -> None:
    assert len(FLAGS) == 34
    assert set(OPERATIONS) == set(FLAGS)


async def test_a_flag_is_true_if_all_its_operations_are_implemented(engine: Engine) -> None:
    found = engine.capabilities()
    assert (found.identity.family, found.identity.stage) == ("postgres", "alpha")
    assert (found.identity.version.major, found.identity.version.minor) == (0, 1)
    for flag in FLAGS:
        assert getattr(found, flag) is all(hasattr(Engine, operation) for operation in OPERATIONS[flag]), flag
    built = (
        "cancel_execution",
        "claim_for_worker",
        "prepare",
        "list_workers",
        "register_worker",
        "read_execution_info",
    )
    assert all(getattr(found, flag) for flag in built)
    assert engine.capabilities() == found


async def test_an_operation_of_the_specification_is_implemented_or_unavailable(engine: Engine) -> None:
    missing = sorted(name for name in NAMED_OPERATIONS if not hasattr(Engine, name))
    for name in missing:
        assert hasattr(engine, name)
        answer = getattr(engine, name)(1, two=3)
        await refused(answer, "unavailable", f"{name}: not implemented in flowfabric")
    found = engine.capabilities()
    for flag in FLAGS:
        assert getattr(found, flag) is not any(name in missing for name in OPERATIONS[flag]), flag


async def test_an_unknown_operation_is_no_attribute(engine: Engine) -> None:
    assert set().union(*OPERATIONS.values()) <= NAMED_OPERATIONS
    assert not hasattr(engine, "make_coffee")
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'make_coffee'"):
        engine.make_coffee()  # type: ignore[attr-defined]


async def test_a_shutdown_ends_and_refuses_waits_and_no_other_calls(
    engine: Engine, given: Given, eventually: Eventually
) -> None:
    waiting = asyncio.create_task(claim(engine, "idle", max_wait_ms=60_000))
    run = await given.run()
    ending = asyncio.create_task(engine.wait_for_ending(run.execution_id))
    await eventually(lambda: parts_of(engine).wakeups.hints.is_listening)
    await engine.shutdown_prepare(30_000)
    assert await waiting == []
    await refused(ending, "unavailable")
    await refused(claim(engine, "idle", max_wait_ms=1), "unavailable")
    await refused(engine.wait_for_ending(run.execution_id), "unavailable")
    assert await claim(engine, "idle") == []
    await engine.complete(run.handle)
    await engine.shutdown_prepare(1_000)


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_shutdown_waits_for_calls_in_progress_or_times_out(
    engine: Engine, given: Given, connection: asyncpg.Connection, eventually: Eventually
) -> None:
    run = await given.run()
    await connection.execute("begin")
    await connection.execute("select from execution for update")
    completing = asyncio.create_task(engine.complete(run.handle))
    await eventually(lambda: _is_waiting(connection))
    refusal = await refused(engine.shutdown_prepare(20), "timeout")
    assert isinstance(refusal.detail, dict)
    assert (refusal.detail["op"], refusal.detail["elapsed_ms"] >= 20) == ("shutdown_prepare", True)
    await connection.execute("rollback")
    await engine.shutdown_prepare(30_000)
    assert completing.done()
    await completing


async def _is_waiting(connection: asyncpg.Connection) -> bool:
    return bool(
        await connection.fetchval("select exists (select from pg_stat_activity where wait_event_type = 'Lock')")
    )


async def test_a_grace_must_be_a_number_of_milliseconds(engine: Engine) -> None:
    wrong: list[Any] = [-1, "5", None, 1.5]
    for grace in wrong:
        await refused(engine.shutdown_prepare(grace), "invalid_input", "grace_ms")
    assert await claim(engine, max_wait_ms=1) == []

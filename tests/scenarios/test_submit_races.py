"""Creates that meet at the end of an idempotency window, and engines that prepare a new store at the same time."""

import asyncio
from typing import Any

import asyncpg

from engine.state import all_cases, new, rounds
from fixtures import Engines
from flowfabric import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.support import Applied, NothingToPrepare


def keyed(key: str, window_ms: int, **overrides: Any) -> dict[str, Any]:
    """The arguments of a create whose idempotency key expires after window_ms."""
    return new(idempotency_key=key, policy={"dedup_window_ms": window_ms}, **overrides)


async def test_a_key_that_expires_between_two_creates_causes_neither_an_error_nor_an_unknown_id(
    engines: Engines,
) -> None:
    rivals = [await engines(), await engines()]
    with all_cases() as case:
        for window_ms in (1, 2, 5):
            for ids in ("given", "minted"):
                with case(f"{ids} ids, window of {window_ms} ms"):
                    for nth in rounds(30, whole=100):
                        await create_twice(rivals, f"{window_ms}{nth:03}", window_ms, is_given=ids == "given")


async def create_twice(rivals: list[Engine], number: str, window_ms: int, *, is_given: bool) -> None:
    """Create with one key through both engines; both answers must name executions that exist."""
    ids = [f"{{fp:86}}:{rival}1111111-2222-4333-8444-{number:>012}" if is_given else None for rival in "ab"]
    answers = await asyncio.gather(
        *(
            rival.create_execution(**keyed(f"key-{is_given}-{number}", window_ms, execution_id=own))
            for rival, own in zip(rivals, ids, strict=True)
        )
    )
    assert any(isinstance(answer, Created) for answer in answers)
    for answer in answers:
        assert isinstance(answer, Created | Duplicate)
        assert await rivals[0].read_execution_state(answer.execution_id) is not None


async def test_engines_that_prepare_a_new_store_at_once_all_succeed(
    engines: Engines, connection: asyncpg.Connection
) -> None:
    starting = [await engines() for _ in range(4)]
    for _ in rounds(30, whole=100):
        await connection.execute("delete from configuration")
        prepared = await asyncio.gather(*(engine.prepare() for engine in starting))
        assert all(isinstance(answer, NothingToPrepare | Applied) for answer in prepared)


async def test_an_item_that_repeats_an_earlier_one_is_a_duplicate_even_if_it_is_invalid(engine: Engine) -> None:
    first = NewExecution(**keyed("same", 60_000))
    second = NewExecution(**keyed("same", 60_000, tags={"Wrong": "x"}))
    third = NewExecution(**keyed("other", 60_000, tags={"Wrong": "x"}))
    made, repeated, wrong = await engine.create_many([first, second, third])
    assert isinstance(made, Created)
    assert repeated == Duplicate(execution_id=made.execution_id)
    assert isinstance(wrong, EngineError)
    assert wrong.code == "invalid_tag_key"

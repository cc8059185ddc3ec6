"""Submissions that meet at the end of an idempotency window, and processes that start on a new store at once."""

import asyncio
from typing import Any

import pytest

from flowfabric.model.execution import Created, Duplicate, NewExecution
from flowfabric.model.support import Applied, NothingToPrepare

ROUNDS = 100


def submission(key: str, window_ms: int, **more: Any) -> dict[str, Any]:
    return {
        "namespace": "default",
        "lane_id": "default",
        "execution_kind": "job",
        "input_payload": b"{}",
        "priority": 0,
        "creator_identity": "test",
        "idempotency_key": key,
        "policy": {"dedup_window_ms": window_ms},
        **more,
    }


@pytest.mark.parametrize("window_ms", [1, 2, 5])
@pytest.mark.parametrize("is_given", [True, False], ids=["given ids", "minted ids"])
async def test_a_key_that_runs_out_meanwhile_neither_refuses_nor_names_what_does_not_exist(
    engines: Any,
    window_ms: int,
    is_given: bool,  # noqa: FBT001
) -> None:
    rivals = [await engines(), await engines()]
    for number in range(ROUNDS):
        ids = [f"{{fp:86}}:{rival}1111111-2222-4333-8444-{number:012d}" for rival in "ab"]
        answers = await asyncio.gather(
            *(
                rival.create_execution(
                    **submission(f"key-{number}", window_ms, **({"execution_id": own} if is_given else {}))
                )
                for rival, own in zip(rivals, ids, strict=True)
            )
        )
        assert any(isinstance(answer, Created) for answer in answers)
        for answer in answers:
            assert isinstance(answer, Created | Duplicate)
            assert await rivals[0].read_execution_state(answer.execution_id) is not None


async def test_processes_that_start_on_a_new_store_at_once_agree(engines: Any, connection: Any) -> None:
    starting = [await engines() for _ in range(4)]
    for _ in range(ROUNDS):
        await connection.execute("delete from configuration")
        prepared = await asyncio.gather(*(engine.prepare() for engine in starting))
        assert all(isinstance(answer, NothingToPrepare | Applied) for answer in prepared)


async def test_an_item_repeats_one_before_it_whatever_else_is_wrong_with_it(engines: Any) -> None:
    engine = await engines()
    first = NewExecution(**submission("same", 60_000))
    second = NewExecution(**submission("same", 60_000, tags={"Wrong": "x"}))
    third = NewExecution(**submission("other", 60_000, tags={"Wrong": "x"}))
    made, repeated, wrong = await engine.create_many([first, second, third])
    assert isinstance(made, Created)
    assert repeated == Duplicate(execution_id=made.execution_id)
    assert wrong.code == "invalid_tag_key"

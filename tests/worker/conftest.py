"""Workers of a test, and executions for them."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from fixtures import Attempts, Eventually, Given, IsSuspended, Rows, StartWorker, Submit
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import TransportError
from flowfabric.model.ids import ExecutionId
from flowfabric.worker.worker import Worker


@pytest.fixture
async def start_worker(engine: Engine) -> AsyncIterator[StartWorker]:
    """Start a worker for handlers by kind, `await start_worker({"job": job}, concurrency=2)`; it ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(handlers: dict[str, Callable[..., Any]], **options: Any) -> Worker:
            options = {"lanes": ["default"], "namespace": "tests", **options}
            return await stack.enter_async_context(Worker(engine, handlers=handlers, **options))

        yield start


@pytest.fixture
def submit(given: Given) -> Submit:
    """Create an execution of kind `job` from arguments by name: `await submit(a=1)`."""

    async def submit(*, policy: Any = None, kind: str = "job", **arguments: Any) -> ExecutionId:
        return await given.created(execution_kind=kind, input_payload=msgspec.json.encode(arguments), policy=policy)

    return submit


@pytest.fixture
def attempts(rows: Rows) -> Attempts:
    """The attempts of an execution in their order."""

    async def attempts(execution_id: ExecutionId) -> list[dict[str, Any]]:
        found = await rows.of("attempt_all", execution_id=execution_id[-36:])
        return sorted(found, key=lambda row: int(row["attempt_index"]))

    return attempts


@pytest.fixture
def is_suspended(engine: Engine, eventually: Eventually) -> IsSuspended:
    """Wait until an execution is suspended."""

    async def is_suspended(run: ExecutionId) -> None:
        async def has_state() -> bool:
            return await engine.read_execution_state(run) == "suspended"

        await eventually(has_state)

    return is_suspended


@pytest.fixture
def lose_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The connection breaks once, after a suspend was committed and before it is answered."""
    suspend, faults = engine.suspend, iter([TransportError()])

    async def suspend_and_lose(*arguments: Any) -> Any:
        answer = await suspend(*arguments)
        if fault := next(faults, None):
            raise fault
        return answer

    monkeypatch.setattr(engine, "suspend", suspend_and_lose)
    yield
    assert next(faults, None) is None, "an answer was lost"

"""Each operation of the engine is the method of a room: the same signature, docstring and call."""

import inspect
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.operation import operation
from flowfabric.model.handle import Handle

OPERATIONS = sorted(name for name, value in vars(Engine).items() if isinstance(value, operation))


def test_every_operation_is_listed() -> None:
    assert {"create_execution", "claim_many", "complete", "suspend", "explain", "prepare"} <= set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_shows_its_signature_and_its_docstring(name: str) -> None:
    method = getattr(Engine, name)
    assert inspect.iscoroutinefunction(method)
    assert method.__name__ == name
    assert method.__doc__
    assert all(parameter.annotation is not parameter.empty for parameter in [*parameters(method)][1:])


def parameters(method: Any) -> Any:
    """The parameters a caller sees."""
    return inspect.signature(method).parameters.values()


async def test_an_engine_gives_the_method_of_its_own_room(engine: Engine) -> None:
    assert inspect.signature(engine.complete) == inspect.signature(Finish(None, None).complete)  # type: ignore[arg-type]
    assert engine.complete.__self__ is engine._rooms[Finish]  # type: ignore[attr-defined]
    assert engine.complete.__doc__ == Finish.complete.__doc__


async def test_a_subclass_may_wrap_an_operation(url: str, given: Any) -> None:
    completed: list[Handle] = []

    class Noting(Engine):
        async def complete(self, handle: Handle, payload: bytes | None = None) -> None:
            completed.append(handle)
            await super().complete(handle, payload)

    handle = await given.claimed()
    async with Noting.connect(url) as noting:
        await noting.complete(handle, b"1")
        assert completed == [handle]
        assert await Engine.get_execution_result(noting, handle.execution_id) == b"1"

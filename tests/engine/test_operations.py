"""Each operation of the engine is a method of a service, with its signature and docstring."""

import inspect

from fixtures import Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.operation import operation
from flowfabric.model.handle import Handle

OPERATIONS = sorted(name for name, value in vars(Engine).items() if isinstance(value, operation))


def test_every_operation_is_listed() -> None:
    assert {"create_execution", "claim_many", "complete", "suspend", "explain", "prepare"} <= set(OPERATIONS)


def test_an_operation_has_the_signature_and_docstring_of_its_method() -> None:
    for name in OPERATIONS:
        method = getattr(Engine, name)
        assert inspect.iscoroutinefunction(method) is not name.startswith("subscribe_"), name
        assert method.__name__ == name
        assert method.__doc__, name
        parameters = [*inspect.signature(method).parameters.values()][1:]
        assert all(parameter.annotation is not parameter.empty for parameter in parameters), name


async def test_an_operation_of_an_engine_is_the_bound_method_of_its_service(engine: Engine) -> None:
    assert inspect.signature(engine.complete) == inspect.signature(Finish(None, None).complete)  # type: ignore[arg-type]
    assert engine.complete.__self__ is engine._services[Finish]  # type: ignore[attr-defined]
    assert engine.complete.__doc__ == Finish.complete.__doc__


async def test_a_subclass_may_override_an_operation(url: str, given: Given) -> None:
    completed: list[Handle] = []

    class Recording(Engine):
        async def complete(self, handle: Handle, payload: bytes | None = None) -> None:
            completed.append(handle)
            await super().complete(handle, payload)

    handle = await given.claimed()
    async with Recording.connect(url) as recording:
        await recording.complete(handle, b"1")
        assert completed == [handle]
        assert await Engine.get_execution_result(recording, handle.execution_id) == b"1"

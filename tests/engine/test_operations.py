"""Each operation of the engine is a method of a service, with its signature and docstring."""

import asyncio
import functools
import inspect
from collections.abc import Callable

import pytest

from fixtures import Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.lease.finish import Finish
from flowfabric.engine.operation import operation
from flowfabric.model.errors import TransportError
from flowfabric.model.handle import Handle
from flowfabric.model.stream import Frame

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


@pytest.mark.parametrize("name", ["resume_execution", "cancel_execution"])
def test_the_execution_of_an_operation_may_be_given_by_position_or_by_name(name: str) -> None:
    operation = getattr(Engine, name)
    arguments = {"reason": "x"} if name == "cancel_execution" else {}
    by_position = inspect.signature(operation).bind(None, "id", **arguments)
    assert by_position == inspect.signature(operation).bind(None, execution_id="id", **arguments)


async def test_errors_of_python_name_an_operation_as_it_is_called(engine: Engine) -> None:
    for name in OPERATIONS:
        # Bound and unbound.
        for call in (getattr(engine, name), functools.partial(getattr(Engine, name), engine)):
            with pytest.raises(TypeError, match=rf"^Engine\.{name}\(\) takes "):
                await call(*range(99))


async def test_an_operation_of_an_engine_is_the_bound_method_of_its_service(engine: Engine) -> None:
    assert inspect.signature(engine.complete) == inspect.signature(Finish(None, None).complete)  # type: ignore[arg-type]
    assert engine.complete.__self__ is engine._services[Finish]  # type: ignore[attr-defined]
    assert engine.complete.__doc__ == Finish.complete.__doc__


async def test_an_operation_refuses_to_run_in_another_event_loop_and_changes_nothing(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    frame = Frame(bytes=b"a")
    kept = engine.complete

    async def in_that_loop() -> None:
        await engine.append_frame(handle, frame)

    def subscribe() -> None:
        async def begin() -> None:
            engine.subscribe_completion()

        asyncio.run(begin())

    refused: list[str] = []

    def call_each() -> None:
        calls: list[Callable[[], object]] = [
            lambda: asyncio.run(engine.append_frame(handle, frame)),
            lambda: asyncio.run(in_that_loop()),
            lambda: asyncio.run(engine.complete(handle, b"1")),
            lambda: asyncio.run(kept(handle, b"1")),
            lambda: asyncio.run(engine.read_execution_state(handle.execution_id)),
            lambda: asyncio.run(engine.wait_for_ending(handle.execution_id)),
            lambda: asyncio.run(engine.tail_stream(handle.execution_id, 0, block_ms=30_000)),
            subscribe,
        ]
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                refused.append(str(error))

    async with rows.unchanged():
        await asyncio.to_thread(call_each)
    assert refused == [
        "the engine is connected in another event loop; connect an Engine in each event loop, or run the call there: "
        "`asyncio.run_coroutine_threadsafe(call, loop)`, in a `def` task `ctx.from_thread(call)`"
    ] * len(refused)
    assert len(refused) == 8
    # What a thread without an event loop gets may run in the loop of the engine.
    assert (await (await asyncio.to_thread(lambda: engine.append_frame(handle, frame)))).frame_count == 1
    await kept(handle, b"1")


async def test_an_engine_is_closed_in_the_event_loop_in_which_it_was_connected(url: str) -> None:
    connection = Engine.connect(url)
    engine = await connection.__aenter__()
    with pytest.raises(RuntimeError, match="the engine is connected in another event loop; connect an Engine in each"):
        await asyncio.to_thread(asyncio.run, connection.__aexit__(None, None, None))
    await engine.ping()
    await connection.__aexit__(None, None, None)
    with pytest.raises(TransportError, match="the connections to the store are closed"):
        await engine.ping()


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

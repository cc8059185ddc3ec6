"""Fabrics, and the tasks that are declared on them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from flowfabric import Context, Fabric, Settings
from flowfabric.errors import SettingsError
from flowfabric.model.errors import InvalidInputError


@dataclass
class Point:
    x: int
    y: int


async def test_a_task_can_be_called_as_the_plain_function() -> None:
    fabric = Fabric()

    @fabric.task(retries=3)
    async def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @fabric.task
    def subtract(a: int, b: int) -> int:
        return a - b

    assert await add(1, 2) == 3
    assert subtract(3, b=2) == 1
    assert (add.__name__, add.__doc__, repr(add)) == ("add", "Add.", "Task(add)")


async def test_arguments_and_results_have_the_annotated_types(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    def mirror(point: Point) -> Point:
        return Point(point.y, point.x)

    @fabric.task
    async def raw(ctx: Context) -> bytes:
        return ctx.execution_id.encode()

    async with fabric, fabric.worker():
        assert await (await mirror.submit(Point(1, 2))).result(timeout=60) == Point(2, 1)
        run = await raw.submit()
        assert await run.result(timeout=60) == run.id.encode()
        assert await raw.run(run.id).result(timeout=60) == run.id.encode()


async def test_the_names_of_tasks_are_unique() -> None:
    fabric = Fabric()

    @fabric.task
    async def job() -> None: ...

    place = rf"a task named 'job' already exists, declared in {__name__}, line \d+; "
    with pytest.raises(ValueError, match=place):

        @fabric.task(name="job")
        async def another() -> None: ...

    with pytest.raises(TypeError, match="'job' is already a task"):
        fabric.task(job)
    assert list(fabric.tasks) == ["job"]


class Mailer:
    def send(self, to: str) -> None: ...

    @classmethod
    def flush(cls) -> None: ...

    def close(self) -> None: ...


def two_contexts(first: Context, second: Context) -> None: ...


def optional_context(ctx: Context | None) -> None: ...


def with_function(function: Callable[[int], int]) -> None: ...


@dataclass
class Hook:
    function: Callable[[int], int]


def with_hook(hooks: list[Hook]) -> None: ...


UNDECLARABLE: list[tuple[Any, type[Exception], str]] = [
    (Mailer, TypeError, "'Mailer' is a class, and tasks are functions"),
    (Mailer.send, TypeError, r"'Mailer\.send' is a method, and tasks are functions: .*; move it out of the class"),
    (Mailer.__dict__["flush"], TypeError, r"'Mailer\.flush' is a method, and tasks are functions"),
    (two_contexts, InvalidInputError, "parameter 'second': annotate one parameter exactly `Context`; 'first' is one"),
    (optional_context, InvalidInputError, "parameter 'ctx': annotate one parameter exactly `Context`; this one is "),
    (with_function, InvalidInputError, "parameter 'function': a Callable cannot be stored as JSON"),
    (with_hook, InvalidInputError, "parameter 'hooks': a Callable cannot be stored as JSON"),
]


@pytest.mark.parametrize(("function", "refusal", "text"), UNDECLARABLE)
def test_what_cannot_be_a_task_is_refused_by_the_decorator(function: Any, refusal: type[Exception], text: str) -> None:
    fabric = Fabric()
    with pytest.raises(refusal, match=text):
        fabric.task(function)
    assert fabric.tasks == {}


def test_the_name_of_a_task_is_not_empty() -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: name: must not be empty"):
        Fabric().task(name="")(print)


def test_a_bound_method_can_be_a_task() -> None:
    assert Fabric().task(Mailer().close).name == "close"


async def test_fabrics_are_independent_and_can_be_connected_again(url: str, empty_url: str) -> None:
    fabric = Fabric(url)
    for _ in range(2):
        async with fabric:
            await fabric.engine.ping()
            with pytest.raises(RuntimeError, match="already connected"):
                await fabric.__aenter__()
    with pytest.raises(RuntimeError, match="not connected"):
        _ = fabric.engine
    async with fabric, Fabric(settings=Settings(database_url=empty_url, migrate_on_start=True)) as other:
        assert fabric.engine is not other.engine
        assert fabric.tasks is not other.tasks


async def test_a_fabric_is_used_in_the_event_loop_in_which_it_was_connected(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    refused: list[str] = []

    def submit_elsewhere() -> None:
        try:
            asyncio.run(job.submit())
        except RuntimeError as error:
            refused.append(str(error))

    async with fabric:
        await asyncio.to_thread(submit_elsewhere)
        (text,) = refused
        assert text.startswith("the fabric is connected in another event loop; connect a Fabric in each event loop")
        # A thread without an event loop may hold the engine, to call it where it is connected.
        assert await asyncio.to_thread(lambda: fabric.engine) is fabric.engine
        await job.submit()


async def test_a_fabric_is_closed_in_the_event_loop_in_which_it_was_connected(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    def close() -> str:
        try:
            asyncio.run(fabric.__aexit__(None, None, None))
        except RuntimeError as error:
            return str(error)
        return ""

    for _ in range(2):
        async with fabric, fabric.worker():
            text = await (await close.submit()).result(timeout=60)
            assert text.startswith("the fabric is connected in another event loop; connect a Fabric in each event")
            await fabric.engine.ping()
        # A closed fabric belongs to no event loop.
        await asyncio.to_thread(asyncio.run, fabric.__aexit__(None, None, None))


def test_a_url_that_is_not_text_is_refused_at_once() -> None:
    urls: dict[str, Any] = {
        "5": 5,
        "a bytes": b"postgresql://user:pa55word@host/db",
        "a Settings; write Fabric(settings=...)": Settings(database_url="postgresql://user:pa55word@host/db"),
    }
    for got, given in urls.items():
        with pytest.raises(InvalidInputError) as refused:
            Fabric(given)
        assert refused.value.detail == f"url: must be text, as in postgresql://host/database, got {got}"


async def test_a_fabric_with_wrong_options_is_refused(url: str) -> None:
    wrong: list[dict[str, Any]] = [{"settings": "x"}, {"settings": {}}, {"lane": ["a"]}, {"namespace": None}]
    for options in wrong:
        with pytest.raises(InvalidInputError, match=f"invalid_input: {next(iter(options))}"):
            Fabric(url, **options)
    with pytest.raises(SettingsError, match="FF_DATABASE_URL: "):
        async with Fabric("shop"):
            pass
    with pytest.raises(TypeError, match=r"expected a function, got 'name'; name the options, such as @fabric\.task\("):
        Fabric().task("name")  # type: ignore[call-overload]

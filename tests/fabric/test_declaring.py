"""Fabrics, and the tasks that are declared on them."""

from dataclasses import dataclass
from typing import Any

import pytest

from flowfabric import Context, Fabric, Settings
from flowfabric.model.errors import InvalidInputError
from flowfabric.settings import SettingsError


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

    with pytest.raises(ValueError, match="a task named 'job' already exists"):

        @fabric.task(name="job")
        async def another() -> None: ...


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


async def test_a_fabric_with_wrong_options_is_refused(url: str) -> None:
    wrong: list[dict[str, Any]] = [{"settings": "x"}, {"settings": {}}, {"lane": ["a"]}, {"namespace": None}]
    for options in wrong:
        with pytest.raises(InvalidInputError, match=f"invalid_input: {next(iter(options))}"):
            Fabric(url, **options)
    with pytest.raises(SettingsError, match="FF_DATABASE_URL: "):
        async with Fabric(5):  # type: ignore[arg-type]
            pass
    with pytest.raises(TypeError, match=r"expected a function, got 'name'; name the options, such as @fabric\.task\("):
        Fabric().task("name")  # type: ignore[call-overload]

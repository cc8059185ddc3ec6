"""Arguments and results keep their values and types, from the submission through a worker to the result."""

from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest

from annotations import (
    Aliased,
    Base64,
    Blob,
    Box,
    Cat,
    Checked,
    CheckedBlob,
    Color,
    Computed,
    Dog,
    Holder,
    Level,
    Login,
    Mode,
    Opaque,
    Open,
    Order,
    Pair,
    Point,
    Row,
    Silent,
    Stamped,
    StampedRow,
    Strict,
    Struct,
    Tree,
    Twin,
)
from fixtures import Rows
from flowfabric import Fabric, RunFailed, UnreadableResult
from flowfabric.model.errors import InvalidInputError

NAN, INFINITY = float("nan"), float("inf")
CYCLE: list[Any] = []
CYCLE.append(CYCLE)

CARRIED: list[tuple[Any, Any]] = [
    (int, 2**70),
    (str, "\0 é \N{SNOWMAN}"),
    (bool, True),
    (float, 0.1),
    (None, None),
    (bytes, b"\x00\xff"),
    (bytes | None, b"\xff"),
    (list[bytes], [b"\xff", b""]),
    (dict[str, bytes], {"a": b"\xff"}),
    (Any, {"a": [1, 2.5, None, "x", True]}),
    (object, [1, "x"]),
    (int | None, None),
    (int | str, "1"),
    (Literal["a", "b"], "b"),
    (tuple[int, str], (1, "x")),
    (tuple[int, ...], (1, 2, 3)),
    (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})),
    (dict[int, str], {1: "a"}),
    (dict[UUID, date], {UUID(int=1): date(2026, 1, 2)}),
    (datetime, datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    (time, time(1, 2, 3)),
    (timedelta, timedelta(days=1, microseconds=1)),
    (Decimal, Decimal("1.10")),
    (Path, Path("/tmp/x")),
    (Color, Color.RED),
    (Level, Level.HIGH),
    (Mode, Mode.SLOW),
    (Point, Point(1, 2.5)),
    (Struct, Struct("Ada", datetime(2026, 1, 2))),
    (Row, {"key": "a", "value": 1}),
    (Pair, Pair(1, "a")),
    (Aliased, Aliased.model_validate({"userId": 7, "remark": "x"})),
    (Computed, Computed(width=3)),
    (Open, Open.model_validate({"b": 2, "more": [1]})),
    (Strict, Strict(when=datetime(2026, 1, 2), number=Decimal("1.5"), pair=(1, 2))),
    (Base64, Base64(data=b"\xff")),
    (Cat | Dog, Dog(tricks=["sit"])),
    (list[Cat | int | None], [Cat(lives=1), 2, None]),
    (dict[str, bytes | Cat], {"a": b"\xff", "b": Cat()}),
    (Box[Cat], Box[Cat](item=Cat())),
    (Tree, Tree(name="a", children=[Tree(name="b")])),
    (Checked, Checked(1, name="x")),
    (Order, Order(1, Dog())),
    (Stamped, Stamped((b"\xff", Cat()))),
    (Stamped, Stamped((b"text", Cat()))),
    (list[Stamped], [Stamped((b"\xff", Cat()))]),
    (StampedRow, {"data": b"\xff", "animal": Cat()}),
    (Holder, Holder(Cat(), ["a"])),
    (dict[str, list[tuple[Point, Cat | None]]], {"a": [(Point(1), None), (Point(2), Cat())]}),
]

REFUSED_VALUES: list[tuple[Any, Any, str]] = [
    (int, "x", "expected int, got 'x' (str)"),
    (int, True, "expected int, got True (bool)"),
    (float, NAN, "nan (float) cannot be stored as JSON: JSON has neither NaN nor infinity"),
    (list[float], [1.0, -INFINITY], "[1.0, -inf] (list) cannot be stored as JSON: JSON has neither NaN nor infinity"),
    (float | None, NAN, "JSON has neither NaN nor infinity; pass None or a string instead"),
    (Decimal, Decimal("NaN"), "NaN is not equal to itself; pass None instead"),
    (Any, b"\xff", r"b'\xff' (bytes) cannot be stored as JSON: annotate it as bytes"),
    (Any, [{"a": b"x"}], "annotate it as bytes"),
    (Any, (1, 2), "(1, 2) (tuple) would come back as [1, 2] (list); annotate it with its type"),
    (Any, {1: 2}, "{1: 2} (dict) would come back as {'1': 2} (dict)"),
    (Any, Point(1), "annotate it with its type"),
    (Any, Cat(), "annotate it with its type"),
    (list[int], (1, 2), "pass a list or annotate it as tuple"),
    (list[Point], [{"x": 1, "y": 2.0}], "pass Point objects in it or annotate its contents as dict"),
    (dict[str, list[Point]], {"a": [Point(1), {"x": 1}]}, "pass Point objects in it or annotate its contents as dict"),
    (Cat, {"lives": 1}, "expected Cat, got {'lives': 1} (dict)"),
    (dict[str, int], {"a": "b"}, "expected dict[str, int], got {'a': 'b'} (dict): Expected `int`, got `str`"),
    (str, "\ud800", "surrogates not allowed"),
    (Any, CYCLE, "expected Any, got [[...]] (list)"),
    (object, CYCLE, "expected object, got [[...]] (list)"),
    (Blob, Blob(data=b"\xff"), "set model_config = ConfigDict(ser_json_bytes='base64', val_json_bytes='base64')"),
    (CheckedBlob, CheckedBlob(b"\xff"), "(in a dataclass: __pydantic_config__)"),
    (Cat | Twin, Twin(), "which would come back as Cat(kind='cat', lives=9) (Cat); pass a Cat"),
    (Silent, Silent(1), "give Silent an __eq__ that compares its values"),
    (dict[tuple[int, int], int], {(1, 2): 3}, "the keys of a dict must be strings, numbers or dates"),
]

REFUSED_TYPES: list[tuple[Any, str]] = [
    (Login, "a SecretStr is a secret, and a secret is never stored; pass the name it can be looked up by"),
    (Opaque, "Opaque cannot be stored as JSON"),
    (Struct | Cat, "Struct | annotations.Cat cannot be stored as JSON"),
    (list[Opaque], "use JSON's own types, a dataclass, a msgspec Struct or a Pydantic model"),
]


def named(function: Any, kinds: dict[str, Any]) -> Callable[..., Any]:
    """A function with these annotations."""
    function.__annotations__ = kinds
    return function  # type: ignore[no-any-return]


async def test_an_argument_and_a_result_decode_to_equal_values(url: str) -> None:
    fabric = Fabric(url)
    arrived: dict[str, Any] = {}

    def declared(name: str, kind: Any) -> Any:
        async def echo(value: Any) -> Any:
            arrived[name] = value
            return value

        return fabric.task(name=name)(named(echo, {"value": kind, "return": kind}))

    tasks = [declared(f"{at} {kind}", kind) for at, (kind, _) in enumerate(CARRIED)]
    async with fabric, fabric.worker():
        runs = [await task.submit(value) for task, (_, value) in zip(tasks, CARRIED, strict=True)]
        for run, task, (_, value) in zip(runs, tasks, CARRIED, strict=True):
            assert (task.name, await run.result(timeout=60)) == (task.name, value)
            assert (task.name, arrived[task.name]) == (task.name, value)


async def test_an_argument_that_would_not_decode_to_an_equal_value_is_refused_at_submit(url: str, rows: Rows) -> None:
    fabric = Fabric(url)

    def declared(at: int, kind: Any) -> Any:
        async def job(number: int, value: Any) -> None: ...

        return fabric.task(name=f"job {at}")(named(job, {"number": int, "value": kind, "return": None}))

    wrong = []
    async with fabric:
        for at, (kind, value, text) in enumerate(REFUSED_VALUES):
            task = declared(at, kind)
            with pytest.raises(InvalidInputError) as refused:
                await task.submit(1, value)
            with pytest.raises(InvalidInputError):
                await task.submit(1, value=value)
            shown = str(refused.value)
            if not shown.startswith(f"invalid_input: task 'job {at}', parameter 'value': ") or text not in shown:
                wrong.append((kind, value, shown))
        assert await rows.of("execution") == []
    assert wrong == []


async def test_a_result_that_would_not_decode_to_an_equal_value_fails_the_run_for_good(url: str) -> None:
    fabric = Fabric(url)

    def declared(at: int, kind: Any, value: Any) -> Any:
        async def later() -> Any:
            return value

        def now() -> Any:
            return value

        return fabric.task(name=f"job {at}", retries=3)(named((later, now)[at % 2], {"return": kind}))

    tasks = [declared(at, kind, value) for at, (kind, value, _) in enumerate(REFUSED_VALUES)]
    async with fabric, fabric.worker():
        runs = [await task.submit() for task in tasks]
        for at, (run, (_, _, text)) in enumerate(zip(runs, REFUSED_VALUES, strict=True)):
            with pytest.raises(RunFailed) as failed:
                await run.result(timeout=60)
            assert str(failed.value.reason).startswith(f"task 'job {at}', result: ")
            assert text.replace("pass ", "return ") in str(failed.value.reason)
            assert (await run.status()).attempt == 1


async def test_a_result_may_be_none_only_if_its_type_allows_it(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def forgets() -> int:
        return None  # type: ignore[return-value]

    @fabric.task
    async def returns() -> None:
        return 5  # type: ignore[return-value]

    @fabric.task
    async def maybe(a: int | None) -> int | None:
        return a

    @fabric.task
    def untyped(a, b=None):  # type: ignore[no-untyped-def]
        return [a, b]

    async with fabric, fabric.worker():
        with pytest.raises(RunFailed, match="task 'forgets', result: expected int, got None"):
            await (await forgets.submit()).result(timeout=60)
        with pytest.raises(RunFailed, match=r"task 'returns', result: expected None, got 5 \(int\)"):
            await (await returns.submit()).result(timeout=60)
        assert [await (await maybe.submit(a)).result(timeout=60) for a in (None, 1)] == [None, 1]
        assert await (await untyped.submit({"a": 1})).result(timeout=60) == [{"a": 1}, None]


def test_a_type_that_cannot_be_stored_is_refused_at_the_decorator() -> None:
    fabric = Fabric()

    async def job(a: Any = None) -> Any: ...

    for kind, text in REFUSED_TYPES:
        for place, kinds in (("parameter 'a'", {"a": kind}), ("result", {"return": kind})):
            with pytest.raises(InvalidInputError) as refused:
                fabric.task(name="mine")(named(job, kinds))
            assert str(refused.value).startswith(f"invalid_input: task 'mine', {place}: ")
            assert text in str(refused.value)
    assert fabric.tasks == {}


async def test_a_result_of_another_version_is_unreadable(url: str) -> None:
    """The code that reads the result has another return type than the code that wrote it."""
    old, new = Fabric(url), Fabric(url)
    versions: dict[str, tuple[Any, Any, Any]] = {
        "number": (str, "one", int),
        "model": (str, "one", Cat),
        "nothing": (None, None, int),
        "octets": (bytes, b"\xff", str),
    }

    def declared(fabric: Fabric, name: str, kind: Any, value: object) -> Any:
        async def job() -> Any:
            return value

        return fabric.task(name=name)(named(job, {"return": kind}))

    writers = {name: declared(old, name, written, value) for name, (written, value, _) in versions.items()}
    readers = {name: declared(new, name, read, None) for name, (_, _, read) in versions.items()}
    async with old, new, old.worker():
        for name, (_, value, _) in versions.items():
            run = await writers[name].submit()
            assert await run.result(timeout=60) == value
            with pytest.raises(UnreadableResult) as unreadable:
                await readers[name].run(run.id).result(timeout=60)
            assert unreadable.value.execution_id == run.id
            assert unreadable.value.code == "corruption"
            assert str(unreadable.value).startswith(
                f"corruption: {run.id}: task '{name}': the stored result cannot be read as "
            )


async def test_an_annotation_may_be_defined_after_the_task(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(order: "DefinedLater") -> "DefinedLater":  # type: ignore[name-defined]  # noqa: F821
        return order

    async with fabric:
        with pytest.raises(
            InvalidInputError, match=r"task 'job': an annotation cannot be resolved \(name 'DefinedLater'"
        ):
            await job.submit(Point(1))
        with pytest.raises(InvalidInputError, match="define or import the name at module level"):
            await fabric.worker().__aenter__()
        globals()["DefinedLater"] = Point
        try:
            async with fabric.worker():
                assert await (await job.submit(Point(1))).result(timeout=60) == Point(1)
        finally:
            del globals()["DefinedLater"]


async def test_equal_calls_have_the_same_payload_however_they_are_written(url: str, rows: Rows) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(a: int, b: dict[str, int], *, c: str = "") -> None: ...

    async with fabric:
        await job.submit(1, {"x": 1}, c="d")
        await job.submit(c="d", b=OrderedDict(x=1), a=1)
        await job.submit(1, b={"x": 1}, c="d")
        stored = [row["input_payload"] for row in await rows.of("execution")]
    assert len(stored) == 3
    assert len(set(stored)) == 1

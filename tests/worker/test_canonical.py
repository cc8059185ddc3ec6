"""The canonical payload of a call with an idempotency key: equal arguments have equal bytes."""

import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pydantic

from flowfabric.worker.handler import Handler


class Colour(Enum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class Empty(pydantic.BaseModel):
    pass


@dataclass
class Stamped:
    data: bytes
    names: set[str]
    model: Empty


@dataclass(frozen=True)
class Point:
    name: str
    marks: frozenset[str]


class Struct(msgspec.Struct, rename="camel", tag=True):
    all_names: set[str]


class Row(msgspec.Struct, array_like=True, tag=True):
    number: int
    names: set[str]


class Model(pydantic.BaseModel):
    names: set[str]
    points: dict[str, frozenset[str]]


class Names(pydantic.RootModel[set[str]]):
    pass


CONTEXT: Any = object()
NAMES = ["one", "two", "three", "four", "five", "six"]
GROUPS = [frozenset(NAMES[:3]), frozenset(NAMES[3:]), frozenset(NAMES[1:5])]

VALUES: list[tuple[Any, Any]] = [
    (set[str], set(NAMES)),
    (frozenset[Colour], frozenset(Colour)),
    (set[tuple[str, int]], {(name, 1) for name in NAMES}),
    (set[frozenset[str]], set(GROUPS)),
    (set[Point], {Point(name, GROUPS[0]) for name in NAMES}),
    (set[int | str], {1, "a", 2, "b"}),
    (list[dict[str, set[str]]], [{"a": set(NAMES)}]),
    (dict[int, set[str]], {1: set(NAMES), 10: set(), 2: set(NAMES)}),
    (Struct, Struct(set(NAMES))),
    (Row, Row(1, set(NAMES))),
    (Model, Model(names=set(NAMES), points={"x": GROUPS[0]})),
    (Names, Names(set(NAMES))),
    (list[Model], [Model(names=set(NAMES), points={})]),
    (Model | None, Model(names=set(NAMES), points={})),
    (Stamped, Stamped(b"text", set(NAMES), Empty())),
    (Stamped, Stamped(b"\xff", set(NAMES), Empty())),
]


def handler_of(kind: Any) -> Handler:
    def job(value: Any, *rest: Any) -> None: ...

    job.__annotations__ = {"value": kind, "rest": kind, "return": None}
    return Handler(job)


def payload_of(kind: Any, value: Any) -> bytes:
    return handler_of(kind).encode((value, value), {}, is_canonical=True)


def print_payloads() -> None:
    for kind, value in VALUES:
        print(payload_of(kind, value).decode())


def test_the_payload_does_not_depend_on_the_process() -> None:
    # Another hash seed changes the order of the members of sets.
    printed = subprocess.run(
        [sys.executable, "-c", "import test_canonical; test_canonical.print_payloads()"],
        env={
            **os.environ,
            "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    here = [payload_of(kind, value).decode() for kind, value in VALUES]
    assert [pair for pair in zip(printed, here, strict=True) if pair[0] != pair[1]] == []


def test_the_arguments_decode_to_equal_ones() -> None:
    wrong = []
    for kind, value in VALUES:
        args, _ = handler_of(kind).bind(payload_of(kind, value), CONTEXT)
        # The types are compared because a set equals a frozenset of the same elements.
        if (tuple(args), [type(arg) for arg in args]) != ((value, value), [type(value)] * 2):
            wrong.append((kind, args))
    assert wrong == []


def test_dicts_are_sorted_unless_their_type_is_ordered() -> None:
    assert payload_of(dict[str, int], {"y": 1, "x": 2}) == payload_of(dict[str, int], {"x": 2, "y": 1})
    assert payload_of(Any, {"y": {"b": 1, "a": 1}}) == payload_of(Any, {"y": {"a": 1, "b": 1}})
    ordered = OrderedDict[str, int]
    assert payload_of(ordered, ordered(y=1, x=2)) != payload_of(ordered, ordered(x=2, y=1))


def test_defaults_are_written_out_if_they_can_be_stored() -> None:
    missing = object()

    def job(a: int, b: float = 1, *rest: int, c: Any = missing, d: set[str] | None = None, **more: int) -> None: ...

    handler = Handler(job)
    payload = handler.encode((1,), {}, is_canonical=True)
    assert payload == b'{"a":1,"b":1.0,"d":null}'
    assert handler.encode((1, 1.0), {"d": None}, is_canonical=True) == payload
    assert handler.encode((1,), {"c": 5}, is_canonical=True) != payload
    assert handler.encode((1,), {}) == b'{"a":1}'

    def by_position(a: Any = missing, b: int = 1, /, c: int = 2) -> None: ...

    handler = Handler(by_position)
    payload = handler.encode((), {}, is_canonical=True)
    assert payload == b'{"c":2}'
    assert handler.bind(payload, CONTEXT) == ((), {"c": 2})

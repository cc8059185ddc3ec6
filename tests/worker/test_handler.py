"""How arguments and results are encoded in payloads and decoded."""

from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NoReturn, Unpack

import pydantic
import pytest

from annotations import Aliased, Cat, Dog, Row
from flowfabric.model.errors import InvalidInputError
from flowfabric.worker.context import Context
from flowfabric.worker.handler import Handler

CONTEXT: Any = object()


@dataclass
class Point:
    x: int
    y: int = 0


class Order(pydantic.BaseModel):
    number: int
    placed: datetime


def through(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with arguments that were encoded and decoded, and do the same with its result."""
    handler = Handler(function)
    bound_args, bound_kwargs = handler.bind(handler.encode(args, kwargs), CONTEXT)
    result = function(*bound_args, **bound_kwargs)
    return handler.decode_result(handler.encode_result(result))


def test_a_payload_holds_arguments_by_name() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    assert Handler(add).encode((1,), {"b": 2}) == b'{"a":1,"b":2}'
    assert through(add, 1, 2) == 3


def test_a_default_is_not_part_of_the_payload() -> None:
    def greet(name: str, greeting: str = "hello", *, mark: str = "!") -> str:
        return f"{greeting} {name}{mark}"

    assert Handler(greet).encode(("world",), {}) == b'{"name":"world"}'
    assert through(greet, "world") == "hello world!"
    assert through(greet, "world", mark="?") == "hello world?"


def test_every_kind_of_parameter_can_be_passed() -> None:
    def every(a: int, /, b: int, *rest: int, c: int, **more: int) -> list[Any]:
        return [a, b, list(rest), c, more]

    assert through(every, 1, 2, 3, 4, c=5, d=6) == [1, 2, [3, 4], 5, {"d": 6}]
    assert through(every, 1, b=2, c=5) == [1, 2, [], 5, {}]


def test_arguments_and_results_have_the_annotated_types() -> None:
    def move(point: Point, orders: list[Order], when: datetime) -> tuple[Point, Order]:
        assert type(when) is datetime
        return Point(point.x + 1, len(orders)), orders[0]

    order = Order(number=7, placed=datetime(2026, 1, 2))
    assert through(move, Point(1), [order], datetime(2026, 1, 1)) == (Point(2, 1), order)


def test_a_context_is_passed_to_the_function_and_is_not_part_of_the_payload() -> None:
    def first(ctx: Context, a: int) -> Any:
        return [ctx is CONTEXT, a]

    def last(a: int = 1, *, ctx: Context) -> Any:
        return [ctx is CONTEXT, a]

    def alone(context: "Context") -> Any:
        return context is CONTEXT

    def by_position(ctx: Context, /, a: int = 1) -> Any:
        return [ctx is CONTEXT, a]

    assert through(by_position, a=2) == [True, 2]
    assert Handler(first).encode((5,), {}) == b'{"a":5}'
    assert through(first, 5) == [True, 5]
    assert through(last) == [True, 1]
    assert through(alone) is True


def test_a_function_without_parameters_takes_any_payload() -> None:
    assert Handler(lambda: None).bind(b"\xff not JSON", CONTEXT) == ((), {})


def test_models_can_be_passed_in_every_kind_of_parameter() -> None:
    def every(a: Cat | Dog, /, *rest: Cat | int, c: Cat | None = None, **more: Cat | Dog) -> list[Any]:
        return [a == Dog(), rest == (Cat(), 1), c == Cat(lives=1), more == {"d": Cat()}]

    assert through(every, Dog(), Cat(), 1, c=Cat(lives=1), d=Cat()) == [True, True, True, True]
    assert through(every, Dog()) == [True, False, False, False]


def test_keyword_arguments_can_be_typed_by_a_typed_dict() -> None:
    def named(**row: Unpack[Row]) -> Row:
        return row

    assert through(named, key="a", value=1) == {"key": "a", "value": 1}
    with pytest.raises(InvalidInputError, match="task 'named', parameter 'row': "):
        Handler(named).encode((), {"key": "a", "value": "b"})


def test_the_result_of_a_coroutine_is_what_it_returns() -> None:
    def later() -> Coroutine[Any, Any, Point]:
        raise NotImplementedError

    async def never() -> NoReturn:
        raise NotImplementedError

    handler = Handler(later)
    assert handler.decode_result(handler.encode_result(Point(1))) == Point(1)
    assert Handler(never).encode_result(None) is None
    with pytest.raises(InvalidInputError, match="task 'never', result: "):
        Handler(never).encode_result(1)


def test_bytes_are_stored_as_they_are() -> None:
    def raw() -> bytes:
        return b"\x00\xff"

    def untyped():  # type: ignore[no-untyped-def]
        return b"\x00\xff"

    assert Handler(untyped).encode_result(b"\x00\xff") == b"\x00\xff"
    with pytest.raises(InvalidInputError, match=r"task 'mine', result: .* annotate it as bytes"):
        Handler(untyped, task="mine").encode_result(b"\x00\xff")
    assert Handler(raw).encode_result(raw()) == b"\x00\xff"
    assert through(raw) == b"\x00\xff"


def test_none_is_stored_as_nothing() -> None:
    assert Handler(lambda: None).encode_result(None) is None
    assert through(lambda: None) is None


def test_a_call_that_does_not_fit_the_function_is_refused() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        Handler(add).encode((1,), {})
    for args, kwargs in (((1, 2, 3), {}), ((1,), {"a": 1}), ((1, 2), {"c": 3}), ((), {"b": 1})):
        with pytest.raises(TypeError, match="task 'add': "):
            Handler(add).encode(args, kwargs)
    with pytest.raises(TypeError, match="task 'add': no such argument: 'w', 'v'; its arguments are: a, b"):
        Handler(add).encode((), {"w": 1, "v": 2})


def test_a_payload_that_does_not_fit_is_refused() -> None:
    def handle(a: int) -> None: ...

    for payload in (b'{"a": "one"}', b"{}", b'{"a": 1, "c": 2}', b"[1]", b"not JSON", b"", b'{"a": 1, "a": null}'):
        with pytest.raises(InvalidInputError, match="invalid_input: task 'handle', payload: does not fit its param"):
            Handler(handle).bind(payload, CONTEXT)


def test_an_error_of_a_model_names_the_parameter() -> None:
    def handle(order: Order) -> None: ...

    with pytest.raises(
        InvalidInputError, match=r"task 'handle', payload: .* number: Field required; .* - at `\$\.order`"
    ):
        Handler(handle).bind(b'{"order": {}}', CONTEXT)


def test_a_payload_may_use_the_aliases_of_a_model() -> None:
    def handle(user: Aliased) -> None: ...

    handler = Handler(handle)
    for payload in (b'{"user": {"userId": 1, "remark": "x"}}', b'{"user": {"user_id": 1, "note": "x"}}'):
        assert handler.bind(payload, CONTEXT) == ((Aliased.model_validate({"userId": 1, "n": "x"}),), {})


def test_a_generator_cannot_be_a_handler() -> None:
    def numbers() -> Any:
        yield 1

    async def later() -> Any:
        yield 1

    for generator in (numbers, later):
        with pytest.raises(TypeError, match=f"task '{generator.__name__}' is a generator; return its result"):
            Handler(generator)
        with pytest.raises(TypeError, match="task 'named' is a generator"):
            Handler(generator, task="named")


def test_a_handler_knows_whether_its_function_is_async() -> None:
    async def later(a: int) -> None: ...

    class Called:
        async def __call__(self) -> None: ...

    def now() -> None: ...

    assert [Handler(f).is_async for f in (later, partial(later, 1), Called(), now)] == [True, True, True, False]

"""A value is stored and decoded to an equal one, or refused with an error that says where and why.

`FF_TEST_SWEEP=whole` tries many more values.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from annotations import DOUBTFUL, MODELS, SECRETS, STRUCTS, Cat, Stamped, StampedRow, Swapped, typed
from flowfabric.model.errors import InvalidInputError
from flowfabric.worker.handler import Handler

CONTEXT: Any = object()
ROUNDS = 10 if os.environ.get("FF_TEST_SWEEP") == "whole" else 1
NAN = float("nan")


def task(kind: Any) -> Callable[[Any], Any]:
    """A function of one parameter and a result of this type."""

    def job(a: Any) -> Any:
        return a

    job.__annotations__ = {"a": kind, "return": kind}
    return job


def carried_argument(handler: Handler, value: object) -> Any:
    ((back,), _) = handler.bind(handler.encode((value,), {}), CONTEXT)
    return back


def carried_result(handler: Handler, value: object) -> Any:
    return handler.decode_result(handler.encode_result(value))


@settings(max_examples=50 * ROUNDS, deadline=None)
@given(typed(MODELS) | typed(STRUCTS))
def test_a_supported_value_decodes_to_an_equal_one(pair: tuple[Any, Any]) -> None:
    kind, value = pair
    handler = Handler(task(kind), task="job")
    assert carried_argument(handler, value) == value
    assert carried_result(handler, value) == value


@settings(max_examples=80 * ROUNDS, deadline=None)
@given(typed(DOUBTFUL), st.none() | typed(DOUBTFUL))
@example((Swapped, Swapped.model_construct(a=1, b=2)), None)
@example((float | None, NAN), None)
@example((dict, {1: "a", "1": "b"}), None)
def test_any_value_decodes_to_an_equal_one_or_is_refused(pair: tuple[Any, Any], other: tuple[Any, Any] | None) -> None:
    """The value is that of the second pair, if there is one, whose type is not the annotation."""
    kind, value = pair if other is None else (pair[0], other[1])
    handler, fault = attempt(lambda: Handler(task(kind), task="job"))
    if fault is not None:
        assert str(fault).startswith("invalid_input: task 'job', parameter 'a': ")
        return
    for place, carried in (("parameter 'a'", carried_argument), ("result", carried_result)):
        back, fault = attempt(partial(carried, handler, value))
        if fault is None:
            assert back == value
        else:
            assert str(fault).startswith(f"invalid_input: task 'job', {place}: ")


def attempt(call: Callable[[], Any]) -> tuple[Any, InvalidInputError | None]:
    """The answer of a call, or the error it is refused with."""
    try:
        return call(), None
    except InvalidInputError as refused:
        return None, refused


def test_bytes_that_are_text_keep_the_form_that_other_versions_read_and_write() -> None:
    versions: list[tuple[Any, Any, bytes]] = [
        (Stamped, Stamped((b"abcd", Cat())), b'{"pair":["abcd",{"kind":"cat","lives":9}],"names":[]}'),
        (StampedRow, {"data": b"abcd", "animal": Cat()}, b'{"data":"abcd","animal":{"kind":"cat","lives":9}}'),
    ]
    for kind, value, stored in versions:
        handler = Handler(task(kind), task="job")
        assert handler.decode_result(stored) == value
        assert handler.encode_result(value) == stored
        assert handler.encode((value,), {}) == b'{"a":%b}' % stored


def test_a_secret_is_refused_at_the_decorator() -> None:
    def get() -> Any: ...

    accepted = []
    for kind in SECRETS:
        get.__annotations__ = {"return": kind}
        for place, declare in (("parameter 'a'", task(kind)), ("result", get)):
            _, fault = attempt(partial(Handler, declare, task="job"))
            if not re.match(rf"invalid_input: task 'job', {place}: a Secret.* is a secret", str(fault)):
                accepted.append((kind, place, fault))
    assert accepted == []

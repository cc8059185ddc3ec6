from collections.abc import Callable

import pytest

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.text import (
    check_batch,
    check_items,
    check_length,
    check_limit,
    check_range,
    check_short,
    check_text,
    json_text,
    listed,
    shown,
    shown_time,
)
from model.cases import for_each


@for_each("text", ["", "plain", "ünïcode \U0001f600", "line\nbreak"])
def test_storable_text_is_returned_unchanged(text: str) -> None:
    assert check_text(text, "namespace") is text


@for_each("text", ["a\0b", "\ud800", "é\0", None, 3, b"x"])
def test_text_that_cannot_be_stored_is_rejected_with_its_field(text: object) -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: namespace: "):
        check_text(text, "namespace")


@for_each(
    "check, message",
    [
        (lambda: check_text(3, "name"), "name: must be text, got 3"),
        (lambda: check_text("a\0b", "name"), r"name: must not contain NUL (\0), got 'a\x00b'"),
        (
            lambda: check_text("\ud800", "name"),
            r"name: is not valid Unicode, got '\ud800'; remove the lone surrogates",
        ),
        (lambda: check_length("x" * 6, "name", 5), "name: must be at most 5 characters long, got 6"),
        (lambda: check_short("", "key"), "key: must not be empty"),
        (lambda: check_short("é" * 513, "key"), "key: must be at most 1024 bytes long in UTF-8, got 1026"),
        (lambda: check_range(0, "n", 1, 9), "n: must be a whole number from 1 to 9, got 0"),
        (lambda: check_range(True, "n", 1, 9), "n: must be a whole number from 1 to 9, got True"),
        (lambda: check_limit(-1, 50), "limit: must be a whole number of at least 0, got -1"),
        (lambda: check_batch("ab", "items"), "items: expected a list, got 'ab'; write [item] for a single item"),
        (lambda: check_batch([], "items"), "items: must have 1 to 1000 items, got 0"),
        (
            lambda: check_batch([1] * 1001, "items"),
            "items: must have 1 to 1000 items, got 1001; split it into several calls",
        ),
        (
            lambda: check_items("mail", "lanes"),
            "lanes: expected a list or another collection, got 'mail'; write ['mail']",
        ),
        (lambda: check_items(5, "lanes"), "lanes: expected a list or another collection, got 5"),
        (lambda: check_items({"a": 1}, "lanes"), "lanes: expected a list or another collection, got {'a': 1}"),
    ],
)
def test_an_error_names_field_rule_value_and_correction(check: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check()
    assert (refused.value.code, refused.value.detail) == ("invalid_input", message)


def test_the_limits_of_the_checks_are_inclusive() -> None:
    assert check_length("x" * 5, "name", 5) == "x" * 5
    assert check_short("x" * 1024, "key") == "x" * 1024
    for value in (1, 9):
        check_range(value, "n", 1, 9)
    for size in (1, 1000):
        check_batch([None] * size, "items")
    assert [check_limit(limit, 50) for limit in (0, 50, 51)] == [0, 50, 50]
    assert check_items({1: 2}.keys(), "lanes") == (1,)


def test_json_text_is_compact_or_rejected() -> None:
    assert json_text({"a": [1, None]}) == json_text(' {"a": [1, null]} ') == '{"a":[1,null]}'
    with pytest.raises(ValueError, match=r"^malformed: expected JSON, got '\{'$"):
        json_text("{")
    with pytest.raises(ValueError, match=r"^must not contain NUL \(\\0\), got "):
        json_text({"a": "\0"})


def test_a_value_is_shown_shortened_whatever_its_repr_does() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown("x" * 1000) == f"'{'x' * 199}..."
    assert shown("\ud800") == r"'\ud800'"
    assert shown(Broken()) == "a Broken"


def test_texts_are_listed_up_to_a_number() -> None:
    assert [listed([]), listed(["a"]), listed(["a", "b"])] == ["none", "a", "a, b"]
    assert [listed("abc", most=3), listed("abcde", most=3)] == ["a, b, c", "a, b, c and 2 more"]
    assert [listed("ab", joint=" or "), listed("abc", joint=" or ", most=2)] == ["a or b", "a or b or 1 more"]
    assert listed(["x" * 1000, "y"]) == f"{'x' * 200}..., y"


def test_a_time_is_shown_in_utc_with_milliseconds() -> None:
    assert shown_time(0) == "1970-01-01T00:00:00.000Z"
    assert shown_time(1_767_225_599_999) == "2025-12-31T23:59:59.999Z"
    assert shown_time(2**62) == f"{2**62} ms since the epoch"

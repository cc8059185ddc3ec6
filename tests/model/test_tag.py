from typing import Any

import pytest

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.tag import check_tag_key, check_tags
from model.cases import for_each


@for_each("key", ["cairn.session_id", "a.b", "a1_2.x", "app.sub.field", "a.0", "a._", "a.b."])
def test_a_tag_key_has_a_namespace_and_a_name(key: str) -> None:
    assert check_tag_key(key) == key


@for_each(
    "key",
    [
        "", "Cairn.x", "1cairn.x", "cairn", "cairn.", "cairn..x", ".cairn", "ca-irn.x", "cairn.Foo", "cairn.foo bar",
        "cairn.foo-bar", "cairn.'x", 'cairn."x', "cairn.x\\", "a.b\n", "a.é", "é.a", "a.b\0", "a.١",
    ],
)  # fmt: skip
def test_any_other_tag_key_is_rejected_with_the_key(key: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_tags({key: "value"})
    assert refused.value.code == "invalid_tag_key"
    assert str(refused.value.detail).startswith(f"tag key {key!r} must be namespaced, e.g. 'app.")


def test_the_error_of_a_bare_key_suggests_the_namespaced_one() -> None:
    for key, example in {"customer": "app.customer", "Customer": "app.name"}.items():
        with pytest.raises(InvalidInputError, match=f"'{key}' must be namespaced, e.g. '{example}': lower-case"):
            check_tag_key(key)


def test_a_tag_key_has_at_most_1024_characters() -> None:
    assert check_tag_key("a." + "b" * 1022)
    with pytest.raises(InvalidInputError, match=r"invalid_tag_key: .* at most 1024 characters long, got 1025"):
        check_tag_key("a." + "b" * 1023)


def test_a_tag_key_must_be_text() -> None:
    for key in (None, 3, b"a.b", ("a.b",)):
        with pytest.raises(InvalidInputError, match="invalid_tag_key"):
            check_tag_key(key)


def test_the_error_of_an_invalid_unicode_key_escapes_it() -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_tag_key("a.\ud800")
    assert str(refused.value.detail).startswith(r"tag key 'a.\ud800' must be namespaced")


def test_a_tag_value_may_be_any_text() -> None:
    tags = {"a.b": "", "a.c": "Ünï\n'\"\\"}
    checked = check_tags(tags)
    assert checked == tags
    assert checked is not tags


def test_none_and_empty_tags_are_empty() -> None:
    assert check_tags({}) == check_tags(None) == {}


@for_each("value", ["a\0b", "\ud800", None, 3, b"x"])
def test_a_tag_value_that_cannot_be_stored_is_rejected(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"invalid_input: tags\.a\.b: "):
        check_tags({"a.b": value})


@for_each("tags", ["a.b", ["a.b"], 3])
def test_tags_must_be_a_mapping(tags: Any) -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: tags: "):
        check_tags(tags)

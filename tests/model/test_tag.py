from typing import Any

import pytest

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.tag import check_tag_key, check_tags


@pytest.mark.parametrize("key", ["cairn.session_id", "a.b", "a1_2.x", "app.sub.field", "a.0", "a._", "a.b."])
def test_a_tag_key_has_a_namespace_and_a_name(key: str) -> None:
    assert check_tag_key(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "", "Cairn.x", "1cairn.x", "cairn", "cairn.", "cairn..x", ".cairn", "ca-irn.x", "cairn.Foo", "cairn.foo bar",
        "cairn.foo-bar", "cairn.'x", 'cairn."x', "cairn.x\\", "a.b\n", "a.é", "é.a", "a.b\0", "a.١",
    ],
)  # fmt: skip
def test_any_other_tag_key_is_refused_with_the_key(key: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_tags({key: "value"})
    assert (refused.value.code, refused.value.detail) == ("invalid_tag_key", key)


def test_a_key_that_is_no_text_is_refused() -> None:
    for key in (None, 3, b"a.b", ("a.b",)):
        with pytest.raises(InvalidInputError, match="invalid_tag_key"):
            check_tag_key(key)


def test_a_key_that_is_no_unicode_is_refused_readably() -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_tag_key("a.\ud800")
    assert refused.value.detail == "a.\\ud800"


def test_values_are_any_text() -> None:
    tags = {"a.b": "", "a.c": "Ünï\n'\"\\"}
    checked = check_tags(tags)
    assert checked == tags
    assert checked is not tags


def test_no_tags_are_no_tags() -> None:
    assert check_tags({}) == check_tags(None) == {}


@pytest.mark.parametrize("value", ["a\0b", "\ud800", None, 3, b"x"])
def test_a_value_the_store_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"invalid_input: tags\.a\.b: "):
        check_tags({"a.b": value})


@pytest.mark.parametrize("tags", ["a.b", ["a.b"], 3])
def test_tags_are_a_mapping(tags: Any) -> None:
    with pytest.raises(InvalidInputError, match="invalid_input: tags: "):
        check_tags(tags)

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.summary import (
    MAX_PATCH_DEPTH,
    NULL,
    decode_document,
    encode_document,
    growth,
    merge_patch,
    read_patch,
)
from model.cases import for_each

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=2), inside, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=2), values, max_size=4)


def merged(*patches: str, into: str = "{}") -> Any:
    document = json.loads(into)
    for patch in patches:
        document = merge_patch(document, read_patch(patch.encode()))
    return document


# The examples of RFC 7396 whose target and patch are objects.
@for_each(
    "target, patch, result",
    [
        ('{"a":"b"}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"b"}', '{"b":"c"}', '{"a":"b","b":"c"}'),
        ('{"a":"b"}', '{"a":null}', "{}"),
        ('{"a":"b","b":"c"}', '{"a":null}', '{"b":"c"}'),
        ('{"a":["b"]}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"c"}', '{"a":["b"]}', '{"a":["b"]}'),
        ('{"a":{"b":"c"}}', '{"a":{"b":"d","c":null}}', '{"a":{"b":"d"}}'),
        ('{"a":[{"b":"c"}]}', '{"a":[1]}', '{"a":[1]}'),
        ('{"e":null}', '{"a":1}', '{"e":null,"a":1}'),
        ("{}", '{"a":{"bb":{"ccc":null}}}', '{"a":{"bb":{}}}'),
        (
            '{"title":"Goodbye!","author":{"givenName":"John","familyName":"Doe"},"tags":["example","sample"],'
            '"content":"This will be unchanged"}',
            '{"title":"Hello!","phoneNumber":"+01-123-456-7890","author":{"familyName":null},"tags":["example"]}',
            '{"title":"Hello!","author":{"givenName":"John"},"tags":["example"],'
            '"content":"This will be unchanged","phoneNumber":"+01-123-456-7890"}',
        ),
    ],
)
def test_the_examples_of_the_standard(target: str, patch: str, result: str) -> None:
    assert merged(patch, into=target) == json.loads(result)


@for_each(
    "target, patch, result",
    [
        # An empty object leaves an object as it is, and replaces anything else.
        ('{"a":{"b":1}}', '{"a":{}}', '{"a":{"b":1}}'),
        ('{"a":1}', '{"a":{}}', '{"a":{}}'),
        ('{"a":[1]}', '{"a":{"b":1}}', '{"a":{"b":1}}'),
        ("{}", '{"a":{}}', '{"a":{}}'),
        ('{"a":1}', "{}", '{"a":1}'),
        # Empty arrays stay arrays, and nothing is merged inside arrays.
        ('{"a":{"b":1}}', '{"a":[]}', '{"a":[]}'),
        ("{}", '{"a":[null,{"b":null}]}', '{"a":[null,{"b":null}]}'),
        # Nulls are dropped from an object that is new.
        ("{}", '{"a":{"b":null,"c":{"d":null,"e":1}}}', '{"a":{"c":{"e":1}}}'),
        # The sentinel becomes null wherever it is the whole value.
        ("{}", '{"a":"__ff_null__"}', '{"a":null}'),
        ("{}", '{"a":{"b":"__ff_null__"}}', '{"a":{"b":null}}'),
        ("{}", '{"a":["__ff_null__",["__ff_null__"],{"b":"__ff_null__"}]}', '{"a":[null,[null],{"b":null}]}'),
        ("{}", '{"a":"__ff_null__ ","__ff_null__":1}', '{"a":"__ff_null__ ","__ff_null__":1}'),
        ('{"a":null}', '{"a":null}', "{}"),
    ],
)
def test_merging_objects_arrays_and_nulls(target: str, patch: str, result: str) -> None:
    assert merged(patch, into=target) == json.loads(result)


def test_three_patches_after_one_another() -> None:
    patches = '{"a":1,"b":{"c":2}}', '{"a":null,"b":{"d":3}}', '{"x":"__ff_null__"}'
    assert merged(*patches) == {"b": {"c": 2, "d": 3}, "x": None}


def test_the_document_of_before_is_not_changed() -> None:
    document = {"a": {"b": {"c": 1}}}
    merge_patch(document, {"a": {"b": {"c": None, "d": 2}}, "e": 1})
    assert document == {"a": {"b": {"c": 1}}}


@given(objects, objects)
def test_the_growth_of_a_document_is_that_of_its_bytes(document: Any, patch: Any) -> None:
    before = merge_patch({}, document)
    after = merge_patch(before, patch)
    assert growth(before, patch) == len(encode_document(after)) - len(encode_document(before))


@given(document=objects, patch=objects)
def test_a_merged_document_has_no_sentinel_and_survives_its_bytes(document: Any, patch: Any) -> None:
    before = merge_patch({}, document)
    after = merge_patch(before, {**patch, "s": [NULL], "t": {"u": NULL}})
    assert NULL not in json.dumps(after)
    assert decode_document(encode_document(after)) == after
    assert merge_patch(after, {}) == after


@for_each(
    "payload, detail",
    [
        (b"", "patch payload is not valid JSON: Expecting value at character 0"),
        (b'{"a":}', "patch payload is not valid JSON: Expecting value at character 5"),
        (b'{"a":1} x', "patch payload is not valid JSON: Extra data at character 8"),
        (b'{"a":"\xff"}', "patch payload is not valid JSON: byte 6 is not UTF-8"),
        ('{"a":1}'.encode("utf-16"), "patch payload is not valid JSON: byte 0 is not UTF-8"),
        (b'{"a":NaN}', "patch payload is not valid JSON: NaN is not a JSON number"),
        (b'{"a":-Infinity}', "patch payload is not valid JSON: -Infinity is not a JSON number"),
        (b'{"a":[1e400]}', "patch payload is not valid JSON: the number 1e400 is out of range"),
        (b'{"a":"\n"}', "patch payload is not valid JSON: Invalid control character at at character 6"),
        (b"[]", "patch must be a JSON object, got []"),
        (b"null", "patch must be a JSON object, got None"),
        (b'"text"', "patch must be a JSON object, got 'text'"),
        (b"7", "patch must be a JSON object, got 7"),
    ],
)
def test_a_payload_that_is_no_patch_is_refused(payload: bytes, detail: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read_patch(payload)
    assert (refused.value.code, refused.value.detail) == ("invalid_input", detail)


def test_a_number_of_too_many_digits_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="patch payload is not valid JSON: Exceeds the limit"):
        read_patch(b'{"a":' + b"9" * 5000 + b"}")


def nested(levels: int, opening: bytes, closing: bytes) -> bytes:
    return b'{"a":' + opening * (levels - 1) + b"1" + closing * (levels - 1) + b"}"


@for_each("opening, closing", [(b'{"a":', b"}"), (b"[", b"]")])
def test_a_patch_may_be_nested_sixteen_levels_deep(opening: bytes, closing: bytes) -> None:
    assert MAX_PATCH_DEPTH == 16
    read_patch(nested(16, opening, closing))
    for levels in (17, 10_000):
        with pytest.raises(InvalidInputError, match="patch_depth_exceeded: a patch may be nested at most 16 levels"):
            read_patch(nested(levels, opening, closing))


def test_text_that_is_no_valid_unicode_survives() -> None:
    document = merge_patch({}, read_patch(b'{"a":"\\ud800","b":"\\u0000","c":"\xc3\xa4"}'))
    assert document == {"a": "\ud800", "b": "\0", "c": "ä"}
    assert decode_document(encode_document(document)) == document

"""Canonical JSON: equal values have the same text, whatever the order of their sets and dicts."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import pydantic

_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.decode


def canonical(value: object, payload: bytes) -> bytes:
    """Return the JSON of a value with the members of its sets and the keys of its objects sorted.

    `payload` is the JSON of the same object: the value tells which of its arrays are sets, and has their members in
    the same order.
    """
    return _encode(_sorted(value, _decode(payload)))


def _sorted(value: Any, plain: Any) -> Any:
    """Return decoded JSON with its sets sorted; parts that do not match the value in shape are left as they are."""
    if isinstance(value, pydantic.RootModel):
        return _sorted(value.root, plain)
    if isinstance(plain, list):
        if len(plain) == 1 and (isinstance(value, Mapping) or dataclasses.is_dataclass(value)):
            # The form of a dataclass or a TypedDict whose bytes are not text.
            return [_sorted(value, plain[0])]
        members = _members(value)
        if len(members) != len(plain):
            return plain
        parts = [_sorted(member, part) for member, part in zip(members, plain, strict=True)]
        return sorted(parts, key=_encode) if isinstance(value, AbstractSet) else parts
    if not isinstance(plain, dict):
        return plain
    if isinstance(value, Mapping):
        if len(value) != len(plain):
            return plain
        pairs = zip(value.values(), plain.items(), strict=True)
        return {key: _sorted(part, inner) for part, (key, inner) in pairs}
    attribute = _attributes(value)
    return {key: _sorted(getattr(value, attribute(key), None), inner) for key, inner in plain.items()}


def _members(value: Any) -> list[Any]:
    if isinstance(value, msgspec.Struct):
        # The array of a tagged struct begins with its tag.
        tag = [] if value.__struct_config__.tag is None else [None]
        return [*tag, *msgspec.structs.astuple(value)]
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else []


def _attributes(value: Any) -> Callable[[str], str]:
    """Return the function from a key of the JSON object to the attribute of the value."""
    if not isinstance(value, msgspec.Struct):
        return str
    names = {field.encode_name: field.name for field in msgspec.structs.fields(value)}
    return lambda key: names.get(key, key)

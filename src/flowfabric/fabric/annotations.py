"""What annotations tell when a flow is built: which results and containers cannot fit a parameter."""

import dataclasses
from collections import abc
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, NotRequired, Required, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
import pydantic

_SCALARS = frozenset({int, float, bool, str, bytes, NoneType, datetime, date, time, timedelta, UUID, Decimal})
_JSON = (int, float, bool, str, NoneType, list, dict)
_DECODED_AS: Mapping[Any, type] = {
    abc.Iterable: list,
    abc.Collection: list,
    abc.Sequence: list,
    abc.MutableSequence: list,
    abc.Set: set,
    abc.MutableSet: set,
    frozenset: set,
    abc.Mapping: dict,
    abc.MutableMapping: dict,
}
"""The class that stands for an abstract one, and for one with equal values."""


def arms_of(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, or the one type, without aliases and metadata."""
    plain = getattr(annotation, "__value__", annotation)
    origin = get_origin(plain)
    if origin is Annotated:
        yield from arms_of(get_args(plain)[0])
    elif origin in (Union, UnionType):
        for arm in get_args(plain):
            yield from arms_of(arm)
    elif origin is Literal:
        yield from dict.fromkeys(type(value) for value in get_args(plain))
    elif isinstance(plain, NewType):
        yield from arms_of(plain.__supertype__)
    else:
        yield NoneType if plain is None else plain


def class_of(arm: Any) -> type | None:
    """Return the class of the values of a type, `object` for any value; None if it cannot be told."""
    if arm is Any:
        return object
    kind = get_origin(arm) or arm
    if _is_typed_dict(kind):
        return dict
    return _DECODED_AS.get(kind, kind) if isinstance(kind, type) else None


def fields_of(arm: Any) -> tuple[Mapping[str, Any], frozenset[str]] | None:
    """Return the annotations of the fields of a TypedDict, and the names of those that it must have."""
    kind = get_origin(arm) or arm
    if not _is_typed_dict(kind):
        return None
    hints = get_type_hints(kind, include_extras=True)
    required = {name for name in kind.__required_keys__ if get_origin(hints[name]) is not NotRequired}
    required |= {name for name, hint in hints.items() if get_origin(hint) is Required}
    return {name: _bare(hint) for name, hint in hints.items()}, frozenset(required)


def _is_typed_dict(kind: Any) -> bool:
    # typing.is_typeddict does not know those of typing_extensions.
    return hasattr(kind, "__required_keys__") and hasattr(kind, "__total__")


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) in (Required, NotRequired) else annotation


def can_fit(result: Any, parameter: Any) -> bool:
    """Whether a result with one annotation may fit a parameter with another; False only if none can."""
    return result is parameter or any(
        _can_fit(given, wanted) for given in arms_of(result) for wanted in arms_of(parameter)
    )


def _can_fit(given: Any, wanted: Any) -> bool:
    one, other = class_of(given), class_of(wanted)
    if one is None or other is None or one is object or not _is_known(one):
        return True
    if other is object:
        if not issubclass(one, _JSON):
            return False
        other, items = one, (str, Any) if issubclass(one, dict) else (Any,)
    elif not _is_known(other):
        return True
    else:
        items = get_args(wanted)
    if (issubclass(one, int) and one is not bool and other in (float, Decimal)) or (one is float and other is Decimal):
        return True
    if one in _SCALARS and other in _SCALARS:
        return one is other
    if not issubclass(one, other) and not issubclass(other, one):
        return False
    # The items of tuples and the parameters of other generic classes are left to the decoder.
    given_items = get_args(given) if issubclass(one, list | set | dict) else ()
    return len(given_items) != len(items) or all(map(can_fit, given_items, items))


def _is_known(kind: type) -> bool:
    """Whether a class is one whose values only decode from values of a related class."""
    if kind in _SCALARS or dataclasses.is_dataclass(kind):
        return True
    if issubclass(kind, pydantic.BaseModel):
        return not issubclass(kind, pydantic.RootModel)
    return issubclass(kind, list | tuple | set | dict | Enum | msgspec.Struct)


def is_json(annotation: Any, *, with_any: bool = False) -> bool:
    """Whether all values of an annotation are equal to their JSON."""
    return all(_is_json_arm(arm, with_any=with_any) for arm in arms_of(annotation))


def _is_json_arm(arm: Any, *, with_any: bool) -> bool:
    kind, items = class_of(arm), get_args(arm)
    if kind is object:
        return with_any
    if kind is dict and (_is_typed_dict(arm) or (items and items[0] is not str)):
        return False
    if kind in (list, dict):
        return all(is_json(item, with_any=with_any) for item in items) if items else with_any
    return kind in _JSON

"""The payload of a node: its arguments as JSON, and the places of the results that are put in when it starts."""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, NotRequired, Required, Union, get_args, get_origin

from flowfabric.fabric.node import Group, Node, Pending
from flowfabric.model.errors import error
from flowfabric.model.text import shown
from flowfabric.worker.codec import Codec, NotSerializable, codec_of, encode, parts_in
from flowfabric.worker.handler import Handler
from flowfabric.worker.upstreams import Path, PathKey, Place, described

_UNKNOWN: Any = Any
"""The annotation of a value whose annotation cannot be told from that of the parameter."""
_CONTAINERS = (list, tuple, dict)


def has_nodes(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether any of these arguments is a node or a group, or a list, tuple or dict with one in it."""
    return any(map(_has_nodes, args)) or any(map(_has_nodes, kwargs.values()))


def _has_nodes(value: object) -> bool:
    if isinstance(value, Pending):
        return True
    if not isinstance(value, _CONTAINERS):
        return False
    seen: set[int] = set()
    pending: list[object] = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Pending):
            return True
        if isinstance(part, _CONTAINERS) and id(part) not in seen:
            seen.add(id(part))
            pending += part if not isinstance(part, dict) else (*part.keys(), *part.values())
    return False


def hidden_node(args: Sequence[object], kwargs: Mapping[str, object]) -> Pending | None:
    """Return a node in a place where no result can be put in, such as a set or a model."""
    waiting: list[object] = [*args, *kwargs.values()]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Pending) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif found := [part for part in parts_in(value) if isinstance(part, Pending)]:
            return found[0]
    return None


def encode_with_nodes(
    handler: Handler, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[bytes, list[Node | Group]]:
    """Return the payload of a call with nodes among its arguments, and these nodes and groups.

    Arguments without nodes are checked like those of any call.
    """
    found: list[tuple[Path, Node | Group]] = []
    fields = []
    for name, value, codec in handler.arguments(args, kwargs):
        try:
            part = _encode(value, codec, (name,), found)
        except NotSerializable as refused:
            raise handler.refused_argument(name, refused) from None
        fields.append(encode(name) + b":" + part)
    arguments = b"{" + b",".join(fields) + b"}"
    return described(arguments, [_place(path, pending) for path, pending in found]), [pending for _, pending in found]


def _place(path: Path, pending: Node | Group) -> Place:
    if isinstance(pending, Node):
        return Place(path=list(path), upstreams=[pending._uuid], plain_bytes=_plain_bytes([pending]))
    nodes = pending._nodes
    uuids, plain_bytes = [node._uuid for node in nodes], _plain_bytes(nodes)
    match pending._name:
        case "all_of":
            return Place(path=list(path), upstreams=uuids, take="all", plain_bytes=plain_bytes)
        case "any_of":
            return Place(path=list(path), upstreams=uuids, plain_bytes=plain_bytes)
        case _:
            assert pending._needs is not None
            return Place(path=list(path), upstreams=uuids, take=pending._needs, plain_bytes=plain_bytes)


def _plain_bytes(nodes: Sequence[Node]) -> list[int]:
    return [at for at, node in enumerate(nodes) if node._task._handler.returns_bytes]


def _encode(value: object, codec: Codec, path: Path, found: list[tuple[Path, Node | Group]]) -> bytes:
    """Return the JSON of a value, with null for each node in it."""
    if isinstance(value, Node | Group):
        found.append((path, value))
        return b"null"
    if not _has_nodes(value):
        return codec.checked(value)
    if isinstance(value, dict):
        of = _values_of(codec.annotation)
        items = [(_key(key), part) for key, part in value.items()]
        return b"{" + b",".join(encode(str(k)) + b":" + _encode(v, of(k), (*path, k), found) for k, v in items) + b"}"
    assert isinstance(value, list | tuple)
    of = _items_of(codec.annotation)
    return b"[" + b",".join(_encode(part, of(at), (*path, at), found) for at, part in enumerate(value)) + b"]"


def _key(key: object) -> str:
    if isinstance(key, Pending):
        raise NotSerializable(f"{key!r} is a key of a dict; results can only be values")
    plain = key.value if isinstance(key, Enum) else key
    if isinstance(plain, bool) or not isinstance(plain, str | int):
        raise NotSerializable(
            f"a dict with nodes has the key {shown(key)}; use text or whole numbers as the keys of such a dict"
        )
    return str(plain)


def _items_of(annotation: Any) -> Callable[[PathKey], Codec]:
    """Return the function from an index to the codec of that item of a list or tuple."""
    for arm in _arms(annotation):
        kind, args = get_origin(arm), get_args(arm)
        if kind is tuple and not (len(args) == 2 and args[1] is ...):
            return lambda at: _codec(args[at] if isinstance(at, int) and at < len(args) else _UNKNOWN)
        if args and isinstance(kind, type) and not issubclass(kind, Mapping) and hasattr(kind, "__iter__"):
            return lambda _: _codec(args[0])
    return lambda _: _codec(_UNKNOWN)


def _values_of(annotation: Any) -> Callable[[PathKey], Codec]:
    """Return the function from a key to the codec of that value of a dict."""
    for arm in _arms(annotation):
        kind, args = get_origin(arm), get_args(arm)
        if len(args) == 2 and isinstance(kind, type) and issubclass(kind, Mapping):
            return lambda _: _codec(args[1])
        if typing.is_typeddict(arm):
            hints = typing.get_type_hints(arm, include_extras=True)
            return lambda key: _codec(_bare(hints.get(str(key), _UNKNOWN)))
    return lambda _: _codec(_UNKNOWN)


def _arms(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, or the one type."""
    plain = getattr(annotation, "__value__", annotation)
    if get_origin(plain) is Annotated:
        yield from _arms(get_args(plain)[0])
    elif get_origin(plain) in (Union, UnionType):
        for arm in get_args(plain):
            yield from _arms(arm)
    else:
        yield plain


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) in (Required, NotRequired) else annotation


def _codec(annotation: Any) -> Codec:
    try:
        return _cached_codec(annotation)
    except TypeError:
        # The metadata of an Annotated may not be hashable.
        return codec_of(annotation)


_cached_codec = lru_cache(maxsize=1024)(codec_of)


def refuse_hidden(task: str, node: Pending) -> Exception:
    """Return the error of a node in a place where no result can be put in."""
    return error(
        "invalid_input",
        f"task {task!r}: {node!r} is inside a set, a dataclass or a model; results can be put into lists, tuples and "
        "dicts: pass the node as an argument of its own, or build the value in the task",
    )

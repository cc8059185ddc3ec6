"""The payload of a node: its arguments as JSON, and the places of the results that are put in when it starts."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import GenericAlias
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec

from flowfabric.fabric.annotations import arms_of, can_fit, class_of, fields_of, is_json
from flowfabric.fabric.node import Group, Node, Pending
from flowfabric.model.errors import error
from flowfabric.model.text import shown
from flowfabric.worker.codec import Codec, NotSerializable, codec_of, encode, name_of, parts_in
from flowfabric.worker.handler import Handler
from flowfabric.worker.upstreams import Path, Place, described

_CONTAINERS = (list, tuple, dict)
_Found: TypeAlias = tuple[Path, Node | Group, Any]
"""A node or a group in the arguments: its path, and the annotation of the place of each result."""


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
    found: list[_Found] = []
    fields = []
    for name, value, codec in handler.arguments(args, kwargs):
        try:
            part = _encode(value, codec, (name,), found)
        except NotSerializable as refused:
            raise handler.refused_argument(name, refused) from None
        except RecursionError:
            raise handler.refused_argument(name, "the value contains itself, or is nested too deeply") from None
        fields.append(encode(name) + b":" + part)
    arguments = b"{" + b",".join(fields) + b"}"
    return described(arguments, [_place(*each) for each in found]), [pending for _, pending, _ in found]


def _place(path: Path, pending: Node | Group, annotation: Any) -> Place:
    nodes = [pending] if isinstance(pending, Node) else pending._nodes
    take: int | Literal["one", "all"] = "one"
    if isinstance(pending, Group) and pending._name != "any_of":
        take = "all" if pending._needs is None else pending._needs
    handlers = [node._task._handler for node in nodes]
    return Place(
        path=list(path),
        upstreams=[node._uuid for node in nodes],
        take=take,
        plain_bytes=[at for at, handler in enumerate(handlers) if handler.returns_bytes],
        plain_json=[]
        if is_json(annotation, with_any=True)
        else [at for at, handler in enumerate(handlers) if is_json(handler.shape.result.annotation)],
    )


def _encode(value: object, codec: Codec, path: Path, found: list[_Found]) -> bytes:
    """Return the JSON of a value, with null for each node in it."""
    if isinstance(value, Node | Group):
        found.append((path, value, _checked_annotation(value, codec.annotation)))
        return b"null"
    if not _has_nodes(value):
        return codec.checked(value)
    assert isinstance(value, _CONTAINERS)
    refused: NotSerializable | None = None
    for arm in arms_of(codec.annotation):
        if not _is_kind_of(value, arm):
            continue
        inside: list[_Found] = []
        try:
            payload = _encode_container(value, arm, path, inside)
        except NotSerializable as misfit:
            refused = refused or misfit
        else:
            found += inside
            return payload
    raise refused or NotSerializable(
        f"expected {name_of(codec.annotation)}, got {shown(value)} ({type(value).__name__})"
    )


def _is_kind_of(value: object, arm: Any) -> bool:
    """Whether a type has lists, tuples or dicts like this one among its values."""
    kind = class_of(arm)
    return kind in (object, None) or any(isinstance(value, one) and issubclass(kind, one) for one in _CONTAINERS)


def _encode_container(value: Any, arm: Any, path: Path, found: list[_Found]) -> bytes:
    if isinstance(value, dict):
        annotations = _annotations_of_values(value, arm)
        parts = [
            encode(key) + b":" + _encode(part, _codec(annotation), (*path, key), found)
            for key, part, annotation in zip(_key_texts(value, arm), value.values(), annotations, strict=True)
        ]
        return b"{" + b",".join(parts) + b"}"
    annotations = _annotations_of_items(value, arm)
    items = [
        _encode(part, _codec(annotation), (*path, at), found)
        for at, (part, annotation) in enumerate(zip(value, annotations, strict=True))
    ]
    return b"[" + b",".join(items) + b"]"


def _key_texts(value: Mapping[object, object], arm: Any) -> list[str]:
    """Return the keys of a dict as JSON has them; refuse keys that would come back changed."""
    for key in value:
        if isinstance(key, Pending):
            raise NotSerializable(f"{key!r} is a key of a dict; results can only be values")
    kind, _ = _types_in_dict(arm)
    codec = _codec(GenericAlias(dict, (kind, None)))
    try:
        return list(msgspec.json.decode(codec.checked(dict.fromkeys(value))))
    except NotSerializable:
        key = next((key for key in value if not _is_kept(codec, key)), key)
        advice = "use text" if kind in (Any, object) else f"expected {name_of(kind)}"
        raise NotSerializable(f"a dict has the key {shown(key)} ({type(key).__name__}); {advice}") from None


def _is_kept(codec: Codec, key: object) -> bool:
    """Whether a key of a dict comes back as it is."""
    try:
        codec.checked({key: None})
    except NotSerializable:
        return False
    return True


def _annotations_of_values(value: Mapping[object, object], arm: Any) -> list[Any]:
    if fields := fields_of(arm):
        annotations, required = fields
        if missing := sorted(required - value.keys()):
            raise NotSerializable(f"{shown(value)} has no {missing[0]!r}, which a {name_of(arm)} must have")
        if unknown := [key for key in value if key not in annotations]:
            raise NotSerializable(f"{shown(value)} has {shown(unknown[0])}, which a {name_of(arm)} does not have")
        return [annotations[str(key)] for key in value]
    return [_types_in_dict(arm)[1]] * len(value)


def _types_in_dict(arm: Any) -> tuple[Any, Any]:
    """Return the annotations of the keys and of the values of a dict."""
    kind, args = class_of(arm), get_args(arm)
    if kind is None or not issubclass(kind, dict) or len(args) != 2 or fields_of(arm):
        return Any, Any
    return args[0], args[1]


def _annotations_of_items(value: Sequence[object], arm: Any) -> list[Any]:
    kind, args = class_of(arm), get_args(arm)
    if kind is object and isinstance(value, tuple):
        raise NotSerializable(
            f"{shown(value)} (tuple) would come back as a list; annotate it with its type, or pass a list"
        )
    if kind is list and args:
        return [args[0]] * len(value)
    if kind is None or not issubclass(kind, tuple):
        return [Any] * len(value)
    if names := getattr(kind, "_fields", ()):
        hints = get_type_hints(kind, include_extras=True)
        args = tuple(hints.get(name, Any) for name in names)
    if not args and arm != tuple[()]:
        return [Any] * len(value)
    if len(args) == 2 and args[1] is ...:
        return [args[0]] * len(value)
    if len(value) != len(args):
        raise NotSerializable(
            f"expected {name_of(arm)} of length {len(args)}, got {shown(value)} of length {len(value)}"
        )
    return list(args)


def _checked_annotation(pending: Node | Group, annotation: Any) -> Any:
    """Return the annotation of each result in a place; raise NotSerializable if no result can fit it."""
    if isinstance(pending, Node) or pending._name == "any_of":
        _check_results([pending] if isinstance(pending, Node) else pending._nodes, annotation)
        return annotation
    refused: NotSerializable | None = None
    for arm in arms_of(annotation):
        kind, args = class_of(arm), get_args(arm)
        if kind is not None and kind not in (object, list):
            continue
        item = args[0] if kind is list and args else arm if kind is None else Any
        try:
            _check_results(pending._nodes, item)
        except NotSerializable as misfit:
            refused = refused or misfit
        else:
            return item
    raise refused or NotSerializable(f"expected {name_of(annotation)}, got {pending!r}, which is a list of results")


def _check_results(nodes: Sequence[Node], annotation: Any) -> None:
    for node in {id(node._task._handler): node for node in nodes}.values():
        result = node._task._handler.shape.result.annotation
        if not can_fit(result, annotation):
            name = name_of(result)
            got = f"{node!r}, whose result is {name}"
            if any(arm in (Any, object) for arm in arms_of(annotation)):
                raise NotSerializable(f"{got}, would arrive as plain JSON; annotate the parameter with its type")
            raise NotSerializable(f"expected {name_of(annotation)}, got {got}")


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

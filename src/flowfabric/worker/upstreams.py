"""Arguments that are results of upstream runs: how a worker puts them in when the run starts."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias
from uuid import UUID

import msgspec
import pydantic

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.engine.read.upstreams import UpstreamResult
from flowfabric.model.edge import DependencyState
from flowfabric.model.errors import InvalidInputError
from flowfabric.model.ids import plain_id
from flowfabric.model.text import listed, shown
from flowfabric.worker.codec import encode, name_of, reason
from flowfabric.worker.handler import Handler
from flowfabric.worker.running import Running
from flowfabric.worker.waits import retry_while_leased

ENCODING = "flowfabric.upstreams+json"
"""The payload encoding of arguments that are filled in from results when the run starts."""
MAX_NAMED = 3
"""How many upstream runs an error names."""

PathKey: TypeAlias = str | int
Path: TypeAlias = tuple[PathKey, ...]
Tree: TypeAlias = dict[PathKey, Any]
"""The values to put in: a tree of the keys of their paths, with JSON as leaves."""

_AT = re.compile(r" - at `\$([^`]*)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A place in the arguments that results are put in."""

    path: list[PathKey]
    """The name of the parameter, then keys of objects and indices of arrays."""
    upstreams: list[str]
    """The UUIDs of the upstream executions."""
    take: int | Literal["one", "all"] = "one"
    """Whether the place takes the first result, a list of all in this order, or a list of the first so many."""
    plain_bytes: list[int] = []
    """The positions of upstreams whose results are bytes, which are not stored as JSON."""
    plain_json: list[int] = []
    """The positions of upstreams whose results are equal to their JSON, and must still be after they are decoded."""


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A payload with this encoding: the arguments, with null at the places."""

    arguments: msgspec.Raw
    places: list[Place]


_decode = msgspec.json.Decoder(Described).decode
_decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw]).decode
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ResultMissing(Exception):
    """A run that the arguments need the result of has none now."""


class ResultDeleted(ResultMissing):
    """A run that the arguments need the result of does not exist any more."""


class ResultMisfit(InvalidInputError):
    """A result does not fit its parameter."""


class UpstreamArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a run with the results of upstream runs in their places."""

    payload: bytes
    sources: Mapping[Path, UpstreamResult]
    """What was put in, by its path."""
    unchanged: Sequence[Path]
    """The paths of results that are equal to their JSON, and must still be after they are decoded."""


def described(arguments: bytes, places: list[Place]) -> bytes:
    """Return the payload of arguments with places."""
    return encode(Described(arguments=msgspec.Raw(arguments), places=places))


async def read_arguments(engine: Engine, running: Running) -> UpstreamArguments:
    """Read the upstream results of a run and put them in its arguments; retry while the lease lasts."""
    payload = _decode(running.claimed.input_payload)
    wanted = [UUID(text) for text in dict.fromkeys(text for place in payload.places for text in place.upstreams)]
    read = parts_of(engine).upstreams.read_upstream_results
    results = await retry_while_leased(lambda: read(running.execution_id, wanted), running)
    return fill(payload, results)


def fill(payload: Described, results: Sequence[UpstreamResult]) -> UpstreamArguments:
    """Put results, given in the order of their resolution, in their places."""
    by_id = {str(result.upstream_id): result for result in results}
    satisfied = [result for result in results if result.dependency_state is DependencyState.SATISFIED]
    ranks = {str(result.upstream_id): rank for rank, result in enumerate(satisfied)}
    sources: dict[Path, UpstreamResult] = {}
    unchanged: list[Path] = []
    tree: Tree = {}
    for place in payload.places:
        plain_bytes = {place.upstreams[at] for at in place.plain_bytes}
        plain_json = {place.upstreams[at] for at in place.plain_json}
        taken = [_with_result(by_id.get(text), text) for text in _taken(place, ranks)]
        values = [_json_of(each, is_bytes=str(each.upstream_id) in plain_bytes) for each in taken]
        path = tuple(place.path)
        paths: list[Path] = [path] if place.take == "one" else [(*path, at) for at in range(len(taken))]
        sources.update(zip(paths, taken, strict=True))
        unchanged += [at for at, each in zip(paths, taken, strict=True) if str(each.upstream_id) in plain_json]
        _graft(tree, path, values[0] if place.take == "one" else b"[" + b",".join(values) + b"]")
    arguments = _put_in(bytes(payload.arguments), tree)
    return UpstreamArguments(payload=arguments, sources=sources, unchanged=unchanged)


def _taken(place: Place, ranks: Mapping[str, int]) -> list[str]:
    """The upstreams whose results a place takes."""
    if place.take == "all" or (place.take == "one" and len(place.upstreams) == 1):
        return place.upstreams
    count = 1 if place.take == "one" else place.take
    assert isinstance(count, int)
    first = sorted((text for text in place.upstreams if text in ranks), key=ranks.__getitem__)[:count]
    if len(first) < count:
        raise ResultMissing(
            f"{len(first)} of the {len(place.upstreams)} runs that parameter {place.path[0]!r} waits for have "
            f"succeeded, and it takes {count}: this run was started before its dependencies were satisfied"
        )
    return first


def _with_result(result: UpstreamResult | None, uuid: str) -> UpstreamResult:
    if result is None:
        raise ResultDeleted(
            f"the run with UUID {uuid}, whose result is an argument, does not exist any more: it was deleted by "
            "retention, or is not upstream of this run; submit the flow again under a new id"
        )
    if not result.has_result:
        why = (
            "it was replayed and has not succeeded again"
            if result.dependency_state is DependencyState.SATISFIED
            else "this run was started before its dependencies were satisfied"
        )
        raise ResultMissing(
            f"{_named(result)}, whose result is an argument, is {result.public_state.value.replace('_', ' ')}: {why}"
        )
    return result


def _json_of(result: UpstreamResult, *, is_bytes: bool) -> bytes:
    payload = result.result_payload
    if payload is None:
        return b"null"
    return b'"' + base64.b64encode(payload) + b'"' if is_bytes else payload


def _graft(tree: Tree, path: Path, value: bytes) -> None:
    *above, last = path
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _put_in(payload: bytes, tree: Tree) -> bytes:
    """Return a JSON object or array with values replaced; everything else stays as it is written."""
    parts: Any = _decode_parts(payload)
    for key, value in tree.items():
        parts[key] = msgspec.Raw(value if isinstance(value, bytes) else _put_in(bytes(parts[key]), value))
    return encode(parts)


def misfit_of(handler: Handler, filled: UpstreamArguments) -> ResultMisfit | None:
    """Return the error of results that do not fit their parameter; None if all of them fit."""
    parts = _decode_names(filled.payload)
    names = {path[0]: None for path in filled.sources}
    for name, codec in zip(handler.shape.names, handler.shape.codecs, strict=True):
        if name not in names:
            continue
        try:
            codec.decode(bytes(parts[name]))
        except Exception as refused:
            of_parameter = {path: result for path, result in filled.sources.items() if path[0] == name}
            exact = _distinct(result for path, result in of_parameter.items() if _is_fault_at(path[1:], refused))
            results = _listed(exact or _distinct(of_parameter.values()))
            expected = name_of(codec.annotation)
            fault = (
                f"{'one of the results: ' if len(exact) > 1 else ''}{results} does not fit {expected}"
                if exact
                else f"a value with {results} in it does not fit {expected}"
            )
            return _misfit(handler, name, f"{fault}: {reason(refused)}")
    return None


def change_of(handler: Handler, filled: UpstreamArguments) -> ResultMisfit | None:
    """Return the error of a result that the annotation of its parameter changes; None if there is none."""
    parts = _decode_names(filled.payload) if filled.unchanged else {}
    codecs = dict(zip(handler.shape.names, handler.shape.codecs, strict=True))
    names = {str(path[0]) for path in filled.unchanged}
    values = {name: (codecs[name].decode(bytes(parts[name])), msgspec.json.decode(parts[name])) for name in names}
    for name, *path in filled.unchanged:
        value, plain = values[str(name)]
        for step in path:
            value, plain = _part_at(step, value, plain), plain[step]
        if value != plain:
            source = _listed([filled.sources[name, *path]])
            return _misfit(
                handler,
                str(name),
                f"{source} is {shown(plain)}, which would arrive as {shown(value)}; annotate the result and the "
                "parameter with the same type",
            )
    return None


def _part_at(step: Any, value: object, plain: Any) -> Any:
    """Return the part of a decoded list, tuple or dict that comes from this part of its JSON."""
    if isinstance(value, list | tuple) or (isinstance(value, dict) and step in value):
        return value[step]
    if isinstance(value, dict):
        # The keys are decoded too.
        return list(value.values())[list(plain).index(step)]
    # This version of the task takes another type than the one that was submitted.
    return plain[step]


def _misfit(handler: Handler, name: str, text: str) -> ResultMisfit:
    return ResultMisfit("invalid_input", f"task {handler.name!r}, parameter {name!r}: {text}")


def _is_fault_at(path: Path, refused: Exception) -> bool:
    """Whether a decoder complains about the part at a path, or about something inside of it."""
    if isinstance(refused, pydantic.ValidationError):
        # The steps of Pydantic include the types of unions.
        steps = iter(refused.errors(include_url=False)[0]["loc"])
        return all(any(str(step) == str(key) for step in steps) for key in path)
    found = _AT.search(str(refused))
    # The key of a dict is shown as `[...]`.
    at = [key or index for key, index in _STEP.findall(found[1])] if found else []
    return len(path) <= len(at) and all(step in ("...", str(key)) for key, step in zip(path, at, strict=False))


def _distinct(results: Iterable[UpstreamResult]) -> list[UpstreamResult]:
    return list({result.upstream_id: result for result in results}.values())


def _listed(results: Sequence[UpstreamResult]) -> str:
    return listed([f"the result of {_named(each)}" for each in results], most=MAX_NAMED)


def _named(result: UpstreamResult) -> str:
    return f"task {result.execution_kind!r} ({plain_id(result.upstream_execution_id)})"

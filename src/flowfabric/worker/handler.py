"""A function as a worker calls it: its arguments come from a payload, its result goes to one."""

import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import Parameter
from types import GenericAlias
from typing import Any, NamedTuple, Never, NoReturn, Unpack, get_args, get_origin

import msgspec

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.text import shown
from flowfabric.worker.canonical import canonical
from flowfabric.worker.codec import Codec, NotSerializable, codec_of, decoder_of, encode, name_of, reason
from flowfabric.worker.context import Context

_BY_NAME = frozenset({Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY})
_BY_POSITION = frozenset({Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD})
_NO_ARGUMENTS: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})


class _Shape(NamedTuple):
    """What a signature asks for."""

    signature: inspect.Signature
    call: inspect.Signature
    """The signature as a caller sees it: without the context."""
    names: tuple[str, ...]
    required: frozenset[str]
    by_position: int
    """How many arguments a caller may pass by position; -1 where only the signature can tell what goes where."""
    context: str | None
    context_at: int
    is_plain: bool
    """Whether the values of a payload, in order, are the positional arguments."""
    codecs: tuple[Codec, ...]
    raw: tuple[int, ...]
    """The parameters whose JSON is decoded by their own codec."""
    decode: Callable[[bytes], Any]
    result: Codec
    exact: Any
    """The type of the result where each of its values that can be encoded comes back equal."""
    allows_none: bool
    """Whether None is a result of the annotated type."""
    keeps_bytes: bool
    """Whether bytes are stored as they are."""


class UnresolvedAnnotation(InvalidInputError):
    """An annotation names what is not defined."""


class Handler:
    """Calls one function with what a payload and its context hold.

    A payload is a JSON object of arguments by name. A parameter annotated `Context` is given the context instead; a
    function without any other parameter is called whatever the payload is. Types that cannot be carried are refused
    here, or at the first use where an annotation names what is not defined yet.
    """

    def __init__(self, function: Callable[..., Any], *, task: str | None = None) -> None:
        """Wrap a function; with a task's name its results are read back by type, so that bytes need an annotation."""
        self.function = function
        self.name = str(getattr(function, "__name__", None) or type(function).__name__) if task is None else task
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"task {self.name!r} is a generator; return the result, such as a list, and yield nothing")
        self._is_task = task is not None
        kind: Any = type(function)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(kind.__call__)
        with suppress(UnresolvedAnnotation):
            _ = self.shape

    @cached_property
    def shape(self) -> _Shape:
        """What the function's signature asks for; its annotations must be resolvable by the first use."""
        try:
            return self._shape()
        except (NameError, AttributeError) as error:
            raise UnresolvedAnnotation(
                "invalid_input",
                f"task {self.name!r}: an annotation cannot be resolved ({reason(error)}); define or import the name "
                "at module level before the task is first used",
            ) from error

    def _shape(self) -> _Shape:
        signature = inspect.signature(self.function, eval_str=True)
        parameters = signature.parameters.values()
        context = next((each for each in parameters if each.annotation is Context), None)
        called = [each for each in parameters if each is not context]
        codecs = tuple(self._codec(_field_type(each), f"parameter {each.name!r}") for each in called)
        fields = [
            (each.name, codec.field) if _is_required(each) else (each.name, codec.field, msgspec.UNSET)
            for each, codec in zip(called, codecs, strict=True)
        ]
        arguments = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
        returned = _returned(signature.return_annotation)
        result = self._codec(returned, "result")
        keeps_bytes = returned is bytes or (returned is Any and not self._is_task)
        return _Shape(
            signature=signature,
            call=signature.replace(parameters=called),
            names=tuple(each.name for each in called),
            required=frozenset(each.name for each in called if _is_required(each)),
            by_position=sum(each.kind in _BY_POSITION for each in called)
            if all(each.kind in _BY_NAME for each in parameters)
            else -1,
            context=None if context is None else context.name,
            context_at=0 if context is None else list(parameters).index(context),
            is_plain=all(each.kind in _BY_POSITION and each.default is Parameter.empty for each in called)
            and (context is None or context.kind in _BY_POSITION),
            codecs=codecs,
            raw=tuple(at for at, codec in enumerate(codecs) if codec.is_raw),
            decode=decoder_of(arguments).decode,
            result=result,
            exact=returned if returned in (int, str, bool) else None,
            allows_none=_allows_none(result),
            keeps_bytes=keeps_bytes,
        )

    def _codec(self, annotation: Any, place: str) -> Codec:
        try:
            return codec_of(annotation)
        except NotSerializable as refused:
            raise self._invalid(place, refused) from None

    def _invalid(self, place: str, refused: object) -> InvalidInputError:
        return InvalidInputError("invalid_input", f"task {self.name!r}, {place}: {refused}")

    @cached_property
    def _defaults(self) -> Mapping[str, object]:
        """The defaults that can be carried, by the names of their parameters."""
        defaults: dict[str, object] = {}
        has_gap = False
        for each, codec in zip(self.shape.call.parameters.values(), self.shape.codecs, strict=True):
            # After one that is left out, the next cannot be passed by position.
            if each.default is Parameter.empty or (has_gap and each.kind is Parameter.POSITIONAL_ONLY):
                continue
            try:
                codec.checked(each.default)
                defaults[each.name] = each.default
            except NotSerializable:
                has_gap = True
        return defaults

    def encode(self, args: Sequence[object], kwargs: Mapping[str, object], *, is_canonical: bool = False) -> bytes:
        """The payload of a call; TypeError for a call the function would refuse, `invalid_input` for a wrong value.

        The canonical payload is the same for every call with equal arguments: defaults are written out, and sets and
        the keys of dicts are sorted.
        """
        shape = self.shape
        if is_canonical:
            given: Mapping[str, object] = {**self._defaults, **self._given(args, kwargs)}
            expected = tuple([given.get(name, msgspec.UNSET) for name in shape.names])
        elif not kwargs and len(args) == len(shape.names) == shape.by_position:
            given = dict(zip(shape.names, args, strict=True))
            expected = tuple(args)
        else:
            given = self._given(args, kwargs)
            expected = tuple([given.get(name, msgspec.UNSET) for name in shape.names])
        try:
            payload = encode(self._with_raw(given) if shape.raw else given)
            values = self._values(payload)
            if values == expected:
                return self._canonical(values, payload) if is_canonical else payload
        except Exception:
            raise self._refused_call(given) from None
        raise self._refused_call(given)

    def _values(self, payload: bytes) -> tuple[Any, ...]:
        values = msgspec.structs.astuple(self.shape.decode(payload))
        return self._without_raw(values) if self.shape.raw else values

    def _canonical(self, values: Sequence[object], payload: bytes) -> bytes:
        """The canonical payload of decoded arguments, or the one given where their order has a meaning."""
        # What was decoded has the types of the parameters: 1 and 1.0 for a float are one.
        typed = {n: value for n, value in zip(self.shape.names, values, strict=True) if value is not msgspec.UNSET}
        ordered = canonical(typed, encode(self._with_raw(typed)))
        return ordered if self._values(ordered) == values else payload

    def _given(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """The arguments by name, in the order of the parameters, without those left to their defaults."""
        shape = self.shape
        if len(args) <= shape.by_position:
            given = {**dict(zip(shape.names, args, strict=False)), **kwargs}
            ordered = {name: given[name] for name in shape.names if name in given}
            # As many names as arguments: none is given twice, and none is unknown.
            if len(ordered) == len(args) + len(kwargs) and shape.required <= ordered.keys():
                return ordered
        parameters = shape.call.parameters
        if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            unknown = ", ".join(repr(name) for name in kwargs if name not in parameters)
            if unknown:
                known = ", ".join(shape.names) or "none"
                raise TypeError(f"task {self.name!r}: no such argument: {unknown}; its arguments are: {known}")
        try:
            return shape.call.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"task {self.name!r}: {error}") from None

    def _with_raw(self, given: Mapping[str, object]) -> dict[str, object]:
        shape, fields = self.shape, dict(given)
        for at in shape.raw:
            if (name := shape.names[at]) in fields:
                fields[name] = msgspec.Raw(shape.codecs[at].encode(fields[name]))
        return fields

    def _refused_call(self, given: Mapping[str, object]) -> InvalidInputError:
        for name, codec in zip(self.shape.names, self.shape.codecs, strict=True):
            try:
                if name in given:
                    codec.checked(given[name])
            except NotSerializable as refused:
                return self._invalid(f"parameter {name!r}", refused)
        return self._invalid("arguments", f"{shown(dict(given))} cannot be carried as JSON")

    def _without_raw(self, values: Sequence[Any]) -> tuple[Any, ...]:
        decoded = list(values)
        for at in self.shape.raw:
            if decoded[at] is not msgspec.UNSET:
                try:
                    decoded[at] = self.shape.codecs[at].decode(bytes(decoded[at]))
                except Exception as error:
                    raise NotSerializable(f"{reason(error)} - at `$.{self.shape.names[at]}`") from None
        return tuple(decoded)

    def bind(self, payload: bytes, context: Context | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of a call; `invalid_input` for a payload that does not fit."""
        shape = self.shape
        try:
            values = msgspec.structs.astuple(shape.decode(payload)) if shape.names else ()
            if shape.raw:
                values = self._without_raw(values)
        except Exception as error:
            raise self._invalid("payload", f"does not fit its parameters: {reason(error)}") from None
        if shape.is_plain:
            if shape.context is not None:
                at = shape.context_at
                values = (*values[:at], context, *values[at:])
            return (values, _NO_ARGUMENTS[1]) if values else _NO_ARGUMENTS
        given = OrderedDict(
            (name, value) for name, value in zip(shape.names, values, strict=True) if value is not msgspec.UNSET
        )
        if shape.context is not None:
            given[shape.context] = context
        if shape.by_position >= 0:
            return (), given
        bound = inspect.BoundArguments(shape.signature, given)
        return bound.args, bound.kwargs

    def encode_result(self, result: object) -> bytes | None:
        """What an execution stores of a result: nothing of None, bytes as they are, JSON of anything else.

        `invalid_input` for a result that is not of the annotated type, or would not come back equal.
        """
        shape = self.shape
        if result is None and shape.allows_none:
            return None
        try:
            if type(result) is shape.exact:
                return encode(result)
            if isinstance(result, bytes) and shape.keeps_bytes:
                return bytes(result)
            if shape.result.annotation is bytes:
                raise NotSerializable(f"expected bytes, got {shown(result)} ({type(result).__name__})")
            return shape.result.checked(result, verb="return")
        except NotSerializable as refused:
            raise self._invalid("result", refused) from None
        except Exception:
            raise self._invalid("result", shape.result.refusal(result, verb="return")) from None

    def decode_result(self, payload: bytes | None) -> Any:
        """The function's result, of the type it names; `corruption` where what is stored does not fit that type."""
        shape = self.shape
        if payload is None and shape.allows_none:
            return None
        try:
            if payload is None:
                raise NotSerializable("nothing is stored")
            return payload if shape.result.annotation is bytes else shape.result.decode(payload)
        except Exception as error:
            raise InvalidInputError(
                "corruption",
                f"task {self.name!r}: the stored result is no {name_of(shape.result.annotation)}: {reason(error)}; "
                "it may be from another version of the task",
            ) from None


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind in _BY_NAME | _BY_POSITION


def _field_type(parameter: Parameter) -> Any:
    """The type of what a payload holds for a parameter."""
    kind = Any if parameter.annotation is Parameter.empty else parameter.annotation
    is_unpacked = get_origin(kind) is Unpack
    match parameter.kind:
        case Parameter.VAR_POSITIONAL:
            return get_args(kind)[0] if is_unpacked else GenericAlias(tuple, (kind, ...))
        case Parameter.VAR_KEYWORD:
            return get_args(kind)[0] if is_unpacked else GenericAlias(dict, (str, kind))
        case _:
            return kind


def _returned(annotation: Any) -> Any:
    """The type of a function's result, once awaited where the function returns an awaitable."""
    if annotation is inspect.Signature.empty:
        return Any
    if annotation in (NoReturn, Never):
        return None
    if get_origin(annotation) in (Awaitable, Coroutine):
        return _returned(get_args(annotation)[-1])
    return annotation


def _allows_none(codec: Codec) -> bool:
    try:
        return codec.decode(b"null") is None
    except Exception:
        return False

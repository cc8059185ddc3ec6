"""Handlers: functions that a worker calls with the arguments of a payload."""

import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import Parameter
from types import GenericAlias
from typing import Any, NamedTuple, Never, NoReturn, Unpack, get_args, get_origin

import msgspec

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.text import listed, shown
from flowfabric.worker.canonical import canonical
from flowfabric.worker.codec import Codec, NotSerializable, codec_of, decoder_of, encode, name_of, reason, types_in
from flowfabric.worker.context import Context

_BY_NAME = frozenset({Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY})
_BY_POSITION = frozenset({Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD})
_CONTEXT_NAMES = frozenset({"ctx", "context"})
_NO_ARGUMENTS: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})


class _Shape(NamedTuple):
    """What a handler needs to know about the signature of its function."""

    signature: inspect.Signature
    call: inspect.Signature
    """The signature without the context, as submitters see it."""
    names: tuple[str, ...]
    required: frozenset[str]
    by_position: int
    """How many arguments may be passed by position; -1 if only `Signature.bind` can tell."""
    context: str | None
    context_at: int
    is_plain: bool
    """Whether the values of a payload, in order, are exactly the positional arguments."""
    codecs: tuple[Codec, ...]
    raw: tuple[int, ...]
    """The indices of parameters that are decoded by their own codec."""
    decode: Callable[[bytes], Any]
    result: Codec
    exact: Any
    """The type of the result, if every value of it decodes to an equal one and needs no check."""
    allows_none: bool
    """Whether None is a value of the annotated type of the result."""
    keeps_bytes: bool
    """Whether a result of bytes is stored as it is, without JSON."""


class UnresolvedAnnotation(InvalidInputError):
    """An annotation uses a name that is not defined."""


class Handler:
    """A function whose arguments come from a payload and whose result is stored.

    A payload is a JSON object of arguments by name. A parameter annotated with `Context` gets the context instead. A
    function without other parameters accepts any payload. Types that cannot be stored as JSON are refused when the
    handler is created, or at its first use if an annotation names something that is not defined yet.
    """

    def __init__(self, function: Callable[..., Any], *, task: str | None = None) -> None:
        """Wrap a function; results of a task are decoded to the annotated type, so a task must annotate bytes."""
        self.function = function
        self.name = str(getattr(function, "__name__", None) or type(function).__name__) if task is None else task
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"task {self.name!r} is a generator; return its result, for example as a list, instead of yielding"
            )
        self._is_task = task is not None
        kind: Any = type(function)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(kind.__call__)
        with suppress(UnresolvedAnnotation):
            _ = self.shape

    @cached_property
    def shape(self) -> _Shape:
        """The signature of the function; its annotations must be defined when this is first used."""
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
        for each in called:
            if any(kind is Context for kind in types_in(each.annotation)):
                got = f"{context.name!r} is one already" if context else f"this one is {name_of(each.annotation)}"
                raise self._invalid(f"parameter {each.name!r}", f"annotate one parameter exactly `Context`; {got}")
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

    def _codec(self, annotation: Any, part: str) -> Codec:
        try:
            return codec_of(annotation)
        except NotSerializable as refused:
            raise self._invalid(part, refused) from None

    def _invalid(self, part: str, refused: object) -> InvalidInputError:
        return InvalidInputError("invalid_input", f"task {self.name!r}, {part}: {refused}")

    @cached_property
    def _defaults(self) -> Mapping[str, object]:
        """The defaults that can be stored as JSON, by the names of their parameters."""
        defaults: dict[str, object] = {}
        has_gap = False
        for each, codec in zip(self.shape.call.parameters.values(), self.shape.codecs, strict=True):
            # After a gap, a positional-only argument cannot be passed.
            if each.default is Parameter.empty or (has_gap and each.kind is Parameter.POSITIONAL_ONLY):
                continue
            try:
                codec.checked(each.default)
                defaults[each.name] = each.default
            except NotSerializable:
                has_gap = True
        return defaults

    def encode(self, args: Sequence[object], kwargs: Mapping[str, object], *, is_canonical: bool = False) -> bytes:
        """Return the payload of a call.

        Raises TypeError if the function does not accept these arguments, and `invalid_input` for a value of a wrong
        type. The canonical payload is the same for all calls with equal arguments: defaults are written out, and sets
        and keys of dicts are sorted.
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
        """Return the canonical payload of decoded arguments, or the original one if sorting changes their value."""
        # Decoded values have the types of the parameters: 1 and 1.0 for a float are the same.
        typed = {
            name: value for name, value in zip(self.shape.names, values, strict=True) if value is not msgspec.UNSET
        }
        ordered = canonical(typed, encode(self._with_raw(typed)))
        return ordered if self._values(ordered) == values else payload

    def arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, object, Codec]]:
        """Yield the arguments of a call by the names of their parameters, each with the codec of the parameter.

        Raises TypeError if the function does not accept these arguments.
        """
        given = self._given(args, kwargs)
        for name, codec in zip(self.shape.names, self.shape.codecs, strict=True):
            if name in given:
                yield name, given[name], codec

    @property
    def returns_bytes(self) -> bool:
        """Whether results are bytes, which are stored as they are and not as JSON."""
        return self.shape.result.annotation is bytes

    def _given(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Return the passed arguments by name, in the order of the parameters."""
        shape = self.shape
        if len(args) <= shape.by_position:
            given = {**dict(zip(shape.names, args, strict=False)), **kwargs}
            ordered = {name: given[name] for name in shape.names if name in given}
            # As many names as arguments: none was passed twice, and none is unknown.
            if len(ordered) == len(args) + len(kwargs) and shape.required <= ordered.keys():
                return ordered
        parameters = shape.call.parameters
        if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            unknown = ", ".join(repr(name) for name in kwargs if name not in parameters)
            if unknown:
                raise TypeError(
                    f"task {self.name!r}: no such argument: {unknown}; its arguments are: {listed(shape.names)}"
                )
        try:
            return shape.call.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"task {self.name!r}: {self._misfit(args, error)}") from None

    def _misfit(self, args: Sequence[object], error: TypeError) -> str:
        """Return why arguments do not fit the function, and what to write."""
        shape = self.shape
        allowed = sum(each.kind in _BY_POSITION for each in shape.call.parameters.values())
        if len(args) > allowed and str(error) == "too many positional arguments":
            arguments = "argument" if allowed == 1 else "arguments"
            return f"takes {allowed} positional {arguments}, got {len(args)}; its arguments are: {listed(shape.names)}"
        for name in _CONTEXT_NAMES & shape.required:
            if shape.context is None and shape.call.parameters[name].annotation is Parameter.empty:
                return f"{error}; parameter {name!r} has no annotation: write `{name}: Context` to get the context"
        return str(error)

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
                return self.refused_argument(name, refused)
        return self._invalid("arguments", f"{shown(dict(given))} cannot be stored as JSON")

    def refused_argument(self, name: str, refused: object) -> InvalidInputError:
        """Return the error of an argument that cannot be stored."""
        is_bare = self.shape.call.parameters[name].annotation is Parameter.empty
        part = f"parameter {name!r}, which has no annotation" if is_bare else f"parameter {name!r}"
        return self._invalid(part, refused)

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
        """Return the arguments of a call; raise `invalid_input` for a payload that does not fit."""
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
        """Return what to store of a result: None for None, bytes as they are, and JSON for anything else.

        Raises `invalid_input` for a result that is not of the annotated type or would not decode to an equal value.
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
        """Return the stored result in the annotated type; raise `corruption` if it does not fit that type."""
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
                f"task {self.name!r}: the stored result cannot be read as {name_of(shape.result.annotation)}: "
                f"{reason(error)}; it may have been stored by another version of the task",
            ) from None


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind in _BY_NAME | _BY_POSITION


def _field_type(parameter: Parameter) -> Any:
    """Return the type of the payload's value for a parameter."""
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
    """Return the type of a function's result, after awaiting it if it is an awaitable."""
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

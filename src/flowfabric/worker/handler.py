"""A function as a worker calls it: its arguments come from a payload, its result goes to one."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from inspect import Parameter
from types import GenericAlias
from typing import Any, NamedTuple

import msgspec

from flowfabric.worker.codec import decoder, encode
from flowfabric.worker.context import Context

_BY_POSITION = frozenset({Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD})
_NO_ARGUMENTS: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})


class _Shape(NamedTuple):
    """What a signature asks for."""

    signature: inspect.Signature
    call: inspect.Signature
    """The signature as a caller sees it: without the context."""
    names: tuple[str, ...]
    context: str | None
    context_at: int
    is_plain: bool
    """Whether the values of a payload, in order, are the positional arguments."""
    decode: Callable[[bytes], Any]


class Handler:
    """Calls one function with what a payload and its context hold.

    A payload is a JSON object of arguments by name. A parameter annotated `Context` is given the context instead; a
    function without any other parameter is called whatever the payload is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"{function!r} is a generator; a handler returns its result")
        self.function = function
        kind: Any = type(function)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(kind.__call__)

    @cached_property
    def shape(self) -> _Shape:
        """What the function's signature asks for; its annotations must be known by the first use."""
        signature = inspect.signature(self.function, eval_str=True)
        fields: list[tuple[str, Any, Any] | tuple[str, Any]] = []
        context, context_at, is_plain = None, 0, True
        for at, parameter in enumerate(signature.parameters.values()):
            kind = Any if parameter.annotation is Parameter.empty else parameter.annotation
            is_plain = is_plain and parameter.kind in _BY_POSITION
            if kind is Context:
                context, context_at = parameter.name, at
                continue
            match parameter.kind:
                case Parameter.VAR_POSITIONAL:
                    fields.append((parameter.name, GenericAlias(list, (kind,)), msgspec.UNSET))
                case Parameter.VAR_KEYWORD:
                    fields.append((parameter.name, GenericAlias(dict, (str, kind)), msgspec.UNSET))
                case _ if parameter.default is Parameter.empty:
                    fields.append((parameter.name, kind))
                case _:
                    is_plain = False
                    fields.append((parameter.name, kind, msgspec.UNSET))
        arguments = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
        names = tuple(field[0] for field in fields)
        call = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != context])
        return _Shape(signature, call, names, context, context_at, is_plain, decoder(arguments).decode)

    def encode(self, args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
        """The payload of a call; a call the function would refuse is a TypeError."""
        return encode(self.shape.call.bind(*args, **kwargs).arguments)

    def bind(self, payload: bytes, context: Callable[[], Context]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of a call; a payload that does not fit is an error."""
        shape = self.shape
        values = msgspec.structs.astuple(shape.decode(payload)) if shape.names else ()
        if shape.is_plain:
            if shape.context is not None:
                at = shape.context_at
                values = (*values[:at], context(), *values[at:])
            return (values, _NO_ARGUMENTS[1]) if values else _NO_ARGUMENTS
        given = OrderedDict(
            (name, value) for name, value in zip(shape.names, values, strict=True) if value is not msgspec.UNSET
        )
        if shape.context is not None:
            given[shape.context] = context()
        bound = inspect.BoundArguments(shape.signature, given)
        return bound.args, bound.kwargs

    def decode_result(self, payload: bytes | None) -> Any:
        """The function's result, of the type it names, from what an execution kept of it."""
        if payload is None or self.shape.signature.return_annotation is bytes:
            return payload
        return self._read_result(payload)

    @cached_property
    def _read_result(self) -> Callable[[bytes], Any]:
        annotation = self.shape.signature.return_annotation
        return decoder(Any if annotation is inspect.Signature.empty else annotation).decode

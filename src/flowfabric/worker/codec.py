"""How arguments and results become JSON and come back equal.

msgspec carries what it knows by itself; Pydantic carries its own models, unions with them, and the types msgspec does
not know. A value that would not come back equal is refused.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import lru_cache, partial
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pydantic
from msgspec.inspect import CustomType, DataclassType, Field, Type, type_info
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import to_json

from flowfabric.model.text import shorten, shown

_SECRETS = (pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret)


_BYTES = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_BYTES_ADVICE = "; set model_config = ConfigDict(ser_json_bytes='base64', val_json_bytes='base64')"


class NotSerializable(Exception):
    """A type or a value that JSON cannot carry so that it comes back equal; the text says why and what to do."""


class Codec:
    """Carries the values of one annotation as JSON."""

    __slots__ = ("annotation", "decode", "encode", "field")

    def __init__(
        self, annotation: Any, field: Any, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
    ) -> None:
        self.annotation = annotation
        self.field = field
        """What the value is decoded to as a field of a msgspec struct: the annotation, or JSON to be decoded here."""
        self.encode = encode
        """The JSON of a value; any exception means that there is none."""
        self.decode = decode
        """The value of a JSON text; any exception means that it does not fit."""

    @property
    def is_raw(self) -> bool:
        """Whether a field of a struct holds JSON that is still to be decoded."""
        return self.field is msgspec.Raw

    def checked(self, value: object, *, verb: str = "pass") -> bytes:
        """The JSON of a value that comes back equal; NotSerializable otherwise, with what to pass or return instead."""
        try:
            payload = self.encode(value)
            if self.decode(payload) == value:
                return payload
        except Exception:
            raise self.refusal(value, verb=verb) from None
        raise self.refusal(value, verb=verb)

    def refusal(self, value: object, *, verb: str = "pass") -> NotSerializable:
        """Why a value is not carried, and what to write instead."""
        if advice := _advice(value, self.annotation, verb):
            return NotSerializable(f"{_described(value)} cannot be carried as JSON: {advice}")
        expected = f"expected {name_of(self.annotation)}, got {_described(value)}"
        try:
            payload = self.encode(value)
        except Exception as error:
            return NotSerializable(expected + _encoding_fault(error))
        try:
            back = self.decode(payload)
        except Exception as error:
            return NotSerializable(f"{expected}: {reason(error)}")
        return NotSerializable(
            f"{expected}, which would come back as {_described(back)}; {self._cure(value, back, verb)}"
        )

    def _cure(self, value: object, back: object, verb: str) -> str:
        if self.annotation in (Any, object):
            return "annotate it with its type"
        if type(value) is not type(back):
            union = "; models of a union need a Literal field that tells them apart"
            cure = f"{verb} a {type(back).__name__} or annotate it as {type(value).__name__}"
            return cure + union if isinstance(value, pydantic.BaseModel) else cure
        if shown(value) == shown(back):
            return f"the two are not equal: give {type(value).__name__} an __eq__ that compares its values"
        return "annotate what it holds with types that JSON keeps"


def codec_of(annotation: Any) -> Codec:
    """The codec of an annotation; NotSerializable when there is none, NameError when a name is not defined yet."""
    _refuse_secrets(_mentioned(annotation))
    decoder: msgspec.json.Decoder[Any] | None = None
    foreign: tuple[Any, ...] = ()
    fault: Exception
    try:
        decoder = decoder_of(annotation)
        foreign = tuple(_foreign_types(annotation))
        if not foreign and not _has_foreign_metadata(annotation):
            return Codec(annotation, annotation, encode, decoder.decode)
    except NameError:
        raise
    except Exception as error:
        fault = error
    try:
        adapter = _adapter(annotation)
        return Codec(annotation, msgspec.Raw, _dumps(adapter), _loads(adapter))
    except (NameError, NotSerializable):
        raise
    except Exception as error:
        fault = error
    if decoder is not None and foreign:
        # Structs that hold models: msgspec carries the structs, the hooks carry the models.
        try:
            for kind in foreign:
                _hooked_loads(kind)
            return Codec(annotation, annotation, encode, decoder.decode)
        except (NameError, NotSerializable):
            raise
        except Exception as error:
            fault = error
    raise NotSerializable(
        f"{name_of(annotation)} cannot be carried as JSON ({reason(fault)}); use JSON's own types, a dataclass, "
        "a msgspec Struct or a Pydantic model, and no structs and models in one union"
    )


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of JSON to a type that msgspec knows, with models and the like within it."""
    return msgspec.json.Decoder(kind, dec_hook=_from_plain)


def _to_plain(value: Any) -> object:
    if isinstance(value, _SECRETS):
        raise NotSerializable("a secret is never stored; pass the name it can be looked up by")
    if isinstance(value, msgspec.Raw):
        # What this hook returned for the key of a dict.
        raise NotSerializable("the keys of a dict must be texts, numbers or dates")
    return msgspec.Raw(to_json(value, by_alias=False, round_trip=True))


def _from_plain(kind: Any, value: object) -> object:
    return _hooked_loads(kind)(encode(value))


encode = msgspec.json.Encoder(enc_hook=_to_plain).encode
"""The JSON of a value that msgspec knows, with models and the like within it."""


def _adapter(kind: Any) -> "pydantic.TypeAdapter[Any]":
    adapter: pydantic.TypeAdapter[Any]
    try:
        adapter = pydantic.TypeAdapter(kind, config=_BYTES)
    except pydantic.PydanticUserError as error:
        if error.code != "type-adapter-config-unused":
            raise
        adapter = pydantic.TypeAdapter(kind)
    adapter.rebuild(raise_errors=True)
    classes = [leaf for leaf in _leaves(adapter.core_schema) if isinstance(leaf, type)]
    fields = (f.annotation for c in classes if issubclass(c, pydantic.BaseModel) for f in c.model_fields.values())
    _refuse_secrets(part for found in (*classes, *fields) for part in _mentioned(found))
    return adapter


def _dumps(adapter: "pydantic.TypeAdapter[Any]") -> Callable[[Any], bytes]:
    # No warnings: what is not of the type does not come back equal.
    return partial(adapter.serializer.to_json, by_alias=False, round_trip=True, warnings=False)


def _loads(adapter: "pydantic.TypeAdapter[Any]") -> Callable[[bytes], Any]:
    # Written by field name; a payload of another writer may use the aliases.
    return partial(adapter.validator.validate_json, by_alias=True, by_name=True)


@lru_cache(maxsize=1024)
def _hooked_loads(kind: Any) -> Callable[[bytes], Any]:
    return _loads(_adapter(kind))


def _refuse_secrets(types: Iterable[Any]) -> None:
    for kind in types:
        if isinstance(kind, type) and issubclass(kind, _SECRETS):
            raise NotSerializable(
                f"a {kind.__name__} is a secret, and a secret is never stored; pass the name it can be looked up by"
            )


def _mentioned(annotation: Any) -> Iterator[Any]:
    """The types an annotation is written with."""
    yield annotation
    yield get_origin(annotation)
    for part in get_args(annotation):
        yield from _mentioned(part)


def _has_foreign_metadata(annotation: Any) -> bool:
    return any(
        not isinstance(note, msgspec.Meta)
        for part in _mentioned(annotation)
        if get_origin(part) is Annotated
        for note in part.__metadata__
    )


def _foreign_types(annotation: Any) -> Iterator[Any]:
    """The types within an annotation that are Pydantic's, or that msgspec leaves to its hooks."""
    seen: dict[int, Any] = {}
    pending: list[Any] = [type_info(annotation)]
    while pending:
        match pending.pop():
            case tuple() as several:
                pending += several
            case (Type() | Field()) as part if id(part) not in seen:
                seen[id(part)] = part
                if isinstance(part, CustomType) or (
                    isinstance(part, DataclassType) and is_pydantic_dataclass(part.cls)
                ):
                    yield part.cls
                pending += msgspec.structs.astuple(part)


def _leaves(schema: Any) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict | list | tuple):
            if id(part) not in seen:
                seen[id(part)] = part
                pending += part.values() if isinstance(part, dict) else part
        else:
            yield part


def name_of(annotation: Any) -> str:
    """An annotation as a message shows it."""
    if annotation is None:
        return "None"
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return shorten(str(annotation).replace("typing.", ""))


def reason(error: BaseException) -> str:
    """What a library says is wrong, on one line."""
    if isinstance(error, pydantic.ValidationError):
        faults = [(".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors(include_url=False)]
        return shorten("; ".join(f"{at}: {message}" if at else message for at, message in faults))
    text = str(error).partition("\n\nFor further information")[0].partition(". Set `arbitrary_types_allowed")[0]
    return shorten(" ".join(text.split())) or type(error).__name__


def _encoding_fault(error: Exception) -> str:
    told = f": {reason(error)}"
    return told + _BYTES_ADVICE if "invalid utf-8" in told else told


def _described(value: object) -> str:
    return f"{shown(value)} ({type(value).__name__})"


def _advice(value: object, annotation: Any, verb: str) -> str | None:
    """What to write instead of a value that contains something JSON has no form for."""
    for part in _parts(value):
        if isinstance(part, float) and not math.isfinite(part):
            return f"JSON has neither NaN nor infinity; {verb} None or a text instead"
        if isinstance(part, Decimal) and part.is_nan():
            return f"a NaN equals nothing, itself included; {verb} None instead"
        if isinstance(part, _SECRETS):
            return f"a {type(part).__name__} is never stored; {verb} the name the secret can be looked up by"
        if isinstance(part, bytes | bytearray) and annotation in (Any, object):
            return f"annotate it as bytes, or {verb} text"
    return None


def _parts(value: object) -> Iterator[object]:
    """A value and what it holds."""
    seen: dict[int, object] = {}
    pending = [value]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        yield part
        if isinstance(part, dict):
            pending += (*part.keys(), *part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            pending += part
        elif isinstance(part, msgspec.Struct):
            pending += msgspec.structs.astuple(part)
        elif isinstance(part, pydantic.BaseModel):
            pending += (*part.__dict__.values(), part.__pydantic_extra__)
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            pending += (getattr(part, field.name, None) for field in dataclasses.fields(part))

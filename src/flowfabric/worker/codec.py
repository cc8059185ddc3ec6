"""Encodes arguments and results as JSON so that they decode to equal values.

msgspec encodes the types it knows; Pydantic encodes its models, unions with them, and types that msgspec does not
know. A value that would not decode to an equal one is refused.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import lru_cache, partial
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pydantic
from msgspec.inspect import CustomType, DataclassType, Field, Type, type_info
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import PydanticSerializationError, to_json

from flowfabric.model.text import shorten, shown

_SECRETS = (pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret)
_BYTES = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_BYTES_ADVICE = (
    "; set model_config = ConfigDict(ser_json_bytes='base64', val_json_bytes='base64') in the model that holds the "
    "bytes (in a dataclass: __pydantic_config__)"
)


_WRONG_TYPE = re.compile(r"Expected `[^`]*`, got `[^`]*`")
_JSON_TYPES = re.compile(r"(?:Expected|got) `[^`]*`")
_PYTHON_NAMES = {"array": "list", "object": "dict", "null": "None"}
_JSON_NAME = re.compile(rf"\b(?:{'|'.join(_PYTHON_NAMES)})\b")


class NotSerializable(Exception):
    """A type or value that cannot be encoded as JSON and decoded to an equal one; the text says why and what to do."""


class Codec:
    """Encodes and decodes the values of one annotation."""

    __slots__ = ("annotation", "decode", "encode", "field")

    def __init__(
        self, annotation: Any, field: Any, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
    ) -> None:
        self.annotation = annotation
        self.field = field
        """The type of a msgspec field for such values: the annotation, or raw JSON that `decode` takes."""
        self.encode = encode
        """Return the JSON of a value; raises any exception if there is none."""
        self.decode = decode
        """Return the value of a JSON text; raises any exception if it does not fit."""

    @property
    def is_raw(self) -> bool:
        """Whether a field of a struct holds raw JSON for `decode`."""
        return self.field is msgspec.Raw

    def checked(self, value: object, *, verb: str = "pass") -> bytes:
        """Return the JSON of a value; raise NotSerializable if it would not decode to an equal value."""
        try:
            payload = self.encode(value)
            if self.decode(payload) == value:
                return payload
        except Exception:
            raise self.refusal(value, verb=verb) from None
        raise self.refusal(value, verb=verb)

    def refusal(self, value: object, *, verb: str = "pass") -> NotSerializable:
        """Return the error of a value that cannot be encoded: why, and what to pass or return instead."""
        if advice := _advice(value, self.annotation, verb):
            return NotSerializable(f"{_described(value)} cannot be stored as JSON: {advice}")
        expected = f"expected {name_of(self.annotation)}, got {_described(value)}"
        try:
            payload = self.encode(value)
        except Exception as error:
            return NotSerializable(expected + _encoding_fault(error))
        try:
            back = self.decode(payload)
        except Exception as error:
            why = reason(error)
            # msgspec names the types once more.
            return NotSerializable(expected if _WRONG_TYPE.fullmatch(why) else f"{expected}: {why}")
        if self.annotation in (Any, object):
            return NotSerializable(
                f"{_described(value)} would come back as {_described(back)}; annotate it with its type"
            )
        return NotSerializable(
            f"{expected}, which would come back as {_described(back)}; {self._cure(value, back, verb)}"
        )

    def _cure(self, value: object, back: object, verb: str) -> str:
        if type(value) is not type(back):
            union = "; models of a union need a Literal field that tells them apart"
            cure = f"{verb} a {type(back).__name__} or annotate it as {type(value).__name__}"
            return cure + union if isinstance(value, pydantic.BaseModel) else cure
        if shown(value) == shown(back):
            return f"the two are not equal: give {type(value).__name__} an __eq__ that compares its values"
        if (items := _different_items(value, back)) is not None:
            given, expected = (type(item).__name__ for item in items)
            return f"{verb} {expected} objects in it or annotate its contents as {given}"
        return "annotate its contents with types that JSON can represent"


def codec_of(annotation: Any) -> Codec:
    """Return the codec of an annotation; NotSerializable if there is none, NameError if a name is not defined yet."""
    _refuse_unstorable(types_in(annotation))
    decoder: msgspec.json.Decoder[Any] | None = None
    foreign: tuple[Any, ...] = ()
    fault: Exception
    try:
        decoder = decoder_of(annotation)
        foreign = tuple(_foreign_types(annotation))
        _refuse_unstorable(foreign)
        if not foreign and not _has_foreign_metadata(annotation):
            return Codec(annotation, annotation, encode, decoder.decode)
    except (NameError, NotSerializable):
        raise
    except Exception as error:
        fault = error
    try:
        return Codec(annotation, msgspec.Raw, *_dumps_and_loads(annotation))
    except (NameError, NotSerializable):
        raise
    except Exception as error:
        fault = error
    if decoder is not None and foreign:
        # Structs that hold models: msgspec encodes the structs, its hooks encode the models.
        try:
            for kind in foreign:
                _hooked_loads(kind)
            return Codec(annotation, annotation, encode, decoder.decode)
        except (NameError, NotSerializable):
            raise
        except Exception as error:
            fault = error
    raise NotSerializable(
        f"{name_of(annotation)} cannot be stored as JSON ({reason(fault)}); use JSON's own types, a dataclass, "
        "a msgspec Struct or a Pydantic model, and do not mix structs and models in one union"
    )


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a JSON decoder for a type that msgspec knows and that may contain models."""
    return msgspec.json.Decoder(kind, dec_hook=_from_plain)


def _to_plain(value: Any) -> object:
    if isinstance(value, _SECRETS):
        raise NotSerializable("a secret is never stored; pass the name it can be looked up by")
    if isinstance(value, msgspec.Raw):
        # The hook is called again with its own answer for a key of a dict.
        raise NotSerializable("the keys of a dict must be strings, numbers or dates")
    return msgspec.Raw(to_json(value, by_alias=False, round_trip=True))


def _from_plain(kind: Any, value: object) -> object:
    return _hooked_loads(kind)(encode(value))


encode = msgspec.json.Encoder(enc_hook=_to_plain).encode
"""Return the JSON of a value that msgspec knows and that may contain models."""


def encode_as_its_type(value: object) -> bytes:
    """Return the JSON of a value for a reader that decodes it with the codec of its type."""
    if not dataclasses.is_dataclass(value):
        return encode(value)
    try:
        codec = codec_of(type(value))
    except Exception:
        # No reader can decode it as its type, but one without a type can.
        return encode(value)
    try:
        return codec.encode(value)
    except Exception:
        raise codec.refusal(value) from None


def encode_untyped(value: object) -> bytes:
    """Return the JSON of a value for readers that know no type; raise an exception if JSON cannot represent it."""
    if advice := _advice(value, None, "pass"):
        raise NotSerializable(advice)
    return encode(value)


def _adapter(kind: Any) -> "pydantic.TypeAdapter[Any]":
    return _configured_adapter(kind)[0]


def _configured_adapter(kind: Any) -> "tuple[pydantic.TypeAdapter[Any], bool]":
    """Return the adapter of a type and whether it encodes bytes as base64.

    Pydantic accepts no config for a model, a dataclass or a TypedDict, which may have one of its own.
    """
    adapter: pydantic.TypeAdapter[Any]
    is_configured = True
    try:
        adapter = pydantic.TypeAdapter(kind, config=_BYTES)
    except pydantic.PydanticUserError as error:
        if error.code != "type-adapter-config-unused":
            raise
        adapter, is_configured = pydantic.TypeAdapter(kind), False
    adapter.rebuild(raise_errors=True)
    classes = [leaf for leaf in _leaves(adapter.core_schema) if isinstance(leaf, type)]
    fields = (f.annotation for c in classes if issubclass(c, pydantic.BaseModel) for f in c.model_fields.values())
    _refuse_unstorable(part for found in (*classes, *fields) for part in types_in(found))
    return adapter, is_configured


def _dumps_and_loads(kind: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return the functions that encode and decode the values of a type with Pydantic."""
    adapter, is_configured = _configured_adapter(kind)
    dumps, loads = _dumps(adapter), _loads(adapter)
    if is_configured or _has_own_config(kind):
        return dumps, loads
    # A dataclass or a TypedDict without a config: Pydantic writes its bytes as text. As the item of a tuple it takes
    # the config of the tuple, so a value whose bytes are not text is stored as an array of one item.
    in_array = _adapter(GenericAlias(tuple, (kind,)))
    dumps_array, loads_array = _dumps(in_array), _loads(in_array)

    def dumps_either(value: Any) -> bytes:
        try:
            return dumps(value)
        except PydanticSerializationError:
            return dumps_array((value,))

    def loads_either(payload: bytes) -> Any:
        try:
            return loads(payload)
        except pydantic.ValidationError:
            if not payload.lstrip().startswith(b"["):
                raise
            return loads_array(payload)[0]

    return dumps_either, loads_either


def _has_own_config(kind: Any) -> bool:
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    is_model = isinstance(plain, type) and issubclass(plain, pydantic.BaseModel)
    return is_model or hasattr(plain, "__pydantic_config__")


def _dumps(adapter: "pydantic.TypeAdapter[Any]") -> Callable[[Any], bytes]:
    # No warnings: a value of another type is refused because it does not decode to an equal one.
    return partial(adapter.serializer.to_json, by_alias=False, round_trip=True, warnings=False)


def _loads(adapter: "pydantic.TypeAdapter[Any]") -> Callable[[bytes], Any]:
    # We write field names; payloads written by others may use aliases.
    return partial(adapter.validator.validate_json, by_alias=True, by_name=True)


@lru_cache(maxsize=1024)
def _hooked_loads(kind: Any) -> Callable[[bytes], Any]:
    return _loads(_adapter(kind))


def _refuse_unstorable(types: Iterable[Any]) -> None:
    for kind in types:
        if kind is Callable:
            raise NotSerializable("a Callable cannot be stored as JSON; pass the name the function can be looked up by")
        if isinstance(kind, type) and issubclass(kind, _SECRETS):
            raise NotSerializable(
                f"a {kind.__name__} is a secret, and a secret is never stored; pass the name it can be looked up by"
            )


def types_in(annotation: Any) -> Iterator[Any]:
    """Yield every type that an annotation names."""
    yield annotation
    yield get_origin(annotation)
    for part in get_args(annotation):
        yield from types_in(part)


def _has_foreign_metadata(annotation: Any) -> bool:
    return any(
        not isinstance(note, msgspec.Meta)
        for part in types_in(annotation)
        if get_origin(part) is Annotated
        for note in part.__metadata__
    )


def _foreign_types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation that belong to Pydantic or that msgspec leaves to its hooks."""
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
    """Return an annotation as it is shown in messages."""
    if annotation is None:
        return "None"
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return shorten(str(annotation).replace("typing.", ""))


def reason(error: BaseException) -> str:
    """Return the message of a library error, on one line."""
    if isinstance(error, pydantic.ValidationError):
        faults = [(".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors(include_url=False)]
        return shorten("; ".join(f"{at}: {message}" if at else message for at, message in faults))
    given = str(error)
    if isinstance(error, msgspec.ValidationError):
        given = _JSON_TYPES.sub(lambda names: _JSON_NAME.sub(lambda name: _PYTHON_NAMES[name[0]], names[0]), given)
    text = given.partition("\n\nFor further information")[0].partition(". Set `arbitrary_types_allowed")[0]
    return shorten(" ".join(text.split())) or type(error).__name__


def _encoding_fault(error: Exception) -> str:
    text = f": {reason(error)}"
    return text + _BYTES_ADVICE if "invalid utf-8" in text else text


def _different_items(value: object, back: object) -> tuple[object, object] | None:
    """Return the first item of a collection that came back as another type, and what came back."""
    pairs: list[tuple[object, object]] = [(value, back)]
    while pairs:
        given, found = pairs.pop()
        if type(given) is not type(found):
            return given, found
        if isinstance(given, list | tuple) and isinstance(found, list | tuple):
            pairs += reversed(list(zip(given, found, strict=False)))
        elif isinstance(given, dict) and isinstance(found, dict):
            pairs += reversed([(item, found[key]) for key, item in given.items() if key in found])
    return None


def _described(value: object) -> str:
    return f"{shown(value)} ({type(value).__name__})"


def _advice(value: object, annotation: Any, verb: str) -> str | None:
    """Return what to write instead of a value that contains something JSON cannot represent."""
    for part in parts_in(value):
        if isinstance(part, float) and not math.isfinite(part):
            return f"JSON has neither NaN nor infinity; {verb} None or a string instead"
        if isinstance(part, Decimal) and part.is_nan():
            return f"NaN is not equal to itself; {verb} None instead"
        if isinstance(part, _SECRETS):
            return f"a {type(part).__name__} is never stored; {verb} the name the secret can be looked up by"
        if isinstance(part, bytes | bytearray) and annotation in (Any, object):
            return f"annotate it as bytes, or {verb} a string"
    return None


def parts_in(value: object) -> Iterator[object]:
    """Yield a value and everything it contains."""
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

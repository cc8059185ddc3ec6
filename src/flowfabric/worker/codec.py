"""How arguments and results travel: as JSON, decoded to the types a function names."""

from typing import Any

import msgspec


def _plain(value: Any) -> object:
    """What JSON holds of a Pydantic model; msgspec knows every other type it can carry."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"a {type(value).__name__} cannot be carried as JSON")


def _typed(kind: Any, value: object) -> object:
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    raise NotImplementedError(f"a {kind.__name__} cannot be made from JSON")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


def encode(value: object) -> bytes:
    """The JSON text of a value."""
    return _encode(value)


def encode_result(result: object) -> bytes | None:
    """What an execution keeps of a result: nothing of None, bytes as they are, JSON of anything else."""
    if result is None or type(result) is bytes:
        return result
    return _encode(result)


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of JSON text to this type."""
    return msgspec.json.Decoder(kind, dec_hook=_typed)

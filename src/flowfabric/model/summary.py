"""The summary of a stream: reading JSON merge patches, and merging them into a document."""

import json
import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from flowfabric.model.errors import EngineError, error
from flowfabric.model.text import shorten, shown

MAX_PATCH_DEPTH = 16
MAX_SUMMARY_BYTES = 1_048_576
"""The largest encoded document."""
NULL = "__ff_null__"
"""The text that sets a value to null, because null in a patch deletes the key."""


class PatchKind(StrEnum):
    """How a summary frame changes the summary."""

    JSON_MERGE_PATCH = "json-merge-patch"


def read_patch(payload: bytes) -> dict[str, Any]:
    """Return the patch in a payload: a JSON object of at most 16 levels of objects and arrays."""
    try:
        patch = _DECODER.decode(payload.decode())
    except UnicodeDecodeError as wrong:
        raise _not_json(f"byte {wrong.start} is not UTF-8") from None
    except json.JSONDecodeError as wrong:
        raise _not_json(f"{wrong.msg} at character {wrong.pos}") from None
    except ValueError as wrong:
        raise _not_json(shorten(str(wrong))) from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(patch, dict):
        raise error("invalid_input", f"patch must be a JSON object, got {shown(patch)}")
    _check_depth(patch)
    return patch


def merge_patch(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return the document with a patch merged in; `null` deletes, `__ff_null__` sets null, and arrays are replaced."""
    merged = dict(document)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            below = merged.get(key)
            merged[key] = merge_patch(below if isinstance(below, dict) else {}, value)
        else:
            merged[key] = _without_sentinel(value)
    return merged


def growth(document: dict[str, Any], patch: dict[str, Any]) -> int:
    """By how many bytes a patch changes the encoded document; found without encoding what the patch does not name."""
    grown, count = 0, len(document)
    for key, value in patch.items():
        is_present = key in document
        before = document.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            grown += growth(before, value)
            continue
        if is_present:
            grown -= _entry_size(key, before)
            count -= 1
        if value is not None:
            grown += _entry_size(key, merge_patch({}, {key: value})[key])
            count += 1
    return grown + max(count - 1, 0) - max(len(document) - 1, 0)


def _entry_size(key: str, value: object) -> int:
    """The bytes of an entry without braces and comma."""
    return len(encode_document({key: value})) - 2


def encode_document(document: dict[str, Any]) -> bytes:
    """Return the JSON text of a document, in ASCII, so that lone surrogates survive."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def decode_document(document_json: bytes) -> dict[str, Any]:
    """Return the document in a stored JSON text."""
    document: dict[str, Any] = json.loads(document_json)
    return document


def _not_json(why: str) -> EngineError:
    return error("invalid_input", f"patch payload is not valid JSON: {why}")


def _too_deep(where: str = "") -> EngineError:
    return error(
        "invalid_input", f"patch_depth_exceeded: a patch may be nested at most {MAX_PATCH_DEPTH} levels deep{where}"
    )


def _check_depth(patch: dict[str, Any]) -> None:
    level: list[Any] = [patch]
    for _ in range(MAX_PATCH_DEPTH):
        inside = (part for each in level for _, part in _parts(each))
        level = [part for part in inside if isinstance(part, dict | list)]
        if not level:
            return
    raise _too_deep(f", and {shorten(_deep_path(patch, MAX_PATCH_DEPTH) or '')} is deeper")


def _parts(value: Any) -> Iterable[tuple[object, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _deep_path(value: Any, depth: int) -> str | None:
    """Return the path to the first object or array so many levels below a value, such as `['steps'][0]`."""
    if not isinstance(value, dict | list):
        return None
    if not depth:
        return ""
    for key, part in _parts(value):
        if (rest := _deep_path(part, depth - 1)) is not None:
            return f"[{key!r}]{rest}"
    return None


def _without_sentinel(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_sentinel(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_sentinel(part) for key, part in value.items()}
    return None if value == NULL else value


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits} is out of range")
    return number


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)

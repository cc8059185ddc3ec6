"""The checks a policy is built from; each refusal names the field and the rule."""

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any
from uuid import UUID

from flowfabric.model.errors import EngineError, error
from flowfabric.model.text import Word, check_text, word_of

MAX_CAPABILITIES = 256
MAX_CAPABILITY_BYTES = 4096
INT32 = 2**31 - 1
# The largest whole number every JSON reader keeps exactly; a clock reading plus it still fits 64 bits.
MAX_MS = 2**53 - 1

_ASCII_CONTROL = re.compile(r"[\x00-\x20\x7f]")


def wrong(path: str, rule: str) -> EngineError:
    """Return the refusal of a field."""
    return error("invalid_policy_json", f"{path} {rule}")


def set_field(part: object, name: str, value: object) -> None:
    """Store the canonical form of a field of a part under construction."""
    object.__setattr__(part, name, value)


def check_whole(value: object, path: str, *, low: int = 0, high: int = MAX_MS) -> None:
    """Refuse anything but a whole number of a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(path, f"must be a whole number from {low} to {high}")


def check_optional_whole(value: object, path: str, *, low: int = 0) -> None:
    """Refuse anything but nothing or a whole number of a range."""
    if value is not None:
        check_whole(value, path, low=low)


def check_part(value: object, kind: Any, path: str) -> None:
    """Refuse anything but a part of a kind."""
    if not isinstance(value, kind):
        raise wrong(path, "is of the wrong type")


def check_words(value: object, path: str) -> None:
    """Refuse anything but text the store can hold."""
    try:
        check_text(value, path)
    except EngineError as refused:
        raise error("invalid_policy_json", refused.detail) from None


def check_optional_words(value: object, path: str) -> None:
    """Refuse anything but nothing or text the store can hold."""
    if value is not None:
        check_words(value, path)


def text_of(value: object, path: str) -> str:
    """Return the text of an id handed in as text or as a UUID."""
    text = str(value) if isinstance(value, UUID) else value
    check_words(text, path)
    return str(text)


def array(value: object, path: str) -> tuple[Any, ...]:
    """Return the items of a list."""
    if not isinstance(value, list | tuple):
        raise wrong(path, "must be a list")
    return tuple(value)


def texts(value: object, path: str) -> tuple[str, ...]:
    """Return the texts of a list."""
    return tuple(text_of(item, path) for item in array(value, path))


def choice(words: type[Word], value: object, path: str) -> Word:
    """Return the word of a fixed set that a value is."""
    word = word_of(words, value)
    if word is None:
        raise wrong(path, f"must be one of {', '.join(words)}")
    return word


def check_tokens(values: object, side: str, is_unclean: Callable[[str], bool]) -> tuple[str, ...]:
    """Return capability tokens sorted and without repeats; `side` names who is at fault."""
    if not isinstance(values, list | tuple | AbstractSet):
        raise error("invalid_capabilities", f"{side}:not_array")
    for token in values:
        fault = _token_fault(token, is_unclean)
        if fault:
            raise error("invalid_capabilities", f"{side}:{fault}")
    # Code point order is the byte order of UTF-8.
    tokens = tuple(sorted(set(values)))
    if len(tokens) > MAX_CAPABILITIES:
        raise error("invalid_capabilities", f"{side}:too_many_tokens")
    if len(",".join(tokens).encode()) > MAX_CAPABILITY_BYTES:
        raise error("invalid_capabilities", f"{side}:too_many_bytes")
    return tokens


def has_ascii_control(token: str) -> bool:
    """Return whether any byte is an ASCII space or control character."""
    return _ASCII_CONTROL.search(token) is not None


def _token_fault(token: object, is_unclean: Callable[[str], bool]) -> str | None:
    if not isinstance(token, str) or not _is_unicode(token):
        return "non_string_token"
    if not token:
        return "empty_token"
    if "," in token:
        return "comma_in_token"
    if is_unclean(token):
        return "control_or_whitespace"
    return None


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)

"""Checks of the fields of a policy; each error names the field, the rule and the value."""

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from types import NoneType
from typing import Any, get_args
from uuid import UUID

from flowfabric.model.errors import EngineError, error
from flowfabric.model.text import Word, check_text, shown, word_of

MAX_CAPABILITIES = 256
MAX_CAPABILITY_BYTES = 4096
INT32 = 2**31 - 1
# The largest integer that every JSON reader keeps exactly; added to a clock reading it still fits 64 bits.
MAX_MS = 2**53 - 1

_ASCII_CONTROL = re.compile(r"[\x00-\x20\x7f]")


def wrong(path: str, rule: str) -> EngineError:
    """Return the error for a field of a policy."""
    return error("invalid_policy_json", f"{path}: {rule}")


def set_field(part: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass inside its `__post_init__`."""
    object.__setattr__(part, name, value)


def check_whole(value: object, path: str, *, low: int = 0, high: int = MAX_MS) -> None:
    """Reject anything except a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(path, f"must be a whole number from {low} to {high}, got {shown(value)}")


def check_optional_whole(value: object, path: str, *, low: int = 0) -> None:
    """Reject anything except None and a whole number of at least `low`."""
    if value is not None:
        check_whole(value, path, low=low)


def check_part(value: object, kind: Any, path: str) -> None:
    """Reject anything except an instance of a class or union."""
    if not isinstance(value, kind):
        names = ["None" if each is NoneType else each.__name__ for each in get_args(kind) or (kind,)]
        raise wrong(path, f"expected {' or '.join(names)}, got {shown(value)}")


def check_words(value: object, path: str) -> None:
    """Reject anything except storable text."""
    try:
        check_text(value, path)
    except EngineError as refused:
        raise error("invalid_policy_json", refused.detail) from None


def check_optional_words(value: object, path: str) -> None:
    """Reject anything except None and storable text."""
    if value is not None:
        check_words(value, path)


def text_of(value: object, path: str) -> str:
    """Return the text of an id given as text or as a UUID."""
    text = str(value) if isinstance(value, UUID) else value
    check_words(text, path)
    return str(text)


def array(value: object, path: str) -> tuple[Any, ...]:
    """Return the items of a list."""
    if not isinstance(value, list | tuple):
        raise wrong(path, f"must be a list, got {shown(value)}")
    return tuple(value)


def texts(value: object, path: str) -> tuple[str, ...]:
    """Return the texts of a list."""
    return tuple(text_of(item, path) for item in array(value, path))


def choice(words: type[Word], value: object, path: str) -> Word:
    """Return the member of an enum that equals the value."""
    word = word_of(words, value)
    if word is None:
        raise wrong(path, f"must be one of {', '.join(words)}, got {shown(value)}")
    return word


def check_tokens(values: object, side: str, is_unclean: Callable[[str], bool]) -> tuple[str, ...]:
    """Return capabilities sorted and without duplicates.

    `side` is `required` or `worker`: whose list an error is about.
    """
    if not isinstance(values, list | tuple | AbstractSet):
        advice = f"; write [{shown(values)}]" if isinstance(values, str) else ""
        raise error("invalid_capabilities", f"{side}:not_array: expected a list, got {shown(values)}{advice}")
    for token in values:
        fault = _token_fault(token, is_unclean)
        if fault:
            raise error("invalid_capabilities", f"{side}:{fault}")
    # Code point order is the byte order of UTF-8.
    tokens = tuple(sorted(set(values)))
    if len(tokens) > MAX_CAPABILITIES:
        raise error(
            "invalid_capabilities",
            f"{side}:too_many_tokens: at most {MAX_CAPABILITIES} capabilities are allowed, got {len(tokens)}",
        )
    if (size := len(",".join(tokens).encode())) > MAX_CAPABILITY_BYTES:
        raise error(
            "invalid_capabilities",
            f"{side}:too_many_bytes: joined by commas, capabilities may have at most {MAX_CAPABILITY_BYTES} bytes, "
            f"got {size}",
        )
    return tokens


def has_ascii_control(token: str) -> bool:
    """Whether any character is an ASCII space or control character."""
    return _ASCII_CONTROL.search(token) is not None


def _token_fault(token: object, is_unclean: Callable[[str], bool]) -> str | None:
    if not isinstance(token, str) or not _is_unicode(token):
        return f"non_string_token: each capability must be text in valid Unicode, got {shown(token)}"
    if not token:
        return "empty_token: a capability must not be empty"
    if "," in token:
        return f"comma_in_token: {shown(token)} must not contain a comma; write two capabilities"
    if is_unclean(token):
        return f"control_or_whitespace: {shown(token)} must not contain whitespace or control characters"
    return None


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)

"""Texts as callers give them: what the store can hold, what a message can show, what a field allows."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from flowfabric.model.errors import error

Word = TypeVar("Word", bound=StrEnum)

MAX_KEY_BYTES = 1024
MAX_BATCH = 1000
"""Items of a batch form."""


def check_text(value: object, field: str) -> str:
    """Return a text the store can hold: valid Unicode without NUL."""
    if not isinstance(value, str):
        raise error("invalid_input", f"{field}: must be text, got {shown(value)}")
    if "\0" in value:
        raise error("invalid_input", f"{field}: must not contain NUL")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise error("invalid_input", f"{field}: is not valid Unicode") from None
    return value


def check_length(value: object, field: str, most: int) -> str:
    """Return a text the store can hold of at most so many characters."""
    text = check_text(value, field)
    if len(text) > most:
        raise error("invalid_input", f"{field}: at most {most} characters, got {len(text)}")
    return text


def check_short(value: object, field: str) -> str:
    """Return a text that fits a key of the store: not empty, and at most 1024 bytes."""
    text = check_text(value, field)
    if not text:
        raise error("invalid_input", f"{field}: must not be empty")
    if len(text.encode()) > MAX_KEY_BYTES:
        raise error("invalid_input", f"{field}: longer than {MAX_KEY_BYTES} bytes")
    return text


def check_range(value: object, field: str, least: int, most: int) -> None:
    """Refuse what is no whole number from least to most."""
    if type(value) is not int or not least <= value <= most:
        raise error("invalid_input", f"{field}: {least} to {most}, got {shown(value)}")


def check_limit(value: object, most: int) -> int:
    """Return the length of a page: what is asked for, or the most there is."""
    if type(value) is not int or value < 0:
        raise error("invalid_input", f"limit: a whole number from 0 on, of which {most} count; got {shown(value)}")
    return min(value, most)


def check_batch(items: object, field: str) -> None:
    """Refuse what is no batch: no list, nothing at all, or too much."""
    if isinstance(items, str | bytes | bytearray) or not isinstance(items, Sequence):
        raise error("invalid_input", f"{field}: a list is wanted, got {shown(items)}")
    if not 1 <= len(items) <= MAX_BATCH:
        raise error("invalid_input", f"{field}: 1 to {MAX_BATCH}, got {len(items)}")


def check_items(value: object, field: str) -> tuple[object, ...]:
    """Return what a collection holds; a text is none."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise error("invalid_input", f"{field}: several values are wanted, got {shown(value)}")
    return tuple(value)


def word_of(words: type[Word], value: object) -> Word | None:
    """Return the word of a fixed set that a value is."""
    return next((word for word in words if word == value), None)


def storable(text: str) -> str:
    """Return a text the store can hold: what it cannot hold of this one is replaced."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def cut_middle(text: str, most: int, gap: str) -> str:
    """Return a text the store can hold of at most so many bytes: one that is longer loses its middle to the gap.

    The gap is ASCII, with a `{}` for the number of characters that are left out.
    """
    if len(text) <= most and len((whole := storable(text)).encode()) <= most:
        return whole
    room = most - len(gap.format(len(text)))
    first, last = storable(text[:room]).encode(), storable(text[-room:]).encode()
    # Half a character at a cut is left out too.
    head = first[: room - room // 2].decode(errors="ignore")
    tail = last[len(last) - room // 2 :].decode(errors="ignore")
    return f"{head}{gap.format(len(text) - len(head) - len(tail))}{tail}"


def shown(value: object) -> str:
    """Return what a message shows of a value, whatever it is."""
    try:
        return shorten(repr(value))
    except Exception:
        return f"a {type(value).__name__}"


def shorten(text: str) -> str:
    """Return a text fit for a message: valid Unicode of at most 200 characters."""
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return shown.encode("utf-8", "backslashreplace").decode()


def has_space_or_control(text: str) -> bool:
    """Return whether any character is whitespace or a control character, in all of Unicode."""
    return any(char.isspace() for char in text) or has_control(text)


def has_control(text: str) -> bool:
    """Return whether any character is a control character, in all of Unicode."""
    return any(unicodedata.category(char) == "Cc" for char in text)


def json_text(value: object) -> str:
    """Return the compact JSON of a value or of a JSON text; ValueError if the store cannot hold it."""
    try:
        plain = msgspec.json.decode(value) if isinstance(value, str | bytes) else value
        text = msgspec.json.encode(plain).decode()
    except (msgspec.MsgspecError, UnicodeError, TypeError, OverflowError, RecursionError):
        raise ValueError("malformed") from None
    if "\\u0000" in text and _has_nul(msgspec.json.decode(text)):
        raise ValueError("must not contain NUL")
    return text


def _has_nul(plain: object) -> bool:
    if isinstance(plain, str):
        return "\0" in plain
    if isinstance(plain, dict):
        return any(_has_nul(part) for pair in plain.items() for part in pair)
    return isinstance(plain, list) and any(map(_has_nul, plain))

"""Checks of arguments, and conversions of text for storage and for messages."""

import difflib
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar

import msgspec

from flowfabric.model.errors import error

Word = TypeVar("Word", bound=StrEnum)

MAX_KEY_BYTES = 1024
MAX_BATCH = 1000
"""The largest number of items in one batch call."""


def check_text(value: object, field: str) -> str:
    """Return the value if it is text that Postgres can store: valid Unicode without NUL."""
    if not isinstance(value, str):
        raise error("invalid_input", f"{field}: must be text, got {shown(value)}")
    if "\0" in value:
        raise error("invalid_input", f"{field}: must not contain NUL (\\0), got {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise error(
                "invalid_input", f"{field}: is not valid Unicode, got {shown(value)}; remove the lone surrogates"
            ) from None
    return value


def check_length(value: object, field: str, most: int) -> str:
    """Return the value if it is storable text of at most `most` characters."""
    text = check_text(value, field)
    if len(text) > most:
        raise error("invalid_input", f"{field}: must be at most {most} characters long, got {len(text)}")
    return text


def check_short(value: object, field: str) -> str:
    """Return the value if it is storable text of 1 to 1024 bytes, so that it fits an index key."""
    text = check_text(value, field)
    if not text:
        raise error("invalid_input", f"{field}: must not be empty")
    if (size := len(text.encode())) > MAX_KEY_BYTES:
        raise error("invalid_input", f"{field}: must be at most {MAX_KEY_BYTES} bytes long in UTF-8, got {size}")
    return text


def check_range(value: object, field: str, least: int, most: int) -> None:
    """Reject anything except a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise error("invalid_input", f"{field}: must be a whole number from {least} to {most}, got {shown(value)}")


def check_limit(value: object, most: int) -> int:
    """Return the page size to use: the requested limit, but at most `most`."""
    if type(value) is not int or value < 0:
        raise error("invalid_input", f"limit: must be a whole number of at least 0, got {shown(value)}")
    return min(value, most)


def check_batch(items: object, field: str) -> None:
    """Reject anything except a list of 1 to 1000 items."""
    if isinstance(items, str | bytes | bytearray) or not isinstance(items, Sequence):
        raise error("invalid_input", f"{field}: expected a list, got {shown(items)}; write [item] for a single item")
    if not 1 <= len(items) <= MAX_BATCH:
        advice = "; split it into several calls" if items else ""
        raise error("invalid_input", f"{field}: must have 1 to {MAX_BATCH} items, got {len(items)}{advice}")


def check_items(value: object, field: str) -> tuple[object, ...]:
    """Return the items of a collection; text, bytes and mappings do not count as collections."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        advice = f"; write [{shown(value)}]" if isinstance(value, str) else ""
        raise error("invalid_input", f"{field}: expected a list or another collection, got {shown(value)}{advice}")
    return tuple(value)


def word_of(words: type[Word], value: object) -> Word | None:
    """Return the member of an enum that equals the value, or None."""
    return next((word for word in words if word == value), None)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `; did you mean <name>?` for the known name that is most like this one, or nothing."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def check_options(given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError if one of the names is not an option."""
    if unknown := sorted(set(given) - set(known)):
        hint = did_you_mean(unknown[0], known)
        raise TypeError(f"no such option: {', '.join(unknown)}; the options are: {', '.join(sorted(known))}{hint}")


def storable(text: str) -> str:
    """Return the text with every character that Postgres cannot store replaced."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def cut_middle(text: str, most: int, gap: str) -> str:
    """Return storable text of at most `most` bytes; in a longer text the gap replaces the middle.

    The gap is ASCII, with a `{}` for the number of omitted characters.
    """
    if len(text) <= most and len((whole := storable(text)).encode()) <= most:
        return whole
    kept = most - len(gap.format(len(text)))
    first, last = storable(text[:kept]).encode(), storable(text[-kept:]).encode()
    # errors="ignore" drops a character that the cut splits.
    head = first[: kept - kept // 2].decode(errors="ignore")
    tail = last[len(last) - kept // 2 :].decode(errors="ignore")
    return f"{head}{gap.format(len(text) - len(head) - len(tail))}{tail}"


def shown(value: object) -> str:
    """Return the repr of any value, shortened for a message."""
    try:
        return shorten(repr(value))
    except Exception:
        return f"a {type(value).__name__}"


def shorten(text: str) -> str:
    """Return the text shortened for a message: valid Unicode, cut after 200 characters."""
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return shown.encode("utf-8", "backslashreplace").decode()


def listed(texts: Sequence[str], *, joint: str = ", ", most: int | None = None) -> str:
    """Return the texts joined for a message, `a, b and 5 more` if there are more than `most`, or `none`."""
    parts = [shorten(text) for text in texts[:most]]
    more = len(texts) - len(parts)
    last = f"{' and ' if joint == ', ' else joint}{more} more" if more else ""
    return f"{joint.join(parts)}{last}" or "none"


def shown_time(ms: int) -> str:
    """Return a time in milliseconds since the epoch for a message: `2026-01-31T12:00:00.000Z`."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        # After the year 9999.
        return f"{ms} ms since the epoch"


def has_space_or_control(text: str) -> bool:
    """Whether any character is Unicode whitespace or a Unicode control character."""
    return any(char.isspace() for char in text) or has_control(text)


def has_control(text: str) -> bool:
    """Whether any character is a Unicode control character."""
    return any(unicodedata.category(char) == "Cc" for char in text)


def json_text(value: object) -> str:
    """Return the compact JSON of a value or of JSON text; raise ValueError if Postgres cannot store it."""
    try:
        plain = msgspec.json.decode(value) if isinstance(value, str | bytes) else value
        text = msgspec.json.encode(plain).decode()
    except (msgspec.MsgspecError, UnicodeError, TypeError, OverflowError, RecursionError):
        raise ValueError(f"malformed: expected JSON, got {shown(value)}") from None
    if "\\u0000" in text and _has_nul(msgspec.json.decode(text)):
        raise ValueError(f"must not contain NUL (\\0), got {shown(value)}")
    return text


def _has_nul(plain: object) -> bool:
    if isinstance(plain, str):
        return "\0" in plain
    if isinstance(plain, dict):
        return any(_has_nul(part) for pair in plain.items() for part in pair)
    return isinstance(plain, list) and any(map(_has_nul, plain))

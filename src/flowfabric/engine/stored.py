"""Stored fields as readers take them: what is missing or unknown is corruption, never a default."""

from enum import StrEnum
from typing import TypeVar

from flowfabric.model.errors import EngineError, error

Word = TypeVar("Word", bound=StrEnum)
Value = TypeVar("Value")


def corruption(context: str, field: str, message: str) -> EngineError:
    """The error of a stored field that cannot be read."""
    return error("corruption", f"{context}: {field}: {message}")


def literal(words: type[Word], value: str, *, context: str, field: str) -> Word:
    """The word a stored literal is."""
    try:
        return words(value)
    except ValueError:
        raise corruption(context, field, f"unknown literal {value!r}") from None


def required(value: Value | None, *, context: str, field: str) -> Value:
    """A stored field that must be there."""
    if value is None:
        raise corruption(context, field, "is missing")
    return value

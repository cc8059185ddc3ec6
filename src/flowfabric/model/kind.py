"""Kinds of executions as workers and claims name them."""

from functools import lru_cache

from flowfabric.model.errors import error
from flowfabric.model.text import check_items, check_text

MAX_KINDS = 1000
"""Kinds that one claim or one worker may name."""


def check_kinds(values: object, *, least: int = 1) -> tuple[str, ...]:
    """Return the kinds a worker runs, sorted and without repeats."""
    items = check_items(values, "kinds")
    try:
        return _check_kinds(items, least)
    except TypeError:
        raise error("invalid_input", "kinds: each must be text") from None


@lru_cache(maxsize=1024)
def _check_kinds(items: tuple[object, ...], least: int) -> tuple[str, ...]:
    kinds = sorted({check_text(kind, "kinds") for kind in items})
    if not least <= len(kinds) <= MAX_KINDS:
        raise error("invalid_input", f"kinds: {least} to {MAX_KINDS} kinds, or None for any; got {len(kinds)}")
    return tuple(kinds)

"""Checks of the execution kinds that workers and claims name."""

from functools import lru_cache

from flowfabric.model.errors import error
from flowfabric.model.text import check_items, check_text

MAX_KINDS = 1000
"""The largest number of kinds that one claim or worker may name."""


def check_kinds(values: object, *, least: int = 1) -> tuple[str, ...]:
    """Return the kinds a worker runs, sorted and without duplicates."""
    items = check_items(values, "kinds")
    try:
        return _check_cached(items, least)
    except TypeError:
        # An item that cannot be hashed is not text either: this names it.
        return _check_kinds(items, least)


def _check_kinds(items: tuple[object, ...], least: int) -> tuple[str, ...]:
    kinds = sorted({check_text(kind, "kinds") for kind in items})
    if not least <= len(kinds) <= MAX_KINDS:
        raise error(
            "invalid_input", f"kinds: must name {least} to {MAX_KINDS} kinds, got {len(kinds)}; write None for any kind"
        )
    return tuple(kinds)


_check_cached = lru_cache(maxsize=1024)(_check_kinds)

"""Tags: the caller's own labels on an execution."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from flowfabric.model.errors import error
from flowfabric.model.text import check_text, shorten, shown

MAX_KEY_CHARACTERS = 1024
_KEY = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*", re.ASCII)


def check_tag_key(key: object) -> str:
    """Return a tag key: a lower-case namespace, a dot and a name."""
    if not isinstance(key, str):
        raise error("invalid_tag_key", shown(key))
    return _check_key_text(key)


@lru_cache(maxsize=4096)
def _check_key_text(key: str) -> str:
    if len(key) > MAX_KEY_CHARACTERS or not _KEY.fullmatch(key):
        raise error("invalid_tag_key", shorten(key))
    return key


def check_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of tags whose keys and values may be stored."""
    if tags is None:
        return {}
    if type(tags) is not dict and not isinstance(tags, Mapping):
        raise error("invalid_input", "tags: must map text to text")
    # Most values are plain: the name for a refusal is made only where there may be one.
    return {
        check_tag_key(key): value
        if type(value) is str and value.isascii() and "\0" not in value
        else check_text(value, f"tags.{key}")
        for key, value in tags.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TagsSet:
    """The tags are stored; how many were given."""

    count: int

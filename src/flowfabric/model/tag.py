"""Tags: key-value labels that callers put on executions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from flowfabric.model.errors import error
from flowfabric.model.text import check_text, shown

MAX_KEY_CHARACTERS = 1024
_BARE_NAME = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)
_KEY = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*", re.ASCII)


def check_tag_key(key: object) -> str:
    """Return the value if it is a tag key: a lower-case namespace, a dot and a name."""
    if not isinstance(key, str):
        raise error("invalid_tag_key", f"tag key {shown(key)} must be text, e.g. 'app.name'")
    return _check_key_text(key)


@lru_cache(maxsize=4096)
def _check_key_text(key: str) -> str:
    if len(key) > MAX_KEY_CHARACTERS:
        raise error(
            "invalid_tag_key",
            f"tag key {shown(key)} must be at most {MAX_KEY_CHARACTERS} characters long, got {len(key)}",
        )
    if not _KEY.fullmatch(key):
        example = f"app.{key}" if _BARE_NAME.fullmatch(key) else "app.name"
        raise error(
            "invalid_tag_key",
            f"tag key {shown(key)} must be namespaced, e.g. {example!r}: lower-case letters, digits and _, starting "
            "with a letter, then a dot, then lower-case letters, digits, _ and dots",
        )
    return key


def check_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of the tags, with every key and value checked."""
    if tags is None:
        return {}
    if type(tags) is not dict and not isinstance(tags, Mapping):
        raise error(
            "invalid_input",
            f"tags: must be a mapping of text to text, e.g. {{'app.customer': '42'}}, got {shown(tags)}",
        )
    # Most values are plain ASCII; only the others pay for the field name of an error.
    return {
        check_tag_key(key): value
        if type(value) is str and value.isascii() and "\0" not in value
        else check_text(value, f"tags.{key}")
        for key, value in tags.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TagsSet:
    """The tags are stored; `count` is how many were given."""

    count: int

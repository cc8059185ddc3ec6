"""Limits: what they are attached to, and how the key and the weight of an execution are read."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

import msgspec

from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import parse_uuid
from flowfabric.model.policy_checks import MAX_MS
from flowfabric.model.tag import check_tag_key
from flowfabric.model.text import check_length, check_text, shown, storable

MAX_BUDGETS = 16
"""How many budgets an execution may have of its own, and how many may be attached to one scope."""
MAX_KEY_CHARACTERS = 256
"""A longer key is replaced by its digest."""
MAX_SOURCE_CHARACTERS = 1024
_DIGITS = len(str(MAX_MS))


class ScopeType(StrEnum):
    """What limits can be attached to."""

    LANE = "lane"
    NAMESPACE = "namespace"
    KIND = "kind"
    FLOW = "flow"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """The limit is attached since this call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyAttached:
    """The limit was attached before; nothing changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detached:
    """The limit was attached until this call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotAttached:
    """The limit was not attached; nothing changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachments:
    """The limits of a lane, a namespace, an execution kind or a flow."""

    budget_ids: tuple[UUID, ...]
    """The budgets, the one attached first first."""
    quota_policy_id: UUID | None


class Source(NamedTuple):
    """Where a value of an execution comes from: a tag, or a place in its JSON payload."""

    tag: str | None
    path: tuple[str, ...]


@lru_cache(maxsize=4096)
def parse_source(text: str | None) -> Source | None:
    """Return the source that a text names, `tag:<key>` or `payload:<JSON pointer>`; None for any other text."""
    kind, colon, rest = (text or "").partition(":")
    if kind == "tag" and rest:
        return Source(rest, ())
    if kind == "payload" and colon and (rest == "" or rest.startswith("/")):
        return Source(None, tuple(part.replace("~1", "/").replace("~0", "~") for part in rest.split("/")[1:]))
    return None


def check_source(value: object, field: str, code: str = "invalid_input") -> str:
    """Return the value if it names a source of keys or weights; raise this code if it does not."""
    text = check_text(value, field)
    source = parse_source(text)
    check_length(text, field, MAX_SOURCE_CHARACTERS)
    if source is None:
        raise error(
            code,
            f"{field}: must be 'tag:<key>' or 'payload:<JSON pointer>', e.g. 'payload:/customer/id', got {shown(text)}",
        )
    if source.tag is not None:
        check_tag_key(source.tag)
    return text


class Facts:
    """The tags and the payload of an execution, from which keys and weights are read."""

    __slots__ = ("_payload", "_plain", "_tags")

    def __init__(self, tags: Mapping[str, str] | None, payload: bytes) -> None:
        self._tags = tags
        self._payload: bytes | None = payload
        self._plain: object = None

    def key(self, source: Source) -> str | None:
        """The key at a source: a text, or a number or boolean as JSON writes it; None without one."""
        value = self._value(source)
        if not isinstance(value, str):
            if not isinstance(value, bool | int | float):
                return None
            value = msgspec.json.encode(value).decode()
        return short_key(value) if value else None

    def weight(self, source: Source) -> int | None:
        """The whole number of at least 2 at a source, at most the largest weight; or None, which weighs 1."""
        value = self._value(source)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            digits = value.lstrip("0") or "0"
            value = int(digits) if len(digits) <= _DIGITS else MAX_MS
        return min(value, MAX_MS) if type(value) is int and value > 1 else None

    def _value(self, source: Source) -> object:
        if source.tag is not None:
            return None if self._tags is None else self._tags.get(source.tag)
        if self._payload is not None:
            try:
                self._plain = msgspec.json.decode(self._payload)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                self._plain = None
            self._payload = None
        value = self._plain
        for part in source.path:
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and _is_index(part) and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return value


def short_key(key: str) -> str:
    """Return a key that can be stored: itself, or its digest if it is too long or Postgres cannot store it."""
    if len(key) <= MAX_KEY_CHARACTERS and storable(key) == key:
        return key
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def limit_id(value: object) -> UUID | None:
    """Return the id of a limit that an execution names, None if it is malformed, which limits nothing."""
    try:
        return parse_uuid(value, "id")
    except EngineError:
        return None


def check_budget_ids(values: object, field: str) -> tuple[UUID, ...]:
    """Return the ids of budgets in their order, each once."""
    if not isinstance(values, list | tuple):
        raise error("invalid_input", f"{field}: must be a list of budget ids, got {shown(values)}")
    found = tuple(dict.fromkeys(parse_uuid(value, f"{field}[{nth}]") for nth, value in enumerate(values)))
    if len(found) > MAX_BUDGETS:
        raise too_many_budgets(field, found)
    return found


def too_many_budgets(what: str, budget_ids: Iterable[UUID]) -> EngineError:
    """Return the error for more budgets than are allowed together."""
    return error(
        "budget_attach_conflict", f"{what}: at most {MAX_BUDGETS} budgets are allowed, got {len({*budget_ids})}"
    )


def other_quota(what: str, wanted: UUID, attached: UUID) -> EngineError:
    """Return the error for a second quota policy where one is allowed."""
    return error("quota_attach_conflict", f"{what} has quota policy {attached} and can have no other, got {wanted}")


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10 and (part == "0" or part[0] != "0")

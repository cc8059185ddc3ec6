"""Checks of the filters of lists and counts, and cursors of lists.

A filter accepts one value, several, or None for any.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TypedDict, TypeVar
from uuid import UUID

import msgspec

from flowfabric.model.errors import error
from flowfabric.model.ids import LaneId, check_lane_id
from flowfabric.model.states import PublicState
from flowfabric.model.tag import check_tag_key
from flowfabric.model.text import check_items, check_range, check_text, shown, word_of

MAX_TIME = 2**63 - 1
Position = TypeVar("Position", bound=msgspec.Struct)


class ExecutionFilters(TypedDict, total=False):
    """The filters of lists of executions."""

    namespace: str | Iterable[str] | None
    lane_id: str | Iterable[str] | None
    public_state: PublicState | str | Iterable[PublicState | str] | None
    execution_kind: str | Iterable[str] | None
    tag: tuple[str, str] | None
    flow_id: UUID | str | None
    created_after: int | None
    created_before: int | None
    completed_after: int | None
    completed_before: int | None


def several(value: object, field: str) -> Sequence[object]:
    """The values of an argument that accepts one text or several."""
    return (value,) if isinstance(value, str) else check_items(value, field)


def check_texts(value: object, field: str) -> list[str] | None:
    """The checked texts of a filter."""
    return None if value is None else [check_text(each, field) for each in several(value, field)]


def check_lanes(value: object) -> list[LaneId] | None:
    """The checked lanes of a filter."""
    return None if value is None else [check_lane_id(each) for each in several(value, "lane_id")]


def check_states(value: object) -> frozenset[PublicState] | None:
    """The checked states of a filter."""
    return None if value is None else frozenset(map(_check_state, several(value, "public_state")))


def _check_state(value: object) -> PublicState:
    if (state := word_of(PublicState, value)) is None:
        raise error("invalid_input", f"public_state: expected one of {', '.join(PublicState)}, got {shown(value)}")
    return state


def check_tag(tag: object) -> tuple[str, str]:
    """The checked key and value of a tag filter."""
    if isinstance(tag, str) or not isinstance(tag, Sequence) or len(tag) != 2:
        raise error(
            "invalid_input", f"tag: expected a key and a value, e.g. ('app.customer', 'acme'), got {shown(tag)}"
        )
    key, value = tag
    return check_tag_key(key), check_text(value, "tag")


def time_range(field: str, after: int | None, before: int | None) -> tuple[int, int]:
    """The first and the last millisecond from after (inclusive) to before (exclusive)."""
    for name, time in (("after", after), ("before", before)):
        if isinstance(time, datetime):
            raise error(
                "invalid_input",
                f"{field}_{name}: expected milliseconds since the epoch, got {shown(time)}; write "
                f"int(t.timestamp() * 1000), here {int(time.timestamp() * 1000)}",
            )
        if time is not None:
            check_range(time, f"{field}_{name}", -MAX_TIME, MAX_TIME)
    return -MAX_TIME if after is None else after, MAX_TIME if before is None else before - 1


def encode_position(position: msgspec.Struct) -> str:
    """The cursor of a position in a list."""
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def decode_position(cursor: object, kind: type[Position]) -> Position | None:
    """The position of a cursor, or None if it is not one."""
    if not isinstance(cursor, str):
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(text, type=kind)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        return None

"""Checks of the filters of lists and counts: each accepts one value, several, or None for any."""

from collections.abc import Iterable, Sequence
from typing import TypedDict
from uuid import UUID

from flowfabric.model.errors import error
from flowfabric.model.ids import LaneId, check_lane_id
from flowfabric.model.states import PublicState
from flowfabric.model.text import check_items, check_text, shown, word_of


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

"""Lanes: how the registry lists them."""

from dataclasses import dataclass

from flowfabric.model.ids import LaneId
from flowfabric.model.states import LaneState


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A lane of the registry."""

    lane_id: LaneId
    state: LaneState
    registered_at: int
    registered_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePage:
    """A page of lanes; `next_cursor` is None on the last page."""

    lanes: list[Lane]
    next_cursor: LaneId | None

"""Lanes as the registry lists them."""

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
    """A part of the list of lanes; `next_cursor` leads on where there is more."""

    lanes: list[Lane]
    next_cursor: LaneId | None

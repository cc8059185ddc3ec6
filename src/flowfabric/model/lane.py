"""Lanes: how the registry lists them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowfabric.model.ids import LaneId
from flowfabric.model.states import LaneState


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A lane of the registry."""

    lane_id: LaneId
    state: LaneState
    registered_at: int
    registered_by: str
    fair_by: str | None = None
    """What claims share it fairly by: `namespace`, `tag:<key>` or `payload:<JSON pointer>`; None if it is not fair."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of keys; a key that is missing weighs 1."""
    ageing_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePage:
    """A page of lanes; `next_cursor` is None on the last page."""

    lanes: list[Lane]
    next_cursor: LaneId | None

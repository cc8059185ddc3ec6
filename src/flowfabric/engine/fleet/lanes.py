"""Lanes: list them, and change what each accepts."""

import msgspec

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import corruption, literal
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import LaneId, check_lane_id
from flowfabric.model.lane import Lane, LanePage
from flowfabric.model.states import LaneState
from flowfabric.model.text import check_limit, shown, word_of

SQL = statements_beside(__file__)

MAX_LIMIT = 1000

_read_weights = msgspec.json.Decoder(dict[str, float]).decode


class Lanes:
    """The lane operations."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def set_lane_state(self, lane_id: str, state: LaneState | str) -> None:
        """Change what a lane accepts: submissions, claims, both or neither."""
        lane_id = check_lane_id(lane_id)
        wanted = word_of(LaneState, state)
        if wanted is None:
            raise error("invalid_input", f"state: must be one of {', '.join(LaneState)}, got {shown(state)}")
        if not await self._store.fetch(SQL.set_lane_state, lane_id=lane_id, state=wanted):
            raise error(
                "invalid_input", f"lane_id: no lane {lane_id!r}; list_lanes shows them, a submission creates one"
            )
        self._store.wakeups.lane(lane_id)

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 100) -> LanePage:
        """A page of the lanes ordered by name, after the lane that the cursor names."""
        limit = check_limit(limit, MAX_LIMIT)
        after = None if cursor is None else _check_cursor(cursor)
        if limit == 0:
            return LanePage(lanes=[], next_cursor=None)
        rows = await self._store.fetch(SQL.list_lanes, after=after, limit=limit + 1)
        lanes = [
            Lane(
                lane_id=_stored_name(row["lane_id"]),
                state=literal(LaneState, row["state"], context="list_lanes", field="state"),
                registered_at=row["registered_at"],
                registered_by=row["registered_by"],
                fair_by=row["fair_by"],
                weights=_read_weights(row["fair_weights"] or "{}"),
                ageing_ms=row["ageing_ms"],
            )
            for row in rows[:limit]
        ]
        return LanePage(lanes=lanes, next_cursor=lanes[-1].lane_id if len(rows) > limit else None)


def _check_cursor(cursor: object) -> LaneId:
    try:
        return check_lane_id(cursor)
    except EngineError:
        raise error(
            "invalid_input", f"cursor: must be the next_cursor of a page, a lane id, got {shown(cursor)}"
        ) from None


def _stored_name(lane_id: str) -> LaneId:
    try:
        return check_lane_id(lane_id)
    except EngineError as invalid:
        raise corruption("list_lanes", "lane_id", str(invalid.detail)) from None

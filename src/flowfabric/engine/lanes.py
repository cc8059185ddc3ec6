"""Lanes: which there are, and what each accepts, changeable while work runs."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.engine.stored import corruption, literal
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import LaneId, check_lane_id
from flowfabric.model.snapshots import Lane, LanePage
from flowfabric.model.states import LaneState
from flowfabric.model.text import check_range

SQL = statements_beside(__file__)

MAX_LIMIT = 1000


class Lanes:
    """The lane operations."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def set_state(self, lane_id: str, state: LaneState | str) -> None:
        """Change what a lane accepts; the lane exists from its first use on."""
        lane_id = check_lane_id(lane_id)
        try:
            state = LaneState(state)
        except ValueError:
            raise error("invalid_input", f"state: one of {', '.join(LaneState)}, got {state!r}") from None
        if not await self._store.fetch(SQL.set_lane_state, lane_id=lane_id, state=state):
            raise error("invalid_input", f"lane_id: no lane {lane_id!r}")
        self._store.wakeups.work(lane_id, {})

    async def page(self, cursor: str | None, limit: int) -> LanePage:
        """A page of the lanes by name, behind the one the cursor names."""
        check_range(limit, "limit", 0, 2**63 - 1)
        after = None if cursor is None else check_lane_id(cursor)
        limit = min(limit, MAX_LIMIT)
        if limit == 0:
            return LanePage(lanes=[], next_cursor=None)
        rows = await self._store.fetch(SQL.list_lanes, after=after, limit=limit + 1)
        lanes = [
            Lane(
                lane_id=_stored_name(row["lane_id"]),
                state=literal(LaneState, row["state"], context="list_lanes", field="state"),
                registered_at=row["registered_at"],
                registered_by=row["registered_by"],
            )
            for row in rows[:limit]
        ]
        return LanePage(lanes=lanes, next_cursor=lanes[-1].lane_id if len(rows) > limit else None)


def _stored_name(lane_id: str) -> LaneId:
    try:
        return check_lane_id(lane_id)
    except EngineError as invalid:
        raise corruption("list_lanes", "lane_id", str(invalid.detail)) from None

"""Lanes: what each accepts, changeable while work runs."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.ids import check_lane_id
from flowfabric.model.states import LaneState

SQL = statements_beside(__file__)


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

"""Waits for the ends of flows."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from uuid import UUID

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.waits import SharedWaits
from flowfabric.engine.flow.row import check_flow_id
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.flow import FlowEnded, status_of_flow
from flowfabric.model.ids import FlowId, flow_partition
from flowfabric.model.text import check_range

SQL = statements_beside(__file__)

MAX_WAIT_MS = 2**53 - 1


class FlowEndings(SharedWaits[FlowId, FlowEnded]):
    """Waits for the ends of flows, which the hints of operator events wake."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.wakeups, operation="wait_for_flow")
        self._store = store

    async def wait_for_flow(self, flow_id: UUID | str, timeout_ms: int | None = None) -> FlowEnded | None:
        """Wait until every member of a flow has ended; return None if the time is over before.

        An open flow without members has not ended. A flow that has ended lives again if a member is added or replayed.
        """
        _, parsed = check_flow_id(self._store, flow_id)
        if timeout_ms is not None:
            check_range(timeout_ms, "timeout_ms", 0, MAX_WAIT_MS)
        return await self._wait_for(parsed, None if timeout_ms is None else timeout_ms / 1000)

    def _watch(self) -> AbstractContextManager[asyncio.Event]:
        return self._store.wakeups.feeds.watch(EventFamily.OPERATOR)

    async def _find(self, wanted: Sequence[FlowId]) -> Sequence[tuple[FlowId, FlowEnded | EngineError]]:
        """The flows that have ended or are absent."""
        count = self._store.rules.partitions.flow
        rows = await self._store.fetch(
            SQL.list_ended_flows,
            partition_keys=[flow_partition(flow_id, count) for flow_id in wanted],
            flow_ids=wanted,
        )
        found: list[tuple[FlowId, FlowEnded | EngineError]] = []
        for row in rows:
            flow_id, state = wanted[row["nth"] - 1], row["public_flow_state"]
            if state is None:
                found.append((flow_id, error("flow_not_found", str(flow_id))))
            else:
                status = status_of_flow(state, row["derived_state"])
                found.append((flow_id, FlowEnded(flow_id=flow_id, status=status)))
        return found

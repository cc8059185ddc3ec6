"""Replays of many executions: members of a flow together, each after the upstream executions that it waits for."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from uuid import UUID

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import is_connection_fault
from flowfabric.engine.core.row import execution_keys
from flowfabric.engine.flow.replay import ReplayRequest, Replays, Verdict
from flowfabric.engine.read.filters import ExecutionFilters
from flowfabric.engine.read.listing import MAX_LIMIT, Listing, ListOrder
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.execution import ExecutionSummary
from flowfabric.model.ids import ExecutionId, split_execution_id
from flowfabric.pauses import pauses

SQL = statements_beside(__file__)

REPLAY_LIMIT, EDGE_LIMIT = 500, 20_000
"""How many executions one transaction replays at most, and how many of their edges it resets, unless one has more."""
PATIENCE_SECONDS = 2.0
"""How long rows that other sessions have locked are tried again: as long as a single call waits for a row."""
PAUSE_SECONDS = (0.02, 0.2)


class MatchingReplays:
    """Replays executions that match a filter."""

    def __init__(self, store: Store, listing: Listing, replays: Replays) -> None:
        self._store = store
        self._listing = listing
        self._replays = replays

    async def complete_flows(
        self, page: Sequence[ExecutionSummary], filters: ExecutionFilters, completed: set[UUID]
    ) -> list[ExecutionId]:
        """The executions of a page, completed by the later members of their flows that match, in an order to replay.

        Members of flows that an earlier page has completed are left out. `completed` has these flows as long as some of
        their members are still to be listed.
        """
        last = page[-1]
        listed = [one.execution_id for one in page]
        flows = {
            row["nth"]: row["flow_id"] for row in await self._store.fetch(SQL.list_page_flows, **execution_keys(listed))
        }
        with_later_members = {
            row["flow_id"]
            for row in await self._store.fetch(
                SQL.list_flows_with_later_members,
                flow_ids=list(completed.union(flows.values())),
                created_at=last.created_at,
                execution_id=split_execution_id(last.execution_id)[1],
            )
        }
        found: list[ExecutionId] = []
        seen: set[UUID] = set()
        for nth, execution_id in enumerate(listed, 1):
            flow_id = flows.get(nth)
            if flow_id is None:
                found.append(execution_id)
            elif flow_id in completed or flow_id in seen:
                continue
            elif flow_id in with_later_members:
                seen.add(flow_id)
                found += await self._list_members(filters, flow_id)
            else:
                found.append(execution_id)
        completed &= with_later_members
        completed |= seen
        return [execution_id for execution_id, _ in await self._in_order(found)] if seen else found

    async def replay_many(self, execution_ids: Sequence[ExecutionId], request: ReplayRequest) -> list[Verdict]:
        """Replay executions, some in a transaction; return the verdicts in the order given.

        Upstream executions are replayed before those that depend on them, or in the same transaction: otherwise the
        reconciler might find that they are still failed, and skip these again.
        """
        verdicts: dict[ExecutionId, Verdict] = {}
        left = await self._in_order(execution_ids)
        waits = pauses(*PAUSE_SECONDS)
        deadline: float | None = None
        while True:
            for batch in _batches(left):
                await self._try(batch, request, verdicts)
            left = [(execution_id, edges) for execution_id, edges in left if execution_id not in verdicts]
            pause = next(waits)
            deadline = deadline or time.monotonic() + PATIENCE_SECONDS
            if not left or time.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause)
        for execution_id, _ in left:
            verdicts[execution_id] = error(
                "retry_exhausted", f"execution {execution_id} or its flow is locked by another session; repeat the call"
            )
        return [verdicts[execution_id] for execution_id in execution_ids]

    async def _list_members(self, filters: ExecutionFilters, flow_id: UUID) -> list[ExecutionId]:
        """The members of a flow that match."""
        narrowed: ExecutionFilters = {**filters, "flow_id": flow_id}
        found: list[ExecutionId] = []
        cursor: str | None = None
        while True:
            page = await self._listing.list_executions(
                **narrowed, order=ListOrder.OLDEST, cursor=cursor, limit=MAX_LIMIT
            )
            found += [one.execution_id for one in page.executions]
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _in_order(self, execution_ids: Sequence[ExecutionId]) -> list[tuple[ExecutionId, int]]:
        """The executions, each behind those of them that made its dependencies impossible, with the edges to reset."""
        rows = await self._store.fetch(SQL.list_impossible, **execution_keys(execution_ids))
        if not rows:
            return [(execution_id, 0) for execution_id in execution_ids]
        edges = {execution_ids[row["nth"] - 1]: row["edges"] for row in rows}
        named = {split_execution_id(execution_id)[1]: execution_id for execution_id in execution_ids}
        order = TopologicalSorter[ExecutionId](dict.fromkeys(execution_ids, ()))
        for row in rows:
            order.add(execution_ids[row["nth"] - 1], *(named[str(uuid)] for uuid in row["upstreams"] or ()))
        return [(execution_id, edges.get(execution_id, 0)) for execution_id in order.static_order()]

    async def _try(
        self, execution_ids: Sequence[ExecutionId], request: ReplayRequest, verdicts: dict[ExecutionId, Verdict]
    ) -> None:
        """Replay those that are not locked together, or in halves if that fails because of an item."""
        try:
            await self._replays.replay_together(execution_ids, request, verdicts)
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
            if len(execution_ids) == 1:
                verdicts.setdefault(execution_ids[0], fault)
                return
            left = [each for each in execution_ids if each not in verdicts]
            middle = len(left) // 2
            for half in (left[:middle], left[middle:]):
                if half:
                    await self._try(half, request, verdicts)


def _batches(planned: Sequence[tuple[ExecutionId, int]]) -> Iterator[list[ExecutionId]]:
    """The executions for one transaction after the other."""
    batch: list[ExecutionId] = []
    sum_of_edges = 0
    for execution_id, edges in planned:
        if batch and (len(batch) == REPLAY_LIMIT or sum_of_edges + edges > EDGE_LIMIT):
            yield batch
            batch, sum_of_edges = [], 0
        batch.append(execution_id)
        sum_of_edges += edges
    if batch:
        yield batch

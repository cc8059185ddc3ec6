"""Replays of many executions: members of a flow together, each after the upstream executions that it waits for."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import TypeAlias
from uuid import UUID

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.batches import in_batches
from flowfabric.engine.core.quarantine import is_connection_fault, is_statement_timeout
from flowfabric.engine.core.row import execution_keys
from flowfabric.engine.flow.replay import ReplayRequest, Replays, ReplayVerdict, Upstreams, WaitsFor
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
"""How long rows that other sessions have locked are tried again without any success."""
PAUSE_SECONDS = (0.02, 0.2)

_Planned: TypeAlias = tuple[ExecutionId, int]
"""An execution to replay, and how many of its edges are reset."""


class MatchingReplays:
    """Replays executions that match a filter."""

    def __init__(self, store: Store, listing: Listing, replays: Replays) -> None:
        self._store = store
        self._listing = listing
        self._replays = replays

    async def with_later_members(
        self, page: Sequence[ExecutionSummary], filters: ExecutionFilters, whole_flows: set[UUID]
    ) -> list[ExecutionId]:
        """The executions of a page and the later members of their flows that match, in an order to replay.

        `whole_flows` has the flows of which earlier pages have brought all members, as long as some of these are still
        to be listed; they are left out.
        """
        last = page[-1]
        listed = [one.execution_id for one in page]
        flows = await self._replays.read_flows_of(listed)
        continued = {
            row["flow_id"]
            for row in await self._store.fetch(
                SQL.list_flows_with_later_members,
                flow_ids=list(whole_flows.union(flows.values())),
                created_at=last.created_at,
                execution_id=split_execution_id(last.execution_id)[1],
            )
        }
        found: list[ExecutionId] = []
        added: set[UUID] = set()
        for execution_id in listed:
            flow_id = flows.get(execution_id)
            if flow_id in whole_flows or flow_id in added:
                continue
            if flow_id is not None and flow_id in continued:
                added.add(flow_id)
                found += await self._list_members(filters, flow_id)
            else:
                found.append(execution_id)
        whole_flows &= continued
        whole_flows |= added
        if not added:
            return found
        planned, _ = await self._in_order(found)
        return [execution_id for execution_id, _ in planned]

    async def replay_many(self, execution_ids: Sequence[ExecutionId], request: ReplayRequest) -> list[ReplayVerdict]:
        """Replay executions, some in a transaction; return the verdicts in the order given.

        Upstream executions are replayed before those that depend on them, or in the same transaction: otherwise the
        reconciler might find that they are still failed, and skip these again.
        """
        planned, upstreams = await self._in_order(execution_ids)
        call = _Call(request=request, upstreams=upstreams)
        for batch in _batches(planned):
            await self._try(batch, call)
        left = call.left(planned)
        if left:
            left = await self._retry(left, call)
        for execution_id, _ in left:
            call.verdicts[execution_id] = error(
                "retry_exhausted",
                f"another session has locked execution {execution_id}, its flow, or an execution before or behind it; "
                "repeat the call",
            )
        return [call.verdicts[execution_id] for execution_id in execution_ids]

    async def _retry(self, left: Sequence[_Planned], call: "_Call") -> list[_Planned]:
        """Replay what other sessions had locked, until nothing has succeeded for a while; return what is left.

        A flow that settles the ends of its members is locked most of the time, so its lock is waited for; and for that
        of one flow at a time, so that a flow that stays locked does not stop the replays of others.
        """
        flows = await self._replays.read_flows_of([execution_id for execution_id, _ in left])
        waits = pauses(*PAUSE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left and time.monotonic() + (pause := next(waits)) <= deadline:
            await asyncio.sleep(pause)
            by_flow: dict[UUID | None, list[_Planned]] = {}
            for each in left:
                by_flow.setdefault(flows.get(each[0]), []).append(each)
            for members in by_flow.values():
                for batch in _batches(members):
                    before = len(call.verdicts)
                    is_waiting = time.monotonic() < deadline
                    is_done = await self._try(batch, call, WaitsFor.FLOWS if is_waiting else WaitsFor.NOTHING)
                    if len(call.verdicts) > before:
                        deadline = time.monotonic() + PATIENCE_SECONDS
                    if not is_done:
                        break
            left = call.left(left)
        return list(left)

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

    async def _in_order(self, execution_ids: Sequence[ExecutionId]) -> tuple[list[_Planned], Upstreams]:
        """The executions, each behind those of them on which it still depends, and which ones these are."""
        rows = await self._store.fetch(SQL.list_unsatisfied, **execution_keys(execution_ids))
        if not rows:
            return [(execution_id, 0) for execution_id in execution_ids], {}
        edges = {execution_ids[row["nth"] - 1]: row["edges"] for row in rows}
        named = {split_execution_id(execution_id)[1]: execution_id for execution_id in execution_ids}
        upstreams = {
            execution_ids[row["nth"] - 1]: [named[str(uuid)] for uuid in row["upstreams"]]
            for row in rows
            if row["upstreams"]
        }
        order = TopologicalSorter[ExecutionId]({**dict.fromkeys(execution_ids, ()), **upstreams})
        return [(execution_id, edges.get(execution_id, 0)) for execution_id in order.static_order()], upstreams

    async def _try(
        self, execution_ids: Sequence[ExecutionId], call: "_Call", waits_for: WaitsFor = WaitsFor.NOTHING
    ) -> bool:
        """Replay those that are not locked together, or in halves if that fails because of an item.

        Return False if the transaction has waited too long for a row.
        """
        try:
            await self._replays.replay_together(
                execution_ids, call.request, call.verdicts, upstreams=call.upstreams, waits_for=waits_for
            )
        except EngineError as fault:
            if fault.code == "retry_exhausted" or (waits_for is WaitsFor.FLOWS and is_statement_timeout(fault)):
                return False
            if is_connection_fault(fault):
                raise
            if len(execution_ids) == 1:
                call.verdicts.setdefault(execution_ids[0], fault)
                return True
            left = [each for each in execution_ids if each not in call.verdicts]
            middle = len(left) // 2
            for half in (left[:middle], left[middle:]):
                if half and not await self._try(half, call, waits_for):
                    return False
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One call for many executions, with the verdicts so far."""

    request: ReplayRequest
    upstreams: Upstreams
    verdicts: dict[ExecutionId, ReplayVerdict] = field(default_factory=dict)

    def left(self, planned: Sequence[_Planned]) -> list[_Planned]:
        """Those without a verdict."""
        return [each for each in planned if each[0] not in self.verdicts]


def _batches(planned: Sequence[_Planned]) -> Iterator[list[ExecutionId]]:
    """The executions for one transaction after the other."""
    for batch in in_batches(planned, lambda each: each[1], limit=EDGE_LIMIT, count=REPLAY_LIMIT):
        yield [execution_id for execution_id, _ in batch]

"""Executions that wait for dependencies: resolving and promoting single ones, and the safety net of the cascade."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.batches import in_batches
from flowfabric.engine.core.quarantine import is_connection_fault, is_statement_timeout
from flowfabric.engine.core.row import lock_execution
from flowfabric.engine.core.sweep import BatchSize, SweepResult
from flowfabric.engine.core.watermark import TimerWatermark
from flowfabric.engine.flow.cascade import LEFT_OVER_MS, Cascade
from flowfabric.engine.flow.resolve import EDGE_LIMIT, ResolvedEdges, Resolver, outcome_of_upstream
from flowfabric.engine.flow.row import check_flow_id, lock_flow_if_exists, read_flow_of
from flowfabric.engine.store import Store
from flowfabric.model.edge import DependenciesPromoted, DependencyResolved
from flowfabric.model.errors import EngineError, TransportError, error
from flowfabric.model.event import CompletionOutcome
from flowfabric.model.ids import ExecutionId, FlowId, format_execution_id, parse_execution_id, parse_uuid, row_key
from flowfabric.model.states import EligibilityState, LifecyclePhase, TerminalOutcome
from flowfabric.model.text import shown

SQL = statements_beside(__file__)

PAGE_LIMIT = 10_000
"""How many blocked executions and unsatisfied edges one page of the safety net looks at."""
PAGES_IN_A_ROW = 10
"""How many pages follow each other without the pause of the sweep: with millions of edges it would never pause."""

logger = logging.getLogger(__name__)


class _Stuck(NamedTuple):
    """A blocked execution, and edges to resolve that lead to it; none if its dependencies allow it to run."""

    partition_key: int
    execution_id: UUID
    edge_ids: Sequence[UUID]


_OUTCOMES = {outcome.literal: outcome for outcome in CompletionOutcome if outcome is not CompletionOutcome.RESUMABLE}


class _Position(NamedTuple):
    """Where the next page of blocked executions begins."""

    at: int = -1
    execution_id: UUID = UUID(int=0)
    edges_seen: int | None = None
    """How many edges of this execution were looked at before; None if it is done."""


class Blocked:
    """Resolves edges and promotes executions outside of the cascade."""

    def __init__(self, store: Store, resolver: Resolver, cascade: Cascade) -> None:
        self._store = store
        self._resolver = resolver
        self._cascade = cascade
        self._position = _Position()
        self._page_size = BatchSize()
        self._pages = 0
        self.watermark = TimerWatermark(full_scan_seconds=60, margin_ms=1_000)

    async def resolve_dependency(
        self, flow_id: UUID | str, edge_id: UUID | str, upstream_outcome: str
    ) -> DependencyResolved:
        """Resolve one applied edge by the outcome of its upstream execution; an edge is resolved once."""
        partition, parsed = check_flow_id(self._store, flow_id)
        edge = parse_uuid(edge_id, "edge_id")
        outcome = _OUTCOMES.get(upstream_outcome) if isinstance(upstream_outcome, str) else None
        if outcome is None:
            words = ", ".join(_OUTCOMES)
            raise error("invalid_input", f"upstream_outcome: must be one of {words}, got {shown(upstream_outcome)}")

        async def resolve(transaction: Transaction) -> ResolvedEdges:
            flow = await lock_flow_if_exists(transaction, partition, parsed)
            rows = await transaction.fetch(SQL.read_dependency, partition_key=partition, flow_id=parsed, edge_id=edge)
            if flow is None or not rows or rows[0]["state"] == "staged":
                raise error("invalid_dependency", f"flow {parsed} has no applied edge {edge}")
            return await self._resolver.resolve_edges(transaction, flow, [(edge, outcome)])

        resolved = await self._store.transact(resolve)
        await self._resolver.after_commit(resolved)
        return resolved.answers[0]

    async def promote_blocked_to_eligible(self, execution_id: ExecutionId | str) -> DependenciesPromoted:
        """Make an execution claimable that still waits for dependencies although they are satisfied."""
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)

        async def promote(transaction: Transaction) -> tuple[ResolvedEdges, DependenciesPromoted]:
            flow_id = await read_flow_of(transaction, partition, uuid)
            if flow_id is not None:
                await lock_flow_if_exists(transaction, partition, flow_id)
            locked = await lock_execution(transaction, parsed)
            if locked.lifecycle_phase != LifecyclePhase.RUNNABLE:
                raise error("not_runnable", f"the execution is {locked.lifecycle_phase}")
            if locked.eligibility_state != EligibilityState.BLOCKED_BY_DEPENDENCIES:
                raise error("not_blocked_by_deps", f"the execution is {locked.eligibility_state}")
            if locked.terminal_outcome != TerminalOutcome.NONE:
                raise error("terminal")
            (row,) = await transaction.fetch(SQL.read_unresolved, partition_key=partition, execution_id=uuid)
            if not row["is_free"]:
                raise error(
                    "deps_not_satisfied",
                    {"unsatisfied_count": str(row["unsatisfied"]), "unresolved_count": str(row["unresolved"])},
                )
            resolved, promoted = await self._resolver.promote(transaction, [(partition, UUID(uuid))])
            return resolved, DependenciesPromoted(execution_id=parsed, public_state=promoted[parsed])

        resolved, answer = await self._store.transact(promote, execution_id=parsed)
        await self._resolver.after_commit(resolved)
        return answer

    async def reconcile(self) -> SweepResult:
        """Settle what the cascade has left, and repair a page of blocked executions; return how many were changed.

        The pages follow each other and begin again after the last.
        """
        changed = await self._cascade.settle_left_over(since=self._store.due_watermark.since - LEFT_OVER_MS)
        try:
            stuck, is_last = await self._next_page()
        except TransportError as fault:
            if not is_statement_timeout(fault) or self._page_size.of(PAGE_LIMIT) == 1:
                raise
            logger.warning("a page of blocked executions was not in time, the next are smaller: %s", fault)
            self._page_size.reduce()
            return SweepResult(changed, is_full=True)
        self._pages += 1
        reached = self._position
        flows: dict[UUID | None, list[_Stuck]] = {}
        for flow_id, each in stuck:
            flows.setdefault(flow_id, []).append(each)
        repaired = 0
        for flow_id, found in flows.items():
            repair = partial(self._repair, None if flow_id is None else FlowId(flow_id))
            for batch in in_batches(found, lambda each: max(1, len(each.edge_ids)), limit=EDGE_LIMIT):
                repaired += await _repair_by_halves(repair, batch)
        if repaired and reached.edges_seen is not None:
            # The resolved edges are not among the unsatisfied ones any more.
            gone = sum(len(each.edge_ids) for _, each in stuck if each.execution_id == reached.execution_id)
            self._position = reached._replace(edges_seen=reached.edges_seen - gone)
        if is_last or self._pages >= PAGES_IN_A_ROW:
            self._pages = 0
        return SweepResult(changed + repaired, is_full=self._pages > 0)

    async def _next_page(self) -> tuple[list[tuple[UUID | None, _Stuck]], bool]:
        """The executions of the next page to repair, each with its flow, and whether it is the last page."""
        is_first = self._position == _Position()
        start = self.watermark.scan_start() if is_first else 0
        since = _Position(start - 1) if is_first else self._position
        rows = await self._store.fetch(
            SQL.list_stuck,
            since_at=since.at,
            since_id=since.execution_id,
            edges_seen=since.edges_seen,
            limit=self._page_size.of(PAGE_LIMIT),
            edges=EDGE_LIMIT,
        )
        self._page_size.record_in_time()
        end = rows[0]
        if is_first:
            self.watermark.record_scan(start, end["took_ms"] / 1000)
            self.watermark.move_to(end["began_at"])
        is_last = end["reached_at"] is None
        # Before the repairs: if they fail, the next page is the next one nevertheless.
        self._position = _Position() if is_last else _Position(end["reached_at"], end["reached_id"], end["edges_seen"])
        found = [
            (row["flow_id"], _Stuck(row["partition_key"], row["execution_id"], row["edge_ids"])) for row in rows[1:]
        ]
        return found, is_last

    async def _repair(self, flow_id: FlowId | None, stuck: Sequence[_Stuck]) -> int:
        """Resolve edges of blocked executions of one flow, or of none, and promote those that can run."""
        edge_ids = [edge_id for each in stuck for edge_id in each.edge_ids]
        resolved = (
            0 if flow_id is None or not edge_ids else await self._resolve(stuck[0].partition_key, flow_id, edge_ids)
        )
        free = [each for each in stuck if not each.edge_ids]
        return resolved + (await self._promote(flow_id, free) if free else 0)

    async def _resolve(self, partition: int, flow_id: FlowId, edge_ids: Sequence[UUID]) -> int:
        """Resolve those of these edges whose upstream executions have ended, or were deleted."""

        async def resolve(transaction: Transaction) -> ResolvedEdges:
            flow = await lock_flow_if_exists(transaction, partition, flow_id)
            if flow is None:
                return ResolvedEdges()
            rows = await transaction.fetch(
                SQL.list_ended_upstreams, partition_key=partition, flow_id=flow_id, edge_ids=edge_ids
            )
            edges = [
                (row["edge_id"], outcome_of_upstream(row["terminal_outcome"], context=f"edge {row['edge_id']}"))
                for row in rows
            ]
            return await self._resolver.resolve_edges(transaction, flow, edges) if edges else ResolvedEdges()

        resolved = await self._store.transact(resolve)
        await self._resolver.after_commit(resolved)
        return resolved.resolved

    async def _promote(self, flow_id: FlowId | None, children: Sequence[_Stuck]) -> int:
        """Promote blocked executions whose dependencies allow them to run."""

        async def promote(transaction: Transaction) -> ResolvedEdges:
            if flow_id is not None:
                await lock_flow_if_exists(transaction, children[0].partition_key, flow_id)
            rows = await transaction.fetch(
                SQL.lock_free,
                partition_keys=[child.partition_key for child in children],
                execution_ids=[child.execution_id for child in children],
            )
            free = [(row["partition_key"], row["execution_id"]) for row in rows]
            if not free:
                return ResolvedEdges()
            resolved, _ = await self._resolver.promote(transaction, free)
            return resolved

        resolved = await self._store.transact(promote)
        await self._resolver.after_commit(resolved)
        return resolved.promoted


async def _repair_by_halves(repair: Callable[[Sequence[_Stuck]], Awaitable[int]], stuck: Sequence[_Stuck]) -> int:
    """Repair executions of one flow; after a failure in halves, so that one that cannot be written stops no other."""
    try:
        return await repair(stuck)
    except EngineError as fault:
        if is_connection_fault(fault) and not (isinstance(fault, TransportError) and is_statement_timeout(fault)):
            raise
        if fault.code == "retry_exhausted":
            logger.debug("%d blocked executions are locked, the next pass tries them again", len(stuck))
            return 0
        if len(stuck) == 1:
            child = format_execution_id(stuck[0].partition_key, stuck[0].execution_id)
            logger.warning("blocked execution %s could not be repaired and is tried again: %s", child, fault)
            return 0
    middle = len(stuck) // 2
    return await _repair_by_halves(repair, stuck[:middle]) + await _repair_by_halves(repair, stuck[middle:])

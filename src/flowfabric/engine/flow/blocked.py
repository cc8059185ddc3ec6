"""Executions that wait for dependencies: resolving and promoting single ones, and the safety net of the cascade."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.quarantine import is_connection_fault
from flowfabric.engine.core.row import lock_execution
from flowfabric.engine.flow.cascade import Cascade
from flowfabric.engine.flow.resolve import EDGE_LIMIT, ResolvedEdges, Resolver
from flowfabric.engine.flow.row import check_flow_id, lock_flow_if_exists, read_flow_of
from flowfabric.engine.store import Store
from flowfabric.model.edge import DependenciesPromoted, DependencyResolved
from flowfabric.model.errors import EngineError, error
from flowfabric.model.event import CompletionOutcome
from flowfabric.model.ids import ExecutionId, FlowId, format_execution_id, parse_execution_id, parse_uuid, row_key
from flowfabric.model.states import EligibilityState, LifecyclePhase, TerminalOutcome
from flowfabric.model.text import shown

SQL = statements_beside(__file__)

BLOCKED_LIMIT = 1000
"""How many blocked executions one pass of the safety net looks at."""

logger = logging.getLogger(__name__)

_Child: TypeAlias = tuple[int, UUID]
"""The partition and the id of a blocked execution."""

_OUTCOMES = {outcome.literal: outcome for outcome in CompletionOutcome if outcome is not CompletionOutcome.RESUMABLE}


class _Position(NamedTuple):
    """Where the next pass over the blocked executions begins."""

    at: int = -1
    execution_id: UUID = UUID(int=0)


class Blocked:
    """Resolves edges and promotes executions outside of the cascade."""

    def __init__(self, store: Store, resolver: Resolver, cascade: Cascade) -> None:
        self._store = store
        self._resolver = resolver
        self._cascade = cascade
        self._position = _Position()

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

    async def reconcile(self) -> int:
        """Settle what the cascade has left, and repair a page of blocked executions; return how many were changed.

        The pages follow each other from pass to pass and begin again after the last.
        """
        changed = await self._cascade.settle_left_over(since=0)
        position = self._position
        rows = await self._store.fetch(
            SQL.list_stuck, since_at=position.at, since_id=position.execution_id, limit=BLOCKED_LIMIT
        )
        page = rows[0]
        is_last = page["reached_at"] is None
        self._position = _Position() if is_last else _Position(page["reached_at"], page["reached_id"])
        flows: dict[UUID | None, list[_Child]] = {}
        for row in rows[1:]:
            flows.setdefault(row["flow_id"], []).append((row["partition_key"], row["execution_id"]))
        for flow_id, children in flows.items():
            repair = self._promote_alone if flow_id is None else partial(self._repair, FlowId(flow_id))
            changed += await _repair_by_halves(repair, children)
        return changed

    async def _repair(self, flow_id: FlowId, children: Sequence[_Child]) -> int:
        """Resolve the edges of blocked children whose upstream executions have ended, and promote what can run."""
        partition = children[0][0]

        async def resolve(transaction: Transaction) -> ResolvedEdges:
            flow = await lock_flow_if_exists(transaction, partition, flow_id)
            if flow is None:
                return ResolvedEdges()
            rows = await transaction.fetch(
                SQL.list_ended_upstreams,
                partition_key=partition,
                execution_ids=[child for _, child in children],
                limit=EDGE_LIMIT,
            )
            edges = [(row["edge_id"], CompletionOutcome[row["terminal_outcome"].upper()]) for row in rows]
            return await self._resolver.resolve_edges(transaction, flow, edges) if edges else ResolvedEdges()

        resolved = await self._store.transact(resolve)
        await self._resolver.after_commit(resolved)
        return resolved.resolved + await self._promote(flow_id, children)

    async def _promote_alone(self, children: Sequence[_Child]) -> int:
        """Promote blocked executions of no flow."""
        return await self._promote(None, children)

    async def _promote(self, flow_id: FlowId | None, children: Sequence[_Child]) -> int:
        async def promote(transaction: Transaction) -> ResolvedEdges:
            if flow_id is not None:
                await lock_flow_if_exists(transaction, children[0][0], flow_id)
            rows = await transaction.fetch(
                SQL.lock_free,
                partition_keys=[partition for partition, _ in children],
                execution_ids=[child for _, child in children],
            )
            free = [(row["partition_key"], row["execution_id"]) for row in rows]
            if not free:
                return ResolvedEdges()
            resolved, _ = await self._resolver.promote(transaction, free)
            return resolved

        resolved = await self._store.transact(promote)
        await self._resolver.after_commit(resolved)
        return resolved.promoted


async def _repair_by_halves(repair: Callable[[Sequence[_Child]], Awaitable[int]], children: Sequence[_Child]) -> int:
    """Repair children of one flow; after a failure in halves, so that one that cannot be written stops no other."""
    try:
        return await repair(children)
    except EngineError as fault:
        if is_connection_fault(fault):
            raise
        if fault.code == "retry_exhausted":
            logger.debug("%d blocked executions are locked, the next pass tries them again", len(children))
            return 0
        if len(children) == 1:
            ((partition, uuid),) = children
            child = format_execution_id(partition, uuid)
            logger.warning("blocked execution %s could not be repaired and is tried again: %s", child, fault)
            return 0
    middle = len(children) // 2
    return await _repair_by_halves(repair, children[:middle]) + await _repair_by_halves(repair, children[middle:])

"""Resolution of edges: what the end of an upstream execution means for the groups and the children behind it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

from flowfabric.db.batch import Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.payload import INLINE_PAYLOAD_BYTES
from flowfabric.engine.core.row import Verdict
from flowfabric.engine.core.stored import literal
from flowfabric.engine.core.transition import PROMOTED, Move
from flowfabric.engine.core.wakeups import CascadeKey, Work
from flowfabric.engine.flow.row import LockedFlow
from flowfabric.engine.flow.state import MemberChange, change_members
from flowfabric.engine.store import Store
from flowfabric.model.edge import DependencyResolved, Resolution, ResolutionMarker
from flowfabric.model.event import CompletionOutcome, EventFamily, ReleaseReason
from flowfabric.model.ids import ExecutionId, format_execution_id
from flowfabric.model.states import AttemptState, BlockingReason, EligibilityState, PublicState, TerminalOutcome

SQL = statements_beside(__file__)

EDGE_LIMIT = 2000
"""How many edges one transaction resolves at most."""
BYTE_LIMIT = 32 * 2**20
"""How many bytes of results one transaction of the cascade copies at most, if it copies several."""

logger = logging.getLogger(__name__)

_PROMOTION = {
    **PROMOTED,
    "delayed_eligibility": EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    "delayed_blocking": BlockingReason.WAITING_FOR_DELAY,
    "backoff_blocking": BlockingReason.WAITING_FOR_RETRY_BACKOFF,
    "first_attempt": AttemptState.PENDING_FIRST_ATTEMPT,
}


@dataclass(kw_only=True, slots=True)
class ResolvedEdges:
    """What a transaction did to the children of the edges that it resolved, for after its commit."""

    resolved: int = 0
    promoted: int = 0
    skips: Sequence[LeaseEnd] = ()
    verdicts: Sequence[Verdict | Locked] = ()
    copied: frozenset[ExecutionId] = frozenset()
    work: list[Work] = field(default_factory=list)
    due_in_ms: int | None = None
    has_siblings: bool = False
    has_state_events: bool = False
    answers: list[DependencyResolved] = field(default_factory=list)
    """For each edge given, what its resolution did."""


Settled: TypeAlias = tuple[ResolvedEdges, list[CascadeKey], bool]
"""What a transaction did, the entries that are left, and whether more of them can be settled at once."""


class Resolver:
    """Resolves edges of flows that the caller's transaction has locked."""

    def __init__(self, store: Store, lease_ends: LeaseEnds) -> None:
        self._store = store
        self._lease_ends = lease_ends

    async def resolve_edges(
        self, transaction: Transaction, flow: LockedFlow, edges: Sequence[tuple[UUID, CompletionOutcome]]
    ) -> ResolvedEdges:
        """Resolve applied edges of a locked flow with these outcomes, waiting for the rows of their children.

        Call `after_commit` with the answer once the transaction has committed.
        """
        key = {"partition_key": flow.partition_key, "flow_id": flow.flow_id}
        rows = await transaction.fetch(SQL.lock_children_of_edges, **key, edge_ids=[edge_id for edge_id, _ in edges])
        open_edges = {row["edge_id"]: row for row in rows}
        given = [(edge_id, outcome) for edge_id, outcome in edges if edge_id in open_edges]
        if not given:
            return ResolvedEdges(answers=[_ALREADY_RESOLVED] * len(edges))
        (row,) = await transaction.fetch(
            SQL.resolve_edges,
            **key,
            edge_ids=[edge_id for edge_id, _ in given],
            outcomes=[outcome.value for _, outcome in given],
            has_data=any(row["has_data"] for row in rows),
            **_PROMOTION,
        )
        resolved = await self._follow(transaction, row)
        skipped = {end.execution_id for end in resolved.skips}
        found: dict[UUID, DependencyResolved] = {}
        for at, (edge_id, outcome) in enumerate(given):
            child = flow.member(open_edges[edge_id]["downstream_id"])
            found[edge_id] = _answer(
                row["groups_before"][at],
                row["groups_after"][at],
                is_success=outcome is CompletionOutcome.SUCCESS,
                is_copied=child in resolved.copied,
                is_skipped=child in skipped,
                is_all_of=row["are_all_of"][at],
            )
        resolved.answers = [found.get(edge_id, _ALREADY_RESOLVED) for edge_id, _ in edges]
        return resolved

    async def settle(self, transaction: Transaction, keys: Sequence[CascadeKey], *, limit: int) -> Settled:
        """Settle entries of the cascade that are not locked elsewhere: at most `limit` edges.

        Call `after_commit` with what was done once the transaction has committed.
        """
        (locked,) = await transaction.fetch(
            SQL.lock_entries,
            entry_partitions=[key.partition_key for key in keys],
            event_ids=[key.event_id for key in keys],
            edges=limit,
            bytes=BYTE_LIMIT,
        )
        left = _keys(locked["left_partitions"], locked["left_event_ids"])
        rest = _keys(locked["rest_partitions"], locked["rest_event_ids"])
        if not locked["event_ids"]:
            return ResolvedEdges(), left + rest, bool(rest)
        if locked["event_ids_without_flow"]:
            logger.warning(
                "dropping events %s of the cascade: their flow was deleted", locked["event_ids_without_flow"]
            )
        (row,) = await transaction.fetch(
            SQL.settle_entries,
            entry_partitions=locked["entry_partitions"],
            event_ids=locked["event_ids"],
            edges=locked["edges"],
            children=locked["children"] or (),
            has_data=locked["has_data"],
            **_PROMOTION,
        )
        resolved = await self._follow(transaction, row)
        changes = [
            MemberChange(partition_key=partition, flow_id=flow_id, live=-ended, failed=failed)
            for partition, flow_id, ended, failed in zip(
                row["flow_partitions"] or (),
                row["flow_ids"] or (),
                row["flow_ended"] or (),
                row["flow_failed"] or (),
                strict=True,
            )
        ]
        if changes:
            resolved.has_state_events = await change_members(transaction, changes)
        left += _keys(row["left_partitions"], row["left_event_ids"])
        return resolved, left + rest, bool(rest) or row["is_cut"] or False

    async def promote(
        self, transaction: Transaction, execution_ids: Sequence[tuple[int, UUID]]
    ) -> tuple[ResolvedEdges, dict[ExecutionId, PublicState]]:
        """Make executions that the transaction has locked and that wait for dependencies claimable."""
        (row,) = await transaction.fetch(
            SQL.promote_blocked,
            partition_keys=[partition for partition, _ in execution_ids],
            execution_ids=[uuid for _, uuid in execution_ids],
            **_PROMOTION,
        )
        promoted = {
            format_execution_id(partition, uuid): PublicState(state)
            for partition, uuid, state in zip(
                row["promoted_partitions"] or (), row["promoted_ids"] or (), row["promoted_states"] or (), strict=True
            )
        }
        return ResolvedEdges(promoted=len(promoted), work=_work(row), due_in_ms=row["due_in_ms"]), promoted

    async def after_commit(self, resolved: ResolvedEdges) -> None:
        """Wake workers, notify the holders of lost leases, and go on with the next hop of the cascade."""
        wakeups = self._store.wakeups
        if resolved.work:
            wakeups.work(resolved.work)
        if resolved.due_in_ms is not None:
            wakeups.timer(resolved.due_in_ms)
        if resolved.has_state_events:
            wakeups.events(EventFamily.OPERATOR)
        if resolved.has_siblings:
            wakeups.siblings()
        if resolved.skips:
            await self._lease_ends.after_commit(resolved.skips, resolved.verdicts)

    async def _follow(self, transaction: Transaction, row: Record) -> ResolvedEdges:
        """End the children that cannot run any more, and copy results into the inputs of others."""
        resolved = ResolvedEdges(
            resolved=row["resolved"],
            promoted=row["promoted"],
            work=_work(row),
            due_in_ms=row["due_in_ms"],
            has_siblings=row["has_siblings"],
        )
        if row["copy_ids"]:
            await transaction.fetch(
                SQL.copy_results,
                partition_keys=row["copy_partitions"],
                execution_ids=row["copy_ids"],
                source_ids=row["copy_sources"],
                inline_payload_bytes=INLINE_PAYLOAD_BYTES,
            )
            resolved.copied = frozenset(map(format_execution_id, row["copy_partitions"], row["copy_ids"]))
        if row["skip_ids"]:
            resolved.skips = [
                LeaseEnd(
                    format_execution_id(partition, uuid),
                    Move.SKIPPED if has_attempt else Move.SKIPPED_UNATTEMPTED,
                    reason=ReleaseReason.DEPENDENCY_IMPOSSIBLE.value,
                    lost_epoch=lost_epoch,
                )
                for partition, uuid, has_attempt, lost_epoch in zip(
                    row["skip_partitions"], row["skip_ids"], row["skip_has_attempt"], row["skip_epochs"], strict=True
                )
            ]
            resolved.verdicts = await self._lease_ends.within(transaction, resolved.skips)
        return resolved


def outcome_of_upstream(terminal_outcome: str | None, *, context: str) -> CompletionOutcome:
    """The outcome by which an edge is resolved whose upstream execution ended like this, or was deleted if it is None.

    How a deleted one ended is not known any more: it counts as skipped, as it will never have a result.
    """
    if terminal_outcome is None:
        return CompletionOutcome.SKIPPED
    return CompletionOutcome.of(literal(TerminalOutcome, terminal_outcome, context=context, field="terminal_outcome"))


_ALREADY_RESOLVED = DependencyResolved(resolution=Resolution.ALREADY_RESOLVED)


def _answer(
    before: str, after: str, *, is_success: bool, is_copied: bool, is_skipped: bool, is_all_of: bool
) -> DependencyResolved:
    if before != "pending":
        return DependencyResolved(resolution=Resolution.ALREADY_FIRED)
    if after == "impossible":
        marker = ResolutionMarker.CHILD_SKIPPED if is_skipped else ResolutionMarker.NONE
        return DependencyResolved(resolution=Resolution.IMPOSSIBLE, marker=marker)
    if after == "satisfied" or (is_all_of and is_success):
        marker = ResolutionMarker.DATA_INJECTED if is_copied else ResolutionMarker.NONE
        return DependencyResolved(resolution=Resolution.SATISFIED, marker=marker)
    return DependencyResolved(resolution=Resolution.PENDING)


def _keys(partitions: Sequence[int] | None, event_ids: Sequence[int] | None) -> list[CascadeKey]:
    return list(map(CascadeKey, partitions or (), event_ids or ()))


def _work(row: Record) -> list[Work]:
    return [
        Work(*place)
        for place in zip(
            row["work_lanes"] or (),
            row["work_routes"] or (),
            row["work_queues"] or (),
            row["work_places"] or (),
            strict=True,
        )
    ]

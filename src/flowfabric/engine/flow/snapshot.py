"""Stored edges as callers see them."""

from uuid import UUID

from flowfabric.db.database import Record
from flowfabric.engine.core.stored import literal, required
from flowfabric.model.edge import DependencyState, EdgeSnapshot, EdgeState
from flowfabric.model.ids import EdgeId, FlowId, format_execution_id


def edge_snapshot(row: Record) -> EdgeSnapshot:
    """The record of a stored edge."""
    edge_id: UUID = row["edge_id"]
    partition = row["partition_key"]
    state = literal(DependencyState, row["state"], context=f"edge {edge_id}", field="state")
    staged_at: int = required(row["staged_at"], context=f"edge {edge_id}", field="staged_at")
    return EdgeSnapshot(
        edge_id=EdgeId(edge_id),
        flow_id=FlowId(row["flow_id"]),
        upstream_execution_id=format_execution_id(partition, row["upstream_id"]),
        downstream_execution_id=format_execution_id(partition, row["downstream_id"]),
        dependency_kind=row["dependency_kind"],
        satisfaction_condition="all_required",
        data_passing_ref=row["data_passing_ref"] or None,
        edge_state=EdgeState.PENDING if state is DependencyState.STAGED else EdgeState.APPLIED,
        dependency_state=state,
        created_at=staged_at,
        created_by="engine",
        staged_at=staged_at,
        applied_at=row["applied_at"],
        last_resolved_at=row["last_resolved_at"],
    )

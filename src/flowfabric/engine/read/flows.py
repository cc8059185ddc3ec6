"""Reads of flows and their edges, and whether the dependencies of an execution allow it to run."""

from uuid import UUID

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import literal, required
from flowfabric.engine.flow.row import check_flow_id
from flowfabric.engine.flow.snapshot import edge_snapshot
from flowfabric.engine.store import Store
from flowfabric.model.edge import (
    EdgeGroupSnapshot,
    EdgeSelector,
    EdgeSnapshot,
    EligibilityStatus,
    FlowEligibility,
    GroupState,
    Incoming,
    Outgoing,
    edge_policy_of,
)
from flowfabric.model.errors import error
from flowfabric.model.flow import CancellationPolicy, FlowSnapshot, FlowState
from flowfabric.model.ids import (
    ExecutionId,
    FlowId,
    Namespace,
    format_execution_id,
    parse_execution_id,
    parse_uuid,
    row_key,
    split_execution_id,
)
from flowfabric.model.states import LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.model.text import shown

SQL = statements_beside(__file__)


class _StoredGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group as `read_flow_record` returns it."""

    downstream_id: UUID
    policy: str
    k: int | None
    on_satisfied: str | None
    staged_count: int
    succeeded_count: int
    failed_count: int
    skipped_count: int
    group_state: str

    def snapshot(self, partition: int) -> EdgeGroupSnapshot:
        """The group as callers see it."""
        downstream = format_execution_id(partition, self.downstream_id)
        resolved = self.succeeded_count + self.failed_count + self.skipped_count
        return EdgeGroupSnapshot(
            downstream_execution_id=downstream,
            policy=edge_policy_of(self.policy, self.k, self.on_satisfied),
            total_deps=self.staged_count,
            satisfied_count=self.succeeded_count,
            failed_count=self.failed_count,
            skipped_count=self.skipped_count,
            running_count=max(self.staged_count - resolved, 0),
            group_state=literal(GroupState, self.group_state, context=f"group of {downstream}", field="group_state"),
        )


_read_groups = msgspec.json.Decoder(list[_StoredGroup]).decode
_read_tags = msgspec.json.Decoder(dict[str, str]).decode


class Flows:
    """The operations that read flows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def describe_flow(self, flow_id: UUID | str) -> FlowSnapshot | None:
        """A flow with its tags and the groups of edges in it; None if it does not exist."""
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(SQL.read_flow_record, partition_key=partition, flow_id=parsed)
        return _flow(partition, parsed, rows[0]) if rows else None

    async def describe_edge(self, flow_id: UUID | str, edge_id: UUID | str) -> EdgeSnapshot | None:
        """An edge of a flow; None if it does not exist."""
        partition, parsed = check_flow_id(self._store, flow_id)
        edge = parse_uuid(edge_id, "edge_id")
        rows = await self._store.fetch(SQL.read_edge, partition_key=partition, flow_id=parsed, edge_id=edge)
        return edge_snapshot(rows[0]) if rows else None

    async def list_edges(self, flow_id: UUID | str, selector: EdgeSelector) -> list[EdgeSnapshot]:
        """The edges of a flow that leave one execution or lead to it, by their ids."""
        partition, parsed = check_flow_id(self._store, flow_id)
        match selector:
            case Outgoing(from_node=node):
                statement = SQL.list_outgoing_edges
            case Incoming(to_node=node):
                statement = SQL.list_incoming_edges
            case _:
                raise error(
                    "invalid_input",
                    f"selector: expected Outgoing(from_node) or Incoming(to_node), got {shown(selector)}",
                )
        own_partition, uuid = split_execution_id(parse_execution_id(node))
        if own_partition != partition:
            return []
        rows = await self._store.fetch(statement, partition_key=partition, flow_id=parsed, execution_id=uuid)
        return [edge_snapshot(row) for row in rows]

    async def evaluate_flow_eligibility(self, execution_id: ExecutionId | str) -> EligibilityStatus:
        """Whether the dependencies of an execution allow it to run; what else may block it is ignored."""
        partition, uuid = row_key(parse_execution_id(execution_id))
        rows = await self._store.fetch(SQL.read_dependencies, partition_key=partition, execution_id=uuid)
        return EligibilityStatus(status=_eligibility(rows[0]) if rows else FlowEligibility.NOT_FOUND)


def _eligibility(row: Record) -> FlowEligibility:
    if row["lifecycle_phase"] != LifecyclePhase.RUNNABLE:
        return FlowEligibility.NOT_RUNNABLE
    if row["ownership_state"] != OwnershipState.UNOWNED:
        return FlowEligibility.OWNED
    if row["terminal_outcome"] != TerminalOutcome.NONE:
        return FlowEligibility.TERMINAL
    match row["group_state"]:
        case GroupState.IMPOSSIBLE:
            return FlowEligibility.IMPOSSIBLE
        case GroupState.PENDING:
            return FlowEligibility.BLOCKED_BY_DEPENDENCIES
        case _:
            return FlowEligibility.ELIGIBLE


def _flow(partition: int, flow_id: FlowId, row: Record) -> FlowSnapshot:
    context = f"describe_flow {flow_id}"
    policy = row["cancellation_policy"]
    groups = _read_groups(row["edge_groups"]) if row["edge_groups"] else []
    return FlowSnapshot(
        flow_id=flow_id,
        flow_kind=row["flow_kind"],
        namespace=Namespace(required(row["namespace"], context=context, field="namespace")),
        public_flow_state=literal(FlowState, row["public_flow_state"], context=context, field="public_flow_state"),
        derived_state=literal(FlowState, row["derived_state"], context=context, field="derived_state"),
        graph_revision=row["graph_revision"],
        node_count=row["node_count"],
        edge_count=row["edge_count"],
        created_at=row["created_at"],
        last_mutation_at=row["last_mutation_at"],
        cancelled_at=row["cancelled_at"],
        cancel_reason=row["cancel_reason"],
        cancellation_policy=None
        if policy is None
        else literal(CancellationPolicy, policy, context=context, field="cancellation_policy"),
        tags=_read_tags(row["tags"]) if row["tags"] else {},
        edge_groups=[group.snapshot(partition) for group in groups],
    )

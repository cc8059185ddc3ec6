"""Graphs built step by step: flows are created, get members and edges, and edges are applied."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import lock_execution_if_exists
from flowfabric.engine.core.stored import literal
from flowfabric.engine.core.transition import BLOCKED_BY_DEPENDENCIES
from flowfabric.engine.execution.limits import LimitRules
from flowfabric.engine.flow.limits import FlowLimits, flow_limits, limit_columns
from flowfabric.engine.flow.resolve import ResolvedEdges, Resolver, outcome_of_upstream
from flowfabric.engine.flow.row import (
    LockedFlow,
    check_flow_id,
    flow_exists,
    lock_flow,
    lock_flow_if_exists,
    lock_open_flow,
)
from flowfabric.engine.flow.snapshot import edge_snapshot
from flowfabric.engine.flow.state import FAILED_OUTCOMES, MemberChange, change_members
from flowfabric.engine.store import Store
from flowfabric.model.edge import (
    MAX_REF_CHARACTERS,
    SUCCESS_ONLY,
    AlreadyApplied,
    AlreadySet,
    DependencyApplied,
    DependencyState,
    EdgePolicy,
    GroupState,
    PolicySet,
    Staged,
    edge_policy_columns,
    edge_policy_of,
    parse_edge_policy,
)
from flowfabric.model.errors import ConflictError, error
from flowfabric.model.event import EventFamily
from flowfabric.model.flow import Added, AlreadyMember, FlowAlreadySatisfied, FlowCreated
from flowfabric.model.ids import (
    EdgeId,
    ExecutionId,
    FlowId,
    check_storable,
    parse_execution_id,
    parse_uuid,
    split_execution_id,
)
from flowfabric.model.states import EligibilityState, LifecyclePhase, TerminalOutcome
from flowfabric.model.text import check_length, check_range, check_short

SQL = statements_beside(__file__)

MAX_REVISION = 2**63 - 1


class Graph:
    """The operations that build the graph of a flow."""

    def __init__(self, store: Store, resolver: Resolver, rules: LimitRules) -> None:
        self._store = store
        self._resolver = resolver
        self._limits = FlowLimits(store, rules)

    async def create_flow(
        self,
        flow_id: UUID | str,
        *,
        flow_kind: str,
        namespace: str,
        budget_ids: Sequence[UUID | str] = (),
        quota_policy_id: UUID | str | None = None,
    ) -> FlowCreated | FlowAlreadySatisfied:
        """Create an empty flow; if there is one with this id, nothing is compared or changed.

        Its limits are those of every member.
        """
        partition, parsed = check_flow_id(self._store, flow_id)
        limits = flow_limits(budget_ids, quota_policy_id)
        kind, namespace = check_short(flow_kind, "flow_kind"), check_short(namespace, "namespace")
        if not await flow_exists(self._store, partition, parsed):
            rows = await self._store.fetch(
                SQL.insert_empty_flow,
                partition_key=partition,
                flow_id=parsed,
                namespace_no=await self._store.namespace_no(namespace),
                flow_kind=kind,
                retention_ms=self._store.rules.retention_ms,
                **limit_columns(limits),
            )
            # Without a row, another session has created it since; its commit is confirmed too.
            if rows or not await flow_exists(self._store, partition, parsed):
                return FlowCreated(flow_id=parsed)
        return FlowAlreadySatisfied(flow_id=parsed)

    async def add_execution_to_flow(
        self, flow_id: UUID | str, execution_id: ExecutionId | str
    ) -> Added | AlreadyMember:
        """Make an execution in any state a member of a flow, which it never leaves.

        If the flow has limits, it gets them, unless it is active or has ended: then it is refused.
        """
        partition, flow = check_flow_id(self._store, flow_id)
        member = _check_partition(partition, flow, parse_execution_id(execution_id))
        key = {"partition_key": partition, "execution_id": split_execution_id(member)[1]}

        async def add(transaction: Transaction) -> tuple[Added | AlreadyMember, bool, list[Record]] | None:
            locked = await lock_open_flow(transaction, partition, flow)
            rows = await transaction.fetch(SQL.lock_new_member, **key)
            if not rows:
                raise error("execution_not_found", member)
            if (other := rows[0]["flow_id"]) is not None:
                if other != flow:
                    raise error("execution_already_in_flow", f"already_member_of_different_flow:{other}")
                return AlreadyMember(execution_id=member, node_count=locked.node_count), False, []
            (left,) = await transaction.fetch(SQL.read_left_edges, **key, flow_id=flow)
            if left["has_edges"]:
                raise error(
                    "execution_already_in_flow",
                    f"flow {flow} has edges of an earlier member with the id {member}, which is deleted; "
                    "create the execution with another id",
                )
            if (moved := await queue.move(transaction, flow, rows[0], key)) is None:
                return None
            (row,) = await transaction.fetch(SQL.add_member, **key, flow_id=flow)
            outcome = literal(
                TerminalOutcome, rows[0]["terminal_outcome"], context=f"execution {member}", field="terminal_outcome"
            )
            change = MemberChange(
                partition_key=partition,
                flow_id=flow,
                live=int(outcome is TerminalOutcome.NONE),
                failed=int(outcome in FAILED_OUTCOMES),
            )
            has_changed = await change_members(transaction, [change])
            return Added(execution_id=member, new_node_count=row["node_count"]), has_changed, moved

        added = None
        while added is None:
            queue = await self._limits.queue_of(flow, key)
            added = await self._store.transact(add, execution_id=member)
        answer, has_changed, moved = added
        if moved:
            self._store.wakeups.work_of(moved)
        if has_changed:
            self._store.wakeups.events(EventFamily.OPERATOR)
        return answer

    async def stage_dependency_edge(
        self,
        flow_id: UUID | str,
        *,
        edge_id: UUID | str,
        upstream_execution_id: ExecutionId | str,
        downstream_execution_id: ExecutionId | str,
        expected_graph_revision: int,
        dependency_kind: str = SUCCESS_ONLY,
        data_passing_ref: str | None = None,
    ) -> Staged:
        """Add an edge to the graph of a flow, if nobody has changed the graph since the expected revision.

        It blocks nothing until it is applied. An edge that exists is refused with the stored edge as `existing` in the
        detail.
        """
        partition, flow = check_flow_id(self._store, flow_id)
        edge = EdgeId(parse_uuid(edge_id, "edge_id"))
        upstream, downstream = parse_execution_id(upstream_execution_id), parse_execution_id(downstream_execution_id)
        check_range(expected_graph_revision, "expected_graph_revision", 0, MAX_REVISION)
        kind, ref = check_short(dependency_kind, "dependency_kind"), _check_ref(data_passing_ref) or None
        if upstream == downstream:
            raise error("self_referencing_edge", f"edge {edge} leads from {upstream} to itself")
        ends = {"upstream_id": split_execution_id(upstream)[1], "downstream_id": split_execution_id(downstream)[1]}
        key = {"partition_key": partition, "flow_id": flow, "edge_id": edge, **ends}

        async def stage(transaction: Transaction) -> Staged:
            locked = await lock_open_flow(transaction, partition, flow)
            if locked.graph_revision != expected_graph_revision:
                raise error(
                    "stale_graph_revision",
                    f"flow {flow} has graph revision {locked.graph_revision}, expected {expected_graph_revision}; "
                    "read the flow again and repeat the call",
                )
            (found,) = await transaction.fetch(SQL.read_new_edge, **key)
            for execution_id, is_member in ((upstream, found["has_upstream"]), (downstream, found["has_downstream"])):
                if not is_member or split_execution_id(execution_id)[0] != partition:
                    raise error(
                        "execution_not_in_flow",
                        f"execution {execution_id} is not a member of flow {flow}; add it first",
                    )
            if found["closes_cycle"]:
                raise error("cycle_detected", f"execution {downstream} already leads to {upstream}")
            if found["edge_id"] is not None:
                existing = edge_snapshot(found)
                raise ConflictError(
                    "dependency_already_exists",
                    {"existing": existing},
                    f"edge {edge} is staged already: {existing.upstream_execution_id} to "
                    f"{existing.downstream_execution_id}",
                )
            (row,) = await transaction.fetch(SQL.insert_edge, **key, dependency_kind=kind, data_passing_ref=ref)
            return Staged(edge_id=edge, new_graph_revision=row["graph_revision"])

        return await self._store.transact(stage)

    async def set_edge_group_policy(
        self,
        flow_id: UUID | str,
        downstream_execution_id: ExecutionId | str,
        policy: EdgePolicy | Mapping[str, object],
    ) -> PolicySet | AlreadySet:
        """Set when the inbound edges of an execution are satisfied, before the first of them is staged."""
        partition, flow = check_flow_id(self._store, flow_id)
        wanted = parse_edge_policy(policy)
        downstream = _check_partition(
            partition, flow, parse_execution_id(downstream_execution_id), "downstream_execution_id"
        )
        kind, k, on_satisfied = edge_policy_columns(wanted)
        key = {"partition_key": partition, "flow_id": flow, "downstream_id": split_execution_id(downstream)[1]}

        async def set_policy(transaction: Transaction) -> PolicySet | AlreadySet:
            await lock_flow(transaction, partition, flow)
            rows = await transaction.fetch(SQL.read_group_policy, **key)
            if rows:
                stored = rows[0]
                if stored["staged_count"]:
                    raise error("invalid_input", "edge_group_policy_already_fixed: dependencies already staged")
                if edge_policy_of(stored["policy"], stored["k"], stored["on_satisfied"]) == wanted:
                    return AlreadySet()
            await transaction.fetch(SQL.set_group_policy, **key, policy=kind, k=k, on_satisfied=on_satisfied)
            return PolicySet()

        return await self._store.transact(set_policy)

    async def apply_dependency_to_child(
        self,
        flow_id: UUID | str,
        *,
        edge_id: UUID | str,
        upstream_execution_id: ExecutionId | str,
        downstream_execution_id: ExecutionId | str,
        graph_revision: int,
        dependency_kind: str | None = None,
        data_passing_ref: str | None = None,
    ) -> DependencyApplied | AlreadyApplied:
        """Make a downstream execution depend on a staged edge; if it is runnable, it waits from now on.

        If the upstream execution has ended or was deleted, the edge is resolved in the same transaction. The kind and
        the data reference are as staged unless they are given here; an empty reference passes no data.
        """
        partition, flow = check_flow_id(self._store, flow_id)
        edge = EdgeId(parse_uuid(edge_id, "edge_id"))
        upstream, downstream = parse_execution_id(upstream_execution_id), parse_execution_id(downstream_execution_id)
        check_storable(downstream)
        check_range(graph_revision, "graph_revision", 0, MAX_REVISION)
        kind = None if dependency_kind is None else check_short(dependency_kind, "dependency_kind")
        given = {"dependency_kind": kind, "data_passing_ref": _check_ref(data_passing_ref)}
        key = {"partition_key": partition, "flow_id": flow, "edge_id": edge}

        async def apply(transaction: Transaction) -> tuple[DependencyApplied | AlreadyApplied, ResolvedEdges | None]:
            locked = await lock_flow_if_exists(transaction, partition, flow)
            # What follows decides from the state of the child, which a claim may be changing.
            await lock_execution_if_exists(transaction, downstream)
            found = await transaction.fetch(SQL.read_edge_to_apply, **key)
            if locked is None or not found:
                raise error("invalid_dependency", f"edge {edge} is not staged in flow {flow}")
            row = found[0]
            if (locked.member(row["upstream_id"]), locked.member(row["downstream_id"])) != (upstream, downstream):
                raise error(
                    "invalid_dependency",
                    f"edge {edge} is staged from {locked.member(row['upstream_id'])} to "
                    f"{locked.member(row['downstream_id'])}, got {upstream} to {downstream}",
                )
            _check_child(row, flow, downstream)
            if row["state"] != DependencyState.STAGED:
                return AlreadyApplied(), None
            (applied,) = await transaction.fetch(
                SQL.apply_edge, **key, **given, downstream_id=row["downstream_id"], graph_revision=graph_revision
            )
            count: int = applied["unsatisfied_count"]
            if applied["group_state"] == GroupState.PENDING and _can_be_blocked(row):
                freed = await transaction.fetch(
                    SQL.block_by_dependencies,
                    partition_key=partition,
                    execution_id=row["downstream_id"],
                    detail=f"{count} dep(s) unresolved incl {edge}",
                    slot_shard=self._store.slot_shard,
                    **BLOCKED_BY_DEPENDENCIES,
                )
                self._store.wakeups.room_after(transaction, freed)
            return DependencyApplied(unsatisfied_count=count), await self._resolve(transaction, locked, edge, row)

        answer, resolved = await self._store.transact(apply, execution_id=downstream)
        if resolved is not None:
            await self._resolver.after_commit(resolved)
        return answer

    async def _resolve(
        self, transaction: Transaction, flow: LockedFlow, edge: EdgeId, row: Record
    ) -> ResolvedEdges | None:
        """Resolve an applied edge whose upstream execution has ended or was deleted.

        An upstream execution that ends later finds the edge: the flow stays locked until the edge is committed.
        """
        if row["upstream_phase"] not in (LifecyclePhase.TERMINAL, None):
            return None
        outcome = outcome_of_upstream(row["upstream_outcome"], context=f"edge {edge}")
        return await self._resolver.resolve_edges(transaction, flow, [(edge, outcome)])


def _check_partition(
    partition: int, flow: FlowId, execution_id: ExecutionId, field: str = "execution_id"
) -> ExecutionId:
    """Return the id of an execution that can be a member of a flow: it has the flow's partition."""
    own, _ = split_execution_id(execution_id)
    if own != partition:
        raise error(
            "invalid_input",
            f"partition_mismatch: {field} has partition {own}, flow {flow} has {partition}; "
            "mint the id with flowfabric.ids.mint_for_flow",
        )
    return execution_id


def _check_ref(ref: object) -> str | None:
    """The reference that was given; an empty one is stored as none."""
    return None if ref is None else check_length(ref, "data_passing_ref", MAX_REF_CHARACTERS)


def _check_child(row: Record, flow: FlowId, downstream: ExecutionId) -> None:
    """Raise unless the downstream execution of an edge still exists as a member."""
    if row["downstream_phase"] is None:
        raise error("execution_not_found", downstream)
    member_of = row["downstream_flow_id"]
    if member_of is None:
        raise error("execution_not_in_flow", f"execution {downstream} is not a member of flow {flow}; add it first")
    if member_of != flow:
        raise error("execution_already_in_flow", f"already_member_of_different_flow:{member_of}")


def _can_be_blocked(row: Record) -> bool:
    """Whether a downstream execution waits from now on: one held for the cancellation of its flow stays held."""
    is_held: bool = row["downstream_eligibility"] == EligibilityState.BLOCKED_BY_OPERATOR
    return row["downstream_phase"] == LifecyclePhase.RUNNABLE and not is_held

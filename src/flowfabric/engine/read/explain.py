"""Explanation of why an execution does not progress, from one snapshot of the store."""

from collections.abc import Iterator
from typing import Literal
from uuid import UUID

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import literal, required, vector
from flowfabric.engine.read.limiting import limit_reasons
from flowfabric.engine.store import Store
from flowfabric.model.edge import DependencyState, EdgePolicy, edge_policy_of
from flowfabric.model.errors import error
from flowfabric.model.explanation import (
    MAX_AHEAD,
    MAX_EDGES,
    MAX_FAILED_EDGES,
    BudgetReason,
    DelayedReason,
    DependenciesReason,
    EndedReason,
    Explanation,
    GrantedReason,
    HeldReason,
    ImpossibleReason,
    LastFailure,
    LeaseLostReason,
    NoCapableWorkerReason,
    NoWorkerReason,
    OpenWaitpoint,
    QueuedReason,
    QuotaReason,
    Reason,
    RunningReason,
    SignalsReason,
    UnmetEdge,
    summarise,
)
from flowfabric.model.ids import (
    EdgeId,
    ExecutionId,
    LaneId,
    Namespace,
    SuspensionId,
    WaitpointId,
    WorkerId,
    WorkerInstanceId,
    format_execution_id,
    parse_execution_id,
    row_key,
)
from flowfabric.model.policy import read_stored_policy, reclaim_cap
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    StateVector,
)
from flowfabric.model.suspension import DEFAULT_DETAIL, SuspensionReason

SQL = statements_beside(__file__)

BATCHES = 200
"""In how many batches of ended executions the latest runs of a queue are looked for."""
RUNS = 20
"""Of how many runs the duration is averaged."""

_PAUSED = frozenset(
    {BlockingReason.PAUSED_BY_OPERATOR, BlockingReason.PAUSED_BY_POLICY, BlockingReason.PAUSED_BY_FLOW_CANCEL}
)
_HELD = frozenset({EligibilityState.BLOCKED_BY_OPERATOR, EligibilityState.BLOCKED_BY_LANE_STATE})

_read_edges = msgspec.json.Decoder(list[tuple[UUID, UUID, str, str | None, str | None]]).decode
_read_waitpoints = msgspec.json.Decoder(list[tuple[UUID, str, tuple[str, ...]]]).decode


class Explain:
    """The explain operation."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def explain(self, execution_id: ExecutionId | str) -> Explanation:
        """Explain the state of an execution: every reason that holds it, and a one-sentence summary."""
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        rows = await self._store.fetch(
            SQL.read_reasons,
            partition_key=partition,
            execution_id=uuid,
            most=MAX_AHEAD,
            edges=MAX_EDGES,
            batches=BATCHES,
            runs=RUNS,
        )
        if not rows:
            raise error("execution_not_found", parsed)
        row = rows[0]
        context = f"explain {parsed}"
        state = vector(row, context)
        reasons = tuple(_reasons(row, state, context))
        public_state = state.public_state
        if public_state is PublicState.WAITING and any(
            isinstance(each, BudgetReason | QuotaReason) for each in reasons
        ):
            # A claim marks only the first execution of a queue without room.
            public_state = PublicState.RATE_LIMITED
        return Explanation(
            execution_id=parsed,
            public_state=public_state,
            state_vector=state,
            since=row["last_transition_at"],
            summary=summarise(public_state, reasons),
            reasons=reasons,
        )


def _reasons(row: Record, state: StateVector, context: str) -> Iterator[Reason]:
    match state.lifecycle_phase:
        case LifecyclePhase.TERMINAL:
            reason = row["failure_reason"] if row["cancellation_reason"] is None else row["cancellation_reason"]
            yield EndedReason(outcome=state.terminal_outcome, reason=reason, completed_at=row["completed_at"])
            if row["impossible_count"]:
                yield _impossible(row, context)
            return
        case LifecyclePhase.ACTIVE:
            yield _lease(row, state)
        case LifecyclePhase.SUSPENDED if row["suspension_id"] is not None:
            yield _signals(row)
    if state.blocking_reason in _PAUSED or state.eligibility_state in _HELD:
        yield HeldReason(blocking_reason=state.blocking_reason, detail=row["blocking_detail"])
    if state.eligibility_state is EligibilityState.BLOCKED_BY_DEPENDENCIES:
        yield _dependencies(row, context)
    yield from limit_reasons(row, state)
    if _is_delayed(row, state):
        yield DelayedReason(until=row["delay_until"], cause=_cause(state), last_failure=_last_failure(row))
    if row["is_claimable"] and row["granted_until"] is not None:
        yield _granted(row)
    elif row["is_claimable"]:
        yield QueuedReason(
            lane_id=LaneId(required(row["lane_id"], context=context, field="lane_id")),
            lane_state=literal(LaneState, row["lane_state"], context=context, field="lane_state"),
            ahead=row["ahead"],
            workers=row["workers"],
            is_in_turns=row["is_fair"],
        )
        if not row["of_kind"]:
            yield _unserved(row, context)
    is_blocked = state.eligibility_state is EligibilityState.BLOCKED_BY_ROUTE
    is_waiting = row["is_claimable"] and row["granted_until"] is None
    if is_blocked or (is_waiting and row["required"] and not row["workers"]):
        missing = () if row["workers"] else row["unoffered"] or row["required"] or ()
        yield NoCapableWorkerReason(missing=tuple(sorted(missing)), workers_seen=row["of_kind"])


def _granted(row: Record) -> GrantedReason:
    worker_id, instance = row["granted_worker_id"], row["granted_worker_instance_id"]
    return GrantedReason(
        worker_id=None if worker_id is None else WorkerId(worker_id),
        worker_instance_id=None if instance is None else WorkerInstanceId(instance),
        until=row["granted_until"],
    )


def _unserved(row: Record, context: str) -> NoWorkerReason:
    """The first of lane, namespace and kind that no live worker serves."""
    unserved: Literal["lane", "namespace", "kind"] = "kind"
    if not row["of_namespace"]:
        unserved = "namespace" if row["on_lane"] else "lane"
    return NoWorkerReason(
        unserved=unserved,
        lane_id=LaneId(required(row["lane_id"], context=context, field="lane_id")),
        namespace=Namespace(required(row["namespace"], context=context, field="namespace")),
        execution_kind=required(row["execution_kind"], context=context, field="execution_kind"),
        workers_seen=row["of_namespace"] or row["on_lane"],
    )


def _lease(row: Record, state: StateVector) -> RunningReason | LeaseLostReason:
    expires_at = row["lease_expires_at"]
    is_held = state.ownership_state is OwnershipState.LEASED and expires_at is not None and expires_at > row["now"]
    kind = RunningReason if is_held else LeaseLostReason
    return kind(
        worker_id=None if row["worker_id"] is None else WorkerId(row["worker_id"]),
        worker_instance_id=None if row["worker_instance_id"] is None else WorkerInstanceId(row["worker_instance_id"]),
        lease_expires_at=expires_at,
        attempt_index=max(row["attempt_count"] - 1, 0),
        reclaim_count=row["reclaim_count"],
        reclaim_cap=reclaim_cap(read_stored_policy(row["policy"])),
    )


def _signals(row: Record) -> SignalsReason:
    found = _read_waitpoints(row["waitpoints"]) if row["waitpoints"] else []
    detail: str = row["blocking_detail"] or ""
    has_question = row["reason_code"] == SuspensionReason.PAUSED_BY_BUDGET and not detail.startswith(DEFAULT_DETAIL)
    return SignalsReason(
        suspension_id=SuspensionId(row["suspension_id"]),
        reason_code=row["reason_code"],
        waitpoints=tuple(
            OpenWaitpoint(waitpoint_id=WaitpointId(waitpoint_id), waitpoint_key=key, required_signal_names=names)
            for waitpoint_id, key, names in found
        ),
        timeout_at=row["timeout_at"],
        detail=detail or None if has_question else None,
    )


def _dependencies(row: Record, context: str) -> DependenciesReason:
    if row["group_policy"] is None:
        return DependenciesReason(detail=row["blocking_detail"])
    return DependenciesReason(
        detail=row["blocking_detail"], policy=_policy(row), edges=_edges(row, context), unmet_count=row["unmet_count"]
    )


def _impossible(row: Record, context: str) -> ImpossibleReason:
    return ImpossibleReason(
        policy=_policy(row),
        total_count=row["staged_count"],
        failed_count=row["impossible_count"],
        edges=_edges(row, context)[:MAX_FAILED_EDGES],
    )


def _policy(row: Record) -> EdgePolicy:
    return edge_policy_of(row["group_policy"], row["group_k"], row["group_on_satisfied"])


def _edges(row: Record, context: str) -> tuple[UnmetEdge, ...]:
    found = _read_edges(row["unmet_edges"]) if row["unmet_edges"] else []
    return tuple(
        UnmetEdge(
            edge_id=EdgeId(edge_id),
            upstream_execution_id=format_execution_id(row["partition_key"], upstream_id),
            execution_kind=kind,
            public_state=None
            if public_state is None
            else literal(PublicState, public_state, context=context, field="public_state"),
            is_applied=state != DependencyState.STAGED,
        )
        for edge_id, upstream_id, state, public_state, kind in found
    )


def _is_delayed(row: Record, state: StateVector) -> bool:
    """Whether the execution has to wait for delay_until, now or after a block is removed."""
    if state.lifecycle_phase is not LifecyclePhase.RUNNABLE or state.eligibility_state is EligibilityState.ELIGIBLE_NOW:
        return False
    until = row["delay_until"]
    is_timed = state.eligibility_state is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
    return is_timed or (until is not None and until > row["now"])


def _cause(state: StateVector) -> Literal["delay", "retry_backoff", "resume_delay"]:
    if state.blocking_reason is BlockingReason.WAITING_FOR_RESUME_DELAY:
        return "resume_delay"
    return "retry_backoff" if state.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT else "delay"


def _last_failure(row: Record) -> LastFailure | None:
    if row["failed_index"] is None:
        return None
    return LastFailure(
        attempt_index=row["failed_index"],
        reason=row["last_failure_reason"],
        category=row["last_failure_category"],
    )

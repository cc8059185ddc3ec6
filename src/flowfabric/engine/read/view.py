"""Reads of single executions: state, details, attempts, result."""

from collections.abc import Iterable, Mapping

import msgspec

from flowfabric.db.database import Record
from flowfabric.db.statements import Statement, statements_beside
from flowfabric.engine.core.stored import corruption, literal, required, vector
from flowfabric.engine.store import Store
from flowfabric.model.attempt import Attempt, CurrentAttempt, Failure
from flowfabric.model.errors import error
from flowfabric.model.execution import ExecutionContext, ExecutionInfo, ExecutionSnapshot, ExecutionStatus
from flowfabric.model.ids import (
    AttemptId,
    ExecutionId,
    FlowId,
    LaneId,
    LeaseId,
    Namespace,
    SuspensionId,
    WaitpointId,
    WorkerId,
    WorkerInstanceId,
    parse_execution_id,
    row_key,
)
from flowfabric.model.lease import CurrentLease
from flowfabric.model.states import AttemptLifecycle, AttemptType, BlockingReason, PublicState
from flowfabric.model.text import check_items, shown

SQL = statements_beside(__file__)

_NAMES = """
namespace lane_id current_lane execution_kind creator_identity payload_encoding priority required_capabilities flow_id
lifecycle_phase ownership_state eligibility_state blocking_reason terminal_outcome attempt_state public_state
blocking_detail created_at started_at completed_at last_transition_at last_mutation_at delay_until
execution_deadline_at attempt_timeout_at current_attempt_index current_attempt_id attempt_type total_attempt_count
retry_count replay_count lease_reclaim_count current_lease_epoch current_lease_id current_worker_id
current_worker_instance_id lease_acquired_at lease_expires_at lease_last_renewed_at lease_expired_at lease_revoked_at
lease_revoke_reason failure_reason cancellation_reason cancelled_by pending_retry_reason pending_replay_reason
pending_replay_requested_by pending_previous_attempt_index progress_pct progress_message progress_updated_at
last_capability_mismatch_at last_hmac_validation_failed_at current_suspension_id current_waitpoint_id
suspension_timeout_at
"""
CORE_FIELDS = frozenset(_NAMES.split())
"""The field names that `read_exec_core_fields` accepts."""

_read_tags = msgspec.json.Decoder(dict[str, str]).decode
_read_usage = msgspec.json.Decoder(dict[str, int]).decode


class View:
    """The operations that read one execution."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read_execution_state(self, execution_id: ExecutionId | str) -> PublicState | None:
        """The public state of an execution; None if it does not exist."""
        rows = await self._store.fetch(SQL.read_state, **_key(execution_id))
        if not rows:
            return None
        return literal(PublicState, rows[0][0], context="read_execution_state", field="public_state")

    async def read_execution_info(self, execution_id: ExecutionId | str) -> ExecutionInfo | None:
        """The details of an execution for an operator; None if it does not exist."""
        rows = await self._store.fetch(SQL.read_info, **_key(execution_id))
        if not rows:
            return None
        row = rows[0]
        context = "read_execution_info"
        state = vector(row, context)
        return ExecutionInfo(
            execution_id=parse_execution_id(execution_id),
            namespace=Namespace(required(row["namespace"], context=context, field="namespace")),
            lane_id=LaneId(required(row["lane_id"], context=context, field="lane_id")),
            priority=row["priority"],
            execution_kind=required(row["execution_kind"], context=context, field="execution_kind"),
            state_vector=state,
            public_state=state.public_state,
            created_at=required(row["created_at"], context=context, field="created_at"),
            started_at=row["started_at"],
            completed_at=row["completed_at"],
            current_attempt_index=row["attempt_index"],
            flow_id=None if row["flow_id"] is None else FlowId(row["flow_id"]),
            blocking_detail=row["blocking_detail"] or "",
        )

    async def read_execution_status(self, execution_id: ExecutionId | str) -> ExecutionStatus | None:
        """The state, progress, result and failure of an execution for its submitter; None if it does not exist."""
        rows = await self._store.fetch(SQL.read_status, **_key(execution_id))
        return _status(parse_execution_id(execution_id), rows[0]) if rows else None

    async def describe_execution(self, execution_id: ExecutionId | str) -> ExecutionSnapshot | None:
        """A snapshot of an execution with its lease and tags; None if it does not exist."""
        rows = await self._store.fetch(SQL.read_snapshot, **_key(execution_id))
        return _snapshot(parse_execution_id(execution_id), rows[0]) if rows else None

    async def read_execution_context(self, execution_id: ExecutionId | str) -> ExecutionContext:
        """The input, kind and tags of an execution, for its handler."""
        row = await self._one(SQL.read_context, execution_id)
        context = f"read_execution_context {parse_execution_id(execution_id)}"
        return ExecutionContext(
            input_payload=required(row["input_payload"], context=context, field="input_payload"),
            execution_kind=required(row["execution_kind"], context=context, field="execution_kind"),
            tags=_tags(row["tags"]),
        )

    async def read_current_attempt_index(self, execution_id: ExecutionId | str) -> int:
        """The index of the latest attempt, 0 before the first claim."""
        return max(await self.read_total_attempt_count(execution_id) - 1, 0)

    async def read_total_attempt_count(self, execution_id: ExecutionId | str) -> int:
        """The number of attempts so far."""
        count: int = (await self._one(SQL.read_attempt_count, execution_id))["attempt_count"]
        return count

    async def resolve_execution_flow_id(self, execution_id: ExecutionId | str) -> FlowId | None:
        """The flow of an execution; None if it has none or does not exist."""
        rows = await self._store.fetch(SQL.read_flow, **_key(execution_id))
        return FlowId(rows[0]["flow_id"]) if rows and rows[0]["flow_id"] is not None else None

    async def get_execution_namespace(self, execution_id: ExecutionId | str) -> Namespace | None:
        """The namespace of an execution; None if it does not exist."""
        rows = await self._store.fetch(SQL.read_namespace, **_key(execution_id))
        if not rows:
            return None
        return Namespace(required(rows[0]["namespace"], context="get_execution_namespace", field="namespace"))

    async def read_exec_core_fields(
        self, execution_id: ExecutionId | str, names: Iterable[str]
    ) -> dict[str, str | None]:
        """The named fields of an execution as text; all None if it does not exist."""
        wanted = [_check_field(name) for name in check_items(names, "names")]
        rows = await self._store.fetch(SQL.read_fields, **_key(execution_id))
        return {name: rows[0][name] if rows else None for name in wanted}

    async def list_attempts(self, execution_id: ExecutionId | str) -> list[Attempt]:
        """The attempts of an execution in order, the running one included."""
        parsed = parse_execution_id(execution_id)
        return [_attempt(parsed, row) for row in await self._store.fetch(SQL.list_attempts, **_key(parsed))]

    async def get_execution_result(self, execution_id: ExecutionId | str) -> bytes | None:
        """The result of a completed execution; None if it has no result, has not completed or does not exist."""
        rows = await self._store.fetch(SQL.read_result, **_key(execution_id))
        return rows[0][0] if rows else None

    async def server_time_ms(self) -> int:
        """The clock of the store in milliseconds."""
        rows = await self._store.fetch(SQL.read_clock)
        now: int = rows[0][0]
        return now

    async def ping(self) -> None:
        """Make one round trip to the store; raise if it is unreachable."""
        await self.server_time_ms()

    async def _one(self, statement: Statement, execution_id: str) -> Record:
        rows = await self._store.fetch(statement, **_key(execution_id))
        if not rows:
            raise error("invalid_input", f"execution_id: execution {parse_execution_id(execution_id)} does not exist")
        return rows[0]


def _key(execution_id: str) -> Mapping[str, object]:
    partition, uuid = row_key(parse_execution_id(execution_id))
    return {"partition_key": partition, "execution_id": uuid}


def _check_field(name: object) -> str:
    if not isinstance(name, str) or name not in CORE_FIELDS:
        raise error(
            "invalid_input",
            f"names: unknown field {shown(name)}; expected fields such as 'public_state' or 'lease_expires_at'",
        )
    return name


def _tags(text: str | None) -> dict[str, str]:
    return _read_tags(text) if text else {}


def _status(execution_id: ExecutionId, row: Record) -> ExecutionStatus:
    context = f"read_execution_status {execution_id}"
    return ExecutionStatus(
        execution_id=execution_id,
        execution_kind=required(row["execution_kind"], context=context, field="execution_kind"),
        lane_id=LaneId(required(row["lane_id"], context=context, field="lane_id")),
        namespace=Namespace(required(row["namespace"], context=context, field="namespace")),
        public_state=literal(PublicState, row["public_state"], context=context, field="public_state"),
        attempt_index=row["attempt_index"],
        attempt_count=row["attempt_count"],
        progress_percent=row["progress_pct"],
        progress_message=row["progress_message"],
        result=row["result_payload"],
        result_encoding=row["result_encoding"],
        failure=_failure(row),
        cancellation_reason=row["cancellation_reason"],
        retry_at=row["retry_at"],
        delay_until=row["delay_until"],
        created_at=required(row["created_at"], context=context, field="created_at"),
        started_at=row["started_at"],
        ended_at=row["completed_at"],
    )


def _failure(row: Record) -> Failure | None:
    if row["failure_reason"] is None:
        return None
    return Failure(
        message=row["failure_reason"],
        category=row["failure_category"],
        error_type=row["error_type"],
        traceback=row["traceback"],
    )


def _snapshot(execution_id: ExecutionId, row: Record) -> ExecutionSnapshot:
    context = f"describe_execution {execution_id}"
    reason = literal(BlockingReason, row["blocking_reason"], context=context, field="blocking_reason")
    return ExecutionSnapshot(
        execution_id=execution_id,
        flow_id=None if row["flow_id"] is None else FlowId(row["flow_id"]),
        lane_id=LaneId(required(row["lane_id"], context=context, field="lane_id")),
        namespace=Namespace(required(row["namespace"], context=context, field="namespace")),
        public_state=literal(PublicState, row["public_state"], context=context, field="public_state"),
        blocking_reason=None if reason is BlockingReason.NONE else reason,
        blocking_detail=row["blocking_detail"] or None,
        current_attempt=_current_attempt(row, context),
        current_lease=_current_lease(row, context),
        current_waitpoint=None if row["waitpoint_id"] is None else WaitpointId(row["waitpoint_id"]),
        created_at=required(row["created_at"], context=context, field="created_at"),
        last_mutation_at=required(row["last_mutation_at"], context=context, field="last_mutation_at"),
        total_attempt_count=row["attempt_count"],
        tags=_tags(row["tags"]),
        continuation_metadata_pointer=row["continuation_metadata_pointer"],
    )


def _current_attempt(row: Record, context: str) -> CurrentAttempt | None:
    if row["attempt_id"] is None:
        return None
    return CurrentAttempt(attempt_id=AttemptId(row["attempt_id"]), attempt_index=_index(row, context))


def _current_lease(row: Record, context: str) -> CurrentLease | None:
    expires_at = row["lease_expires_at"]
    if row["worker_no"] is None or expires_at is None:
        return None
    return CurrentLease(
        lease_id=LeaseId(required(row["lease_id"], context=context, field="lease_id")),
        lease_epoch=required(row["lease_epoch"] or None, context=context, field="lease_epoch"),
        attempt_index=_index(row, context),
        worker_instance_id=row["worker_instance_id"],
        expires_at=expires_at,
        last_heartbeat_at=row["lease_renewed_at"],
    )


def _index(row: Record, context: str) -> int:
    count: int = row["attempt_count"]
    if count < 1:
        raise corruption(context, "attempt_index", f"expected at least one attempt, attempt_count is {count}")
    return count - 1


def _attempt(execution_id: ExecutionId, row: Record) -> Attempt:
    context = f"list_attempts {execution_id}"
    attempt_type = literal(AttemptType, row["attempt_type"], context=context, field="attempt_type")
    started_at: int = required(row["started_at"], context=context, field="started_at")
    return Attempt(
        attempt_id=AttemptId(required(row["attempt_id"], context=context, field="attempt_id")),
        execution_id=execution_id,
        attempt_index=row["attempt_index"],
        attempt_type=attempt_type,
        attempt_state=literal(AttemptLifecycle, row["attempt_state"], context=context, field="attempt_state"),
        # A claim creates an attempt and starts it.
        created_at=started_at,
        started_at=started_at,
        resumed_at=row["resumed_at"],
        suspended_at=row["suspended_at"],
        suspension_id=None if row["suspension_id"] is None else SuspensionId(row["suspension_id"]),
        suspension_marker=row["suspension_marker"],
        ended_at=row["ended_at"],
        lease_id=None if row["lease_id"] is None else LeaseId(row["lease_id"]),
        lease_epoch=row["lease_epoch"],
        worker_id=None if row["worker_id"] is None else WorkerId(row["worker_id"]),
        worker_instance_id=None if row["worker_instance_id"] is None else WorkerInstanceId(row["worker_instance_id"]),
        failure_reason=row["failure_reason"],
        failure_category=row["failure_category"],
        error_type=row["error_type"],
        traceback=row["traceback"],
        retry_reason=row["retry_reason"],
        replay_reason=row["replay_reason"],
        replay_requested_by=row["replay_requested_by"],
        reclaim_reason=row["reclaim_reason"],
        previous_attempt_index=row["previous_attempt_index"],
        replayed_from_attempt_index=row["previous_attempt_index"] if attempt_type is AttemptType.REPLAY else None,
        usage=_read_usage(row["usage"]) if row["usage"] else {},
        policy=row["policy"],
    )

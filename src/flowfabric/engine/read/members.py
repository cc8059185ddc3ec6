"""The members of a flow: their states, and which ended without success, were deleted, or have no worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import msgspec

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.stored import literal, required
from flowfabric.engine.flow.row import check_flow_id
from flowfabric.engine.store import Store
from flowfabric.model.flow import FlowStatus, status_of_flow
from flowfabric.model.ids import ExecutionId, FlowId, format_execution_id
from flowfabric.model.states import PublicState, TerminalOutcome

SQL = statements_beside(__file__)

PAGE = 5_000
"""How many members one statement lists."""
MAX_UNSERVED = 10
"""How many members that no worker serves are listed."""
_FIRST = UUID(int=0)

_read_counts = msgspec.json.Decoder(dict[str, int]).decode


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowProgress:
    """A flow, and how many of its members are in which state."""

    flow_kind: str
    status: FlowStatus
    has_ended: bool
    created_at: int
    cancel_reason: str | None
    members: Mapping[PublicState, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmetMember:
    """A member that ended without success."""

    execution_id: ExecutionId
    execution_kind: str
    outcome: TerminalOutcome
    reason: str | None
    is_cause: bool
    """Whether it failed, expired or was cancelled by itself, not because of another member."""
    error_type: str | None
    """The class of the exception that its last attempt failed with, if it was asked for."""
    traceback: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmetMembers:
    """The members that ended without success."""

    first: Sequence[UnmetMember]
    """At most as many as were asked for, causes first."""
    count: int
    final_count: int
    """How many of them no edge leaves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedMembers:
    """The members that retention has deleted."""

    count: int
    final_count: int
    """How many of them no edge leaves."""
    of: int
    """How many members the flow has had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnservedMember:
    """A claimable member that no live worker serves."""

    execution_id: ExecutionId
    queue_no: int
    """Its queue: the same workers serve everything in it."""


class Members:
    """Reads the members of flows, for the fabric."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read_progress(self, flow_id: FlowId) -> FlowProgress | None:
        """Count the members of a flow by their state; None if the flow does not exist."""
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(SQL.read_progress, partition_key=partition, flow_id=parsed)
        if not rows:
            return None
        row, context = rows[0], f"flow {flow_id}"
        counts = _read_counts(row["members"]) if row["members"] else {}
        return FlowProgress(
            flow_kind=row["flow_kind"],
            status=status_of_flow(row["public_flow_state"], row["derived_state"]),
            has_ended=row["live_count"] == 0 and (row["node_count"] > 0 or row["cancelled_at"] is not None),
            created_at=row["created_at"],
            cancel_reason=row["cancel_reason"],
            members={
                literal(PublicState, state, context=context, field="public_state"): count
                for state, count in sorted(counts.items())
            },
        )

    async def list_members(self, flow_id: FlowId) -> list[ExecutionId]:
        """The members of a flow in the order of their ids."""
        partition, parsed = check_flow_id(self._store, flow_id)
        found: list[ExecutionId] = []
        after = _FIRST
        while True:
            rows = await self._store.fetch(
                SQL.list_member_ids, partition_key=partition, flow_id=parsed, after=after, limit=PAGE
            )
            found += [format_execution_id(partition, row["execution_id"]) for row in rows]
            if len(rows) < PAGE:
                return found
            after = rows[-1]["execution_id"]

    async def list_unmet(self, flow_id: FlowId, *, limit: int, with_errors: bool = False) -> UnmetMembers:
        """The members of a flow that ended without success, with the errors of those that failed if asked for."""
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(
            SQL.list_unmet_members, partition_key=partition, flow_id=parsed, limit=limit, with_errors=with_errors
        )
        if not rows:
            return UnmetMembers(first=(), count=0, final_count=0)
        first = []
        for row in rows:
            execution_id = format_execution_id(partition, row["execution_id"])
            kind = required(row["execution_kind"], context=f"member {execution_id}", field="execution_kind")
            error_type, traceback = row["error"] or (None, None)
            first.append(
                UnmetMember(
                    execution_id=execution_id,
                    execution_kind=kind,
                    outcome=TerminalOutcome(row["terminal_outcome"]),
                    reason=row["reason"],
                    is_cause=row["is_cause"],
                    error_type=error_type,
                    traceback=traceback,
                )
            )
        return UnmetMembers(first=first, count=rows[0]["unmet"], final_count=rows[0]["unmet_final"])

    async def list_to_replay(self, flow_id: FlowId) -> dict[ExecutionId, bool]:
        """The members of a flow that run again when it is replayed, each with whether it was not skipped; these first.

        A sibling that a decided group has cancelled is one of them only if a member of these needs its result.
        """
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(SQL.list_members_to_replay, partition_key=partition, flow_id=parsed)
        return {format_execution_id(partition, row["execution_id"]): row["is_cause"] for row in rows}

    async def count_deleted(self, flow_id: FlowId) -> DeletedMembers | None:
        """Count the members of a flow that retention has deleted; None if the flow does not exist."""
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(SQL.count_deleted_members, partition_key=partition, flow_id=parsed)
        if not rows:
            return None
        row = rows[0]
        return DeletedMembers(count=row["deleted"], final_count=row["deleted_final"], of=row["node_count"])

    async def list_unserved(self, flow_id: FlowId) -> list[UnservedMember]:
        """Claimable members of a flow that no live worker serves: one for each queue."""
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(SQL.list_unserved_members, flow_id=parsed, limit=MAX_UNSERVED)
        return [
            UnservedMember(execution_id=format_execution_id(partition, row["execution_id"]), queue_no=row["queue_no"])
            for row in rows
        ]

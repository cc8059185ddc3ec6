"""Summaries of flows: how many members are in which state, and the sweep that counts them."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.batches import in_batches
from flowfabric.engine.core.quarantine import Quarantine, is_connection_fault
from flowfabric.engine.core.stored import literal
from flowfabric.engine.core.sweep import SweepResult
from flowfabric.engine.flow.row import check_flow_id, lock_flow_if_exists
from flowfabric.engine.flow.state import FAILED_OUTCOMES, MemberChange, change_members
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError
from flowfabric.model.event import CompletionOutcome, EventFamily
from flowfabric.model.flow import FlowState, FlowSummary
from flowfabric.model.ids import format_execution_id

SQL = statements_beside(__file__)

FLOW_LIMIT = 100
"""The most flows that one batch of the sweep projects."""
MEMBER_LIMIT = 10_000
"""The most members that one transaction counts, unless a single flow has more."""
MEMBER_MS = 2
"""A flow is projected again after at least so many milliseconds for each member: counting them takes time."""

QUIET_LIMIT = 3
"""How often the interval between two projections of a flow is doubled in which nothing changes."""

_COUNTS = (
    "completed",
    "failed",
    "cancelled",
    "expired",
    "skipped",
    "active",
    "suspended",
    "waiting",
    "delayed",
    "rate_limited",
    "waiting_children",
)

FlowKey = tuple[int, UUID]
"""The partition and the id of a flow."""


class FlowSummaries:
    """Projects summaries of flows, and reads them."""

    def __init__(self, store: Store, quarantine: Quarantine, *, interval_ms: int) -> None:
        self._store = store
        self._quarantine = quarantine
        self._interval_ms = interval_ms

    async def project_flow_summary(self, flow_id: UUID | str) -> bool:
        """Count the members of a flow by their state and store the summary; return False if it has no members.

        The counts that the state of the flow is derived from are corrected if an older version of this software has
        ended members without keeping them.
        """
        partition, parsed = check_flow_id(self._store, flow_id)

        async def project(transaction: Transaction) -> tuple[int, bool]:
            locked = await lock_flow_if_exists(transaction, partition, parsed)
            if locked is None:
                return 0, False
            counted = await self._count(transaction, [(partition, parsed)])
            return await self._write(transaction, [row for row in counted if row["total"]], quiet_limit=0)

        projected, has_changed = await self._store.transact(project)
        self._after_commit(has_changed=has_changed)
        return projected > 0

    async def read_flow_summary(self, flow_id: UUID | str) -> FlowSummary | None:
        """The summary of a flow as last projected; None if it never was."""
        partition, parsed = check_flow_id(self._store, flow_id)
        rows = await self._store.fetch(SQL.read_summary_of_flow, partition_key=partition, flow_id=parsed)
        if not rows:
            return None
        state = literal(
            FlowState, rows[0]["public_flow_state"], context=f"summary of flow {parsed}", field="public_flow_state"
        )
        return FlowSummary(**{**rows[0], "public_flow_state": state})

    async def project_due(self) -> SweepResult:
        """Project a batch of flows whose summary is due; those locked elsewhere are left for the next batch."""
        rows = await self._store.fetch(
            SQL.list_due_flows,
            since=self._store.projection_watermark.since,
            skipped=self._quarantine.skipped(),
            limit=FLOW_LIMIT,
        )
        done = 0
        for batch in in_batches(rows, lambda row: row["node_count"], limit=MEMBER_LIMIT):
            done += await self._project_together([(row["partition_key"], row["flow_id"]) for row in batch])
        return SweepResult(done, is_full=done > 0 and len(rows) >= FLOW_LIMIT)

    async def _project_together(self, flows: Sequence[FlowKey]) -> int:
        try:
            return await self._project_due(flows)
        except EngineError as fault:
            if is_connection_fault(fault):
                raise
            if len(flows) == 1:
                self._quarantine.failed(format_execution_id(*flows[0]), fault)
                return 0
        return sum([await self._project_together([flow]) for flow in flows])

    async def _project_due(self, flows: Sequence[FlowKey]) -> int:
        async def project(transaction: Transaction) -> tuple[int, bool]:
            locked = await transaction.fetch(SQL.lock_due_flows, **_keys(flows))
            if not locked:
                return 0, False
            counted = await self._count(transaction, [(row["partition_key"], row["flow_id"]) for row in locked])
            return await self._write(transaction, counted, quiet_limit=QUIET_LIMIT)

        projected, has_changed = await self._store.transact(project)
        self._after_commit(has_changed=has_changed)
        return projected

    async def _count(self, transaction: Transaction, flows: Sequence[FlowKey]) -> list[Record]:
        return await transaction.fetch(
            SQL.count_members, **_keys(flows), failed_outcomes=list(map(CompletionOutcome.of, FAILED_OUTCOMES))
        )

    async def _write(
        self, transaction: Transaction, counted: Sequence[Record], *, quiet_limit: int
    ) -> tuple[int, bool]:
        """Correct the counts of flows, and store their summaries; return how many, and whether an event was written."""
        if not counted:
            return 0, False
        changes = [change for row in counted if (change := _correction(row)) is not None]
        has_changed = await change_members(transaction, changes) if changes else False
        await transaction.fetch(
            SQL.set_summaries,
            **_keys([(row["partition_key"], row["flow_id"]) for row in counted]),
            states=[_state_of(row).value for row in counted],
            totals=[row["total"] for row in counted],
            **{name: [row[name] for row in counted] for name in _COUNTS},
            interval_ms=self._interval_ms,
            member_ms=MEMBER_MS,
            quiet_limit=quiet_limit,
        )
        return len(counted), has_changed

    def _after_commit(self, *, has_changed: bool) -> None:
        if has_changed:
            self._store.wakeups.events(EventFamily.OPERATOR)


def _keys(flows: Sequence[FlowKey]) -> dict[str, object]:
    return {"partition_keys": [partition for partition, _ in flows], "flow_ids": [flow_id for _, flow_id in flows]}


def _ended(row: Record) -> int:
    ended: int = sum(row[name] for name in ("completed", "failed", "cancelled", "expired", "skipped"))
    return ended


def _failed(row: Record) -> int:
    """How many members have ended failed, cancelled or expired and are not queued for the cascade.

    Retention deletes members before their flow, so with fewer members than the flow has had the count can only grow.
    """
    counted: int = max(row["failed"] + row["cancelled"] + row["expired"] - row["queued_failed"], 0)
    return counted if row["total"] >= row["node_count"] else max(counted, row["failed_count"])


def _correction(row: Record) -> MemberChange | None:
    """What is missing in the counts of a flow; None if they are right."""
    live = row["total"] - _ended(row) + row["queued"] - row["live_count"]
    failed = _failed(row) - row["failed_count"]
    if not live and not failed:
        return None
    return MemberChange(
        partition_key=row["partition_key"],
        flow_id=row["flow_id"],
        live=live,
        failed=failed,
        now_live=_state_of(row),
    )


def _state_of(row: Record) -> FlowState:
    """The state of a flow by the states of its members."""
    if not row["total"]:
        return FlowState.OPEN
    if _ended(row) == row["total"]:
        has_failed = _failed(row) + row["queued_failed"] > 0
        return FlowState.FAILED if has_failed else FlowState.COMPLETED
    if row["active"]:
        return FlowState.RUNNING
    if row["suspended"] or row["delayed"] or row["rate_limited"] or row["waiting_children"]:
        return FlowState.BLOCKED
    return FlowState.OPEN

"""The derived state of flows: kept current with the number of members that have not ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.model.flow import FlowState
from flowfabric.model.states import TerminalOutcome

SQL = statements_beside(__file__)

FAILED_OUTCOMES = frozenset({TerminalOutcome.FAILED, TerminalOutcome.CANCELLED, TerminalOutcome.EXPIRED})
"""A flow has failed if a member has ended in one of these ways."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberChange:
    """By how much the counts of a flow change: its live members, and those that ended in one of FAILED_OUTCOMES."""

    partition_key: int
    flow_id: UUID
    live: int
    failed: int = 0
    now_live: FlowState = FlowState.OPEN
    """The state of the flow if every member had ended before."""


async def change_members(transaction: Transaction, changes: Sequence[MemberChange]) -> bool:
    """Count members of flows that the transaction has locked; return whether a flow has ended or lives again.

    Each flow is given once. Then the caller wakes the operator feed after the commit.
    """
    rows = await transaction.fetch(
        SQL.set_member_counts,
        partition_keys=[change.partition_key for change in changes],
        flow_ids=[change.flow_id for change in changes],
        live=[change.live for change in changes],
        failed=[change.failed for change in changes],
        now_live=[change.now_live.value for change in changes],
    )
    return bool(rows[0]["has_changed"])

"""Close the stream of an attempt when the attempt ends or loses its lease."""

from collections.abc import Mapping, Sequence

from flowfabric.db.database import Transaction
from flowfabric.db.statements import full_columns, statements_beside
from flowfabric.engine.core.consequence import EndedLease
from flowfabric.engine.core.transition import Move
from flowfabric.model.ids import split_execution_id
from flowfabric.model.stream import ClosedReason

SQL = statements_beside(__file__)

CLOSED_BY: Mapping[Move, ClosedReason] = {
    Move.COMPLETED: ClosedReason.ATTEMPT_SUCCESS,
    Move.FAILED: ClosedReason.ATTEMPT_FAILURE,
    Move.RETRY: ClosedReason.ATTEMPT_FAILURE,
    Move.RETRY_NOW: ClosedReason.ATTEMPT_FAILURE,
    Move.CANCELLED: ClosedReason.ATTEMPT_CANCELLED,
    Move.TIMEOUT_RETRY: ClosedReason.EXPIRED,
    Move.TIMEOUT_RETRY_NOW: ClosedReason.EXPIRED,
    Move.TIMEOUT_EXPIRED: ClosedReason.EXPIRED,
    Move.DEADLINE_EXPIRED: ClosedReason.EXPIRED,
    Move.RECLAIM_LIMIT: ClosedReason.RECLAIMED,
    Move.SUSPENSION_FAILED: ClosedReason.SUSPENSION_TIMEOUT,
    Move.SUSPENSION_CANCELLED: ClosedReason.SUSPENSION_TIMEOUT,
    Move.SUSPENSION_EXPIRED: ClosedReason.SUSPENSION_TIMEOUT,
    Move.SKIPPED: ClosedReason.DEPENDENCY_IMPOSSIBLE,
    Move.LEASE_EXPIRED: ClosedReason.LEASE_EXPIRED,
    Move.LEASE_REVOKED: ClosedReason.ATTEMPT_INTERRUPTED,
}
"""Why a move closes the stream of the attempt; after the other moves the attempt continues, or there was none."""


async def end_streams(transaction: Transaction, ended: Sequence[EndedLease]) -> None:
    """Close the streams of attempts that the transaction has just ended; keep those of parked attempts open.

    In both cases, nothing can be appended under the ended lease any more.
    """
    rows = [(*split_execution_id(each.execution_id), CLOSED_BY.get(each.move)) for each in ended]
    columns = full_columns(("partition_keys", "execution_ids", "reasons"), rows)
    await transaction.fetch(SQL.end_streams, **columns)

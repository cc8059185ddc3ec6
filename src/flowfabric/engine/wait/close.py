"""Close the suspension and the waitpoints of an execution when it ends."""

from collections.abc import Sequence

from flowfabric.db.database import Transaction
from flowfabric.db.statements import full_columns, statements_beside
from flowfabric.engine.core.consequence import EndedLease
from flowfabric.model.ids import split_execution_id

SQL = statements_beside(__file__)


async def close_suspensions(transaction: Transaction, ended: Sequence[EndedLease]) -> None:
    """Close the open suspensions and waitpoints of executions that the transaction has just ended."""
    closing = [(*split_execution_id(each.execution_id), each.reason) for each in ended if each.is_terminal]
    if closing:
        columns = full_columns(("partition_keys", "execution_ids", "close_reasons"), closing)
        await transaction.fetch(SQL.close_suspensions, **columns)

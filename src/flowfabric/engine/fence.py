"""What a fenced write finds when its lease does not hold."""

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import ExecutionId, split_execution_id

SQL = statements_beside(__file__)


async def lock_execution(transaction: Transaction, execution_id: ExecutionId) -> None:
    """Wait for an execution's row and hold it, so that the next statement decides from what it is now."""
    partition, uuid = split_execution_id(execution_id)
    if not await transaction.fetch(SQL.lock_execution, partition_key=partition, execution_id=uuid):
        raise error("execution_not_found")


def refusal(row: Record, *, stale: str = "lease_conflict") -> EngineError:
    """The error of a row's verdict; stale is the word for a fence that is not the current one."""
    verdict: str = row["verdict"]
    if verdict == "execution_not_active":
        return error(
            verdict,
            {
                "terminal_outcome": row["terminal_outcome"],
                "lease_epoch": str(row["lease_epoch"]),
                "lifecycle_phase": row["lifecycle_phase"],
                "attempt_id": str(row["attempt_id"] or ""),
            },
        )
    return error(stale if verdict == "stale_fence" else verdict)

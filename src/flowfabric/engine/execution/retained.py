"""The entries of retained: executions that have ended, by the time until which they are kept."""

from collections.abc import Mapping, Sequence

from flowfabric.db.database import Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.row import execution_keys
from flowfabric.engine.execution.retention import RECHECK_MS
from flowfabric.model.ids import ExecutionId, format_execution_id

SQL = statements_beside(__file__)


async def take_ends(
    transaction: Transaction, ended_at: Mapping[ExecutionId, int], likely: Sequence[tuple[ExecutionId, int]]
) -> None:
    """Remove executions that run again from the entries with their ends, which count them.

    `ended_at` has the time of each end, and `likely` the times at which the entries are probably due.
    """
    found = await transaction.fetch(
        SQL.lock_ends,
        **execution_keys(execution_id for execution_id, _ in likely),
        ended_ats=[ended_at[execution_id] for execution_id, _ in likely],
        retain_untils=[at for _, at in likely],
    )
    # Retention has held it with its flow, or the setting was another one when it ended.
    for within_ms in (RECHECK_MS, None):
        ids = {format_execution_id(row["partition_key"], row["execution_id"]) for row in found}
        missing = {each: at for each, at in ended_at.items() if each not in ids}
        if missing:
            found += await transaction.fetch(
                SQL.lock_ends_anywhere,
                **execution_keys(missing),
                ended_ats=list(missing.values()),
                within_ms=within_ms,
            )
    if found:
        await transaction.fetch(
            SQL.take_ends,
            partition_keys=[row["partition_key"] for row in found],
            execution_ids=[row["execution_id"] for row in found],
            ended_ats=[row["ended_at"] for row in found],
            retain_untils=[row["retain_until"] for row in found],
        )

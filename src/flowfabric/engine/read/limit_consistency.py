"""The consistency check of limits: what quotas and budgets have counted, and which limits queues have."""

from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.queues import WRONG_QUEUES
from flowfabric.engine.store import Store
from flowfabric.model.budget import MAX_TOTAL
from flowfabric.model.execution import Inconsistency
from flowfabric.model.ids import format_execution_id
from flowfabric.model.text import shown

SQL = statements_beside(__file__)


async def check_limits(store: Store, limit: int) -> list[Inconsistency]:
    """Check the keys of quotas, the budgets, their reservations and the limits of queues for up to `limit` problems."""
    found: list[Inconsistency] = []
    if limit > 0:
        for row in await store.fetch(SQL.list_broken_keys, limit=limit):
            name = f"quota {row['quota_policy_id']}, key {shown(row['key'])}"
            found.append(Inconsistency(execution_id=None, problem=f"{name}: {row['problem']}"))
    if len(found) < limit:
        for row in await store.fetch(SQL.list_broken_budgets, limit=limit - len(found), max_total=MAX_TOTAL):
            name = f"budget {row['budget_id']}, {shown(row['dimension'])}"
            found.append(Inconsistency(execution_id=None, problem=f"{name}: {row['problem']}"))
    if len(found) < limit:
        for row in await store.fetch(SQL.list_broken_reservations, limit=limit - len(found)):
            execution_id = format_execution_id(row["partition_key"], row["execution_id"])
            found.append(Inconsistency(execution_id=execution_id, problem=row["problem"]))
    if len(found) < limit:
        for row in await store.fetch(WRONG_QUEUES, limit=limit - len(found)):
            found.append(Inconsistency(execution_id=None, problem=f"queue {row['queue_no']}: {row['problem']}"))
    return found

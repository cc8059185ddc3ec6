"""Shared by the tests of attachments: definitions of quotas, and the limits that executions end up with."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from fixtures import uuid_of
from flowfabric.engine.core.admission import is_reserved
from flowfabric.model.execution import Created
from flowfabric.model.ids import Partitions, QuotaPolicyId, quota_partition


async def define_quota(
    connection: asyncpg.Connection, key_from: str | None = None, weight_from: str | None = None
) -> UUID:
    """A quota policy of one slot; the row is written as the operation that creates policies writes it."""
    policy = uuid4()
    await connection.execute(
        "insert into quota_policy values ($1, $2, 60, 0, 1, 0, $3, $4, 0)",
        quota_partition(QuotaPolicyId(policy), Partitions().quota),
        policy,
        key_from,
        weight_from,
    )
    return policy


@dataclass(frozen=True)
class Ends:
    """Where an execution waits, and what limits it there."""

    quotas: set[tuple[UUID, str]]
    budgets: list[UUID]
    is_governed: bool
    fair_key: str = ""
    weight: int | None = None


_QUERY = """
select e.queue_no, e.quota_weight, q.budget_ids, q.fair_key, c.required, q.route_no, r.queue_no as ready_queue_no,
       r.route_no as ready_route_no, k.policies, k.keys
  from execution e join queue q using (queue_no) join route t on t.route_no = q.route_no
  join capability_set c using (capability_set_no)
 cross join lateral (
       select array_agg(k.quota_policy_id order by quota_key_no) as policies,
              array_agg(k.key order by quota_key_no) as keys
         from quota_key k where k.quota_key_no = any(q.quota_key_nos)) k
  left join ready r on r.execution_id = e.execution_id
 where e.execution_id = $1
"""


async def limits(connection: asyncpg.Connection, made: Created | str | Any) -> Ends:
    """The limits of an execution in its queue."""
    execution_id = made if isinstance(made, str) else made.execution_id
    row = await connection.fetchrow(_QUERY, uuid_of(execution_id))
    assert row is not None
    if row["ready_queue_no"] is not None:
        assert (row["ready_queue_no"], row["ready_route_no"]) == (row["queue_no"], row["route_no"])
    return Ends(
        quotas={*zip(row["policies"] or (), row["keys"] or (), strict=True)},
        budgets=list(row["budget_ids"]),
        is_governed=any(is_reserved(each) for each in row["required"]),
        fair_key=row["fair_key"],
        weight=row["quota_weight"],
    )

"""Flows for tests, until they can be created by operations: rows written directly."""

from collections.abc import Iterable, Sequence
from uuid import UUID, uuid4

import asyncpg

from fixtures import uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.ids import FlowId, flow_partition, split_execution_id

Edges = Iterable[tuple[str, str]]

_INSERT_FLOW = """
insert into flow (partition_key, flow_id, namespace_no, flow_kind, created_at, last_mutation_at)
select $1::smallint, $2, coalesce((select min(namespace_no) from namespace), 1), 'test', ff_now(), ff_now()
"""
_INSERT_EDGES = """
insert into edge (partition_key, flow_id, edge_id, upstream_id, downstream_id, state, staged_at, applied_at,
                  dependency_kind)
select $1::smallint, $2, gen_random_uuid(), u, d, 'unsatisfied', ff_now(), ff_now(), 'success_only'
  from unnest($3::uuid[], $4::uuid[]) as e(u, d)
"""
_INSERT_GROUPS = """
insert into edge_group (partition_key, flow_id, downstream_id, staged_count, applied_count, created_at)
select partition_key, flow_id, downstream_id, count(*), count(*), ff_now()
  from edge where flow_id = $1 group by partition_key, flow_id, downstream_id
"""
_BLOCK = """
with blocked as (
  update execution e set eligibility_state = 'blocked_by_dependencies', blocking_reason = 'waiting_for_children'
   where e.flow_id = $1 and e.lifecycle_phase = 'runnable'
     and e.execution_id in (select downstream_id from edge where flow_id = $1)
  returning e.*),
entries as (
  delete from ready r using blocked b where r.partition_key = b.partition_key and r.execution_id = b.execution_id)
insert into listed (partition_key, execution_id, public_state, at)
select partition_key, execution_id, 'waiting_children', ff_now() from blocked
"""
_COUNT = """
update flow f
   set live_count = m.live, unhappy_count = m.unhappy, node_count = greatest(f.node_count, m.members),
       edge_count = greatest(f.edge_count, g.edges),
       derived_state = case when m.live > 0 then 'open' when m.unhappy > 0 then 'failed' else 'completed' end
  from (select count(*) filter (where lifecycle_phase <> 'terminal') as live, count(*) as members,
               count(*) filter (where terminal_outcome in ('failed', 'cancelled', 'expired')) as unhappy
          from execution where flow_id = $1) m,
       (select count(*) as edges from edge where flow_id = $1) g
 where f.flow_id = $1
"""
_RESOLVE = """
with resolved as (
  update edge d
     set state = (case when e.terminal_outcome = 'success' then 'satisfied' else 'impossible' end)::dependency_state
    from execution e
   where d.flow_id = $1 and d.state = 'unsatisfied' and e.partition_key = d.partition_key
     and e.execution_id = d.upstream_id and e.lifecycle_phase = 'terminal'
  returning d.downstream_id, e.terminal_outcome),
summed as (
  select downstream_id, count(*) filter (where terminal_outcome = 'success') as succeeded,
         count(*) filter (where terminal_outcome = 'skipped') as skipped,
         count(*) filter (where terminal_outcome not in ('success', 'skipped')) as failed
    from resolved group by downstream_id)
update edge_group g
   set succeeded_count = g.succeeded_count + s.succeeded, failed_count = g.failed_count + s.failed,
       skipped_count = g.skipped_count + s.skipped,
       group_state = case
         when g.succeeded_count + s.succeeded = g.applied_count then 'satisfied'
         when g.failed_count + s.failed + g.skipped_count + s.skipped > 0 then 'impossible'
         else 'pending' end::group_state
  from summed s
 where g.flow_id = $1 and g.downstream_id = s.downstream_id
"""


def flow_id_in(engine: Engine, partition: int) -> FlowId:
    """A new flow id of a partition."""
    count = parts_of(engine).store.rules.partitions.flow
    while flow_partition(found := FlowId(uuid4()), count) != partition:
        pass
    return found


async def insert_flow(
    engine: Engine, connection: asyncpg.Connection, members: Sequence[str] = (), edges: Edges = ()
) -> UUID:
    """A flow of executions of one partition, whose edges are applied; downstream executions wait for them."""
    partition = split_execution_id(members[0])[0] if members else 7  # type: ignore[arg-type]
    flow_id = flow_id_in(engine, partition)
    await connection.execute(_INSERT_FLOW, partition, flow_id)
    ids = [uuid_of(each) for each in members]
    await connection.execute("update execution set flow_id = $1 where execution_id = any($2::uuid[])", flow_id, ids)
    pairs = [(uuid_of(upstream), uuid_of(downstream)) for upstream, downstream in edges]
    await connection.execute(_INSERT_EDGES, partition, flow_id, [u for u, _ in pairs], [d for _, d in pairs])
    await connection.execute(_INSERT_GROUPS, flow_id)
    await connection.execute(_BLOCK, flow_id)
    await connection.execute(_COUNT, flow_id)
    return flow_id


async def settle(connection: asyncpg.Connection, flow_id: UUID) -> None:
    """Do what the cascade does with the queued ends of a flow, except promote and skip."""
    async with connection.transaction():
        await connection.execute("select from flow where flow_id = $1 for update", flow_id)
        await connection.execute(_RESOLVE, flow_id)
        await connection.execute("delete from cascade_entry where flow_id = $1", flow_id)
        await connection.execute(_COUNT, flow_id)

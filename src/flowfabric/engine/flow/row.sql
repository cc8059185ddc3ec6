-- fragment: flows
-- Flows in their order, up to the lock.
select f.*
  from (select distinct i.partition_key, i.flow_id from unnest(:partition_keys::smallint[], :flow_ids::uuid[]) as i(partition_key, flow_id)
         order by i.partition_key, i.flow_id) i
 cross join lateral (
       select f.partition_key, f.flow_id, f.public_flow_state, f.graph_revision, f.node_count, f.ended_at, f.cancel_reason,
              f.cancellation_policy
         from flow f where f.partition_key = i.partition_key and f.flow_id = i.flow_id

-- name: lock_flows
-- Locks flows until the transaction ends, waiting for each.
-- include: flows
           for update) f;

-- name: lock_free_flows
-- The same without waiting: a flow locked by another session has no row.
-- include: flows
           for update skip locked) f;

-- name: read_flow_exists
-- Whether a flow exists; confirmed by a synchronous standby, as it may be the answer of a repeated call.
select exists (select from flow where partition_key = :partition_key and flow_id = :flow_id) and ff_confirm() as is_present;

-- name: read_flow_of
-- The flow of an execution, null outside of flows; no row if the execution does not exist.
select flow_id from execution where partition_key = :partition_key and execution_id = :execution_id;

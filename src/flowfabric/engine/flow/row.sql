-- name: lock_flow
-- Locks a flow until the transaction ends, waiting for it.
select f.partition_key, f.flow_id, f.public_flow_state, f.graph_revision, f.node_count, f.ended_at, f.cancel_reason, f.cancellation_policy
  from flow f
 where f.partition_key = :partition_key and f.flow_id = :flow_id
   for update;

-- name: read_flow_of
-- The flow of an execution, null outside of flows; no row if the execution does not exist.
select flow_id from execution where partition_key = :partition_key and execution_id = :execution_id;

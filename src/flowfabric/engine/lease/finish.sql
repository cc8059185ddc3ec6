-- name: read_retry_state
-- What a decision to retry needs besides the failure: the frozen policy and the retries so far.
select i.policy, e.retry_count
  from execution e cross join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, e.partition_key, e.execution_id) i
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: set_next_attempt_policy
-- Gives the attempt that is to come a policy of its own; the row is held.
update execution set attempt_policy = :policy::text::jsonb
 where partition_key = :partition_key and execution_id = :execution_id and attempt_state = 'pending_retry_attempt';

-- name: list_often_reclaimed
-- Of the named executions those whose number of reclaims has just come to a full :every.
select e.partition_key, e.execution_id, e.reclaim_count
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
  join execution e using (partition_key, execution_id)
 where e.reclaim_count > 0 and e.reclaim_count % :every::int = 0;

-- name: read_retry_state
-- What a decision to retry needs besides the failure: the frozen policy and the retries so far.
select i.policy, e.retry_count
  from execution e join execution_input i using (partition_key, execution_id)
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: lock_lost
-- Holds executions whose lease was lost, with what the cap on reclaims needs.
select e.partition_key, e.execution_id, e.reclaim_count, i.policy
  from execution e join execution_input i using (partition_key, execution_id)
 where (e.partition_key, e.execution_id) in (select * from unnest(:partition_keys::smallint[], :execution_ids::uuid[]))
   and e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked')
 order by e.partition_key, e.execution_id
   for update of e skip locked;

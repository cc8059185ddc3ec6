-- name: read_retry_state
-- What the decision to retry needs: the stored policy and the number of retries so far.
select policy, retry_count from execution where partition_key = :partition_key and execution_id = :execution_id;


-- name: list_often_reclaimed
-- Those of these executions whose number of reclaims is a multiple of :every.
select e.partition_key, e.execution_id, e.reclaim_count
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
 cross join lateral (
       select e.partition_key, e.execution_id, e.reclaim_count from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
 where e.reclaim_count > 0 and e.reclaim_count % :every::int = 0;

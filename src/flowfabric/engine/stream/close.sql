-- name: end_streams
-- Ends the writing to streams under leases that the transaction has just ended, after appends in progress: a stream with a reason
-- is closed, one without stays open for the next lease of its attempt.
with item as materialized (
  select i.partition_key, i.execution_id, e.attempt_count - 1 as attempt_index, e.lease_epoch, i.reason,
         coalesce(e.last_mutation_at, e.last_transition_at) as at
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :reasons::text[]) as i(partition_key, execution_id, reason)
   cross join lateral (
         select e.attempt_count, e.lease_epoch, e.last_mutation_at, e.last_transition_at from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
)
update stream s
   set (released_epoch, closed_at, closed_reason, expires_at, sweep_at) = (
         select * from ff_ended_stream(s, i.lease_epoch, i.reason, i.at))
  from item i
 where s.partition_key = any(array[i.partition_key]) and s.execution_id = i.execution_id and s.attempt_index = i.attempt_index;

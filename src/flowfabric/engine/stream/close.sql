-- name: end_streams
-- Ends the writing to streams under leases that the transaction has just ended, after appends in progress: a stream with a reason
-- is closed at the time of that move, unless it is closed already; one without stays open for the next lease of its attempt.
with item as materialized (
  select i.partition_key, i.execution_id, e.attempt_count - 1 as attempt_index, e.lease_epoch, i.reason,
         coalesce(e.last_mutation_at, e.last_transition_at) as at
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :reasons::text[]) as i(partition_key, execution_id, reason)
   cross join lateral (
         select e.attempt_count, e.lease_epoch, e.last_mutation_at, e.last_transition_at from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
)
update stream s
   set released_epoch = i.lease_epoch,
       closed_reason = coalesce(s.closed_reason, i.reason),
       -- An append that held the lock may have stored a frame after the time of the move.
       closed_at = coalesce(s.closed_at, case when i.reason is not null then greatest(i.at, s.last_frame_at) end),
       expires_at = case when s.closed_at is null and i.reason is not null
         then least(s.expires_at, greatest(i.at, s.last_frame_at) + s.retention_ttl_ms) else s.expires_at end
  from item i
 where s.partition_key = any(array[i.partition_key]) and s.execution_id = i.execution_id and s.attempt_index = i.attempt_index;

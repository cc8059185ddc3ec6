-- name: close_suspensions
-- Closes the open suspensions and waitpoints of executions that the transaction has locked and just ended; closed_at is the
-- time of that end. Suspensions and waitpoints are updated by key, not by ctid: see insert_deliveries.
with item as materialized (
  select i.partition_key, i.execution_id, s.suspension_id, s.waitpoint_ids, i.close_reason, e.last_transition_at as at
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :close_reasons::text[])
         as i(partition_key, execution_id, close_reason)
   cross join lateral (
         select e.suspension_id, e.last_transition_at from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
   cross join lateral (
         select s.suspension_id, s.waitpoint_ids, s.closed_at from suspension s
          where s.partition_key = i.partition_key and s.execution_id = i.execution_id and s.suspension_id = e.suspension_id
            for update) s
   where s.closed_at is null
),
-- Every writer locks waitpoints in ascending order.
open_waitpoint as materialized (
  select i.partition_key, w.waitpoint_id, i.close_reason, i.at
    from item i
   cross join lateral (select waitpoint_id from unnest(i.waitpoint_ids) as p(waitpoint_id) order by 1) p
   cross join lateral (
         select w.waitpoint_id from waitpoint w
          where w.partition_key = i.partition_key and w.waitpoint_id = p.waitpoint_id and w.state in ('pending', 'active')
            for update) w
),
closed_waitpoints as (
  update waitpoint w set state = 'closed', closed_at = s.at, close_reason = s.close_reason
    from open_waitpoint s
   where w.partition_key = any(array[s.partition_key]) and w.waitpoint_id = s.waitpoint_id
)
update suspension s set closed_at = i.at, close_reason = i.close_reason
  from item i
 where s.partition_key = any(array[i.partition_key]) and s.execution_id = i.execution_id and s.suspension_id = i.suspension_id;

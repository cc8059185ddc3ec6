-- name: set_member_counts
-- Adds to the counts of flows that the transaction has locked. A flow without live members has ended: failed if a member failed, was
-- cancelled or expired, else completed. Entering and leaving these states writes an event; returns whether one was written.
-- The time of the end is kept if members live again, until the next end.
with clock as materialized (select ff_now() as now),
counted as materialized (
  select f.partition_key, f.flow_id, f.namespace_no, f.public_flow_state, f.derived_state, c.now, f.live_count + i.live as live_count,
         f.failed_count + i.failed as failed_count,
         case
           when f.live_count + i.live > 0 then case when f.derived_state in ('completed', 'failed') then i.now_live else f.derived_state end
           when f.failed_count + i.failed > 0 then 'failed'
           else 'completed' end as to_state,
         case when f.live_count + i.live <= 0 and (f.live_count > 0 or f.ended_at is null) then c.now else f.ended_at end as ended_at
    from unnest(:partition_keys::smallint[], :flow_ids::uuid[], :live::int[], :failed::int[], :now_live::text[])
         as i(partition_key, flow_id, live, failed, now_live)
   cross join clock c
   cross join lateral (
         select f.* from flow f where f.partition_key = i.partition_key and f.flow_id = i.flow_id limit 1) f
),
updated as (
  update flow f
     set live_count = n.live_count, failed_count = n.failed_count, derived_state = n.to_state,
         ended_at = n.ended_at, quiet_count = 0,
         project_at = case when f.quiet_count > 0 then n.now else coalesce(f.project_at, n.now) end
    from counted n
   where f.partition_key = any(array[n.partition_key]) and f.flow_id = n.flow_id
  returning n.partition_key, n.flow_id, n.namespace_no, n.public_flow_state, n.derived_state, n.to_state, n.now
),
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, reason, details)
  select now, flow_id, partition_key, 'operator_action', namespace_no, 'flow_state_changed',
         jsonb_build_object('flow_id', flow_id, 'from', derived_state, 'to', to_state)
           || case public_flow_state when 'cancelled' then '{"public_flow_state": "cancelled"}' else '{}' end::jsonb
    from updated where derived_state <> to_state and (to_state in ('completed', 'failed') or derived_state in ('completed', 'failed'))
  returning 1
)
select exists (select from inserted_events) as has_changed;

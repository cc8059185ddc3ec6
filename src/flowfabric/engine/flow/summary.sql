-- name: list_due_flows
-- The flows whose summary is due since :since, the longest first, except :skipped, each with its number of members.
select f.partition_key, f.flow_id, f.node_count
  from flow f
 where f.project_at > :since::bigint and f.project_at <= (select ff_now()) and f.flow_id <> all(:skipped::uuid[])
 order by f.project_at limit :limit;

-- name: lock_due_flows
-- Locks those of the given flows whose summary is still due until the transaction ends; flows locked elsewhere are left out.
with clock as materialized (select ff_now() as now)
select f.partition_key, f.flow_id
  from clock c
 cross join unnest(:partition_keys::smallint[], :flow_ids::uuid[]) with ordinality as i(partition_key, flow_id, nth)
 cross join lateral (
       select f.partition_key, f.flow_id from flow f
        where f.partition_key = i.partition_key and f.flow_id = i.flow_id
          -- Not a condition for the index on the time: rows are found by their key.
          and (f.project_at <= c.now) is true
          for update skip locked) f
 order by i.nth;

-- name: count_members
-- The members of flows that the transaction has locked, by their public state, and the ends that are queued for the cascade, all
-- from one snapshot: a member and its entry of the cascade change in the same commit. Next to them, the counts that the flow has. If these
-- are those of the members, no end is queued, and the entries are not read.
select i.partition_key, i.flow_id, f.node_count, f.live_count, f.failed_count, q.queued, q.queued_failed, m.*
  from unnest(:partition_keys::smallint[], :flow_ids::uuid[]) with ordinality as i(partition_key, flow_id, nth)
 cross join lateral (
       select f.node_count, f.live_count, f.failed_count from flow f
        where f.partition_key = i.partition_key and f.flow_id = i.flow_id limit 1) f
 cross join lateral (
       select count(*)::int as total,
              count(*) filter (where e.public_state = 'completed')::int as completed,
              count(*) filter (where e.public_state = 'failed')::int as failed,
              count(*) filter (where e.public_state = 'cancelled')::int as cancelled,
              count(*) filter (where e.public_state = 'expired')::int as expired,
              count(*) filter (where e.public_state = 'skipped')::int as skipped,
              count(*) filter (where e.public_state = 'active')::int as active,
              count(*) filter (where e.public_state = 'suspended')::int as suspended,
              count(*) filter (where e.public_state in ('waiting', 'resumable'))::int as waiting,
              count(*) filter (where e.public_state = 'delayed')::int as delayed,
              count(*) filter (where e.public_state = 'rate_limited')::int as rate_limited,
              count(*) filter (where e.public_state = 'waiting_children')::int as waiting_children
         from execution e
        where e.flow_id = i.flow_id) m
 cross join lateral (
       select coalesce(sum(cardinality(c.execution_ids)), 0)::int as queued,
              coalesce(sum(cardinality(c.execution_ids)) filter (where c.outcome = any(:failed_outcomes::smallint[])), 0)::int as queued_failed
         from cascade_entry c
        where (m.total - m.completed - m.failed - m.cancelled - m.expired - m.skipped, m.failed + m.cancelled + m.expired)
              is distinct from (f.live_count, f.failed_count)
          and c.partition_key = i.partition_key and c.flow_id = i.flow_id) q
 order by i.nth;

-- name: set_summaries
-- Stores the summaries of flows that the transaction has locked, keeps open, running and blocked apart in the state of those with
-- live members, and sets when they are projected next: never, if all members have ended, and twice as late each time that nothing has
-- changed, up to :quiet_limit times. A flow without members gets no summary.
with clock as materialized (select ff_now() as now),
given as materialized (
  select i.*, c.now, s.is_unchanged
    from clock c
   cross join unnest(:partition_keys::smallint[], :flow_ids::uuid[], :states::text[], :totals::int[], :completed::int[], :failed::int[],
                     :cancelled::int[], :expired::int[], :skipped::int[], :active::int[], :suspended::int[], :waiting::int[],
                     :delayed::int[], :rate_limited::int[], :waiting_children::int[])
         as i(partition_key, flow_id, state, total, completed, failed, cancelled, expired, skipped, active, suspended, waiting,
              delayed, rate_limited, waiting_children)
    left join lateral (
         select true as is_unchanged from flow_summary s
          where s.partition_key = i.partition_key and s.flow_id = i.flow_id
            and (s.public_flow_state, s.total_members, s.members_completed, s.members_failed, s.members_cancelled, s.members_expired,
                 s.members_skipped, s.members_active, s.members_suspended, s.members_waiting, s.members_delayed, s.members_rate_limited,
                 s.members_waiting_children)
              = (i.state, i.total, i.completed, i.failed, i.cancelled, i.expired, i.skipped, i.active, i.suspended, i.waiting, i.delayed,
                 i.rate_limited, i.waiting_children) limit 1) s on true
),
updated as (
  update flow f
     set derived_state = case when f.live_count > 0 and g.state in ('open', 'running', 'blocked') then g.state else f.derived_state end,
         quiet_count = q.quiet_count,
         project_at = case when f.live_count > 0 then g.now + (greatest(:interval_ms::bigint, :member_ms::bigint * g.total) << q.quiet_count) end
    from given g
   cross join lateral (
         select case when g.is_unchanged then least(o.quiet_count + 1, :quiet_limit::int) else 0 end as quiet_count
           from flow o where o.partition_key = g.partition_key and o.flow_id = g.flow_id limit 1) q
   where f.partition_key = any(array[g.partition_key]) and f.flow_id = g.flow_id
)
insert into flow_summary as s
       (partition_key, flow_id, total_members, sampled_members, members_completed, members_failed, members_cancelled,
        members_expired, members_skipped, members_active, members_suspended, members_waiting, members_delayed,
        members_rate_limited, members_waiting_children, public_flow_state, last_summary_update_at)
select partition_key, flow_id, total, total, completed, failed, cancelled, expired, skipped, active, suspended, waiting, delayed,
       rate_limited, waiting_children, state, now
  from given where total > 0
on conflict (partition_key, flow_id) do update
   set total_members = excluded.total_members, sampled_members = excluded.sampled_members,
       members_completed = excluded.members_completed, members_failed = excluded.members_failed,
       members_cancelled = excluded.members_cancelled, members_expired = excluded.members_expired,
       members_skipped = excluded.members_skipped, members_active = excluded.members_active,
       members_suspended = excluded.members_suspended, members_waiting = excluded.members_waiting,
       members_delayed = excluded.members_delayed, members_rate_limited = excluded.members_rate_limited,
       members_waiting_children = excluded.members_waiting_children, public_flow_state = excluded.public_flow_state,
       last_summary_update_at = excluded.last_summary_update_at;

-- name: read_summary_of_flow
-- The summary of a flow as last projected; no row if it never was.
select flow_id, total_members, sampled_members, members_completed, members_failed, members_cancelled, members_expired,
       members_skipped, members_active, members_suspended, members_waiting, members_delayed, members_rate_limited,
       members_waiting_children, public_flow_state, last_summary_update_at
  from flow_summary
 where partition_key = :partition_key and flow_id = :flow_id;

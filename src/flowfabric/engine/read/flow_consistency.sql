-- name: list_broken_members
-- The rules about flows that the executions of a range break.
with subject as materialized (
  select e.partition_key, e.execution_id, e.flow_id, e.eligibility_state = 'blocked_by_dependencies' as is_blocked,
         e.lifecycle_phase <> 'terminal' as is_live, e.blocking_reason = 'paused_by_flow_cancel' as is_held
    from execution e
   where (e.partition_key, e.execution_id) > (:after_partition::smallint, :after_id::uuid)
     and (e.partition_key, e.execution_id) <= (:last_partition::smallint, :last_id::uuid)
     and (e.flow_id is not null or e.eligibility_state = 'blocked_by_dependencies')
)
select e.partition_key, e.execution_id, e.flow_id, rule.problem
  from subject e
  left join lateral (
       select f.flow_id from flow f where f.partition_key = e.partition_key and f.flow_id = e.flow_id limit 1) f on true
  left join lateral (
       select g.group_state from edge_group g
        where e.is_live and g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id limit 1) g on true
  left join lateral (
       select true as waits from edge x
        where e.is_blocked and x.downstream_id = e.execution_id and x.partition_key = any(array[e.partition_key])
          and x.flow_id = any(array[e.flow_id]) and x.state in ('staged', 'unsatisfied')
        limit 1) x on true
 cross join lateral (values
       ('flow_id: the flow does not exist in the partition of the execution', e.flow_id is not null and f.flow_id is null),
       ('eligibility_state: blocked_by_dependencies without a pending group', e.is_blocked and g.group_state is distinct from 'pending'),
       -- A member that its cancelled flow holds back is not skipped: it is still to be cancelled.
       ('lifecycle_phase: not terminal though its group is impossible', e.is_live and not e.is_held and g.group_state = 'impossible'),
       ('eligibility_state: blocked_by_dependencies though every edge is resolved',
         e.is_blocked and g.group_state = 'pending' and x.waits is null)
       ) as rule(problem, is_broken)
 where rule.is_broken
 limit :limit;

-- name: read_flow_range_end
-- The last key of the next flows after a key, which have about :size members and edges together, or of one flow with more.
select r.partition_key, r.flow_id
  from (select f.partition_key, f.flow_id,
               sum(f.node_count + f.edge_count + 1) over (order by f.partition_key, f.flow_id) - f.node_count - f.edge_count - 1 as before
          from (select partition_key, flow_id, node_count, edge_count from flow
                 where (partition_key, flow_id) > (:after_partition::smallint, :after_id::uuid)
                 order by partition_key, flow_id limit 1000) f) r
 where r.before < :size
 order by r.partition_key desc, r.flow_id desc limit 1;

-- name: list_broken_flows
-- The rules that the flows of a range, their groups and their edges break. The outcomes 2 to 4 of a queued end count as failed.
with subject as materialized (
  select f.* from flow f
   where (f.partition_key, f.flow_id) > (:after_partition::smallint, :after_id::uuid)
     and (f.partition_key, f.flow_id) <= (:last_partition::smallint, :last_id::uuid)
),
queued as materialized (
  select c.partition_key, c.flow_id, c.outcome, m.execution_id
    from cascade_entry c
   cross join lateral unnest(c.execution_ids) as m(execution_id)
   where ((c.partition_key, c.flow_id) in (select partition_key, flow_id from subject)) is true
),
flow_rule as (
  select f.partition_key, null::uuid as execution_id, f.flow_id, rule.problem
    from subject f
   cross join lateral (
         select count(*) as total, count(*) filter (where e.lifecycle_phase <> 'terminal') as live,
                count(*) filter (where e.terminal_outcome in ('failed', 'cancelled', 'expired')) as failed
           from execution e where e.flow_id = f.flow_id) m
   cross join lateral (
         select count(*) as total, count(*) filter (where q.outcome between 2 and 4) as failed
           from queued q where q.partition_key = f.partition_key and q.flow_id = f.flow_id) q
   cross join lateral (select count(*) as total from edge x where x.partition_key = f.partition_key and x.flow_id = f.flow_id) x
   cross join lateral (values
         ('flow: live_count is not the number of its live members and queued ends', f.live_count <> m.live + q.total),
         -- Deleted members are still counted.
         ('flow: failed_count is not the number of its failed members', case when m.total < f.node_count
           then f.failed_count < m.failed - q.failed else f.failed_count <> m.failed - q.failed end),
         ('flow: node_count is lower than the number of its members', f.node_count < m.total),
         ('flow: edge_count is lower than the number of its edges', f.edge_count < x.total),
         ('flow: derived_state contradicts the counts', case
           when f.live_count > 0 then f.derived_state not in ('open', 'running', 'blocked')
           when f.node_count > 0 then f.derived_state <> case when f.failed_count > 0 then 'failed' else 'completed' end
           else f.derived_state <> 'open' end),
         ('flow: ended_at is missing though its members have ended', f.live_count <= 0 and f.node_count > 0 and f.ended_at is null),
         ('flow: its summary is never projected', f.live_count > 0 and f.project_at is null),
         ('flow: cancelled_at contradicts public_flow_state', (f.cancelled_at is not null) <> (f.public_flow_state = 'cancelled'))
         ) as rule(problem, is_broken)
   where rule.is_broken
   limit :limit
),
-- Groups and edges of deleted members are no longer kept up to date.
group_rule as (
  select g.partition_key, g.downstream_id as execution_id, g.flow_id, rule.problem
    from subject f
   cross join lateral (
         select g.* from edge_group g where g.partition_key = f.partition_key and g.flow_id = f.flow_id offset 0) g
   cross join lateral (
         select from execution e
          where e.partition_key = g.partition_key and e.execution_id = g.downstream_id and e.flow_id = any(array[g.flow_id]) limit 1) e
   cross join lateral (
         select count(*) as total, count(*) filter (where x.state <> 'staged') as applied,
                count(*) filter (where x.state = 'satisfied') as satisfied, count(*) filter (where x.state = 'impossible') as impossible
           from edge x
          where x.downstream_id = g.downstream_id and x.partition_key = any(array[g.partition_key])
            and x.flow_id = any(array[g.flow_id])) x
    left join lateral (
         select true as is_present from pending_cancel_group p
          where p.partition_key = g.partition_key and p.flow_id = g.flow_id and p.downstream_id = g.downstream_id limit 1) p on true
   cross join lateral (values
         ('edge_group: staged_count is not the number of its edges', g.staged_count <> x.total),
         ('edge_group: applied_count is not the number of its applied edges', g.applied_count <> x.applied),
         ('edge_group: succeeded_count is not the number of its satisfied edges', g.succeeded_count <> x.satisfied),
         ('edge_group: failed_count and skipped_count are not the number of its impossible edges',
           g.failed_count + g.skipped_count <> x.impossible),
         ('edge_group: k contradicts the policy', (g.k is not null) <> (g.policy = 'quorum')),
         ('edge_group: flagged for its siblings without an entry of pending_cancel_group',
           g.cancel_siblings_pending_flag and p.is_present is null)
         ) as rule(problem, is_broken)
   where rule.is_broken
   limit :limit
),
edge_rule as (
  select x.partition_key, x.downstream_id as execution_id, x.flow_id, rule.problem
    from subject f
   cross join lateral (
         select x.* from edge x where x.partition_key = f.partition_key and x.flow_id = f.flow_id offset 0) x
   cross join lateral (
         select from execution d
          where d.partition_key = x.partition_key and d.execution_id = x.downstream_id and d.flow_id = any(array[x.flow_id]) limit 1) d
    left join lateral (
         select u.lifecycle_phase from execution u
          where x.state = 'unsatisfied' and u.partition_key = x.partition_key and u.execution_id = x.upstream_id
            and u.flow_id = any(array[x.flow_id]) limit 1) u on true
    left join lateral (
         select true as is_present from edge_group g
          where g.partition_key = x.partition_key and g.flow_id = x.flow_id and g.downstream_id = x.downstream_id limit 1) g on true
   cross join lateral (values
         ('edge: its group does not exist', g.is_present is null),
         -- A replay makes impossible edges unsatisfied again; a sweep resolves those whose upstream execution is not replayed before.
         -- `(... in (...)) is true` makes the planner use a hashed subplan instead of a nested loop.
         ('edge: unsatisfied though its upstream execution has ended and its end is not queued',
           x.state = 'unsatisfied' and coalesce(u.lifecycle_phase = 'terminal', true)
             and ((x.partition_key, x.flow_id, x.upstream_id) in (select q.partition_key, q.flow_id, q.execution_id from queued q)) is not true
             and not exists (
               select from execution d
                where d.partition_key = x.partition_key and d.execution_id = x.downstream_id and d.replay_count > 0))
         ) as rule(problem, is_broken)
   where rule.is_broken
   limit :limit
)
select * from flow_rule
union all
select * from group_rule
union all
select * from edge_rule;

-- name: list_flow_orphans
-- Rows about flows whose flow, group or member does not exist. Edges and groups are found with one index lookup for each flow: a flow may
-- have many.
with recursive edge_flow as (
  (select x.partition_key, x.flow_id from edge x order by x.partition_key, x.flow_id limit 1)
  union all
  select n.partition_key, n.flow_id
    from edge_flow k cross join lateral (
         select x.partition_key, x.flow_id from edge x
          where (x.partition_key, x.flow_id) > (k.partition_key, k.flow_id) order by x.partition_key, x.flow_id limit 1) n
),
group_flow as (
  (select g.partition_key, g.flow_id from edge_group g order by g.partition_key, g.flow_id limit 1)
  union all
  select n.partition_key, n.flow_id
    from group_flow k cross join lateral (
         select g.partition_key, g.flow_id from edge_group g
          where (g.partition_key, g.flow_id) > (k.partition_key, k.flow_id) order by g.partition_key, g.flow_id limit 1) n
)
(select k.partition_key, null::uuid as execution_id, k.flow_id, 'edge: its flow does not exist' as problem from edge_flow k
  where not exists (select from flow f where f.partition_key = k.partition_key and f.flow_id = k.flow_id) limit :limit)
union all
(select k.partition_key, null, k.flow_id, 'edge_group: its flow does not exist' from group_flow k
  where not exists (select from flow f where f.partition_key = k.partition_key and f.flow_id = k.flow_id) limit :limit)
union all
(select distinct t.partition_key, null::uuid, t.flow_id, 'flow_tag: its flow does not exist' from flow_tag t
  where not exists (select from flow f where f.partition_key = t.partition_key and f.flow_id = t.flow_id) limit :limit)
union all
(select s.partition_key, null, s.flow_id, 'flow_summary: its flow does not exist' from flow_summary s
  where not exists (select from flow f where f.partition_key = s.partition_key and f.flow_id = s.flow_id) limit :limit)
union all
(select p.partition_key, p.downstream_id, p.flow_id, 'pending_cancel_group: its group is not flagged' from pending_cancel_group p
  where not exists (
        select from edge_group g
         where g.partition_key = p.partition_key and g.flow_id = p.flow_id and g.downstream_id = p.downstream_id
           and g.cancel_siblings_pending_flag) limit :limit)
union all
(select b.partition_key, null, b.flow_id, 'cancel_backlog: its flow is not cancelled' from cancel_backlog b
  where not exists (
        select from flow f
         where f.partition_key = b.partition_key and f.flow_id = b.flow_id and f.public_flow_state = 'cancelled') limit :limit)
union all
(select m.partition_key, m.execution_id, m.flow_id, 'cancel_backlog_member: not a member of the flow' from cancel_backlog_member m
  where not exists (
        select from execution e
         where e.partition_key = m.partition_key and e.execution_id = m.execution_id and e.flow_id = any(array[m.flow_id])) limit :limit)
union all
(select m.partition_key, m.execution_id, m.flow_id, 'cancel_backlog_member: its flow has no entry of cancel_backlog' from cancel_backlog_member m
  where not exists (select from cancel_backlog b where b.partition_key = m.partition_key and b.flow_id = m.flow_id) limit :limit)
union all
(select c.partition_key, m.execution_id, c.flow_id, 'cascade_entry: not a member of the flow' from cascade_entry c
  cross join lateral unnest(c.execution_ids) as m(execution_id)
  where not exists (
        select from execution e
         where e.partition_key = c.partition_key and e.execution_id = m.execution_id and e.flow_id = any(array[c.flow_id])) limit :limit);

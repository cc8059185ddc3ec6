-- fragment: wanted
-- The queues of the given namespaces, lanes and kinds.
select q.queue_no
  from queue q
 where (:namespaces::text[] is null or q.namespace_no in (select namespace_no from namespace where namespace = any(:namespaces)))
   and (:lanes::text[] is null or q.lane_no in (select lane_no from lane where lane_id = any(:lanes)))
   and (:kinds::text[] is null or q.kind_no in (select kind_no from kind where execution_kind = any(:kinds)))

-- fragment: groups
-- The counts of the tally of the wanted queues, with the names of what they are grouped by.
select l.lane_id, g.public_state, n.namespace, k.execution_kind, g.executions
  from (select case when :by_lane::boolean then q.lane_no end as lane_no, case when :by_state::boolean then t.public_state end as public_state,
               case when :by_namespace::boolean then q.namespace_no end as namespace_no,
               case when :by_kind::boolean then q.kind_no end as kind_no, sum(t.executions)::bigint as executions
          from tally t
         cross join lateral (select q.lane_no, q.namespace_no, q.kind_no from queue q where q.queue_no = t.queue_no limit 1) q
         -- `(... in (...)) is true` makes the planner use a hashed subplan instead of a nested loop.
         where t.public_state = any(:states::public_state[]) and (t.queue_no in (select queue_no from wanted)) is true
         group by 1, 2, 3, 4
        having sum(t.executions) > 0) g
  left join lane l on l.lane_no = g.lane_no
  left join namespace n on n.namespace_no = g.namespace_no
  left join kind k on k.kind_no = g.kind_no

-- name: count_executions
-- The number of executions of the given namespaces, lanes, kinds and states, grouped by the requested dimensions. One
-- statement, so that all counts are of one snapshot.
-- Ended executions are counted from the entries of retained and waiting ones from the entries of ready, without reading
-- execution rows. The others are looked up. The entries of queues without room count as rate limited.
with clock as materialized (select ff_now() as now),
wanted as materialized (
  -- include: wanted
),
full_queue as materialized (
  select f.queue_no
    from clock c cross join lateral ff_full_queues(c.now) f
   where :states::public_state[] && '{waiting,rate_limited}' and (f.queue_no in (select w.queue_no from wanted w)) is true
),
queued as materialized (
  select w.queue_no, (w.queue_no in (select f.queue_no from full_queue f)) is true as is_full from wanted w
),
-- Ids to look up together. Each order by selects the partial index that holds exactly these rows.
batch as (
  select t.partition_key, array_agg(t.execution_id) as execution_ids, null::bigint as claim_no, null::bigint as ended_at
    from (select partition_key, execution_id from timer
           where 'delayed' = any(:states::public_state[]) and kind = 'delay' order by due_at offset 0) t
   group by t.partition_key
  union all
  select s.partition_key, array_agg(s.execution_id), null, null
    from (select partition_key, execution_id from suspension
           where 'suspended' = any(:states) and close_reason is null order by suspended_at offset 0) s
   group by s.partition_key
  union all
  -- These have no entry of ready.
  select l.partition_key, array_agg(l.execution_id), null, null
    from (select partition_key, execution_id from listed
           where public_state = 'waiting_children' and 'waiting_children' = any(:states) order by at offset 0) l
   group by l.partition_key
  union all
  -- A claim keeps the ids of executions that are no longer leased under it until it is removed.
  select partition_key, execution_ids, claim_no, null from claim where 'active' = any(:states)
  union all
  -- An entry that does not name the queue of each id was written by an older version, or shortened by a trim.
  select partition_key, execution_ids, null, ended_at
    from retained
   where queue_no is null and cardinality(queue_nos) is distinct from cardinality(execution_ids)
     and :states && '{completed,failed,cancelled,expired,skipped}'
),
tally as (
  select r.queue_no, case r.terminal_outcome when 'success' then 'completed' else r.terminal_outcome::text end::public_state as public_state,
         r.executions
    from (select queue_no, terminal_outcome, sum(cardinality(execution_ids)) as executions
            from retained
           where queue_no is not null and :states && '{completed,failed,cancelled,expired,skipped}'
           group by queue_no, terminal_outcome
          union all
          select each.queue_no, each.terminal_outcome, count(*)
            from (select unnest(queue_nos) as queue_no, terminal_outcome
                    from retained
                   where queue_no is null and cardinality(queue_nos) = cardinality(execution_ids)
                     and :states && '{completed,failed,cancelled,expired,skipped}') each
           group by each.queue_no, each.terminal_outcome
          offset 0) r
  union all
  select w.queue_no, case when w.is_full then 'rate_limited' else 'waiting' end::public_state, r.executions
    from queued w
   cross join lateral (select count(*) as executions from ready where queue_no = w.queue_no) r
   where case when w.is_full then 'rate_limited' = any(:states) else 'waiting' = any(:states) end
  union all
  -- Those of them that a grant reserves wait for their worker.
  select e.queue_no, s.public_state, s.executions
    from (select g.partition_key, g.execution_id, g.expires_at from claim_grant g
           where exists (select from full_queue) and g.expires_at > (select now from clock) order by g.expires_at offset 0) g
   cross join lateral (
         select e.queue_no, e.granted_until from execution e
          where e.partition_key = g.partition_key and e.execution_id = g.execution_id and e.eligibility_state = 'eligible_now'
            and e.public_state = 'waiting' limit 1) e
   cross join (values ('waiting'::public_state, 1), ('rate_limited', -1)) as s(public_state, executions)
   where e.granted_until = g.expires_at and (e.queue_no in (select f.queue_no from full_queue f)) is true
  union all
  select e.queue_no, e.public_state, count(*)
    from batch b
   -- The offset makes the planner start from the ids, whatever its estimates.
   cross join lateral (
         select e.queue_no, e.public_state from execution e
          where e.partition_key = b.partition_key and e.execution_id = any(b.execution_ids)
            and (b.claim_no is null or (e.claim_no = b.claim_no and e.ownership_state = 'leased'))
            and (b.ended_at is null or (e.last_transition_at = b.ended_at and e.lifecycle_phase = 'terminal'))
         offset 0) e
   group by e.queue_no, e.public_state
  union all
  -- Executions that lost their lease, are resumable or are blocked by a limit also have an entry in ready, which was counted as waiting
  -- or rate limited: subtract it.
  select e.queue_no, s.public_state, s.executions
    from unnest('{waiting,active,resumable,rate_limited}'::public_state[]) as w(public_state)
   cross join lateral (
         select partition_key, execution_id from listed where public_state = w.public_state order by at offset 0) l
   cross join lateral (
         select e.queue_no, e.place, e.public_state from execution e
          where e.partition_key = l.partition_key and e.execution_id = l.execution_id limit 1) e
   cross join lateral (select q.route_no from queue q where q.queue_no = e.queue_no limit 1) q
   -- The condition covers the columns of both indexes of ready, so that either can be used.
   cross join lateral (
         select e.public_state, 1 as executions
         union all
         select case when (e.queue_no in (select f.queue_no from full_queue f)) is true then 'rate_limited' else 'waiting' end::public_state, -1
           from ready r where r.route_no = q.route_no and r.queue_no = e.queue_no and r.place = e.place) s
   where w.public_state = any(:states)
      or (:states && '{waiting,rate_limited}' and w.public_state in ('active', 'resumable', 'rate_limited'))
)
-- include: groups
;

-- name: count_executions_of_flow
-- The number of members of a flow with the given namespaces, lanes, kinds and states, grouped by the requested dimensions. Reads every
-- member.
with wanted as materialized (
  -- include: wanted
),
clock as materialized (select ff_now() as now),
entry as materialized (
  select e.queue_no, e.public_state, e.is_queued, count(*) as executions
    from (select e.queue_no, e.public_state,
                 -- include: listing.is_queued
                 as is_queued
            from execution e where e.flow_id = :flow_id) e
   group by e.queue_no, e.public_state, e.is_queued
),
-- include: listing.full_queue
,
tally as (
  select x.queue_no, x.executions,
         -- include: listing.state
         as public_state
    from entry x
)
-- include: groups
;

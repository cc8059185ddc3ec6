-- name: read_progress
-- A flow, and how many of its members are in which state.
with clock as materialized (select ff_now() as now),
entry as materialized (
  select e.queue_no, e.public_state, e.is_queued, count(*) as executions
    from (select e.queue_no, e.public_state,
                 -- include: listing.is_queued
                 as is_queued
            from execution e where e.flow_id = :flow_id and e.partition_key = :partition_key) e
   group by e.queue_no, e.public_state, e.is_queued
),
-- include: listing.full_queue
select f.flow_kind, f.public_flow_state, f.derived_state, f.live_count, f.node_count, f.created_at, f.cancelled_at, f.cancel_reason,
       (select jsonb_object_agg(s.public_state, s.members)
          from (select x.public_state, sum(x.executions) as members
                  from (select x.executions,
                               -- include: listing.state
                               as public_state
                          from entry x) x
                 group by x.public_state) s) as members
  from flow f
 where f.partition_key = :partition_key and f.flow_id = :flow_id;

-- name: list_member_ids
-- The ids of the members of a flow in ascending order, after a given one. The partition is not part of the scan: with it, a plan made
-- while the table is empty would scan the whole partition.
select m.execution_id
  from (select e.partition_key, e.execution_id from execution e
         where e.flow_id = :flow_id and e.execution_id > :after order by e.execution_id limit :limit) m
 where m.partition_key = :partition_key;

-- name: list_unmet_members
-- The members of a flow that ended without success: first those that failed, then expired and cancelled ones, and those that only
-- followed from others, which were skipped or cancelled as siblings. Each row has the number of all of them, and of the final ones, which no
-- edge leaves, and with :with_errors the class and the traceback of the exception that the member failed with.
with unmet as materialized (
  select e.partition_key, e.execution_id, e.queue_no, e.terminal_outcome, e.failure_reason, e.cancellation_reason, e.attempt_count,
         case e.terminal_outcome
           when 'failed' then 1 when 'expired' then 2
           when 'cancelled' then case when e.cancellation_reason like 'sibling\_quorum\_%' then 5 else 3 end
           else 4 end as rank,
         x.edge_id is null as is_final
    from execution e
    left join lateral (
         select x.edge_id from edge x
          where x.upstream_id = e.execution_id and x.partition_key = e.partition_key and x.flow_id is not distinct from e.flow_id
          limit 1) x on true
   where e.flow_id = :flow_id and e.partition_key = :partition_key and e.terminal_outcome in ('failed', 'expired', 'cancelled', 'skipped')
)
select u.execution_id, k.execution_kind, u.terminal_outcome::text as terminal_outcome, u.rank <= 3 as is_cause,
       coalesce(u.failure_reason, u.cancellation_reason) as reason, u.unmet, u.unmet_final,
       case when :with_errors::bool and u.terminal_outcome = 'failed' then (
         select array[a.error_type, a.traceback] from attempt a
          where a.partition_key = u.partition_key and a.execution_id = u.execution_id and a.attempt_index = u.attempt_count - 1) end as error
  from (select u.*, count(*) over () as unmet, count(*) filter (where u.is_final) over () as unmet_final
          from unmet u order by u.rank, u.execution_id limit :limit) u
  left join queue q on q.queue_no = u.queue_no
  left join kind k on k.kind_no = q.kind_no
 order by u.rank, u.execution_id;

-- name: list_members_to_replay
-- The members of a flow that did not succeed and run again when it is replayed: those that failed, expired, were cancelled or were skipped,
-- and of the siblings that decided groups have cancelled those without which one of these would be skipped again. The filter is a hashed
-- subplan: a join could be a nested loop.
with recursive unmet as materialized (
  select e.partition_key, e.execution_id, e.terminal_outcome::text <> 'skipped' as is_cause,
         (e.terminal_outcome::text = 'cancelled' and e.cancellation_reason like 'sibling\_quorum\_%') is true as is_sibling
    from execution e
   where e.flow_id = :flow_id and e.partition_key = :partition_key and e.terminal_outcome in ('failed', 'expired', 'cancelled', 'skipped')
),
needed as (
  select u.partition_key, u.execution_id, u.is_cause from unmet u where not u.is_sibling
   union
  select n.partition_key, x.upstream_id, true
    from needed n
   cross join lateral (
         select x.upstream_id from edge_group g
          cross join lateral (
                select x.upstream_id from edge x
                 where x.downstream_id = g.downstream_id and x.partition_key is not distinct from g.partition_key
                   and x.flow_id is not distinct from g.flow_id and x.state::text = 'impossible' offset 0) x
          where g.partition_key = n.partition_key and g.flow_id = :flow_id and g.downstream_id = n.execution_id
            and g.group_state::text = 'impossible' offset 0) x
   where (x.upstream_id in (select s.execution_id from unmet s where s.is_sibling)) is true
)
select n.execution_id, n.is_cause from needed n order by not n.is_cause, n.execution_id;

-- name: count_deleted_members
-- How many members a flow has had, how many of them retention has deleted, and how many of these no edge leaves. The edges of a deleted
-- member stay until the flow is deleted; they are read only if a member was deleted. Without the offset, the planner could read the edges
-- of all flows in the order of the index on their upstreams.
select f.node_count, f.node_count - m.stored as deleted,
       case when f.node_count > m.stored then f.node_count - m.stored - (
         select count(*)::int
           from (select distinct x.upstream_id
                   from (select x.upstream_id from edge x
                          where x.partition_key = f.partition_key and x.flow_id = f.flow_id offset 0) x) x
           left join lateral (
                select true as is_stored from execution e
                 where e.partition_key = any(array[f.partition_key]) and e.execution_id = x.upstream_id
                   and e.flow_id is not distinct from f.flow_id
                 limit 1) e on true
          where e.is_stored is null) else 0 end as deleted_final
  from flow f
 cross join lateral (select count(*)::int as stored from execution e where e.flow_id = f.flow_id) m
 where f.partition_key = :partition_key and f.flow_id = :flow_id;

-- name: list_unserved_members
-- Claimable members of a flow that no live worker serves: one for each queue, as the same workers serve everything in it.
with clock as materialized (select ff_now() as now),
waiting as materialized (
  select distinct on (e.queue_no) e.queue_no, e.execution_id
    from execution e
   where e.flow_id = :flow_id and e.lifecycle_phase = 'runnable' and e.eligibility_state = 'eligible_now'
   order by e.queue_no, e.execution_id
),
live as materialized (
  select r.lanes, r.namespace, r.serves_all_namespaces, r.kinds, r.capabilities from worker r cross join clock c where r.lapses_at > c.now
)
select w.execution_id, w.queue_no
  from waiting w
  join queue q on q.queue_no = w.queue_no
  join kind k on k.kind_no = q.kind_no
  join lane l on l.lane_no = q.lane_no
  join namespace n on n.namespace_no = q.namespace_no
  join route t on t.route_no = q.route_no
  join capability_set s on s.capability_set_no = t.capability_set_no
 where not exists (
       select from live r
        where l.lane_id = any(r.lanes) and (r.serves_all_namespaces or r.namespace = n.namespace)
          and (r.kinds is null or k.execution_kind = any(r.kinds)) and r.capabilities @> ff_required(s.required))
 order by w.execution_id limit :limit;

-- name: read_dependency
-- The state of an edge.
select state from edge where partition_key = :partition_key and flow_id = :flow_id and edge_id = :edge_id;

-- fragment: standing
-- Whether the dependencies of an execution e allow it to run (is_free), and how many of its edges are unsatisfied or not resolved.
select coalesce(g.group_state = 'satisfied', u.unresolved = 0) as is_free, u.unsatisfied, u.unresolved
  from (select count(*) filter (where x.state = 'unsatisfied') as unsatisfied,
               count(*) filter (where x.state in ('staged', 'unsatisfied')) as unresolved
          from edge x where x.downstream_id = e.execution_id and x.partition_key = e.partition_key) u
  left join lateral (
       select case when g.group_state <> 'pending' or u.unresolved > 0 then g.group_state end as group_state from edge_group g
        where g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id limit 1) g on true

-- name: read_unresolved
-- Whether the dependencies of an execution allow it to run.
select s.*
  from (select e.* from execution e where e.partition_key = :partition_key and e.execution_id = :execution_id) e
 cross join lateral (
       -- include: standing
       ) s;

-- name: list_stuck
-- Of the next :limit executions that wait for dependencies after a position: those that need not, because an edge is unsatisfied
-- although its upstream execution has ended, or because their dependencies are satisfied. The first row has the position after
-- the page, null if it was the last.
with blocked as materialized (
  select l.at, l.partition_key, l.execution_id
    from listed l
   where l.public_state = 'waiting_children' and l.at >= :since_at::bigint and (l.at, l.execution_id) > (:since_at, :since_id::uuid)
   order by l.at, l.execution_id limit :limit
),
last as (select at, execution_id from blocked order by at desc, execution_id desc limit 1)
select null::smallint as partition_key, null::uuid as execution_id, null::uuid as flow_id,
       case when (select count(*) from blocked) = :limit then (select at from last) end as reached_at,
       case when (select count(*) from blocked) = :limit then (select execution_id from last) end as reached_id
union all
select e.partition_key, e.execution_id, e.flow_id, null, null
  from blocked b
 cross join lateral (
       select e.partition_key, e.execution_id, e.flow_id, e.eligibility_state from execution e
        where e.partition_key = b.partition_key and e.execution_id = b.execution_id limit 1) e
 cross join lateral (
       -- include: standing
       ) s
 where e.eligibility_state = 'blocked_by_dependencies'
   and (s.is_free or (
         select true
           from (select x.partition_key, x.upstream_id from edge x
                  where x.downstream_id = e.execution_id and x.partition_key = e.partition_key and x.state = 'unsatisfied' offset 0) x
          cross join lateral (
                select u.lifecycle_phase from execution u
                 where u.partition_key = x.partition_key and u.execution_id = x.upstream_id limit 1) u
          where u.lifecycle_phase = 'terminal' limit 1));

-- name: list_ended_upstreams
-- The unsatisfied edges of executions of a locked flow whose upstream executions have ended, with their outcomes.
select x.edge_id, u.terminal_outcome
  from unnest(:execution_ids::uuid[]) as i(execution_id)
 cross join lateral (
       select x.edge_id, x.upstream_id, x.partition_key from edge x
        where x.downstream_id = i.execution_id and x.partition_key = :partition_key and x.state = 'unsatisfied' offset 0) x
 cross join lateral (
       select u.terminal_outcome from execution u
        where u.partition_key = x.partition_key and u.execution_id = x.upstream_id and u.lifecycle_phase = 'terminal' limit 1) u
 limit :limit;

-- name: lock_free
-- Locks those of the given executions, of one locked flow or of none, that wait for dependencies although these allow them to run.
with locked as materialized (
  select e.*
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
   cross join lateral (
         select e.partition_key, e.execution_id, e.flow_id from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.lifecycle_phase = 'runnable'
            and e.eligibility_state = 'blocked_by_dependencies'
            for update skip locked) e
)
select e.partition_key, e.execution_id
  from locked e
 cross join lateral (
       -- include: standing
       ) s
 where s.is_free;

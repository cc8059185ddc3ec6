-- name: read_dependency
-- The state of an edge.
select state from edge where partition_key = :partition_key and flow_id = :flow_id and edge_id = :edge_id;

-- fragment: standing
-- Whether the dependencies of an execution e allow it to run (is_free), and how many of its edges are unsatisfied or not resolved; from
-- the counts of their group, as an execution may have tens of thousands of edges.
select coalesce(g.group_state = 'satisfied' or (g.group_state = 'pending' and g.staged_count = g.resolved_count), true) as is_free,
       coalesce(g.applied_count - g.resolved_count, 0) as unsatisfied, coalesce(g.staged_count - g.resolved_count, 0) as unresolved
  from (values (1)) as one(nth)
  left join lateral (
       select g.group_state, g.staged_count, g.applied_count, g.succeeded_count + g.failed_count + g.skipped_count as resolved_count
         from edge_group g
        where g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id limit 1) g on true

-- name: read_unresolved
-- Whether the dependencies of an execution allow it to run.
select s.*
  from (select e.* from execution e where e.partition_key = :partition_key and e.execution_id = :execution_id) e
 cross join lateral (
       -- include: standing
       ) s;

-- name: list_stuck
-- A page of executions that wait for dependencies: :limit lines after a position, where an execution has a line for each of its
-- unsatisfied edges, or one if it has none. Returns the executions of the page that their dependencies allow to run, without edges, and
-- those with edges whose upstream execution has ended or does not exist, at most :edges of them in a row. The first row has the
-- position of the last line, null if the page was the last, the time of the first, or now without any, and how long this took. A position
-- in the middle of an execution has the number of the edges seen.
with line as materialized (
  select b.at, b.execution_id, e.partition_key, e.flow_id, s.is_free, x.edge_id, x.upstream_id, x.nth
    from (select l.at, l.partition_key, l.execution_id
            from listed l
           where l.public_state = 'waiting_children' and l.at >= :since_at::bigint and (l.at, l.execution_id) >= (:since_at, :since_id::uuid)
             and (:edges_seen::int is not null or (l.at, l.execution_id) > (:since_at, :since_id))
           order by l.at, l.execution_id limit :limit::int) b
    left join lateral (
         select e.partition_key, e.execution_id, e.flow_id from execution e
          where e.partition_key = b.partition_key and e.execution_id = b.execution_id and e.eligibility_state = 'blocked_by_dependencies'
          limit 1) e on true
    left join lateral (
         -- include: standing
         ) s on true
    left join lateral (
         select x.edge_id, x.upstream_id, row_number() over () as nth
           from (select x.edge_id, x.upstream_id from edge x
                  where s.unsatisfied > 0 and not s.is_free and x.downstream_id = e.execution_id
                    and x.partition_key is not distinct from e.partition_key and x.flow_id is not distinct from e.flow_id
                    and x.state = 'unsatisfied' offset 0) x
         offset case when b.execution_id = :since_id then coalesce(:edges_seen, 0) else 0 end limit :limit) x on true
   limit :limit
),
last as (select at, execution_id, nth from line order by at desc, execution_id desc, nth desc limit 1)
select null::smallint as partition_key, null::uuid as execution_id, null::uuid as flow_id, null::uuid[] as edge_ids,
       l.at as reached_at, l.execution_id as reached_id, l.nth as edges_seen,
       coalesce((select min(at) from line), (select ff_now())) as began_at,
       (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000)::bigint as took_ms
  from (select count(*) as lines from line) c
  left join last l on c.lines = :limit
union all
select l.partition_key, l.execution_id, l.flow_id, coalesce(array_agg(l.edge_id order by l.nth) filter (where l.edge_id is not null), '{}'),
       null, null, null, null, null
  from line l
  left join lateral (
       select u.lifecycle_phase from execution u
        where u.partition_key = l.partition_key and u.execution_id = l.upstream_id and u.flow_id is not distinct from l.flow_id limit 1) u
    on true
 where l.partition_key is not null
   and case when l.edge_id is null then l.is_free else coalesce(u.lifecycle_phase = 'terminal', true) end
 group by l.partition_key, l.execution_id, l.flow_id, (l.nth - 1) / :edges::int;

-- name: list_ended_upstreams
-- Those of the given edges of a locked flow that are unsatisfied although their upstream executions have ended, with their outcomes; with
-- none if the upstream execution does not exist.
select x.edge_id, u.terminal_outcome
  from unnest(:edge_ids::uuid[]) with ordinality as i(edge_id, nth)
 cross join lateral (
       select x.edge_id, x.upstream_id, x.partition_key, x.flow_id from edge x
        where x.partition_key = :partition_key and x.flow_id = :flow_id and x.edge_id = i.edge_id and x.state = 'unsatisfied' limit 1) x
  left join lateral (
       select u.lifecycle_phase, u.terminal_outcome from execution u
        where u.partition_key = x.partition_key and u.execution_id = x.upstream_id and u.flow_id is not distinct from x.flow_id limit 1) u
    on true
 where coalesce(u.lifecycle_phase = 'terminal', true)
 order by i.nth;

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

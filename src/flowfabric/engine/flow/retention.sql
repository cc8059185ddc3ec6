-- name: take_flows
-- Deletes flows without members, among up to :limit that are due since :since and not locked, only those in :only unless that is null, and
-- none of :skipped: those that ended, and whose graph was last changed, at least :retention_ms ago. Up to :rows edges and as many groups go
-- first; the flows themselves go when none are left. Any other due flow is due again :members_ms after its retention. If that is over, it
-- is due again after as long as it is over already, but not before :members_ms, and after :recheck_ms at the latest. Returns how many flows
-- were deleted and looked at, whether edges or groups are left (has_more), the time up to which no flow is due except skipped and locked
-- ones and those with edges or groups left (reached), and how long this took.
with clock as materialized (select ff_now() as now),
due as materialized (
  select f.ctid as tid, f.partition_key, f.flow_id, f.retain_until, f.live_count, greatest(f.last_mutation_at, f.ended_at) as changed_at, c.now
    from clock c
   cross join lateral (
         select f.ctid, f.* from flow f
          where f.retain_until > :since::bigint and f.retain_until <= c.now
            and f.flow_id <> all(:skipped::uuid[]) and (:only::uuid[] is null or f.flow_id = any(:only))
          order by f.retain_until limit :limit for update skip locked) f
),
-- What the flow row says is of the locked row: the graph of a flow changes only under its lock.
spent as materialized (
  select d.tid, d.partition_key, d.flow_id
    from due d
   where d.live_count <= 0 and d.changed_at + :retention_ms::bigint <= d.now
     and not exists (select from execution e where e.flow_id = d.flow_id offset 0)
     and not exists (select from cascade_entry o where o.partition_key = d.partition_key and o.flow_id = d.flow_id offset 0)
     and not exists (select from cancel_backlog o where o.partition_key = d.partition_key and o.flow_id = d.flow_id offset 0)
     and not exists (select from pending_cancel_group o where o.partition_key = d.partition_key and o.flow_id = d.flow_id offset 0)
),
edges as materialized (
  select e.tid
    from spent s
   cross join lateral (
         select e.ctid as tid from edge e
          where e.partition_key = any(array[s.partition_key]) and e.flow_id = s.flow_id limit :rows) e
   limit :rows
),
groups as materialized (
  select g.tid
    from spent s
   cross join lateral (
         select g.ctid as tid from edge_group g
          where g.partition_key = any(array[s.partition_key]) and g.flow_id = s.flow_id limit :rows) g
   limit :rows
),
rest as materialized (
  select (select count(*) from edges) >= :rows or (select count(*) from groups) >= :rows as has_more
),
deleted_edges as (delete from edge where ctid = any(array(select tid from edges))),
deleted_groups as (delete from edge_group where ctid = any(array(select tid from groups))),
deleted as (
  delete from flow where ctid = any(array(select tid from spent where not (select has_more from rest)))
  returning partition_key, flow_id
),
tags as (
  delete from flow_tag t using deleted d where t.partition_key = any(array[d.partition_key]) and t.flow_id = d.flow_id),
summaries as (
  delete from flow_summary s using deleted d where s.partition_key = any(array[d.partition_key]) and s.flow_id = d.flow_id),
limits as (
  delete from limit_attachment a using deleted d where a.scope_type = 'flow' and a.scope_id = d.flow_id::text),
kept as (
  update flow f
     set retain_until = case
           when d.changed_at + :retention_ms > d.now then d.changed_at + :retention_ms + :members_ms::bigint
           else d.now + least(greatest(d.now - d.changed_at - :retention_ms, :members_ms), :recheck_ms::bigint) end
    from due d
   where f.ctid = d.tid and d.tid not in (select tid from spent)
)
select (select count(*) from deleted) as deleted, (select count(*) from due) as looked_at, has_more,
       case
         when has_more then (select min(retain_until) from due)
         when (select count(*) from due) < :limit then (select now from clock)
         else (select max(retain_until) from due) end as reached,
       (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000)::bigint as took_ms
  from rest;

-- name: list_retained_flows
-- The flows that are due since :since except :skipped, the longest first.
select f.partition_key, f.flow_id from flow f
 where f.retain_until > :since::bigint and f.retain_until <= (select ff_now()) and f.flow_id <> all(:skipped::uuid[])
 order by f.retain_until limit :limit;

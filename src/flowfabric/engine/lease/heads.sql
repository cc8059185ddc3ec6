-- name: list_heads
-- The first entry of each priority of each queue that a claim may serve, with the lane and how it is fair; for lanes that age, with the
-- time at which the execution was created. A loose index scan: it reads one entry for each queue and priority.
with recursive serving as materialized (
  select q.queue_no, q.route_no, q.namespace_no, q.fair_key, l.lane_id, l.fair_by, l.ageing_ms
    from lane l
    join route r using (lane_no)
    join capability_set c using (capability_set_no)
    join queue q on q.lane_no = l.lane_no and q.route_no = r.route_no
   where l.lane_id = any(:lanes::text[]) and l.state in ('active', 'draining') and c.required <@ :capabilities::text[]
     and (:kind_nos::int[] is null or q.kind_no in (select unnest(:kind_nos)))
     and (:namespace_no::int is null or q.namespace_no = :namespace_no)
),
head as (
  select s.*, r.place, r.partition_key, r.execution_id
    from serving s
   cross join lateral (
         select r.place, r.partition_key, r.execution_id from ready r where r.queue_no = s.queue_no order by r.place limit 1) r
  union all
  select h.queue_no, h.route_no, h.namespace_no, h.fair_key, h.lane_id, h.fair_by, h.ageing_ms, r.place, r.partition_key, r.execution_id
    from head h
   cross join lateral (
         select r.place, r.partition_key, r.execution_id from ready r
          where r.queue_no = h.queue_no and r.place >= ((h.place >> 48) + 1) << 48 order by r.place limit 1) r
)
select h.queue_no, h.lane_id,
       case h.fair_by when 'namespace' then (select n.namespace from namespace n where n.namespace_no = h.namespace_no) else h.fair_key end as fair_group,
       h.place,
       case when h.ageing_ms is not null then (
         select e.created_at from execution e where e.partition_key = h.partition_key and e.execution_id = h.execution_id) end as created_at
  from head h
union all
select null, null, null, (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000000)::bigint, ff_now();

-- name: list_fairness
-- How these lanes are fair, with the routes whose queues are served in turn.
select l.lane_id, l.fair_by is not null as is_fair, l.fair_weights, l.ageing_ms, array_agg(r.route_no) as route_nos
  from lane l left join route r using (lane_no)
 where l.lane_id = any(:lanes::text[])
 group by l.lane_id, l.fair_by, l.fair_weights, l.ageing_ms;

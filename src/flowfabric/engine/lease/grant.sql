-- name: lock_best
-- Holds the best execution of a lane that this worker may be granted, null when there is none; with the time that the
-- server took for the walk.
-- A queue is walked up to where another one has something better, with :is_any to its end.
with clock as materialized (select ff_now() as now),
-- The spans of a queue stand next to each other, and the queues in the order of their numbers.
span as materialized (
  select q.queue_no, w.first_place, w.last_place
    from (select q.queue_no, width_bucket(q.queue_no - 1, :span_queues::int[]) as low,
                 width_bucket(q.queue_no, :span_queues) as high
            from lane l
           cross join lateral (
                 select q.queue_no, q.namespace_no, q.capability_set_no from queue q
                  where q.lane_no = l.lane_no and :kind_nos::int[] is null
                 union all
                 select q.queue_no, q.namespace_no, q.capability_set_no from queue q
                  where q.lane_no = l.lane_no and q.kind_no = any(:kind_nos)) q
            join capability_set c using (capability_set_no)
           where l.lane_id = :lane_id and l.state in ('active', 'draining') and c.required <@ :capabilities::text[]
             and (:namespace_no::int is null or q.namespace_no = :namespace_no)) q
   cross join unnest(
         case when q.low < q.high then (:span_firsts::bigint[])[q.low + 1 : q.high] else '{0}' end,
         case when q.low < q.high then (:span_lasts::bigint[])[q.low + 1 : q.high] else '{9223372036854775807}' end)
         as w(first_place, last_place)
),
candidate as materialized (
  select s.queue_no, e.place, s.last_place, lead(e.place) over (order by e.place) as next_place
    from span s
   cross join lateral (
         select e.place from execution e
          where e.queue_no = s.queue_no and e.place between s.first_place and s.last_place
            and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
            and (e.granted_until is null or e.granted_until <= (select now from clock))
            and e.blocking_reason <> 'paused_by_flow_cancel'
          order by e.place limit 1) e
   order by e.place
)
select b.partition_key, b.execution_id,
       (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000)::bigint as walk_ms
  -- One row even when nothing is found, for walk_ms.
  from (values (true)) as one_row
  left join lateral (
       select e.partition_key, e.execution_id
         from candidate s
        cross join lateral (
              select e.partition_key, e.execution_id
                from execution e
               where e.queue_no = s.queue_no and e.place between s.place and s.last_place and (:is_any::boolean or e.place < s.next_place or s.next_place is null)
                 and (e.eligibility_state = 'eligible_now' or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked'))
                 and (e.granted_until is null or e.granted_until <= (select now from clock))
                 and e.blocking_reason <> 'paused_by_flow_cancel'
               order by e.place limit 1
                 for update skip locked) e
        limit 1) b on true;

-- name: list_eligible
-- The executions of a lane that wait for a worker and are granted to none, in the order of claims.
with clock as materialized (select ff_now() as now)
select e.partition_key, e.execution_id
  from lane l
  join queue q using (lane_no)
 cross join lateral (
       select e.partition_key, e.execution_id, e.place from execution e
        where e.queue_no = q.queue_no and e.eligibility_state = 'eligible_now'
          and (e.granted_until is null or e.granted_until <= (select now from clock))
        order by e.place limit :limit) e
 where l.lane_id = :lane_id and l.state in ('active', 'draining')
 order by e.place limit :limit;

-- name: insert_grant
-- Reserves an execution that the transaction holds for one worker; what an earlier grant left is overwritten.
with granted as (
  update execution set granted_until = :expires_at, last_mutation_at = :now
   where partition_key = :partition_key and execution_id = :execution_id
)
insert into claim_grant (partition_key, execution_id, grant_id, kind, worker_id, worker_instance_id, lane_no,
                         worker_capabilities, capability_hash, route_snapshot, admission_summary, issued_at, expires_at)
values (:partition_key, :execution_id, :grant_id, :kind, :worker_id, :worker_instance_id, :lane_no,
        :worker_capabilities, :capability_hash, :route_snapshot, :admission_summary, :now, :expires_at)
on conflict (partition_key, execution_id) do update
   set grant_id = excluded.grant_id, kind = excluded.kind, worker_id = excluded.worker_id,
       worker_instance_id = excluded.worker_instance_id, lane_no = excluded.lane_no,
       worker_capabilities = excluded.worker_capabilities, capability_hash = excluded.capability_hash,
       route_snapshot = excluded.route_snapshot, admission_summary = excluded.admission_summary,
       issued_at = excluded.issued_at, expires_at = excluded.expires_at;

-- name: set_capability_mismatch
-- Notes when a worker that lacks a required capability last asked for an execution that the transaction holds.
update execution set last_capability_mismatch_at = :now, last_mutation_at = :now
 where partition_key = :partition_key and execution_id = :execution_id;

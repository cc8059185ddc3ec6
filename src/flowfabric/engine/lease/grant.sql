-- name: list_eligible
-- The claimable executions of a lane without a live grant, in claim order.
with clock as materialized (select ff_now() as now)
select r.partition_key, r.execution_id
  from lane l
  join route o using (lane_no)
 cross join lateral (
       select r.partition_key, r.execution_id, r.place from ready r
        where r.route_no = o.route_no and (r.granted_until is null or r.granted_until <= (select now from clock))
          and (select e.eligibility_state = 'eligible_now' from execution e
                where e.partition_key = r.partition_key and e.execution_id = r.execution_id)
        order by r.place limit :limit) r
 where l.lane_id = :lane_id and l.state in ('active', 'draining')
 order by r.place limit :limit;

-- name: insert_grant
-- Reserves a locked execution for one worker; overwrites the row of an earlier grant. If a limit had blocked it, it no longer does.
with granted as (
  update execution e
     set granted_until = :expires_at, attached = attached | case when :slot_keys::int[] is null then 1 else 9 end, slot_keys = :slot_keys,
         eligibility_state = case when o.was_blocked then :to_eligibility else e.eligibility_state end,
         blocking_reason = case when o.was_blocked then :to_blocking else e.blocking_reason end,
         blocking_detail = case when not o.was_blocked then e.blocking_detail end,
         last_transition_at = case when o.was_blocked then :now else e.last_transition_at end,
         last_mutation_at = case when not o.was_blocked then :now end
    from (select x.partition_key, x.execution_id, x.eligibility_state in ('blocked_by_quota', 'blocked_by_budget') as was_blocked
            from execution x where x.partition_key = :partition_key and x.execution_id = :execution_id) o
   where e.partition_key = o.partition_key and e.execution_id = o.execution_id
  returning e.partition_key, e.execution_id, e.queue_no, e.place, (select q.route_no from queue q where q.queue_no = e.queue_no) as route_no, o.was_blocked
),
unlisted as (
  delete from listed i using granted g
   where g.was_blocked and i.partition_key = any(array[g.partition_key]) and i.execution_id = g.execution_id
),
reserved as (
  update ready r set granted_until = :expires_at
    from granted g
   where r.route_no = any(array[g.route_no]) and r.queue_no = any(array[g.queue_no]) and r.place = g.place
)
insert into claim_grant (partition_key, execution_id, grant_id, kind, worker_id, worker_instance_id, lane_no,
                         worker_capabilities, capability_hash, route_snapshot, admission_summary, has_slots, issued_at, expires_at)
values (:partition_key, :execution_id, :grant_id, :kind, :worker_id, :worker_instance_id, :lane_no,
        :worker_capabilities, :capability_hash, :route_snapshot, :admission_summary, :slot_keys is not null, :now, :expires_at)
on conflict (partition_key, execution_id) do update
   set grant_id = excluded.grant_id, kind = excluded.kind, worker_id = excluded.worker_id,
       worker_instance_id = excluded.worker_instance_id, lane_no = excluded.lane_no,
       worker_capabilities = excluded.worker_capabilities, capability_hash = excluded.capability_hash,
       route_snapshot = excluded.route_snapshot, admission_summary = excluded.admission_summary,
       has_slots = excluded.has_slots, issued_at = excluded.issued_at, expires_at = excluded.expires_at;

-- name: set_capability_mismatch
-- Records when a worker without a required capability last asked for a locked execution.
update execution set last_capability_mismatch_at = :now, last_mutation_at = :now
 where partition_key = :partition_key and execution_id = :execution_id;

-- name: take_grants
-- Deletes the grants of executions that the transaction has moved.
delete from claim_grant g
 using unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
 where g.partition_key = any(array[i.partition_key]) and g.execution_id = i.execution_id;

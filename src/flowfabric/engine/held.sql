-- name: read_held
-- What grants and named claims judge an execution by, once the transaction holds it.
-- A grant counts while its execution names the same expiry: whatever else moved the execution has made it void.
select e.partition_key, e.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state,
       e.terminal_outcome, e.attempt_state, e.queue_no, e.place, e.reclaim_count, e.lease_epoch, e.lease_expires_at,
       e.remaining_attempt_timeout_ms, e.granted_until, l.lane_no, l.lane_id, l.state as lane_state, s.required, i.policy,
       g.kind as grant_kind, g.worker_id as grant_worker_id, g.worker_instance_id as grant_worker_instance_id,
       g.grant_id, g.expires_at as grant_expires_at, k.kid as signing_kid, coalesce(k.installed_at, 0) as signing_since, c.now
  from execution e
 cross join (select ff_now() as now) c
 cross join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, e.partition_key, e.execution_id) i
  join queue q using (queue_no)
  join lane l on l.lane_no = e.lane_no
  join capability_set s using (capability_set_no)
  left join lateral (
       select g.* from claim_grant g
        where g.partition_key = e.partition_key and g.execution_id = e.execution_id limit 1) g on g.expires_at = e.granted_until
  left join signing_key k on k.is_current
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

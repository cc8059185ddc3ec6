-- name: lock_executions
-- Waits for rows in the order given and holds them until the transaction ends: where each stands, whose it is, and the
-- time before and after the wait; nothing but the times of what is absent.
with clock as materialized (select ff_now() as now)
select c.now as began, ff_now() as now, e.*
  from clock c
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
  left join lateral (
       select e.partition_key, e.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.terminal_outcome,
              e.lease_epoch, e.lease_id, e.attempt_id, e.attempt_count, e.lease_expires_at
         from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id
          for update) e on true
 order by i.nth;

-- name: lock_free_executions
-- The same without waiting: nothing but the times of what another session holds, too.
with clock as materialized (select ff_now() as now)
select c.now as began, ff_now() as now, e.*
  from clock c
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
  left join lateral (
       select e.partition_key, e.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.terminal_outcome,
              e.lease_epoch, e.lease_id, e.attempt_id, e.attempt_count, e.lease_expires_at
         from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id
          for update skip locked) e on true
 order by i.nth;

-- name: read_with_grant
-- What grants and named claims judge an execution by, once the transaction holds it.
-- A grant counts while its execution names the same expiry: whatever else moved the execution has made it void.
select e.partition_key, e.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state,
       e.terminal_outcome, e.attempt_state, e.queue_no, e.place, e.reclaim_count, e.lease_epoch, e.lease_id,
       e.lease_expires_at, e.attempt_id, e.attempt_count, e.remaining_attempt_timeout_ms, e.granted_until, l.lane_no, l.lane_id, l.state as lane_state, s.required, i.policy,
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

-- name: read_runs
-- What runs that the transaction holds are judged by when they suspend or make waitpoints, in the order given, with the
-- key that signs now, and what earlier suspends under the same idempotency keys came to while that is kept.
with clock as materialized (select ff_now() as now)
select c.now, i.partition_key, i.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.terminal_outcome,
       e.lease_epoch, e.lease_id,
       e.attempt_id, e.attempt_count, e.lease_expires_at, e.lease_expires_at - coalesce(e.lease_renewed_at, e.claimed_at) as lease_ttl_ms,
       e.namespace_no, e.lane_no, l.lane_id, w.worker_instance_id, p.policy,
       k.kid as signing_kid, coalesce(k.installed_at, 0) as signing_since,
       s.is_open is not null as has_open_suspension, o.outcome, o.attempt_index as outcome_attempt_index
  from clock c
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[], :idempotency_keys::text[])
       with ordinality as i(partition_key, execution_id, idempotency_key, nth)
 -- The limits keep what is given in the lead, whatever the planner expects of the tables.
 cross join lateral (
       select e.* from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
 cross join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, e.partition_key, e.execution_id) p
  join lane l on l.lane_no = e.lane_no
  left join worker_identity w on w.worker_no = e.worker_no
  left join signing_key k on k.is_current
  left join lateral (
       select true as is_open from suspension s
        where s.partition_key = i.partition_key and s.execution_id = i.execution_id and s.closed_at is null limit 1) s on true
  left join lateral (
       select o.outcome, o.attempt_index from suspend_key o
        where o.partition_key = i.partition_key and o.execution_id = i.execution_id
          and o.idempotency_key = i.idempotency_key and o.expires_at > c.now limit 1) o on true
 order by i.nth;

-- fragment: standing
-- The state and the lease of each given execution, from its row e and its claim r, and the time before and after the wait
-- for the row.
with clock as materialized (select ff_now() as now)
select c.now as began, ff_now() as now, e.partition_key, e.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state,
       e.terminal_outcome, e.lease_epoch, e.lease_id, e.attempt_id, e.attempt_count,
       greatest(e.lease_expires_at, r.expires_at) as lease_expires_at
  from clock c
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)

-- fragment: row
-- The row of an execution.
select e.partition_key, e.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.terminal_outcome,
       e.lease_epoch, e.lease_id, coalesce(e.attempt_id, e.lease_id) as attempt_id, e.attempt_count, e.claim_no, e.lease_expires_at
  from execution e
 where e.partition_key = i.partition_key and e.execution_id = i.execution_id

-- fragment: claim
-- The expiry that the execution's claim stores.
left join lateral (
     select r.expires_at from claim r
      where r.partition_key = e.partition_key and r.claim_no = e.claim_no limit 1) r on true

-- name: lock_executions
-- Locks rows in the order given until the transaction ends, waiting for each. An absent row has only the times.
-- include: standing
  left join lateral (
       -- include: row
          for update) e on true
  -- include: claim
 order by i.nth;

-- name: lock_free_executions
-- The same without waiting: a row locked by another session has only the times.
-- include: standing
  left join lateral (
       -- include: row
          for update skip locked) e on true
  -- include: claim
 order by i.nth;

-- name: read_with_grant
-- What grants and claims by id need of an execution that the transaction has locked.
-- A grant is valid while granted_until of its execution is the grant's expiry: any other move of the execution voids it.
select e.partition_key, e.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state,
       e.terminal_outcome, e.attempt_state, e.blocking_reason, e.queue_no, e.place, e.reclaim_count, e.lease_epoch, e.lease_id,
       coalesce(e.attempt_id, e.lease_id) as attempt_id, e.attempt_count, greatest(e.lease_expires_at, r.expires_at) as lease_expires_at,
       e.remaining_attempt_timeout_ms, e.granted_until, l.lane_no, l.lane_id, l.state as lane_state, ff_required(s.required) as required, q.quota_key_nos,
       case when e.ownership_state = 'leased' or e.granted_until is not null then e.slot_keys end as slot_keys,
       e.policy, g.kind as grant_kind, g.worker_id as grant_worker_id, g.worker_instance_id as grant_worker_instance_id,
       g.grant_id, g.expires_at as grant_expires_at, k.kid as signing_kid, coalesce(k.installed_at, 0) as signing_since, c.now
  from execution e
 cross join (select ff_now() as now) c
  join queue q using (queue_no)
  join route o using (route_no)
  join lane l on l.lane_no = e.lane_no
  join capability_set s using (capability_set_no)
  left join lateral (
       select r.expires_at from claim r where r.partition_key = e.partition_key and r.claim_no = e.claim_no limit 1) r on true
  left join lateral (
       select g.* from claim_grant g
        where g.partition_key = e.partition_key and g.execution_id = e.execution_id limit 1) g on g.expires_at = e.granted_until
  left join signing_key k on k.is_current
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_runs
-- What suspends and new waitpoints need of runs that the transaction has locked, in the order given: with the current
-- signing key, and the stored outcomes of earlier suspends under the same idempotency keys.
with clock as materialized (select ff_now() as now)
select c.now, i.partition_key, i.execution_id, e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.terminal_outcome,
       e.lease_epoch, case when e.ownership_state <> 'unowned' then e.lease_id end as lease_id,
       coalesce(e.attempt_id, e.lease_id) as attempt_id,
       e.attempt_count, greatest(e.lease_expires_at, r.expires_at) as lease_expires_at,
       case when r.renewed_at is null then e.lease_expires_at - e.claimed_at else r.expires_at - r.renewed_at end as lease_ttl_ms,
       e.namespace_no, e.lane_no, l.lane_id, w.worker_instance_id, e.policy,
       k.kid as signing_kid, coalesce(k.installed_at, 0) as signing_since,
       e.attached & 2 <> 0 as has_open_suspension, o.outcome, o.attempt_index as outcome_attempt_index
  from clock c
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[], :idempotency_keys::text[])
       with ordinality as i(partition_key, execution_id, idempotency_key, nth)
 -- `limit 1` makes the planner start from the given items, whatever its statistics say.
 cross join lateral (
       select e.lifecycle_phase, e.ownership_state, e.eligibility_state, e.terminal_outcome, e.lease_epoch, e.lease_id, e.attempt_id,
              e.attempt_count, e.lease_expires_at, e.claimed_at, e.claim_no, e.namespace_no, e.lane_no, e.worker_no, e.policy,
              e.attached
         from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
  join lane l on l.lane_no = e.lane_no
  left join lateral (
       select r.expires_at, r.renewed_at from claim r
        where r.partition_key = i.partition_key and r.claim_no = e.claim_no limit 1) r on true
  left join worker_identity w on w.worker_no = e.worker_no
  left join signing_key k on k.is_current
  left join lateral (
       select o.outcome, o.attempt_index, o.expires_at from idempotency_key o
        where o.partition_key = i.partition_key and o.operation = 'suspend' and o.scope = i.execution_id
          and o.key = i.idempotency_key limit 1) o on o.expires_at > c.now
 order by i.nth;

-- name: renew_leases
-- Extends the leases whose fence still holds; a row held elsewhere, or absent, has the verdict null.
with clock as materialized (select ff_now() as now),
held as materialized (
  select i.nth, i.ttl_ms, e.*, c.now,
         case
           when e.execution_id is null then null
           when e.lease_epoch <> i.lease_epoch then 'stale_fence'
           when e.lifecycle_phase <> 'active' then 'execution_not_active'
           when e.ownership_state = 'lease_revoked' then 'lease_revoked'
           when e.lease_expires_at <= c.now or e.ownership_state <> 'leased' then 'lease_expired'
           when e.lease_id <> i.lease_id or e.attempt_id <> i.attempt_id then 'stale_fence'
           else 'ok' end as verdict
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :lease_epochs::bigint[], :lease_ids::uuid[],
                :attempt_ids::uuid[], :ttls_ms::bigint[])
         with ordinality as i(partition_key, execution_id, lease_epoch, lease_id, attempt_id, ttl_ms, nth)
   cross join clock c
    left join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lifecycle_phase, e.ownership_state, e.terminal_outcome,
                e.lease_epoch, e.lease_id, e.attempt_id, e.attempt_count, e.worker_no, e.lease_expires_at, e.flow_id, e.instance_tag
           from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id
            for update skip locked) e on true
),
extended as (
  update execution e
     set lease_expires_at = h.now + h.ttl_ms, lease_renewed_at = h.now, last_mutation_at = h.now
    from held h
   where e.partition_key = h.partition_key and e.execution_id = h.execution_id and h.verdict = 'ok'
),
events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, flow_id, instance_tag)
  select now, execution_id, partition_key, 2, namespace_no, attempt_count - 1, worker_no, lease_epoch, lease_id,
         nullif(attempt_id, lease_id), flow_id, instance_tag
    from held where verdict = 'ok' and :writes_events::boolean
)
select nth, verdict, now + ttl_ms as expires_at,
       case when verdict = 'execution_not_active' then
         jsonb_build_object('terminal_outcome', terminal_outcome, 'lifecycle_phase', lifecycle_phase, 'lease_epoch', lease_epoch, 'attempt_id', attempt_id) end as found
  from held;

-- name: set_progress
-- Overwrites the progress of a run whose fence holds; no row when the execution is absent.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.partition_key, e.execution_id, e.lease_epoch, e.terminal_outcome, e.lifecycle_phase, e.attempt_id, c.now,
         case
           when e.lease_epoch <> :lease_epoch then 'stale_fence'
           when e.lifecycle_phase <> 'active' then 'execution_not_active'
           when e.ownership_state = 'lease_revoked' then 'lease_revoked'
           when e.lease_expires_at <= c.now or e.ownership_state <> 'leased' then 'lease_expired'
           when e.lease_id <> :lease_id or e.attempt_id <> :attempt_id then 'stale_fence'
           else 'ok' end as verdict,
         -- What an earlier attempt said of itself is not kept.
         e.progress_updated_at >= coalesce((
           select a.started_at from attempt a
            where e.attempt_stored and a.partition_key = e.partition_key and a.execution_id = e.execution_id
              and a.attempt_index = e.attempt_count - 1), e.claimed_at) as has_reported
    from execution e cross join clock c
   where e.partition_key = :partition_key and e.execution_id = :execution_id
     for update of e
),
written as (
  update execution e
     set progress_pct = coalesce(:percent::smallint, case when h.has_reported then e.progress_pct end),
         progress_message = coalesce(:message::text, case when h.has_reported then e.progress_message end),
         progress_updated_at = h.now, last_mutation_at = h.now
    from held h
   where e.partition_key = h.partition_key and e.execution_id = h.execution_id and h.verdict = 'ok'
)
select verdict,
       case when verdict = 'execution_not_active' then
         jsonb_build_object('terminal_outcome', terminal_outcome, 'lifecycle_phase', lifecycle_phase, 'lease_epoch', lease_epoch, 'attempt_id', attempt_id) end as found
  from held;

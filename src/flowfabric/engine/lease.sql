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
told as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, flow_id, instance_tag)
  select now, execution_id, partition_key, 2, namespace_no, attempt_count - 1, worker_no, lease_epoch, lease_id,
         nullif(attempt_id, lease_id), flow_id, instance_tag
    from held where verdict = 'ok' and :tell::boolean
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

-- name: mark_lapsed_leases
-- Marks lapsed leases so that the next claim takes them: the named executions, or the oldest due after :since when none
-- is named.
with clock as materialized (select ff_now() as now),
due as materialized (
  select e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.lane_no, e.lease_epoch, e.lease_id,
         e.worker_no, e.attempt_id, e.attempt_count, e.flow_id, e.instance_tag, c.now
    from clock c
   cross join lateral (
         select e.* from execution e
          where :execution_ids::uuid[] is null
            and e.due_at > :since and e.due_at <= c.now and e.ownership_state = 'leased' and e.lease_expires_at <= c.now
          order by e.due_at limit :limit
            for update skip locked) e
  union all
  select e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.lane_no, e.lease_epoch, e.lease_id,
         e.worker_no, e.attempt_id, e.attempt_count, e.flow_id, e.instance_tag, c.now
    from clock c
   cross join lateral (
         select e.* from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
           join execution e using (partition_key, execution_id)
          where e.ownership_state = 'leased' and e.lease_expires_at <= c.now
            for update of e skip locked) e
),
marked as (
  update execution e
     set ownership_state = :to_ownership, blocking_reason = :to_blocking, attempt_state = :to_attempt,
         blocking_detail = 'lease expired, awaiting reclaim', lease_expired_at = d.now, last_mutation_at = d.now
    from due d
   where e.partition_key = d.partition_key and e.execution_id = d.execution_id
),
told as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, flow_id, instance_tag)
  select now, execution_id, partition_key, 4, namespace_no, attempt_count - 1, worker_no, lease_epoch, lease_id,
         nullif(attempt_id, lease_id), flow_id, instance_tag
    from due
)
select l.lane_id, d.queue_no, d.place, d.partition_key, d.execution_id, d.lease_epoch
  from due d join lane l using (lane_no);

-- name: promote_delayed
-- Makes due delayed executions claimable: the named ones, or the oldest after :since when none is named; their attempt
-- state says how they will be claimed. A named one that was put aside under the lease of :lease_epoch need not be due.
with clock as materialized (select ff_now() as now),
due as materialized (
  select e.partition_key, e.execution_id
    from clock c
   cross join lateral (
         select e.partition_key, e.execution_id
           from execution e
          where :execution_ids::uuid[] is null
            and e.due_at > :since and e.due_at <= c.now
            and e.eligibility_state = 'not_eligible_until_time' and e.delay_until <= c.now
          order by e.due_at limit :limit
            for update skip locked) e
  union all
  select e.partition_key, e.execution_id
    from clock c
   cross join lateral (
         select e.partition_key, e.execution_id
           from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
           join execution e using (partition_key, execution_id)
          where e.eligibility_state = 'not_eligible_until_time'
            and (e.delay_until <= c.now or e.lease_epoch = :lease_epoch::bigint)
            for update of e skip locked) e
),
promoted as (
  update execution e
     set eligibility_state = :to_eligibility, blocking_reason = :to_blocking, blocking_detail = null, delay_until = null,
         last_transition_at = c.now, last_mutation_at = c.now
    from due d cross join clock c
   where e.partition_key = d.partition_key and e.execution_id = d.execution_id
  returning e.lane_no, e.queue_no, e.place, e.public_state
)
select l.lane_id, p.queue_no, p.place, p.public_state
  from promoted p join lane l using (lane_no);

-- name: list_expired_leases
-- Leases of active work that end by :as_of, marked or not, by the time of their end, then id.
with clock as materialized (select coalesce(:as_of::bigint, ff_now()) as as_of),
lapsed as (
  select e.* from clock c
   cross join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lease_id, e.lease_epoch, e.worker_no, e.lease_expires_at, e.attempt_count
           from execution e
          where e.due_at <= c.as_of and e.ownership_state = 'leased' and e.lease_expires_at <= c.as_of) e
  union all
  select e.* from clock c
   cross join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lease_id, e.lease_epoch, e.worker_no, e.lease_expires_at, e.attempt_count
           from execution e
          where e.ownership_state = 'lease_expired_reclaimable' and e.lease_expires_at <= c.as_of) e
),
found as (
  select ('{fp:' || partition_key || '}:' || execution_id) collate "C" as id, lease_id, lease_epoch, worker_no,
         lease_expires_at, attempt_count - 1 as attempt_index
    from lapsed
   where :namespace::text is null or namespace_no = (select namespace_no from namespace where namespace = :namespace)
)
select f.id, f.lease_id, f.lease_epoch, w.worker_instance_id, f.lease_expires_at, f.attempt_index
  from (select * from found
         where :after_expires_at::bigint is null or (lease_expires_at, id) > (:after_expires_at, :after_id::text collate "C")
         order by lease_expires_at, id limit :limit) f
  join worker_identity w using (worker_no)
 order by f.lease_expires_at, f.id;

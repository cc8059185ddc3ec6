-- name: renew_leases
-- Extends the leases whose fence still matches. The verdict is null for a missing row, for a row that another transaction is
-- changing, and, unless the caller waits, for a row whose claim another transaction has locked.
-- The leases of one claim expire together: if all that remain in it are renewed, only its row is written. Otherwise the renewed
-- leases move to a new claim; the leases of many small claims are merged into one the same way.
with clock as materialized (select ff_now() as now),
seen as materialized (
  select i.nth, i.lease_epoch as given_epoch, i.lease_id as given_lease_id, i.attempt_id as given_attempt_id, i.ttl_ms, e.*
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :lease_epochs::bigint[], :lease_ids::uuid[],
                :attempt_ids::uuid[], :ttls_ms::bigint[])
         with ordinality as i(partition_key, execution_id, lease_epoch, lease_id, attempt_id, ttl_ms, nth)
    left join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lifecycle_phase, e.ownership_state, e.terminal_outcome,
                e.lease_epoch, e.lease_id, coalesce(e.attempt_id, e.lease_id) as attempt_id, e.attempt_id as own_attempt_id,
                e.attempt_count, e.worker_no, e.claim_no, e.lease_expires_at, e.flow_id, e.instance_tag,
                e.has_tags
           from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e on true
),
-- Marking leases as expired and renewing them both lock their claim. Each claim is locked once, in ascending order, so that two
-- renewals cannot deadlock; a claim locked elsewhere is skipped, unless the caller waits.
held as materialized (
  select s.*, coalesce(r.tid, w.tid) as tid, coalesce(r.expires_at, w.expires_at) as expires_at
    from (select s.*, row_number() over (partition by partition_key, claim_no, is_current) as nth_of_claim
            from (select *, lease_epoch = given_epoch and ownership_state = 'leased' as is_current from seen) s
           order by partition_key, claim_no) s
    left join lateral (
         select r.ctid as tid, r.expires_at from claim r
          where not :waits::boolean and s.is_current and s.nth_of_claim = 1
            and r.partition_key = s.partition_key and r.claim_no = s.claim_no
            for update skip locked) r on true
    left join lateral (
         select w.ctid as tid, w.expires_at from claim w
          where :waits and s.is_current and s.nth_of_claim = 1
            and w.partition_key = s.partition_key and w.claim_no = s.claim_no
            for update) w on true
),
judged as materialized (
  select s.*, c.now,
         case
           when s.execution_id is null then null
           when s.lease_epoch <> s.given_epoch then 'stale_fence'
           when s.lifecycle_phase <> 'active' then 'execution_not_active'
           when s.ownership_state = 'lease_revoked' then 'lease_revoked'
           when s.ownership_state <> 'leased' then 'lease_expired'
           when s.claim_tid is null and not :waits then null
           -- Compared with the time after the lock: the lease may have expired while this statement waited for it.
           when greatest(s.lease_expires_at, s.claim_expires_at) <= ff_now() then 'lease_expired'
           when s.lease_id <> s.given_lease_id or s.attempt_id <> s.given_attempt_id then 'stale_fence'
           else 'ok' end as verdict
    from (select h.*, max(tid) over of_claim as claim_tid, max(expires_at) over of_claim as claim_expires_at
            from held h window of_claim as (partition by partition_key, claim_no, is_current)) s
   cross join clock c
),
-- The claims that are renewed as a whole: no other execution is leased under them, and no execution row has a later expiry.
whole as materialized (
  select g.claim_tid as tid, g.given_ids, g.now, g.ttl_ms
    from (select partition_key, claim_no, claim_tid, array_agg(execution_id) as given_ids, min(now) as now, min(ttl_ms) as ttl_ms,
                 max(lease_expires_at) as row_expires_at, count(*) over () as claims, min(ttl_ms) = max(ttl_ms) as is_alike
            from judged where verdict = 'ok' group by partition_key, claim_no, claim_tid) g
   cross join lateral (select r.execution_ids from claim r where r.ctid = g.claim_tid offset 0) r
   where g.is_alike and g.row_expires_at <= g.now + g.ttl_ms and g.claims <= greatest((select count(*) from seen) / 16, 1)
     and not exists (select unnest(g.given_ids) except select unnest(r.execution_ids))
     and not exists (
         select from (select unnest(r.execution_ids) as execution_id except select unnest(g.given_ids)) o
          cross join lateral (
                select from execution e
                 where e.partition_key = g.partition_key and e.execution_id = o.execution_id and e.claim_no = g.claim_no
                   and e.ownership_state = 'leased' limit 1) e)
),
extended as (
  update claim r
     set expires_at = w.now + w.ttl_ms, renewed_at = w.now,
         execution_ids = case when cardinality(r.execution_ids) = cardinality(w.given_ids) then r.execution_ids else w.given_ids end
    from whole w
   where r.ctid = w.tid
),
regrouped as materialized (
  select j.nth, j.partition_key, j.worker_no, j.ttl_ms, j.now, e.tid
    from judged j
   cross join lateral (
         select e.ctid as tid from execution e
          where e.partition_key = j.partition_key and e.execution_id = j.execution_id and e.claim_no = j.claim_no
            and e.lease_epoch = j.lease_epoch and e.ownership_state = 'leased'
            for update skip locked) e
   where j.verdict = 'ok' and (j.claim_tid is null or j.claim_tid not in (select tid from whole))
),
numbered as materialized (
  select partition_key, worker_no, ttl_ms, nextval('claim_sequence') as claim_no from regrouped group by partition_key, worker_no, ttl_ms
),
-- An execution that changed since the statement began is not found by its ctid and is not renewed.
moved as (
  update execution e set claim_no = n.claim_no, lease_expires_at = g.now + g.ttl_ms
    from regrouped g join numbered n using (partition_key, worker_no, ttl_ms)
   where e.ctid = g.tid
  returning g.nth, e.partition_key, e.claim_no, e.worker_no, e.lease_expires_at, g.now, e.execution_id
),
made as (
  insert into claim (partition_key, claim_no, worker_no, expires_at, renewed_at, execution_ids)
  select partition_key, claim_no, worker_no, lease_expires_at, now, array_agg(execution_id)
    from moved group by partition_key, claim_no, worker_no, lease_expires_at, now
),
renewed as materialized (
  select j.*,
         case when :writes_events::boolean and has_tags then (
           select jsonb_object_agg(t.key, t.value) from execution_tag t
            where t.partition_key = j.partition_key and t.execution_id = j.execution_id) end as tags
    from judged j
   where verdict = 'ok' and (claim_tid in (select tid from whole) or nth in (select nth from moved))
),
-- Ordinary renewals share one event per group. A renewal of a whole claim locks the claim and not its executions, so an execution
-- may change between this statement and its commit: feeds deliver its event in any order with those of that change.
events as (
  insert into event (at, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, execution_ids, lease_ids,
                     execution_id, lease_id, attempt_id, flow_id, instance_tag, tags)
  select min(now), partition_key, 'renewed'::event_kind, namespace_no, attempt_count - 1, worker_no, lease_epoch,
         array_agg(execution_id), array_agg(lease_id), null, null, null, null, instance_tag, tags
    from renewed where :writes_events and own_attempt_id is null and flow_id is null
   group by partition_key, namespace_no, attempt_count, worker_no, lease_epoch, instance_tag, tags
  union all
  select now, partition_key, 'renewed', namespace_no, attempt_count - 1, worker_no, lease_epoch, null, null, execution_id,
         lease_id, nullif(own_attempt_id, lease_id), flow_id, instance_tag, tags
    from renewed where :writes_events and (own_attempt_id is not null or flow_id is not null)
)
select nth,
       case when verdict <> 'ok' or nth in (select nth from renewed) then verdict end as verdict,
       now + ttl_ms as expires_at,
       case when verdict = 'execution_not_active' then
         jsonb_build_object('terminal_outcome', terminal_outcome, 'lifecycle_phase', lifecycle_phase, 'lease_epoch', lease_epoch,
                            'attempt_id', attempt_id) end as found
  from judged;

-- name: set_progress
-- Stores the progress of a run whose fence matches; returns no row if the execution does not exist.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.partition_key, e.execution_id, e.lease_epoch, e.terminal_outcome, e.lifecycle_phase,
         coalesce(e.attempt_id, e.lease_id) as attempt_id, c.now,
         case
           when e.lease_epoch <> :lease_epoch then 'stale_fence'
           when e.lifecycle_phase <> 'active' then 'execution_not_active'
           when e.ownership_state = 'lease_revoked' then 'lease_revoked'
           when e.ownership_state <> 'leased' or greatest(e.lease_expires_at, (
                select r.expires_at from claim r
                 where r.partition_key = e.partition_key and r.claim_no = e.claim_no)) <= c.now then 'lease_expired'
           when e.lease_id <> :lease_id or coalesce(e.attempt_id, e.lease_id) <> :attempt_id then 'stale_fence'
           else 'ok' end as verdict,
         -- The progress of an earlier attempt is not kept.
         e.progress_updated_at >= coalesce((
           select a.started_at from attempt a
            where a.partition_key = e.partition_key and a.execution_id = e.execution_id and a.attempt_index = e.attempt_count - 1),
           e.claimed_at) as has_reported
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
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id and h.verdict = 'ok'
)
select verdict,
       case when verdict = 'execution_not_active' then
         jsonb_build_object('terminal_outcome', terminal_outcome, 'lifecycle_phase', lifecycle_phase, 'lease_epoch', lease_epoch,
                            'attempt_id', attempt_id) end as found
  from held;

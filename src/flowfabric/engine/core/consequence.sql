-- name: end_leases
-- Ends leases, and executions without a lease, each item by its own move (engine/core/transition.py). A move may end the
-- execution, or only park its attempt: the attempt gives up its lease, and a later claim continues it. Returns one row (nth 0)
-- with the number of executions that ended and had no attachment, one row for each other item, and one row (nth null) for each entry
-- that the cascade has to settle. The verdict is decided on the
-- locked row; it is null if the row is absent or locked by another session. With :is_thorough the statement also ends executions
-- that have attachments, which the caller then handles (otherwise their verdict is 'attached'), and waits for a renewal in progress.
-- With :waits_briefly this and later statements of the transaction wait at most 50 ms for a row.
-- Rows are joined by key only: with the fence in the join the planner hashes every leased row. Other tables are joined by
-- `any` of a one-element array: with an equality, a plan made while the table is empty scans a whole index.
with clock as materialized (
  select ff_now() as now,
         set_config('lock_timeout', case when :waits_briefly::boolean then '50ms' else current_setting('lock_timeout') end, true)
),
-- An array with one element holds for all items; an empty array means null for all items.
given as (
  select coalesce(partition_key, (:partition_keys)[1]) as partition_key, execution_id,
         coalesce(move, (:moves)[1]) as move,
         case cardinality(:lease_epochs) when 1 then (:lease_epochs)[1] else lease_epoch end as lease_epoch,
         case cardinality(:lease_ids) when 1 then (:lease_ids)[1] else lease_id end as lease_id,
         -- An attempt has the id of its first lease. If all items are under first leases, :attempt_ids is empty.
         case cardinality(:attempt_ids) when 0 then case cardinality(:lease_ids) when 1 then (:lease_ids)[1] else lease_id end
           when 1 then (:attempt_ids)[1] else attempt_id end as attempt_id,
         case cardinality(:payloads) when 1 then (:payloads)[1] else payload end as payload,
         case cardinality(:encodings) when 1 then (:encodings)[1] else encoding end as encoding,
         case cardinality(:reasons) when 1 then (:reasons)[1] else reason end as reason,
         case cardinality(:categories) when 1 then (:categories)[1] else category end as category,
         case cardinality(:delays_ms) when 1 then (:delays_ms)[1] else delay_ms end as delay_ms,
         case cardinality(:delays_until) when 1 then (:delays_until)[1] else delay_until end as delay_until,
         case cardinality(:sources) when 1 then (:sources)[1] else source end as source,
         case cardinality(:blockings) when 1 then (:blockings)[1] else blocking end as given_blocking,
         case cardinality(:details) when 1 then (:details)[1] else detail end as detail,
         case cardinality(:suspension_ids) when 1 then (:suspension_ids)[1] else suspension_id end as suspension_id,
         case cardinality(:timeouts_at) when 1 then (:timeouts_at)[1] else timeout_at end as timeout_at,
         case cardinality(:policies) when 1 then (:policies)[1] else policy end as next_policy,
         case cardinality(:error_types) when 1 then (:error_types)[1] else error_type end as error_type,
         case cardinality(:tracebacks) when 1 then (:tracebacks)[1] else traceback end as traceback,
         nth
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :moves::text[], :lease_epochs::bigint[], :lease_ids::uuid[],
                :attempt_ids::uuid[], :payloads::bytea[], :encodings::text[], :reasons::text[], :categories::text[],
                :delays_ms::bigint[], :delays_until::bigint[], :sources::text[], :blockings::blocking_reason[], :details::text[],
                :suspension_ids::uuid[], :timeouts_at::bigint[], :policies::text[], :error_types::text[], :tracebacks::text[])
         with ordinality
         as i(partition_key, execution_id, move, lease_epoch, lease_id, attempt_id, payload, encoding, reason, category,
              delay_ms, delay_until, source, blocking, detail, suspension_id, timeout_at, policy, error_type, traceback, nth)
),
item as materialized (
  select i.*, m.to_phase, m.to_ownership, m.to_eligibility, m.to_blocking, m.to_outcome, m.to_attempt, m.attempt_lifecycle,
         m.release_reason, m.completion
    from given i
    join unnest(:move_names::text[], :to_phases::lifecycle_phase[], :to_ownerships::ownership_state[],
                :to_eligibilities::eligibility_state[], :to_blockings::blocking_reason[], :to_outcomes::terminal_outcome[],
                :to_attempts::attempt_state[], :attempt_lifecycles::attempt_lifecycle[], :release_reasons::text[],
                :completions::smallint[])
         as m(move, to_phase, to_ownership, to_eligibility, to_blocking, to_outcome, to_attempt, attempt_lifecycle,
              release_reason, completion) using (move)
),
held as materialized (
  select i.nth, i.move, i.payload, i.encoding, i.reason, i.category, i.source, i.detail, i.suspension_id, i.next_policy,
         i.error_type, i.traceback,
         -- A time in the past is stored as the current time, so that a sweep that starts at its watermark finds the timer.
         case when i.timeout_at is not null then greatest(i.timeout_at, c.now) end as timeout_at,
         coalesce(i.delay_until, c.now + i.delay_ms) as to_delay_until,
         i.to_phase = 'terminal' as ends, i.to_phase = 'suspended' as suspends, i.attempt_lifecycle = 'suspended' as parks,
         i.to_attempt = 'pending_retry_attempt' as retries, i.to_ownership <> 'unowned' as loses_lease, i.to_ownership = 'lease_revoked' as is_revoked,
         i.to_phase, i.to_ownership, i.to_eligibility, coalesce(i.given_blocking, i.to_blocking) as to_blocking,
         i.to_outcome, i.to_attempt, i.attempt_lifecycle, i.release_reason, i.completion, e.*, c.now,
         coalesce(e.attempt_id, e.lease_id) as own_attempt_id, greatest(e.lease_expires_at, r.expires_at, t.expires_at) as expires_at,
         t.renewed_at,
         e.attempt_state in ('running_attempt', 'attempt_interrupted') as attempt_lives,
         e.eligibility_state in ('eligible_now', 'blocked_by_budget', 'blocked_by_quota')
           or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked') as was_ready,
         i.to_eligibility = 'eligible_now' or i.to_ownership <> 'unowned' as becomes_ready,
         case
           when e.execution_id is null then null
           -- The row changed after the statement began, so the tags that the statement reads may be old.
           when e.has_tags and e.tid <> (
             select x.ctid from execution x
              where x.partition_key = e.partition_key and x.execution_id = e.execution_id) then null
           when i.to_ownership = 'lease_expired_reclaimable' then
             case when e.ownership_state = 'leased' and greatest(e.lease_expires_at, r.expires_at, t.expires_at) <= c.now
               then 'ok' else 'not_expired' end
           when i.lease_epoch is null then
             case when e.lifecycle_phase = 'terminal' then 'execution_not_active' else 'ok' end
           when e.lease_epoch <> i.lease_epoch then 'stale_fence'
           when e.lifecycle_phase <> 'active' then 'execution_not_active'
           when e.ownership_state = 'lease_revoked' then 'lease_revoked'
           when e.ownership_state <> 'leased' or greatest(e.lease_expires_at, r.expires_at, t.expires_at) <= c.now then 'lease_expired'
           when e.lease_id <> i.lease_id or coalesce(e.attempt_id, e.lease_id) <> i.attempt_id then 'stale_fence'
           else 'ok' end as fence_verdict
    from item i
   cross join clock c
    left join lateral (
         select e.ctid as tid, e.has_tags, e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.attached, e.lifecycle_phase,
                e.ownership_state, e.eligibility_state, e.terminal_outcome, e.attempt_state, e.public_state, e.lease_epoch,
                e.lease_id, e.attempt_id, e.attempt_type, e.attempt_count, e.worker_no, e.claim_no, e.claimed_at,
                e.lease_expires_at, e.retention_ms, e.delay_until, e.last_transition_at, e.attempt_timeout_at,
                e.suspension_timeout_at, e.deadline_at, e.granted_until, e.flow_id, e.instance_tag,
                -- The previous version leaves the slots of leases that it ends for the recount.
                case when e.ownership_state = 'leased' or e.granted_until is not null then e.slot_keys end as slot_keys
           from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id
            for update skip locked) e on true
    -- Renewals are stored in the claim. It is read only if the lease has expired according to the execution's row, or is revoked:
    -- without a lock, or if thorough with one, which waits for a renewal in progress.
    left join lateral (
         select r.expires_at from claim r
          where not :is_thorough::boolean and e.lease_expires_at <= c.now and r.partition_key = e.partition_key and r.claim_no = e.claim_no
         limit 1) r on true
    left join lateral (
         select t.expires_at, t.renewed_at from claim t
          where :is_thorough and (e.lease_expires_at <= c.now or i.to_ownership = 'lease_revoked') and t.partition_key = e.partition_key and t.claim_no = e.claim_no
            for share) t on true
),
judged as materialized (
  select h.*, loses_lease or to_eligibility = 'blocked_by_dependencies' or (to_eligibility = 'eligible_now' and parks)
              or (ends and to_outcome <> 'success') as is_listed,
         case when fence_verdict = 'ok' and attached & ~8 <> 0 and not :is_thorough then 'attached' else fence_verdict end as verdict
    from held h
),
moved as (
  update execution e
     set lifecycle_phase = h.to_phase, ownership_state = h.to_ownership, eligibility_state = h.to_eligibility,
         blocking_reason = h.to_blocking, terminal_outcome = h.to_outcome,
         attempt_state = case when h.ends and h.attempt_count = 0 and h.to_attempt <> 'none' then e.attempt_state else h.to_attempt end,
         -- A suspend raises the epoch, so that a late call under the released lease is refused.
         lease_epoch = e.lease_epoch + h.suspends::int,
         -- Copied from the claim, which is deleted once its leases are marked as expired.
         lease_expires_at = case when h.loses_lease then h.expires_at else e.lease_expires_at end,
         lease_renewed_at = case when h.loses_lease then h.renewed_at end,
         lease_id = case when h.ends or h.loses_lease then e.lease_id end,
         attempt_id = case when h.parks then h.own_attempt_id when h.ends or h.loses_lease then e.attempt_id end,
         -- A set of bits: 1 is a grant, 2 an open suspension, 4 a stream, which is of one attempt, 8 a slot and 16 a reservation, which
         -- are of one lease.
         attached = case when h.ends then 0 else (e.attached & case when h.retries then ~29 else ~25 end) | case when h.suspends then 2 else 0 end end,
         slot_keys = null,
         retry_count = e.retry_count + h.retries::int,
         last_transition_at = case when h.loses_lease then e.last_transition_at else h.now end,
         last_mutation_at = case when h.loses_lease then h.now end,
         result_payload = case when octet_length(h.payload) <= :inline_payload_bytes then h.payload end, result_encoding = h.encoding,
         failure_reason = case
           when h.parks or h.loses_lease then e.failure_reason
           when h.to_outcome in ('success', 'cancelled') and h.move <> 'suspension_cancelled' then null
           else h.reason end,
         failure_category = case when h.parks or h.loses_lease then e.failure_category else h.category end,
         cancellation_reason = case h.to_outcome when 'cancelled' then h.reason end,
         cancelled_by = case h.to_outcome when 'cancelled' then h.source end,
         granted_until = null,
         delay_until = case when h.to_eligibility = 'not_eligible_until_time' then h.to_delay_until end,
         attempt_timeout_at = case when h.loses_lease then e.attempt_timeout_at end,
         -- The time that a parked attempt has left; if its handler did not start under this lease, none was used. At least 1 ms:
         -- null would mean no timeout.
         remaining_attempt_timeout_ms = case when h.parks and h.attempt_timeout_at is not null
           then greatest(h.attempt_timeout_at - case h.move when 'not_started' then h.claimed_at else h.now end, 1) end,
         suspension_timeout_at = case when h.suspends then h.timeout_at end,
         suspension_id = case when h.suspends then h.suspension_id else e.suspension_id end,
         lease_expired_at = case when h.loses_lease and not h.is_revoked then h.now end,
         lease_revoked_at = case when h.is_revoked then h.now end, lease_revoke_reason = case when h.is_revoked then h.reason end,
         blocking_detail = case
           when h.is_revoked then 'lease revoked: ' || h.reason
           when h.loses_lease then 'lease expired, awaiting reclaim'
           when h.to_eligibility = 'blocked_by_dependencies' then h.detail
           when h.to_eligibility = 'eligible_now' then null
           when h.retries then
             'retry backoff until ' || h.to_delay_until || ' (attempt ' || (h.attempt_count - 1) || ' failed: ' || h.reason || ')'
           when h.suspends then h.detail
           when h.parks then 'delayed until ' || h.to_delay_until end
    from judged h
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id and h.verdict = 'ok'
),
-- Every end of a lease returns its slots, and the end of an execution those of a grant.
returned_slots as (
  insert into slot_return as s (quota_key_no, shard, returned)
  select k.quota_key_no, :slot_shard::smallint, count(*)
    from judged h cross join lateral unnest(h.slot_keys) as k(quota_key_no)
   where h.verdict = 'ok' and h.slot_keys is not null
   group by k.quota_key_no
   order by k.quota_key_no
  on conflict (quota_key_no, shard) do update set returned = s.returned + excluded.returned
),
inserted_results as (
  insert into execution_result (partition_key, execution_id, result_payload)
  select partition_key, execution_id, payload from judged
   where :has_large_results::boolean and verdict = 'ok' and octet_length(payload) > :inline_payload_bytes
  on conflict (partition_key, execution_id) do update set result_payload = excluded.result_payload
),
-- Attempts that are parked or followed by another attempt, and a row for the attempt that follows.
written_attempts as (
  insert into attempt as a (partition_key, execution_id, attempt_index, attempt_state, attempt_id, attempt_type, started_at,
                            suspended_at, suspension_marker, ended_at, lease_id, lease_epoch, worker_no, failure_reason,
                            failure_category, suspension_id, previous_attempt_index, retry_reason, policy, error_type, traceback)
  select partition_key, execution_id, attempt_count - 1, attempt_lifecycle, own_attempt_id, attempt_type, claimed_at,
         case when parks then now end, case when parks then release_reason end, case when not parks then now end, lease_id,
         lease_epoch + suspends::int, case when not suspends then worker_no end, case when not parks then reason end, category,
         suspension_id, null, null, null, error_type, traceback
    from judged
   where verdict = 'ok' and attempt_lives and (parks or retries or attempt_lifecycle = 'interrupted_reclaimed') and not loses_lease
  union all
  select partition_key, execution_id, attempt_count, 'created', null, null, null, null, null, null, null, null, null, null, null, null,
         attempt_count - 1, reason, next_policy::jsonb, null, null
    from judged where verdict = 'ok' and retries
  on conflict (partition_key, execution_id, attempt_index) do update
     set attempt_state = excluded.attempt_state, attempt_id = excluded.attempt_id, attempt_type = excluded.attempt_type,
         resumed_at = case when a.suspended_at is not null then coalesce(excluded.started_at, a.resumed_at) end,
         started_at = coalesce(a.started_at, excluded.started_at),
         suspended_at = coalesce(excluded.suspended_at, a.suspended_at), suspension_marker = excluded.suspension_marker,
         ended_at = excluded.ended_at, lease_id = coalesce(excluded.lease_id, a.lease_id), lease_epoch = excluded.lease_epoch,
         worker_no = case when excluded.suspension_id is null then coalesce(excluded.worker_no, a.worker_no) end,
         failure_reason = excluded.failure_reason, failure_category = excluded.failure_category,
         suspension_id = excluded.suspension_id, error_type = excluded.error_type, traceback = excluded.traceback
),
-- The error of the last attempt; its other fields are in the row of the execution.
written_errors as (
  insert into attempt (partition_key, execution_id, attempt_index, attempt_state, error_type, traceback)
  select partition_key, execution_id, attempt_count - 1, 'created'::attempt_lifecycle, error_type, traceback from judged
   where :has_errors::boolean and verdict = 'ok' and ends and (error_type is not null or traceback is not null)
  on conflict (partition_key, execution_id, attempt_index) do update
     set error_type = excluded.error_type, traceback = excluded.traceback
),
-- The executions that have an entry of ready. Entries are looked up by the columns of both indexes, so that the planner can use
-- either.
with_entry as materialized (
  select h.place, h.queue_no, q.route_no, h.becomes_ready, h.granted_until
    from judged h cross join lateral (select q.route_no from queue q where q.queue_no = h.queue_no limit 1) q
   where h.verdict = 'ok' and h.was_ready
),
inserted_entries as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select h.place, (select q.route_no from queue q where q.queue_no = h.queue_no), h.queue_no, h.partition_key, h.execution_id
    from judged h where h.verdict = 'ok' and h.becomes_ready and not h.was_ready
),
deleted_entries as (
  delete from ready r using with_entry w
   where not w.becomes_ready
     and r.route_no = any(array[w.route_no]) and r.queue_no = any(array[w.queue_no]) and r.place = w.place
),
-- The entry stays, without the grant.
ungranted_entries as (
  update ready r set granted_until = null
    from with_entry w
   where w.becomes_ready and w.granted_until is not null
     and r.route_no = any(array[w.route_no]) and r.queue_no = any(array[w.queue_no]) and r.place = w.place
),
inserted_timers as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select partition_key, execution_id, 'delay'::timer_kind, greatest(to_delay_until, now) from judged
   where verdict = 'ok' and to_eligibility = 'not_eligible_until_time'
  union all
  select partition_key, execution_id, 'suspension_timeout', timeout_at from judged
   where verdict = 'ok' and suspends and timeout_at is not null
),
-- The kind is compared as text: with an enum equality, a plan made while there are few timers scans timer_due.
deleted_timers as (
  delete from timer t using judged h
   where h.verdict = 'ok' and t.partition_key = any(array[h.partition_key]) and t.execution_id = h.execution_id
     and (h.attempt_timeout_at is not null or h.delay_until is not null or h.suspension_timeout_at is not null
          or h.deadline_at is not null)
     and case t.kind::text
           when 'attempt_timeout' then not h.loses_lease
           when 'deadline' then h.ends
           else true end
),
written_listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select partition_key, execution_id,
         case
           when loses_lease then 'active'
           when to_eligibility = 'blocked_by_dependencies' then 'waiting_children'
           when to_eligibility = 'eligible_now' then 'resumable'
           else to_outcome::text end::public_state,
         case when loses_lease then expires_at else now end
    from judged
   where verdict = 'ok' and is_listed
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
),
deleted_listings as (
  delete from listed i using judged h
   where h.verdict = 'ok' and h.was_ready and h.attempt_state = 'attempt_interrupted'
     and not h.is_listed
     and i.partition_key = any(array[h.partition_key]) and i.execution_id = h.execution_id
),
inserted_retained as (
  insert into retained (retain_until, ended_at, partition_key, execution_ids, queue_no, queue_nos, terminal_outcome)
  select min(now) + coalesce(retention_ms, :retention_ms::bigint), min(now), partition_key, array_agg(execution_id),
         case when min(queue_no) = max(queue_no) then min(queue_no) end,
         case when min(queue_no) < max(queue_no) then array_agg(queue_no) end, to_outcome
    from judged where verdict = 'ok' and ends group by partition_key, retention_ms, to_outcome
),
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, outcome, reason, flow_id, instance_tag, tags)
  select now, execution_id, partition_key,
         (case
           when is_revoked then 'revoked'
           when loses_lease then 'expired'
           when ownership_state = 'leased' or move = 'reclaim_limit' then 'released'
           else 'ended' end)::event_kind,
         namespace_no, nullif(attempt_count, 0) - 1, case when ownership_state <> 'unowned' then worker_no end, lease_epoch, lease_id,
         nullif(attempt_id, lease_id), completion, case when is_revoked then reason when not loses_lease then release_reason end, flow_id, instance_tag,
         case when has_tags then (
           select jsonb_object_agg(t.key, t.value) from execution_tag t
            where t.partition_key = h.partition_key and t.execution_id = h.execution_id) end
    from judged h
   where verdict = 'ok' and (ownership_state = 'leased' or completion is not null)
  returning event_id, at, partition_key, execution_id, flow_id, outcome
),
-- What the cascade settles: the ends of members of flows.
inserted_entries_of_cascade as (
  insert into cascade_entry (event_id, partition_key, flow_id, outcome, queued_at, execution_ids)
  select event_id, partition_key, flow_id, outcome, at, array[execution_id]
    from inserted_events where flow_id is not null and outcome is not null
  returning partition_key, event_id, execution_ids[1] as execution_id
)
select 0 as nth, 'ok' as verdict, count(*) as ended, null as delay_until, null as delay_ms,
       null as lane_id, null as route_no, null as queue_no, null as place, null as lease_epoch, null as attached, null as found
  from judged where verdict = 'ok' and ends and attached = 0
union all
select nth, verdict, 0, to_delay_until,
       case when to_eligibility = 'not_eligible_until_time' or suspends then coalesce(to_delay_until, timeout_at) - now end,
       q.lane_id, q.route_no, queue_no, place, lease_epoch, attached,
       case when verdict = 'ok' then to_jsonb(slot_keys) when verdict = 'execution_not_active' then jsonb_build_object(
         'terminal_outcome', terminal_outcome, 'lifecycle_phase', lifecycle_phase, 'attempt_state', attempt_state,
         'lease_epoch', lease_epoch, 'attempt_id', own_attempt_id, 'attempt_count', attempt_count,
         -- A retry that is already claimable has no delay_until; it became claimable at its last transition.
         'delay_until', coalesce(delay_until, last_transition_at)) end
  from judged h
  left join lateral (
       select l.lane_id, q.route_no from queue q join lane l using (lane_no)
        where q.queue_no = h.queue_no and h.verdict = 'ok' and h.becomes_ready) q on true
 where verdict is distinct from 'ok' or not ends or attached <> 0
union all
select null, 'queued', event_id, partition_key, null, null, null, null, null, null, null, to_jsonb(execution_id)
  from inserted_entries_of_cascade;

-- name: complete_leases
-- Completes the leases whose fence is current and whose execution has no attachment except slots, which are returned. Returns their
-- positions, and the quota keys of which slots became free; the caller gives the others to end_leases. Waits at most 50 ms for a locked
-- row, long enough for a competing claim to commit. Reads the clock again for each row, as the lease may expire during the wait.
with clock as materialized (select ff_now() as now, set_config('lock_timeout', '50ms', true)),
item as materialized (
  select coalesce(partition_key, (:partition_keys)[1]) as partition_key, execution_id,
         coalesce(lease_epoch, (:lease_epochs)[1]) as lease_epoch, lease_id,
         case cardinality(:attempt_ids) when 0 then lease_id else attempt_id end as attempt_id,
         case cardinality(:payloads) when 1 then (:payloads)[1] else payload end as payload, nth, c.now
    from clock c
   cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[], :lease_epochs::bigint[], :lease_ids::uuid[],
                     :attempt_ids::uuid[], :payloads::bytea[])
         with ordinality as i(partition_key, execution_id, lease_epoch, lease_id, attempt_id, payload, nth)
),
moved as (
  update execution e
     set lifecycle_phase = :to_phase, ownership_state = :to_ownership, eligibility_state = :to_eligibility,
         blocking_reason = :to_blocking, terminal_outcome = :to_outcome, attempt_state = :to_attempt,
         last_transition_at = i.now, last_mutation_at = null, attached = 0,
         -- An empty array instead of null tells `returning` that there were slots, so that only then the old row is read again.
         slot_keys = case when e.slot_keys is not null then '{}'::int[] end,
         result_payload = case when octet_length(i.payload) <= :inline_payload_bytes then i.payload end
    from item i
   where e.partition_key = any(array[i.partition_key]) and e.execution_id = i.execution_id
     and e.lease_epoch = i.lease_epoch and e.ownership_state = 'leased' and e.lease_id = i.lease_id
     and coalesce(e.attempt_id, e.lease_id) = i.attempt_id and e.attached in (0, 8)
     -- If the row changed after the statement began, the tags and the slots that the statement reads may be old.
     and (not (e.has_tags or e.attached <> 0) or e.ctid = (
          select x.ctid from execution x where x.partition_key = e.partition_key and x.execution_id = e.execution_id))
     and (e.lease_expires_at > ff_now() or exists (
          select from claim r
           where r.partition_key = e.partition_key and r.claim_no = e.claim_no and r.expires_at > ff_now()))
  returning i.nth, i.now, e.partition_key, e.execution_id, e.queue_no, e.namespace_no, e.attempt_count - 1 as attempt_index,
            e.attempt_id, e.lease_id, e.lease_epoch, e.worker_no, e.retention_ms, e.flow_id, e.instance_tag, e.deadline_at,
            e.attempt_timeout_at, case when octet_length(i.payload) > :inline_payload_bytes then i.payload end as large_payload,
            case when e.has_tags then (
              select jsonb_object_agg(t.key, t.value) from execution_tag t
               where t.partition_key = e.partition_key and t.execution_id = e.execution_id) end as tags,
            case when e.slot_keys is not null then (
              select x.slot_keys from execution x
               where x.partition_key = e.partition_key and x.execution_id = e.execution_id) end as slot_keys
),
returned_slots as (
  insert into slot_return as s (quota_key_no, shard, returned)
  select k.quota_key_no, :slot_shard::smallint, count(*)
    from moved m cross join lateral unnest(m.slot_keys) as k(quota_key_no)
   where m.slot_keys is not null
   group by k.quota_key_no
   order by k.quota_key_no
  on conflict (quota_key_no, shard) do update set returned = s.returned + excluded.returned
  returning s.quota_key_no
),
inserted_results as (
  insert into execution_result (partition_key, execution_id, result_payload)
  select partition_key, execution_id, large_payload from moved where :has_large_results::boolean and large_payload is not null
  on conflict (partition_key, execution_id) do update set result_payload = excluded.result_payload
),
deleted_timers as (
  delete from timer t using moved m
   where (m.attempt_timeout_at is not null or m.deadline_at is not null)
     and t.partition_key = any(array[m.partition_key]) and t.execution_id = m.execution_id
),
inserted_retained as (
  insert into retained (retain_until, ended_at, partition_key, execution_ids, queue_no, queue_nos, terminal_outcome)
  select min(now) + coalesce(retention_ms, :retention_ms::bigint), min(now), partition_key, array_agg(execution_id),
         case when min(queue_no) = max(queue_no) then min(queue_no) end,
         case when min(queue_no) < max(queue_no) then array_agg(queue_no) end, :to_outcome
    from moved group by partition_key, retention_ms
),
-- Completions that differ only in their ids share one event row.
inserted_events as (
  insert into event (at, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, outcome, reason,
                     execution_ids, lease_ids, execution_id, lease_id, attempt_id, flow_id, instance_tag, tags)
  select min(now), partition_key, 'released'::event_kind, namespace_no, attempt_index, worker_no, lease_epoch, :completion::smallint,
         :release_reason, array_agg(execution_id), array_agg(lease_id), null, null, null, flow_id, instance_tag, tags
    from moved where attempt_id is null
   group by partition_key, namespace_no, attempt_index, worker_no, lease_epoch, flow_id, instance_tag, tags
  union all
  select now, partition_key, 'released', namespace_no, attempt_index, worker_no, lease_epoch, :completion, :release_reason,
         null, null, execution_id, lease_id, nullif(attempt_id, lease_id), flow_id, instance_tag, tags
    from moved where attempt_id is not null
  returning event_id, at, partition_key, execution_id, execution_ids, flow_id, outcome
),
-- What the cascade settles: the ends of members of flows.
inserted_entries as (
  insert into cascade_entry (event_id, partition_key, flow_id, outcome, queued_at, execution_ids)
  select event_id, partition_key, flow_id, outcome, at, coalesce(execution_ids, array[execution_id])
    from inserted_events where flow_id is not null
  returning partition_key, event_id
)
select (select array_agg(nth) from moved) as completed, (select array_agg(partition_key) from inserted_entries) as entry_partitions,
       (select array_agg(event_id) from inserted_entries) as event_ids,
       (select array_agg(quota_key_no) from returned_slots) as freed_keys;

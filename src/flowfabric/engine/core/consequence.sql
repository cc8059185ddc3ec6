-- name: release_executions
-- Ends or parks runs, each item by its own move: how many of them ended, and a row for each that did not.
-- The verdict is taken from the locked row alone; a row held elsewhere, or absent, has the verdict null.
-- The row is found by its key only: a fence in the join would let the planner hash every leased row.
with clock as materialized (select ff_now() as now),
given as (
  select coalesce(partition_key, (:partition_keys)[1]) as partition_key, execution_id,
         coalesce(move, (:moves)[1]) as move,
         case cardinality(:lease_epochs) when 1 then (:lease_epochs)[1] else lease_epoch end as lease_epoch,
         case cardinality(:lease_ids) when 1 then (:lease_ids)[1] else lease_id end as lease_id,
         -- Of an attempt's first lease both ids are the same, and its one array is left out.
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
         nth
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :moves::text[], :lease_epochs::bigint[], :lease_ids::uuid[], :attempt_ids::uuid[], :payloads::bytea[], :encodings::text[],
                :reasons::text[], :categories::text[], :delays_ms::bigint[], :delays_until::bigint[], :sources::text[],
                :blockings::blocking_reason[], :details::text[], :suspension_ids::uuid[], :timeouts_at::bigint[])
         with ordinality
         as i(partition_key, execution_id, move, lease_epoch, lease_id, attempt_id, payload, encoding,
              reason, category, delay_ms, delay_until, source, blocking, detail, suspension_id, timeout_at, nth)
),
item as materialized (
  select i.*, m.lifecycle_phase, m.eligibility_state, m.blocking_reason, m.terminal_outcome, m.attempt_state,
         m.attempt_lifecycle, m.release_reason, m.completion
    from given i
    join unnest(:move_names::text[], :to_phases::lifecycle_phase[], :to_eligibilities::eligibility_state[],
                :to_blockings::blocking_reason[], :to_outcomes::terminal_outcome[], :to_attempts::attempt_state[],
                :attempt_lifecycles::attempt_lifecycle[], :release_reasons::text[], :completions::smallint[])
         as m(move, lifecycle_phase, eligibility_state, blocking_reason, terminal_outcome, attempt_state,
              attempt_lifecycle, release_reason, completion) using (move)
),
held as materialized (
  select i.nth, i.move, i.payload, i.encoding, i.reason, i.category, i.source, i.detail, i.suspension_id,
         -- A timer that has run out already is due from when it was set: sweeps need not look for it further back.
         case when i.timeout_at is not null then greatest(i.timeout_at, c.now) end as timeout_at,
         i.lifecycle_phase = 'suspended' as suspends,
         coalesce(i.delay_until, c.now + i.delay_ms) as to_delay_until, i.attempt_lifecycle = 'suspended' as parks,
         i.lifecycle_phase as to_phase, i.eligibility_state as to_eligibility,
         coalesce(i.given_blocking, i.blocking_reason) as to_blocking,
         i.terminal_outcome as to_outcome, i.attempt_state as to_attempt, i.attempt_lifecycle, i.release_reason, i.completion,
         e.*, c.now,
         case i.attempt_lifecycle
           when 'ended_success' then null
           when 'ended_cancelled' then 'cancelled: ' || i.reason
           else i.reason end as attempt_reason,
         e.attempt_state in ('running_attempt', 'attempt_interrupted') as attempt_lives,
         case
           when e.execution_id is null then null
           when i.lease_epoch is null then
             case when e.lifecycle_phase = 'terminal' then 'execution_not_active' else 'ok' end
           when e.lease_epoch <> i.lease_epoch then 'stale_fence'
           when e.lifecycle_phase <> 'active' then 'execution_not_active'
           when e.ownership_state = 'lease_revoked' then 'lease_revoked'
           when e.lease_expires_at <= c.now or e.ownership_state <> 'leased' then 'lease_expired'
           when e.lease_id <> i.lease_id or e.attempt_id <> i.attempt_id then 'stale_fence'
           else 'ok' end as verdict
    from item i
   cross join clock c
    left join lateral (
         select e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.lifecycle_phase, e.ownership_state,
                e.terminal_outcome, e.attempt_state, e.lease_epoch, e.lease_id, e.attempt_id, e.attempt_type, e.attempt_count,
                e.worker_no, e.claimed_at, e.lease_expires_at, e.retry_count, e.retention_ms, e.delay_until, e.last_transition_at,
                e.attempt_timeout_at, e.granted_until, e.flow_id, e.instance_tag,
                e.previous_attempt_index, e.retry_reason, e.reclaim_reason, e.replay_reason, e.replay_requested_by,
                e.attempt_policy, e.attempt_stored
           from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id
            for update skip locked) e on true
),
moved as (
  update execution e
     set lifecycle_phase = h.to_phase, ownership_state = 'unowned', eligibility_state = h.to_eligibility,
         blocking_reason = h.to_blocking, terminal_outcome = h.to_outcome,
         attempt_state = case when h.to_attempt = 'attempt_terminal' and h.attempt_count = 0 then e.attempt_state else h.to_attempt end,
         lease_id = null, worker_no = null, claimed_at = null, lease_expires_at = null, lease_renewed_at = null,
         granted_until = null, attempt_timeout_at = null,
         suspension_timeout_at = case when h.suspends then h.timeout_at end,
         -- What a worker still says under the lease it gave up is events from what the next one says.
         lease_epoch = e.lease_epoch + h.suspends::int,
         lease_expired_at = null, lease_revoked_at = null, lease_revoke_reason = null,
         -- What a parked attempt goes on with; a timer that has run out leaves it a moment, for none would be no timer.
         remaining_attempt_timeout_ms = case when h.parks and h.attempt_timeout_at is not null then greatest(h.attempt_timeout_at - h.now, 1) end,
         attempt_policy = case when h.parks then e.attempt_policy end, attempt_stored = h.parks,
         attempt_id = case when h.to_attempt = 'pending_retry_attempt' then null else e.attempt_id end,
         retry_count = e.retry_count + (h.to_attempt = 'pending_retry_attempt')::int,
         delay_until = case when h.to_eligibility <> 'eligible_now' then h.to_delay_until end,
         completed_at = case when h.to_phase = 'terminal' then h.now end,
         retain_until = case when h.to_phase = 'terminal' then h.now + coalesce(h.retention_ms, :retention_ms::bigint) end,
         failure_reason = case
           when h.parks then e.failure_reason
           when h.to_outcome in ('success', 'cancelled') and h.move <> 'suspension_cancelled' then null
           else h.reason end,
         cancellation_reason = case h.to_outcome when 'cancelled' then h.reason end,
         cancelled_by = case h.to_outcome when 'cancelled' then h.source end,
         blocking_detail = case
           when h.to_eligibility = 'eligible_now' then null
           when h.to_attempt = 'pending_retry_attempt' then
             'retry backoff until ' || h.to_delay_until || ' (attempt ' || (h.attempt_count - 1) || ' failed: ' || h.reason || ')'
           when h.suspends then h.detail
           when h.parks then 'delayed until ' || h.to_delay_until end,
         previous_attempt_index = case when h.to_attempt = 'pending_retry_attempt' then h.attempt_count - 1 when h.parks then e.previous_attempt_index end,
         retry_reason = case when h.to_attempt = 'pending_retry_attempt' then h.reason when h.parks then e.retry_reason end,
         reclaim_reason = case when h.parks then e.reclaim_reason end, replay_reason = case when h.parks then e.replay_reason end,
         replay_requested_by = case when h.parks then e.replay_requested_by end,
         last_transition_at = h.now, last_mutation_at = h.now
    from held h
   where e.partition_key = h.partition_key and e.execution_id = h.execution_id and h.verdict = 'ok'
),
-- Found by a walk that begins with what is held, which a join of the two tables need not.
ungranted as (
  delete from claim_grant
   where ctid = any(array(
         select g.tid
           from held h
          cross join lateral (
                select g.ctid as tid from claim_grant g
                 where g.partition_key = h.partition_key and g.execution_id = h.execution_id
                   for update) g
          where h.verdict = 'ok' and h.granted_until is not null))
),
ended as (
  insert into attempt (partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state,
                       started_at, suspended_at, suspension_marker, ended_at, lease_id, lease_epoch, worker_no,
                       result_payload, result_encoding, failure_reason, failure_category, previous_attempt_index,
                       retry_reason, reclaim_reason, replay_reason, replay_requested_by, policy, suspension_id)
  select partition_key, execution_id, attempt_count - 1, attempt_id, attempt_type, attempt_lifecycle,
         claimed_at, case when parks then now end, case when parks then release_reason end, case when not parks then now end,
         lease_id, lease_epoch + suspends::int, case when not suspends then worker_no end, payload, encoding, attempt_reason, category,
         previous_attempt_index, retry_reason, reclaim_reason, replay_reason, replay_requested_by, attempt_policy, suspension_id
    from held where verdict = 'ok' and attempt_lives and not attempt_stored
),
-- An attempt that was parked before has its row already. Not an update: its join might be driven from the wrong side.
ended_again as (
  insert into attempt as a (partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state, started_at,
                            suspended_at, suspension_marker, resumed_at, ended_at, lease_id, lease_epoch, worker_no,
                            result_payload, result_encoding, failure_reason, failure_category, suspension_id)
  select partition_key, execution_id, attempt_count - 1, attempt_id, attempt_type, attempt_lifecycle, coalesce(claimed_at, now),
         case when parks then now end, case when parks then release_reason end, claimed_at, case when not parks then now end,
         lease_id, lease_epoch + suspends::int, worker_no, payload, encoding, attempt_reason, category, suspension_id
    from held where verdict = 'ok' and attempt_lives and attempt_stored
  on conflict (partition_key, execution_id, attempt_index) do update
     set attempt_state = excluded.attempt_state, ended_at = excluded.ended_at,
         suspended_at = coalesce(excluded.suspended_at, a.suspended_at), suspension_marker = excluded.suspension_marker,
         resumed_at = coalesce(excluded.resumed_at, a.resumed_at), lease_id = coalesce(excluded.lease_id, a.lease_id),
         lease_epoch = excluded.lease_epoch, suspension_id = excluded.suspension_id,
         worker_no = case when excluded.suspension_id is null then coalesce(excluded.worker_no, a.worker_no) end,
         result_payload = excluded.result_payload, result_encoding = excluded.result_encoding,
         failure_reason = excluded.failure_reason, failure_category = excluded.failure_category
),
-- A suspended execution that ends takes its open suspension and every waitpoint of it along. Whoever ends it has held
-- it before, so that what is read here is what belongs to it now; what is changed is found as in insert_deliveries.
closing as materialized (
  select h.partition_key, h.execution_id, s.waitpoint_ids, h.release_reason, h.now
    from held h
   cross join lateral (
         select s.waitpoint_ids from suspension s
          where s.partition_key = h.partition_key and s.execution_id = h.execution_id and s.closed_at is null
            for update) s
   where h.verdict = 'ok' and h.lifecycle_phase = 'suspended' and h.to_phase = 'terminal'
),
closed as (
  update suspension s set closed_at = c.now, close_reason = c.release_reason
    from closing c
   where s.partition_key = any(array[c.partition_key]) and s.execution_id = c.execution_id
),
shut as materialized (
  select c.partition_key, w.waitpoint_id, c.release_reason, c.now
    from closing c
   cross join lateral (select waitpoint_id from unnest(c.waitpoint_ids) as i(waitpoint_id) order by 1) i
   cross join lateral (
         select w.waitpoint_id from waitpoint w
          where w.partition_key = c.partition_key and w.waitpoint_id = i.waitpoint_id and w.state in ('pending', 'active')
            for update) w
),
closed_waitpoints as (
  update waitpoint w set state = 'closed', closed_at = s.now, close_reason = s.release_reason
    from shut s
   where w.partition_key = any(array[s.partition_key]) and w.waitpoint_id = s.waitpoint_id
),
events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, outcome, reason, flow_id, instance_tag)
  select now, execution_id, partition_key,
         case when ownership_state = 'leased' or move = 'reclaim_cap' then 3 else 0 end, namespace_no,
         nullif(attempt_count, 0) - 1, worker_no, lease_epoch, lease_id,
         nullif(attempt_id, lease_id), completion, release_reason, flow_id, instance_tag
    from held
   where verdict = 'ok' and (ownership_state = 'leased' or completion is not null)
)
select 0 as nth, 'ok' as verdict, count(*) as ended, null as delay_until, null as delay_ms,
       null as lane_id, null as queue_no, null as place, null as found
  from held where verdict = 'ok' and to_phase = 'terminal'
union all
select nth, verdict, 0, to_delay_until,
       case when to_eligibility <> 'eligible_now' then coalesce(to_delay_until, timeout_at) - now end,
       case when verdict = 'ok' and to_eligibility = 'eligible_now' then
         (select l.lane_id from queue q join lane l using (lane_no) where q.queue_no = h.queue_no) end,
       queue_no, place,
       case when verdict = 'execution_not_active' then jsonb_build_object(
         'terminal_outcome', terminal_outcome, 'lifecycle_phase', lifecycle_phase, 'attempt_state', attempt_state,
         'lease_epoch', lease_epoch, 'attempt_id', attempt_id,
         -- Of a retry that may be claimed already: since when.
         'delay_until', coalesce(delay_until, last_transition_at),
         'previous_attempt_index', previous_attempt_index) end
  from held h where verdict is distinct from 'ok' or to_phase <> 'terminal';

-- name: complete_held
-- Ends in success the runs whose fence holds, and says which; the others are for release_executions to judge.
-- Waits for a row held elsewhere no longer than a claim that lost a race takes to commit; the clock is read again for
-- each row, as its lease may lapse meanwhile.
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
         attempt_timeout_at = null, failure_reason = null, completed_at = i.now,
         retain_until = i.now + coalesce(e.retention_ms, :retention_ms::bigint),
         last_transition_at = i.now, last_mutation_at = i.now
    from item i
   where e.partition_key = i.partition_key and e.execution_id = i.execution_id
     and e.lease_epoch = i.lease_epoch and e.ownership_state = 'leased' and e.lease_expires_at > ff_now()
     and e.lease_id = i.lease_id and e.attempt_id = i.attempt_id and not e.attempt_stored
  returning i.nth, i.now, i.payload, e.partition_key, e.execution_id, e.namespace_no, e.attempt_count - 1 as attempt_index,
            e.attempt_id, e.attempt_type, e.claimed_at, e.lease_id, e.lease_epoch, e.worker_no, e.previous_attempt_index,
            e.retry_reason, e.reclaim_reason, e.replay_reason, e.replay_requested_by, e.attempt_policy, e.flow_id, e.instance_tag
),
ended as (
  insert into attempt (partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state,
                       started_at, ended_at, lease_id, lease_epoch, worker_no, result_payload, previous_attempt_index,
                       retry_reason, reclaim_reason, replay_reason, replay_requested_by, policy)
  select partition_key, execution_id, attempt_index, attempt_id, attempt_type, :attempt_lifecycle,
         claimed_at, now, lease_id, lease_epoch, worker_no, payload, previous_attempt_index,
         retry_reason, reclaim_reason, replay_reason, replay_requested_by, attempt_policy
    from moved
),
events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, outcome, reason, flow_id, instance_tag)
  select now, execution_id, partition_key, 3, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
         nullif(attempt_id, lease_id), :completion::smallint, :release_reason, flow_id, instance_tag
    from moved
)
select array_agg(nth) as completed from moved;

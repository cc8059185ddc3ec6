-- name: read_ended
-- What a replay needs of an execution that the transaction has locked, with the group of its dependencies if it has one. Once one of
-- its edges is applied, the staged ones count too.
select e.terminal_outcome, e.replay_count, e.policy, e.last_transition_at as ended_at, e.retention_ms, g.group_state::text as group_state,
       g.staged_count - g.succeeded_count - g.failed_count - g.skipped_count as unresolved
  from execution e
  left join lateral (
       select g.group_state, g.staged_count, g.succeeded_count, g.failed_count, g.skipped_count from edge_group g
        where g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id and g.applied_count > 0
        limit 1) g on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_is_queued
-- Whether the end of a member of a locked flow is still queued for the cascade.
select exists (
       select from cascade_entry c
        where c.partition_key = :partition_key and c.flow_id = :flow_id and :execution_id::uuid = any(c.execution_ids)) as is_queued;

-- name: reset_group
-- Makes the impossible edges that lead to a member of a locked flow unsatisfied again, and their group pending. Returns how many of
-- its edges are unsatisfied, and the impossible ones whose upstream has succeeded since, which the caller resolves.
with clock as materialized (select ff_now() as now),
reset_edges as (
  update edge d set state = 'unsatisfied', last_resolved_at = null
   where d.downstream_id = :execution_id and d.partition_key is not distinct from :partition_key::smallint
     and d.flow_id is not distinct from :flow_id::uuid
     and d.state::text = 'impossible'
  returning d.partition_key, d.edge_id, d.upstream_id
),
reset_groups as (
  update edge_group g
     set group_state = 'pending', failed_count = 0, skipped_count = 0, last_dependency_update_at = c.now,
         cancel_siblings_pending_flag = false, cancel_siblings_pending_members = null, cancel_siblings_reason = null
    from clock c
   where g.partition_key = :partition_key and g.flow_id = :flow_id and g.downstream_id = :execution_id
  returning g.applied_count - g.succeeded_count as unsatisfied
),
deleted_pending_groups as (
  delete from pending_cancel_group p
   where p.partition_key = :partition_key and p.flow_id = :flow_id and p.downstream_id = :execution_id
)
select (select unsatisfied from reset_groups) as unsatisfied,
       array(
         select d.edge_id
           from reset_edges d
          cross join lateral (
                select e.terminal_outcome from execution e
                 where e.partition_key = d.partition_key and e.execution_id = d.upstream_id limit 1) e
          where e.terminal_outcome = 'success'
          order by d.edge_id) as succeeded;

-- name: delete_pending_cancels
-- Withdraws what was still to cancel a member of a locked flow: the cancellation of the flow, and groups that need it no more.
with deleted_backlog as (
  delete from cancel_backlog_member m
   where m.partition_key = :partition_key and m.flow_id = :flow_id and m.execution_id = :execution_id
)
update edge_group g set cancel_siblings_pending_members = array_remove(g.cancel_siblings_pending_members, d.upstream_id)
  from (select d.partition_key, d.flow_id, d.upstream_id, d.downstream_id from edge d
         where d.upstream_id = :execution_id and d.partition_key is not distinct from :partition_key::smallint
           and d.flow_id is not distinct from :flow_id::uuid offset 0) d
 where g.partition_key = any(array[d.partition_key]) and g.flow_id = d.flow_id and g.downstream_id = d.downstream_id
   and d.upstream_id = any(g.cancel_siblings_pending_members);

-- name: read_replayed
-- The state of a member that the transaction has replayed.
select public_state from execution where partition_key = :partition_key and execution_id = :execution_id;

-- name: lock_end
-- Locks the entry of retained with the end of an execution if it is due at one of the given times, and returns its time.
select r.retain_until from retained r
 where r.retain_until = any(:retain_untils::bigint[]) and r.partition_key = :partition_key and r.ended_at = :ended_at
   and :execution_id::uuid = any(r.execution_ids)
   for update;

-- name: lock_end_anywhere
-- The same for any retention that ends within :within_ms from now, or ends at all if that is null.
select r.retain_until from retained r
 where r.retain_until >= :ended_at
   and r.retain_until <= case when :within_ms::bigint is null then 9223372036854775807 else (select ff_now()) + :within_ms end
   and r.partition_key = :partition_key and r.ended_at = :ended_at
   and :execution_id::uuid = any(r.execution_ids)
   for update;

-- name: take_end
-- Removes an execution and its queue from the locked entry of retained with its end; the last one takes the entry with it.
with shortened as (
  update retained r
     set execution_ids = array_remove(r.execution_ids, :execution_id::uuid),
         queue_nos = r.queue_nos[1 : array_position(r.execution_ids, :execution_id) - 1]
                     || r.queue_nos[array_position(r.execution_ids, :execution_id) + 1 : cardinality(r.queue_nos)]
   where r.retain_until = :retain_until and r.partition_key = :partition_key and r.ended_at = :ended_at
     and :execution_id = any(r.execution_ids) and cardinality(r.execution_ids) > 1
)
delete from retained r
 where r.retain_until = :retain_until and r.partition_key = :partition_key and r.ended_at = :ended_at
   and :execution_id = any(r.execution_ids) and cardinality(r.execution_ids) = 1;

-- name: replay_locked
-- Makes an ended execution that the transaction has locked runnable, or blocked by its dependencies, and returns where it can be
-- claimed. The attempt on its row moves to attempt, where the next one gets a row that says who wanted it. A deadline that has
-- passed is set again by the policy, if that has one.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.*, c.now, :to_eligibility::eligibility_state = 'eligible_now' as is_ready,
         case when e.deadline_at > c.now then e.deadline_at when e.deadline_at is not null then c.now + :deadline_ms::bigint end as to_deadline_at
    from clock c
   cross join lateral (
         select e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.attempt_count, e.replay_count, e.lease_epoch,
                e.deadline_at, e.flow_id, e.instance_tag, e.has_tags
           from execution e
          where e.partition_key = :partition_key and e.execution_id = :execution_id and e.lifecycle_phase = 'terminal'
          limit 1) e
),
moved as (
  update execution e
     set lifecycle_phase = :to_phase, ownership_state = :to_ownership, eligibility_state = :to_eligibility,
         blocking_reason = :to_blocking, terminal_outcome = :to_outcome, attempt_state = :to_attempt,
         replay_count = e.replay_count + 1, retry_count = 0, reclaim_count = 0, lease_id = null, attempt_id = null,
         last_transition_at = h.now, last_mutation_at = null, result_payload = null, result_encoding = null,
         failure_reason = null, failure_category = null, cancellation_reason = null, cancelled_by = null,
         granted_until = null, delay_until = null, deadline_at = h.to_deadline_at, attempt_timeout_at = null,
         suspension_timeout_at = null, remaining_attempt_timeout_ms = null, blocking_detail = :detail,
         lease_renewed_at = null
    from held h
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
),
deleted_results as (
  delete from execution_result r using held h
   where r.partition_key = any(array[h.partition_key]) and r.execution_id = h.execution_id
),
-- attempt_all still shows the execution as it ended. An execution that ended while it waited for an attempt has a row for that.
written_attempts as (
  insert into attempt (partition_key, execution_id, attempt_index, attempt_state, attempt_id, attempt_type, started_at, suspended_at,
                       resumed_at, ended_at, lease_id, lease_epoch, worker_no, failure_reason, failure_category,
                       previous_attempt_index, retry_reason, reclaim_reason, replay_reason, replay_requested_by, suspension_marker,
                       suspension_id, usage, policy, error_type, traceback)
  select a.partition_key, a.execution_id, a.attempt_index, a.attempt_state, a.attempt_id, a.attempt_type, a.started_at, a.suspended_at,
         a.resumed_at, a.ended_at, a.lease_id, a.lease_epoch, a.worker_no, a.failure_reason, a.failure_category,
         a.previous_attempt_index, a.retry_reason, a.reclaim_reason, a.replay_reason, a.replay_requested_by, a.suspension_marker,
         a.suspension_id, a.usage, a.policy, a.error_type, a.traceback
    from held h
   cross join lateral (
         select a.* from attempt_all a
          where a.partition_key = h.partition_key and a.execution_id = h.execution_id and a.attempt_index = h.attempt_count - 1
         offset 0) a
  union all
  select partition_key, execution_id, attempt_count, 'created'::attempt_lifecycle, null, null, null, null, null, null, null, null, null,
         null, null, nullif(attempt_count, 0) - 1, null, null, :reason, :requested_by, null, null, null, null, null, null
    from held
  on conflict (partition_key, execution_id, attempt_index) do update
     set attempt_state = excluded.attempt_state, attempt_id = excluded.attempt_id, attempt_type = excluded.attempt_type,
         started_at = excluded.started_at, suspended_at = excluded.suspended_at, resumed_at = excluded.resumed_at,
         ended_at = excluded.ended_at, lease_id = excluded.lease_id, lease_epoch = excluded.lease_epoch,
         worker_no = excluded.worker_no, failure_reason = excluded.failure_reason, failure_category = excluded.failure_category,
         previous_attempt_index = excluded.previous_attempt_index, retry_reason = excluded.retry_reason,
         reclaim_reason = excluded.reclaim_reason, replay_reason = excluded.replay_reason,
         replay_requested_by = excluded.replay_requested_by, suspension_marker = excluded.suspension_marker,
         suspension_id = excluded.suspension_id, usage = excluded.usage, policy = excluded.policy,
         error_type = excluded.error_type, traceback = excluded.traceback
),
inserted_entries as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select h.place, q.route_no, h.queue_no, h.partition_key, h.execution_id
    from held h
   cross join lateral (select q.route_no from queue q where q.queue_no = h.queue_no limit 1) q
   where h.is_ready
),
written_listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select partition_key, execution_id, 'waiting_children', now from held where not is_ready
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
),
deleted_listings as (
  delete from listed i using held h
   where h.is_ready and i.partition_key = any(array[h.partition_key]) and i.execution_id = h.execution_id
),
inserted_timers as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select partition_key, execution_id, 'deadline', to_deadline_at from held where to_deadline_at is not null
),
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, lease_epoch, reason, flow_id, instance_tag,
                     details, tags)
  select h.now, h.execution_id, h.partition_key, i.kind::event_kind, h.namespace_no, greatest(h.attempt_count - 1, 0), h.lease_epoch,
         i.reason, h.flow_id, h.instance_tag, i.details,
         case when h.has_tags then (
           select jsonb_object_agg(t.key, t.value) from execution_tag t
            where t.partition_key = h.partition_key and t.execution_id = h.execution_id) end
    from held h
   cross join lateral (values
         ('replay_initiated', :replay_type::text,
          jsonb_build_object('replay_count', h.replay_count + 1, 'replay_type', :replay_type)),
         ('operator_action', 'replayed', :event_details::text::jsonb)) as i(kind, reason, details)
)
select q.lane_id, q.route_no, h.queue_no, h.place
  from held h
 cross join lateral (
       select l.lane_id, q.route_no from queue q join lane l using (lane_no) where q.queue_no = h.queue_no limit 1) q;

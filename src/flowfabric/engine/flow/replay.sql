-- name: list_flows_of
-- The flow of each execution, null outside of flows; none for one that does not exist.
select e.partition_key, e.execution_id, e.flow_id
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
 cross join lateral (
       select e.partition_key, e.execution_id, e.flow_id from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e;

-- name: set_lock_timeout
-- Limits how long the transaction waits for each row.
select set_config('lock_timeout', :lock_timeout, true);

-- name: read_ended
-- What a replay needs of executions that the transaction has locked, in the order given, each with the group of its dependencies if it
-- has one. Once one of its edges is applied, the staged ones count too.
select e.flow_id, e.terminal_outcome, e.replay_count, e.policy, e.last_transition_at as ended_at, e.retention_ms,
       g.group_state::text as group_state, g.staged_count - g.succeeded_count - g.failed_count - g.skipped_count as unresolved
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
 cross join lateral (
       select e.* from execution e where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
  left join lateral (
       select g.group_state, g.staged_count, g.succeeded_count, g.failed_count, g.skipped_count from edge_group g
        where g.partition_key = e.partition_key and g.flow_id = e.flow_id and g.downstream_id = e.execution_id and g.applied_count > 0
        limit 1) g on true
 order by i.nth;

-- name: list_queued_flows
-- The locked flows with an end of one of these members that is still queued for the cascade.
select i.partition_key, i.flow_id
  from (select distinct i.partition_key, i.flow_id
          from unnest(:partition_keys::smallint[], :flow_ids::uuid[]) as i(partition_key, flow_id)) i
 cross join lateral (
       select from cascade_entry c
        where c.partition_key = i.partition_key and c.flow_id = i.flow_id and c.execution_ids && :execution_ids::uuid[] limit 1) c;

-- name: reset_groups
-- Makes the impossible edges that lead to members of locked flows unsatisfied again, and their groups pending, except edges from deleted
-- executions and groups that cannot be satisfied without these. Returns for each member whether its group was reset, how many of its
-- edges are unresolved then, staged ones included, how many come from deleted executions and from which ones, and the edges that were
-- reset whose upstream execution has succeeded since and is not one of :replayed, which the caller resolves. A quorum of more than all
-- edges has none of these, as its next result makes it impossible again; its group may have no impossible edge at all.
with clock as materialized (select ff_now() as now),
impossible as materialized (
  select i.partition_key, i.flow_id, i.execution_id as downstream_id, x.edge_id, x.edge_no, x.upstream_id, u.terminal_outcome,
         x.edge_id is not null and u.terminal_outcome is null as is_deleted
    from unnest(:partition_keys::smallint[], :flow_ids::uuid[], :execution_ids::uuid[]) as i(partition_key, flow_id, execution_id)
    left join lateral (
         select x.partition_key, x.edge_id, x.edge_no, x.upstream_id from edge x
          where x.downstream_id = i.execution_id and x.partition_key is not distinct from i.partition_key
            and x.flow_id is not distinct from i.flow_id and x.state::text = 'impossible' offset 0) x on true
    left join lateral (
         select u.terminal_outcome from execution u
          where u.partition_key = x.partition_key and u.execution_id = x.upstream_id and u.flow_id is not distinct from i.flow_id
          limit 1) u on true
),
judged as materialized (
  select d.*, g.staged_count - g.succeeded_count - d.deleted as unresolved, g.needed > g.staged_count as needs_more_edges,
         d.deleted <= greatest(g.staged_count - g.needed, 0) as is_reset
    from (select x.partition_key, x.flow_id, x.downstream_id, count(*) filter (where x.is_deleted) as deleted,
                 (array_agg(x.upstream_id order by x.edge_no) filter (where x.is_deleted))[1:3] as deleted_ids,
                 array_agg(x.edge_id order by x.edge_no) filter (
                   where x.terminal_outcome = 'success' and x.upstream_id not in (select unnest(:replayed::uuid[]))) as succeeded
            from impossible x group by x.partition_key, x.flow_id, x.downstream_id) d
   cross join lateral (
         select g.applied_count, g.succeeded_count, g.staged_count,
                case g.policy when 'all_of' then g.staged_count when 'any_of' then 1 else g.k end as needed
           from edge_group g
          where g.partition_key = d.partition_key and g.flow_id = d.flow_id and g.downstream_id = d.downstream_id limit 1) g
),
reset_edges as (
  update edge x set state = 'unsatisfied', last_resolved_at = null
    from impossible i
   where (i.downstream_id in (select downstream_id from judged where is_reset)) is true and i.terminal_outcome is not null
     and x.partition_key = any(array[i.partition_key]) and x.flow_id = i.flow_id and x.edge_id = i.edge_id
),
reset_groups as (
  update edge_group g
     set group_state = 'pending', failed_count = 0, skipped_count = j.deleted, last_dependency_update_at = c.now,
         cancel_siblings_pending_flag = false, cancel_siblings_pending_members = null, cancel_siblings_reason = null
    from judged j cross join clock c
   where j.is_reset and g.partition_key = any(array[j.partition_key]) and g.flow_id = j.flow_id and g.downstream_id = j.downstream_id
),
deleted_pending_groups as (
  delete from pending_cancel_group p using judged j
   where j.is_reset and p.partition_key = any(array[j.partition_key]) and p.flow_id = j.flow_id and p.downstream_id = j.downstream_id
)
select partition_key, downstream_id as execution_id, is_reset, unresolved, deleted, deleted_ids,
       case when not needs_more_edges then succeeded end as succeeded
  from judged;

-- name: delete_pending_cancels
-- Withdraws what was still to cancel members of locked flows: the cancellation of the flow, and groups that need them no more.
with item as materialized (
  select * from unnest(:partition_keys::smallint[], :flow_ids::uuid[], :execution_ids::uuid[]) as i(partition_key, flow_id, execution_id)
),
deleted_backlog as (
  delete from cancel_backlog_member m using item i
   where m.partition_key = any(array[i.partition_key]) and m.flow_id = i.flow_id and m.execution_id = i.execution_id
),
owing as materialized (
  select distinct x.partition_key, x.flow_id, x.downstream_id
    from item i
   cross join lateral (
         select x.partition_key, x.flow_id, x.downstream_id from edge x
          where x.upstream_id = i.execution_id and x.partition_key is not distinct from i.partition_key
            and x.flow_id is not distinct from i.flow_id offset 0) x
   cross join lateral (
         select from edge_group g
          where g.partition_key = x.partition_key and g.flow_id = x.flow_id and g.downstream_id = x.downstream_id
            and i.execution_id = any(g.cancel_siblings_pending_members) limit 1) g
)
update edge_group g
   set cancel_siblings_pending_members = array(
         select m.execution_id from unnest(g.cancel_siblings_pending_members) with ordinality as m(execution_id, nth)
          where m.execution_id <> all(:execution_ids) order by m.nth)
  from owing o
 where g.partition_key = any(array[o.partition_key]) and g.flow_id = o.flow_id and g.downstream_id = o.downstream_id;

-- name: list_replayed
-- The states of members that the transaction has replayed, in the order given.
select e.public_state
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
 cross join lateral (
       select e.public_state from execution e where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
 order by i.nth;

-- name: replay_locked
-- Makes ended executions that the transaction has locked runnable, or blocked by their dependencies, and returns where the runnable ones
-- can be claimed. The attempt on a row moves to attempt, where the next one gets a row that says who wanted it. A deadline that has
-- passed is set again by the policy, if that has one.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.*, c.now, i.is_blocked, i.detail, i.replay_type,
         case when e.deadline_at > c.now then e.deadline_at when e.deadline_at is not null then c.now + i.deadline_ms end as to_deadline_at
    from clock c
   cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[], :are_blocked::boolean[], :deadlines_ms::bigint[],
                     :details::text[], :replay_types::text[])
         as i(partition_key, execution_id, is_blocked, deadline_ms, detail, replay_type)
   cross join lateral (
         select e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.attempt_count, e.replay_count, e.lease_epoch,
                e.deadline_at, e.flow_id, e.instance_tag, e.has_tags
           from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.lifecycle_phase = 'terminal'
          limit 1) e
),
moved as (
  update execution e
     set lifecycle_phase = :to_phase, ownership_state = :to_ownership,
         eligibility_state = case when h.is_blocked then :blocked_eligibility else :to_eligibility end::eligibility_state,
         blocking_reason = case when h.is_blocked then :blocked_blocking else :to_blocking end::blocking_reason,
         terminal_outcome = :to_outcome, attempt_state = :to_attempt,
         replay_count = e.replay_count + 1, retry_count = 0, reclaim_count = 0, lease_id = null, attempt_id = null,
         last_transition_at = h.now, last_mutation_at = null, result_payload = null, result_encoding = null,
         failure_reason = null, failure_category = null, cancellation_reason = null, cancelled_by = null,
         granted_until = null, delay_until = null, deadline_at = h.to_deadline_at, attempt_timeout_at = null,
         suspension_timeout_at = null, remaining_attempt_timeout_ms = null, blocking_detail = h.detail,
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
   where not h.is_blocked
),
written_listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select partition_key, execution_id, 'waiting_children', now from held where is_blocked
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
),
deleted_listings as (
  delete from listed i using held h
   where not h.is_blocked and i.partition_key = any(array[h.partition_key]) and i.execution_id = h.execution_id
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
         ('replay_initiated', h.replay_type,
          jsonb_build_object('replay_count', h.replay_count + 1, 'replay_type', h.replay_type)),
         ('operator_action', 'replayed',
          jsonb_build_object('branch', h.replay_type)
            || case h.replay_type when 'skipped_flow_member' then '{"groups_reset": 1}' else '{}' end::jsonb)) as i(kind, reason, details)
)
select q.lane_id, q.route_no, h.queue_no, h.place
  from held h
 cross join lateral (
       select l.lane_id, q.route_no from queue q join lane l using (lane_no) where q.queue_no = h.queue_no limit 1) q
 where not h.is_blocked;

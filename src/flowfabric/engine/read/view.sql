-- name: read_state
-- The public state of one execution.
select public_state from execution where partition_key = :partition_key and execution_id = :execution_id;

-- name: read_info
-- The details of one execution for an operator. Here and below the namespace is read by a lateral join: with a plain join,
-- a plan made while the table is empty scans a whole index that starts with namespace_no.
select n.namespace, l.lane_id, e.priority, e.execution_kind, e.lifecycle_phase, e.ownership_state, e.eligibility_state,
       e.blocking_reason, e.terminal_outcome, e.attempt_state, e.public_state, e.created_at, e.started_at, e.completed_at,
       greatest(e.attempt_count - 1, 0) as attempt_index, e.flow_id, e.blocking_detail
  from execution_detail e
  left join lateral (select n.namespace from namespace n where n.namespace_no = e.namespace_no limit 1) n on true
  left join lane l on l.lane_no = e.lane_no
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_status
-- The state, progress, result and failure of one execution. The failure is that of the execution itself, which is the
-- failure of its latest attempt unless it ended while waiting for the next one. Without one, it is the failure of the last
-- attempt that was retried.
select n.namespace, l.lane_id, e.execution_kind, e.public_state, greatest(e.attempt_count - 1, 0) as attempt_index,
       e.attempt_count, r.progress_pct, r.progress_message, e.result_payload, e.result_encoding,
       coalesce(e.failure_reason, f.failure_reason) as failure_reason,
       case when e.failure_reason is null then f.failure_category else e.failure_category end as failure_category,
       case when e.failure_reason is null then f.error_type when e.terminal_outcome in ('none', 'failed') then a.error_type end as error_type,
       case when e.failure_reason is null then f.traceback when e.terminal_outcome in ('none', 'failed') then a.traceback end as traceback,
       e.cancellation_reason, case when e.attempt_state = 'pending_retry_attempt' then e.delay_until end as retry_at,
       e.delay_until, e.created_at, e.started_at, e.completed_at
  from execution_detail e
  left join lateral (select n.namespace from namespace n where n.namespace_no = e.namespace_no limit 1) n on true
  left join lane l on l.lane_no = e.lane_no
  left join attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
                     and a.attempt_index = e.attempt_count - 1
  left join lateral (
       select f.failure_reason, f.failure_category, f.error_type, f.traceback
         from attempt f
        where e.failure_reason is null and e.retry_count > 0 and e.terminal_outcome <> 'success'
          and f.partition_key = e.partition_key and f.execution_id = e.execution_id and f.attempt_state = 'ended_failure'
        order by f.attempt_index desc limit 1) f on true
  left join lateral (
       select e.progress_pct, e.progress_message
        where e.progress_updated_at >= coalesce(a.started_at, e.last_claimed_at)) r on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_snapshot
-- A snapshot of one execution with its lease, if any, and its latest suspension.
select e.flow_id, l.lane_id, n.namespace, e.public_state, e.blocking_reason, e.blocking_detail, e.attempt_id, e.attempt_count,
       e.created_at, e.last_mutation_at, e.worker_no, w.worker_instance_id, e.lease_expires_at, e.lease_id, e.lease_epoch,
       e.lease_renewed_at,
       case when s.closed_at is null then s.waitpoint_ids[1] end as waitpoint_id,
       case when s.attempt_index = e.attempt_count - 1 then s.continuation_metadata_pointer end as continuation_metadata_pointer,
       case when e.has_tags then (
         select jsonb_object_agg(t.key, t.value) from execution_tag t
          where t.partition_key = e.partition_key and t.execution_id = e.execution_id) end as tags
  from execution_detail e
  left join lateral (select n.namespace from namespace n where n.namespace_no = e.namespace_no limit 1) n on true
  left join lane l on l.lane_no = e.lane_no
  left join worker_identity w on w.worker_no = e.worker_no
  left join suspension s on s.partition_key = e.partition_key and s.execution_id = e.execution_id
                        and s.suspension_id = e.suspension_id
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_context
-- The input, kind and tags of one execution.
select coalesce(e.input_payload, (
         select i.input_payload from execution_input i
          where i.partition_key = e.partition_key and i.execution_id = e.execution_id)) as input_payload, k.execution_kind,
       case when e.has_tags then (
         select jsonb_object_agg(t.key, t.value) from execution_tag t
          where t.partition_key = e.partition_key and t.execution_id = e.execution_id) end as tags
  from execution e
  left join queue q on q.queue_no = e.queue_no
  left join kind k on k.kind_no = q.kind_no
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_attempt_count
-- The number of attempts of one execution.
select attempt_count from execution where partition_key = :partition_key and execution_id = :execution_id;

-- name: read_flow
-- The flow of one execution.
select flow_id from execution where partition_key = :partition_key and execution_id = :execution_id;

-- name: read_namespace
-- The namespace of one execution.
select n.namespace
  from execution e
  left join lateral (select n.namespace from namespace n where n.namespace_no = e.namespace_no limit 1) n on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_fields
-- The fields of one execution as text. Lease fields are set while there is a lease, pending_ fields while an attempt is
-- pending; failure and progress are those of the latest attempt.
select n.namespace, l.lane_id, l.lane_id as current_lane, e.execution_kind, e.creator_identity, e.payload_encoding,
       e.priority::text as priority, array_to_string(ff_required(c.required), ',') as required_capabilities, e.flow_id::text as flow_id,
       e.lifecycle_phase::text as lifecycle_phase, e.ownership_state::text as ownership_state,
       e.eligibility_state::text as eligibility_state, e.blocking_reason::text as blocking_reason,
       e.terminal_outcome::text as terminal_outcome, e.attempt_state::text as attempt_state,
       e.public_state::text as public_state, e.blocking_detail,
       e.created_at::text as created_at, e.started_at::text as started_at, e.completed_at::text as completed_at,
       e.last_transition_at::text as last_transition_at, e.last_mutation_at::text as last_mutation_at,
       e.delay_until::text as delay_until, e.deadline_at::text as execution_deadline_at,
       e.attempt_timeout_at::text as attempt_timeout_at,
       greatest(e.attempt_count - 1, 0)::text as current_attempt_index, e.attempt_id::text as current_attempt_id,
       e.attempt_type::text as attempt_type, e.attempt_count::text as total_attempt_count,
       e.retry_count::text as retry_count, e.replay_count::text as replay_count, e.reclaim_count::text as lease_reclaim_count,
       e.lease_epoch::text as current_lease_epoch, e.lease_id::text as current_lease_id,
       w.worker_id as current_worker_id, w.worker_instance_id as current_worker_instance_id,
       e.claimed_at::text as lease_acquired_at, e.lease_expires_at::text as lease_expires_at,
       e.lease_renewed_at::text as lease_last_renewed_at, e.lease_expired_at::text as lease_expired_at,
       e.lease_revoked_at::text as lease_revoked_at, e.lease_revoke_reason,
       case when e.attempt_state not in ('running_attempt', 'attempt_interrupted') then e.failure_reason end as failure_reason,
       e.cancellation_reason, e.cancelled_by,
       p.retry_reason as pending_retry_reason, p.replay_reason as pending_replay_reason,
       p.replay_requested_by as pending_replay_requested_by, p.previous_attempt_index::text as pending_previous_attempt_index,
       r.progress_pct::text as progress_pct, r.progress_message, r.progress_updated_at::text as progress_updated_at,
       e.last_capability_mismatch_at::text as last_capability_mismatch_at,
       e.last_hmac_validation_failed_at::text as last_hmac_validation_failed_at,
       s.suspension_id::text as current_suspension_id, s.waitpoint_ids[1]::text as current_waitpoint_id,
       s.timeout_at::text as suspension_timeout_at
  from execution_detail e
  left join lateral (select n.namespace from namespace n where n.namespace_no = e.namespace_no limit 1) n on true
  left join lane l on l.lane_no = e.lane_no
  left join queue q on q.queue_no = e.queue_no
  left join route t on t.route_no = q.route_no
  left join capability_set c on c.capability_set_no = t.capability_set_no
  left join worker_identity w on w.worker_no = e.worker_no
  left join attempt p on p.partition_key = e.partition_key and p.execution_id = e.execution_id
                     and p.attempt_index = e.attempt_count
                     and e.attempt_state in ('pending_retry_attempt', 'pending_replay_attempt')
  left join suspension s on s.partition_key = e.partition_key and s.execution_id = e.execution_id
                        and s.suspension_id = e.suspension_id and s.closed_at is null
  left join attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
                     and a.attempt_index = e.attempt_count - 1
  left join lateral (
       select e.progress_pct, e.progress_message, e.progress_updated_at
        where e.progress_updated_at >= coalesce(a.started_at, e.last_claimed_at)) r on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: list_attempts
-- The attempts of one execution in order, the running one included.
select a.attempt_index, a.attempt_id, a.attempt_type, a.attempt_state, a.started_at, a.suspended_at, a.resumed_at, a.ended_at,
       a.lease_id, a.lease_epoch, w.worker_id, w.worker_instance_id, a.failure_reason, a.failure_category,
       a.previous_attempt_index, a.retry_reason, a.reclaim_reason, a.replay_reason, a.replay_requested_by,
       a.suspension_marker, a.suspension_id, a.usage, a.policy, a.error_type, a.traceback
  from attempt_all a
  left join worker_identity w on w.worker_no = a.worker_no
 where a.partition_key = :partition_key and a.execution_id = :execution_id
 order by a.attempt_index;

-- name: read_result
-- The result of one completed execution.
select coalesce(e.result_payload, (
         select r.result_payload from execution_result r
          where r.partition_key = e.partition_key and r.execution_id = e.execution_id)) as result_payload
  from execution e
 where e.partition_key = :partition_key and e.execution_id = :execution_id and e.terminal_outcome = 'success';

-- name: read_clock
-- The clock of the engine.
select ff_now() as now;

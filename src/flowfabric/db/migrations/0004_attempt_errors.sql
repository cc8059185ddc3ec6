-- compatible: yes
-- The exception that a failed attempt ended with: its type and its traceback.

-- The error of the latest attempt of a failed execution is on a row of attempt in the state created; the other fields of that
-- attempt are on the row of the execution.
alter table attempt add column error_type text, add column traceback text;

create or replace view attempt_all as
  select partition_key, execution_id, attempt_index, attempt_id, attempt_type, attempt_state, started_at, suspended_at,
         resumed_at, ended_at, lease_id, lease_epoch, worker_no, failure_reason, failure_category, previous_attempt_index,
         retry_reason, reclaim_reason, replay_reason, replay_requested_by, suspension_marker, suspension_id, usage, policy,
         error_type, traceback
    from attempt
   where ended_at is not null
  union all
  -- The latest attempt, unless its row in attempt has ended: then the execution waits, or ended waiting, for the next attempt.
  select e.partition_key, e.execution_id, e.attempt_count - 1, coalesce(e.attempt_id, e.lease_id), e.attempt_type,
         case
           when e.lifecycle_phase = 'active' then 'started'
           when e.lifecycle_phase <> 'terminal' then 'suspended'
           when e.terminal_outcome = 'success' then 'ended_success'
           when e.terminal_outcome = 'cancelled' then 'ended_cancelled'
           else 'ended_failure' end::attempt_lifecycle,
         coalesce(a.started_at, e.claimed_at), a.suspended_at,
         case when e.lease_id is not null and a.suspended_at is not null then e.claimed_at else a.resumed_at end,
         case when e.lifecycle_phase = 'terminal' then e.last_transition_at end,
         coalesce(e.lease_id, a.lease_id), e.lease_epoch, case when e.lease_id is not null then e.worker_no else a.worker_no end,
         case
           when e.lifecycle_phase <> 'terminal' then null
           when e.terminal_outcome = 'cancelled' then 'cancelled: ' || e.cancellation_reason
           else e.failure_reason end,
         case when e.lifecycle_phase = 'terminal' then e.failure_category end,
         a.previous_attempt_index, a.retry_reason, a.reclaim_reason, a.replay_reason, a.replay_requested_by,
         case when e.lifecycle_phase in ('runnable', 'suspended') then a.suspension_marker end,
         case when e.lifecycle_phase in ('runnable', 'suspended') then a.suspension_id end, a.usage, a.policy, a.error_type,
         a.traceback
    from execution e
    left join attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
                       and a.attempt_index = e.attempt_count - 1
   where coalesce(e.attempt_id, e.lease_id) is not null and a.ended_at is null;

-- name: list_buffered_signals
-- The signals that were sent to a waitpoint before the suspend, in the order they were accepted.
select signal_id, signal_name, waitpoint_key, source_type, source_identity, accepted_at
  from signal
 where partition_key = :partition_key and waitpoint_id = :waitpoint_id
 order by sequence;

-- name: insert_suspensions
-- Inserts the suspensions of executions that the transaction has locked, their new waitpoints, and their outcomes under
-- their idempotency keys, if any. Returns how many waitpoints were inserted: ids in use are skipped. A suspension replaces
-- an earlier one of the same execution with the same id; one with a satisfied_at is inserted closed. Arrays of ids are passed
-- as text, because unnest would flatten an array of arrays.
with stored as (
  insert into suspension (partition_key, execution_id, suspension_id, attempt_index, waitpoint_ids, namespace_no, lane_no,
                          reason_code, requested_by, suspended_at, timeout_at, timeout_behavior, condition, resume_policy,
                          continuation_metadata_pointer, satisfier_ids, satisfied_at, closed_at, close_reason, last_signal_at)
  select i.partition_key, i.execution_id, i.suspension_id, i.attempt_index, i.waitpoint_ids::uuid[], i.namespace_no, i.lane_no,
         i.reason_code, i.requested_by, :now, i.timeout_at, i.timeout_behavior, i.condition, i.resume_policy,
         i.pointer, i.satisfier_ids::uuid[], i.satisfied_at, i.satisfied_at, i.close_reason, i.last_signal_at
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :suspension_ids::uuid[], :attempt_indexes::int[],
                :waitpoint_ids::text[], :namespace_nos::int[], :lane_nos::int[], :reason_codes::text[], :requesters::text[],
                :timeouts_at::bigint[], :timeout_behaviors::text[], :conditions::jsonb[], :resume_policies::jsonb[],
                :pointers::text[], :satisfier_ids::text[], :satisfied_ats::bigint[], :close_reasons::text[],
                :last_signals_at::bigint[])
         as i(partition_key, execution_id, suspension_id, attempt_index, waitpoint_ids, namespace_no, lane_no, reason_code,
              requested_by, timeout_at, timeout_behavior, condition, resume_policy, pointer, satisfier_ids, satisfied_at,
              close_reason, last_signal_at)
  on conflict (partition_key, execution_id, suspension_id) do update
     set attempt_index = excluded.attempt_index, waitpoint_ids = excluded.waitpoint_ids,
         namespace_no = excluded.namespace_no, lane_no = excluded.lane_no, reason_code = excluded.reason_code,
         requested_by = excluded.requested_by, suspended_at = excluded.suspended_at, timeout_at = excluded.timeout_at,
         timeout_behavior = excluded.timeout_behavior, condition = excluded.condition, resume_policy = excluded.resume_policy,
         continuation_metadata_pointer = excluded.continuation_metadata_pointer, satisfier_ids = excluded.satisfier_ids,
         satisfied_at = excluded.satisfied_at, closed_at = excluded.closed_at, close_reason = excluded.close_reason,
         last_signal_at = excluded.last_signal_at
),
inserted as (
  insert into waitpoint (partition_key, waitpoint_id, execution_id, attempt_index, suspension_id, waitpoint_key, token_kid,
                              token, state, required_signal_names, created_at, activated_at, expires_at)
  select i.partition_key, i.waitpoint_id, i.execution_id, i.attempt_index, i.suspension_id, i.waitpoint_key, i.token_kid,
         i.token, 'active', array(select jsonb_array_elements_text(i.required_signal_names)), :now, :now, i.timeout_at
    from unnest(:fresh_partitions::smallint[], :fresh_ids::uuid[], :fresh_executions::uuid[], :fresh_attempts::int[],
                :fresh_suspensions::uuid[], :fresh_keys::text[], :fresh_kids::text[], :fresh_tokens::text[],
                :fresh_names::jsonb[], :fresh_timeouts_at::bigint[])
         as i(partition_key, waitpoint_id, execution_id, attempt_index, suspension_id, waitpoint_key, token_kid, token,
              required_signal_names, timeout_at)
   order by i.partition_key, i.waitpoint_id
  on conflict (partition_key, waitpoint_id) do nothing
  returning 1
),
outcomes as (
  insert into idempotency_key (partition_key, operation, scope, key, expires_at, subject_partition, subject_id,
                               attempt_index, outcome)
  select i.partition_key, 'suspend', i.execution_id, i.key, i.expires_at, i.partition_key, i.execution_id, i.attempt_index,
         i.outcome
    from unnest(:outcome_partitions::smallint[], :outcome_executions::uuid[], :outcome_keys::text[], :outcome_attempts::int[],
                :outcomes::jsonb[], :outcome_expiries::bigint[])
         as i(partition_key, execution_id, key, attempt_index, outcome, expires_at)
  on conflict (partition_key, operation, scope, key) do update
     set attempt_index = excluded.attempt_index, outcome = excluded.outcome, expires_at = excluded.expires_at
)
select count(*) as inserted from inserted;

-- name: activate_waitpoint
-- Binds a pending waitpoint and its stored signals to a suspension. If the signals satisfy the condition already, the
-- waitpoint is closed and the suspension becomes the latest of its execution. Returns no row if the waitpoint is not pending.
with bound as (
  update waitpoint
     set state = case when :satisfied_at::bigint is null then 'active'::waitpoint_state else 'closed' end,
         suspension_id = :suspension_id, required_signal_names = :required_signal_names,
         activated_at = case when :satisfied_at is null then :now::bigint end,
         expires_at = case when :satisfied_at is null then :timeout_at::bigint else expires_at end,
         satisfied_at = :satisfied_at, closed_at = :satisfied_at, close_reason = :close_reason,
         matched_signal_count = :matched_signal_count
   where partition_key = :partition_key and waitpoint_id = :waitpoint_id and state = 'pending'
  returning waitpoint_id
),
latest as (
  update execution set suspension_id = :suspension_id
   where :satisfied_at is not null and partition_key = :partition_key and execution_id = :execution_id
),
bound_signals as (
  update signal set suspension_id = :suspension_id
   where partition_key = :partition_key and waitpoint_id = :waitpoint_id and suspension_id is null
)
select waitpoint_id from bound;

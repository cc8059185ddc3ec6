-- name: list_results
-- One row for each given execution that has ended, with its outcome, result and error, and for each that does not exist, with
-- the outcome null.
select i.nth, e.terminal_outcome,
       coalesce(e.result_payload, case when e.terminal_outcome = 'success' then (
         select r.result_payload from execution_result r
          where r.partition_key = i.partition_key and r.execution_id = i.execution_id) end) as result_payload, e.result_encoding,
       coalesce(e.failure_reason, e.cancellation_reason) as reason,
       -- Not a join, which would also read the attempts of executions that succeeded.
       case when e.terminal_outcome = 'failed' then (
         select array[a.error_type, a.traceback] from attempt a
          where a.partition_key = i.partition_key and a.execution_id = i.execution_id and a.attempt_index = e.attempt_count - 1) end as error
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
  left join lateral (
       select e.execution_id, e.lifecycle_phase, e.terminal_outcome, e.result_payload, e.result_encoding, e.failure_reason,
              e.cancellation_reason, e.attempt_count
         from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e on true
 where e.execution_id is null or e.lifecycle_phase = 'terminal';

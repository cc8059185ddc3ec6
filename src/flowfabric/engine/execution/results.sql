-- name: list_endings
-- Of the named executions those that have ended, with their outcome and result; absent ones show an outcome of null.
select i.nth, e.terminal_outcome, a.result_payload, a.result_encoding,
       coalesce(e.failure_reason, e.cancellation_reason) as reason
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
  left join execution e using (partition_key, execution_id)
  left join attempt a on e.terminal_outcome = 'success' and a.partition_key = e.partition_key
                     and a.execution_id = e.execution_id and a.attempt_index = e.attempt_count - 1
 where e.execution_id is null or e.lifecycle_phase = 'terminal';
